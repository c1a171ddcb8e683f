"""The whole table of refusals, with real arguments: refused with the flag, served without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang.srt.layers.moe.routed_experts import policy
from sglang.srt.layers.moe.routed_experts.policy import REFUSALS, check_server_args
from unit.policy.configs import COMMON, QWEN3_DENSE, QWEN3_MOE, write_model

Build = Callable[..., ServerArgs]
FLAG = "--enable-return-routed-experts"
QWEN3_VL_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **COMMON,
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
ERNIE_VL = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "model_type": "ernie4_5_vl_moe",
    "moe_num_experts": [64, 64],
    "moe_k": 6,
}
REWARD = {**QWEN3_MOE, "architectures": ["Qwen2ForRewardModel"]}


@dataclass
class Case:
    """Arguments that a refusal must meet. `later`: set on resolved arguments, since this machine
    cannot resolve them (another device, another GPU)."""

    flag: str
    arguments: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: QWEN3_MOE)
    environment: str = ""
    hip: bool = False

    def __str__(self) -> str:
        values = [*self.arguments.items(), *self.later.items()] or [self.config["model_type"]]
        return f"{self.flag} {values}"


def on(flag: str, **arguments: Any) -> Case:
    return Case(flag, {flag[2:].replace("-", "_"): True, **arguments})


CASES = [
    on("--enable-hierarchical-cache"),
    on("--enable-hisparse"),
    on("--enable-lmcache"),
    on(
        "--disaggregation-decode-enable-offload-kvcache",
        disaggregation_mode="decode",
        hicache_storage_backend="file",
    ),
    Case("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", environment="SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
    Case("--disaggregation-mode", {"disaggregation_mode": "prefill"}),
    Case("--disaggregation-mode", {"disaggregation_mode": "decode"}),
    Case("--encoder-only", {"encoder_only": True}, config=QWEN3_VL_MOE),
    Case(
        "--language-only",
        {"language_only": True, "encoder_urls": ["http://localhost:1"]},
        config=QWEN3_VL_MOE,
    ),
    Case("--pp-size", {"pp_size": 2}),
    Case("--attn-cp-size", {"attn_cp_size": 2, "tp_size": 2}),
    on("--enable-nsa-prefill-context-parallel"),
    on("--enable-prefill-context-parallel"),
    Case("--moe-dp-size", {"moe_dp_size": 2, "tp_size": 2}),
    Case("--moe-a2a-backend", {"moe_a2a_backend": "mori", "tp_size": 2}),
    Case("--moe-a2a-backend", later={"moe_a2a_backend": "ascend_fuseep"}),
    Case("--elastic-ep-backend", {"elastic_ep_backend": "nixl"}),
    on("--enable-two-batch-overlap"),
    on("--enable-pdmux", chunked_prefill_size=-1, disable_overlap_schedule=True),
    Case("--dllm-algorithm", {"dllm_algorithm": "LowConfidence", "disable_radix_cache": True}),
    Case("--speculative-algorithm", later={"speculative_algorithm": "DFLASH"}),
    Case(
        "--speculative-eagle-topk",
        later={"speculative_algorithm": "EAGLE", "page_size": 16, "speculative_eagle_topk": 4},
    ),
    Case(
        "--enable-multi-layer-eagle",
        later={"enable_multi_layer_eagle": True, "disable_overlap_schedule": True},
    ),
    *(
        Case("--moe-runner-backend", {"moe_runner_backend": backend})
        for backend in ("flashinfer_trtllm", "flashinfer_mxfp4", "triton_kernel")
    ),
    Case("--ep-dispatch-algorithm", {"ep_dispatch_algorithm": "fake"}),
    Case("--kt-weight-path", {"kt_weight_path": "/weights"}),
    Case("--model-impl", {"model_impl": "mindspore"}),
    Case("--model-path", config=ERNIE_VL),
    *(Case("--device", later={"device": device}) for device in ("npu", "xpu", "hpu", "musa")),
    Case("--device", hip=True),
    on("--enable-torch-compile"),
    Case(
        "--piecewise-cuda-graph-compiler",
        {"piecewise_cuda_graph_compiler": "inductor", "enforce_piecewise_cuda_graph": True},
    ),
    on("--enable-symm-mem"),
    on("--is-embedding"),
    Case("--is-embedding", config=REWARD),
    Case("--multi-item-scoring-delimiter", {"multi_item_scoring_delimiter": 7}),
    on("--grpc-mode"),
]


@pytest.fixture
def arguments_of(
    server_args: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ServerArgs]:
    """Resolved arguments of a case, and its environment."""

    def build(case: Case, **arguments: Any) -> ServerArgs:
        if case.environment:
            monkeypatch.setenv(case.environment, "1")
        if case.hip:
            monkeypatch.setattr(policy, "is_hip", lambda: True)
        model = write_model(tmp_path / case.config["architectures"][0], case.config)
        args = server_args(model_path=model, **case.arguments, **arguments)
        for name, value in case.later.items():
            setattr(args, name, value)
        return args

    return build


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused_with_the_flag_and_served_without(case: Case, arguments_of: Build) -> None:
    without = arguments_of(case)
    check_server_args(without)
    met = [refusal for refusal in REFUSALS if refusal.applies(without)]
    assert case.flag in [refusal.flag for refusal in met]

    with pytest.raises(ValueError) as refused:
        check_server_args(arguments_of(case, enable_return_routed_experts=True))
    message = str(refused.value)
    assert FLAG in message
    assert f"\n  {case.flag}" in message
    assert all(refusal.advice in message for refusal in met)


def test_every_refusal_is_met_by_a_case(
    arguments_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = list(REFUSALS)
    for case in CASES:
        args = arguments_of(case)
        unmet = [refusal for refusal in unmet if not refusal.applies(args)]
        monkeypatch.undo()
    assert not unmet


def test_the_plain_configuration_is_served(server_args: Build) -> None:
    server_args(enable_return_routed_experts=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        *({"tp_size": 2, "moe_a2a_backend": name} for name in ("deepep", "mooncake", "nixl")),
        {"moe_a2a_backend": "flashinfer", "moe_runner_backend": "flashinfer_cutlass"},
        {
            "moe_runner_backend": "flashinfer_cutlass",
            "quantization": "modelopt_fp4",
            "tp_size": 2,
            "dp_size": 2,
            "ep_size": 2,
            "enable_dp_attention": True,
        },
        {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4},
        {"ep_dispatch_algorithm": "dynamic"},
        {"moe_runner_backend": "flashinfer_trtllm_routed"},
        {"enable_mixed_chunk": True, "page_size": 16},
        {"disable_radix_cache": True, "chunked_prefill_size": -1},
        {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
        {"enable_deterministic_inference": True, "attention_backend": "triton"},
        {"enable_memory_saver": True, "enable_streaming_session": True},
    ],
    ids=str,
)
def test_what_is_right_is_not_refused(arguments: dict[str, Any], server_args: Build) -> None:
    server_args(enable_return_routed_experts=True, **arguments)


def test_several_draft_layers_are_served_with_overlap(server_args: Build) -> None:
    args = server_args(enable_return_routed_experts=True)
    args.enable_multi_layer_eagle = True
    check_server_args(args)


def test_every_reason_is_named_at_once(server_args: Build) -> None:
    with pytest.raises(ValueError) as refused:
        server_args(enable_return_routed_experts=True, enable_lmcache=True, pp_size=2)
    assert "--enable-lmcache: " in str(refused.value) and "--pp-size 2: " in str(refused.value)


def test_arguments_changed_later_are_checked_at_launch(server_args: Build) -> None:
    args = server_args(enable_lmcache=True)
    args.check_server_args()
    args.enable_return_routed_experts = True
    with pytest.raises(ValueError, match="--enable-lmcache"):
        args.check_server_args()


def test_a_dense_model_is_refused_before_it_loads(server_args: Build, tmp_path: Path) -> None:
    model = write_model(tmp_path / "dense", QWEN3_DENSE)
    server_args(model_path=model)
    with pytest.raises(ValueError, match=rf"{FLAG} .*Qwen3ForCausalLM is dense"):
        server_args(model_path=model, enable_return_routed_experts=True)
