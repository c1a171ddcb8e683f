"""Decode and verify steps whose CUDA graph files its own rows: the scheduler's thread launches nothing for them.

    graph:  ... top-k kernels -> CaptureBuffer.graph_ids ... | pack and file -> host store

What a graph captures and what it files are recorded together, so that one cannot be taken for the other's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from sglang.srt.environ import envs

from sglang.srt.layers.moe.routed_experts import layout
from sglang.srt.layers.moe.routed_experts.capture import CaptureBuffer, LayerCapture
from sglang.srt.layers.moe.routed_experts.gather import RowGather
from sglang.srt.layers.moe.routed_experts.layout import RankLayout
from sglang.srt.layers.moe.routed_experts.store import RowFiler

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SelfFilingGraphs:
    """Which of the base's decode CUDA graphs file their own rows.

    Args:
        rank: whose rows; scattered tokens cannot be joined in a graph.
        buffer: `graph_ids` of it is written and read by these graphs alone.
        layers: what is bound to the buffer; they capture into `graph_ids` while a graph is recorded.
        filer: its store must be open when a graph is recorded.
    """

    def __init__(
        self, rank: RankLayout, buffer: CaptureBuffer, layers: list[LayerCapture], filer: RowFiler
    ) -> None:
        self._rank = rank
        self._buffer = buffer
        self._layers = layers
        self._filer = filer
        self._filed: dict[int, bool] = {}

    def filed(self, num_tokens: int) -> bool | None:
        """Whether the graph of so many (padded) tokens of this rank has filed its rows.

        None: it leaves them in `CaptureBuffer.ids`. False: not every layer's routing was captured.
        """
        return self._filed.get(num_tokens)

    def record(self, forward_batch: ForwardBatch, run_once: Callable[[], T]) -> Callable[[], T]:
        """What to record in place of `run_once`: the same, and behind it the filing of its rows.

        Args:
            forward_batch: the graph's own, with the tensors that it reads at each replay; padding has KV slot 0.
            run_once: its forward.
        """
        ids, cache_loc = self._buffer.graph_ids, forward_batch.out_cache_loc
        graph = cache_loc.shape[0], 1
        first_row, padded = layout.get_local_range(self._rank, forward_batch, graph)
        num_tokens = layout.num_sparse_tokens(self._rank, forward_batch, graph)
        if num_tokens > ids.shape[1] or cache_loc.dtype != torch.int64:
            return run_once

        def run_and_file() -> T:
            for layer in self._layers:
                layer.num_tokens = 0
                layer.capture_for(graph=True)
            try:
                output = run_once()
            finally:
                for layer in self._layers:
                    layer.capture_for(graph=False)
            missed = [layer.name for layer in self._layers if layer.num_tokens != num_tokens]
            self._filed[padded] = not missed
            if missed:
                logger.error(
                    f"Routed experts: a CUDA graph of {num_tokens} tokens does not capture the routing of "
                    f"{', '.join(missed)}; requests that ask for these rows get an error"
                )
            else:
                self._filer.file_at_once(ids, first_row, cache_loc)
            return output

        return run_and_file


def self_filing_graphs(
    rank: RankLayout,
    buffer: CaptureBuffer,
    layers: list[LayerCapture],
    filer: RowFiler | None,
    gather: RowGather | None,
) -> SelfFilingGraphs | None:
    """None where steps are filed behind their graph: a gather is not recorded with it, and with a plan stream the base
    may write a graph's KV slots while the last replay still reads them."""
    if filer is None or gather is not None or envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return None
    return SelfFilingGraphs(rank, buffer, layers, filer)
