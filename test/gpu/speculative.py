"""Speculative decoding on a GPU: rows of every worker against transformers, and against no speculation.

    python test/gpu/speculative.py --out DIR [--only NAME ..] [--start-limit 240]

Greedy, so that every server samples what the server without drafts samples: equal tokens must have
equal rows, and all of them the routing of transformers' router (the models' scores are exact, see
tiny_moe.py: mismatches allowed are 0). Loads: 64 requests at once and one at a time, second turns
on top of cached answers, and ends in the middle of an accepted run. Servers run all at once.
"""

import argparse
import base64
import concurrent.futures
import contextlib
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from subprocess import Popen

import numpy as np
import requests
from values import COMMON, Reference, start, wait

from sglang.test.routed_experts import drafts
from sglang.test.routed_experts.tiny_moe import Shape, byte_tokenizer

SHAPE = Shape(recall=0.25)
# With the tokenizer, for stop strings. A few graphs, so that batches are padded and start-up is short.
FLAGS = " ".join(flag for flag in COMMON if flag != "--skip-tokenizer-init") + (
    " --max-running-requests 64 --max-total-tokens 100000 --disable-piecewise-cuda-graph"
    " --cuda-graph-bs 1 4 24 64 --watchdog-timeout 300 "
)
CHAIN = " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = " --speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
PLAIN = "plain"
LATER = ("turns", "max_new_tokens", "stop tokens", "stop strings")
TOKENIZER = byte_tokenizer()
ROW = (SHAPE.layers, SHAPE.top_k)


@dataclass(frozen=True)
class Case:
    """A server. model: its folder. flags: {name} is the folder of that model.

    accepts: whether its drafts are mostly accepted, mostly rejected (False), or there are none.
    overlapped: it has the workers that run ahead of the scheduler (v2).
    """

    flags: str = ""
    accepts: bool | None = True
    overlapped: bool = True
    model: str = "qwen3"
    guard: str = "sync_guard"


def eagle(draft: str, shape: str = CHAIN, algorithm: str = "EAGLE") -> str:
    return f"--speculative-algorithm {algorithm} --speculative-draft-model-path {{{draft}}}{shape}"


CASES = {
    PLAIN: Case(accepts=None),
    "eagle": Case(eagle("echo")),
    "eagle-random": Case(eagle("random"), accepts=False),
    "eagle-v1-tree": Case(eagle("echo", TREE), overlapped=False),
    "eagle3": Case(eagle("eagle3", algorithm="EAGLE3"), accepts=False),
    "eagle3-v1": Case(eagle("eagle3", algorithm="EAGLE3"), accepts=False, overlapped=False),
    "moe-draft": Case(eagle("glm4")),
    "nextn": Case("--speculative-algorithm NEXTN" + CHAIN, model="glm4"),
    "nextn-v1": Case("--speculative-algorithm NEXTN" + CHAIN, overlapped=False, model="glm4"),
    "ngram": Case(
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8", overlapped=False
    ),
    "multi-layer": Case(
        eagle("mimo") + " --swa-full-tokens-ratio 1.0", model="mimo", guard="multi_layer"
    ),
}


@dataclass(frozen=True)
class Ask:
    """One request; greedy, with rows."""

    prompt: tuple[int, ...]
    new_tokens: int
    sampling: dict = field(default_factory=lambda: {"ignore_eos": True})


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    rows: np.ndarray  # [prompt + completion - 1, layers, top_k]
    meta: dict


class Server:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, ask: Ask) -> Answer:
        """Raises AssertionError if there is not exactly one row for each token but the last."""
        sampling = {"temperature": 0, "max_new_tokens": ask.new_tokens} | ask.sampling
        body = {"input_ids": ask.prompt, "sampling_params": sampling, "return_routed_experts": True}
        response = requests.post(f"{self._url}/generate", json=body, timeout=120)
        response.raise_for_status()
        answer = response.json()
        meta, tokens = answer["meta_info"], tuple(answer["output_ids"])
        assert "routed_experts" in meta, meta.get("routed_experts_error", "no rows")
        ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        rows = len(ask.prompt) + meta["completion_tokens"] - 1
        assert ids.size == rows * np.prod(ROW), f"{ids.size} ids for {rows} rows"
        assert len(tokens) == meta["completion_tokens"], "tokens beside the ones that were counted"
        return Answer(tokens, np.sort(ids.reshape(-1, *ROW), -1), meta)

    def ask_all(self, asks: list[Ask], at_once: int) -> list[Answer]:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.ask, asks))


class Checker:
    """What is right: transformers' router, and the server without drafts."""

    def __init__(self, model: Path) -> None:
        self._reference = Reference(model)
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        self._lock = threading.Lock()
        self.plain: dict[str, list[Answer]] = {}

    def mismatches(self, ask: Ask, answer: Answer) -> int:
        tokens = (ask.prompt + answer.tokens)[:-1]
        with self._lock:
            if tokens not in self._known:
                self._known[tokens] = np.sort(self._reference.ids(list(tokens)), -1)
        return int((answer.rows != self._known[tokens]).sum())

    def unlike_plain(self, load: str, i: int, answer: Answer) -> bool:
        """Tokens behind a stop string may be returned, as many as were accepted with it."""
        plain = self.plain[load][i]
        tokens = len(plain.tokens) if load == "stop strings" else len(answer.tokens)
        same = answer.tokens[:tokens] == plain.tokens
        return not same or (answer.rows[: len(plain.rows)] != plain.rows).any()

    @cached_property
    def loads(self) -> dict[str, tuple[list[Ask], int]]:
        """Name -> requests, and how many of them at once."""
        rng = np.random.default_rng(0)

        def ask(length: int, new_tokens: int) -> Ask:
            return Ask(tuple(rng.integers(3, 200, length).tolist()), new_tokens)

        lengths, outputs = (1, 5, 37, 64, 256, 257, 700, 1500), (1, 2, 3, 6, 40, 97, 150, 200)
        many = [ask(lengths[i % 8], outputs[(i // 8 + i) % 8]) for i in range(128)]
        return {"many": (many, 64), "one by one": ([ask(20 + i, 30 + i) for i in range(5)], 1)}

    @cached_property
    def later_loads(self) -> dict[str, tuple[list[Ask], int]]:
        """Made of plain's answers: second turns, whose prompt ends in tokens that a verify forward has
        cached, and requests that end at a chosen token."""
        first = list(zip(self.loads["many"][0], self.plain["many"]))
        turns = [Ask(a.prompt + b.tokens + (7, 8, 9), 30) for a, b in first if a.new_tokens > 30]
        long = [(a.prompt, b.tokens) for a, b in first if a.new_tokens == 97][:12]
        lengths = [Ask(prompt, n) for prompt, _ in long for n in (2, 4, 7, 12, 18, 29)]
        tokens, strings = [], []
        for prompt, answer in long:
            new = [k for k in range(2, 60) if answer[k] not in answer[:k]]
            tokens += [Ask(prompt, 97, {"stop_token_ids": [answer[k]]}) for k in new[::3]]
            text = TOKENIZER.decode(answer)
            new = [k for k in range(3, 60) if text[k : k + 2] not in text[: k + 1]]
            graphic = [k for k in new if text[k : k + 2].isalnum()]
            strings += [Ask(prompt, 97, {"stop": text[k : k + 2]}) for k in graphic[::3]]
        return {
            "turns": (turns, 32),
            "max_new_tokens": (lengths, 48),
            "stop tokens": (tokens, 48),
            "stop strings": (strings, 48),
        }


def check(name: str, server: Server, checker: Checker) -> dict:
    """Ask everything of one server; the one without drafts comes first."""
    faults: list[str] = []
    wrong = compared = unlike = verified = produced = inside = cached = 0
    for load in (*checker.loads, *LATER):
        asks, at_once = (checker.loads if load in checker.loads else checker.later_loads)[load]
        answers = server.ask_all(asks, at_once)
        if name == PLAIN:
            checker.plain[load] = answers
        for i, (ask, answer) in enumerate(zip(asks, answers)):
            bad = checker.mismatches(ask, answer)
            wrong, compared = wrong + bad, compared + answer.rows.size
            unlike += checker.unlike_plain(load, i, answer)
            meta, tokens = answer.meta, len(answer.tokens)
            steps = meta.get("spec_verify_ct", 0)
            verified, produced = verified + steps, produced + (tokens - 1) * (steps > 0)
            # The workers that run ahead count what they accepted, also behind the end.
            inside += steps > 0 and 1 + steps + meta["spec_accept_token_num"] > tokens
            cached += load == "turns" and meta["cached_tokens"] > len(ask.prompt) // 2
            if bad and len(faults) < 5:
                faults.append(f"{load}, prompt of {len(ask.prompt)}: {bad} ids")
            # A stop string in the middle of an accepted run escapes the base: it goes on.
            ends = {"stop tokens": ("stop",), "stop strings": ("stop", "length")}
            if meta["finish_reason"]["type"] not in ends.get(load, ("length",)):
                faults.append(f"{load}: {meta['finish_reason']}")
    accepted = produced / verified if verified else 0.0
    if unlike:
        faults.append(f"{unlike} answers differ from those without drafts")
    if not cached:
        faults.append("no second turn found its first in the cache")
    case = CASES[name]
    if case.accepts is not None and (verified == 0 or (accepted > 1.5) != case.accepts):
        faults.append(f"{accepted:.2f} tokens a step: not what this draft is for")
    if case.accepts and case.overlapped and inside < 20:
        faults.append(f"only {inside} answers ended inside an accepted run")
    return {
        "mismatches": wrong,
        "compared": compared,
        "tokens_a_step": round(accepted, 2),
        "ended_inside_a_run": int(inside),
        "prefix_hits": int(cached),
        "faults": faults[:8],
    }


def try_check(name: str, process: Popen, port: int, limit: float, checker: Checker) -> dict:
    if not wait(process, port, limit):
        return {"mismatches": None, "faults": ["did not start"]}
    try:
        return check(name, Server(port), checker)
    except Exception as error:  # the other servers are still worth their time
        return {"mismatches": None, "faults": [repr(error)[:300]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--start-limit", type=float, default=240)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "models"
    models = drafts.make_models(folder, SHAPE)
    models["mimo"] = drafts.make_mimo_v2(folder / "mimo", SHAPE, drafts=3)
    names = [PLAIN, *(name for name in args.only if name != PLAIN)]
    ports = {name: 32100 + 50 * i for i, name in enumerate(names)}
    processes: dict[str, Popen] = {}
    results: dict[str, dict] = {}
    try:
        for name in names:
            case = CASES[name]
            flags = (FLAGS + case.flags.format(**models)).split()
            guard = case.guard if case.overlapped else ""
            processes[name] = start(
                name, ports[name], models[case.model], args.out, flags, guard, case.overlapped
            )
        checker = Checker(models["qwen3"])

        def report(name: str) -> None:
            result = try_check(name, processes[name], ports[name], args.start_limit, checker)
            ok = result["mismatches"] == 0 and not result["faults"]
            results[name] = result | {"ok": ok}
            print(f"{name:14} {'ok' if ok else 'FAILED':6} {json.dumps(result)}", flush=True)
            (args.out / "speculative.json").write_text(json.dumps(results, indent=1))

        report(PLAIN)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(report, names[1:]))
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
