"""EAGLE's workers that run ahead of the scheduler, on the CPU engine: rows of what the target verified.

Against transformers and against an engine without drafts: greedy, so both say the same. The kernels
that the base has for CUDA alone are in torch here (cpu_drafts.py); test/gpu/speculative.py has the rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.srt.layers.moe.routed_experts.wire import decode_routed_experts
from sglang.test.routed_experts import drafts
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.cpu_drafts import speculate_on_cpu
from sglang.test.routed_experts.engines import Engines, generate
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.tiny_moe import Shape

SHAPE = Shape(layers=7, experts=16, recall=0.25)  # EAGLE3 looks at three layers of seven or more
CHAIN = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """target, draft: names of models; accepted: whether the target takes most of what it proposes."""

    target: str
    draft: str
    accepted: bool
    algorithm: str = "EAGLE"


CASES = {
    "dense draft, mostly accepted": Case("qwen3", "echo", True),
    "dense draft, mostly rejected": Case("qwen3", "random", False),
    "EAGLE3, mostly rejected": Case("qwen3", "eagle3", False, "EAGLE3"),
    "MoE draft": Case("qwen3", "glm4", True),
    "MoE target with a MoE layer that drafts": Case("glm4", "glm4", True, "NEXTN"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return drafts.make_models(tmp_path_factory.mktemp("speculative"), SHAPE)


def batch(prompts: list[list[int]], sampling: list[dict[str, Any]]) -> dict[str, Any]:
    """One call of Engine.generate: greedy requests, all at once; every fourth asks for no rows."""
    return {
        "input_ids": prompts,
        "sampling_params": [{"temperature": 0} | each for each in sampling],
        "return_routed_experts": [i % 4 != 3 for i in range(len(prompts))],
    }


@dataclass(frozen=True)
class Plain:
    """What an engine without drafts says, and what the engines with drafts are asked after that."""

    calls: list[dict[str, Any]]
    tokens: list[list[list[int]]]  # by call and request


@pytest.fixture(scope="module")
def plain(
    models: dict[str, Path], engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Plain:
    log = tmp_path_factory.mktemp("plain") / "log"
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in (1, 2, 9, 40, 63, 64, 65, 130)]
    first = batch(prompts, [{"max_new_tokens": NEW_TOKENS, "ignore_eos": True}] * len(prompts))
    (answers,) = engines.run(models["qwen3"], generate, [first], log=log, context_length=4096)
    tokens = [answer["output_ids"] for answer in answers]
    turns = [prompt + said + [7, 8, 9] for prompt, said in zip(prompts, tokens)]
    second = batch(turns, [{"max_new_tokens": 9, "ignore_eos": True}] * len(turns))
    ends = [(i, k) for i in range(len(prompts)) for k in range(1, 14, 2)]
    lengths = batch([prompts[i] for i, _ in ends], [{"max_new_tokens": k} for _, k in ends])
    new = [(i, k) for i, k in ends if tokens[i][k] not in tokens[i][:k]]
    stops = batch(
        [prompts[i] for i, _ in new],
        [{"max_new_tokens": NEW_TOKENS, "stop_token_ids": [tokens[i][k]]} for i, k in new],
    )
    calls = [first, second, lengths, stops]
    all_answers = engines.run(models["qwen3"], generate, calls, log=log, context_length=4096)
    said = [[answer["output_ids"] for answer in answers] for answers in all_answers]
    assert said[0] == tokens
    assert said[2] == [tokens[i][:k] for i, k in ends]
    assert said[3] == [tokens[i][: k + 1] for i, k in new]
    return Plain(calls, said)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_verified_tokens(
    name: str, models: dict[str, Path], plain: Plain, engines: Engines, tmp_path: Path
) -> None:
    case = CASES[name]
    answers = engines.run(
        models[case.target],
        generate,
        plain.calls,
        log=tmp_path / "log",
        before=speculate_on_cpu,
        speculative_algorithm=case.algorithm,
        speculative_draft_model_path=str(models[case.draft]),
        context_length=4096,
        **CHAIN,
    )
    said = [[answer["output_ids"] for answer in call] for call in answers]
    assert said == plain.tokens
    tally, steps, tokens, ended_inside = Tally(), 0, 0, 0
    sequences, rows = [], []
    for call, outputs in zip(plain.calls, answers):
        for prompt, asked, output in zip(call["input_ids"], call["return_routed_experts"], outputs):
            meta = output["meta_info"]
            assert ("routed_experts" in meta) == asked
            if asked:
                sequences.append(prompt + output["output_ids"])
                rows.append(decode_routed_experts(meta))
            verified = meta.get("spec_verify_ct", 0)
            steps, tokens = steps + verified, tokens + (meta["completion_tokens"] - 1)
            over = 1 + verified + meta.get("spec_accept_token_num", 0) - meta["completion_tokens"]
            ended_inside += over > 0
    for found, expected in zip(rows, TransformersRouter(models["qwen3"]).route(sequences)):
        assert found.shape == expected.shape
        tally.add(found.astype(np.int32), expected)
    assert tally.mismatches == 0, f"{tally}"
    assert (tokens / steps > 1.5) == case.accepted, f"{tokens / steps:.2f} tokens a step"
    assert ended_inside > 10 or not case.accepted
    assert all(output["meta_info"]["cached_tokens"] > NEW_TOKENS for output in answers[1][4:])


def test_requests_that_were_retracted(
    models: dict[str, Path], engines: Engines, tmp_path: Path
) -> None:
    """The pool holds half of what they need: some are recomputed, and keep what they had earned."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 200) for _ in range(40)] for _ in range(8)]
    call = batch(prompts, [{"max_new_tokens": 120, "ignore_eos": True}] * len(prompts))
    call["return_routed_experts"] = [True] * len(prompts)
    (answers,) = engines.run(
        models["qwen3"],
        generate,
        [call],
        log=tmp_path / "log",
        before=speculate_on_cpu,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(models["echo"]),
        context_length=4096,
        max_total_tokens=700,
        schedule_conservativeness=0.01,
        **CHAIN,
    )
    assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 2
    sequences = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers)]
    tally = Tally()
    for answer, expected in zip(answers, TransformersRouter(models["qwen3"]).route(sequences)):
        tally.add(decode_routed_experts(answer["meta_info"]).astype(np.int32), expected)
    assert tally.mismatches == 0, f"{tally}"
