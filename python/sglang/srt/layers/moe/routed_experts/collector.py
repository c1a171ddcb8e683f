"""From a finished or retracted request to its answer: gather its rows from the store into shared memory.

    schedule stream:  filed.wait | collect, by the request's row of `req_to_token` -> shared memory, READY | ...

`filed` is that of the step being processed, not of the step in flight, so an answer never waits for the next forward.
The request's KV slots, and its row of `req_to_token`, are free at once. Whoever gets them comes later: the scheduler
assigns slots on this stream, and each of its forwards waits for this stream first, and so for the collects on it.
Nothing here waits on the host, and nothing here changes what the scheduler runs or frees. Where the base's scheduler itself
waits for its stream (it sums up the lengths of a batch that some requests have left), it waits for the collects on it too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.descriptor import (
    BAD_WORD,
    HEADER_BYTES,
    NOT_CAPTURED,
    READY_WORD,
    WORD_BYTES,
    RowsDescriptor,
)
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.store import RowFiler
from sglang.srt.layers.moe.routed_experts.streams import (
    Event,
    current_stream_waits,
    new_event,
    record_in_current,
    write_word_in_current,
)
from sglang.srt.layers.moe.routed_experts.transport import RowsArena, RowsBlock

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

logger = logging.getLogger(__name__)


@dataclass
class EarnedRows:
    """Rows [start, start + count) that a request keeps, for its KV slots there are about to be other ones.

    They stay what they were when tokens were sampled with them: a prefix is recomputed later, or was computed earlier,
    perhaps with other weights. Written once by the collect kernel; read by it when the request is retracted or finishes.
    Freed behind that reading, or with the request.
    """

    block: RowsBlock | PrivateBlock
    start: int
    count: int


class PrivateBlock:
    """Rows outside shared memory, for when they travel in the message: same attributes as a RowsBlock."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        size = HEADER_BYTES + num_bytes
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
        self.address = memory.data_ptr()
        self.rows = memory[HEADER_BYTES:]
        self.header = memory[:HEADER_BYTES].view(torch.int32).zero_()


class RowCollector:
    """Serves the scheduler of one answering rank. Used by its thread alone."""

    def __init__(
        self, filer: RowFiler, shape: RowShape, device: str, arena: RowsArena | None
    ) -> None:
        self._filer = filer
        self._shape = shape
        self._device = device
        self._arena = arena
        self._on_gpu = device == "cuda"
        self._filed: Event | None = None
        self._being_read: list[tuple[Event, tuple[EarnedRows | None, ...]]] = []
        self._warned = False
        # Compile now, not when the first request finishes.
        block, slots = self._new_block(shape.row_bytes), torch.zeros(1, dtype=torch.int32)
        rows = kernels.as_units(block.rows.view(1, -1))
        store = filer.store
        kernels.collect(store.units, store.status, slots.to(device), rows, block.header)
        self._mark_ready(block)
        if self._on_gpu:
            torch.cuda.synchronize()  # before `block` is let go of
        self._collect_constants = kernels.collect_constants(rows)

    def step_processed(self, filed: Event) -> None:
        """The scheduler now processes the step behind `filed`; what is collected waits for that."""
        self._filed = filed if self._on_gpu else None

    def collect(self, req: Req, pool: ReqToTokenPool) -> RowsDescriptor:
        """The answer of a finished request: rows [start_len, prompt + completion - 1).

        Call before its KV slots are released. The rows are complete when READY is set in their header.
        """
        completion = len(req.output_ids_through_stop)
        start, end = _wanted(req, completion)
        block = self._gather(req, pool, start, end) if end > start else None
        # A session keeps its requests.
        req.routed_experts_earned = req.routed_experts_sampled = None
        return self._answer(req, completion, block)

    def earned(self, req: Req) -> RowsDescriptor | None:
        """The answer of a request that is aborted while it waits: what it had earned before it was retracted.

        None if it has not been sampled from yet, or its output was thrown away.
        """
        completion = len(req.output_ids)
        if completion == 0:
            return None
        start, end = _wanted(req, completion)
        if end <= start:
            return self._answer(req, completion, None)
        earned: EarnedRows | None = getattr(req, "routed_experts_earned", None)
        return self._answer(req, completion, earned.block) if earned is not None else None

    def keep_earned(self, req: Req, pool: ReqToTokenPool) -> None:
        """Keep what a request has earned before it is retracted. Call before its KV slots are released."""
        start, end = _wanted(req, len(req.output_ids))
        # Nothing is earned before the first token, and part of the prompt may not have KV slots yet. The base throws
        # away the output of requests with input embeddings when it retracts them.
        if end <= start or not req.output_ids or req.input_embeds is not None:
            return
        block = self._gather(req, pool, start, end)
        req.routed_experts_earned = EarnedRows(block, start, end - start)

    def keep_replaced(self, req: Req, pool: ReqToTokenPool, end: int) -> None:
        """Keep the row that a token was sampled with where the prefix cache puts KV slots of its own in its place.

        Call before it does. The cache has had the prompt up to position `end`; what the request has computed of that
        once more, from `req.cache_protected_len` on, gets the slots of an earlier forward, perhaps of other weights. Of
        the prompt's logprobs, the rows that they were computed with are kept too.
        """
        sampled_from = len(req.fill_ids) - 1
        start = sampled_from
        if req.return_logprob and req.logprob_start_len >= 0:
            start = min(start, req.logprob_start_len)
        first = max(start, req.cache_protected_len, req.routed_experts_start_len)
        end = min(end, sampled_from + 1)
        req.routed_experts_sampled = None
        if end <= first:
            return
        block = self._gather(req, pool, first, end)
        req.routed_experts_sampled = EarnedRows(block, first, end - first)

    def _gather(
        self, req: Req, pool: ReqToTokenPool, start: int, end: int
    ) -> RowsBlock | PrivateBlock:
        block = self._new_block((end - start) * self._shape.row_bytes)
        earned: EarnedRows | None = getattr(req, "routed_experts_earned", None)
        sampled: EarnedRows | None = getattr(req, "routed_experts_sampled", None)
        first = min(max(earned.start + earned.count, start), end) if earned is not None else start
        if self._filed is not None:
            if not self._filed.query():
                current_stream_waits(self._filed)
            self._filed = None  # what else is collected of this step comes behind it on this stream
        self._collect(pool.req_to_token, req.req_pool_idx, first, end, block, first - start)
        for kept, since in ((earned, start), (sampled, first)):
            if kept is not None:
                self._put(kept, since, start, block)
        if earned is not None or sampled is not None or self._being_read:
            self._keep_until_read(earned, sampled)
        self._mark_ready(block)
        return block

    def _collect(
        self,
        req_to_token: torch.Tensor,
        row: int,
        first: int,
        end: int,
        block: RowsBlock | PrivateBlock,
        offset: int,
    ) -> None:
        """Collect positions [first, end) of a request into `block`, from its row `offset` on.

        By addresses on a GPU, for every view of a tensor costs the scheduler's thread microseconds.
        """
        if first == end:
            return
        store, row_bytes = self._filer.store, self._shape.row_bytes
        if not self._on_gpu:
            rows = block.rows.view(-1, row_bytes)[offset : offset + end - first]
            slots = req_to_token[row, first:end]
            kernels.collect(store.units, store.status, slots, kernels.as_units(rows), block.header)
            return
        assert req_to_token.dtype == torch.int32
        kernels.launch_collect_at(
            store.units.data_ptr(),
            store.status.data_ptr(),
            req_to_token.data_ptr()
            + (row * req_to_token.stride(0) + first) * req_to_token.itemsize,
            block.address + HEADER_BYTES + offset * row_bytes,
            block.address + BAD_WORD * WORD_BYTES,
            end - first,
            self._collect_constants,
        )

    def _mark_ready(self, block: RowsBlock | PrivateBlock) -> None:
        """In stream order, like all of collect."""
        if self._on_gpu:
            write_word_in_current(block.address + READY_WORD * WORD_BYTES, 1)
        else:
            block.header[READY_WORD] = 1

    def _put(
        self,
        kept: EarnedRows,
        since: int,
        start: int,
        block: RowsBlock | PrivateBlock,
    ) -> None:
        """Lay what a request keeps, from position `since` on, over the rows of `block`, the first of position `start`.

        In stream order, like all of collect.
        """
        rows = block.rows.view(-1, self._shape.row_bytes)
        first, end = max(since, kept.start), min(start + len(rows), kept.start + kept.count)
        if end <= first:
            return
        store = kernels.as_units(kept.block.rows.view(kept.count, -1))
        bad = kept.block.header[BAD_WORD : BAD_WORD + 1].to(self._device, non_blocking=True)
        status = (kernels.FILED + bad).to(torch.uint8).repeat(kept.count)
        slots = torch.arange(
            first - kept.start, end - kept.start, dtype=torch.int32, device=self._device
        )
        out = kernels.as_units(rows[first - start : end - start])
        kernels.collect(store, status, slots, out, block.header)

    def _keep_until_read(self, *kept: EarnedRows | None) -> None:
        """The request may let go of what it keeps before the schedule stream has read it."""
        self._being_read = [(read, held) for read, held in self._being_read if not read.query()]
        if any(kept):
            read = new_event(self._device)
            record_in_current(read)
            self._being_read.append((read, kept))

    def _answer(
        self, req: Req, completion: int, block: RowsBlock | PrivateBlock | None
    ) -> RowsDescriptor:
        start, end = _wanted(req, completion)
        shape = max(end - start, 0), self._shape.num_layers, self._shape.top_k
        answer = RowsDescriptor(
            self._shape.dtype_name,
            shape,
            start,
            req.routed_experts_dtype,
            len(req.origin_input_ids),
        )
        if block is None:
            return answer
        assert block.num_bytes == shape[0] * self._shape.row_bytes
        if isinstance(block, RowsBlock):
            answer.block = block.describe()
            return answer
        collected = new_event(self._device)
        record_in_current(collected)
        collected.synchronize()
        if bool(block.header[BAD_WORD]):
            answer.error = NOT_CAPTURED
        else:
            answer.data = block.rows.numpy().tobytes()
        return answer

    def _new_block(self, num_bytes: int) -> RowsBlock | PrivateBlock:
        block = self._arena.allocate(num_bytes) if self._arena is not None else None
        if block is not None:
            return block
        if self._arena is not None and not self._warned:
            self._warned = True
            logger.warning(
                "Routed experts: no room in shared memory, rows travel in the message. "
                "Raise SGLANG_ROUTED_EXPERTS_SHM_MB to avoid the copies."
            )
        return PrivateBlock(num_bytes, self._device)


def _wanted(req: Req, completion: int) -> tuple[int, int]:
    """First and behind the last position of the rows that `req` wants, after so many tokens of output."""
    return req.routed_experts_start_len, len(req.origin_input_ids) + completion - 1
