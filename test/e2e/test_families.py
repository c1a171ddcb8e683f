"""Every routing path of the CPU engine, end to end, against transformers' routers.

The models are random and tiny; mismatches allowed: none. Engine and reference round differently.
Their log-probabilities say by how much, and that must be far less than the smallest distance by
which any choice was won: no tie is excluded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from sglang.srt.layers.moe.routed_experts.wire import extract_routed_experts_from_meta_info
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.engines import EngineFailed, Engines, generate
from sglang.test.routed_experts.families import (
    FAMILIES,
    LAYERS,
    VOCABULARY,
    Family,
    fuse_shared_experts,
    leave_a_layer_to_transformers,
    make_adapter,
    make_family,
)
from sglang.test.routed_experts.router_probe import RouterProbe

NEW_TOKENS = 12
SEED = 2  # of the prompts: so chosen that no choice is close


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
    model = make_family(tmp_path / "model", FAMILIES[name])
    check(FAMILIES[name], model, engines, tmp_path)


def test_mixtral_for_quantized_weights(engines: Engines, tmp_path: Path) -> None:
    """Its block chooses by itself. It also runs weights that are not quantized."""
    model = make_family(tmp_path / "model", FAMILIES["mixtral"])
    change_config(tmp_path / "model", architectures=["QuantMixtralForCausalLM"], head_dim=16)
    check(FAMILIES["mixtral"], model, engines, tmp_path)


@pytest.mark.parametrize("name", ["qwen2-moe", "olmoe", "glm4-moe"])
def test_models_run_by_transformers_code(name: str, engines: Engines, tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", FAMILIES[name])
    check(FAMILIES[name], model, engines, tmp_path, model_impl="transformers")


def test_layers_that_cannot_be_captured_are_named_at_start_up(
    engines: Engines, tmp_path: Path
) -> None:
    """transformers' Granite keeps its own experts, which SGLang does not see."""
    make_family(tmp_path / "model", FAMILIES["granite-moe"])
    with pytest.raises(EngineFailed) as failure:
        engines.run(
            tmp_path / "model", generate, [], log=tmp_path / "log", model_impl="transformers"
        )
    assert "--enable-return-routed-experts cannot capture" in str(failure.value)
    for layer in range(LAYERS):
        assert f"model.layers.{layer}.block_sparse_moe." in str(failure.value)


def test_a_single_layer_that_cannot_be_captured_is_named(engines: Engines, tmp_path: Path) -> None:
    """Its rows would be zeros, beside right ones for the other layers."""
    make_family(tmp_path / "model", FAMILIES["qwen2-moe"])
    with pytest.raises(EngineFailed) as failure:
        engines.run(
            tmp_path / "model",
            generate,
            [],
            log=tmp_path / "log",
            model_impl="transformers",
            before=leave_a_layer_to_transformers,
        )
    assert "model.layers.2.mlp.experts: its routing does not go" in str(failure.value)
    assert "model.layers.1." not in str(failure.value).partition("cannot capture")[2]


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_columns_of_fused_shared_experts_are_dropped(
    name: str, engines: Engines, tmp_path: Path
) -> None:
    model = make_family(tmp_path / "model", FAMILIES[name])
    check(FAMILIES[name], model, engines, tmp_path, before=fuse_shared_experts)
    assert "shared experts are fused" in (tmp_path / "engine.log").read_text()


def test_chunks_mixed_with_decode_steps(engines: Engines, tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", FAMILIES["olmoe"])
    mixed = {"enable_mixed_chunk": True, "chunked_prefill_size": 16}
    check(FAMILIES["olmoe"], model, engines, tmp_path, **mixed)


def test_rows_are_those_of_the_adapter_that_a_request_uses(
    engines: Engines, tmp_path: Path
) -> None:
    """The same prompts with and without it in one batch: they share no prefix in the cache."""
    probes = [RouterProbe(make_family(tmp_path / "model", FAMILIES["mixtral"])) for _ in range(2)]
    make_adapter(tmp_path / "adapter", probes[1].model)
    asked = prompts()
    adapters = [None] * len(asked) + ["tuned"] * len(asked)
    (outputs,) = engines.run(
        tmp_path / "model",
        generate,
        [request(asked + asked, lora_path=adapters)],
        log=tmp_path / "engine.log",
        lora_paths={"tuned": str(tmp_path / "adapter")},
        lora_backend="torch_native",
        max_loras_per_batch=2,
    )
    compare(probes[0], asked, outputs[: len(asked)], FAMILIES["mixtral"])
    compare(probes[1], asked, outputs[len(asked) :], FAMILIES["mixtral"])
    plain, tuned = rows_of(outputs[-1 - len(asked)]), rows_of(outputs[-1])
    assert (np.sort(plain) != np.sort(tuned)).mean() > 0.1


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(family: Family, model: nn.Module, engines: Engines, folder: Path, **options: Any) -> None:
    """All rows of some prompts, asked twice of an engine of `folder/model`, against `model`'s."""
    probe, asked = RouterProbe(model), prompts()
    rounds = engines.run(
        folder / "model", generate, [request(asked)] * 2, log=folder / "engine.log", **options
    )
    for outputs in rounds:  # the second finds its prompts in the prefix cache
        compare(probe, asked, outputs, family)


def compare(
    probe: RouterProbe, asked: list[list[int]], outputs: list[dict[str, Any]], family: Family
) -> None:
    tally, drift, seen = Tally(), 0.0, set()
    for prompt, output in zip(asked, outputs):
        expected, expected_logprobs = probe.route(prompt + output["output_ids"])
        rows = rows_of(output)
        assert rows.shape == (len(prompt) + NEW_TOKENS - 1, LAYERS, family.top_k)
        assert not rows[:, : family.dense].any()
        tally.add(rows, expected)
        ours = log_probabilities(output)
        drift = max(drift, float(np.abs(ours - expected_logprobs[-len(ours) :]).max()))
        seen |= set(rows[:, family.dense :].flatten().tolist())

    assert tally.mismatches == 0, tally
    assert seen == set(range(family.experts))
    assert drift < probe.margin / 4, f"{drift=} is too much for a {probe.margin=}: no proof"
