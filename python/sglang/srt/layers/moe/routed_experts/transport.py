"""Shared memory between the scheduler that collects rows and the process that answers with them.

A segment is a memfd: it has no name in /dev/shm, is not bounded by that mount's size, and the
kernel frees it with the last process that maps it, however that process ends. The scheduler owns
the segments and hands out blocks; the message carries a RowsDescriptor; reader.py maps the same
pages.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.layers.moe.routed_experts.descriptor import (
    GENERATION_WORD,
    HEADER_BYTES,
    HEADER_WORDS,
    READY_WORD,
    RELEASED_WORD,
    WORD_BYTES,
    BlockRef,
    memfd_name,
)

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


_ALIGNMENT = (
    256  # rows start on a boundary that suits vector loads, and no two blocks share a cache line
)
_MIN_SEGMENT_BYTES = 64 << 20
_CHECKS_PER_ALLOCATION = 4  # an allocation adds one lease; looking at more than one keeps them few
# A block that its reader has not released after this long belonged to a process that died.
_LEASE_SECONDS = 900.0
_PAUSE_WHEN_FULL = 0.1  # seconds until all leases are looked at again


class RowsBlock:
    """A stretch of shared memory for one request's rows, written by the scheduler's process.

    Once `describe` was called the reader gives the block back; a block that is dropped before
    that returns to the arena by itself.

    Attributes:
        num_bytes: of the rows.
        rows: torch.uint8 [num_bytes].
        header: torch.int32 [HEADER_WORDS].
        address: of the header; the rows begin HEADER_BYTES behind it.
    """

    def __init__(self, lease: _Lease, num_bytes: int) -> None:
        self._lease = lease
        self.num_bytes = num_bytes

    @property
    def rows(self) -> torch.Tensor:
        first = self._lease.offset + HEADER_BYTES
        return self._lease.segment.memory[first : first + self.num_bytes]

    @property
    def header(self) -> torch.Tensor:
        first = self._lease.offset // WORD_BYTES
        return self._lease.segment.headers[first : first + HEADER_WORDS]

    @property
    def address(self) -> int:
        return self._lease.segment.address + self._lease.offset

    def describe(self) -> BlockRef:
        """Where the answering process finds this block, which it is to release from now on."""
        lease = self._lease
        lease.described_at = lease.clock()
        return lease.segment.reference(lease.offset, lease.generation)

    def __del__(self) -> None:
        self._lease.dropped = self._lease.described_at is None


class RowsArena:
    """Owns the segments; decides when a block may be handed out again. For one thread only.

    Args:
        capacity: bytes of shared memory at most. Segments are added as needed and kept.
        register: called with (owner, address, bytes) of each new segment: makes it addressable from
            the GPU for as long as `owner` lives.
        first_segment: bytes allocated at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        capacity: int,
        register: Callable[[object, int, int], None] | None = None,
        first_segment: int = _MIN_SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._register = register
        self._segment_bytes = first_segment
        self._clock = clock
        self._segments: list[_Segment] = []
        self._leases: deque[_Lease] = deque()
        # Where a block lay, rows of others may lie later: its number must be nothing that they look like.
        self._generation = secrets.randbelow(0x7FFFFFFF)
        self._full_until = 0.0
        self._grow(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory held."""
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def blocks_in_flight(self) -> int:
        """Blocks handed out and not yet known to be released."""
        return len(self._leases)

    def allocate(self, num_bytes: int) -> RowsBlock | None:
        """A block of `num_bytes` with a cleared header; None without room: use the message then."""
        needed = HEADER_BYTES + num_bytes
        needed += -needed % _ALIGNMENT
        self._reclaim(_CHECKS_PER_ALLOCATION)
        block = self._take(needed, num_bytes)
        if block is not None or self._clock() < self._full_until:
            return block
        block = (self._reclaim(len(self._leases)) and self._take(needed, num_bytes)) or (
            self._grow(needed) and self._take(needed, num_bytes)
        )
        if not block:
            self._full_until = self._clock() + _PAUSE_WHEN_FULL
        return block or None

    def _take(self, needed: int, num_bytes: int) -> RowsBlock | None:
        for segment in self._segments:
            offset = segment.take(needed)
            if offset is not None:
                self._generation = self._generation % 0x7FFFFFFF + 1
                lease = _Lease(segment, offset, needed, self._generation, self._clock)
                self._leases.append(lease)
                segment.clear_header(offset, self._generation)
                return RowsBlock(lease, num_bytes)
        return None

    def _reclaim(self, checks: int) -> bool:
        """Look at up to `checks` leases, in turn. Whether any block became free."""
        freed = False
        for _ in range(min(checks, len(self._leases))):
            lease = self._leases.popleft()
            if lease.over():
                lease.segment.give(lease.offset, lease.num_bytes)
                freed = True
            else:
                self._leases.append(lease)
        return freed

    def _grow(self, needed: int) -> bool:
        num_bytes = max(needed, self._segment_bytes)
        num_bytes += -num_bytes % mmap.PAGESIZE
        room = self._capacity - self.num_bytes
        num_bytes = num_bytes if num_bytes <= room else room // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes < max(needed, mmap.PAGESIZE):
            return False
        try:
            self._segments.append(_Segment(num_bytes, self._register))
        except (OSError, RuntimeError) as error:
            logger.warning(
                f"Routed experts: no further {num_bytes >> 20} MB of shared memory ({error}). "
                "Rows that find no room there travel in the message, which costs copies."
            )
            self._capacity = self.num_bytes
            return False
        return True


def open_arena(server_args: ServerArgs) -> RowsArena | None:
    """The arena of this scheduler, or None where rows must travel in the message."""
    from sglang.srt.environ import envs

    from sglang.srt.layers.moe.routed_experts.store import register_host_memory

    if server_args.node_rank != 0 or envs.SGLANG_ROUTED_EXPERTS_TRANSPORT.get() == "message":
        return None
    capacity = envs.SGLANG_ROUTED_EXPERTS_SHM_MB.get() << 20
    return RowsArena(capacity, register_host_memory if server_args.device == "cuda" else None)


@dataclass
class _Lease:
    """A block that is not free: who has it, and since when its reader knows."""

    segment: _Segment
    offset: int
    num_bytes: int
    generation: int
    clock: Callable[[], float]
    described_at: float | None = None
    dropped: bool = False

    def over(self) -> bool:
        """Whether nobody writes (READY is up) and nobody will read."""
        if self.segment.word(self.offset, READY_WORD) == 0:
            return False
        return (
            self.segment.word(self.offset, RELEASED_WORD) == self.generation
            or self.dropped
            or (self.described_at is not None and self.clock() - self.described_at > _LEASE_SECONDS)
        )


class _Segment:
    """One memfd and its free ranges."""

    def __init__(self, num_bytes: int, register: Callable[[object, int, int], None] | None) -> None:
        import torch

        self.num_bytes = num_bytes
        self._name, self._pid = secrets.token_hex(8), os.getpid()
        self._fd = os.memfd_create(memfd_name(self._name), os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.headers = self.memory.view(torch.int32)
        self.address = self.memory.data_ptr()
        if register is not None:
            register(self, self.address, num_bytes)
        self._words = memoryview(self._map).cast("i")
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    def reference(self, offset: int, generation: int) -> BlockRef:
        return BlockRef(self._pid, self._fd, self._name, self.num_bytes, offset, generation)

    def word(self, offset: int, index: int) -> int:
        """A word of the header at `offset`."""
        return self._words[offset // WORD_BYTES + index]

    def clear_header(self, offset: int, generation: int) -> None:
        self._map[offset : offset + HEADER_BYTES] = bytes(HEADER_BYTES)
        self._words[offset // WORD_BYTES + GENERATION_WORD] = generation

    def take(self, num_bytes: int) -> int | None:
        """Offset of the first free range that is large enough, shortened by `num_bytes`."""
        for i, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[i : i + 1] = (
                    [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                )
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Add a block's range to the free ones, joined with its neighbours.

        Whoever still reads the block, minutes late, sees by its header that it is not theirs any more.
        """
        self._words[offset // WORD_BYTES + GENERATION_WORD] = 0
        i = next((i for i, (other, _) in enumerate(self._free) if other > offset), len(self._free))
        if i < len(self._free) and offset + num_bytes == self._free[i][0]:
            num_bytes += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            offset, num_bytes = self._free[i - 1][0], self._free[i - 1][1] + num_bytes
            i -= 1
            self._free.pop(i)
        self._free.insert(i, (offset, num_bytes))
