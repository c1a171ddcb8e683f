"""Rewriting a checkpoint as published quantized ones are: experts' weights rounded, routers left alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128  # inputs, and for fp8 outputs, that share a scale
_LINEAR = re.compile(r"\.([qkvo]|gate|up|down)_proj\.weight$")
_EXPERTS = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies at which four bits

Tensors = dict[str, torch.Tensor]


def quantize(folder: Path, method: str) -> None:
    """Quantize the weights of a model in `folder`, and say so in its config.

    Args:
        method: "fp8-block" or "w8a8_int8", attention too; "gptq" or "awq", experts only, 4 bits.
    """
    rewrite, config = _METHODS[method]
    chosen = _EXPERTS if method in ("gptq", "awq") else _LINEAR
    path = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, weight in load_file(path).items():
        if chosen.search(name):
            stem = name.removesuffix("weight")
            tensors |= {stem + part: x.contiguous() for part, x in rewrite(weight.float()).items()}
        else:
            tensors[name] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def _fp8_block(weight: torch.Tensor) -> Tensors:
    """One scale for GROUP x GROUP weights."""
    rows, columns = (size // GROUP for size in weight.shape)
    blocks = weight.reshape(rows, GROUP, columns, GROUP)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (blocks / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {"weight": rounded, "weight_scale_inv": scale.reshape(rows, columns)}


def _int8(weight: torch.Tensor) -> Tensors:
    """One scale an output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[inputs, outputs] of 0..15 around 8, and scales [groups, outputs]."""
    groups = weight.T.reshape(-1, GROUP, len(weight))
    scale = groups.abs().amax(dim=1) / 7
    values = (groups / scale.unsqueeze(1)).round() + 8
    return values.clamp(0, 15).to(torch.int32).reshape(weight.T.shape), scale.to(torch.float16)


def _pack(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of the last dimension in an int32."""
    eights = values.unflatten(-1, (-1, 8)).to(torch.int64)
    packed = sum(eights[..., which] << 4 * place for place, which in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _gptq(weight: torch.Tensor) -> Tensors:
    values, scales = _four_bits(weight)
    zeros = torch.full_like(
        scales, 7, dtype=torch.int32
    )  # the format stores one less than is meant
    return {
        "qweight": _pack(values.T).T,
        "qzeros": _pack(zeros),
        "scales": scales,
        "g_idx": torch.arange(len(values), dtype=torch.int32) // GROUP,
    }


def _awq(weight: torch.Tensor) -> Tensors:
    values, scales = _four_bits(weight)
    zeros = torch.full_like(scales, 8, dtype=torch.int32)
    return {
        "qweight": _pack(values, _AWQ_ORDER),
        "qzeros": _pack(zeros, _AWQ_ORDER),
        "scales": scales,
    }


_METHODS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict]] = {
    "fp8-block": (
        _fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [GROUP, GROUP],
        },
    ),
    "w8a8_int8": (_int8, {"quant_method": "w8a8_int8"}),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
            "dynamic": {r"-:.*\.self_attn\..*": {}},
        },
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn"],
        },
    ),
}
