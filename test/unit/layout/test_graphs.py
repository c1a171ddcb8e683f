"""Decode graphs that file their own rows. Here a "graph" is what would be recorded, run by the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.graphs import self_filing_graphs
from sglang.srt.layers.moe.routed_experts.layout import RankLayout
from unit.layout.one_rank import OneRank


def some_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (tokens, 2), generator=generator, dtype=torch.int32)


def test_a_graph_files_the_rows_of_each_replay_and_no_padding() -> None:
    rank, ids, slots = OneRank(RankLayout()), some_ids(4), torch.tensor([5, 9, 0, 0])
    graph = rank.graph(ids, slots)
    for seed in (1, 2):
        ids.copy_(some_ids(4, seed))
        slots[:2] += seed
        assert graph() == "logits"
        rank.end(slots[:2], requests=4)
        assert rank.status(slots) == [kernels.FILED] * 2 + [kernels.UNFILED] * 2
        assert torch.equal(rank.rows(slots[:2]), ids[:2, None].expand(2, 3, 2).byte())


def test_what_a_graph_captures_is_its_own_affair() -> None:
    """Other forwards capture where they did, and their rows are filed behind them."""
    rank, slots = OneRank(RankLayout()), torch.tensor([5, 9])
    rank.graph(some_ids(2), slots)()
    assert not rank._buffer.ids.any()
    rank.route(some_ids(3, seed=1))
    rank.end_without(later := torch.tensor([11, 12, 13]))
    assert torch.equal(rank.rows(later)[:, 0], some_ids(3, seed=1).byte())
    assert torch.equal(rank.rows(slots)[:, 0], some_ids(2).byte())


def test_behind_a_replay_nothing_is_filed_again() -> None:
    rank, slots = OneRank(RankLayout()), torch.tensor([5, 9])
    rank.graph(some_ids(2), slots)()
    rank._filer.file_step = None  # must not be called
    rank.end(slots, requests=2)
    rank.end(slots, requests=1, tokens=2)  # a verify step of one request


def test_a_dp_rank_files_its_own_tokens() -> None:
    rank, ids = OneRank(RankLayout(dp_rank=1, dp_size=3)), some_ids(6)
    slots = torch.tensor([5, 9])
    rank.graph(ids, slots)()
    assert torch.equal(rank.rows(slots)[:, 0], ids[2:4].byte())


def test_a_graph_of_too_many_tokens_is_filed_behind_it() -> None:
    rank, slots = OneRank(RankLayout(), most_in_a_graph=3), torch.arange(1, 5)
    rank.graph(some_ids(4), slots)()
    assert rank.status(slots) == [kernels.UNFILED] * 4
    rank.end(slots, requests=4)
    assert torch.equal(rank.rows(slots)[:, 0], some_ids(4).byte())


@pytest.mark.parametrize("tokens, layers", [(4, 2), (3, 3)], ids=["a layer missed", "other tokens"])
def test_a_graph_that_misses_routing_is_bad_at_every_replay(
    tokens: int, layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank, slots = OneRank(RankLayout()), torch.arange(1, 5)
    rank.graph(some_ids(tokens), slots, layers)()
    assert "layer 2" in caplog.text
    for _ in range(2):
        rank.end(slots, requests=4)
        assert rank.status(slots) == [kernels.BAD] * 4


def test_a_forward_that_fails_leaves_the_layers_where_they_were() -> None:
    rank = OneRank(RankLayout())

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        rank.in_graph(SimpleNamespace(out_cache_loc=torch.arange(1, 3)), fail)()
    rank.route(some_ids(2))
    assert rank._buffer.ids.any() and not rank._buffer.graph_ids.any()


def test_a_piecewise_graph_is_not_taken_for_the_last_decode_graph() -> None:
    """A verify step too large for the decode graphs may run in one, and its slots have had rows before."""
    rank = OneRank(RankLayout())
    rank.graph(some_ids(4), torch.arange(5, 9))()
    rank.end(torch.arange(5, 9), requests=2, tokens=2)
    for seed in (3, 4):
        rank.route(some_ids(6, seed))
        rank.end_without(slots := torch.arange(20, 26), can_run_graph=True)
        assert torch.equal(rank.rows(slots)[:, 0], some_ids(6, seed).byte())


def test_a_graph_that_files_comes_behind_what_the_side_stream_files() -> None:
    rank, waits = OneRank(RankLayout(), most_in_a_graph=3), []
    rank._filer.wait_for_earlier = lambda: waits.append(None)
    for tokens in (2, 4):  # of the second, nothing is filed inside
        rank.graph(some_ids(tokens), torch.arange(1, 1 + tokens))()
        rank.before_graph(tokens, 1)
    assert len(waits) == 1


@pytest.mark.parametrize("lacks", ["filer", "no gather", "no plan stream"])
def test_where_steps_are_filed_behind_their_graphs(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OneRank(RankLayout())
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", str(int(lacks == "no plan stream")))
    filer = None if lacks == "filer" else rank._filer
    gather = object() if lacks == "no gather" else None
    assert self_filing_graphs(rank._rank, rank._buffer, rank._layers, filer, gather) is None


def test_the_base_says_which_graph_it_replays() -> None:
    """By the code of its runner. Nothing is filed behind the replay then."""
    rank, ids, slots = OneRank(RankLayout()), some_ids(4), torch.tensor([5, 9, 0, 0])
    recorded = rank.graph(ids, slots)
    recorded()
    runner = CudaGraphRunner.__new__(CudaGraphRunner)
    vars(runner).update(
        model_runner=SimpleNamespace(routed_experts_capturer=rank),
        deepep_adapter=SimpleNamespace(replay=lambda: None),
        replay_prepare=lambda *_: None,
        enable_pdmux=False,
        num_tokens_per_bs=2,
        bs=2,
        graphs={2: SimpleNamespace(replay=recorded)},
        output_buffers={2: PPProxyTensors({})},
    )
    rank._filer.file_step = None  # must not be called
    for seed in (1, 2):
        ids.copy_(some_ids(4, seed))
        batch = SimpleNamespace(out_cache_loc=slots[:2])
        runner.replay(batch)
        rank.on_forward_end(batch, True)
        assert torch.equal(rank.rows(slots[:2])[:, 0], ids[:2].byte())
