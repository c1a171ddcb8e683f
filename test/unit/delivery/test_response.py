"""Answers with rows: the same JSON as ever, in small pieces, through a real HTTP server."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import numpy as np
import orjson
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from sglang.srt.layers.moe.routed_experts.response import json_parts, json_response, send
from sglang.srt.layers.moe.routed_experts.wire import WireRows

ROWS = np.random.default_rng(0).integers(0, 128, (3000, 48, 8)).astype(np.uint8)


def answer(rows, wanted="int32", text="a"):
    return {
        "text": text,
        "meta_info": {"id": "x", "routed_experts": WireRows(rows, wanted), "e": 1},
    }


def with_text(content):
    """The same content with rows as a str, which any JSON library can dump."""
    if isinstance(content, WireRows):
        return content.text()
    if isinstance(content, dict):
        return {key: with_text(value) for key, value in content.items()}
    return [with_text(value) for value in content] if isinstance(content, list) else content


def joined(parts):
    async def collect():
        return [piece async for piece in send(parts)]

    pieces = asyncio.run(collect())
    assert max(map(len, pieces)) <= 256 * 1024
    return b"".join(pieces)


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 3000])
@pytest.mark.parametrize("wanted", ["int32", "uint8"])
def test_pieces_join_to_the_json_of_the_whole(rows, wanted):
    content = [answer(ROWS[:rows], wanted), {"text": "b", "meta_info": {}}, answer(ROWS[:7])]
    whole = orjson.dumps(with_text(content))
    assert joined(json_parts(content)) == whole
    assert joined(json_parts(content, b"data: ", b"\n\n")) == b"data: " + whole + b"\n\n"


def test_the_same_rows_twice():
    rows = WireRows(ROWS, "int32")
    content = {
        "sglext": {"routed_experts": rows},
        "choices": [{"sglext": {"routed_experts": rows}}],
    }
    assert joined(json_parts(content)) == orjson.dumps(with_text(content))


def test_text_that_speaks_of_marks_is_only_text():
    for text in (
        "routed-experts-",
        '"routed-experts-' + "0" * 32 + '"',
        "\ud7ff\u0000<routed experts>",
    ):
        content = answer(ROWS[:3], text=text)
        assert json.loads(joined(json_parts(content)))["text"] == text


def test_without_rows_nothing_changes():
    content = {"a": np.float32(1.5), 3: "non-string key"}
    assert json_parts(content) == [b'{"a":1.5,"3":"non-string key"}']
    with pytest.raises(TypeError, match="object"):
        json_parts({"a": object()})


TURNS = [0.0]


@contextlib.asynccontextmanager
async def watched(app):
    """Note how much CPU time the event loop spends before it comes round again, in ms."""

    async def watch():
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            TURNS.append(1000 * (time.thread_time() - before))

    watching = asyncio.ensure_future(watch())
    yield
    watching.cancel()


@pytest.fixture(scope="module")
def url():
    app = FastAPI(lifespan=watched)
    many = np.resize(ROWS, (32_000, 48, 8))

    @app.get("/whole")
    async def whole():
        return json_response(answer(ROWS))

    @app.get("/large")
    async def large(in_pieces: bool):
        content = answer(many)
        return json_response(content if in_pieces else with_text(content))

    @app.get("/stream")
    async def stream():
        async def chunks():
            yield b'data: {"text":"a"}\n\n'
            async for piece in send(json_parts(answer(ROWS), b"data: ", b"\n\n")):
                yield piece
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, loop="uvloop", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_a_client_sees_one_json_body_of_announced_length(url):
    response = httpx.get(f"{url}/whole")
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    assert "transfer-encoding" not in response.headers
    assert response.json() == with_text(answer(ROWS))


def test_a_streaming_client_sees_one_event(url):
    events = httpx.get(f"{url}/stream").text.split("\n\n")
    assert [event[:6] for event in events] == ["data: "] * 3 + [""]
    assert json.loads(events[1][6:]) == with_text(answer(ROWS))


def test_32_000_rows_do_not_hold_the_loop(url):
    """CPU time, not time: this holds on a busy machine too. At once it takes 50 ms and more."""
    for in_pieces, limit in ((True, (0, 15)), (False, (30, 9999))):
        TURNS.clear()
        size = len(httpx.get(f"{url}/large", params={"in_pieces": in_pieces}).content)
        assert size > 65_000_000
        assert limit[0] < max(TURNS) < limit[1]


def test_a_client_that_leaves_half_way_does_no_harm(url):
    for path in ("whole", "stream"):
        with httpx.stream("GET", f"{url}/{path}") as response:
            next(response.iter_raw())
    assert httpx.get(f"{url}/whole").json() == with_text(answer(ROWS))


def test_what_was_sent_is_let_go_by_whoever_still_holds_it():
    async def run():
        rows = WireRows(ROWS, "uint8", owner=object())
        async for _ in send(json_parts({"rows": rows})):
            assert rows.owner is not None
            break
        async for _ in send(json_parts({"rows": rows})):
            pass
        return rows.owner

    assert asyncio.run(run()) is None
