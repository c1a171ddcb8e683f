"""EPLB on two ranks of the CPU engine: ids stay logical while experts move between the ranks.

With replicas, static and dynamic dispatch, before and after each rebalance. The model's experts write nothing: without
an all-to-all back end every rank chooses a replica by itself in the base, so that what experts write is not to be relied on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.layers.moe.routed_experts.wire import extract_routed_experts_from_meta_info
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.engines import Engines, generate
from sglang.test.routed_experts.exact_families import EXACT_FAMILIES, ExactModel, make_exact
from sglang.test.routed_experts.families import let_eplb_run_on_the_cpu

ROUNDS, EVERY = 3, 12  # forwards between two rebalances; a round has more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExactModel:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    return make_exact(folder, EXACT_FAMILIES["deepseek-v3-64"], dtype="float32")


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines()


@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_ids_are_logical_before_and_after_a_rebalance(
    algorithm: str, model: ExactModel, engines: Engines, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.choice(model.alphabet, length).tolist() for length in (1, 5, 63, 65, 100)]
    request = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
        "return_routed_experts": True,
    }
    rounds = engines.run(
        model.folder,
        generate,
        [request] * ROUNDS,
        log=tmp_path / "engine.log",
        before=let_eplb_run_on_the_cpu,
        log_level="info",
        tp_size=2,
        ep_size=2,
        enable_eplb=True,
        ep_num_redundant_experts=8,
        ep_dispatch_algorithm=algorithm,
        eplb_rebalance_num_iterations=EVERY,
        expert_distribution_recorder_buffer_size=EVERY,
    )
    tally = Tally()
    for outputs in rounds:
        for prompt, output in zip(prompts, outputs):
            expected = model.table[(prompt + output["output_ids"])[:-1]]
            rows = extract_routed_experts_from_meta_info(output)
            tally.add(rows.reshape(-1, *expected.shape[1:]), expected)
    assert tally.ids > 0 and tally.mismatches == 0, tally
    assert (tmp_path / "engine.log").read_text().count("[EPLBManager] rebalance end") >= ROUNDS
