"""What transformers' routers choose, read from the routers: some families return no logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class RouterProbe:
    """Listens to the routers of a transformers model.

    Args:
        model: in evaluation mode. It is changed: hooks are hung on its routers.

    Attributes:
        margin: the smallest distance by which any choice so far was won, in router scores (logits,
            or biased sigmoids). Engines whose scores differ by less than half of it choose alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._config = model.config.get_text_config()
        self._top_k: int = self._config.num_experts_per_tok
        self._layers: int = self._config.num_hidden_layers
        self._chosen: dict[int, torch.Tensor] = {}  # int64 [tokens, top_k] of one forward
        self.margin = float("inf")
        for layer, block in enumerate(model.get_decoder().layers):
            for module in block.modules():
                self._listen(layer, module)

    @torch.inference_mode()
    def route(self, tokens: Sequence[int], **inputs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Forward all but the last token: it was sampled and never forwarded, so it has no row.

        Args:
            inputs: what else the model reads: the pixels of images that tokens stand for.

        Returns:
            Rows, int32 [tokens - 1, layers, top_k], zeros in dense layers; and the log-probability
            of each next token, float32 [tokens - 1].
        """
        self._chosen.clear()
        ids = torch.tensor([tokens])
        output = self.model(input_ids=ids[:, :-1], use_cache=False, **inputs)
        logits = output.logits[0].float()
        rows = np.zeros((len(tokens) - 1, self._layers, self._top_k), np.int32)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen.numpy()
        following = ids[0, 1:, None]
        return rows, logits.log_softmax(dim=-1).gather(1, following)[:, 0].numpy()

    def _listen(self, layer: int, module: nn.Module) -> None:
        name = type(module).__name__
        if name.endswith("TopKRouter"):  # returns (logits or probabilities, weights, ids)
            module.register_forward_hook(
                lambda router, inputs, output: self._plain(
                    layer, _logits(router, inputs[0]), output[2]
                )
            )
        elif name.endswith("TopKGating"):  # Granite's: sorts tokens by expert, returns logits last
            module.register_forward_hook(
                lambda router, inputs, output: self._plain(
                    layer, output[-1], output[-1].topk(self._top_k, dim=-1).indices
                )
            )
        elif hasattr(module, "route_tokens_to_experts"):  # DeepSeek's and GLM's
            # transformers 5.3 forgets to set it for V2, and reads it with groups
            module.num_experts = self._config.n_routed_experts
            route = module.route_tokens_to_experts

            def routed(logits: torch.Tensor) -> Any:
                output = route(logits)
                self._grouped(layer, module, logits.flatten(0, -2), output[0])
                return output

            module.route_tokens_to_experts = routed

    def _plain(self, layer: int, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        self._chosen[layer] = chosen
        self._won(logits, self._top_k)

    def _grouped(
        self, layer: int, module: nn.Module, logits: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        self._chosen[layer] = chosen
        config = self._config
        bias = getattr(getattr(module, "gate", None), "e_score_correction_bias", None)
        scores = logits if bias is None else logits.sigmoid() + bias
        grouped = scores.unflatten(-1, (config.n_group, -1))
        in_group = 1 if bias is None else 2  # how many of its experts speak for a group
        group_scores = grouped.topk(in_group, dim=-1).values.sum(dim=-1)
        self._won(group_scores, config.topk_group)
        groups = group_scores.topk(config.topk_group, dim=-1).indices
        left = torch.full_like(grouped, -torch.inf)
        index = groups[..., None].expand(-1, -1, grouped.shape[-1])
        left.scatter_(1, index, grouped.gather(1, index))
        self._won(left.flatten(1), self._top_k)

    def _won(self, scores: torch.Tensor, winners: int) -> None:
        if winners < scores.shape[-1]:
            ordered = scores.float().sort(dim=-1, descending=True).values
            self.margin = min(
                self.margin, float((ordered[:, winners - 1] - ordered[:, winners]).min())
            )


def _logits(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(
        hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None)
    )
