"""Values on a GPU: real servers in many configurations, every returned id against transformers' router.

    python test/gpu/values.py --out DIR [--only NAME ...] [--requests 120]

The model (sglang.test.routed_experts.tiny_moe) keeps its router's scores exact in float16, so that no two engines can
differ by rounding: mismatches allowed are 0. sgl_kernel has no float32 kernels. Needs the package on PYTHONPATH, a GPU
and transformers; no network. Servers of a group run at the same time.
"""

import argparse
import base64
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import requests
import torch

from sglang.test.routed_experts.server import GPU_FLAGS
from sglang.test.routed_experts.tiny_moe import Shape, make_model

HERE = Path(__file__).parent
COMMON = [
    *GPU_FLAGS,
    "--grammar-backend",
    "none",
    "--skip-tokenizer-init",
    "--host",
    "127.0.0.1",
    "--enable-return-routed-experts",
    "--mem-fraction-static",
    "0.8",
    "--cuda-graph-max-bs",
    "64",
    "--trust-remote-code",
    "--watchdog-timeout",
    "60",
]
CONFIGURATIONS = {
    "default": "--max-running-requests 64 --max-total-tokens 200000",
    "overlap-off": "--disable-overlap-schedule --max-running-requests 64 --max-total-tokens 200000",
    "chunked": "--chunked-prefill-size 512 --max-total-tokens 100000 --max-running-requests 64",
    "no-chunks": "--chunked-prefill-size -1 --max-prefill-tokens 1024 --max-total-tokens 100000 --max-running-requests 64",
    "mixed-paged": "--enable-mixed-chunk --chunked-prefill-size 256 --page-size 16 --max-total-tokens 100000"
    " --max-running-requests 64 --disable-piecewise-cuda-graph",
    "no-graphs": "--disable-cuda-graph --disable-piecewise-cuda-graph --disable-radix-cache --max-total-tokens 100000"
    " --max-running-requests 64",
    "pressure": "--max-running-requests 2 --max-total-tokens 4600 --disable-piecewise-cuda-graph",
    "retract": "--max-running-requests 64 --max-total-tokens 5000 --disable-piecewise-cuda-graph"
    " --schedule-conservativeness 0.01",
    "memory-saver": "--enable-memory-saver --enable-weights-cpu-backup --max-total-tokens 100000"
    " --max-running-requests 64 --disable-piecewise-cuda-graph",
    "ngram": "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --max-total-tokens 100000"
    " --max-running-requests 64",
    "draft-self": "--speculative-algorithm STANDALONE --speculative-draft-model-path {model} --speculative-num-steps 3"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --max-total-tokens 100000 --max-running-requests 64",
    "draft-other": "--speculative-algorithm STANDALONE --speculative-draft-model-path {other} --speculative-num-steps 3"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --max-total-tokens 100000 --max-running-requests 64",
    "draft-tree": "--speculative-algorithm STANDALONE --speculative-draft-model-path {other} --speculative-num-steps 3"
    " --speculative-eagle-topk 2 --speculative-num-draft-tokens 6 --max-total-tokens 100000 --max-running-requests 64",
}
# Draft models of their own layer 0: a MoE draft that writes into the capture shows up at once.
OVERLAPPED_DRAFTS = ("draft-self", "draft-other")
WAITS_IN_PLACE = ("overlap-off", "ngram", "draft-tree")
SAME_TEXT = [7, 8, 9, 10] * 40


def start_named(name: str, port: int, model: Path, other: Path, out: Path) -> subprocess.Popen:
    """The server of one of the configurations above."""
    flags = CONFIGURATIONS[name].format(model=model, other=other).split()
    guard = "" if name in WAITS_IN_PLACE else "sync_guard"
    return start(name, port, model, out, COMMON + flags, guard, name in OVERLAPPED_DRAFTS)


def start(
    name: str, port: int, model: Path, out: Path, arguments: list, guard: str, spec_v2: bool
) -> subprocess.Popen:
    """Start a server. guard: folder beside this file that goes on its PYTHONPATH, or ""."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if guard:
        environment["PYTHONPATH"] = f"{HERE / guard}:{os.environ['PYTHONPATH']}"
    if spec_v2:
        environment["SGLANG_ENABLE_SPEC_V2"] = "1"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model), "--port", str(port)),
            *arguments,
        ],
        stdout=open(out / f"{name}.log", "w"),
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def wait(process: subprocess.Popen, port: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return True
        except requests.RequestException:
            pass
        time.sleep(0.5)
    return False


def prompts(count: int, longest: int) -> list:
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 2, 5, 50, 255, 256, 257, 700, 37, 300, longest], size=count)
    out = []
    for i, length in enumerate(lengths):
        ids = rng.integers(3, 200, size=length).tolist()
        out.append((SAME_TEXT + ids if i % 3 == 0 else ids, i % 5 != 3, [1, 2, 20, 64, 150][i % 5]))
    return out


def ask(port: int, request: tuple, temperature: float) -> dict:
    ids, asks, new_tokens = request
    body = {
        "input_ids": ids,
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        },
        "return_routed_experts": asks,
        "return_logprob": True,
    }
    response = requests.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


class Reference:
    """transformers on the CPU in float32, one request at a time; answers are kept by token ids."""

    def __init__(self, model: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.model = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = self.model.to("cuda")
        torch.backends.cuda.matmul.allow_tf32 = False

    def ids(self, tokens: list) -> np.ndarray:
        config = self.model.config
        with torch.no_grad():
            out = self.model(torch.tensor([tokens], device="cuda"), output_router_logits=True)
        logits = (
            torch.stack(out.router_logits, 1)
            .float()
            .view(-1, config.num_hidden_layers, config.num_experts)
        )
        return logits.topk(config.num_experts_per_tok, -1).indices.cpu().numpy()


def check(
    reference: Reference, port: int, count: int, longest: int, temperature: float = 0.8
) -> dict:
    wanted = prompts(count, longest)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda r: ask(port, r, temperature), wanted))
    served = time.monotonic() - begun
    mismatches = compared = 0
    faults = []
    for (prompt, asks, _), answer in zip(wanted, answers):
        meta = answer["meta_info"]
        if not asks:
            if any(key.startswith("routed_experts") for key in meta):
                faults.append("rows for a request that did not ask")
            continue
        if "routed_experts" not in meta:
            faults.append(meta.get("routed_experts_error", "no rows"))
            continue
        sampled = [token for _, token, *_ in meta["output_token_logprobs"]]
        rows = len(prompt) + meta["completion_tokens"] - 1
        expected = reference.ids((prompt + sampled)[:rows])
        got = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        if got.size != expected.size:
            faults.append(f"{got.size} ids, expected {expected.size}")
            continue
        wrong = np.sort(got.reshape(expected.shape), -1) != np.sort(expected, -1)
        mismatches += int(wrong.sum())
        compared += wrong.size
        if wrong.any() and len(faults) < 5:
            where = np.argwhere(wrong)
            faults.append(
                f"prompt {len(prompt)}: rows {np.unique(where[:, 0])[:8]} layers {np.unique(where[:, 1])}"
            )
    retracted = sum(a["meta_info"].get("total_retractions", 0) > 0 for a in answers)
    return {
        "mismatches": mismatches,
        "compared": compared,
        "faults": faults[:8],
        "seconds": round(served, 1),
        "retracted": retracted,
        "accepted": round(
            float(np.mean([a["meta_info"].get("spec_accept_length", 0) for a in answers])), 2
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CONFIGURATIONS))
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--start-limit", type=float, default=150)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_model(args.out / "model", Shape())
    other = make_model(args.out / "other", Shape(seed=1))
    servers = {
        name: (31100 + i * 50, start_named(name, 31100 + i * 50, model, other, args.out))
        for i, name in enumerate(args.only)
    }
    failed = 0
    try:
        reference = Reference(model)
        for name, (port, process) in servers.items():
            if not wait(process, port, args.start_limit):
                result = {"mismatches": None, "faults": ["did not start"], "compared": 0}
            else:
                try:
                    longest = 3000 if name not in ("pressure", "retract") else 1500
                    # Greedy drafts are accepted or rejected by equality, which is what these models can be exact in.
                    temperature = 0.0 if name.startswith(("draft", "ngram")) else 0.8
                    result = check(reference, port, args.requests, longest, temperature)
                    if name == "memory-saver":
                        for call in ("release_memory_occupation", "resume_memory_occupation"):
                            requests.post(
                                f"http://127.0.0.1:{port}/{call}", json={}, timeout=60
                            ).raise_for_status()
                        result = check(reference, port, args.requests, longest)
                    log = (args.out / f"{name}.log").read_text(errors="replace")
                    result["graph_prefills"] = sum(
                        "Prefill batch" in line and "cuda graph: True" in line
                        for line in log.splitlines()
                    )
                except Exception as error:  # the next configuration is still worth its time
                    result = {"mismatches": None, "faults": [repr(error)[:300]], "compared": 0}
            ok = result["mismatches"] == 0 and not result["faults"] and result["compared"] > 0
            failed += not ok
            print(f"{name:12} {'ok' if ok else 'FAILED':6} {json.dumps(result)}", flush=True)
    finally:
        for _, process in servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
