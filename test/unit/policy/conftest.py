"""Server arguments for the CPU engine, of a small MoE model without weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import pytest
from sglang.srt.server_args import ServerArgs

from unit.policy.configs import QWEN3_MOE, write_model


@pytest.fixture
def server_args(tmp_path: Path) -> Callable[..., ServerArgs]:
    """Build resolved arguments; `model_path` and everything else can be overridden."""
    model = write_model(tmp_path / "moe", QWEN3_MOE)

    def build(**arguments: object) -> ServerArgs:
        return ServerArgs(**{"model_path": model, "device": "cpu", **arguments})

    return build
