"""The load: one streamed /generate of a whole batch of random prompts, as
sglang.bench_one_batch_server makes it.

While the clock runs the client stamps what arrives and nothing else; the chunks are taken apart
afterwards, so that 200 MB of JSON do not slow down what is measured.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
import numpy as np
from model import Model

STREAM_INTERVAL = 64
JSON = {"Content-Type": "application/json"}


class LoadError(RuntimeError):
    """The server answered something that cannot be measured."""


@dataclass(frozen=True)
class Request:
    """What each request of a batch asks.

    asked: "no", "int32" or "auto": whether it wants its routed experts, and in which form.
    """

    input_len: int
    output_len: int
    asked: str = "no"
    stream_interval: int = STREAM_INTERVAL

    def body(self, prompts: list[list[int]] | list[int]) -> bytes:
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.output_len,
            "ignore_eos": True,
            "stream_interval": self.stream_interval,
        }
        wants = {} if self.asked == "no" else {"return_routed_experts": True}
        if self.asked == "auto":
            wants["routed_experts_dtype"] = "auto"
        return json.dumps(
            {"input_ids": prompts, "sampling_params": sampling, "stream": True, **wants}
        ).encode()


@dataclass
class Run:
    """What one batch gave.

    output_tps: output tokens after the first of each request, over the seconds from the last
        request's first token to
        the last byte of the answer, rows included.
    ttft_s: when the last request's first token arrived; latency_s: when the last byte did.
    step_ms: median milliseconds a token between a request's chunks: decoding alone, without what
        finishing costs.
    answer_mb: megabytes of the whole answer.
    problems: what is wrong with the rows, empty if nothing is.
    accept_length: tokens a step and request, the median over requests; None without drafts.
    """

    output_tps: float
    ttft_s: float
    latency_s: float
    step_ms: float
    answer_mb: float
    problems: list[str]
    accept_length: float | None = None


def open_session() -> aiohttp.ClientSession:
    """A client that takes a stream of megabytes without holding the server back."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=8 << 20,
    )


def prompts(model: Model, count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids; the same seed gives the same prompts to either side of a pair."""
    ids = np.random.default_rng(seed).integers(2, model.vocabulary, (count, length))
    return ids.tolist()


async def run_batch(url: str, model: Model, request: Request, batch: int, seed: int) -> Run:
    """Send one batch and time its answer.

    Raises:
        LoadError: the server refused it, or the answer is not that of `batch` complete requests.
    """
    body = request.body(prompts(model, batch, request.input_len, seed))
    arrivals: list[tuple[float, bytes]] = []
    async with open_session() as session:
        start = time.perf_counter()
        async with session.post(f"{url}/generate", data=body, headers=JSON) as answer:
            if answer.status != 200:
                raise LoadError(f"{answer.status}: {(await answer.text())[:500]}")
            async for piece in answer.content.iter_any():
                arrivals.append((time.perf_counter(), piece))
    return _summary(arrivals, start, model, request, batch)


def _summary(
    arrivals: list[tuple[float, bytes]], start: float, model: Model, request: Request, batch: int
) -> Run:
    chunks: dict[int, list[tuple[float, int]]] = {i: [] for i in range(batch)}
    last: dict[int, dict] = {}
    for arrived, line in events(arrivals):
        if line == b"[DONE]":
            continue
        data = parse(line)
        index = data.get("index", 0)
        chunks[index].append((arrived, data["meta_info"]["completion_tokens"]))
        last[index] = data["meta_info"]
    short = [i for i in chunks if not chunks[i] or chunks[i][-1][1] != request.output_len]
    if short:
        raise LoadError(
            f"{len(short)} of {batch} requests did not end with {request.output_len} tokens"
        )
    first = max(times[0][0] for times in chunks.values())
    end = arrivals[-1][0]
    later = sum(request.output_len - times[0][1] for times in chunks.values())
    return Run(
        output_tps=later / (end - first) if later else 0.0,
        ttft_s=first - start,
        latency_s=end - start,
        step_ms=_median_step_ms(chunks),
        answer_mb=sum(len(piece) for _, piece in arrivals) / 1e6,
        problems=row_problems(last, model, request),
        accept_length=_accept_length(last),
    )


def _accept_length(last: dict[int, dict]) -> float | None:
    """The first token comes out of the prefill, not out of a step."""
    steps = {index: meta.get("spec_verify_ct") for index, meta in last.items()}
    if not all(steps.values()):
        return None
    lengths = [(last[i]["completion_tokens"] - 1) / count for i, count in steps.items()]
    return round(float(np.median(lengths)), 3)


def _median_step_ms(chunks: dict[int, list[tuple[float, int]]]) -> float:
    """Without the first chunk, which waits for prefills, and the last, which carries rows."""
    steps = [
        1e3 * (after - before) / (tokens_after - tokens_before)
        for times in chunks.values()
        for (before, tokens_before), (after, tokens_after) in pairwise(times[1:-1])
    ]
    return float(np.median(steps)) if steps else 0.0


def events(arrivals: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The server-sent events of a stream, each with the time at which its last byte arrived."""
    pending: list[bytes] = []
    for arrived, piece in arrivals:
        *complete, rest = piece.split(b"\n")
        for line in complete:
            pending.append(line)
            event = b"".join(pending)
            pending = []
            if event.startswith(b"data:"):
                yield arrived, event[5:].strip()
        pending.append(rest)


def parse(line: bytes) -> dict:
    """One event's answer. Raises LoadError if it is an error."""
    data = json.loads(line)
    if "error" in data:
        raise LoadError(f"the server answered {data['error']}")
    return data


def row_problems(last: dict[int, dict], model: Model, request: Request) -> list[str]:
    """Whether every answer has exactly the rows that it should, and ran undisturbed.

    Values are looked at for the first request alone.
    """
    problems = []
    for index, meta in last.items():
        if meta.get("total_retractions"):
            problems.append(f"request {index} was retracted: the KV pool is too small")
        text = meta.get("routed_experts")
        if request.asked == "no":
            if text is not None:
                problems.append(f"request {index} has rows that it did not ask for")
            continue
        if text is None:
            problems.append(
                f"request {index} has no rows: {meta.get('routed_experts_error', 'absent')}"
            )
            continue
        dtype = meta.get("routed_experts_info", {}).get("dtype", "int32")
        rows = request.input_len + request.output_len - 1
        if len(text) != -(-rows * model.row_bytes(dtype) // 3) * 4:
            problems.append(
                f"request {index} has {len(text)} characters of {dtype} for {rows} rows"
            )
        elif index == 0:
            problems += _value_problems(text, dtype, model)
    return problems


def _value_problems(text: str, dtype: str, model: Model) -> list[str]:
    ids = np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<"))
    ids = np.sort(ids.reshape(-1, model.layers, model.top_k).astype(np.int64), axis=2)
    problems = []
    if ids.min() < 0 or ids.max() >= model.experts:
        problems.append(f"ids from {ids.min()} to {ids.max()}")
    if (np.diff(ids, axis=2) == 0).any():
        problems.append("an expert chosen twice for one token")
    if len(ids) > 1 and (ids == ids[:1]).all():
        problems.append("every row is the same")
    return problems
