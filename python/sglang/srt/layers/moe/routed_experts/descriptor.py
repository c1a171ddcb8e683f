"""What travels with a message in place of rows, and the header of a block in shared memory.

Who writes which word of the header:

    READY       the schedule stream, 0 -> 1, behind the collect kernel
    BAD         the collect kernel: 1 if any row was never captured
    RELEASED    the reader, once: the block's generation
    GENERATION  the arena, when it hands the block out
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

HEADER_WORDS, WORD_BYTES = 16, 4
HEADER_BYTES = HEADER_WORDS * WORD_BYTES  # the rows follow
READY_WORD, BAD_WORD, RELEASED_WORD, GENERATION_WORD = range(4)
DTYPES = ("uint8", "uint16", "int32")
NOT_CAPTURED = (
    "not every row was captured; the server's log says why. If they are of a cached prefix, "
    "POST /flush_cache"
)


class BlockRef(NamedTuple):
    """Where another process finds a block: its segment is /proc/{pid}/fd/{fd}."""

    pid: int
    fd: int
    segment: str
    segment_bytes: int
    offset: int
    generation: int


@dataclass(slots=True)
class RowsDescriptor:
    """One request's rows on their way to the answering process. Small, unless `data` is set.

    Attributes:
        dtype: type of the stored ids, one of DTYPES.
        shape: (rows, layers, top_k).
        start_len: the request's routed_experts_start_len.
        wanted: "int32" or "auto", the request's routed_experts_dtype.
        prompt_tokens: of the request; with the completion's they say how many rows there should be.
        error: why there are no rows; then neither `block` nor `data` is set.
        block: the rows in shared memory, behind a header of HEADER_WORDS int32.
        data: the rows themselves, little-endian, where shared memory has no room, or the scheduler
            is on another node.
        born: time.monotonic() of the collection.

    Without error, block and data there are zero rows.
    """

    dtype: str
    shape: tuple[int, int, int]
    start_len: int
    wanted: str
    prompt_tokens: int = 0
    error: str | None = None
    block: BlockRef | None = None
    data: bytes | None = None
    born: float = field(default_factory=time.monotonic)

    @property
    def num_bytes(self) -> int:
        rows, layers, top_k = self.shape
        return rows * layers * top_k * np.dtype(self.dtype).itemsize

    def up_to(self, completion_tokens: int) -> RowsDescriptor:
        """The same for an answer that ends before what was computed: without the last rows."""
        rows, layers, top_k = self.shape
        rows = min(rows, max(self.prompt_tokens + completion_tokens - 1 - self.start_len, 0))
        return replace(self, shape=(rows, layers, top_k))


def memfd_name(segment: str) -> str:
    """By this a reader tells that a file descriptor still is the segment that a message names."""
    return f"sglang-routed-experts-{segment}"
