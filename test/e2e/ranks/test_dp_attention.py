"""DP attention: all ranks' tokens are gathered for the sparse layers; each must find its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.ranks.conftest import Check, Ranks, asks, texts
from sglang.test.routed_experts.client import ENDPOINTS, Answer, Ask
from sglang.test.routed_experts.server import NO_OVERLAP

CHUNK = 64  # of both ranks together; each has half
MANY = 80  # requests that run at once: more on a rank than its chunk has tokens


@pytest.fixture(scope="module", params=["overlap", "no overlap"])
def ranks(serve: Callable, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    flags = ("--dp-size", "2", "--enable-dp-attention", "--chunked-prefill-size", str(CHUNK))
    flags += ("--max-running-requests", str(2 * MANY), "--decode-log-interval", "1")
    if request.param == "no overlap":
        flags += (NO_OVERLAP,)
    with serve(2, *flags) as started:
        yield started


def to_rank(rank: int) -> dict[str, object]:
    return {"options": {"routed_dp_rank": rank}}


@pytest.fixture(scope="session")
def seen() -> dict[str, list[Answer]]:
    """Answers of the first server, for the second to be compared with."""
    return {}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints(endpoint: str, ranks: Ranks, check: Check, seen: dict) -> None:
    answers = ranks.client.ask_all(asks(16, seed=1, endpoint=endpoint))
    check(answers)
    for ours, theirs in zip(answers, seen.setdefault(endpoint, answers)):
        assert ours.tokens == theirs.tokens and (ours.rows == theirs.rows).all()


@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_is_idle(busy: int, ranks: Ranks, check: Check) -> None:
    answers = ranks.client.ask_all(asks(6, seed=2 + busy, **to_rank(busy)))
    assert {a.meta["dp_rank"] for a in answers} == {busy}
    check(answers)


@pytest.mark.parametrize("decoding", [0, 1])
def test_a_long_prefill_beside_a_decoding_rank(decoding: int, ranks: Ranks, check: Check) -> None:
    short = [Ask(t, new_tokens=40, **to_rank(decoding)) for t in texts(5, 5, 20, 4 + decoding)]
    long = [Ask(t, new_tokens=3, **to_rank(1 - decoding)) for t in texts(2, 600, 900, 6 + decoding)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks.client.ask_all, short)
        answers = ranks.client.ask_all(long)
        check(answers + first.result())


def test_prefix_hits(ranks: Ranks, check: Check) -> None:
    prefix = texts(1, 300, 300, 8)[0]
    for rank in (0, 1):  # each has a cache of its own
        ranks.client.ask(Ask(prefix, new_tokens=1, **to_rank(rank)))
    answers = ranks.client.ask_all(
        [Ask(prefix + t, **to_rank(i % 2)) for i, t in enumerate(texts(8, 5, 50, 9))]
    )
    assert min(a.meta["cached_tokens"] for a in answers) >= 299
    check(answers)


def test_more_requests_at_once_than_a_chunk_has_tokens(ranks: Ranks, check: Check) -> None:
    prompts = texts(MANY, 1, 8, 10)
    crowds = [[Ask(t, new_tokens=40, **to_rank(r)) for t in prompts[r::2]] for r in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ranks.client.ask_together, crowds))
    batches = [line.split("#running-req: ")[1] for line in ranks.server.lines("Decode batch")]
    assert max(int(b.split(",")[0]) for b in batches) > CHUNK // 2
    check(answers[0] + answers[1])


def test_both_ranks_answer_and_nothing_was_left_out(ranks: Ranks) -> None:
    stores = ranks.server.lines("Routed experts host store allocated")
    assert sorted(line.split()[2] for line in stores) == ["DP0", "DP1"]
    assert not ranks.server.lines("get an error")
