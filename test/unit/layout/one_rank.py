"""A capturer without a model, for tests that play its layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from sglang.srt.layers.moe.routed_experts.capture import CaptureBuffer, LayerCapture
from sglang.srt.layers.moe.routed_experts.graphs import self_filing_graphs
from sglang.srt.layers.moe.routed_experts.layout import RankLayout
from sglang.srt.layers.moe.routed_experts.shape import RowShape
from sglang.srt.layers.moe.routed_experts.store import RowFiler
from sglang.srt.layers.moe.routed_experts_capturer import _TargetCapturer

SHAPE = RowShape(num_layers=3, top_k=2, num_experts=8)
MOST, SLOTS = 8, 40


class OneRank(_TargetCapturer):
    """A capturer of a model that is not there: its layers are written to by the test."""

    def __init__(self, rank: RankLayout, most_in_a_graph: int = MOST) -> None:
        self._rank, self._shape, self._most_rows = rank, SHAPE, MOST
        self._buffer = CaptureBuffer(SHAPE, rank.buffer_tokens(MOST), SHAPE.top_k, "cpu")
        self._buffer.graph_ids = self._buffer.graph_ids[:, :most_in_a_graph]
        self._layers = [LayerCapture(i, f"layer {i}", self._buffer, False) for i in range(3)]
        self._all_reached, self._logged, self._gather = False, set(), None
        self._filer = RowFiler(MOST, SHAPE, "cpu")
        self._filer.open(SLOTS)
        self._graphs = self_filing_graphs(rank, self._buffer, self._layers, self._filer, None)
        self._replayed = None

    def route(self, ids: torch.Tensor, layers: int = 3) -> None:
        for layer in self._layers[:layers]:
            layer.write(ids)

    def graph(self, ids: torch.Tensor, slots: torch.Tensor, layers: int = 3) -> Callable[[], str]:
        """What is recorded for a forward that routes `ids` [tokens, top_k] in every layer."""

        def run_once() -> str:
            self.route(ids, layers)
            return "logits"

        return self.in_graph(SimpleNamespace(out_cache_loc=slots), run_once)

    def end(self, slots: torch.Tensor, requests: int, tokens: int = 1) -> None:
        """Around the replay of the graph of so many padded requests."""
        self.before_graph(requests, tokens)
        self.on_forward_end(SimpleNamespace(out_cache_loc=slots), True)

    def end_without(self, slots: torch.Tensor, can_run_graph: bool = False) -> None:
        """Behind a forward that was no decode graph's, but perhaps a piecewise graph's."""
        self.on_forward_end(SimpleNamespace(out_cache_loc=slots), can_run_graph)

    def status(self, slots: torch.Tensor) -> list[int]:
        return self._filer.store.status[slots].tolist()

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        return self._filer.store.ids[slots].view(-1, 3, 2)

    def forward(self, tokens: list[int], cache_loc: torch.Tensor, counts: list[int]) -> list[int]:
        """Layer i routes `tokens[i]` tokens. Returns the status of the forward's KV slots."""
        for layer, n in zip(self._layers, tokens):
            if n:
                layer.write(torch.ones((n, SHAPE.top_k), dtype=torch.int32))
        batch = SimpleNamespace(out_cache_loc=cache_loc, global_num_tokens_cpu=counts)
        self.on_forward_end(batch, False)
        return self.status(cache_loc)
