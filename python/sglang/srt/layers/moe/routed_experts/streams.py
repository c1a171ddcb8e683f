"""Streams and events of the pipeline, and their stand-ins on the CPU engine, where everything runs in order.

They are used in every step, and torch answers which stream is in use with a new object, several times for one `with
torch.cuda.stream(..)`. Here an object a stream is made once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_NEEDS_DRIVER = "--enable-return-routed-experts needs a GPU driver of CUDA 12 or later"
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class InOrderEvent:
    """An event where there are no streams: everything before it has happened."""

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


Event = torch.cuda.Event | InOrderEvent


class SideStream:
    """A stream of ours beside the base's forward and schedule streams; in order with the host on the CPU engine."""

    def __init__(self, device: str) -> None:
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream() if device == "cuda" else None

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for `event`; the host goes on."""
        if self.stream is not None:
            self.stream.wait_event(event)

    def record(self, event: Event) -> None:
        """Mark in `event` everything launched on this stream so far."""
        event.record(self.stream)


def new_event(device: str) -> Event:
    return torch.cuda.Event() if device == "cuda" else InOrderEvent()


def current_handle() -> int:
    """CUDA's handle of the stream in use: the call by which Triton finds where to launch."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def current_stream() -> torch.cuda.Stream:
    """The stream in use. Streams of torch live as long as the process, so that a handle is always the same one's."""
    device = torch._C._cuda_getDevice()
    key = device, torch._C._cuda_getCurrentRawStream(device)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream()
    return stream


def record_in_current(event: Event) -> None:
    """Mark in `event` everything launched on the stream in use so far."""
    if not isinstance(event, InOrderEvent):
        event.record(current_stream())


def current_stream_waits(event: Event) -> None:
    """Make the stream in use wait for `event`; the host goes on."""
    if not isinstance(event, InOrderEvent):
        current_stream().wait_event(event)


def write_word_in_current(address: int, value: int) -> None:
    """Write 32 bits of pinned host memory behind everything launched on the stream in use so far.

    By cuStreamWriteValue32, which puts a fence of the whole system before the write: whoever sees the word sees what the
    stream wrote before it.

    Raises:
        RuntimeError: the driver does not do it.
    """
    status = _stream_write_value()(current_handle(), address, value, 0)
    if status != 0:
        raise RuntimeError(f"{_NEEDS_DRIVER}: cuStreamWriteValue32 failed with error {status}")


@functools.cache
def _stream_write_value() -> Callable[[int, int, int, int], int]:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{_NEEDS_DRIVER}: {error}") from error
    function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    return function
