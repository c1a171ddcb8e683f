"""The host store: one row for every KV slot, and the two ways in which rows reach it.

A decode step has few rows: one kernel on the forward stream writes them where they belong, in posted writes across the
bus. A decode CUDA graph has it recorded (graphs.py), so that the scheduler's thread launches nothing.

    forward stream:  ... top-k kernels | pack and file -> host store | sampling, copy_done.record() ...

A prefill has many: they are packed at the speed of the device, and cross the bus beside the next forward.

    forward stream:  ... top-k kernels | pack -> ring slot, packed.record() | next forward ...
    side stream:                         packed.wait | file -> host store, filed.record()

A ring slot is packed into again only behind the `filed` event of its last use; rows are filed, either way, in the order
of the steps, and, with their forward, behind the collects that were launched before it (collector.py): that is what keeps
step t's rows apart from step t+1's, however slow any side is.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.gather import RowGather
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.streams import (
    Event,
    SideStream,
    current_stream_waits,
    new_event,
    record_in_current,
)

logger = logging.getLogger(__name__)

RING_SLOTS = 2


@dataclass
class RingSlot:
    """One step's rows on their way to the store.

    Written by `RowFiler.file_step` alone: by pack on the forward stream, behind `filed` of the slot's last use. Read by
    the file kernel on the side stream, behind `packed`.
    """

    rows: torch.Tensor  # uint8 or uint16 [capacity, layers * top_k]
    slots: torch.Tensor  # int64 [capacity]
    status: torch.Tensor  # uint8 [capacity]
    packed: Event
    filed: Event

    def __post_init__(self) -> None:
        self.units = kernels.as_units(self.rows)


class HostStore:
    """Rows by KV slot: uint8 [num_slots, row_bytes] in host memory, pinned at its exact size, and a status byte a slot.

    Owner: `RowFiler` writes (side stream, forward stream and its graphs), `RowCollector` reads (schedule stream). Status
    bytes live on the device, where the kernels run. torch's pinned allocator rounds up to a power of two, so the memory
    is a plain mapping that is registered with CUDA.
    """

    def __init__(self, num_slots: int, shape: RowShape, device: str, stores: int = 1) -> None:
        """Raises RuntimeError when the host has less memory than the store needs."""
        self.num_bytes = num_slots * shape.row_bytes
        check_host_memory(self.num_bytes, num_slots, stores)
        self._mapping = mmap.mmap(-1, self.num_bytes)
        self.rows = torch.frombuffer(self._mapping, dtype=torch.uint8).view(
            num_slots, shape.row_bytes
        )
        self.units = kernels.as_units(self.rows)
        self.ids = self.rows.view(getattr(torch, shape.dtype_name))
        self.status = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        if device == "cuda":
            register_host_memory(self, self.rows.data_ptr(), self.num_bytes)
        logger.info(
            f"Routed experts host store allocated. #slots: {num_slots}, row: {shape.row_bytes} bytes "
            f"({shape.dtype_name}), size: {self.num_bytes / 2**30:.2f} GB"
        )


class RowFiler:
    """Moves each step's rows from the capture buffer to the store. Owns the ring and the side stream."""

    def __init__(
        self,
        capacity: int,
        shape: RowShape,
        device: str,
        width: int | None = None,
        waits_in_place: bool = False,
    ) -> None:
        """
        Args:
            capacity: tokens of one forward at most.
            width: columns of the capture buffer, where it is wider than top_k.
            waits_in_place: no later event of the step (copy_done) covers what is filed on the forward stream.
        """
        self._waits_in_place = waits_in_place
        self._shape = shape
        self._width = width or shape.top_k
        self._device = device
        self._stream = SideStream(device)
        self._ring: list[RingSlot] = [self._new_slot(capacity) for _ in range(RING_SLOTS)]
        self.capacity = capacity
        self._step = 0
        self._side_filed: Event | None = None
        self._filed_at_once = new_event(device)
        self.last_filed: Event = self._filed_at_once
        self.store: HostStore | None = None

    def _new_slot(self, capacity: int) -> RingSlot:
        columns = self._shape.num_layers * self._shape.top_k
        dtype = getattr(torch, self._shape.dtype_name)
        return RingSlot(
            rows=torch.zeros((capacity, columns), dtype=dtype, device=self._device),
            slots=torch.zeros(capacity, dtype=torch.int64, device=self._device),
            status=torch.zeros(capacity, dtype=torch.uint8, device=self._device),
            packed=new_event(self._device),
            filed=new_event(self._device),
        )

    @property
    def num_bytes(self) -> int:
        tensors = [t for slot in self._ring for t in (slot.rows, slot.slots, slot.status)]
        return sum(t.numel() * t.itemsize for t in tensors)

    def open(self, num_slots: int, stores: int = 1) -> HostStore:
        """Allocate the store, once the KV pool's size is known, and launch every variant of the kernels once.

        Otherwise they would compile in the middle of serving, at the first decode step and the first long prefill.

        Args:
            stores: how many of this size the host is to hold, one for each rank that answers.
        """
        self.store = HostStore(num_slots, self._shape, self._device, stores)
        if self._device == "cuda":
            tokens = min(self.capacity, kernels.MOST_SPREAD_TOKENS + 1)
            buffer = torch.zeros(
                (self._shape.num_layers, tokens, self._width), dtype=torch.int32, device="cuda"
            )
            padding = torch.zeros(tokens, dtype=torch.int64, device="cuda")  # slot 0: not filed
            for num_tokens in (1, tokens):
                self.file_step(buffer, 0, padding[:num_tokens])
        return self.store

    def file_step(
        self, buffer: torch.Tensor, first_row: int, cache_loc: torch.Tensor
    ) -> Event | None:
        """Take over one step's rows, behind what the current stream has been given so far.

        Args:
            buffer: int32 [layers, capacity, width], the capture buffer.
            first_row: this rank's first token in it.
            cache_loc: int64 [n], or of another integer type, the step's KV slots; n <= capacity.

        Returns:
            The event that marks the rows as filed; it is reused RING_SLOTS steps later. None if they were filed on the
            current stream, where any later event of the step covers them.
        """
        if cache_loc.dtype != torch.int64:
            cache_loc = cache_loc.long()
        if self._device == "cuda" and cache_loc.shape[0] <= kernels.MOST_SPREAD_TOKENS:
            self.wait_for_earlier()
            self.file_at_once(buffer, first_row, cache_loc)
            return self.filed_here()
        slot = self._next_slot()
        kernels.pack(
            buffer,
            first_row,
            cache_loc,
            slot.rows,
            slot.slots,
            slot.status,
            self._shape.top_k,
            self._shape.num_experts,
        )
        return self._file(slot, cache_loc.shape[0])

    def file_at_once(self, buffer: torch.Tensor, first_row: int, cache_loc: torch.Tensor) -> None:
        """Pack and file few tokens on the current stream; arguments as for `file_step`. May be recorded in a CUDA graph.

        Before it, or before a replay, comes `wait_for_earlier`, behind it `filed_here`.
        """
        kernels.launch_pack_and_file(
            buffer,
            first_row,
            cache_loc,
            self.store.ids,
            self.store.status,
            self._shape.top_k,
            self._shape.num_experts,
        )

    def wait_for_earlier(self) -> None:
        """Before rows are filed on the current stream: behind those that the side stream still files."""
        if self._side_filed is not None:
            current_stream_waits(self._side_filed)
            self._side_filed = None

    def filed_here(self) -> Event | None:
        """Rows have been filed on the current stream. What `file_step` returns for them."""
        if not self._waits_in_place:
            return None
        record_in_current(self._filed_at_once)
        self.last_filed = self._filed_at_once
        return self._filed_at_once

    def file_gathered(self, gather: RowGather, cache_loc: torch.Tensor) -> Event:
        """As `file_step`, with the rows that `gather` has joined; the first `len(cache_loc)` of them."""
        slot = self._next_slot()
        gather.unpack(slot.rows, slot.status)
        slot.slots[: cache_loc.shape[0]].copy_(cache_loc)
        return self._file(slot, cache_loc.shape[0])

    def mark_bad(self, cache_loc: torch.Tensor) -> Event:
        """Mark every KV slot of a step whose rows could not be captured; whoever asks for them gets an error."""
        for start in range(0, cache_loc.shape[0], self.capacity):
            part = cache_loc[start : start + self.capacity]
            slot = self._next_slot()
            slot.slots[: len(part)].copy_(part)
            slot.status[: len(part)].fill_(kernels.BAD)
            filed = self._file(slot, len(part))
        return filed

    def _next_slot(self) -> RingSlot:
        """A slot that the current stream may write: its last rows have been filed by then."""
        self._step += 1
        slot = self._ring[self._step % RING_SLOTS]
        current_stream_waits(slot.filed)
        return slot

    def _file(self, slot: RingSlot, num_tokens: int) -> Event:
        record_in_current(slot.packed)
        self._stream.wait(slot.packed)
        kernels.file(
            slot.units,
            slot.slots,
            slot.status,
            num_tokens,
            self.store.units,
            self.store.status,
            self._stream.stream,
        )
        self._stream.record(slot.filed)
        self._side_filed = self.last_filed = slot.filed
        return slot.filed


def check_host_memory(num_bytes: int, num_slots: int, stores: int) -> None:
    """Raises RuntimeError where the host has too little memory for a store, or for those of all its ranks together.

    The other ranks may have theirs by now, or not: what is available says nothing of them, the total does.
    """
    memory = psutil.virtual_memory()
    total = min(memory.total, _container_limit())
    available = min(memory.available, total)
    if num_bytes > available or num_bytes * stores > total:
        of_all = f", {stores} times on this host" if stores > 1 else ""
        raise RuntimeError(
            f"--enable-return-routed-experts needs {num_bytes / 2**30:.2f} GiB of host memory for "
            f"{num_slots} KV slots{of_all}; {available / 2**30:.2f} GiB are available, of {total / 2**30:.2f}. "
            "Lower --max-total-tokens or --mem-fraction-static, or give the host more memory."
        )


def _container_limit() -> float:
    """Bytes that the container may use (cgroup v2), infinite without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return math.inf
    return math.inf if limit == "max" else int(limit)


def register_host_memory(owner: object, address: int, num_bytes: int) -> None:
    """Pin [address, address + num_bytes) and make it addressable from the GPU, for as long as `owner` lives.

    Raises:
        RuntimeError: with CUDA's words and what to do.
    """
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(status) != 0:
        raise RuntimeError(
            f"cudaHostRegister of {num_bytes} bytes for routed experts failed: "
            f"{runtime.cudaGetErrorString(status)}. Lower --max-total-tokens, or raise the host's limit on pinned memory."
        )
    # The mapping goes with its owner, and its pages must be let go of first. At exit the driver does that.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
