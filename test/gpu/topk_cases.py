"""The cases of topk_paths.py: which arguments of TopK lead to which path on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.models.llama4 import Llama4MoE
from sglang.srt.models.phimoe import phimoe_routing_function

softmax, sigmoid = (lambda x: x.softmax(dim=-1)), torch.sigmoid


@dataclass
class Case:
    """A path, by the arguments of TopK that lead to it.

    direct: the kernel writes into the buffer itself.
    score: from logits to what is compared, before the bias.
    fused: columns of shared experts behind the routed ones.
    """

    name: str
    experts: int
    top_k: int
    direct: bool = False
    score: Callable[[torch.Tensor], torch.Tensor] = softmax
    bias: bool = False
    groups: tuple[int, int] | None = None  # how many there are, and from how many experts are taken
    fused: int = 0
    dtype: torch.dtype = torch.float32
    dispatch: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    native: bool = False


SIGMOID = {"scoring_func": "sigmoid"}
CASES = [
    *(
        Case(
            f"softmax {e} {str(d)[6:]} {'renormalized' if r else 'plain'}",
            *(e, k, True),
            dtype=d,
            options={"renormalize": r},
        )
        for e, k in ((128, 8), (60, 4))
        for d in (torch.float32, torch.float16, torch.bfloat16)
        for r in (True, False)
    ),
    Case("softmax 512", 512, 10, True),
    Case("sigmoid", 128, 8, True, score=sigmoid, options=SIGMOID),
    Case("sigmoid plain", 64, 4, True, score=sigmoid, options=SIGMOID | {"renormalize": False}),
    Case("sigmoid biased", 256, 8, True, score=sigmoid, bias=True, options=SIGMOID),
    Case("grouped", 160, 6, groups=(8, 3)),
    Case("grouped, fused shared", 64, 6, groups=(8, 3), fused=1),
    Case("biased, flashinfer", 256, 8, True, score=sigmoid, bias=True, groups=(8, 4)),
    Case("biased, compiled, one group", 128, 8, score=sigmoid, bias=True, groups=(1, 1)),
    Case("biased, moe_fused_gate", 128, 10, score=sigmoid, bias=True, groups=(8, 4)),
    Case("biased, moe_fused_gate, fused shared", 256, 8, score=sigmoid, bias=True, groups=(8, 4), fused=1),
    Case("biased, kimi_k2_moe_fused_gate", 384, 8, score=sigmoid, bias=True, groups=(1, 1)),
    Case("biased, compiled", 160, 8, score=sigmoid, bias=True, groups=(8, 4)),
    Case("biased, compiled, fused shared", 128, 8, score=sigmoid, bias=True, groups=(1, 1), fused=1),
    Case("custom, Llama 4", 128, 1, options={"custom_routing_function": Llama4MoE.custom_routing_function}),
    Case(
        "custom, PhiMoE",
        *(16, 2),
        options={"custom_routing_function": phimoe_routing_function, "renormalize": False},
    ),
    Case("native, biased", 96, 12, bias=True, native=True),
    *(
        Case(f"{how} dispatch, {name}", *sizes, **rest, dispatch=how)
        for how in ("static", "dynamic")
        for name, sizes, rest in (
            ("softmax", (128, 8, True), {}),
            ("biased, flashinfer", (64, 8, True), {"score": sigmoid, "bias": True, "groups": (8, 4)}),
            ("biased, moe_fused_gate", (128, 10), {"score": sigmoid, "bias": True, "groups": (8, 4)}),
            ("grouped", (160, 6), {"groups": (8, 3)}),
        )
    ),
]  # fmt: skip
