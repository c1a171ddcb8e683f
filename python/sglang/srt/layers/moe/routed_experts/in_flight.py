"""Back-pressure: bytes of rows between the scheduler's message and the client, and when to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PATIENCE_SECONDS = 300.0


class Claim:
    """Some bytes in flight. They count until the last reference to this object is gone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, give_back: Callable[[int], None], num_bytes: int
    ) -> None:
        self._loop = loop
        self._give_back = give_back
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        # Any thread, at any point: hence no lock, and the count changes on the loop only.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give_back, self._num_bytes)


class BytesInFlight:
    """Counts the bytes that are on their way out. Lives on one event loop.

    Args:
        limit: bytes above which no further request that asks for rows is admitted.
        on_change: called with the number of bytes in flight whenever it changes.
    """

    def __init__(self, limit: int, on_change: Callable[[int], None] | None = None) -> None:
        self.limit = limit
        self.total = 0
        self._on_change = on_change
        self._fits = asyncio.Event()

    def claim(self, num_bytes: int) -> Claim:
        """Count `num_bytes` until the claim is gone. Never waits: what has finished must go out."""
        self._add(num_bytes)
        return Claim(asyncio.get_running_loop(), self._give_back, num_bytes)

    async def room(self) -> None:
        """Wait until at most `limit` bytes are in flight.

        Raises:
            fastapi.HTTPException: 503, not within `_PATIENCE_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_SECONDS
        while self.total > self.limit:
            self._fits.clear()
            try:
                await asyncio.wait_for(self._fits.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise _unavailable(self.total) from None

    def _give_back(self, num_bytes: int) -> None:
        self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.total += num_bytes
        if self.total <= self.limit:
            self._fits.set()
        if self._on_change is not None:
            self._on_change(self.total)


def _unavailable(total: int) -> Exception:
    from fastapi import HTTPException

    return HTTPException(
        status_code=503,
        detail=f"{total >> 20} MB of routed experts wait for clients to read them. Read answers "
        "while further requests are sent, or raise SGLANG_ROUTED_EXPERTS_IN_FLIGHT_MB.",
    )
