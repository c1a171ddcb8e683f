"""JSON responses with rows in them, sent without ever holding the whole text.

A response of 66 MB that is dumped, copied and written in one go stops the event loop, and with it
everybody else's tokens, for tens of milliseconds. Here the JSON around the rows is dumped with a
mark where rows belong. Their text is encoded on other threads, a little ahead of what is sent, and
sent in pieces, one a turn of the loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from fastapi.responses import Response, StreamingResponse
from sglang.srt.utils.json_response import ORJSON_RESPONSE_OPTIONS

from sglang.srt.layers.moe.routed_experts.wire import WireRows

Parts = list["bytes | WireRows"]

# No text of a client or a model can contain it.
_MARK = f"routed-experts-{secrets.token_hex(16)}"
_PIECES_AHEAD = 4
_encoders = ThreadPoolExecutor(2, thread_name_prefix="routed-experts-encode")


def json_parts(content: Any, before: bytes = b"", after: bytes = b"") -> Parts:
    """`content` as JSON between `before` and `after`; WireRows in it become parts of their own."""
    found: list[WireRows] = []

    def mark(value: Any) -> str:
        if not isinstance(value, WireRows):
            raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
        found.append(value)
        return _MARK

    text = orjson.dumps(content, default=mark, option=ORJSON_RESPONSE_OPTIONS)
    first, *rest = text.split(_MARK.encode())
    assert len(rest) == len(found)
    parts: Parts = [before + first]
    for rows, following in zip(found, rest):
        parts += [rows, following]
    parts[-1] += after
    return parts


async def send(parts: Parts) -> AsyncIterator[bytes]:
    """The text of `parts` in order, with a turn of the event loop for everybody else in between."""
    for part in parts:
        if isinstance(part, bytes):
            yield part
            continue
        async for piece in _encoded(part):
            yield piece
            await asyncio.sleep(0)
        part.owner = None  # sent; a stream of samples ends in a cycle that may hold it for long


def json_response(content: Any) -> Response:
    """A response with `content` as JSON. Its length is announced."""
    parts = json_parts(content)
    if len(parts) == 1:
        return Response(parts[0], media_type="application/json")
    size = sum(len(part) if isinstance(part, bytes) else part.num_bytes for part in parts)
    return StreamingResponse(
        send(parts), media_type="application/json", headers={"content-length": str(size)}
    )


async def _encoded(rows: WireRows) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    jobs = (
        loop.run_in_executor(_encoders, _encode, rows, first)
        for first in range(0, rows.num_pieces, _PIECES_AHEAD)
    )
    ahead = next(jobs, None)
    while ahead is not None:
        pieces, ahead = await ahead, next(jobs, None)
        for piece in pieces:
            yield piece


def _encode(rows: WireRows, first: int) -> list[bytes]:
    return [rows.piece(i) for i in range(first, min(first + _PIECES_AHEAD, rows.num_pieces))]
