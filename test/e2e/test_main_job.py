"""Rows of a real server on the CPU, with and without overlap, each request against transformers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sglang.test.routed_experts.client import ENDPOINTS, Ask, Client
from sglang.test.routed_experts.server import FLAG, NO_OVERLAP

CHUNK = 256
TEXT = "The river rose in the night, and nobody in the lower street was afraid of it yet. "

both_schedules = pytest.mark.parametrize(
    (),
    [
        pytest.param(
            marks=pytest.mark.served(FLAG, "--chunked-prefill-size", str(CHUNK), *overlap), id=name
        )
        for name, overlap in (("overlap", ()), ("no-overlap", (NO_OVERLAP,)))
    ],
)


def text_of(tokens: int, start: str = "") -> str:
    """Text of so many tokens: a letter is one."""
    return (start + TEXT * (tokens // len(TEXT) + 1))[:tokens]


@both_schedules
def test_the_three_endpoints_together(client: Client, check) -> None:
    asks = [
        Ask(f"{i}. {TEXT * (i % 4)}", ENDPOINTS[i % 3], new_tokens=4 + 5 * (i % 7))
        for i in range(24)
    ]
    check(client.ask_all(asks))


@both_schedules
def test_prompts_that_end_at_chunk_boundaries(client: Client, check) -> None:
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK]
    asks = [Ask(text_of(n, f"{n} letters. "), new_tokens=3) for n in lengths]
    answers = client.ask_all(asks)
    assert [len(a.prompt) for a in answers] == lengths
    check(answers)


@both_schedules
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_an_answer_of_one_or_two_tokens(client: Client, check, new_tokens: int) -> None:
    answer = client.ask(Ask(f"Just {new_tokens}.", new_tokens=new_tokens))
    assert answer.rows.shape == (len(answer.prompt) + new_tokens - 1, 8, 4)
    check([answer])


@both_schedules
def test_a_stop_in_the_middle(client: Client, check) -> None:
    whole = client.ask(Ask("Stop me.", new_tokens=30))
    stop = whole.text[11:13]
    first = client.tokenizer(whole.text[: whole.text.index(stop) + 2])["input_ids"]
    answer = client.ask(Ask("Stop me.", new_tokens=30, sampling={"stop": [stop]}))
    assert answer.completion == first
    check([answer])


@both_schedules
def test_prefixes_are_shared(client: Client, check) -> None:
    base = text_of(600, "A beginning for many. ")
    answers = [client.ask(Ask(base, new_tokens=20))]
    longer = [Ask(base + f" And then, {i}", new_tokens=20) for i in range(4)]
    answers += client.ask_all(longer)
    answers.append(client.ask(Ask(base + answers[0].text + " Next turn.", new_tokens=5)))
    assert all(a.meta["cached_tokens"] >= 600 for a in answers[1:])
    assert answers[-1].meta["cached_tokens"] >= 600 + 19, "rows that decode steps left in the cache"
    check(answers)


@both_schedules
@pytest.mark.parametrize("asker", [0, 16, 32])
def test_one_of_thirty_three_asks(client: Client, check, asker: int) -> None:
    """Killed the base's server: its list of rows had one entry, indexed by place in the batch."""
    asks = [Ask(f"{asker} and {i}", rows=i == asker, new_tokens=12) for i in range(33)]
    answers = client.ask_all(asks, at_once=33)
    check([answers[asker]])
    for i, answer in enumerate(answers):
        assert i == asker or not [k for k in answer.meta if "routed_experts" in k]


@both_schedules
def test_some_ask_and_some_stream(client: Client, check) -> None:
    asks = [
        Ask(f"Number {i} of a mixed crowd", ENDPOINTS[i % 3], rows=i % 4 < 2, new_tokens=10 + i)
        for i in range(24)
    ]
    streams = ThreadPoolExecutor(12)
    chunks = [streams.submit(client.stream, ask) for ask in asks if ask.endpoint == "/generate"]
    answers = client.ask_all(asks)
    check([a for a, ask in zip(answers, asks) if ask.rows])
    assert all(a.rows is None for a, ask in zip(answers, asks) if not ask.rows)
    generate = [(a, ask) for a, ask in zip(answers, asks) if ask.endpoint == "/generate"]
    for (answer, ask), future in zip(generate, chunks):
        metas = [chunk["meta_info"] for chunk in future.result()]
        assert all("routed_experts" not in meta for meta in metas[:-1])
        assert ("routed_experts" in metas[-1]) == ask.rows
        if ask.rows:
            assert (client.rows(metas[-1]["routed_experts"]) == answer.rows).all()


@both_schedules
def test_asking_changes_no_text(client: Client) -> None:
    texts = [f"{i} {TEXT}" for i in range(6)]
    asked, silent = (
        client.ask_all([Ask(t, rows=rows, new_tokens=25) for t in texts]) for rows in (True, False)
    )
    assert [a.text for a in asked] == [a.text for a in silent]


@both_schedules
def test_clients_that_leave(client: Client, check) -> None:
    """Connections are dropped in the middle of decoding; later requests get their KV slots."""
    left = threading.Barrier(8)

    def leave(i: int) -> None:
        ask = Ask(f"{i} leaves. {TEXT}", new_tokens=400, sampling={"ignore_eos": True})
        with client.post(ask, stream=True) as response:
            next(response.iter_lines())
            left.wait(timeout=120)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    check(client.ask_all([Ask(f"{i} stays. {TEXT}", new_tokens=30) for i in range(16)]))


@pytest.mark.served(FLAG, "--max-total-tokens", "1200", "--schedule-conservativeness", "0.05")
def test_retraction(client: Client, check) -> None:
    """More text than KV slots: some requests lose theirs and are computed again."""
    asks = [Ask(f"{i} wants room", new_tokens=260, sampling={"ignore_eos": True}) for i in range(8)]
    answers = client.ask_together(asks)
    assert any(a.meta["total_retractions"] for a in answers), "nothing was retracted"
    check(answers)


@pytest.mark.served("--chunked-prefill-size", str(CHUNK))
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_rows_of_a_server_without_the_flag(client: Client, endpoint: str) -> None:
    for stream in (False, True):
        response = client.post(Ask("Rows, please.", endpoint, options={"stream": stream}))
        assert response.status_code == 400
        assert FLAG in response.text
    answer = client.ask(Ask("No rows, then.", endpoint, rows=False))
    assert not [name for name in answer.meta if "routed_experts" in name]


@pytest.mark.served("--chunked-prefill-size", str(CHUNK))
def test_a_refusal_is_an_error_to_the_client(client: Client) -> None:
    with pytest.raises(requests.HTTPError, match="400"):
        client.ask(Ask("Rows, please."))
