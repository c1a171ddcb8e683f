"""What trainers decode: the text of `meta_info["routed_experts"]` and the fields beside it.

    routed_experts            base64 of little-endian ids, row-major [rows, layers, top_k];
                              "" for zero rows
    routed_experts_start_len  position of the first row, as the request asked
    routed_experts_info       {"dtype": "int32" | "uint8" | "uint16",
                              "shape": [rows, layers, top_k], "start_len": the same again}
    routed_experts_error      why there are no rows; `routed_experts` is absent then

The OpenAI endpoints have the same fields in `sglext`. Nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

# Bytes encoded at a time: a multiple of 3, so that the texts can be joined, and of 4. Casting and
# encoding release the GIL, and a piece stays in the cache between the two.
_PIECE_BYTES = 3 << 16


class WireRows:
    """One request's rows as base64 of little-endian `dtype`, encoded while it is sent.

    Never as a whole: 66 MB of text would cost 66 MB of fresh memory, and freeing that at once stops
    a process for milliseconds.

    Args:
        rows: ids of any integer type and shape, row-major.
        dtype: their type on the wire.
        owner: kept as long as this object.
    """

    __slots__ = ("_dtype", "_flat", "_step", "num_bytes", "owner")

    def __init__(self, rows: np.ndarray, dtype: str, owner: Any = None) -> None:
        self._flat = rows.reshape(-1)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._step = _PIECE_BYTES // self._dtype.itemsize
        self.num_bytes = encoded_bytes(rows.shape, dtype)
        self.owner = owner

    @property
    def num_pieces(self) -> int:
        return -(-self._flat.size // self._step)

    def piece(self, i: int) -> bytes:
        """Piece `i` of the text, at most 256 KiB."""
        return pybase64.b64encode(self._part(i))

    def text(self) -> str:
        """The whole text, for callers in the same process."""
        parts = map(self._part, range(self.num_pieces))
        return "".join(map(pybase64.b64encode_as_string, parts))

    def _part(self, i: int) -> np.ndarray:
        part = self._flat[i * self._step : (i + 1) * self._step]
        return np.ascontiguousarray(part, self._dtype)

    def __reduce__(self) -> tuple:
        return str, (self.text(),)

    def __repr__(self) -> str:
        return f"<routed experts, {self.num_bytes} bytes>"


def wire_dtype(stored: str, wanted: str) -> str:
    """The type on the wire of ids stored as `stored`, which is the smallest that holds them."""
    return "int32" if wanted == "int32" else stored


def encoded_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Length of the text of that many rows."""
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 3) * 4


def rows_info(dtype: str, shape: tuple[int, int, int], start_len: int) -> dict[str, Any]:
    """The value of `routed_experts_info`."""
    return {"dtype": dtype, "shape": list(shape), "start_len": start_len}


def extract_routed_experts_from_meta_info(data: Mapping[str, Any]) -> np.ndarray:
    """The expert ids of a response, int32 [rows * layers * top_k], whatever type they travelled as.

    Args:
        data: an item of a /generate response or of `Engine.generate`, with "meta_info". For an
            OpenAI response pass {"meta_info": response["sglext"]}, or a choice's "sglext".

    Raises:
        ValueError: the response has no rows; the message says why.
    """
    return _decode(data["meta_info"]).astype(np.int32, copy=False)


def decode_routed_experts(meta_info: Mapping[str, Any]) -> np.ndarray:
    """The expert ids of a response, [rows, layers, top_k], of the type on the wire; read-only.

    Row i is the routing of the token at position start_len + i of prompt and completion together.

    Args:
        meta_info: "meta_info" of a /generate item, or "sglext" of an OpenAI response or choice.

    Raises:
        ValueError: the response has no rows, or does not describe them.
    """
    if "routed_experts_info" not in meta_info:
        raise ValueError(
            "the response has no routed_experts_info: the server is older than that field. Use "
            "extract_routed_experts_from_meta_info and reshape to (-1, layers, top_k)"
        )
    return _decode(meta_info).reshape(meta_info["routed_experts_info"]["shape"])


def _decode(meta_info: Mapping[str, Any]) -> np.ndarray:
    text = meta_info.get("routed_experts")
    if text is None:
        raise ValueError(
            "the response has no routed experts: "
            + meta_info.get(
                "routed_experts_error", "was the request sent with return_routed_experts?"
            )
        )
    dtype = meta_info.get("routed_experts_info", {}).get("dtype", "int32")
    return np.frombuffer(pybase64.b64decode(text), np.dtype(dtype).newbyteorder("<"))
