"""The bytes that trainers decode, with decoders of our own and with what trainers do by hand."""

import base64
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sglang.srt.layers.moe.routed_experts import wire

LAYERS, TOP_K = 48, 8


def ids(rows, dtype=np.uint8, seed=0):
    high = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, high, (rows, LAYERS, TOP_K)).astype(dtype)


def meta_info(rows, wanted, start_len=0):
    dtype = wire.wire_dtype(rows.dtype.name, wanted)
    return {
        "routed_experts": wire.WireRows(rows, dtype).text(),
        "routed_experts_info": wire.rows_info(dtype, rows.shape, start_len),
    }


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 127, 128, 129, 512, 513, 3000])
@pytest.mark.parametrize("stored", [np.uint8, np.uint16])
def test_int32_is_what_trainers_decode_today(rows, stored):
    original = ids(rows, stored)
    meta = meta_info(original, "int32")
    assert meta["routed_experts"] == base64.b64encode(original.astype("<i4").tobytes()).decode()
    if rows == 0:
        assert meta["routed_experts"] == ""
    flat = wire.extract_routed_experts_from_meta_info({"meta_info": meta})
    assert flat.dtype == np.int32 and flat.ndim == 1
    assert np.array_equal(flat.reshape(-1, LAYERS, TOP_K), original)


@pytest.mark.parametrize("rows", [0, 1, 2, 511, 512, 513, 3000])
@pytest.mark.parametrize("stored", [np.uint8, np.uint16])
def test_auto_is_the_smallest_type_and_describes_itself(rows, stored):
    original = ids(rows, stored)
    meta = meta_info(original, "auto", start_len=5)
    assert meta["routed_experts_info"] == {
        "dtype": original.dtype.name,
        "shape": [rows, LAYERS, TOP_K],
        "start_len": 5,
    }
    assert meta["routed_experts"] == base64.b64encode(original.tobytes()).decode()
    decoded = wire.decode_routed_experts(meta)
    assert decoded.dtype == stored and np.array_equal(decoded, original)
    flat = wire.extract_routed_experts_from_meta_info({"meta_info": meta})
    assert flat.dtype == np.int32 and np.array_equal(flat, original.reshape(-1))


def test_pieces_are_small_and_join_to_the_text():
    rows = wire.WireRows(ids(3000), "int32")
    pieces = [rows.piece(i) for i in range(rows.num_pieces)]
    assert len(pieces) > 10 and max(map(len, pieces)) <= 256 * 1024
    assert b"".join(pieces).decode() == rows.text() == pickle.loads(pickle.dumps(rows))
    assert rows.num_bytes == len(rows.text()) == 3000 * LAYERS * TOP_K * 4 * 4 // 3
    assert str(rows) == f"<routed experts, {rows.num_bytes} bytes>", "logs must not hold rows"


def test_answers_of_older_servers_are_read_as_int32():
    text = base64.b64encode(np.arange(8, dtype="<i4").tobytes()).decode()
    meta = {"routed_experts": text}
    assert wire.extract_routed_experts_from_meta_info({"meta_info": meta}).tolist() == list(
        range(8)
    )
    with pytest.raises(ValueError, match="extract_routed_experts_from_meta_info"):
        wire.decode_routed_experts(meta)


def test_no_rows_says_why():
    with pytest.raises(ValueError, match="return_routed_experts"):
        wire.extract_routed_experts_from_meta_info({"meta_info": {}})
    meta = {"routed_experts_error": "3 of 5 rows were not captured", "routed_experts_info": {}}
    with pytest.raises(ValueError, match="3 of 5 rows"):
        wire.decode_routed_experts(meta)


def test_importing_the_helper_needs_no_gpu_and_starts_nothing():
    """As in a trainer's data loader, with none of this project's settings."""
    code = """
import os, threading, torch
from sglang.srt.layers.moe.routed_experts_capturer import extract_routed_experts_from_meta_info
print(extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": "AQAAAA=="}}))
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
assert not open(f"/proc/self/task/{os.getpid()}/children").read()
"""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1]\n"
