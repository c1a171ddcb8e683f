"""Does memory stay where it is? Thousands of requests on the CPU engine, with rows and without.

    PYTHONPATH=build/sglang/python python benchmark/routed_experts/memory.py

Short requests of every kind that delivery knows: int32, auto, from a position on, streamed, several samples, a client that
leaves, an abort, and more than the KV pool holds, so that some are retracted. In between, whenever nothing is in flight, the
resident memory of each of the server's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from host import header

from sglang.test.routed_experts.server import FLAG, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(layers=2, experts=32, top_k=4)
FLAGS = (FLAG, "--max-total-tokens", "1200", "--schedule-conservativeness", "0.02")
KINDS = ("int32", "auto", "from", "stream", "samples", "leave", "abort", "long")
ROLES = {
    "launch_server": "answering",
    "sglang::scheduler": "scheduler",
    "sglang::detok": "detokenizer",
}
AT_ONCE = 48
FIELDS = ("RssAnon", "RssShmem")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--every", type=int, default=1_000, help="requests between two looks")
    arguments.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results/cpu/memory.json"
    )
    given = arguments.parse_args()
    found: dict[str, Any] = {
        "command": " ".join(["python", "benchmark/routed_experts/memory.py", *sys.argv[1:]]),
        **header(ROOT / "build/sglang", None, "cpu"),
        "model": vars(SHAPE),
        "flags": FLAGS,
        "requests": given.requests,
        "runs": {},
    }
    model = make_model(ROOT / "build/memory-model", SHAPE)
    for asked in (True, False):
        with Server(model, FLAGS, log=ROOT / "build/memory.log", start_timeout=600) as server:
            run = asyncio.run(Run(server, asked).go(given.requests, given.every))
        run["left_when_stopped"] = _left_when_stopped(server)
        found["runs"]["rows" if asked else "no rows"] = run
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({k: v for k, v in run.items() if k != "looks"}), flush=True)


class Run:
    """One server, and what it was seen to hold."""

    def __init__(self, server: Server, asked: bool) -> None:
        self._server = server
        self._asked = asked
        self._rng = random.Random(0)
        self._answers: Counter[str] = Counter()
        self._retracted = 0
        self._rows = 0
        self._problems: Counter[str] = Counter()

    async def go(self, requests: int, every: int) -> dict[str, Any]:
        """Send `requests`, and look at the server's memory before and after every `every`."""
        looks = [look(self._server, 0)]
        numbers = itertools.count()
        started = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=300)
        # A connection each: the server closes those that are idle, also as a request is on its way.
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            self._server.url, timeout=timeout, connector=connections
        ) as session:
            while looks[-1]["requests"] < requests:
                jobs: Iterator[int] = itertools.islice(numbers, every)
                await asyncio.gather(*(self._worker(session, jobs) for _ in range(AT_ONCE)))
                await self._idle(session)
                looks.append(look(self._server, looks[-1]["requests"] + every))
                print(json.dumps(looks[-1]), f"{time.monotonic() - started:.0f} s", flush=True)
        return {
            "answers": dict(self._answers),
            "rows": self._rows,
            "retractions": self._retracted,
            "problems": dict(self._problems),
            "growth_mb": growth(looks),
            "looks": looks,
        }

    async def _worker(self, session: aiohttp.ClientSession, jobs: Iterator[int]) -> None:
        for i in jobs:
            await self._one(session, i, KINDS[i % len(KINDS)])

    async def _one(self, session: aiohttp.ClientSession, i: int, kind: str) -> None:
        body = self._body(i, kind)
        async with session.post("/generate", json=body) as response:
            if kind == "leave":
                await response.content.readline()
                response.close()
                self._answers[kind] += 1
                return
            if kind == "abort":
                await asyncio.sleep(self._rng.random() * 0.2)
                async with session.post("/abort_request", json={"rid": body["rid"]}):
                    pass
            if kind in ("stream", "abort"):
                lines = [line async for line in response.content if line.startswith(b"data: {")]
                answers = [json.loads(lines[-1].removeprefix(b"data: "))]
            else:
                answers = await response.json()
        for answer in answers if isinstance(answers, list) else [answers]:
            self._check(answer["meta_info"], body, kind)

    def _body(self, i: int, kind: str) -> dict[str, Any]:
        letters = self._rng.choices("abcdefgh ", k=150 if kind == "long" else 20)
        body: dict[str, Any] = {
            "rid": f"{kind}-{i}",
            "text": f"{i} {''.join(letters)}",
            "sampling_params": {
                "max_new_tokens": 40 if kind in ("leave", "abort", "long") else 8,
                "temperature": 0,
                "ignore_eos": True,
                "n": 2 if kind == "samples" else 1,
            },
            "stream": kind in ("stream", "leave", "abort"),
        }
        if self._asked:
            body["return_routed_experts"] = True
            body["routed_experts_dtype"] = "int32" if kind in ("int32", "long") else "auto"
            body["routed_experts_start_len"] = 5 if kind == "from" else 0
        return body

    def _check(self, meta: dict[str, Any], body: dict[str, Any], kind: str) -> None:
        self._answers[kind] += 1
        self._retracted += meta.get("total_retractions", 0)
        if not self._asked:
            self._problems["rows nobody asked for"] += "routed_experts" in meta
            return
        if "routed_experts" not in meta:
            self._problems[meta.get("routed_experts_error", "no rows")] += 1
            return
        rows, layers, top_k = meta["routed_experts_info"]["shape"]
        self._rows += rows
        size = rows * layers * top_k * (4 if body["routed_experts_dtype"] == "int32" else 1)
        whole = meta.get("prompt_tokens", 1) + meta["completion_tokens"] - 1
        if rows != max(whole - body["routed_experts_start_len"], 0):
            self._problems["wrong number of rows"] += 1
        if len(base64.b64decode(meta["routed_experts"])) != size:
            self._problems["wrong number of bytes"] += 1

    async def _idle(self, session: aiohttp.ClientSession) -> None:
        """Wait until nothing is in flight: a flush is refused until then."""
        while True:
            async with session.post("/flush_cache") as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.2)
        await asyncio.sleep(1)


def look(server: Server, requests: int) -> dict[str, Any]:
    """Resident memory in MB of each process: its own (anon), and what is shared (shmem)."""
    seen: dict[str, Any] = {"requests": requests}
    for pid in server.pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        role = next((role for name, role in ROLES.items() if name in command), None)
        if role is not None:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            seen[role] = {f: round(int(status[f].split()[0]) / 1024, 1) for f in FIELDS}
    seen["dev_shm_bytes"] = _dev_shm()
    return seen


def growth(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """MB by which each process grew, from a fifth of the requests on: before that it warms up."""
    first = next(x for x in looks if x["requests"] * 5 >= looks[-1]["requests"])
    grown = {
        role: {f: round(looks[-1][role][f] - first[role][f], 1) for f in FIELDS}
        for role in ROLES.values()
    }
    return {"from": first["requests"], "to": looks[-1]["requests"], **grown}


def _dev_shm() -> int:
    size = 0
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat().st_size
    return size


def _left_when_stopped(server: Server) -> str:
    """What the answering process says of requests that it still keeps, as it is stopped."""
    lines = server.lines("Gracefully exiting")
    return lines[-1].partition("] ")[2] if lines else ""


if __name__ == "__main__":
    main()
