"""The trainer's side: transformers' Qwen3-MoE, in which every token takes the engine's routes (R3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM


@contextmanager
def replayed(model: Qwen3MoeForCausalLM, experts: torch.Tensor) -> Iterator[None]:
    """Within, one forward of `model` over one sequence sends token i to `experts[i]`.

    How much each expert counts stays the trainer's: its router's softmax over the replayed choice,
    through which gradients flow. Tokens behind the last row choose for themselves.

    Args:
        experts: int64 [rows, layers, top_k].
    """
    hooks = [
        layer.mlp.gate.register_forward_hook(partial(_choose, experts[:, i]))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")  # dense layers have none, and zeros for rows
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _choose(
    chosen: torch.Tensor,
    router: nn.Module,
    inputs: tuple[torch.Tensor],
    output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A router's output (logits, weights, ids), with `chosen` [rows, top_k] in place of its ids."""
    first, weights, own = output
    ids = torch.cat([chosen.to(own), own[len(chosen) :]])
    logits = functional.linear(inputs[0].reshape(-1, router.weight.shape[1]), router.weight)
    scores = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, ids)
    if router.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return first, scores.to(weights.dtype), ids


def completion_logprobs(
    model: Qwen3MoeForCausalLM, tokens: torch.Tensor, completion: int, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities, float32 [completion], of the last `completion` of `tokens` [tokens]."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, -completion - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, tokens[-completion:, None])[:, 0]
