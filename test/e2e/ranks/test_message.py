"""Ranks that share no memory with the process that answers: their rows travel in the message.

So it is with DP attention over several nodes. Two nodes of one host would want the same ports, so
here both ranks pretend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e.ranks.conftest import Check, Ranks, asks
from sglang.srt.layers.moe.routed_experts.transport import open_arena
from sglang.test.routed_experts.client import ENDPOINTS


@pytest.fixture(scope="module")
def ranks(serve: Callable) -> Iterator[Ranks]:
    flags = ("--dp-size", "2", "--enable-dp-attention", "--chunked-prefill-size", "64")
    with serve(2, *flags, SGLANG_ROUTED_EXPERTS_TRANSPORT="message") as started:
        yield started


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_both_ranks(endpoint: str, ranks: Ranks, check: Check) -> None:
    check(ranks.client.ask_all(asks(12, seed=1, endpoint=endpoint)))


@pytest.mark.parametrize("rank", [0, 1])
def test_either_rank(rank: int, ranks: Ranks, check: Check) -> None:
    answers = ranks.client.ask_all(asks(8, seed=rank, options={"routed_dp_rank": rank}))
    assert {a.meta["dp_rank"] for a in answers} == {rank}
    check(answers)


def test_nothing_was_shared(ranks: Ranks) -> None:
    """After answers: no process holds a segment of rows."""
    assert ranks.server.lines("200 OK")
    assert not [name for pid in ranks.server.pids() for name in segments(pid)]


def test_another_node_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its rank alone. The first node shares, or the test above would not notice."""
    monkeypatch.delenv("SGLANG_ROUTED_EXPERTS_TRANSPORT", raising=False)
    assert open_arena(SimpleNamespace(node_rank=1, device="cpu")) is None
    arena = open_arena(SimpleNamespace(node_rank=0, device="cpu"))
    assert arena is not None and arena.allocate(1000) is not None
    assert segments(os.getpid())


def segments(pid: int) -> list[str]:
    """Memory files of routed experts that a process has open or mapped."""
    paths = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()]
    paths += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [path for path in paths if "memfd:" in path and "routed" in path]
