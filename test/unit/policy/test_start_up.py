"""The real commands stop at a refusal, before a process starts or a weight is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.entrypoints.engine import Engine

from unit.policy.configs import QWEN3_DENSE, QWEN3_MOE, write_model


def launch(model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--device", "cpu", "--enable-return-routed-experts", *arguments),
        ],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )


def test_the_command_line_names_both_flags_and_exits(tmp_path: Path) -> None:
    model = write_model(tmp_path, QWEN3_MOE)
    result = launch(model, "--enable-hierarchical-cache", "--pp-size", "2")
    assert result.returncode != 0
    last_lines = "\n".join(result.stderr.strip().splitlines()[-3:])
    assert "--enable-return-routed-experts does not go with:" in last_lines
    assert "--enable-hierarchical-cache: " in last_lines
    assert "--pp-size 2: " in last_lines
    assert "Load weight" not in result.stdout + result.stderr


def test_the_command_line_refuses_a_dense_model(tmp_path: Path) -> None:
    result = launch(write_model(tmp_path, QWEN3_DENSE))
    assert result.returncode != 0
    assert "Qwen3ForCausalLM is dense" in result.stderr.strip().splitlines()[-1]


def test_the_engine_refuses_its_keyword_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--enable-lmcache"):
        Engine(
            model_path=write_model(tmp_path, QWEN3_MOE),
            device="cpu",
            enable_return_routed_experts=True,
            enable_lmcache=True,
        )
