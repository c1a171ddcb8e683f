"""A small random MoE model behind the real server on the CPU, judged by transformers' router.

    make demo

Exit status 0 only if every id is right.
"""

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import numpy as np
import picture
import requests
import table
import texts

from sglang.test.routed_experts.client import Answer, Client
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import FLAG, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model

BUILD = Path(__file__).resolve().parents[2] / "build" / "demo"
CHUNK = 512
NEEDED_GIB = 5


def main() -> int:
    shape = Shape(layers=8, experts=32, top_k=4)
    model = make_model(BUILD / "model", shape)
    size = f"{shape.layers} layers, {shape.experts} experts, top-{shape.top_k}"
    say(f"the model: Qwen3-MoE, {size}, in {model}")
    _look_for_memory()
    flags = (FLAG, "--chunked-prefill-size", str(CHUNK))
    started = time.monotonic()
    with Server(model, flags, log=BUILD / "server.log", progress=_progress) as server:
        say(f"the server is up after {time.monotonic() - started:.0f} s")
        client = Client(server.url, model)
        answers: list[Answer] = []
        for asks, what in (
            (texts.FIRST, "prompts"),
            (texts.THEN, "prompts that start like earlier ones"),
        ):
            say(f"asking {len(asks)} {what} ...")
            answers += client.ask_all(asks)
        cached = [a.meta.get("cached_tokens", 0) for a in answers]
        say("stopping the server")
    say("asking transformers ...")
    asks = [*texts.FIRST, *texts.THEN]
    expected = TransformersRouter(model).route([a.tokens for a in answers])
    total, lines = Tally(), []
    for ask, answer, rows in zip(asks, answers, expected):
        before = total.mismatches
        total.add(answer.rows, rows)
        rows_found = 0 if answer.rows is None else len(answer.rows)
        tokens = (len(answer.prompt), len(answer.completion))
        lines.append((ask.endpoint, ask.text, *tokens, rows_found, total.mismatches - before))
    chunked = sum(len(a.prompt) > CHUNK for a in answers)
    print(f"\n{table.requests_table(lines)}\n")
    say(f"{chunked} prompts were prefilled in chunks of {CHUNK} tokens; "
        f"{max(cached)} tokens of one prompt came from the prefix cache")  # fmt: skip
    _show(answers, client, shape.experts)
    count = total.ids // (shape.layers * shape.top_k)
    if total.mismatches:
        say(f"rows differ: keep {BUILD} and report it with the output above")
    say(f"{count} rows x {shape.layers} layers x {shape.top_k} ids, "
        f"{total.mismatches} mismatches against transformers")  # fmt: skip
    return 0 if total.mismatches == 0 and total.ids else 1


def _show(answers: list[Answer], client: Client, experts: int) -> None:
    """The tables of experts and the picture, of the first answer and of all."""
    first = answers[0]
    if first.rows is None or any(a.rows is None for a in answers):
        say("some answers came without rows, so there is nothing to draw")
        return
    tokens = [client.tokenizer.decode([t]) for t in first.tokens]
    everything = np.concatenate([a.rows for a in answers])
    print(f"\n{table.experts_table(first.rows, tokens, len(first.prompt))}\n")
    print(f"{table.load_table(everything, experts)}\n")
    path = BUILD / "routing.png"
    picture.draw(path, first.rows, tokens, len(first.prompt), everything, experts)
    say(f"picture: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _progress(line: str) -> None:
    if sys.stdout.isatty():
        print(f"\rdemo: {line}", end="\r", flush=True)
    elif int(line.partition(": ")[2].split()[0]) % 5 == 0:
        say(line)


def _look_for_memory() -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) / 2**20
    if free < NEEDED_GIB:
        say(f"only {free:.1f} GiB of memory are free and the server wants {NEEDED_GIB}: "
            "if it is killed, close other programs and try again")  # fmt: skip


def say(line: str) -> None:
    print(f"demo: {line}", flush=True)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the server is stopped")
        sys.exit(130)
    except (RuntimeError, requests.RequestException, json.JSONDecodeError, AssertionError) as error:
        say(f"failed: {error}")
        say(f"the server's log is {BUILD / 'server.log'}; if its end does not say what to do,")
        say("run `make demo` again, and report it with the log if it fails again")
        sys.exit(1)
