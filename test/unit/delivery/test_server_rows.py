"""Which rows a real server returns, and how many: against transformers, at every boundary."""

import contextlib
import threading
import time

import numpy as np
import pytest
import requests

from sglang.test.routed_experts.client import ENDPOINTS, Ask

CHUNK = 64  # a page is one token: the CPU engine has no other (test/gpu/values.py has)
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 60


@pytest.fixture(scope="module")
def served(serve):
    flags = ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "16")
    with serve(*flags, "--enable-metrics", SGLANG_ROUTED_EXPERTS_SHM_MB="1") as running:
        yield running


@pytest.fixture(scope="module")
def server(served):
    return served[0]


@pytest.fixture(scope="module")
def client(served):
    return served[1]


def fresh(length, salt):
    """Text of `length` tokens that shares no prefix with text of another salt."""
    return (chr(ord("!") + salt % 90) + chr(ord("!") + salt // 90) + TEXT)[:length]


def results(client, **body):
    response = requests.post(f"{client.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def rows_of(client, meta):
    info = meta["routed_experts_info"]
    rows = client.rows(meta["routed_experts"], info["dtype"])
    assert info["shape"] == [len(rows), client.layers, client.top_k]
    assert info["start_len"] == meta["routed_experts_start_len"]
    return rows


def check(client, reference, prompt, result):
    meta = result["meta_info"]
    tokens = prompt + result["output_ids"]
    assert len(tokens) == meta["prompt_tokens"] + meta["completion_tokens"]
    reference.check(tokens, rows_of(client, meta), meta["routed_experts_start_len"])


SALT = iter(range(1000))


@pytest.mark.parametrize("new_tokens", [0, 1, 2, 5])
def test_every_prompt_length(client, reference, new_tokens):
    ends = (CHUNK, 2 * CHUNK, 3 * CHUNK)
    lengths = [1, 2, 3, *(end + beside for end in ends for beside in (-1, 0, 1))]
    prompts = [client.tokenizer(fresh(length, next(SALT)))["input_ids"] for length in lengths]
    for _ in range(2):  # the second time with the whole earlier prompt in the prefix cache
        found = results(
            client,
            input_ids=prompts,
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            return_routed_experts=True,
        )
        for prompt, result in zip(prompts, found):
            assert len(result["output_ids"]) == new_tokens
            check(client, reference, prompt, result)
    assert found[-1]["meta_info"]["cached_tokens"] >= 3 * CHUNK, "the whole earlier prompt"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_endpoint_takes_dtype_and_start_len(client, reference, endpoint):
    """Starts at 0, 1, around the prompt's end, at the last row, behind it, and far away."""
    text, new_tokens = fresh(70, 999), 6
    prompt = client.chat_prompt(text) if "chat" in endpoint else text
    prompt = len(client.tokenizer(prompt)["input_ids"])
    end = prompt + new_tokens - 1
    starts = [0, 1, prompt - 1, prompt, prompt + 1, end - 1, end, 9999]
    dtypes = ["int32", "auto"] * 4
    fields = ("routed_experts_start_len", "routed_experts_dtype")
    options = [dict(zip(fields, wanted)) for wanted in zip(starts, dtypes)]
    asks = [Ask(text, endpoint, new_tokens=new_tokens, options=option) for option in options]
    for start, dtype, answer in zip(starts, dtypes, client.ask_all(asks)):
        assert answer.meta["routed_experts_start_len"] == start
        assert answer.meta["routed_experts_info"]["start_len"] == start
        assert answer.meta["routed_experts_info"]["dtype"] == dtype.replace("auto", "uint8")
        assert (answer.meta["routed_experts"] == "") == (start >= end)
        reference.check(answer.tokens, answer.rows, start)


def test_stop_on_the_first_token_and_on_a_string(client, reference):
    prompt = client.tokenizer(fresh(40, next(SALT)))["input_ids"]
    sampling = {"max_new_tokens": 8, "temperature": 0}
    free = results(client, input_ids=prompt, sampling_params=sampling)["output_ids"]
    for stop, count in (
        ({"stop_token_ids": free[:1]}, 1),
        ({"stop": client.tokenizer.decode(free[2:4])}, None),
    ):
        result = results(
            client,
            input_ids=prompt,
            sampling_params=sampling | stop,
            return_routed_experts=True,
        )
        assert result["meta_info"]["finish_reason"]["type"] == "stop"
        assert count is None or result["meta_info"]["completion_tokens"] == count
        check(client, reference, prompt, result)


@pytest.mark.parametrize("n", [1, 3])
def test_every_sample_has_its_own_rows(client, reference, n):
    prompt = client.tokenizer(fresh(30, next(SALT)))["input_ids"]
    found = results(
        client,
        input_ids=prompt,
        sampling_params={"max_new_tokens": 12, "temperature": 1.5, "ignore_eos": True, "n": n},
        return_routed_experts=True,
    )
    found = found if n > 1 else [found]
    assert len(found) == n
    assert n == 1 or len({tuple(result["output_ids"]) for result in found}) > 1
    for result in found:
        check(client, reference, prompt, result)


def test_every_streamed_sample_has_its_own_rows(client, reference):
    prompt = fresh(30, next(SALT))
    sampling = {"temperature": 1.5, "ignore_eos": True, "n": 3}
    chunks = client.stream(Ask(prompt, new_tokens=9, sampling=sampling))
    last = {chunk["index"]: chunk for chunk in chunks}
    assert len(last) == 3
    assert sum("routed_experts" in chunk["meta_info"] for chunk in chunks) == 3
    for chunk in last.values():
        check(client, reference, client.tokenizer(prompt)["input_ids"], chunk)


def test_a_batch_in_which_each_has_its_own_settings(client, reference):
    prompts = [client.tokenizer(fresh(20 + i, next(SALT)))["input_ids"] for i in range(4)]
    found = results(
        client,
        input_ids=prompts,
        sampling_params={"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        return_routed_experts=[True, False, True, True],
        routed_experts_start_len=[0, 0, 7, 500],
        routed_experts_dtype=["auto", "int32", "int32", "auto"],
    )
    assert not any(key.startswith("routed_experts") for key in found[1]["meta_info"])
    for i, dtype in ((0, "uint8"), (2, "int32"), (3, "uint8")):
        assert found[i]["meta_info"]["routed_experts_info"]["dtype"] == dtype
        check(client, reference, prompts[i], found[i])


def test_a_batch_of_several_samples_in_which_some_ask(client, reference):
    prompts = [client.tokenizer(fresh(25 + i, next(SALT)))["input_ids"] for i in range(2)]
    found = results(
        client,
        input_ids=prompts,
        sampling_params={"max_new_tokens": 5, "temperature": 1, "ignore_eos": True, "n": 2},
        return_routed_experts=[False, True],
        routed_experts_start_len=[0, 11],
    )
    asked = [result for result in found if "routed_experts" in result["meta_info"]]
    assert len(found) == 4 and len(asked) == 2
    for result in asked:
        assert result["meta_info"]["prompt_tokens"] == len(prompts[1])
        check(client, reference, prompts[1], result)


@pytest.mark.parametrize("start", [0, 17, 39])
def test_logprobs_from_a_start_and_rows_from_another(client, reference, start):
    """Logprobs of the prompt make the prefix cache give up what lies behind their start."""
    prompt = client.tokenizer(fresh(40, 997))["input_ids"]
    result = results(
        client,
        input_ids=prompt,
        sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start,
        return_routed_experts=True,
        routed_experts_start_len=20,
    )
    assert len(result["meta_info"]["input_token_logprobs"]) == len(prompt) - start
    check(client, reference, prompt, result)


def test_turns_join_to_one_conversation(client, reference):
    """Each turn asks from where the last one ended."""
    tokens, parts = [], []
    for turn in range(4):
        tokens += client.tokenizer(fresh(33, next(SALT)))["input_ids"]
        start = sum(map(len, parts))
        result = results(
            client,
            input_ids=tokens,
            sampling_params={"max_new_tokens": 7 + turn, "temperature": 0, "ignore_eos": True},
            return_routed_experts=True,
            routed_experts_start_len=start,
        )
        parts.append(rows_of(client, result["meta_info"]))
        tokens = tokens + result["output_ids"]
        assert result["meta_info"]["routed_experts_start_len"] == start
    reference.check(tokens, np.concatenate(parts))


def test_turns_of_a_session_join(client, reference):
    session = requests.post(f"{client.url}/open_session", json={"capacity_of_str_len": 4096})
    tokens, parts, rid = [], [], None
    for _ in range(3):
        part = client.tokenizer(fresh(21, next(SALT)))["input_ids"]
        start = sum(map(len, parts))
        result = results(
            client,
            input_ids=part,
            session_params={"id": session.json(), "rid": rid},
            sampling_params={"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
            return_routed_experts=True,
            routed_experts_start_len=start,
        )
        rid = result["meta_info"]["id"]
        tokens = tokens + part + result["output_ids"]
        assert result["meta_info"]["prompt_tokens"] == len(tokens) - len(result["output_ids"])
        parts.append(rows_of(client, result["meta_info"]))
    reference.check(tokens, np.concatenate(parts))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_streams_bring_rows_once_and_last(client, reference, endpoint):
    whole = client.ask(Ask(fresh(50, 998), endpoint, new_tokens=6))
    chunks = client.stream(Ask(fresh(50, 998), endpoint, new_tokens=6))
    place = "meta_info" if endpoint == "/generate" else "sglext"
    with_rows = [i for i, c in enumerate(chunks) if "routed_experts" in (c.get(place) or {})]
    assert with_rows == [len(chunks) - 1]
    assert chunks[-1][place]["routed_experts"] == whole.meta["routed_experts"]
    assert chunks[-1][place]["routed_experts_info"] == whole.meta["routed_experts_info"]
    reference.check(whole.tokens, client.rows(chunks[-1][place]["routed_experts"]))


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_openai_choices_have_their_own_rows(client, reference, endpoint):
    ask = Ask(fresh(30, next(SALT)), endpoint, new_tokens=8, options={"n": 3, "temperature": 1.5})
    body = client.post(ask).json()
    assert body["sglext"] == body["choices"][0]["sglext"]
    prompt = client.chat_prompt(ask.text) if "chat" in endpoint else ask.text
    for choice in body["choices"]:
        text = choice["message"]["content"] if "chat" in endpoint else choice["text"]
        tokens = client.tokenizer(prompt + text)["input_ids"]
        reference.check(tokens, rows_of(client, choice["sglext"]))
    chunks = client.stream(ask)
    last = [chunk for chunk in chunks if chunk.get("sglext") or "sglext" in str(chunk["choices"])]
    assert last == chunks[-3:]
    assert [chunk["choices"][0]["index"] for chunk in last] == [0, 1, 2]
    assert last[0]["sglext"] == last[0]["choices"][0]["sglext"]
    assert not any(chunk.get("sglext") for chunk in last[1:])
    for i, chunk in enumerate(last):
        choices = [c for x in chunks for c in x["choices"] if c["index"] == i]
        texts = [(c["delta"]["content"] if "chat" in endpoint else c["text"]) for c in choices]
        tokens = client.tokenizer(prompt + "".join(text or "" for text in texts))["input_ids"]
        reference.check(tokens, rows_of(client, chunk["choices"][0]["sglext"]))


def in_background(client, **body):
    """Send a request from another thread; returns a function that waits for its answer."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(results(client, **body)), daemon=True)
    thread.start()

    def wait():
        thread.join(120)
        return answer[0]

    return wait


def long_request(client, rid, prompt, new_tokens):
    return in_background(
        client,
        rid=rid,
        input_ids=prompt,
        sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        return_routed_experts=True,
        routed_experts_dtype="auto",
    )


def abort(client, rid):
    requests.post(f"{client.url}/abort_request", json={"rid": rid}, timeout=60)


def test_aborts_in_decode_in_the_queue_and_in_prefill(server, client, reference):
    prompts = [client.tokenizer(fresh(30, next(SALT)))["input_ids"] for _ in range(16)]
    full, behind = ("Decode batch", "#running-req: 16,"), ("Decode batch", "#queue-req: 1")
    seen = len(server.lines(*full)), len(server.lines(*behind))
    running = [long_request(client, f"run{i}", prompt, 900) for i, prompt in enumerate(prompts)]
    server.wait_for_line(*full, seen=seen[0])
    queued = long_request(client, "queued", prompts[0], 10)
    server.wait_for_line(*behind, seen=seen[1])
    abort(client, "queued")
    meta = queued()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["routed_experts"] == ""
    assert meta["routed_experts_info"]["shape"] == [0, client.layers, client.top_k]
    for i, (wait, prompt) in enumerate(zip(running, prompts)):
        abort(client, f"run{i}")
        result = wait()
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < result["meta_info"]["completion_tokens"] < 900
        check(client, reference, prompt, result)
    prompt = client.tokenizer(fresh(4000, next(SALT)))["input_ids"]
    prefills = len(server.lines("Prefill batch"))
    prefilling = long_request(client, "prefilling", prompt, 10)
    server.wait_for_line("Prefill batch", seen=prefills + 2)
    abort(client, "prefilling")
    result = prefilling()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    if result["meta_info"]["completion_tokens"] == 0:
        assert result["meta_info"]["routed_experts"] == ""
    else:
        check(client, reference, prompt, result)


def test_clients_that_leave_cost_nothing(server, client, reference):
    """Shared memory holds few blocks of this size here: leaked, they drive rows into messages."""
    for i in range(16):
        ask = Ask(fresh(1500, 600 + i % 4), new_tokens=8, sampling={"ignore_eos": True})
        with client.post(ask, stream=i % 2 == 0) as response:
            if i % 2 == 0:
                next(response.iter_lines())
        with contextlib.suppress(requests.RequestException):
            requests.post(client.url + "/generate", json=client.body(ask), timeout=0.05)
    for _ in range(12):
        answer = client.ask(Ask(fresh(1500, 605), new_tokens=4))
    reference.check(answer.tokens, answer.rows)
    deadline = time.monotonic() + 30
    while metric(client, "routed_experts_bytes_in_flight") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert metric(client, "routed_experts_bytes_in_flight") == 0
    assert not server.lines("no room in shared memory")


def metric(client, name):
    lines = requests.get(f"{client.url}/metrics", timeout=60).text.splitlines()
    values = [float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}")]
    assert values, name
    return sum(values)


def test_metrics_count_rows_bytes_and_time(client):
    names = ("rows_total", "bytes_total", "delivery_seconds_count")
    before = [metric(client, f"routed_experts_{name}") for name in names]
    answer = client.ask(Ask(fresh(100, next(SALT)), new_tokens=5))
    after = [metric(client, f"routed_experts_{name}") for name in names]
    size = len(answer.meta["routed_experts"])
    assert [b - a for a, b in zip(before, after)] == [len(answer.rows), size, 1]
    row = client.layers * client.top_k  # bytes: the ids fit in one each
    assert metric(client, "routed_experts_host_store_bytes") == (16384 + 1) * row
    assert metric(client, "routed_experts_shared_memory_bytes") == 1 << 20
