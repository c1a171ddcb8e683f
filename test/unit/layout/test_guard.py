"""A forward whose tokens are not those that the layout promises is marked as bad, never filed."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.layout import RankLayout
from unit.layout.one_rank import OneRank


def slots(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1)


@pytest.mark.parametrize(
    "rank, tokens",
    [
        (RankLayout(), 4),
        (RankLayout(dp_rank=1, dp_size=2), 9),  # 5 of the other rank
        (RankLayout(scattered=True), 4),  # a group of one rank: nothing to join
    ],
    ids=str,
)
def test_tokens_as_promised_are_filed(rank: RankLayout, tokens: int) -> None:
    assert OneRank(rank).forward([tokens] * 3, slots(4), [5, 4]) == [kernels.FILED] * 4


@pytest.mark.parametrize("tokens", [[4, 4, 4], [9, 9, 8], [10, 10, 10]], ids=str)
def test_other_tokens_than_promised_are_bad(tokens: list[int]) -> None:
    """Such as a model with a gather of its own: a slice of its buffer would be somebody else's."""
    rank = OneRank(RankLayout(dp_rank=1, dp_size=2))
    assert rank.forward(tokens, slots(4), [5, 4]) == [kernels.BAD] * 4
    assert rank.forward([9] * 3, slots(4), [5, 4]) == [kernels.FILED] * 4  # the next is its own


def test_a_layer_that_was_never_reached_is_bad() -> None:
    assert OneRank(RankLayout()).forward([4, 0, 4], slots(4), []) == [kernels.BAD] * 4


def test_more_tokens_than_there_is_room_for_are_bad() -> None:
    """Also where the buffer has room, because another rank has few, but the ring has not."""
    alone, shared = OneRank(RankLayout()), OneRank(RankLayout(dp_rank=1, dp_size=2))
    assert alone.forward([9] * 3, slots(9), []) == [kernels.BAD] * 9
    assert shared.forward([10] * 3, slots(9), [1, 9]) == [kernels.BAD] * 9
    assert shared.forward([17] * 3, slots(8), [9, 8]) == [kernels.BAD] * 8


def test_a_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rank = OneRank(RankLayout())
    for _ in range(3):
        rank.forward([3] * 3, slots(4), [])
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "routed 3 tokens where 4 were expected" in caplog.text
