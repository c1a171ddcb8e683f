"""What RL frameworks do while requests are on their way: pause, abort, new weights, less memory.

The next model differs in its routers and in nothing else, so that a row says which weights it is of.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from safetensors.torch import load_file, save_file

from sglang.test.routed_experts.client import Ask, Client
from sglang.test.routed_experts.compare import different_ids
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import FLAG, NO_OVERLAP, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model

CHUNK = 256

both_schedules = pytest.mark.parametrize(
    (),
    [
        pytest.param(
            marks=pytest.mark.served(FLAG, "--chunked-prefill-size", str(CHUNK), *overlap), id=name
        )
        for name, overlap in (("overlap", ()), ("no-overlap", (NO_OVERLAP,)))
    ],
)


@pytest.fixture(scope="session")
def next_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next") / "model"
    shutil.copytree(tiny_model, folder)
    other = make_model(tmp_path_factory.mktemp("other"), Shape(seed=1))
    weights = load_file(folder / "model.safetensors")
    trained = load_file(other / "model.safetensors")
    weights |= {name: trained[name] for name in weights if name.endswith("mlp.gate.weight")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def next_router(next_model: Path) -> TransformersRouter:
    return TransformersRouter(next_model)


class Rollout:
    """A streamed request on its way. `tokens` and `meta` are what has arrived of it."""

    def __init__(self, client: Client, rid: str, prompt: str, new_tokens: int) -> None:
        self.prompt = client.tokenizer(prompt)["input_ids"]
        self.tokens: list[int] = []
        self.meta: dict[str, Any] = {}
        self._client = client
        self._ask = Ask(
            prompt,
            new_tokens=new_tokens,
            sampling={"ignore_eos": True},
            options={"rid": rid, "routed_experts_dtype": "auto"},
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._client.post(self._ask, stream=True) as response:
            for line in response.iter_lines():
                if line and line != b"data: [DONE]":
                    chunk = json.loads(line.removeprefix(b"data: "))
                    self.tokens = max(self.tokens, chunk["output_ids"], key=len)
                    self.meta = chunk["meta_info"]

    def wait_for(self, tokens: int) -> None:
        wait_until(lambda: len(self.tokens) >= tokens)

    def rows(self) -> np.ndarray:
        """The rows of the whole answer, once it has ended."""
        self._thread.join(120)
        # The base's last chunk of a request that is aborted in the queue has one token only, and takes the place of
        # chunks that were not sent yet: their tokens are counted, but not told.
        told = len(self.tokens)
        queued = self.meta["finish_reason"].get("message") == "Abort in waiting queue"
        assert self.meta["completion_tokens"] == told or (
            queued and self.meta["completion_tokens"] > told
        )
        rows = self._client.rows(self.meta["routed_experts"], "uint8")
        assert len(rows) == self.meta["prompt_tokens"] + self.meta["completion_tokens"] - 1
        assert self.meta["prompt_tokens"] == len(self.prompt)
        return rows

    def expected(self, router: TransformersRouter) -> np.ndarray:
        return router.route([self.prompt + self.tokens])[0]


def wait_until(done: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def call(client: Client, name: str, **body: Any) -> None:
    requests.post(f"{client.url}/{name}", json=body, timeout=120).raise_for_status()


def rollouts(client: Client, salt: str, new_tokens: int) -> list[Rollout]:
    return [
        Rollout(client, f"{salt}{i}", f"{salt}, {i}: {'so ' * i}", new_tokens) for i in range(3)
    ]


@both_schedules
def test_a_retracted_request_that_is_aborted_keeps_what_it_earned(
    client: Client, router: TransformersRouter
) -> None:
    whole = Ask("At once", new_tokens=2000, sampling={"ignore_eos": True}, options={"rid": "whole"})
    with ThreadPoolExecutor() as pool:
        unstreamed = pool.submit(client.post, whole)
        streamed = rollouts(client, "aborted", 2000)
        for rollout in streamed:
            rollout.wait_for(60)
        call(client, "pause_generation", mode="retract")
        try:
            call(client, "abort_request", abort_all=True)
            for rollout in streamed:
                rows, expected = rollout.rows(), rollout.expected(router)
                assert rollout.meta["finish_reason"]["message"] == "Abort in waiting queue"
                assert different_ids(rows[: len(expected)], expected) == 0
            body = unstreamed.result().json()
        finally:
            call(client, "continue_generation")
    tokens, meta = client.tokenizer(whole.text)["input_ids"] + body["output_ids"], body["meta_info"]
    assert meta["finish_reason"]["message"] == "Abort in waiting queue"
    assert meta["completion_tokens"] >= 50 and meta["prompt_tokens"] == len(whole.text)
    assert different_ids(client.rows(meta["routed_experts"]), router.route([tokens])[0]) == 0


@both_schedules
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_in_the_middle_change_later_rows_only(
    client: Client,
    tiny_model: Path,
    next_model: Path,
    router: TransformersRouter,
    next_router: TransformersRouter,
    mode: str,
) -> None:
    running = rollouts(client, f"updated, {mode}", 200)
    for rollout in running:
        rollout.wait_for(20)
    call(client, "pause_generation", mode=mode)
    seen = [len(rollout.prompt) + len(rollout.tokens) for rollout in running]
    try:
        call(client, "update_weights_from_disk", model_path=str(next_model), flush_cache=False)
        call(client, "continue_generation")
        for rollout, tokens in zip(running, seen):
            rows = rollout.rows()
            before, after = rollout.expected(router), rollout.expected(next_router)
            old = next(
                i for i, row in enumerate(rows) if different_ids(row[None], before[i : i + 1])
            )
            assert tokens - 1 <= old < len(rows), "tokens of the old weights keep their rows"
            assert different_ids(rows[:old], before[:old]) == 0
            assert different_ids(rows[old:], after[old:]) == 0
            assert rollout.meta["total_retractions"] == (mode == "retract")
        call(client, "flush_cache?timeout=60")
        fresh = client.ask(Ask("Of the new weights alone", new_tokens=10))
        assert different_ids(fresh.rows, next_router.route([fresh.tokens])[0]) == 0
    finally:
        call(client, "continue_generation")
        client.load(tiny_model)


@both_schedules
def test_the_first_token_of_a_prompt_that_was_cached_under_other_weights(
    client: Client,
    tiny_model: Path,
    next_model: Path,
    router: TransformersRouter,
    next_router: TransformersRouter,
) -> None:
    """It is sampled by the new weights, whatever the cache keeps of the prompt."""
    text = "All of this is cached"
    client.ask(Ask(text, new_tokens=2))
    call(client, "pause_generation", mode="in_place")
    try:
        call(client, "update_weights_from_disk", model_path=str(next_model), flush_cache=False)
        call(client, "continue_generation")
        for new_tokens in (1, 8):
            answer = client.ask(Ask(text, new_tokens=new_tokens, sampling={"ignore_eos": True}))
            before, after = (r.route([answer.tokens])[0] for r in (router, next_router))
            last = len(answer.rows) - new_tokens
            assert answer.meta["cached_tokens"] == last, "the prompt was not cached"
            assert different_ids(answer.rows[:last], before[:last]) == 0
            assert different_ids(answer.rows[last:], after[last:]) == 0
            assert different_ids(before[last:], after[last:]) > 0
    finally:
        call(client, "continue_generation")
        client.load(tiny_model)


@both_schedules
def test_a_prefill_that_is_retracted(
    server: Server, client: Client, router: TransformersRouter
) -> None:
    """Part of the prompt has no KV slots yet; nothing was sampled, so nothing is earned."""
    prefills = len(server.lines("Prefill batch"))
    rollout = Rollout(client, "long", "A long way to go. " * 220, 3)
    server.wait_for_line("Prefill batch", seen=prefills + 2)
    call(client, "pause_generation", mode="retract")
    assert not rollout.tokens, "the prompt was too short for this test"
    call(client, "continue_generation")
    assert different_ids(rollout.rows(), rollout.expected(router)) == 0
    assert rollout.meta["total_retractions"] == 1


@both_schedules
def test_a_pause_that_aborts_and_requests_that_wait_for_its_end(client: Client, check) -> None:
    running = rollouts(client, "paused", 2000)
    for rollout in running:
        rollout.wait_for(5)
    call(client, "pause_generation", mode="abort")
    for rollout in running:
        assert len(rollout.rows()) and rollout.meta["finish_reason"]["type"] == "abort"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.ask, Ask("Sent during the pause", new_tokens=5))
        time.sleep(0.5)
        assert not waiting.done()
        call(client, "continue_generation")
        check([waiting.result()])


@both_schedules
def test_memory_that_was_released(client: Client, check) -> None:
    call(client, "flush_cache")
    call(client, "release_memory_occupation")
    call(client, "resume_memory_occupation")
    check(client.ask_all([Ask(f"{i}: after a step of training", new_tokens=9) for i in range(4)]))
