"""Streams and events of the pipeline, and their stand-ins on the CPU engine, where everything runs in order.

They are used in every step, and torch answers which stream is in use with a new object, several times for one `with
torch.cuda.stream(..)`. Here an object a stream is made once.
"""

from __future__ import annotations

import torch

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

    def __enter__(self) -> SideStream:
        if self.stream is not None:
            self._outer = current_stream()
            torch.cuda.set_stream(self.stream)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self._outer)

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for `event`; the host goes on."""
        if self.stream is not None:
            self.stream.wait_event(event)

    def record(self, event: Event) -> None:
        """Mark in `event` everything launched on this stream so far."""
        event.record(self.stream)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from handing out `tensor`'s memory before this stream is done with it."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


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
