"""Streams and events of the pipeline, and their stand-ins on the CPU engine, where everything runs in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


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
        self._context: AbstractContextManager = (
            nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        )
        self._context.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)

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


def current_stream_waits(event: Event) -> None:
    """Make the stream in use wait for `event`; the host goes on."""
    if not isinstance(event, InOrderEvent):
        torch.cuda.current_stream().wait_event(event)
