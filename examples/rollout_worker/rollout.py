"""A rollout worker: completions with log-probabilities and routed experts, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import requests
import torch

from sglang.srt.layers.moe.routed_experts_capturer import decode_routed_experts


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        tokens: int64 [prompt + completion].
        logprobs: float32 [completion], of the engine, at the temperature that it sampled with.
        experts: int64 [prompt + completion - 1, layers, top_k]: row i is the routing of token i.
            The last token was sampled and never forwarded, so it has none.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    experts: torch.Tensor


def rollout(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 1.0
) -> list[Sample]:
    """Complete a batch of prompts on the server at `url`.

    Args:
        prompts: token ids.
        new_tokens: at most so many a completion.

    Raises:
        requests.HTTPError: the server refused, for example because it was started without
            --enable-return-routed-experts.
        ValueError: the server could not capture some rows; the message says why.
    """
    response = requests.post(
        f"{url}/generate",
        json={
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": temperature},
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_dtype": "auto",
        },
        timeout=3600,
    )
    if not response.ok:
        raise requests.HTTPError(f"{response.status_code}: {response.text}", response=response)
    return [_sample(prompt, answer) for prompt, answer in zip(prompts, response.json())]


def _sample(prompt: Sequence[int], answer: dict) -> Sample:
    meta = answer["meta_info"]
    logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    return Sample(
        tokens=torch.tensor([*prompt, *answer["output_ids"]]),
        logprobs=torch.tensor(logprobs),
        experts=torch.from_numpy(decode_routed_experts(meta).astype("int64")),
    )
