"""RowShape from the configs of the model families that the base serves, as the base reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config
from transformers import PretrainedConfig

from sglang.srt.layers.moe.routed_experts.shape import (
    EXPERTS_NAMES,
    NESTED_NAMES,
    TOP_K_NAMES,
    RowShape,
    resolve_row_shape,
)
from unit.policy.configs import COMMON, QWEN3_DENSE, QWEN3_MOE, write_model

# family: (config.json, layers, top-k, experts)
FAMILIES = {
    "qwen3_moe": (QWEN3_MOE, 48, 8, 128),
    "qwen2_moe": ({"num_experts": 60, "num_experts_per_tok": 4}, 48, 4, 60),
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, 48, 2, 8),
    "deepseek_v3": ({"n_routed_experts": 256, "num_experts_per_tok": 8}, 48, 8, 256),
    "deepseek_v2": (
        {"n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2},
        48,
        6,
        160,
    ),
    "glm4_moe": ({"n_routed_experts": 128, "num_experts_per_tok": 8}, 48, 8, 128),
    "gpt_oss": ({"num_local_experts": 128, "num_experts_per_tok": 4}, 48, 4, 128),
    "granitemoe": ({"num_local_experts": 40, "num_experts_per_tok": 8}, 48, 8, 40),
    "ernie4_5_moe": ({"moe_num_experts": 64, "moe_k": 6}, 48, 6, 64),
    "kimi_linear": ({"num_experts": 256, "num_experts_per_token": 8}, 48, 8, 256),
    "qwen3_next": ({"num_experts": 512, "num_experts_per_tok": 10}, 48, 10, 512),
    "hunyuan_v1_moe": ({"num_experts": 64, "moe_topk": [8] * 48}, 48, 8, 64),
    "step3p5": ({"moe_num_experts": 288, "moe_top_k": 8}, 48, 8, 288),
    # Two attention blocks a layer, but one MoE block; zero experts are choices of the router.
    "longcat_flash": (
        {
            "num_hidden_layers": None,
            "num_layers": 28,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "moe_topk": 12,
        },
        28,
        12,
        768,
    ),
    "dbrx": (
        {
            "num_hidden_layers": None,
            "n_layers": 40,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 16, "moe_top_k": 4},
        },
        40,
        4,
        16,
    ),
    "nemotron_h": (
        {"hybrid_override_pattern": "ME*E" * 12, "n_routed_experts": 128, "num_experts_per_tok": 6},
        48,
        6,
        128,
    ),
    # Wrappers: the language model's config lies inside.
    "qwen3_vl_moe": (
        {
            "text_config": {
                **COMMON,
                "model_type": "qwen3_vl_moe_text",
                "num_experts": 128,
                "num_experts_per_tok": 8,
            }
        },
        48,
        8,
        128,
    ),
    "llama4": (
        {"text_config": {**COMMON, "num_local_experts": 16, "num_experts_per_tok": 1}},
        48,
        1,
        16,
    ),
}

DENSE = {
    "qwen3": QWEN3_DENSE,
    "llama": {},
    "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 2},
    "hunyuan_v1_dense": {"num_experts": 1, "moe_topk": 1},
    "nemotron_h": {"hybrid_override_pattern": "M-*-" * 12},
    # The base's config class counts 512 experts for it, by a default that it inherits.
    "qwen3_5": {"text_config": {**COMMON, "model_type": "qwen3_5_text"}},
    "qwen3_vl": {"text_config": {**COMMON, "model_type": "qwen3_vl_text"}},
}


def read(tmp_path: Path, model_type: str, config: dict) -> PretrainedConfig:
    """The language model's config, read from a config.json in the way of the base."""
    config = {"model_type": model_type, "architectures": ["AnyModel"], **config}
    path = write_model(tmp_path, config)
    return get_hf_text_config(get_config(path, trust_remote_code=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_a_family(family: str, tmp_path: Path) -> None:
    config, layers, top_k, experts = FAMILIES[family]
    assert resolve_row_shape(read(tmp_path, family, config)) == RowShape(layers, top_k, experts)


@pytest.mark.parametrize("top_k", TOP_K_NAMES)
@pytest.mark.parametrize("experts", EXPERTS_NAMES)
def test_every_name_is_read(top_k: str, experts: str) -> None:
    config = PretrainedConfig(num_hidden_layers=30, **{top_k: 8, experts: 128})
    assert resolve_row_shape(config) == RowShape(30, 8, 128)


@pytest.mark.parametrize("name", NESTED_NAMES)
def test_a_config_inside_another_is_read(name: str) -> None:
    inner = PretrainedConfig(num_hidden_layers=30, num_experts=128, top_k_experts=8)
    assert resolve_row_shape(PretrainedConfig(**{name: inner})) == RowShape(30, 8, 128)
    dense = PretrainedConfig(**{name: PretrainedConfig(num_hidden_layers=30)})
    with pytest.raises(ValueError, match="is dense"):
        resolve_row_shape(dense)


@pytest.mark.parametrize("family", DENSE)
def test_a_dense_model_is_refused_with_the_flag(family: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--enable-return-routed-experts .* is dense"):
        resolve_row_shape(read(tmp_path, family, DENSE[family]))


def test_a_top_k_that_differs_from_layer_to_layer_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, "hunyuan_v1_moe", {"num_experts": 64, "moe_topk": [8] * 47 + [4]})
    with pytest.raises(ValueError, match="same number in every layer"):
        resolve_row_shape(config)


def test_more_choices_than_experts_are_refused() -> None:
    config = PretrainedConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=8)
    with pytest.raises(ValueError, match="top-8 of 4 experts"):
        resolve_row_shape(config)


def test_ids_take_the_smallest_type_that_holds_them() -> None:
    bytes_per_token = {256: 48 * 8, 257: 48 * 8 * 2, 2**16: 48 * 8 * 2}
    for experts, row_bytes in bytes_per_token.items():
        assert RowShape(48, 8, experts).row_bytes == row_bytes
    assert RowShape(48, 8, 256).dtype_name == "uint8"
    assert RowShape(48, 8, 257).dtype_name == "uint16"
