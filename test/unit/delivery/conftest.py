"""A small MoE model, its reference, and a server of its own for each module that wants one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import numpy as np
import pytest

from sglang.test.routed_experts.client import Client
from sglang.test.routed_experts.compare import different_ids
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import FLAG, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), Shape())


class Reference:
    """Rows of the whole conversation against transformers' router on the same weights."""

    def __init__(self, model: Path) -> None:
        self._router = TransformersRouter(model)

    def check(self, tokens: Sequence[int], rows: np.ndarray | None, start_len: int = 0) -> None:
        """`rows` are those of all but the last of `tokens`, from position `start_len` on."""
        expected = self._router.route([list(tokens)])[0] if len(tokens) > 1 else None
        count = max(len(tokens) - 1 - start_len, 0)
        assert rows is not None and len(rows) == count, (len(rows), count)
        if count:
            assert different_ids(rows, expected[start_len:]) == 0


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A context manager: `with serve(*flags, NAME=value) as (server, client)`."""

    @contextmanager
    def start(*flags: str, asked: bool = True, **environment: str) -> Iterator:
        flags = (*((FLAG,) if asked else ()), "--max-total-tokens", "16384", *flags)
        server = Server(
            model, flags, log=tmp_path_factory.mktemp("server") / "log", start_timeout=600
        )
        with ExitStack() as running:
            with pytest.MonkeyPatch.context() as patch:  # for this server, not for later ones
                for name, value in environment.items():
                    patch.setenv(name, value)
                running.enter_context(server)
                running.callback(server.stop, patience=0)  # at once; nothing is in flight
            yield server, Client(server.url, model)

    return start
