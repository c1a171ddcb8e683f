"""GPU time that the flag adds to a decode step: CUDA graphs recorded with and without it, in one process.

    python graph_pairs.py --trees DIR --site DIR --results FILE [--layers N]

Two servers differ in where their weights lie, by more than what is to be seen. Here one process
loads the model once and records its decode graphs several times, in turn:

    off     nothing captured
    on      as served: ids captured, packed and filed by the graph
    apart   as "on", but the layers' ids lie a prefill chunk apart, as they do for other forwards

All are replayed over the same weights, the same KV cache and the same activations, in random order.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import options
import torch
from results import Results
from servers import Engine

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

VARIANTS = ("off", "on", "apart")
RECORDINGS = 3  # of each variant
BATCHES = {1: 10, 64: 4}  # replays a sample, about 50 ms
ROUNDS = 40
LENGTH = 1_024  # tokens of a request


@dataclass
class Recording:
    """The decode graphs of one turn, by batch, and the samples of their replays in microseconds."""

    variant: str
    turn: int
    graphs: dict[int, torch.cuda.CUDAGraph]
    outputs: dict[int, Any]
    samples: dict[int, list[float]] = field(default_factory=dict)


def load(arguments: list[str]) -> ModelRunner:
    """The model as a server's worker has it, its decode graphs recorded once."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, prepare_server_args

    from sglang.srt.layers.moe import initialize_moe_config

    server_args = prepare_server_args(arguments)
    initialize_moe_config(server_args)
    return ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=0,
        tp_rank=0,
        tp_size=1,
        moe_ep_rank=0,
        moe_ep_size=1,
        pp_rank=0,
        pp_size=1,
        nccl_port=PortArgs.init_new(server_args).nccl_port,
        server_args=server_args,
    )


def record(runner: ModelRunner, variant: str, turn: int) -> Recording:
    """Record the decode graphs anew. Leaves the runner as it was."""
    from sglang.srt.model_executor.cuda_graph_runner import model_capture_mode

    from sglang.srt.layers.moe import routed_experts_capturer as ours
    from sglang.srt.layers.moe.routed_experts import capture

    capturer, graphs = runner.routed_experts_capturer, runner.graph_runner
    buffer, close = capturer._buffer, capturer._buffer.graph_ids
    configs = [m.topk_config for m in capture.find_topk_modules(runner.model).values()]
    bound = [getattr(config, capture._ATTRIBUTE) for config in configs]

    def capture_in_graphs_into(ids: torch.Tensor) -> None:
        buffer.graph_ids = ids
        for layer in bound:
            layer.places = buffer.ids[layer.layer], ids[layer.layer]

    if variant == "off":
        runner.routed_experts_capturer = ours.RoutedExpertsCapturer()
        for config in configs:
            delattr(config, capture._ATTRIBUTE)
    elif variant == "apart":
        capture_in_graphs_into(buffer.ids)
    try:
        graphs.graphs, graphs.output_buffers = {}, {}
        with model_capture_mode():
            graphs.capture()
    finally:
        runner.routed_experts_capturer = capturer
        capture_in_graphs_into(close)
        for config, layer in zip(configs, bound):
            setattr(config, capture._ATTRIBUTE, layer)
    return Recording(variant, turn, dict(graphs.graphs), dict(graphs.output_buffers))


def give_work(runner: ModelRunner, batch: int) -> torch.Tensor:
    """Put a decode step of `batch` requests where the graphs read it. Returns its KV slots."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    given, pool = runner.graph_runner.buffers, runner.req_to_token_pool.req_to_token
    slots = torch.randperm(runner.max_total_num_tokens - 1, device="cuda")[: batch * LENGTH] + 1
    slots = slots.view(batch, LENGTH)
    pool[:batch, :LENGTH] = slots.int()
    given.input_ids[:batch].random_(2, 100_000)
    given.req_pool_indices[:batch] = torch.arange(batch, device="cuda")
    for lengths in (given.seq_lens, given.seq_lens_cpu):
        lengths[:batch] = LENGTH
    given.positions[:batch] = LENGTH - 1
    given.out_cache_loc[:batch] = slots[:, -1]
    given.num_token_non_padded[...] = batch
    runner.attn_backend.init_forward_metadata_replay_cuda_graph(
        batch,
        given.req_pool_indices[:batch],
        given.seq_lens[:batch],
        batch * LENGTH,
        None,
        ForwardMode.DECODE,
        None,
        given.seq_lens_cpu[:batch],
    )
    return slots[:, -1]


def check(
    runner: ModelRunner, recordings: list[Recording], batch: int, slots: torch.Tensor
) -> None:
    """Each variant must do what its name says: file the step's rows, the same ones, or nothing."""
    store, rows = runner.routed_experts_capturer._filer.store, []
    for recording in recordings:
        store.status.zero_()
        recording.graphs[batch].replay()
        torch.cuda.synchronize()
        filed = store.status[slots].tolist()
        if filed != [int(recording.variant != "off")] * batch:
            sys.exit(f"error: {recording.variant} filed {filed}")
        if recording.variant != "off":
            rows.append(store.ids[slots.cpu()].clone())
    if any(not torch.equal(each, rows[0]) for each in rows):
        sys.exit("error: two recordings of one step filed different rows")


def sample(recordings: list[Recording], batch: int) -> None:
    for _ in range(ROUNDS):
        for recording in random.sample(recordings, len(recordings)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(BATCHES[batch]):
                recording.graphs[batch].replay()
            end.record()
            end.synchronize()
            spent = 1e3 * begin.elapsed_time(end) / BATCHES[batch]
            recording.samples.setdefault(batch, []).append(spent)


def kernels(recording: Recording, batch: int) -> dict[str, tuple[int, float]]:
    """{name: (launches, microseconds)} of one replay."""
    replays = 8
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(replays):
            recording.graphs[batch].replay()
        torch.cuda.synchronize()
    return {
        event.key[:100]: (event.count // replays, event.self_device_time_total / replays)
        for event in profile.key_averages()
        if event.self_device_time_total
    }


def figures(recordings: list[Recording], batch: int) -> dict[str, Any]:
    """Of each recording its median, and by how much it differs from the mean of those without the flag, round by round."""
    off = [r.samples[batch] for r in recordings if r.variant == "off"]
    usual = [statistics.mean(samples) for samples in zip(*off)]
    entries = []
    for recording in recordings:
        added = [us - base for us, base in zip(recording.samples[batch], usual)]
        entries.append(
            {
                "variant": recording.variant,
                "turn": recording.turn,
                "us": round(statistics.median(recording.samples[batch]), 2),
                "added_us": round(statistics.median(added), 2),
            }
        )
    by_name = {r.variant: kernels(r, batch) for r in recordings if r.turn == 0}
    names = sorted(set().union(*by_name.values()))
    nothing = 0, 0.0
    different = [
        {
            "name": name,
            **{
                variant: [found.get(name, nothing)[0], round(found.get(name, nothing)[1], 2)]
                for variant, found in by_name.items()
            },
        }
        for name in names
    ]
    # What is launched more often first, then what takes another time.
    different.sort(
        key=lambda k: (k["on"][0] == k["off"][0], -abs(k["on"][1] - k["off"][1])),
    )
    return {"batch": batch, "recordings": entries, "kernels": different[:12]}


def main() -> None:
    parser = options.parser(__doc__)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU here")
    setup, engine = options.setup(arguments, timed=False), Engine("ours", True)
    os.environ.update(setup.environment(engine))
    # SGLang must not find the files beside this one instead of packages of the same name.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path[:0] = [
        str(setup.trees / "ours" / "python"),
        *([str(setup.site)] if setup.site else []),
    ]
    runner = load([*setup.arguments(engine), "--cuda-graph-bs", *map(str, BATCHES)])
    for keys in runner.token_to_kv_pool.k_buffer + runner.token_to_kv_pool.v_buffer:
        keys.normal_(std=0.1)
    random.seed(0)
    recordings = [
        record(runner, variant, turn) for turn in range(RECORDINGS) for variant in VARIANTS
    ]
    about = {**options.header(setup), "length": LENGTH, "rounds": ROUNDS}
    results = Results(arguments.results, about)
    for batch in BATCHES:
        check(runner, recordings, batch, give_work(runner, batch))
        sample(recordings, batch)
        entry = figures(recordings, batch)
        results.replace("batches", ("batch",), [entry])
        for recording in entry["recordings"]:
            print(batch, json.dumps(recording), flush=True)


if __name__ == "__main__":
    main()
