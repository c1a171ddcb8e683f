"""Joining shares over gloo, a thread a rank, against packing the batch in one piece."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.gather import RowGather
from sglang.srt.layers.moe.routed_experts.shape import RowShape

CAPACITY = 40  # tokens of a share


class Group:
    """What `RowGather` uses of the base's GroupCoordinator."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.world_size = world_size
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._gloo._allgather_base(output, input).wait()


def on_every_rank(ranks: int, body: Callable[[int, Group], object]) -> list:
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: body(rank, Group(store, rank, ranks)), range(ranks)))


def random_ids(shape: RowShape, tokens: int, width: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(tokens)
    size = (shape.num_layers, tokens, width)
    return torch.randint(0, shape.num_experts, size, generator=rng, dtype=torch.int32)


def pack_whole(ids: torch.Tensor, shape: RowShape) -> tuple[torch.Tensor, torch.Tensor]:
    n = ids.shape[1]
    rows = torch.zeros((n, shape.num_layers * shape.top_k), dtype=getattr(torch, shape.dtype_name))
    status, slots = torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64)
    kernels.pack(ids, 0, slots, rows, slots.clone(), status, shape.top_k, shape.num_experts)
    return rows, status


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [RowShape(3, 5, 256), RowShape(2, 7, 300)], ids=str)
def test_shares_are_the_batch(ranks: int, shape: RowShape) -> None:
    """Several steps: a share of one token, shares that fill it, sizes no multiple of 16."""
    steps = [7, 1, CAPACITY, 13]
    width = shape.top_k + 1  # a fused shared expert's column
    batches = [random_ids(shape, n * ranks, width) for n in steps]
    for ids in batches:
        ids[:, ids.shape[1] // 2 + 1 :: 5, 0] = -1  # as the base marks padding

    def body(rank: int, group: Group) -> list:
        gather = RowGather(group, CAPACITY, shape, width, "cpu")
        found = []
        for n, ids in zip(steps, batches):
            buffer = torch.full((shape.num_layers, CAPACITY, width), 99, dtype=torch.int32)
            buffer[:, :n] = ids.tensor_split(ranks, dim=1)[rank]
            gather.join(buffer, n, whole=True)
            rows = torch.zeros(
                (CAPACITY * ranks, shape.num_layers * shape.top_k),
                dtype=getattr(torch, shape.dtype_name),
            )
            status = torch.zeros(CAPACITY * ranks, dtype=torch.uint8)
            gather.unpack(rows, status)
            assert not status[n * ranks :].any()
            found.append((rows[: n * ranks], status[: n * ranks]))
        return found

    for found in on_every_rank(ranks, body):
        for (rows, status), ids in zip(found, batches):
            expected_rows, expected_status = pack_whole(ids, shape)
            assert torch.equal(rows.view(torch.uint8), expected_rows.view(torch.uint8))
            assert torch.equal(status, expected_status)


def test_a_rank_that_captured_nothing_spoils_its_share_alone() -> None:
    shape, ids = RowShape(2, 2, 8), random_ids(RowShape(2, 2, 8), 6, 2)

    def body(rank: int, group: Group) -> list[int]:
        gather = RowGather(group, CAPACITY, shape, 2, "cpu")
        gather.join(ids[:, rank * 3 : rank * 3 + 3].contiguous(), 3, whole=rank == 0)
        rows, status = torch.zeros((6, 4), dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)
        gather.unpack(rows, status)
        return status.tolist()

    assert on_every_rank(2, body) == [[kernels.FILED] * 3 + [kernels.BAD] * 3] * 2
