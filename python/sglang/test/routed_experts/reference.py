"""The reference: transformers' own Qwen3-MoE on the same weights, no code of the engine's."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging

_TOKENS_AT_ONCE = 16384


class TransformersRouter:
    """Chooses experts for given tokens, in float32 on the CPU.

    Args:
        model: folder with config and weights.
    """

    def __init__(self, model: Path) -> None:
        logging.disable_progress_bar()
        loaded = Qwen3MoeForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        self._model = loaded.model.eval()
        self._top_k: int = loaded.config.num_experts_per_tok

    def route(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The choices for all but the last token of each: int32 [tokens - 1, layers, top_k].

        The last token was sampled and never forwarded, so no engine has a row for it.
        """
        routed: list[np.ndarray] = [np.empty(0)] * len(sequences)
        by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a second one gains nothing on a model this small
        try:
            for batch in _batches(by_length, sequences):
                for i, rows in zip(batch, self._forward([sequences[i][:-1] for i in batch])):
                    routed[i] = rows
        finally:
            torch.set_num_threads(threads)
        return routed

    @torch.inference_mode()
    def _forward(self, batch: list[Sequence[int]]) -> Iterator[np.ndarray]:
        longest = max(map(len, batch))
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        real = torch.zeros_like(tokens)
        for i, sequence in enumerate(batch):
            tokens[i, : len(sequence)] = torch.tensor(sequence)
            real[i, : len(sequence)] = 1
        # Padding comes last, and attention is causal: it cannot be seen from the real tokens.
        output = self._model(
            input_ids=tokens, attention_mask=real, output_router_logits=True, use_cache=False
        )
        layers = [x.topk(self._top_k, dim=-1).indices for x in output.router_logits]
        ids = torch.stack(layers, dim=1).reshape(len(batch), longest, len(layers), -1)
        for i, sequence in enumerate(batch):
            yield ids[i, : len(sequence)].to(torch.int32).numpy()


def _batches(order: Iterable[int], sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Groups of sequences of at most `_TOKENS_AT_ONCE` tokens with their padding."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * len(sequences[i]) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
