"""The table "whose rows are in the buffer", against batches that the base's own code has padded.

A model of the base's gather says which token lies where; packing that buffer at the range must give
every rank its own tokens, at their KV slots, and nothing of anybody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers import dp_attention
from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.layout import (
    RankLayout,
    get_local_range,
    num_sparse_tokens,
)
from unit.layout.conftest import FIRST_SLOT, PaddedBatch

Pad = Callable[..., PaddedBatch]
UNEVEN = [(5, 3), (1, 64), (7, 7), (2, 0), (0, 9), (3, 100, 1, 17), (0, 0, 0, 6), (6, 5, 4, 3)]
ID_OF_RANK, PADDING_ID = 100, 99  # token t of rank r is routed to expert 100 * r + t % 90


def gathered_ids(counts: Sequence[int], pad: Pad, **how: object) -> torch.Tensor:
    """The capture buffer, int32 [1, tokens, 1]: all ranks' tokens where the base puts them."""
    first = pad(counts, 0, **how)
    ids = torch.full((1, first.buffer_tokens, 1), PADDING_ID, dtype=torch.int32)
    for rank in range(len(counts)):
        padded = pad(counts, rank, **how).batch
        start, length = dp_attention.get_dp_local_info(padded)  # where the base's gather writes
        own = torch.arange(counts[rank], dtype=torch.int32) % 90 + ID_OF_RANK * rank
        assert int(length) >= counts[rank]
        ids[0, int(start) : int(start) + counts[rank], 0] = own
    return ids


def packed(ids: torch.Tensor, first: int, cache_loc: torch.Tensor) -> dict[int, int]:
    """KV slot -> expert, of what pack and file keep."""
    n = len(cache_loc)
    rows, status = torch.zeros((n, 1), dtype=torch.uint16), torch.zeros(n, dtype=torch.uint8)
    slots = torch.zeros(n, dtype=torch.int64)
    kernels.pack(ids, first, cache_loc, rows, slots, status, 1, 512)
    found = {int(s): int(r) for s, r in zip(slots, rows.to(torch.int32)) if s > 0}
    return found


def expected(counts: Sequence[int], rank: int) -> dict[int, int]:
    return {FIRST_SLOT + t: ID_OF_RANK * rank + t % 90 for t in range(counts[rank])}


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_eager_gathered(counts: tuple[int, ...], prefill: bool, group_size: int, pad: Pad) -> None:
    how = {"prefill": prefill, "group_size": group_size}
    ids = gathered_ids(counts, pad, **how)
    for rank in range(len(counts)):
        layout = RankLayout(dp_rank=rank, dp_size=len(counts), group_size=group_size)
        batch = pad(counts, rank, **how).batch
        first, count = get_local_range(layout, batch, None)
        assert packed(ids, first, batch.out_cache_loc) == expected(counts, rank)
        assert count == len(batch.out_cache_loc) and count % group_size == 0
        assert num_sparse_tokens(layout, batch, None) == ids.shape[1]


def test_both_padding_modes_are_among_the_cases(pad: Pad) -> None:
    modes = {pad(c, prefill=p).batch.dp_padding_mode.name for c in UNEVEN for p in (False, True)}
    assert modes == {"MAX_LEN", "SUM_LEN"}


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("tokens_per_request", [1, 4])
def test_decode_graph_gathered(rank: int, tokens_per_request: int) -> None:
    """Graphs pad every rank to one number of tokens; with drafts, not that of requests."""
    padded_requests, own_requests = 8, 3
    layout = RankLayout(dp_rank=rank, dp_size=4)
    batch = SimpleNamespace(
        out_cache_loc=torch.arange(own_requests * tokens_per_request),
        global_num_tokens_cpu=[9999] * 4,  # counts before padding say nothing about a graph
    )
    graph = (padded_requests, tokens_per_request)
    assert get_local_range(layout, batch, graph) == (
        rank * 8 * tokens_per_request,
        3 * tokens_per_request,
    )
    assert num_sparse_tokens(layout, batch, graph) == 4 * 8 * tokens_per_request


def test_without_dp_attention_the_range_is_the_batch() -> None:
    batch = SimpleNamespace(out_cache_loc=torch.arange(11), global_num_tokens_cpu=None)
    for graph, tokens in ((None, 11), ((16, 1), 16)):
        assert get_local_range(RankLayout(), batch, graph) == (0, 11)
        assert num_sparse_tokens(RankLayout(), batch, graph) == tokens


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("counts", [(13,), (4,), *UNEVEN], ids=str)
def test_scattered_is_never_sliced_by_dp(
    counts: tuple[int, ...], prefill: bool, group_size: int, pad: Pad
) -> None:
    for rank in range(len(counts)):
        layout = RankLayout(rank, len(counts), scattered=True, group_size=group_size)
        batch = pad(counts, rank, prefill=prefill, group_size=group_size).batch
        assert get_local_range(layout, batch, None) == (0, len(batch.out_cache_loc))
        share = num_sparse_tokens(layout, batch, None)
        assert share * group_size == len(batch.out_cache_loc) >= counts[rank]
        # The base scatters with tensor_split: in equal, consecutive parts.
        assert {len(part) for part in batch.input_ids.tensor_split(group_size)} == {share}


def test_scattered_decode_graph() -> None:
    layout = RankLayout(dp_rank=1, dp_size=2, scattered=True, group_size=2)
    batch = SimpleNamespace(out_cache_loc=torch.arange(12), global_num_tokens_cpu=[6, 6])
    assert get_local_range(layout, batch, (4, 4)) == (0, 12)
    assert num_sparse_tokens(layout, batch, (4, 4)) == 8


def test_padding_rows_have_slot_zero(pad: Pad) -> None:
    batch = pad((3, 9), 0, group_size=4).batch
    assert batch.out_cache_loc.tolist() == [FIRST_SLOT, FIRST_SLOT + 1, FIRST_SLOT + 2] + [0] * 9


def test_an_idle_rank_files_nothing(pad: Pad) -> None:
    batch = pad((0, 9), 0).batch
    assert batch.forward_mode.is_idle() and not batch.out_cache_loc.any()


@pytest.mark.parametrize(
    "layout, tokens",
    [
        (RankLayout(), 96),
        (RankLayout(dp_size=4), 4 * 96),
        (RankLayout(dp_size=4, scattered=True, group_size=2), 48),
        (RankLayout(scattered=True, group_size=8), 12),
        (RankLayout(scattered=True), 96),
    ],
    ids=str,
)
def test_room_in_the_capture_buffer(layout: RankLayout, tokens: int) -> None:
    assert layout.buffer_tokens(96) == tokens
