"""Routed experts: which experts every token was sent to, for trainers that replay routing.

A row's way, in the order of the files in `sglang/srt/layers/moe/routed_experts/`: policy (may it be captured at all),
capture (top-k kernel -> device buffer), layout (whose rows are these), gather (rows of scattered tokens), kernels and
store (pack, file), collector, transport, wire. This file is what the rest of SGLang calls.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.layers.dp_attention import get_attention_tp_group

from sglang.srt.layers.moe.routed_experts import capture, layout, policy
from sglang.srt.layers.moe.routed_experts.capture import (  # noqa: F401
    capture_topk_ids,
    direct_topk_output,
)
from sglang.srt.layers.moe.routed_experts.collector import RowCollector
from sglang.srt.layers.moe.routed_experts.gather import RowGather
from sglang.srt.layers.moe.routed_experts.graphs import SelfFilingGraphs, self_filing_graphs
from sglang.srt.layers.moe.routed_experts.metrics import report_memory
from sglang.srt.layers.moe.routed_experts.store import RowFiler
from sglang.srt.layers.moe.routed_experts.streams import Event
from sglang.srt.layers.moe.routed_experts.transport import open_arena
from sglang.srt.layers.moe.routed_experts.wire import (  # noqa: F401
    decode_routed_experts,
    extract_routed_experts_from_meta_info,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang.srt.layers.moe.routed_experts.descriptor import RowsDescriptor

logger = logging.getLogger(__name__)

T = TypeVar("T")
MOST_PROBLEMS_LOGGED = 20


@dataclass
class RoutedExpertsOutput:
    """What one forward hands to the output processor: `filed` marks the step's rows as being in the host store.

    None if they were filed on the forward stream: then the result's `copy_done`, recorded there later, covers them.
    """

    filed: Event | None


class RoutedExpertsCapturer:
    """Off: every method returns at once. What draft workers and servers without the flag have."""

    def open_store(self, model_runner: ModelRunner) -> None:
        """Once the KV pool's size is known, before CUDA graphs are captured."""

    def in_graph(self, forward_batch: ForwardBatch, run_once: Callable[[], T]) -> Callable[[], T]:
        """What to record in a decode CUDA graph in place of `run_once`, a forward of `forward_batch`."""
        return run_once

    def before_graph(self, num_requests: int, tokens_each: int) -> None:
        """On the forward stream, before the decode CUDA graph of so many (padded) requests is replayed."""

    def on_forward_end(
        self, forward_batch: ForwardBatch, can_run_graph: bool
    ) -> RoutedExpertsOutput | None:
        """On the forward stream, after each forward of this model runner."""
        return None

    def on_result(self, result: GenerationBatchResult) -> None:
        """The scheduler begins to process a step's result."""

    def collect(self, req: Req, pool: ReqToTokenPool) -> None:
        """`req` has finished; its KV slots are about to be released. Sets `req.routed_experts`."""

    def keep_replaced(self, req: Req, pool: ReqToTokenPool, end: int, chunked: bool) -> None:
        """The prefix cache is about to put its KV slots in place of those of `req`, up to position `end`.

        chunked: nothing was sampled yet.
        """

    def keep_earned(self, req: Req, pool: ReqToTokenPool) -> None:
        """`req` is being retracted; its KV slots are about to be released."""

    def earned(self, req: Req) -> RowsDescriptor | None:
        """Rows of a request that is aborted while it waits: what it had earned if it had been retracted."""
        return None

    @staticmethod
    def create(model_runner: ModelRunner) -> RoutedExpertsCapturer:
        """The capturer of a model runner whose weights are loaded, before the KV pool is sized.

        Raises:
            ValueError: the model's routing cannot be captured; names the layers.
        """
        if (
            not model_runner.server_args.enable_return_routed_experts
            or model_runner.is_draft_worker
        ):
            return RoutedExpertsCapturer()
        rank = layout.rank_layout(model_runner.server_args)
        capturer = _TargetCapturer(model_runner, rank) if rank.captures else RoutedExpertsCapturer()
        set_global_experts_capturer(capturer)
        return capturer


class _TargetCapturer(RoutedExpertsCapturer):
    """Captures the target model's routing on one rank."""

    def __init__(self, model_runner: ModelRunner, rank: layout.RankLayout) -> None:
        args = model_runner.server_args
        self._rank = rank
        self._shape = policy.resolve_row_shape(model_runner.model_config.hf_text_config)
        self._waits_in_place = args.disable_overlap_schedule
        per_rank = policy.largest_forward_tokens(args, model_runner.model_config.context_len)
        self._buffer = capture.CaptureBuffer(
            self._shape,
            rank.buffer_tokens(per_rank),
            max(capture.buffer_width(model_runner.model), self._shape.top_k),
            model_runner.device,
        )
        self._layers: list[capture.LayerCapture] = capture.bind_layers(
            model_runner.model,
            self._shape,
            self._buffer,
            direct=model_runner.device == "cuda",
        )
        width = self._buffer.ids.shape[2]
        self._most_rows = per_rank
        self._all_reached = False
        self._logged: set[str] = set()
        self._gather: RowGather | None = None
        if rank.scattered and rank.group_size > 1:
            self._gather = RowGather(
                get_attention_tp_group(),
                self._buffer.capacity,
                self._shape,
                width,
                model_runner.device,
            )
        self._filer: RowFiler | None = None
        self._collector: RowCollector | None = None
        if rank.answers:
            self._filer = RowFiler(
                per_rank, self._shape, model_runner.device, width, self._waits_in_place
            )
        self._graphs: SelfFilingGraphs | None = self_filing_graphs(
            rank, self._buffer, self._layers, self._filer, self._gather
        )
        self._replayed: tuple[int, int] | None = None
        parts = (self._buffer, self._gather, self._filer)
        size = sum(part.num_bytes for part in parts if part is not None)
        joined = f", joined over {rank.group_size} ranks" if self._gather else ""
        logger.info(
            f"Routed experts device buffers allocated. #layers: {len(self._layers)}, "
            f"#tokens: {self._buffer.capacity}{joined}, size: {size / 2**20:.2f} MB"
        )

    def open_store(self, model_runner: ModelRunner) -> None:
        if self._filer is None:
            return
        args = model_runner.server_args
        self._filer.open(
            model_runner.max_total_num_tokens + model_runner.page_size,
            stores=max(1, args.dp_size // args.nnodes),
        )
        arena = open_arena(args)
        self._collector = RowCollector(self._filer, self._shape, model_runner.device, arena)
        if model_runner.server_args.enable_metrics:
            labels = {
                "model_name": model_runner.server_args.served_model_name,
                "tp_rank": str(model_runner.tp_rank),
            }
            report_memory(labels, self._filer.store.num_bytes, arena.num_bytes if arena else 0)

    def in_graph(self, forward_batch: ForwardBatch, run_once: Callable[[], T]) -> Callable[[], T]:
        return self._graphs.record(forward_batch, run_once) if self._graphs else run_once

    def before_graph(self, num_requests: int, tokens_each: int) -> None:
        self._replayed = num_requests, tokens_each
        if self._graphs and self._graphs.filed(num_requests * tokens_each):
            self._filer.wait_for_earlier()

    def on_forward_end(
        self, forward_batch: ForwardBatch, can_run_graph: bool
    ) -> RoutedExpertsOutput | None:
        graph, self._replayed = self._replayed, None
        cache_loc = forward_batch.out_cache_loc
        if cache_loc is None:
            return None
        by_graph = self._graphs.filed(math.prod(graph)) if graph and self._graphs else None
        if by_graph:
            return RoutedExpertsOutput(self._filer.filed_here())
        first_row, num_rows = self._get_local_range(forward_batch, graph)
        if num_rows == 0:
            return None
        num_tokens = layout.num_sparse_tokens(self._rank, forward_batch, graph)
        fits = self._fits(num_rows, num_tokens)
        whole = (
            fits and by_graph is None and self._is_captured(None if can_run_graph else num_tokens)
        )
        if self._gather is not None and fits:
            self._gather.join(self._buffer.ids, num_tokens, whole)
        if self._filer is None:
            return None
        if self._gather is not None and fits:
            filed = self._filer.file_gathered(self._gather, cache_loc)
        elif whole:
            filed = self._filer.file_step(self._buffer.ids, first_row, cache_loc)
        else:
            filed = self._filer.mark_bad(cache_loc)
        return RoutedExpertsOutput(filed)

    def _get_local_range(
        self, forward_batch: ForwardBatch, graph: tuple[int, int] | None
    ) -> tuple[int, int]:
        return layout.get_local_range(self._rank, forward_batch, graph)

    def _fits(self, num_rows: int, num_tokens: int) -> bool:
        """Whether there is room for a forward. The answer is the same on every rank of an attention-TP group."""
        if num_rows <= self._most_rows and num_tokens <= self._buffer.capacity:
            return True
        return self._complain(
            f"a forward of {num_rows} tokens of its own, {num_tokens} in the buffer, exceeds what "
            f"there is room for, {self._most_rows} and {self._buffer.capacity}"
        )

    def _is_captured(self, num_tokens: int | None) -> bool:
        """Whether every layer's routing has passed the capture: of just `num_tokens` tokens, unless a graph ran."""
        if num_tokens is None and self._all_reached:
            return True
        for layer in self._layers:
            if not layer.reached:
                return self._complain(f"the routing of {layer.name} was not captured")
            if num_tokens is not None and layer.num_tokens != num_tokens:
                return self._complain(
                    f"{layer.name} routed {layer.num_tokens} tokens where {num_tokens} were expected"
                    f" with {self._rank}"
                )
        self._all_reached = True
        return True

    def _complain(self, problem: str) -> bool:
        if problem not in self._logged and len(self._logged) < MOST_PROBLEMS_LOGGED:
            self._logged.add(problem)
            logger.error(
                f"Routed experts: {problem}; requests that ask for these rows get an error"
            )
        return False

    def on_result(self, result: GenerationBatchResult) -> None:
        if self._collector is None:
            return
        # Workers without overlap (EAGLE v1, n-gram) do not pass the output on; the last filing is theirs.
        output = getattr(result, "routed_experts_output", None)
        filed = self._filer.last_filed if output is None else output.filed or result.copy_done
        if self._waits_in_place:
            filed.synchronize()
        self._collector.step_processed(filed)

    def collect(self, req: Req, pool: ReqToTokenPool) -> None:
        if self._collector is not None and req.return_routed_experts:
            req.routed_experts = self._collector.collect(req, pool)

    def keep_replaced(self, req: Req, pool: ReqToTokenPool, end: int, chunked: bool) -> None:
        if self._collector is not None and req.return_routed_experts and not chunked:
            self._collector.keep_replaced(req, pool, end)

    def keep_earned(self, req: Req, pool: ReqToTokenPool) -> None:
        if self._collector is not None and req.return_routed_experts:
            self._collector.keep_earned(req, pool)

    def earned(self, req: Req) -> RowsDescriptor | None:
        if self._collector is None or not req.return_routed_experts:
            return None
        return self._collector.earned(req)


_capturer = RoutedExpertsCapturer()


def get_global_experts_capturer() -> RoutedExpertsCapturer:
    """The capturer of this process's target model; one that does nothing where the flag is off."""
    return _capturer


def set_global_experts_capturer(capturer: RoutedExpertsCapturer) -> None:
    global _capturer  # noqa: PLW0603  (one target model a process, as in the base)
    _capturer = capturer
