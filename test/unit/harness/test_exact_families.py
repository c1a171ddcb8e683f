"""The models for engines in half precision: exact routers, and checkpoints that are really quantized."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang.test.routed_experts.exact_families import EXACT_FAMILIES, ExactModel, make_exact
from sglang.test.routed_experts.quantized import GROUP, quantize
from sglang.test.routed_experts.router_probe import RouterProbe

GATE = "model.layers.1.mlp.experts.3.gate_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExactModel:
    torch.set_num_threads(1)  # a second one gains nothing on a model this small
    return make_exact(tmp_path_factory.mktemp("model"), EXACT_FAMILIES["qwen3-moe"], leak=1e-6)


def test_half_precision_routes_as_the_table_says(model: ExactModel) -> None:
    half = AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=torch.float16, attn_implementation="eager"
    )
    tokens = np.random.default_rng(3).choice(model.alphabet, 200).tolist()
    rows, _ = RouterProbe(half.eval()).route(tokens)
    assert (np.sort(rows) == np.sort(model.table[tokens[:-1]])).all()
    assert ExactModel.load(model.folder).alphabet == model.alphabet


@pytest.mark.parametrize(
    "method, least", [("fp8-block", 0.03), ("w8a8_int8", 0.01), ("gptq", 0.15), ("awq", 0.15)]
)
def test_quantized_weights_are_the_weights_rounded(
    method: str, least: float, model: ExactModel, tmp_path: Path
) -> None:
    before = load_file(model.folder / "model.safetensors")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((model.folder / name).read_bytes())
    quantize(tmp_path, method)
    after = load_file(tmp_path / "model.safetensors")
    parts = {k.removeprefix(GATE): v for k, v in after.items() if k.startswith(GATE)}
    original = before[GATE + "weight"].float()
    error = (unpacked(parts, method) - original).norm() / original.norm()
    assert 0 < error < least
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(after[router], before[router])


def unpacked(parts: dict[str, torch.Tensor], method: str) -> torch.Tensor:
    """[outputs, inputs] in float32, as the formats are read."""
    if method == "w8a8_int8":
        return parts["weight"].float() * parts["weight_scale"]
    if method == "fp8-block":
        scale = parts["weight_scale_inv"].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        return parts["weight"].float() * scale
    packed = parts["qweight"]
    eights = torch.stack([packed >> 4 * place & 15 for place in range(8)], dim=-1)
    if method == "gptq":
        values = eights.transpose(1, 2).reshape(-1, packed.shape[1])
    else:
        values = eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
    return ((values - 8) * parts["scales"].float().repeat_interleave(GROUP, 0)).T
