"""Configs of models, written as a checkpoint's config.json. There are no weights: nothing loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 48,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
}
QWEN3_DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write folder/config.json: `config`, and what every decoder has but for names set to None.

    Returns the folder.
    """
    complete = {name: value for name, value in {**COMMON, **config}.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(complete))
    return str(folder)
