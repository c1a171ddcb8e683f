"""JSON responses with rows in them, sent without ever holding the whole text.

A response of 66 MB that is dumped, copied and written in one go stops the event loop, and with it
everybody else's tokens, for tens of milliseconds. Here the JSON around the rows is dumped with a
mark where rows belong, and the pieces of their text are sent in between, one a turn of the loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi.responses import Response, StreamingResponse
from sglang.srt.utils.json_response import ORJSON_RESPONSE_OPTIONS

from sglang.srt.layers.moe.routed_experts.wire import EncodedRows

# No text of a client or a model can contain it.
_MARK = f"routed-experts-{secrets.token_hex(16)}"
_SMALL_BYTES = 256 << 10


def json_pieces(content: Any, before: bytes = b"", after: bytes = b"") -> list[bytes]:
    """`content` as JSON, between `before` and `after`, in pieces of which none is large.

    EncodedRows anywhere in `content` become their text. Everything else is dumped as elsewhere.
    """
    found: list[EncodedRows] = []

    def mark(value: Any) -> str:
        if not isinstance(value, EncodedRows):
            raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
        found.append(value)
        return _MARK

    text = orjson.dumps(content, default=mark, option=ORJSON_RESPONSE_OPTIONS)
    around = text.split(_MARK.encode())
    assert len(around) == len(found) + 1
    pieces = [before + around[0]]
    for rows, rest in zip(found, around[1:]):
        pieces += rows.pieces
        pieces.append(rest)
    pieces[-1] += after
    small = sum(map(len, pieces)) <= _SMALL_BYTES
    return [b"".join(pieces)] if small else pieces


async def paced(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """The pieces in order, with a turn of the event loop for everybody else after each."""
    for piece in pieces:
        yield piece
        if len(pieces) > 1:
            await asyncio.sleep(0)


def json_response(content: Any) -> Response:
    """A response with `content` as JSON, in pieces if it is large. Its length is announced."""
    pieces = json_pieces(content)
    if len(pieces) == 1:
        return Response(pieces[0], media_type="application/json")
    return StreamingResponse(
        paced(pieces),
        media_type="application/json",
        headers={"content-length": str(sum(map(len, pieces)))},
    )
