"""The models that the benchmark serves: a shape is enough, for the weights are random."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """A Qwen3 MoE shape; `label` stands beside every figure."""

    label: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    def row_bytes(self, dtype: str) -> int:
        """Bytes of one token's ids, as `dtype` ("uint8", "uint16", "int32")."""
        return self.layers * self.top_k * {"uint8": 1, "uint16": 2, "int32": 4}[dtype]

    def describe(self) -> str:
        return (
            f"{self.label}'s shape, random weights: {self.layers} layers, {self.experts} experts, "
            f"top-{self.top_k}, hidden {self.hidden}, bfloat16"
        )

    def write(self, folder: Path) -> Path:
        """Write the config.json that `--load-format dummy` loads. Returns its folder."""
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.moe_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_theta": 1_000_000.0,
            "attention_bias": False,
        }
        return self._write(folder, "Qwen3MoeForCausalLM", "qwen3_moe", self.layers, experts)

    def write_draft(self, folder: Path) -> Path:
        """Write the config.json of an EAGLE draft for it: one dense layer of the same width."""
        return self._write(folder, "LlamaForCausalLMEagle", "llama", 1, {})

    def _write(
        self, folder: Path, architecture: str, kind: str, layers: int, others: dict[str, Any]
    ) -> Path:
        config = {
            "architectures": [architecture],
            "model_type": kind,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.moe_intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config | others, indent=1))
        return folder


def named(name: str, layers: int | None) -> Model:
    """A model of `MODELS`, with another number of layers if `layers` is given."""
    model = MODELS[name]
    return replace(model, layers=layers) if layers else model


MODELS = {
    "qwen3-30b-a3b": Model(
        label="Qwen3-30B-A3B",
        layers=48,
        experts=128,
        top_k=8,
        hidden=2048,
        moe_intermediate=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocabulary=151_936,
        context=40_960,
    ),
    # For trying the scripts themselves, on the CPU engine as well.
    "tiny": Model(
        label="tiny",
        layers=4,
        experts=16,
        top_k=4,
        hidden=64,
        moe_intermediate=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=1_024,
        context=40_960,
    ),
}
