"""Servers of several ranks on the CPU engine, their answers checked against transformers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import pytest

from sglang.test.routed_experts.client import Answer, Ask, Client
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import FLAG, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model

DISPATCHER = Path(__file__).parent / "dispatcher_site"
_CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few experts: on the CPU engine they cost more than anything else."""
    return make_model(tmp_path_factory.mktemp("model"), Shape(layers=8, experts=16, top_k=8))


@dataclass
class Check:
    """Rows of an answer are those that transformers' router gives its tokens."""

    router: TransformersRouter

    def __call__(self, answers: Sequence[Answer]) -> None:
        tally = Tally()
        for answer, expected in zip(answers, self.router.route([a.tokens for a in answers])):
            tally.add(answer.rows, expected)
        assert tally.ids > 0
        assert tally.mismatches == 0, str(tally)


@pytest.fixture(scope="session")
def check(model: Path) -> Check:
    return Check(TransformersRouter(model))


@dataclass
class Ranks:
    """A server under test."""

    server: Server
    client: Client


@pytest.fixture(scope="module")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A context manager: `with serve(number of ranks, *flags, NAME=value) as ranks`."""

    @contextmanager
    def start(ranks: int, *flags: str, **environment: str) -> Iterator[Ranks]:
        cores = "|".join(str(rank % _CORES) for rank in range(ranks))
        environment |= {"SGLANG_CPU_OMP_THREADS_BIND": cores}
        flags = (FLAG, "--max-total-tokens", "20000", "--tp-size", str(ranks), *flags)
        log = tmp_path_factory.mktemp("server") / "log"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                if os.environ.get(name) != value:
                    patch.setenv(name, value)
            with Server(model, flags, log=log, start_timeout=900) as server:
                yield Ranks(server, Client(server.url, model))
                server.stop(patience=0)

    return start


def texts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    letters = "abcdefghijklmnop ."
    return ["".join(rng.choices(letters, k=rng.randint(shortest, longest))) for _ in range(count)]


def asks(
    count: int, *, seed: int, longest: int = 200, tokens: int = 12, **how: object
) -> list[Ask]:
    """Requests of uneven length, in and out."""
    rng = random.Random(seed)
    return [
        Ask(text, new_tokens=rng.randint(1, tokens), **how)
        for text in texts(count, 5, longest, seed)
    ]
