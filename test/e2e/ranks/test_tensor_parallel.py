"""Tensor and expert parallelism alone: all ranks route the same tokens, one answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from e2e.ranks.conftest import Check, Ranks, asks
from sglang.test.routed_experts.client import ENDPOINTS


@pytest.fixture(scope="module", params=["tp 2", "tp 2, ep 2"])
def ranks(serve: Callable, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    flags = ("--ep-size", "2") if "ep" in request.param else ()
    with serve(2, *flags, "--chunked-prefill-size", "64") as started:
        yield started


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints(endpoint: str, ranks: Ranks, check: Check) -> None:
    check(ranks.client.ask_all(asks(12, seed=1, endpoint=endpoint)))


def test_only_the_answering_rank_captures_and_stores(ranks: Ranks) -> None:
    for line in ("device buffers allocated", "host store allocated"):
        found = ranks.server.lines(f"Routed experts {line}")
        assert len(found) == 1 and " TP0" in found[0]
