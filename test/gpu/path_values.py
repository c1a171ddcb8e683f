"""Routing paths on a GPU, end to end: engines of many MoE families, every returned id against transformers' routers.

    python test/gpu/path_values.py --out DIR [--only NAME ...] [--at-once 6] [--budget SECONDS]

The models (sglang.test.routed_experts.exact_families) have routers that see exact inputs: mismatches allowed are none.
Each engine runs in a process of its own, a few at a time; one that the budget does not reach is reported as not run.
DIR gets results.json, and logs.txt with the end of each log.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "enable_return_routed_experts": True,
    "mem_fraction_static": 0.8,
    "max_total_tokens": 30000,
    "max_running_requests": 16,
    "cuda_graph_max_bs": 16,
    "chunked_prefill_size": 512,
    "piecewise_cuda_graph_max_tokens": 256,
    "random_seed": 0,
}
PROMPTS, ROUNDS = (1, 2, 5, 16, 17, 63, 64, 65, 130, 255, 256, 300, 511, 513, 700) * 2, 2
NEW_TOKENS = (1, 2, 20, 64, 70)
LOG_LINES = 120


@dataclass
class Setup:
    """One engine.

    logged: what its log must hold, and how often at least; 0: what it must not hold.
    eplb: as --enable-eplb, which the base's arguments refuse on one rank, while its code has no need to.
    """

    family: str
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    quantize: str = ""
    logged: dict[str, int] = field(default_factory=dict)
    eplb: bool = False
    rounds: int = ROUNDS


def _eplb(algorithm: str) -> Setup:
    options = {
        "ep_dispatch_algorithm": algorithm,
        "ep_num_redundant_experts": 8,
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": 120,
        "eplb_rebalance_num_iterations": 120,
    }
    logged = {"[EPLBManager] rebalance end": 2}
    return Setup("deepseek-v3-64", options, logged=logged, eplb=True, rounds=4)


NO_PIECES = {"disable_piecewise_cuda_graph": True}  # starts sooner; the other engines have them
BFLOAT16 = {"dtype": "bfloat16", "margin": 0.03}  # the only type of their weights, or states
NOT_FUSED = "Shared experts fusion optimization is disabled"
SETUPS = {
    "gpt-oss": Setup("gpt-oss", {"moe_runner_backend": "triton"}, BFLOAT16),
    "qwen3-next": Setup("qwen3-next", {"max_mamba_cache_size": 64}, BFLOAT16),
    "qwen3-next-overlap": Setup(
        "qwen3-next",
        {"max_mamba_cache_size": 64, "mamba_scheduler_strategy": "extra_buffer"},
        BFLOAT16,
    ),
    "deepseek-v3": Setup("deepseek-v3", logged={"Shared experts fusion optimization enabled": 1}),
    "eplb-dynamic": _eplb("dynamic"),
    "glm4-moe": Setup("glm4-moe", {"page_size": 16}, logged={NOT_FUSED: 0}),
    "fp8": Setup("qwen3-moe", NO_PIECES | {"quantization": "fp8"}, {"leak": 1e-6}),
    "deepseek-v3-unfused": Setup(
        "deepseek-v3", NO_PIECES | {"disable_shared_experts_fusion": True, "page_size": 64}
    ),
    "eplb-static": _eplb("static"),
    "deepseek-v2": Setup("deepseek-v2", {"page_size": 16}),
    **{
        name: Setup("qwen3-moe", NO_PIECES | options, {"leak": 1e-6}, quantize=name)
        for name, options in (
            ("fp8-block", {}),
            ("w8a8_int8", {}),
            # Marlin's kernels would be compiled when they are first used, for more than four minutes.
            ("gptq", {"quantization": "moe_wna16"}),
            ("awq", {"quantization": "moe_wna16"}),
        )
    },
}


def job(name: str, folder: Path) -> dict[str, Any]:
    """Make the model, start the engine, compare. Runs in a process of its own."""
    import numpy as np
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    from sglang.srt.layers.moe.routed_experts.wire import extract_routed_experts_from_meta_info
    from sglang.test.routed_experts.compare import Tally
    from sglang.test.routed_experts.exact_families import EXACT_FAMILIES, make_exact
    from sglang.test.routed_experts.quantized import quantize

    setup = SETUPS[name]
    model = make_exact(folder / name, EXACT_FAMILIES[setup.family], **setup.model)
    if setup.quantize:
        quantize(folder / name, setup.quantize)
    dtype = setup.model.get("dtype", "float16")
    args = ServerArgs(model_path=str(folder / name), dtype=dtype, **COMMON | setup.engine)
    args.enable_eplb = setup.eplb
    engine = Engine(server_args=args)
    rng = np.random.default_rng(1)
    prompts = [rng.choice(model.alphabet, length).tolist() for length in PROMPTS]
    options = [
        {"max_new_tokens": NEW_TOKENS[i % len(NEW_TOKENS)], "temperature": 1.0, "ignore_eos": True}
        for i in range(len(prompts))
    ]
    rounds = []
    for _ in range(setup.rounds):  # the second finds its prompts in the prefix cache
        tally, faults = Tally(), []
        outputs = engine.generate(
            input_ids=prompts, sampling_params=options, return_routed_experts=True
        )
        for prompt, output in zip(prompts, outputs):
            meta = output["meta_info"]
            if "routed_experts" not in meta:
                faults.append(meta.get("routed_experts_error", "no rows"))
                continue
            rows = extract_routed_experts_from_meta_info(output)
            expected = model.table[(prompt + output["output_ids"])[:-1]]
            tally.add(rows.reshape(-1, *expected.shape[1:]), expected)
        rounds.append({"compared": tally.ids, "mismatches": tally.mismatches, "faults": faults[:3]})
    engine.shutdown()
    return {"rounds": rounds}


class Job:
    """A process that runs one setup, and its log."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.begun = time.monotonic()
        self.log = folder / f"{name}.log"
        self.result = folder / f"{name}.json"
        command = [sys.executable, __file__, "--out", str(folder), "--job", name]
        self.process = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
            start_new_session=True,
        )

    def finish(self) -> dict[str, Any]:
        """Its result, judged; and the end of all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        text = self.log.read_text(errors="replace")
        result = json.loads(self.result.read_text()) if self.result.exists() else {"rounds": []}
        result["seconds"] = round(time.monotonic() - self.begun, 1)
        prefills = [line for line in text.splitlines() if "Prefill batch" in line]
        result["prefills"] = len(prefills)
        result["prefills_in_graphs"] = sum("cuda graph: True" in line for line in prefills)
        result["logged"] = {what: text.count(what) for what in SETUPS[self.name].logged}
        wanted = SETUPS[self.name].logged.items()
        result["ok"] = (
            bool(result["rounds"])
            and all(r["compared"] and not r["mismatches"] and not r["faults"] for r in result["rounds"])
            and all(text.count(w) >= n if n else w not in text for w, n in wanted)
        )  # fmt: skip
        return result


def run_all(names: list[str], out: Path, folder: Path, at_once: int, budget: float) -> bool:
    """Run jobs, at most `at_once` at a time, until all are done or the budget (seconds) is spent."""
    begun = time.monotonic()
    waiting, running, results = list(names), [], {}

    def report(job: Job) -> None:
        result = results[job.name] = job.finish()
        print(f"{'ok' if result['ok'] else 'FAILED':6} {job.name} {json.dumps(result)}", flush=True)
        (out / "results.json").write_text(json.dumps(results, indent=1))
        with (out / "logs.txt").open("a") as logs:
            lines = [line[:500] for line in job.log.read_text(errors="replace").splitlines()]
            logs.write(f"\n===== {job.name}\n" + "\n".join(lines[-LOG_LINES:]) + "\n")

    while waiting or running:
        spent = time.monotonic() - begun > budget
        for done in [j for j in running if spent or j.process.poll() is not None]:
            running.remove(done)
            report(done)
        while waiting and len(running) < at_once and not spent:
            running.append(Job(waiting.pop(0), folder))
        if spent and waiting:
            print(f"not run, the budget is spent: {' '.join(waiting)}", flush=True)
            break
        time.sleep(0.2)
    return not waiting and all(result["ok"] for result in results.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--work", type=Path, help="models and logs; default: OUT")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--budget", type=float, default=240)
    parser.add_argument("--job", choices=list(SETUPS), help="used by this script itself")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.job:
        result = job(args.job, args.out)
        (args.out / f"{args.job}.json").write_text(json.dumps(result))
        return 0
    work = args.work or args.out
    work.mkdir(parents=True, exist_ok=True)
    return 0 if run_all(args.only, args.out, work, args.at_once, args.budget) else 1


if __name__ == "__main__":
    sys.exit(main())
