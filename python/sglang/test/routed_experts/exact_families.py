"""Small models of many MoE families whose routers see exact inputs: for engines that compute in half precision.

A token's embedding is one-hot, and neither attention nor experts write to the residual stream (their output projections
are zero, or `leak`). So each router reads sqrt(hidden) = 16 times a column of its own weights, which float16 and
bfloat16 represent: the choice depends on token and layer alone, and rounding cannot change it. Tokens with a close choice
all the same (sums of sigmoids in half precision, say) are found by transformers' router and never used.

What this shows is whose ids reach the client, from which layer, token and path. It does not show attention or experts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from sglang.test.routed_experts.families import FAMILIES, Family
from sglang.test.routed_experts.router_probe import RouterProbe

HIDDEN = VOCABULARY = 256
_SILENT = ("o_proj", "out_proj", "down_proj", "down_proj_bias")
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "rms_norm_eps": 1e-10,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4}


def _wide(name: str, **options: Any) -> Family:
    """A family of families.py with dimensions that CUDA kernels take."""
    known = FAMILIES[name]
    latent = _LATENT_ATTENTION if name.startswith("deepseek") else {}
    merged = known.options | latent | options
    experts = next(
        merged[n] for n in ("n_routed_experts", "num_experts", "num_local_experts") if n in merged
    )
    return Family(known.config, merged, merged["num_experts_per_tok"], experts, known.dense)


EXACT_FAMILIES = {
    "qwen3-moe": Family("Qwen3MoeConfig", _EXPERTS | {"norm_topk_prob": True}, experts=32),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        _EXPERTS
        | {
            "shared_expert_intermediate_size": 128,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "full_attention_interval": 4,
        },
        experts=32,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131072,
            "swiglu_limit": 7.0,
        },
        experts=32,
    ),
    "glm4-moe": _wide("glm4-moe", n_routed_experts=128, num_experts_per_tok=8),
    "deepseek-v2": _wide("deepseek-v2", n_routed_experts=160, num_experts_per_tok=6, n_group=8, topk_group=3),
    # Of this size alone the base fuses the shared expert.
    "deepseek-v3": _wide("deepseek-v3", n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4),
    "deepseek-v3-64": _wide("deepseek-v3", n_routed_experts=64, num_experts_per_tok=8, n_group=8, topk_group=4),
}  # fmt: skip


@dataclass(frozen=True)
class ExactModel:
    """A model on disk and what it routes.

    table: int32 [vocabulary, layers, top_k], the choice of transformers' routers for each token.
    alphabet: tokens that may be sent, and that it samples: those without a close choice.
    """

    folder: Path
    table: np.ndarray
    alphabet: list[int]

    @staticmethod
    def load(folder: Path) -> "ExactModel":
        return ExactModel(
            folder, np.load(folder / "table.npy"), np.load(folder / "alphabet.npy").tolist()
        )


def make_exact(
    folder: Path, family: Family, *, dtype: str = "float16", leak: float = 0.0, margin: float = 1e-3
) -> ExactModel:
    """Write config, weights and the table of choices into `folder`.

    Args:
        dtype: of the weights in the file; the reference computes with the same values in float32.
        leak: scale of what attention and experts write. Quantization cannot scale zeros; with a leak of 1e-6 their
            output is far below what could change a choice.
        margin: tokens with a choice won by less, in router scores, are left out. A router with a bias rounds its scores
            to `dtype`: 0.03 is enough for bfloat16.
    """
    config = getattr(transformers, family.config)(**_COMMON | {"dtype": dtype} | family.options)
    for name, value in family.options.items():
        if not hasattr(config, name):  # transformers has no use for it; configs on the hub have it
            setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        _draw(model, family.experts, leak)
        model.to(getattr(torch, dtype)).to(torch.float32).eval()
        probe = RouterProbe(model)
        table, margins = _table(probe)
        model.lm_head.weight[margins < margin] = -4  # times 16: never sampled
    found = ExactModel(folder, table, np.flatnonzero(margins >= margin).tolist())
    _check(found, probe)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    np.save(folder / "table.npy", table)
    np.save(folder / "alphabet.npy", np.array(found.alphabet))
    return found


def _draw(model: nn.Module, experts: int, leak: float) -> None:
    for name, weight in model.named_parameters():
        parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
        if "embed_tokens" in name:
            weight.copy_(torch.eye(VOCABULARY, HIDDEN))
        elif parts[-1] in _SILENT:
            weight.normal_().mul_(leak)
        elif parts[-1] in ("gate", "router") and weight.dim() == 2 and len(weight) == experts:
            ranks = torch.rand_like(weight).argsort(dim=0).to(weight.dtype)
            weight.copy_((ranks - experts / 2) * (4 / experts / 16))
        elif parts[-1] in ("gate", "router") and weight.shape == (experts,):
            weight.normal_(std=0.5)
        elif weight.dim() >= 2 and "conv1d" not in name:
            weight.normal_(std=0.1 if "lm_head" in name else weight.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0, 0.2)


def _table(probe: RouterProbe) -> tuple[np.ndarray, np.ndarray]:
    rows, margins = [], []
    for token in range(VOCABULARY):
        probe.margin = float("inf")
        rows.append(probe.route([token, 0])[0][0])
        margins.append(probe.margin)
    return np.stack(rows), np.array(margins)


def _check(model: ExactModel, probe: RouterProbe) -> None:
    """The table is what the model routes in a text, too."""
    assert len(model.alphabet) > VOCABULARY // 4, f"only {len(model.alphabet)} tokens are exact"
    text = np.random.default_rng(0).choice(model.alphabet, 50).tolist()
    rows, _ = probe.route(text)
    assert (np.sort(rows) == np.sort(model.table[text[:-1]])).all()
    dense = ~model.table.any(axis=(0, 2))
    varied = [len(np.unique(np.sort(layer), axis=0)) for layer in model.table.swapaxes(0, 1)]
    assert all(v > VOCABULARY // 2 or d for v, d in zip(varied, dense)), varied
