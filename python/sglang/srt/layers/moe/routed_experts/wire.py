"""What trainers decode: the text of `meta_info["routed_experts"]` and the fields beside it.

    routed_experts            base64 of little-endian ids, row-major [rows, layers, top_k]; "" for zero rows
    routed_experts_start_len  position of the first row, as the request asked
    routed_experts_info       {"dtype": "int32" | "uint8" | "uint16", "shape": [rows, layers, top_k], "start_len"}
    routed_experts_error      why there are no rows; `routed_experts` is absent then

The OpenAI endpoints have the same fields in `sglext`. Nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

# Bytes encoded at a time: a multiple of 3, so that the texts can be joined, and of 4. Casting and encoding release the
# GIL, and a slice stays in the cache between the two.
_SLICE_BYTES = 3 << 16


class EncodedRows:
    """The text of one request's rows, in pieces of at most 256 KiB, sent one after the other.

    `owner` is kept as long as this object.
    """

    __slots__ = ("num_bytes", "owner", "pieces")

    def __init__(self, pieces: list[bytes], owner: Any = None) -> None:
        self.pieces = pieces
        self.num_bytes = sum(map(len, pieces))
        self.owner = owner

    def text(self) -> str:
        """The whole text, copied."""
        return b"".join(self.pieces).decode("ascii")

    def __repr__(self) -> str:
        return f"<routed experts, {self.num_bytes} bytes>"


def wire_dtype(stored: str, wanted: str) -> str:
    """The type on the wire of ids stored as `stored`: "int32" if that is wanted, for "auto" the stored type."""
    return "int32" if wanted == "int32" else stored


def encoded_bytes(shape: tuple[int, int, int], dtype: str) -> int:
    """Length of the text of that many rows."""
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 3) * 4


def encode_rows(rows: np.ndarray, dtype: str, owner: Any = None) -> EncodedRows:
    """Rows of any integer type and shape as base64 of little-endian `dtype`."""
    target = np.dtype(dtype).newbyteorder("<")
    flat = rows.reshape(-1)
    step = _SLICE_BYTES // target.itemsize
    return EncodedRows(
        [
            pybase64.b64encode(np.ascontiguousarray(flat[start : start + step], target))
            for start in range(0, flat.size, step)
        ],
        owner,
    )


def rows_info(dtype: str, shape: tuple[int, int, int], start_len: int) -> dict[str, Any]:
    """The value of `routed_experts_info`."""
    return {"dtype": dtype, "shape": list(shape), "start_len": start_len}


def extract_routed_experts_from_meta_info(data: Mapping[str, Any]) -> np.ndarray:
    """The expert ids of a response, int32 [rows * layers * top_k], whichever type they travelled as.

    Args:
        data: an item of a /generate response or of `Engine.generate`, with "meta_info". For an OpenAI response
            pass {"meta_info": response["sglext"]}, or a choice's "sglext".

    Raises:
        ValueError: the response has no rows; the message says why.
    """
    return _decode(data["meta_info"]).astype(np.int32, copy=False)


def decode_routed_experts(meta_info: Mapping[str, Any]) -> np.ndarray:
    """The expert ids of a response, [rows, layers, top_k], of the type that `routed_experts_info` names; read-only.

    Row i is the routing of the token at position start_len + i of prompt and completion together.

    Args:
        meta_info: "meta_info" of a /generate item, or "sglext" of an OpenAI response or choice.

    Raises:
        ValueError: the response has no rows, or does not describe them.
    """
    if "routed_experts_info" not in meta_info:
        raise ValueError(
            "the response does not describe its routed experts (no routed_experts_info): the server is older than that "
            "field. Use extract_routed_experts_from_meta_info and reshape to (-1, layers, top_k)"
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
