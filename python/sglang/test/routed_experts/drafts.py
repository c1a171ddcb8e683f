"""Draft models for `tiny_moe`'s model, and that model in architectures that bring drafts of their own.

A draft either echoes: it proposes what the last token alone suggests, which the target takes as
often as its `recall` is low; or it is random, and the target hardly ever takes what it proposes.
Targets keep `tiny_moe`'s exact routing in every architecture, so that one reference serves all.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.test.routed_experts.tiny_moe import VOCABULARY, Shape, byte_tokenizer, make_model

Weights = dict[str, torch.Tensor]

_HEADS = 4
_SHARPNESS = 16.0  # of tiny_moe's attention, where no norm applies it
_NEGLIGIBLE = 1e-6
# Sigmoid is finest where it is small: keeps scores that differ by a tie-break apart.
_SIGMOID_SHIFT = 8.0


def make_models(folder: Path, shape: Shape) -> dict[str, Path]:
    """In `folder`, by name: the targets "qwen3" and "glm4" (which also drafts), and drafts for them."""
    return {
        "qwen3": make_model(folder / "qwen3", shape),
        "echo": make_eagle(folder / "echo", shape, echoes=True),
        "random": make_eagle(folder / "random", shape, echoes=False),
        "eagle3": make_eagle3(folder / "eagle3", shape),
        "glm4": make_glm4_moe(folder / "glm4", shape),
    }


def make_eagle(folder: Path, shape: Shape, echoes: bool) -> Path:
    """An EAGLE draft, one dense Llama layer. `hidden` of the target comes in, and may be ignored."""
    draw, hidden = _normal(shape.seed + 1), shape.hidden
    weights = {f"layers.0.{name}": tensor for name, tensor in _llama_layer(draw, hidden).items()}
    del weights["layers.0.input_layernorm.weight"]  # this draft's first layer has none
    weights |= {"fc.weight": draw(hidden, 2 * hidden), "fc.bias": torch.zeros(hidden)}
    if echoes:
        weights["fc.weight"] = torch.eye(hidden, 2 * hidden)
        _silence(weights)
    return _write(folder, weights, _llama_config("LlamaForCausalLMEagle", shape))


def make_eagle3(folder: Path, shape: Shape) -> Path:
    """An EAGLE3 draft with random weights and an output head of its own."""
    draw, hidden = _normal(shape.seed + 2), shape.hidden
    layer = _llama_layer(draw, hidden, attention_inputs=2 * hidden)
    weights = {f"midlayer.{name}": tensor for name, tensor in layer.items()} | {
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "fc.weight": draw(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(VOCABULARY, hidden),
    }
    config = _llama_config("LlamaForCausalLMEagle3", shape)
    return _write(folder, weights, config | {"draft_vocab_size": VOCABULARY})


def make_glm4_moe(folder: Path, shape: Shape) -> Path:
    """The target as GLM-4-MoE, with one more layer that drafts (NEXTN): a MoE layer that echoes."""
    config, weights = _target(folder, shape)
    hidden, draw = shape.hidden, _normal(shape.seed + 3)
    inner, last = hidden // 4, f"model.layers.{shape.layers}"
    _add_nextn_layer(weights, shape)
    for layer in range(shape.layers + 1):
        mlp = f"model.layers.{layer}.mlp"
        _route_by_sigmoid(weights, mlp)
        weights |= {
            f"{mlp}.shared_experts.gate_proj.weight": draw(inner, hidden),
            f"{mlp}.shared_experts.up_proj.weight": draw(inner, hidden),
            f"{mlp}.shared_experts.down_proj.weight": draw(hidden, inner) * _NEGLIGIBLE,
        }
    half = torch.full((hidden,), 0.5**0.5)  # half of a token's embedding is empty
    weights |= {
        f"{last}.enorm.weight": half,
        f"{last}.hnorm.weight": torch.ones(hidden),
        f"{last}.eh_proj.weight": torch.eye(hidden, 2 * hidden),
        f"{last}.shared_head.norm.weight": half,
    }
    config |= {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        "use_qk_norm": True,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
    }
    return _write(folder, weights, config)


def make_mimo_v2(folder: Path, shape: Shape, drafts: int) -> Path:
    """The target as MiMo-V2-Flash, every other layer with a window, and `drafts` layers that draft."""
    config, weights = _target(folder, shape)
    hidden, dim, draw = shape.hidden, config["head_dim"], _normal(shape.seed + 4)
    for layer in range(shape.layers):
        _route_by_sigmoid(weights, f"model.layers.{layer}.mlp")
        attention = f"model.layers.{layer}.self_attn"
        for side in "qk":
            weight = weights[f"{attention}.{side}_proj.weight"].view(_HEADS, dim, hidden)
            length = weight.pow(2).sum((1, 2), keepdim=True).div(dim).sqrt()
            weights[f"{attention}.{side}_proj.weight"] = (
                (weight / length * _SHARPNESS).view(-1, hidden).contiguous()
            )
            del weights[f"{attention}.{side}_norm.weight"]
    for draft in range(drafts):
        layer = _llama_layer(draw, hidden)
        layer["pre_mlp_layernorm.weight"] = layer.pop("post_attention_layernorm.weight")
        _silence(layer)
        layer |= {
            "enorm.weight": torch.full((hidden,), 0.5**0.5),
            "hnorm.weight": torch.ones(hidden),
            "eh_proj.weight": torch.eye(hidden, 2 * hidden),
            "final_layernorm.weight": torch.full((hidden,), 0.5**0.5),
        }
        weights |= {f"model.mtp.layers.{draft}.{name}": tensor for name, tensor in layer.items()}
    heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _HEADS}
    heads |= {"head_dim": dim, "v_head_dim": dim}
    config |= heads | {f"swa_{name}": value for name, value in heads.items()}
    config |= {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "n_routed_experts": shape.experts,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "moe_layer_freq": [1] * shape.layers,
        "hybrid_layer_pattern": [i % 2 for i in range(shape.layers)],
        "sliding_window_size": 128,
        "attention_bias": False,
        "num_nextn_predict_layers": None,
    }
    return _write(folder, weights, config)


def _target(folder: Path, shape: Shape) -> tuple[dict[str, Any], Weights]:
    """Config and weights of `tiny_moe`'s model."""
    plain = make_model(folder.with_name(f"{folder.name}-qwen3"), shape)
    config = json.loads((plain / "config.json").read_text())
    return config, load_file(plain / "model.safetensors")


def _route_by_sigmoid(weights: Weights, mlp: str) -> None:
    """Make a router's scores small enough for a sigmoid to tell them apart; their order stays."""
    router = weights[f"{mlp}.gate.weight"]
    one = router.shape[1] // 2 - 1
    router[:, one] -= _SIGMOID_SHIFT
    weights[f"{mlp}.gate.e_score_correction_bias"] = torch.zeros(router.shape[0])


def _add_nextn_layer(weights: Weights, shape: Shape) -> None:
    """A copy of the first layer behind the last. Its attention is silenced, its router is shuffled."""
    first, last = "model.layers.0.", f"model.layers.{shape.layers}."
    copy = {
        name.removeprefix(first): w.clone() for name, w in weights.items() if name.startswith(first)
    }
    copy["mlp.gate.weight"] = copy["mlp.gate.weight"].roll(1, 0)  # other experts than layer 0's
    copy["self_attn.o_proj.weight"].zero_()
    weights |= {last + name: tensor for name, tensor in copy.items()}


def _llama_layer(
    draw: Callable[..., torch.Tensor], hidden: int, attention_inputs: int | None = None
) -> Weights:
    inputs = attention_inputs or hidden
    return {
        **{f"self_attn.{name}_proj.weight": draw(hidden, inputs) for name in "qkv"},
        "self_attn.o_proj.weight": draw(hidden, hidden),
        "mlp.gate_proj.weight": draw(hidden, hidden),
        "mlp.up_proj.weight": draw(hidden, hidden),
        "mlp.down_proj.weight": draw(hidden, hidden),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }


def _silence(weights: Weights) -> None:
    """Attention and MLP write nothing, so that what comes in goes out."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def _llama_config(architecture: str, shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": shape.hidden // _HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": shape.max_tokens,
        "tie_word_embeddings": False,
        "eos_token_id": 258,
    }


def _normal(seed: int) -> Callable[..., torch.Tensor]:
    """Draws random weights [out, in] that keep the length of what they are given."""
    rng = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=rng) * size[-1] ** -0.5


def _write(folder: Path, weights: Weights, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
