"""What a model's rows look like, read from its config, and how many tokens one forward can hold.

Both are known before the model loads: buffers get their size, and a dense model its error, at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

# One name a family of models; the first that a config gives a value wins. "top_k" is not among
# them: in a config of transformers it is about sampling.
TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_selected_experts",
    "experts_per_token",
)
EXPERTS_NAMES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
# Where a wrapper keeps the language model's config, and DBRX that of its experts.
NESTED_NAMES = ("text_config", "llm_config", "language_config", "thinker_config", "ffn_config")

# The base never runs more requests at once, however much memory there is.
MOST_RUNNING_REQUESTS = 4096


@dataclass(frozen=True)
class RowShape:
    """A token's row: ids [num_layers, top_k] in the smallest unsigned type that holds every id.

    num_layers: every decoder layer; dense ones have a place too, which holds zeros.
    top_k: without fused shared experts.
    num_experts: how many different ids the router can choose.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype_name(self) -> str:
        return "uint8" if self.num_experts <= 2**8 else "uint16"

    @property
    def itemsize(self) -> int:
        """Bytes that an id takes."""
        return 1 if self.dtype_name == "uint8" else 2

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.top_k * self.itemsize


def resolve_row_shape(hf_text_config: PretrainedConfig) -> RowShape:
    """Read the shape of the rows from a language model's config, or from that of a wrapper.

    Raises:
        ValueError: the model is dense, or its top-k differs from layer to layer.
    """
    top_k = _same_in_every_layer(hf_text_config, TOP_K_NAMES)
    num_experts = _same_in_every_layer(hf_text_config, EXPERTS_NAMES)
    if not top_k or not num_experts or num_experts == 1 or _dense_despite_experts(hf_text_config):
        raise ValueError(
            "--enable-return-routed-experts needs a mixture-of-experts model. "
            f"{_name(hf_text_config)} is dense: its config does not count experts "
            f"({', '.join(EXPERTS_NAMES)}), or not those a token gets ({', '.join(TOP_K_NAMES)}). "
            "Start without the flag."
        )
    # LongCat's router may also choose experts that return their input: the ids after the others.
    num_experts += _first(hf_text_config, ("zero_expert_num",)) or 0
    if top_k > num_experts or num_experts > 2**16:
        raise ValueError(
            f"--enable-return-routed-experts cannot return top-{top_k} of {num_experts} experts, "
            f"which the config of {_name(hf_text_config)} asks for. Correct the config, or start "
            "without the flag."
        )
    return RowShape(_first(hf_text_config, ("num_hidden_layers",)), top_k, num_experts)


def largest_forward_tokens(
    server_args: ServerArgs, context_len: int, max_running_requests: int | None = None
) -> int:
    """The most tokens, padding included, that one forward of one rank can hold: an upper bound.

    Known before the KV pool is sized. Where DP ranks are gathered for the sparse layers, a buffer
    needs `dp_size` times as many, for no rank has more. The largest of

    - a prefill. With chunks, the prompts of a batch share one chunk, which under DP attention is a
      rank's part already. In a mixed batch the running requests' tokens come out of the chunk, but
      only while there are fewer of them than the chunk is long: room for both. Without chunks, the
      first prompt is admitted whatever its length, others within `max_prefill_tokens` only. But
      with no prefix cache, prompts of requests that ignore EOS are admitted while a token of
      `max_prefill_tokens` is left, so that the last one may overshoot by its whole length.
    - a decode step: one token a running request, or all draft tokens where the target verifies.
      The number of requests is padded to the batch size of a CUDA graph, which the base limits to
      the number of running requests, and to a multiple of the attention-TP size.
    - a piecewise graph: a prefill is padded to a captured size, and start-up captures them all.

    Everything is rounded up to the attention-TP size, to which the base pads what it scatters.

    Args:
        server_args: after its own adjustments and the model runner's, which turn chunks off for
            some models.
        context_len: the target model's, in tokens.
        max_running_requests: one rank's, where it is known; else what the arguments allow.
    """
    dp_size = server_args.dp_size if server_args.enable_dp_attention else 1
    group = server_args.tp_size // dp_size
    if max_running_requests is None:
        allowed = server_args.max_running_requests or MOST_RUNNING_REQUESTS * dp_size
        max_running_requests = min(max(allowed // dp_size, 1), MOST_RUNNING_REQUESTS)

    draft_tokens = server_args.speculative_num_draft_tokens or 1
    sizes = [_round_up(max_running_requests, group) * draft_tokens]
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0:
        sizes.append(chunk + (max_running_requests if server_args.enable_mixed_chunk else 0))
    elif server_args.disable_radix_cache:
        sizes.append(server_args.max_prefill_tokens + context_len)
    else:
        sizes.append(max(server_args.max_prefill_tokens, context_len))
    if not server_args.disable_piecewise_cuda_graph:
        sizes.extend(server_args.piecewise_cuda_graph_tokens or ())
    return _round_up(max(sizes), group)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """The first value that the config, or else one nested in it, gives one of the names."""
    for part in _parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in NESTED_NAMES:
        nested = getattr(config, name, None)
        if nested is not None and not isinstance(nested, dict):
            yield from _parts(nested)


def _same_in_every_layer(config: Any, names: tuple[str, ...]) -> int | None:
    value = _first(config, names)
    if not isinstance(value, (list, tuple)):
        return value
    if len(set(value)) > 1:
        raise ValueError(
            "--enable-return-routed-experts needs the same number in every layer, but the config "
            f"of {_name(config)} has {list(value)} for one of {', '.join(names)}. Start without "
            "the flag."
        )
    return value[0] if value else None


def _dense_despite_experts(config: Any) -> bool:
    """Whether no layer is sparse although the config, by a default of its class, counts experts."""
    pattern = _first(config, ("hybrid_override_pattern",))  # Nemotron-H: a letter a layer
    return _first(config, ("model_type",)) == "qwen3_5_text" or (
        isinstance(pattern, str) and "E" not in pattern
    )


def _name(config: Any) -> str:
    architectures = getattr(config, "architectures", None)
    return architectures[0] if architectures else f"A model of type {config.model_type}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
