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
import string
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import requests
from values import COMMON, Reference, start, wait

from sglang.test.routed_experts import drafts
from sglang.test.routed_experts.tiny_moe import Shape, make_model

SHAPE = Shape(recall=0.25)
FLAGS = [flag for flag in COMMON if flag != "--skip-tokenizer-init"] + (
    "--max-running-requests 64 --max-total-tokens 100000 --disable-piecewise-cuda-graph"
    " --cuda-graph-bs 1 4 24 64"
).split()
CHAIN = " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = " --speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
PLAIN = "plain"
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


def make_models(folder: Path) -> dict[str, Path]:
    return {
        "qwen3": make_model(folder / "qwen3", SHAPE),
        "echo": drafts.make_eagle(folder / "echo", SHAPE, echoes=True),
        "random": drafts.make_eagle(folder / "random", SHAPE, echoes=False),
        "eagle3": drafts.make_eagle3(folder / "eagle3", SHAPE),
        "glm4": drafts.make_glm4_moe(folder / "glm4", SHAPE),
        "mimo": drafts.make_mimo_v2(folder / "mimo", SHAPE, drafts=3),
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

    def loads(self) -> dict[str, tuple[list[Ask], int]]:
        """name -> (requests, how many at once). Those made of plain's answers need them first."""
        rng = np.random.default_rng(0)

        def ask(length: int, new_tokens: int) -> Ask:
            return Ask(tuple(rng.integers(3, 200, length).tolist()), new_tokens)

        lengths, outputs = (1, 5, 37, 64, 256, 257, 700, 1500), (1, 2, 3, 6, 40, 97, 150, 200)
        many = [ask(lengths[i % 8], outputs[(i // 8 + i) % 8]) for i in range(128)]
        return {
            "batch 64": (many, 64),
            "batch 1": ([ask(20 + i, 30 + i) for i in range(5)], 1),
        }

    def later_loads(self) -> dict[str, tuple[list[Ask], int]]:
        """Second turns, whose prompt ends in tokens that a verify forward has cached; and ends."""
        many, _ = self.loads()["batch 64"]
        first = list(zip(many, self.plain["batch 64"]))
        turns = [Ask(a.prompt + b.tokens + (7, 8, 9), 30) for a, b in first if a.new_tokens > 30]
        long = [(a, b) for a, b in first if a.new_tokens == 97][:12]
        lengths = [Ask(a.prompt, n) for a, _ in long for n in (2, 4, 7, 12, 18, 29)]
        stops, words = [], []
        for a, b in long:
            fresh = [k for k in range(2, 60) if b.tokens[k] not in b.tokens[:k]]
            stops += [Ask(a.prompt, 97, {"stop_token_ids": [b.tokens[k]]}) for k in fresh[::3]]
            text = [_text(t) for t in b.tokens]
            pairs = [k for k in range(3, 60) if "".join(text[k : k + 2]) not in "".join(text[:k])]
            words += [Ask(a.prompt, 97, {"stop": "".join(text[k : k + 2])}) for k in pairs[::12]]
        return {
            "turns": (turns, 32),
            "max_new_tokens": (lengths, 48),
            "stop tokens": (stops, 48),
            "stop strings": (words, 48),
        }

    def mismatches(self, ask: Ask, answer: Answer) -> int:
        tokens = (ask.prompt + answer.tokens)[:-1]
        with self._lock:
            if tokens not in self._known:
                self._known[tokens] = np.sort(self._reference.ids(list(tokens)), -1)
        return int((answer.rows != self._known[tokens]).sum())


def _text(token: int) -> str:
    """Printable tokens are bytes in the byte-level alphabet's order, which begins with `!`."""
    return string.punctuation and chr(ord("!") + token)


def check(name: str, server: Server, checker: Checker) -> dict:
    """Ask everything of one server."""
    faults: list[str] = []
    wrong = compared = unlike_plain = verified = produced = inside = cached = 0
    loads = checker.loads()
    for load in [*loads, *(() if name == PLAIN else checker.later_loads())]:
        asks, at_once = loads.get(load) or checker.later_loads()[load]
        answers = server.ask_all(asks, at_once)
        if name == PLAIN:
            checker.plain[load] = answers
        for i, (ask, answer) in enumerate(zip(asks, answers)):
            bad = checker.mismatches(ask, answer)
            wrong, compared = wrong + bad, compared + answer.rows.size
            meta = answer.meta
            steps = meta.get("spec_verify_ct", 0)
            verified, produced = verified + steps, produced + (len(answer.tokens) - 1) * (steps > 0)
            over = 1 + steps + meta.get("spec_accept_token_num", 0) - len(answer.tokens)
            inside += steps > 0 and over > 0
            cached += load == "turns" and meta["cached_tokens"] > len(ask.prompt) // 2
            if load in checker.plain:
                plain = checker.plain[load][i]
                unlike_plain += plain.tokens != answer.tokens or (plain.rows != answer.rows).any()
            if bad and len(faults) < 5:
                faults.append(f"{load}, prompt of {len(ask.prompt)}: {bad} ids")
            if load == "stop tokens" and answer.tokens[-1] != ask.sampling["stop_token_ids"][0]:
                faults.append(f"{load}: ends in {answer.tokens[-1]}, {meta['finish_reason']}")
    accepted = produced / verified if verified else 0.0
    case = CASES[name]
    if unlike_plain:
        faults.append(f"{unlike_plain} answers differ from those without drafts")
    if case.accepts is not None:
        if (accepted > 1.5) != case.accepts or verified == 0:
            faults.append(f"{accepted:.2f} tokens a step: not what this draft is for")
        if not cached:
            faults.append("no second turn found its first in the cache")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--start-limit", type=float, default=240)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    models = make_models(args.out / "models")
    names = [PLAIN, *(name for name in args.only if name != PLAIN)]
    processes, results = {}, {}
    try:
        for i, name in enumerate(names):
            case, port = CASES[name], 32100 + i * 50
            flags = case.flags.format(**models).split()
            guard = case.guard if case.overlapped else ""
            processes[name] = start(
                name, port, models[case.model], args.out, FLAGS + flags, guard, case.overlapped
            )
        checker = Checker(models["qwen3"])
        for i, name in enumerate(names):
            port = 32100 + i * 50
            if not wait(processes[name], port, args.start_limit):
                results[name] = {"mismatches": None, "faults": ["did not start"], "compared": 0}
            else:
                try:
                    results[name] = check(name, Server(port), checker)
                except Exception as error:  # the next server is still worth its time
                    results[name] = {"mismatches": None, "faults": [repr(error)[:300]]}
            result = results[name]
            result["ok"] = result["mismatches"] == 0 and not result["faults"]
            verdict = "ok" if result["ok"] else "FAILED"
            print(f"{name:14} {verdict:6} {json.dumps(result)}", flush=True)
            (args.out / "speculative.json").write_text(json.dumps(results, indent=1))
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
