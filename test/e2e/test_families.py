"""Every routing path of the CPU engine, end to end, against transformers' routers on the same weights.

The models are random and tiny; mismatches allowed: none. Engine and reference round differently. Their log-probabilities
say by how much, and that must be far less than the smallest distance by which any choice was won: no tie is excluded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.moe.routed_experts.wire import extract_routed_experts_from_meta_info
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.engines import Engines, generate
from sglang.test.routed_experts.families import FAMILIES, LAYERS, VOCABULARY, make_family
from sglang.test.routed_experts.router_probe import RouterProbe

NEW_TOKENS = 12
SEED = 2  # of the prompts: so chosen that no choice is close


@pytest.fixture(scope="module")
def engines() -> Engines:
    torch.set_num_threads(1)
    return Engines()


def prompts(lengths: Sequence[int] = (1, 5, 17, 40, 63, 64, 65, 100)) -> list[list[int]]:
    """Up to and past the ends of chunks of 64 tokens."""
    rng = random.Random(SEED)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def request(tokens: Any, **options: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
        },
        "return_routed_experts": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    } | options


def rows_of(output: dict[str, Any]) -> np.ndarray:
    info = output["meta_info"]["routed_experts_info"]
    return extract_routed_experts_from_meta_info(output).reshape(info["shape"])


def log_probabilities(output: dict[str, Any]) -> np.ndarray:
    meta = output["meta_info"]
    prompt, completion = meta["input_token_logprobs"], meta["output_token_logprobs"]
    return np.array([entry[0] for entry in prompt[1:] + completion])


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_the_choices_of_transformers(name: str, engines: Engines, tmp_path: Path) -> None:
    family = FAMILIES[name]
    probe = RouterProbe(make_family(tmp_path / name, family))
    asked = prompts()
    (outputs,) = engines.run(
        tmp_path / name, generate, [request(asked)], log=tmp_path / "engine.log"
    )

    tally, drift, seen = Tally(), 0.0, set()
    for prompt, output in zip(asked, outputs):
        expected, expected_logprobs = probe.route(prompt + output["output_ids"])
        rows = rows_of(output)
        assert rows.shape == (len(prompt) + NEW_TOKENS - 1, LAYERS, family.top_k)
        assert not rows[:, : family.dense].any()
        tally.add(rows, expected)
        drift = max(drift, float(np.abs(log_probabilities(output) - expected_logprobs).max()))
        seen |= set(rows[:, family.dense :].flatten().tolist())

    assert tally.mismatches == 0, tally
    assert seen == set(range(family.experts))
    assert drift < probe.margin / 4, f"{drift=} is too much for a {probe.margin=}: no proof"
