"""Refusals, several tokenizer workers, rows in messages."""

from concurrent.futures import ThreadPoolExecutor

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
    ("routed_experts_dtype", "uint8"),
    ("routed_experts_dtype", 32),
    ("return_routed_experts", "perhaps"),
]


@pytest.fixture(scope="module")
def served(serve):
    """Two processes answer; there is no shared memory, and no room for a second answer in flight."""
    flags = ("--tokenizer-worker-num", "2", "--max-running-requests", "4")
    no_room = {"SGLANG_ROUTED_EXPERTS_SHM_MB": "0", "SGLANG_ROUTED_EXPERTS_IN_FLIGHT_MB": "0"}
    with serve(*flags, **no_room) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return served[1]


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


def test_streams_and_samples_from_whichever_process(client, reference):
    for i in range(6):
        text = "xyz"[i % 3] * (15 + i)
        chunks = client.stream(Ask(text, new_tokens=7, sampling={"n": 1 + i % 2, "temperature": 1}))
        last = {chunk.get("index", 0): chunk for chunk in chunks}
        assert sum("routed_experts" in chunk["meta_info"] for chunk in chunks) == len(last)
        for chunk in last.values():
            tokens = client.tokenizer(text)["input_ids"] + chunk["output_ids"]
            reference.check(tokens, client.rows(chunk["meta_info"]["routed_experts"]))


def test_aborts_reach_the_process_that_waits(served, reference):
    """Four run, four wait, in both processes; all are aborted."""
    server, client = served
    full = ("Decode batch", "#running-req: 4,", "#queue-req: 4")
    seen = len(server.lines(*full))
    asks = [
        Ask(f"{i} is on its way", new_tokens=4000, sampling={"ignore_eos": True}) for i in range(8)
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = [pool.submit(client.post, ask) for ask in asks]
        server.wait_for_line(*full, seen=seen)
        body = {"abort_all": True}
        requests.post(f"{client.url}/abort_request", json=body, timeout=60).raise_for_status()
        answers = [answer.result().json() for answer in answers]
    for ask, answer in zip(asks, answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        ids = answer["output_ids"]
        tokens = client.tokenizer(ask.text)["input_ids"] + ids if ids else []
        reference.check(tokens, client.rows(answer["meta_info"]["routed_experts"]))
    assert sum(not answer["output_ids"] for answer in answers) == 4


def test_no_room_in_shared_memory_is_said_once(served):
    server, client = served
    client.ask_all([Ask(f"{i}", new_tokens=2) for i in range(4)])
    assert len(server.lines("no room in shared memory, rows travel in the message")) == 1
