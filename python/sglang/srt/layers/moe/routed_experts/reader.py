"""The answering side of shared memory: map a block once, read it, give it back exactly once."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time

import numpy as np

from sglang.srt.layers.moe.routed_experts.descriptor import (
    BAD_WORD,
    GENERATION_WORD,
    HEADER_BYTES,
    HEADER_WORDS,
    NOT_CAPTURED,
    READY_WORD,
    RELEASED_WORD,
    BlockRef,
    RowsDescriptor,
    memfd_name,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between looks at READY


class RoutedExpertsError(RuntimeError):
    """A request's rows cannot be delivered; its text and finish reason can."""


class RowsReader:
    """Reads the blocks that descriptors name. One a process; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[tuple[int, str], mmap.mmap] = {}

    def read(self, descriptor: RowsDescriptor, timeout_s: float = 60.0) -> np.ndarray:
        """The rows, [rows, layers, top_k] of the descriptor's dtype; read-only.

        Waits for the collect kernel, up to `timeout_s` seconds. A view of shared memory: valid
        until `release`, and only if `still_ours` says so after the last look at it.

        Raises:
            RoutedExpertsError: there are no rows, or they cannot be reached.
        """
        if descriptor.error is not None:
            raise RoutedExpertsError(descriptor.error)
        if descriptor.block is None:
            return _as_rows(descriptor, descriptor.data or b"", 0)
        segment = self._open(descriptor.block)
        words = _header(segment, descriptor.block)
        _wait_for_ready(words, descriptor.block.generation, timeout_s)
        if words[BAD_WORD]:
            raise RoutedExpertsError(NOT_CAPTURED)
        return _as_rows(descriptor, segment, descriptor.block.offset + HEADER_BYTES)

    def still_ours(self, descriptor: RowsDescriptor) -> bool:
        """Whether the block has not been handed to another request since it was described."""
        if descriptor.block is None:
            return True
        words = _header(self._open(descriptor.block), descriptor.block)
        return bool(words[GENERATION_WORD] == descriptor.block.generation)

    def release(self, descriptor: RowsDescriptor) -> None:
        """Give the block back. Until then it stays occupied; a second call does nothing."""
        block = descriptor.block
        if block is None:
            return
        try:
            words = _header(self._open(block), block)
        except RoutedExpertsError:
            return  # its owner is gone, and the memory with it
        with self._lock:
            if words[GENERATION_WORD] == block.generation:
                words[RELEASED_WORD] = block.generation

    def _open(self, block: BlockRef) -> mmap.mmap:
        key = (block.pid, block.segment)
        with self._lock:
            if key not in self._segments:
                self._forget_ended_processes()
                self._segments[key] = _map(block)
            return self._segments[key]

    def _forget_ended_processes(self) -> None:
        """Unmap what belonged to schedulers that ended: restarting an engine must not add up."""
        for key in [key for key in self._segments if not os.path.exists(f"/proc/{key[0]}/exe")]:
            del self._segments[key]


def _map(block: BlockRef) -> mmap.mmap:
    path = f"/proc/{block.pid}/fd/{block.fd}"
    try:
        if memfd_name(block.segment) not in os.readlink(path):
            raise FileNotFoundError(errno.ENOENT, "another file has this number")
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RoutedExpertsError(
            f"the scheduler's shared memory cannot be opened ({path}: {error.strerror}). If the "
            "scheduler runs in another container or as another user, start the server with "
            "SGLANG_ROUTED_EXPERTS_TRANSPORT=message"
        ) from error
    try:
        return mmap.mmap(fd, block.segment_bytes)
    finally:
        os.close(fd)


def _header(segment: mmap.mmap, block: BlockRef) -> np.ndarray:
    return np.frombuffer(segment, dtype=np.int32, count=HEADER_WORDS, offset=block.offset)


def _wait_for_ready(words: np.ndarray, generation: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pause = _FIRST_PAUSE
    while True:
        ready = words[READY_WORD]
        if words[GENERATION_WORD] != generation:
            raise RoutedExpertsError("the rows were given up before they were read, after minutes")
        if ready:
            return
        if time.monotonic() > deadline:
            raise RoutedExpertsError(f"the rows were not collected within {timeout_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _as_rows(descriptor: RowsDescriptor, buffer: mmap.mmap | bytes, offset: int) -> np.ndarray:
    dtype = np.dtype(descriptor.dtype).newbyteorder("<")
    count = int(np.prod(descriptor.shape))
    if count == 0:
        return np.empty(descriptor.shape, dtype)
    rows = np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(descriptor.shape)
    rows.flags.writeable = False
    return rows
