"""The stall: how long the others wait for a token while one request finishes with its rows.

32 requests stream one token a chunk. One more joins, generates 64 tokens and finishes. What counts
is the longest gap between two chunks of any of the 32 around that end: from the newcomer's last
chunk but one until its rows have arrived, and a little on either side. The newcomer is read by a
process of its own, so that the reader does not stall itself.

All ask for their rows: 0.5.10 and 0.5.11 die of an output batch in which some did and some did not.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import aiohttp
import load
from model import Model
from results import Results
from servers import Engine, Server

OTHERS = 32
PROMPT_TOKENS = (500, 32_000)
REPEATS = 3
_ANSWER_TOKENS = 64
_MARGIN = 0.1  # seconds before and after the end that count as around it


def measure_stalls(
    servers: Mapping[Engine, Server],
    asked: Mapping[Engine, Sequence[str]],
    model: Model,
    results: Results,
    prompt_tokens: Sequence[int],
) -> None:
    """Each way of asking for rows on each server, `REPEATS` times each number of prompt tokens.

    What `results` has already is left out. A server that fails is told about and passed over.
    """
    # Started afresh rather than forked: this process has threads.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.monotonic).result()
        for engine, way in missing(asked, results):
            stalls = _Stalls(engine, servers[engine].url, way, model, results, pool)
            try:
                asyncio.run(stalls.run(prompt_tokens))
            except (load.LoadError, aiohttp.ClientError, OSError) as error:
                kind = type(error).__name__
                print(f"no stalls of {engine}, {way}: {kind}: {error}", file=sys.stderr, flush=True)


def missing(asked: Mapping[Engine, Sequence[str]], results: Results) -> list[tuple[Engine, str]]:
    """The servers and ways of asking of which `results` has no stall."""
    known = {(entry["engine"], entry["asked"]) for entry in results.data["stall"]}
    return [
        (engine, way)
        for engine, ways in asked.items()
        for way in ways
        if (engine.name, way) not in known
    ]


class _Stalls:
    """One server and one way of asking."""

    def __init__(
        self,
        engine: Engine,
        url: str,
        asked: str,
        model: Model,
        results: Results,
        pool: ProcessPoolExecutor,
    ) -> None:
        self._engine, self._url, self._asked, self._model = engine, url, asked, model
        self._results, self._pool = results, pool
        self._others = load.Request(64, 1_900, asked, stream_interval=1)
        self._times: list[list[float]] = [[] for _ in range(OTHERS)]

    async def run(self, prompt_tokens: Sequence[int]) -> None:
        async with load.open_session() as session:
            others = [asyncio.create_task(self._stream(session, i)) for i in range(OTHERS)]
            try:
                await self._until_flowing(others)
                for repeat in range(-1, REPEATS):  # the first is a warm-up
                    for tokens in prompt_tokens:
                        await self._join(tokens, repeat, keep=repeat >= 0)
            finally:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                await session.post(f"{self._url}/abort_request", json={"abort_all": True})
                await asyncio.sleep(1)

    async def _stream(self, session: aiohttp.ClientSession, index: int) -> None:
        """One of the others: note when its chunks arrive, again and again until cancelled."""
        times = self._times[index]
        for turn in range(100):
            prompt = load.prompts(self._model, 1, self._others.input_len, 1_000 * turn + index)[0]
            async with session.post(
                f"{self._url}/generate", data=self._others.body(prompt), headers=load.JSON
            ) as answer:
                if answer.status != 200:
                    raise load.LoadError(f"{answer.status}: {(await answer.text())[:500]}")
                async for _ in answer.content.iter_any():
                    times.append(time.monotonic())
            times.append(float("nan"))  # the gap between two answers is none

    async def _until_flowing(self, others: list[asyncio.Task]) -> None:
        while min(map(len, self._times)) < 20:
            for task in others:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def _join(self, tokens: int, repeat: int, keep: bool) -> None:
        loop = asyncio.get_running_loop()
        request = load.Request(tokens, _ANSWER_TOKENS, self._asked, stream_interval=1)
        seed = 10 * tokens + repeat + 1
        ending, end = await loop.run_in_executor(
            self._pool, _join_alone, self._url, self._model, request, seed
        )
        await asyncio.sleep(2 * _MARGIN)
        gap = self._longest_gap(ending - _MARGIN, end + _MARGIN)
        # The steps a little earlier, when the newcomer only decodes: what its length alone costs.
        quiet = self._longest_gap(ending - 0.5 - (end - ending), ending - 0.3)
        if keep:
            key = {"engine": self._engine.name, "asked": self._asked, "prompt_tokens": tokens}
            self._results.add_stall(key, longest_gap_ms=1e3 * gap, quiet_gap_ms=1e3 * quiet)
            print(
                f"stall {self._engine.name} asked {self._asked} {tokens} tokens: "
                f"{1e3 * gap:.1f} ms, usually {1e3 * quiet:.1f} ms, "
                f"rows in {1e3 * (end - ending):.0f} ms",
                flush=True,
            )

    def _longest_gap(self, begin: float, end: float) -> float:
        """Seconds between two chunks of one request, of those gaps that touch [begin, end]."""
        return max(
            (
                after - before
                for times in self._times
                for before, after in pairwise(times)
                if after >= begin and before <= end  # never true of nan
            ),
            default=0.0,
        )


def _join_alone(url: str, model: Model, request: load.Request, seed: int) -> tuple[float, float]:
    """In a process of its own: time.monotonic() of the last chunk but one, and of the last byte."""
    return asyncio.run(_join(url, model, request, seed))


async def _join(url: str, model: Model, request: load.Request, seed: int) -> tuple[float, float]:
    prompt = load.prompts(model, 1, request.input_len, seed)[0]
    arrivals: list[tuple[float, bytes]] = []
    async with load.open_session() as session:
        body = request.body(prompt)
        async with session.post(f"{url}/generate", data=body, headers=load.JSON) as answer:
            if answer.status != 200:
                raise load.LoadError(f"{answer.status}: {(await answer.text())[:500]}")
            async for piece in answer.content.iter_any():
                arrivals.append((time.monotonic(), piece))
    chunks = [(arrived, line) for arrived, line in load.events(arrivals) if line != b"[DONE]"]
    problems = load.row_problems({0: load.parse(chunks[-1][1])["meta_info"]}, model, request)
    if problems:
        raise load.LoadError("; ".join(problems))
    return chunks[-2][0], arrivals[-1][0]
