"""Small random models of other MoE families than `tiny_moe`'s, made by transformers.

Their weights are ordinary random numbers in float32. Whether rounding could have changed a choice
is therefore not excluded beforehand, but measured afterwards: see `RouterProbe.margin`.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

VOCABULARY = 256
LAYERS = 4


@dataclass(frozen=True)
class Family:
    """One model to make.

    config: class name in transformers.
    options: of the config, beside what all have in common.
    top_k, experts: what its rows must look like.
    dense: the first layers that have no experts.
    """

    config: str
    options: dict[str, Any]
    top_k: int = 4
    experts: int = 16
    dense: int = 0


_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
_LOCAL_EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4}
_ROUTED_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1}
_DEEPSEEK_MOE = {"moe_layer_freq": 1, "n_group": 4, "topk_group": 2}  # hub configs have the first
_WIDE = {"moe_intermediate_size": 32, "intermediate_size": 64}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # DeepSeek's own; the CPU engine has no other for them
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

FAMILIES = {
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        _EXPERTS | _WIDE | {"shared_expert_intermediate_size": 64},
    ),
    "mixtral": Family(
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
        top_k=2,
        experts=8,
    ),
    "olmoe": Family(
        "OlmoeConfig",
        _EXPERTS | {"intermediate_size": 32, "num_key_value_heads": 4},
    ),
    "granite-moe": Family(
        "GraniteMoeConfig",
        _LOCAL_EXPERTS | {"intermediate_size": 32, "attention_multiplier": 0.25},
    ),
    "glm4-moe": Family(
        "Glm4MoeConfig",
        _ROUTED_EXPERTS
        | _WIDE
        | {"head_dim": 16, "n_shared_experts": 1, "use_qk_norm": True, "n_group": 1},
        dense=1,
    ),
    "deepseek-v2": Family(
        "DeepseekV2Config",
        _ROUTED_EXPERTS
        | _WIDE
        | _LATENT_ATTENTION
        | _DEEPSEEK_MOE
        | {"n_shared_experts": 2, "topk_method": "group_limited_greedy"},
        dense=1,
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        _ROUTED_EXPERTS
        | _WIDE
        | _LATENT_ATTENTION
        | _DEEPSEEK_MOE
        | {"n_shared_experts": 1, "topk_method": "noaux_tc"},
        dense=1,
    ),
}


def make_family(folder: Path, family: Family, seed: int = 0) -> nn.Module:
    """Write a model's config and float32 weights into `folder`, as they would lie on the hub.

    The same for the same seed.

    Returns:
        transformers' model with these weights, in evaluation mode: the reference.
    """
    config = getattr(transformers, family.config)(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | family.options
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        draw(model)
    model.save_pretrained(folder)
    return model.eval()


def make_adapter(folder: Path, model: nn.Module, seed: int = 1, rank: int = 4) -> None:
    """Write a LoRA adapter for `model`'s attention into `folder`, and merge it into `model`."""
    torch.manual_seed(seed)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    tensors = {}
    for name, weight in model.named_parameters():
        layer, _, module = name.removesuffix(".weight").rpartition(".")
        if module in modules and name.endswith(".weight"):
            down = torch.randn(rank, weight.shape[1]) * weight.shape[1] ** -0.5
            up = torch.randn(weight.shape[0], rank) * rank**-0.5
            tensors[f"base_model.model.{layer}.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{layer}.{module}.lora_B.weight"] = up
            weight.data += up @ down
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "target_modules": modules, "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def fuse_shared_experts() -> None:
    """In this process, run shared experts as one expert more, as CUDA does and the CPU does not."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    def fuse(model: nn.Module, *_: str) -> None:
        model.num_fused_shared_experts = model.config.n_shared_experts
        print("shared experts are fused", flush=True)

    DeepseekV2ForCausalLM.determine_num_fused_shared_experts = fuse
    Glm4MoeForCausalLM.determine_num_fused_shared_experts = fuse


def leave_a_layer_to_transformers() -> None:
    """In this process, SGLang does not replace the experts of layer 2 of Qwen2-MoE."""
    from sglang.srt.models.transformers import TransformersMoEForCausalLM
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

    load = TransformersMoEForCausalLM.load_weights

    def load_and_leave(model: nn.Module, weights: Any) -> Any:
        loaded = load(model, weights)
        model.model.layers[2].mlp.experts = Qwen2MoeExperts(model.config)
        return loaded

    TransformersMoEForCausalLM.load_weights = load_and_leave


def draw(model: nn.Module) -> None:
    """Weights that keep activations near one, so that routing depends on everything before it."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "conv1d" not in name:
            weight.normal_(std=1.0 if "embed" in name else weight.shape[-1] ** -0.5)
        elif "norm" in name:
            weight.add_(torch.randn_like(weight) * 0.1)
        elif name.endswith("bias") and "dt_bias" not in name:
            weight.normal_(std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0, 0.2)


def let_eplb_run_on_the_cpu() -> None:
    """In this process, count experts and turn logical ids physical, as CUDA does and the CPU does not; on two cores."""
    from sglang.srt.eplb import expert_distribution

    from sglang.srt.layers.moe import topk

    class OnTheCpu:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *size: Any, device: str, **options: Any) -> torch.Tensor:
            return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)

    post_process = topk._post_process_topk_ids

    def as_on_cuda(*arguments: Any, **options: Any) -> Any:
        topk._is_cuda = True
        try:
            return post_process(*arguments, **options)
        finally:
            topk._is_cuda = False

    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"  # one entry a rank
    expert_distribution.torch = OnTheCpu()
    topk._post_process_topk_ids = as_on_cuda
    torch.cpu.empty_cache = lambda: None
