"""DP attention over two nodes: the second node's rank answers with its rows in the message.

Both nodes are on this host, but each is started as its own server with its own `--node-rank`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from e2e.ranks.conftest import Check, Ranks, asks


@pytest.fixture(scope="module")
def nodes(serve: Callable) -> Iterator[tuple[Ranks, Ranks]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ("--dp-size", "2", "--enable-dp-attention", "--nnodes", "2")
    flags += ("--dist-init-addr", address)

    def start(node: int) -> Ranks:
        return stack.enter_context(serve(2, *flags, "--node-rank", str(node)))

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # here, for two threads start servers
        yield tuple(pool.map(start, (0, 1)))


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_either_node(rank: int, nodes: tuple[Ranks, Ranks], check: Check) -> None:
    answers = nodes[0].client.ask_all(
        asks(8, seed=rank, options={"routed_dp_rank": rank}), at_once=8
    )
    assert {a.meta["dp_rank"] for a in answers} == {rank}
    check(answers)


def test_both_nodes_at_once(nodes: tuple[Ranks, Ranks], check: Check) -> None:
    check(nodes[0].client.ask_all(asks(16, seed=3)))


def test_each_node_has_one_store(nodes: tuple[Ranks, Ranks]) -> None:
    assert [len(n.lines("Routed experts host store allocated")) for n in nodes] == [1, 1]
