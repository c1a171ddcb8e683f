"""From the scheduler's message to `meta_info`, in the answering process.

    message arrives:   attach | executor: wait for READY, copy the rows, release the block
    answer is due:     settle waits for that and fills in meta_info
    request arrives:   admit waits while too many bytes of rows are on their way out

A block is released as soon as it is copied, whether or not anybody still waits for the answer, and
however slowly a client reads: memory that the GPU writes is scarcer than this process's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs

from sglang.srt.layers.moe.routed_experts.descriptor import RowsDescriptor
from sglang.srt.layers.moe.routed_experts.in_flight import BytesInFlight, Claim
from sglang.srt.layers.moe.routed_experts.metrics import DeliveryMetrics
from sglang.srt.layers.moe.routed_experts.reader import RoutedExpertsError, RowsReader
from sglang.srt.layers.moe.routed_experts.request import asks_for_rows, check_request
from sglang.srt.layers.moe.routed_experts.shape import resolve_row_shape
from sglang.srt.layers.moe.routed_experts.wire import (
    WireRows,
    rows_info,
    wire_dtype,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

logger = logging.getLogger(__name__)

_COPIERS = 2


class RowsDelivery:
    """Owns the rows of finished requests until they are handed to the caller. One a manager.

    All methods run on the manager's event loop; only `_fields` runs in the executor.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._server_args = manager.server_args
        self._model_config = manager.model_config
        self._reader = RowsReader()
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="routed-experts")
        self._metrics = None
        if manager.enable_metrics and manager.server_args.enable_return_routed_experts:
            self._metrics = DeliveryMetrics(manager.metrics_collector.labels)
        self._in_flight = BytesInFlight(
            limit=(envs.SGLANG_ROUTED_EXPERTS_IN_FLIGHT_MB.get() << 20)
            // max(1, manager.server_args.tokenizer_worker_num),
            on_change=self._metrics.in_flight if self._metrics is not None else None,
        )

    async def admit(self, obj: GenerateReqInput) -> None:
        """Check which rows a request wants, and hold it back while too many bytes are in flight.

        A batch is admitted as a whole: its requests are answered together, so that none may wait
        for another's answer to be read.

        Raises:
            ValueError: a wrong field, or rows asked of a server without the flag.
            fastapi.HTTPException: 503, clients have not read their answers for minutes.
        """
        check_request(obj, self._server_args)
        if asks_for_rows(obj):
            await self._in_flight.room()

    def attach(self, state: ReqState, message: Any, i: int) -> None:
        """Take entry `i` of a batch's output; what it holds of rows is copied in the background."""
        finish_reason = message.finished_reasons[i]
        if finish_reason is None or not asks_for_rows(state.obj):
            self.discard(message, i)
        else:
            self._start(state, _entry(message, i), finish_reason, message.completion_tokens[i])

    def attach_aborted(self, state: ReqState, message: AbortReq, out: dict[str, Any]) -> None:
        """A request was aborted while it waited: the rows that it had earned before, or none.

        The scheduler may have got further than what this process was told of the output.
        """
        if asks_for_rows(state.obj):
            meta, rows = out["meta_info"], message.routed_experts
            if rows is not None:
                rows = rows.up_to(meta["completion_tokens"])
                meta["prompt_tokens"] = rows.prompt_tokens
            self._start(state, rows, meta["finish_reason"], meta["completion_tokens"])

    def discard(self, message: Any, i: int) -> None:
        """Nobody waits for entry `i` of a batch's output any more: give its block back."""
        descriptor = _entry(message, i)
        if descriptor is not None:
            self._reader.release(descriptor)

    async def settle(self, state: ReqState, out: dict[str, Any], as_text: bool) -> dict[str, Any]:
        """`out` of a finished request with its rows in meta_info.

        In a copy: the manager keeps `out` where requests are dumped, and rows that are kept are in flight for ever.

        Args:
            as_text: as a str, for a caller in this process; otherwise as WireRows, for response.py.
        """
        pending, state.routed_experts = state.routed_experts, None
        if pending is None:
            return out
        # Shielded: a job cancelled before it ran would not release its block.
        since, fields = await asyncio.shield(pending)
        rows = fields.get("routed_experts")
        if rows is not None and self._metrics is not None:
            num_rows = fields["routed_experts_info"]["shape"][0]
            self._metrics.handed_over(num_rows, rows.num_bytes, time.monotonic() - since)
        if rows is not None and as_text:
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._copiers, rows.text)
            fields = {**fields, "routed_experts": text}
        return {**out, "meta_info": {**out["meta_info"], **fields}}

    def _start(
        self,
        state: ReqState,
        descriptor: RowsDescriptor | None,
        finish_reason: dict[str, Any],
        num_tokens: int,
    ) -> None:
        if descriptor is None:
            descriptor = self._no_rows(state.obj, finish_reason, num_tokens)
        state.routed_experts = asyncio.get_running_loop().run_in_executor(
            self._copiers, self._fields, descriptor, self._in_flight.claim(descriptor.num_bytes)
        )

    def _no_rows(
        self, obj: GenerateReqInput, finish_reason: dict[str, Any], num_tokens: int
    ) -> RowsDescriptor:
        """The scheduler sent none: zero rows if the request never got to any, else an error."""
        shape = resolve_row_shape(self._model_config.hf_text_config)
        error = None
        if finish_reason.get("type") != "abort":
            error = "the scheduler returned no routed experts for this request"
        elif num_tokens > 0:
            error = "the request was aborted while it waited; its rows were not kept"
        return RowsDescriptor(
            dtype=shape.dtype_name,
            shape=(0, shape.num_layers, shape.top_k),
            start_len=obj.routed_experts_start_len,
            wanted=obj.routed_experts_dtype,
            error=error,
        )

    def _fields(self, descriptor: RowsDescriptor, claim: Claim) -> tuple[float, dict[str, Any]]:
        """When the rows were collected, and what goes into meta_info. Never raises."""
        # Another node's clock says nothing here.
        since = descriptor.born if descriptor.block is not None else time.monotonic()
        dtype = wire_dtype(descriptor.dtype, descriptor.wanted)
        fields: dict[str, Any] = {"routed_experts_start_len": descriptor.start_len}
        try:
            rows = self._reader.read(descriptor)
            if descriptor.block is not None:
                rows = rows.copy()
            if not self._reader.still_ours(descriptor):
                raise RoutedExpertsError("the rows were given up before they were read")
            fields["routed_experts"] = WireRows(rows, dtype, claim)
            fields["routed_experts_info"] = rows_info(dtype, descriptor.shape, descriptor.start_len)
        except RoutedExpertsError as error:
            logger.error(f"Routed experts of a request cannot be delivered: {error}")
            fields["routed_experts_error"] = str(error)
        except Exception as error:
            logger.exception("Routed experts of a request cannot be delivered")
            fields["routed_experts_error"] = repr(error)
        finally:
            self._reader.release(descriptor)
        return since, fields


def _entry(message: Any, i: int) -> RowsDescriptor | None:
    rows = getattr(message, "routed_experts", None)
    return rows[i] if rows is not None else None
