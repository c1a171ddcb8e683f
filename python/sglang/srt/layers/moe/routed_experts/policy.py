"""What is refused together with --enable-return-routed-experts, at start-up, before loading.

`REFUSALS` is the whole list. An entry leaves it when rows are right in that configuration, with the
test that shows it. What arguments cannot tell (a model that does not route through TopK) is refused
where capture is bound to the loaded model's layers. docs/refusals.md says of every other argument
why it is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.utils.common import is_hip

from sglang.srt.layers.moe.routed_experts.shape import (
    RowShape,
    largest_forward_tokens,
    resolve_row_shape,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "REFUSALS",
    "Refusal",
    "RowShape",
    "check_server_args",
    "largest_forward_tokens",
    "resolve_row_shape",
]


@dataclass(frozen=True)
class Refusal:
    """One configuration in which rows would be wrong, missing, or are not shown to be right.

    flag: the argument, as it is typed; or an environment variable.
    applies: whether resolved server arguments ask for that configuration.
    why: what would go wrong with rows, or what is missing.
    instead: what to do; by default, to start without the argument.
    """

    flag: str
    applies: Callable[[ServerArgs], bool]
    why: str
    instead: str = ""

    @property
    def advice(self) -> str:
        return self.instead or f"Start without {self.flag}"

    def message(self, server_args: ServerArgs) -> str:
        """One line for the error, with the argument's value where it has one."""
        value = getattr(server_args, self.flag[2:].replace("-", "_"), None)
        given = self.flag if value is None or isinstance(value, bool) else f"{self.flag} {value}"
        return f"{given}: {self.why}. {self.advice}."


def _architectures(server_args: ServerArgs) -> list[str]:
    return server_args.get_model_config().hf_config.architectures or []


def _accepted_tokens_move(server_args: ServerArgs) -> bool:
    """Whether a worker moves KV after it has verified: in pages, n-gram always, the others a tree."""
    if server_args.speculative_algorithm is None or server_args.page_size == 1:
        return False
    is_tree = (server_args.speculative_eagle_topk or 1) > 1
    return is_tree or server_args.speculative_algorithm == "NGRAM"


REFUSALS = (
    # Rows are kept by KV slot: a cache that moves KV elsewhere and back leaves them behind.
    Refusal(
        "--enable-hierarchical-cache",
        lambda args: args.enable_hierarchical_cache,
        "a prefix restored from host memory gets new KV slots, and its rows stay at the old ones",
    ),
    Refusal(
        "--enable-hisparse",
        lambda args: args.enable_hisparse,
        "KV moves between host and device, and rows do not move with it",
    ),
    Refusal(
        "--enable-lmcache",
        lambda args: args.enable_lmcache,
        "a prefix loaded from LMCache was not computed here, so it has no rows",
    ),
    Refusal(
        "--disaggregation-decode-enable-offload-kvcache",
        lambda args: args.disaggregation_decode_enable_offload_kvcache,
        "KV offloaded and loaded again gets new slots, without its rows",
    ),
    Refusal(
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        lambda args: envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get(),
        "rows have not been tested with this prefix cache",
        "Unset it",
    ),
    # Several processes, each with a part of a token's row.
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode != "null",
        "the prompt's rows stay with the prefill server, the output's with the decode server",
        "Serve prefill and decode together (--disaggregation-mode null)",
    ),
    Refusal(
        "--encoder-only",
        lambda args: args.encoder_only,
        "an encoder server runs no language model",
    ),
    Refusal(
        "--language-only",
        lambda args: args.language_only,
        "requests that come by way of an encoder server have not been tested with rows",
        "Serve encoder and language model together",
    ),
    Refusal(
        "--pp-size",
        lambda args: args.pp_size > 1,
        "each pipeline stage has the rows of its own layers only",
        "Use --tp-size or --ep-size instead",
    ),
    Refusal(
        "--attn-cp-size",
        lambda args: args.attn_cp_size > 1,
        "each rank has the rows of its part of the sequence only",
        "Use --attn-cp-size 1",
    ),
    Refusal(
        "--enable-nsa-prefill-context-parallel",
        lambda args: args.enable_nsa_prefill_context_parallel,
        "each rank has the rows of its part of the sequence only",
    ),
    Refusal(
        "--enable-prefill-context-parallel",
        lambda args: args.enable_prefill_context_parallel,
        "each rank has the rows of its part of the sequence only",
    ),
    Refusal(
        "--moe-dp-size",
        lambda args: args.moe_dp_size > 1,
        "each group of MoE ranks sees its own tokens only",
        "Use --moe-dp-size 1",
    ),
    Refusal(
        "--moe-a2a-backend",
        lambda args: (
            args.moe_a2a_backend not in ("none", "deepep", "mooncake", "nixl", "flashinfer")
        ),
        "rows have not been tested with this back end, which does not run on NVIDIA GPUs",
        "Use --moe-a2a-backend deepep, mooncake, nixl, flashinfer or none",
    ),
    Refusal(
        "--elastic-ep-backend",
        lambda args: args.elastic_ep_backend is not None,
        "rows have not been tested with ranks that leave and return",
    ),
    # More than one forward, or something else than a forward a token, writes a row.
    Refusal(
        "--enable-two-batch-overlap",
        lambda args: args.enable_two_batch_overlap,
        "both halves of a batch write their rows to the same place",
    ),
    Refusal(
        "--enable-pdmux",
        lambda args: args.enable_pdmux,
        "a prefill and a decode step run at once and share one capture buffer",
    ),
    Refusal(
        "--dllm-algorithm",
        lambda args: args.dllm_algorithm is not None,
        "a diffusion model runs every token through its layers many times",
    ),
    Refusal(
        "--speculative-algorithm",
        lambda args: (
            args.speculative_algorithm not in (None, "EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
        ),
        "rows have not been tested with this algorithm",
    ),
    Refusal(
        "--speculative-eagle-topk",
        _accepted_tokens_move,
        "with pages, accepted tokens of a tree of drafts move to other KV slots, without their rows",
        "Use --page-size 1, or a chain of drafts (--speculative-eagle-topk 1; NGRAM always builds trees)",
    ),
    Refusal(
        "--enable-multi-layer-eagle",
        lambda args: args.enable_multi_layer_eagle and args.disable_overlap_schedule,
        "rows have not been tested with several draft layers and no overlap",
        "Set SGLANG_ENABLE_SPEC_V2=1, which SGLang does by itself for models that bring such layers",
    ),
    # The ids do not pass the place where they are captured, or are not what the router chose.
    Refusal(
        "--moe-runner-backend",
        lambda args: (
            args.moe_runner_backend in ("flashinfer_trtllm", "flashinfer_mxfp4", "triton_kernel")
        ),
        "its MoE kernel routes inside, where ids cannot be captured (SGLang may have chosen it"
        " for this model and GPU)",
        "Add --moe-runner-backend triton, or flashinfer_trtllm_routed on Blackwell",
    ),
    Refusal(
        "--ep-dispatch-algorithm",
        lambda args: args.ep_dispatch_algorithm == "fake",
        "it routes at random, whatever the router says",
        "Use static or dynamic",
    ),
    Refusal(
        "--kt-weight-path",
        lambda args: args.kt_weight_path is not None,
        "KTransformers overwrites the ids of experts on the CPU",
    ),
    Refusal(
        "--model-impl",
        lambda args: args.model_impl.lower() == "mindspore",
        "it routes outside of torch",
        "Use --model-impl sglang",
    ),
    Refusal(
        "--model-path",
        lambda args: "Ernie4_5_VLMoeForConditionalGeneration" in _architectures(args),
        "Ernie 4.5 VL routes text and image tokens apart, so that rows lose their tokens",
        "Start without --enable-return-routed-experts",
    ),
    Refusal(
        "--device",
        lambda args: args.device.split(":")[0] not in ("cuda", "cpu") or is_hip(),
        "rows are captured on NVIDIA GPUs and on the CPU engine only",
        "Use --device cuda or --device cpu",
    ),
    # Compilers that may reorder or drop a write into a buffer that the model does not return.
    Refusal(
        "--enable-torch-compile",
        lambda args: args.enable_torch_compile,
        "rows have not been tested inside compiled graphs",
    ),
    Refusal(
        "--piecewise-cuda-graph-compiler",
        lambda args: (
            args.piecewise_cuda_graph_compiler != "eager" and not args.disable_piecewise_cuda_graph
        ),
        "rows have not been tested inside compiled graphs",
        "Use --piecewise-cuda-graph-compiler eager, or --disable-piecewise-cuda-graph",
    ),
    Refusal(
        "--enable-symm-mem",
        lambda args: args.enable_symm_mem,
        "ids would have to lie in symmetric memory, the capture buffer does not",
    ),
    # Nobody could ask for rows, or get them.
    Refusal(
        "--is-embedding",
        lambda args: args.is_embedding or not args.get_model_config().is_generation,
        "an embedding or reward model generates no tokens",
    ),
    Refusal(
        "--multi-item-scoring-delimiter",
        lambda args: args.multi_item_scoring_delimiter is not None,
        "several items share a sequence, which no row can tell apart",
    ),
    Refusal(
        "--grpc-mode",
        lambda args: args.grpc_mode,
        "the gRPC protocol has no field to ask for rows, and none to return them",
        "Serve over HTTP",
    ),
)


def check_server_args(server_args: ServerArgs) -> None:
    """Refuse what --enable-return-routed-experts cannot be served with; nothing without the flag.

    Call when the arguments are resolved, for SGLang chooses back ends by itself. Reads the model's
    config, loads nothing.

    Raises:
        ValueError: names the flag and every argument that does not go with it, with what to do; or
            says that the model is dense.
    """
    if not server_args.enable_return_routed_experts:
        return
    refused: list[str] = [
        refusal.message(server_args) for refusal in REFUSALS if refusal.applies(server_args)
    ]
    if refused:
        raise ValueError(
            "--enable-return-routed-experts does not go with:\n  " + "\n  ".join(refused)
        )
    resolve_row_shape(server_args.get_model_config().hf_text_config)
