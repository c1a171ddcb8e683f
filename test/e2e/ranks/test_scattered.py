"""Tokens scattered over the attention-TP group: DeepEP's path in the real engine.

Only the dispatcher is replaced, and the experts' kernel: scatter and padding are the base's. Rows
must be those of one process, which are transformers'.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.ranks.conftest import DISPATCHER, Check, Ranks, asks, texts
from sglang.test.routed_experts.client import ENDPOINTS, Ask

DEEPEP = ("--moe-a2a-backend", "deepep", "--deepep-mode", "normal", "--chunked-prefill-size", "64")
LAYOUTS = {
    "attention-TP 2": (2, ()),
    "DP 2 x attention-TP 2": (4, ("--dp-size", "2", "--enable-dp-attention")),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(serve: Callable, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    number, flags = LAYOUTS[request.param]
    path = os.pathsep.join([str(DISPATCHER), os.environ.get("PYTHONPATH", "")])
    with serve(number, *DEEPEP, *flags, PYTHONPATH=path) as started:
        yield started


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_uneven_requests(endpoint: str, ranks: Ranks, check: Check) -> None:
    check(ranks.client.ask_all(asks(10, seed=1, endpoint=endpoint)))


def test_one_token_on_two_ranks(ranks: Ranks, check: Check) -> None:
    """A decode step of one token: the other rank has padding, another DP rank nothing."""
    check([ranks.client.ask(Ask(t, new_tokens=9)) for t in texts(2, 1, 40, 2)])


def test_a_long_prefill_beside_decodes(ranks: Ranks, check: Check) -> None:
    with ThreadPoolExecutor(1) as pool:
        short = pool.submit(
            ranks.client.ask_all, [Ask(t, new_tokens=25) for t in texts(3, 5, 20, 3)]
        )
        answers = ranks.client.ask_all([Ask(t, new_tokens=3) for t in texts(1, 500, 700, 4)])
        check(answers + short.result())


def test_tokens_were_scattered(ranks: Ranks) -> None:
    """Or the tests above say nothing: shares need less room than the batch."""
    assert ranks.server.lines("experts: dispatched over gloo")
    assert not ranks.server.lines("get an error")
    buffers = ranks.server.lines("Routed experts device buffers allocated")
    room = {int(line.split("#tokens: ")[1].split(",")[0]) for line in buffers}
    answering = ranks.server.lines("Routed experts host store allocated")
    assert len(buffers) == 2 * len(answering), "every rank captures, the first of its group answers"
    assert len(room) == 1 and ranks.server.lines("joined over 2 ranks")
