"""The client: events out of a stream in pieces, figures out of events, and wrong rows."""

from __future__ import annotations

import base64
import json

import load
import numpy as np
import pytest
from model import MODELS

MODEL = MODELS["tiny"]


def _rows(count: int, dtype: str = "int32") -> np.ndarray:
    rng = np.random.default_rng(1)
    ids = [rng.permutation(MODEL.experts)[: MODEL.top_k] for _ in range(count * MODEL.layers)]
    return np.array(ids, dtype).reshape(count, MODEL.layers, MODEL.top_k)


def _meta(rows: np.ndarray) -> dict:
    text = base64.b64encode(rows.tobytes()).decode()
    info = {"dtype": rows.dtype.name, "shape": list(rows.shape), "start_len": 0}
    return {"routed_experts": text, "routed_experts_info": info}


def _event(index: int, tokens: int, **meta: object) -> bytes:
    data = {"index": index, "meta_info": {"completion_tokens": tokens, **meta}}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def test_events_come_whole_however_the_stream_is_cut() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 22}\n\n: a comment\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream) + 1):
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        found = list(load.events(list(enumerate(pieces))))
        assert [line for _, line in found] == [b'{"a": 1}', b'{"b": 22}', b"[DONE]"]
        ends = [stream.index(b"\n"), stream.index(b"\n", 16), len(stream) - 2]
        assert [piece for piece, _ in found] == [end // size for end in ends]


def test_figures_of_a_batch() -> None:
    arrivals = [
        (1.0, _event(0, 1)),
        (2.0, _event(1, 1)),
        (3.0, _event(0, 3) + _event(1, 3)),
        (4.0, _event(0, 5) + _event(1, 5)),
        (5.0, _event(0, 6, **_meta(_rows(7)))),
        (7.0, _event(1, 6, **_meta(_rows(7)))),
        (8.0, b"data: [DONE]\n\n"),
    ]
    run = load._summary(arrivals, 0.5, MODEL, load.Request(2, 6, "int32"), 2)
    assert run.ttft_s == 1.5
    assert run.latency_s == 7.5
    assert run.output_tps == pytest.approx(2 * 5 / (8.0 - 2.0))
    assert run.step_ms == 500
    assert run.problems == []


def test_accept_length_counts_the_tokens_of_steps_alone() -> None:
    def arrivals(**meta: int) -> list[tuple[float, bytes]]:
        return [(1.0, _event(0, 1, **meta)), (2.0, _event(0, 10, **meta))]

    run = load._summary(arrivals(spec_verify_ct=3), 0.0, MODEL, load.Request(2, 10), 1)
    assert run.accept_length == 3.0
    assert load._summary(arrivals(), 0.0, MODEL, load.Request(2, 10), 1).accept_length is None


def test_an_answer_that_is_not_whole_is_no_figure() -> None:
    with pytest.raises(load.LoadError, match="1 of 2 requests"):
        load._summary([(1.0, _event(0, 4) + _event(1, 3))], 0.0, MODEL, load.Request(2, 4), 2)
    with pytest.raises(load.LoadError, match="too long"):
        error = b'data: {"error": {"message": "too long"}}\n\n'
        load._summary([(1.0, error)], 0.0, MODEL, load.Request(2, 4), 1)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_right_rows(dtype: str) -> None:
    meta = _meta(_rows(9, dtype))
    assert load.row_problems({0: meta}, MODEL, load.Request(6, 4, "auto")) == []


def test_wrong_rows() -> None:
    request = load.Request(6, 4, "int32")

    def problem(rows: np.ndarray) -> str:
        return "; ".join(load.row_problems({0: _meta(rows)}, MODEL, request))

    good = _rows(9)
    assert "for 9 rows" in problem(good[1:])
    twice, outside = good.copy(), good.copy()
    twice[3, 1, 0] = twice[3, 1, 1]
    outside[8, 0, 0] = MODEL.experts
    assert "chosen twice" in problem(twice)
    assert f"to {MODEL.experts}" in problem(outside)
    assert "every row is the same" in problem(np.repeat(good[:1], 9, axis=0))
    missing = load.row_problems({0: {"routed_experts_error": "no room"}}, MODEL, request)
    assert missing == ["request 0 has no rows: no room"]
    unasked = load.row_problems({0: _meta(good)}, MODEL, load.Request(6, 4))
    assert "did not ask" in unasked[0]


def test_the_request_body() -> None:
    body = json.loads(load.Request(2, 3, "auto").body([[1, 2]]))
    assert body["return_routed_experts"] is True
    assert body["routed_experts_dtype"] == "auto"
    assert "routed_experts_dtype" not in json.loads(load.Request(2, 3, "int32").body([[1, 2]]))
    assert "return_routed_experts" not in json.loads(load.Request(2, 3).body([[1, 2]]))
