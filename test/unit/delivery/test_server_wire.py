"""Refusals, several tokenizer workers, rows in messages, and what a killed process leaves."""

import os
import signal
import time
from pathlib import Path

import pytest
import requests

from sglang.test.routed_experts.client import ENDPOINTS, Ask

WRONG = [
    ("routed_experts_start_len", -1),
    ("routed_experts_start_len", True),
    ("routed_experts_start_len", 1.5),
    ("routed_experts_start_len", 1.0),
    ("routed_experts_start_len", "3"),
    ("routed_experts_start_len", None),
    ("routed_experts_start_len", [1]),
    ("routed_experts_dtype", "int8"),
    ("routed_experts_dtype", 32),
    ("return_routed_experts", "perhaps"),
]


@pytest.fixture(scope="module")
def client(serve):
    """Two processes answer; rows travel in the message."""
    flags = ("--tokenizer-worker-num", "2")
    with serve(*flags, SGLANG_ROUTED_EXPERTS_TRANSPORT="message") as (_, client):
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_wrong_field_is_a_400_with_its_name(client, endpoint, stream):
    for name, value in WRONG:
        response = client.post(Ask("a", endpoint, options={name: value, "stream": stream}))
        assert response.status_code == 400, (name, value, response.text)
        assert name in response.text
    assert client.ask(Ask("still there", endpoint, new_tokens=2)).rows is not None


@pytest.mark.parametrize("stream", [False, True])
def test_lists_that_do_not_fit_the_batch_are_a_400(client, stream):
    for name, value in (
        ("return_routed_experts", [True]),
        ("routed_experts_start_len", [0, 0, 0]),
        ("routed_experts_start_len", [0, -1]),
        ("routed_experts_dtype", ["auto", "int64"]),
    ):
        body = {"text": ["a", "b"], name: value, "stream": stream}
        response = requests.post(f"{client.url}/generate", json=body, timeout=60)
        assert response.status_code == 400 and name in response.text


def test_whoever_asked_gets_their_rows_from_whichever_process(client, reference):
    asks = [
        Ask(
            chr(ord("a") + i) * (20 + i),
            ENDPOINTS[i % 3],
            rows=i % 4 != 0,
            new_tokens=4 + i % 5,
            options={"routed_experts_start_len": i, "routed_experts_dtype": "auto"}
            if i % 2
            else {},
        )
        for i in range(24)
    ]
    for i, (ask, answer) in enumerate(zip(asks, client.ask_all(asks))):
        if ask.rows:
            reference.check(answer.tokens, answer.rows, i if i % 2 else 0)
        else:
            assert not any(name.startswith("routed_experts") for name in answer.meta)


def test_a_server_without_the_flag_names_it(serve):
    with serve(asked=False) as (_, client):
        for endpoint in ENDPOINTS:
            for stream in (False, True):
                response = client.post(Ask("a", endpoint, options={"stream": stream}))
                assert response.status_code == 400
                assert "--enable-return-routed-experts" in response.text
            answer = client.ask(Ask("a", endpoint, rows=False, new_tokens=2))
            assert not any(name.startswith("routed_experts") for name in answer.meta)


@pytest.mark.parametrize("killed", ["sglang::scheduler", "sglang::detokenizer", "launch_server"])
def test_kill_9_of_any_process_leaves_no_shared_memory(serve, killed):
    before = set(os.listdir("/dev/shm"))
    with serve() as (server, client):
        assert client.ask(Ask("x" * 50)).rows is not None
        pids = server.pids()
        holders = [pid for pid in pids if segments(pid)]
        assert len(holders) == 2, "the scheduler owns a segment, the answering process maps it"
        victim = next(pid for pid in pids if killed in command(pid))
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while server.pids() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not server.pids(), "the others end by themselves"
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "sglang" in name or "routed" in name]


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def segments(pid):
    return [
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:sglang-routed-experts" in line
    ]
