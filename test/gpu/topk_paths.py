"""Every top-k path that TopK takes on CUDA, bound to a capture buffer: captured ids against plain torch.

    python test/gpu/topk_paths.py --out FILE.json      prints a line a case; exits with 1 if one failed

Router logits are drawn so that no choice is close (tokens whose k-th and next score differ by less than LEAST are drawn
anew). Compared are: the ids in the buffer with those recomputed from the logits, in eager mode and replayed in a CUDA
graph; the ids that TopK returned, physical where experts are dispatched, with the buffer's; which paths write into the
buffer themselves, and that binding adds no kernel to these and one to every other. Mismatches allowed: none.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from topk_cases import CASES, Case, sigmoid
from torch import nn

from sglang.srt.layers.moe.routed_experts.capture import CaptureBuffer, bind_layers
from sglang.srt.layers.moe.routed_experts.shape import RowShape

TOKENS = (1, 2, 7, 64, 257, 1024, 4096)
GRAPH_TOKENS, PADDING = 64, 14
CAPACITY = 4096
HIDDEN = 64
LEAST = 1e-4  # between the last chosen score and the next, in float32
LAYERS, LAYER = 3, 1


class Subject:
    """A case's TopK, bound as layer LAYER of a model, and what plain torch says it should choose."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = torch.Generator("cuda").manual_seed(0)
        self.bias = (
            torch.rand(case.experts, generator=self.rng, device="cuda") if case.bias else None
        )
        grouped = {}
        if case.groups:
            grouped = dict(
                zip(("num_expert_group", "topk_group"), case.groups), use_grouped_topk=True
            )
        self.topk = TopK(
            case.top_k + case.fused,
            layer_id=LAYER,
            correction_bias=self.bias,
            num_fused_shared_experts=case.fused,
            **({"routed_scaling_factor": 2.5} if case.groups else {}),
            **grouped,
            **case.options,
        )
        if case.native:
            self.topk.forward = self.topk.forward_native
        self.info = _dispatch(case.dispatch, case.experts) if case.dispatch else None
        self.buffer: CaptureBuffer | None = None

    def bind(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        model.layers[LAYER].topk = self.topk
        shape = RowShape(LAYERS, self.case.top_k, self.case.experts)
        width = self.case.top_k + self.case.fused
        self.buffer = CaptureBuffer(shape, CAPACITY, width, "cuda")
        bind_layers(model, shape, self.buffer, direct=True)

    def run(self, logits: torch.Tensor, **options: Any) -> torch.Tensor:
        """The ids that TopK returns, int32 or int64 [tokens, top_k + fused]."""
        hidden = torch.zeros(len(logits), HIDDEN, device="cuda", dtype=torch.float16)
        if self.info:
            options["expert_location_dispatch_info"] = self.info
        return self.topk(hidden, logits, **options).topk_ids

    def draw(self, num_tokens: int) -> torch.Tensor:
        """Logits [tokens, experts] of the case's type: all different within a token, no choice of it close."""
        kept: list[torch.Tensor] = []
        while sum(map(len, kept)) < num_tokens:
            noise = torch.rand(
                2 * num_tokens + 8, self.case.experts, generator=self.rng, device="cuda"
            )
            ranks = noise.argsort(dim=-1).to(torch.float32)
            # Multiples of 1/32 within +-4 are exact in bfloat16; more than 256 experts have a finer grid.
            step = 1 / 32 if self.case.experts <= 256 else 1 / 64
            logits = (ranks - self.case.experts // 2) * step
            kept.append(logits[self._choose(logits)[1] > LEAST])
        return torch.cat(kept)[:num_tokens].to(self.case.dtype).contiguous()

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        return self._choose(logits.float())[0]

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [tokens, top_k], and by how much the closest choice of each token was won [tokens]."""
        case = self.case
        scores = case.score(logits)
        margin = torch.full((len(scores),), torch.inf, device="cuda")
        if self.bias is not None:
            scores = scores + self.bias
        if case.groups and case.groups[1] < case.groups[0]:
            grouped = scores.unflatten(-1, (case.groups[0], -1))
            of_group = grouped.topk(2 if case.bias else 1, dim=-1).values.sum(dim=-1)
            ordered = of_group.sort(dim=-1, descending=True)
            taken = ordered.indices[:, : case.groups[1]]
            margin = _gap(ordered.values, case.groups[1])
            left = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, taken, True)
            scores = grouped.masked_fill(~left.unsqueeze(-1), -torch.inf).flatten(1)
        ordered = scores.sort(dim=-1, descending=True)
        # Softmax scores of many experts are small: what counts is their ratio.
        values = ordered.values if case.score is sigmoid or case.bias else ordered.values.log()
        return ordered.indices[:, : case.top_k], margin.minimum(_gap(values, case.top_k))


def _gap(ordered: torch.Tensor, winners: int) -> torch.Tensor:
    return ordered[:, winners - 1] - ordered[:, winners]


def _dispatch(algorithm: str, experts: int) -> ExpertLocationDispatchInfo:
    """Every physical id differs from its logical one; half of the experts have two places."""
    places = experts + experts // 2
    physical = (torch.arange(places) * 7 + 3) % places  # 7 divides none of the numbers of places
    assert len(physical.unique()) == places
    every = torch.full((experts, 2), -1)
    every[:, 0], every[: experts // 2, 1] = physical[:experts], physical[experts:]
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=physical[:experts].cuda(),
        partial_logical_to_all_physical_map=every.cuda(),
        partial_logical_to_all_physical_map_num_valid=(every >= 0).sum(dim=1).cuda(),
        num_physical_experts=places,
    )


def check(case: Case) -> dict[str, Any]:
    """Mismatches and faults of one case."""
    result: dict[str, Any] = {"case": case.name, "compared": 0, "mismatches": 0, "faults": []}
    subject = Subject(case)
    before = kernels(subject)
    subject.bind()
    own = subject.buffer.ids[LAYER]
    for num_tokens in TOKENS:
        subject.buffer.ids.fill_(-7)
        logits = subject.draw(num_tokens)
        returned = subject.run(logits)
        compare(result, subject, logits, returned, f"{num_tokens} tokens")
        written = returned.data_ptr() == own.data_ptr()
        if not case.dispatch and written != case.direct:
            result["faults"].append(f"{num_tokens} tokens: written into the buffer: {written}")
    compare(result, subject, *replay(subject), "graph")
    if not case.native and "custom_routing_function" not in case.options:
        compare(result, subject, *padded(subject), "padded")
    result["kernels"] = [before, kernels(subject)]
    if before == 0 or result["kernels"][1] - before != (0 if case.direct else 1):
        result["faults"].append("kernels before and after binding")
    return result


def compare(
    result: dict[str, Any],
    subject: Subject,
    logits: torch.Tensor,
    returned: torch.Tensor,
    where: str,
) -> None:
    case, buffer = subject.case, subject.buffer.ids
    captured = buffer[LAYER, : len(logits)].long()
    routed, shared = captured[:, : case.top_k], captured[:, case.top_k :]
    wrong = routed.sort().values != subject.expected(logits).sort().values
    result["compared"] += wrong.numel()
    result["mismatches"] += int(wrong.sum())
    untouched = buffer.clone()
    untouched[LAYER, : len(logits)] = -7
    checks = {
        "wrote beyond its rows": bool((untouched == -7).all()),
        "shared experts among the routed": bool((shared >= case.experts).all()),
        "returned ids differ from the captured": _belong(subject.info, captured, returned.long()),
    }
    result["faults"] += [f"{where}: {what}" for what, right in checks.items() if not right]


def _belong(
    info: ExpertLocationDispatchInfo | None, logical: torch.Tensor, used: torch.Tensor
) -> bool:
    """Whether the experts used are the captured ones: one of their places, and not their own number."""
    if info is None:
        return bool((logical == used).all())
    places = info.partial_logical_to_all_physical_map[logical]
    return bool((places == used.unsqueeze(-1)).any(dim=-1).all()) and bool((logical != used).any())


def replay(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """Record a CUDA graph, replay it with other logits: these, and the ids returned."""
    static = subject.draw(GRAPH_TOKENS)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            subject.run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        returned = subject.run(static)
    subject.buffer.ids.fill_(-7)
    static.copy_(subject.draw(GRAPH_TOKENS))
    graph.replay()
    torch.cuda.synchronize()
    return static, returned


def padded(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """The last PADDING tokens are padding, which TopK masks in what it returns: the others, and their ids."""
    logits = subject.draw(GRAPH_TOKENS)
    subject.buffer.ids.fill_(-7)
    real = torch.tensor(GRAPH_TOKENS - PADDING, device="cuda")
    returned = subject.run(logits, num_token_non_padded=real)
    assert (returned[-PADDING:] == -1).all()
    subject.buffer.ids[LAYER, -PADDING + GRAPH_TOKENS : GRAPH_TOKENS] = -7
    return logits[:-PADDING], returned[:-PADDING]


def kernels(subject: Subject) -> int:
    """How many kernels and copies one call launches on the GPU."""
    logits = subject.draw(GRAPH_TOKENS)
    for _ in range(3):
        subject.run(logits)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        subject.run(logits)
        torch.cuda.synchronize()
    kinds = ("Memcpy", "Memset")
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(1 for e in events if not e.name.startswith(kinds) or "DtoD" in e.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cuda"))
    torch.cuda.set_device(0)
    port = 20000 + os.getpid() % 10000
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel()
    results = []
    for case in CASES:
        begun = time.monotonic()
        try:
            result = check(case)
        except Exception as error:  # the next case is still worth its time
            result = {
                "case": case.name,
                "faults": [repr(error)[:500]],
                "compared": 0,
                "mismatches": None,
            }
        result["seconds"] = round(time.monotonic() - begun, 1)
        result["ok"] = result["mismatches"] == 0 and not result["faults"]
        results.append(result)
        print(f"{'ok' if result['ok'] else 'FAILED':6} {json.dumps(result)}", flush=True)
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
