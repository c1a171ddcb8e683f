"""Whose rows are in the capture buffer, and where this rank's begin.

docs/rank_layouts.md says why, case by case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class RankLayout:
    """How the tokens of a forward lie at a sparse layer of this rank.

    dp_rank, dp_size: this rank's place in DP attention; (0, 1) without it.
    scattered: sparse layers run on tokens scattered over the attention-TP group, so the buffer
        holds this rank's share of its own batch; `RowGather` joins the shares.
    group_size: ranks of the attention-TP group.
    answers: this rank's scheduler sends answers; only such ranks keep rows.
    """

    dp_rank: int = 0
    dp_size: int = 1
    scattered: bool = False
    group_size: int = 1
    answers: bool = True

    def buffer_tokens(self, tokens_of_a_rank: int) -> int:
        """Tokens that the capture buffer needs room for, if one DP rank has at most so many."""
        if self.gathered:
            return tokens_of_a_rank * self.dp_size
        return -(-tokens_of_a_rank // self.group_size) if self.scattered else tokens_of_a_rank

    @property
    def gathered(self) -> bool:
        """The buffer holds every DP rank's tokens, to be sliced. Never where they are scattered."""
        return self.dp_size > 1 and not self.scattered

    @property
    def captures(self) -> bool:
        """A rank that answers needs the ids; of scattered tokens its group's others have some."""
        return self.answers or self.scattered


def rank_layout(server_args: ServerArgs) -> RankLayout:
    """Read this rank's layout from the base's process groups, which must be initialized."""
    from sglang.srt.layers.dp_attention import (
        get_attention_dp_rank,
        get_attention_dp_size,
        get_attention_tp_rank,
        get_attention_tp_size,
    )

    dp = server_args.enable_dp_attention
    return RankLayout(
        dp_rank=get_attention_dp_rank() if dp else 0,
        dp_size=get_attention_dp_size() if dp else 1,
        scattered=sparse_layers_scatter(),
        group_size=get_attention_tp_size(),
        answers=get_attention_tp_rank() == 0,
    )


def sparse_layers_scatter() -> bool:
    """What the base's LayerCommunicator answers for a sparse layer: it alone knows every case."""
    from sglang.srt.layers.communicator import LayerScatterModes, ScatterMode

    modes = LayerScatterModes.init_new(
        num_layers=3,
        layer_id=1,
        is_layer_sparse=True,
        is_previous_layer_sparse=True,
        is_next_layer_sparse=True,
    )
    return modes.mlp_mode is ScatterMode.SCATTERED


def get_local_range(
    layout: RankLayout,
    forward_batch: ForwardBatch,
    decode_graph: tuple[int, int] | None,
) -> tuple[int, int]:
    """This rank's tokens in the capture buffer: (first row, number of rows).

    Args:
        layout: this rank's.
        forward_batch: after its forward; padding tokens have KV slot 0.
        decode_graph: (padded requests, tokens a request) of the CUDA graph that was replayed, None
            without one. Piecewise graphs count as none.

    From counts that the host has. In a graph every DP rank has the same padded number of tokens.
    Without one, `global_num_tokens_cpu` holds what each rank was padded to (to a multiple of the
    attention-TP size, or to the longest rank).
    """
    num_rows = forward_batch.out_cache_loc.shape[0]
    if not layout.gathered:
        return 0, num_rows
    if decode_graph is not None:
        padded_requests, tokens_per_request = decode_graph
        return layout.dp_rank * padded_requests * tokens_per_request, num_rows
    return sum(forward_batch.global_num_tokens_cpu[: layout.dp_rank]), num_rows


def num_sparse_tokens(
    layout: RankLayout,
    forward_batch: ForwardBatch,
    decode_graph: tuple[int, int] | None,
) -> int:
    """Tokens that a sparse layer of this rank ran on: so much of the buffer is this forward's.

    Padding included. Arguments as for `get_local_range`. The same on every rank of an attention-TP
    group: the base pads what it scatters to a multiple of the group's size.
    """
    if layout.gathered and decode_graph is None:
        return sum(forward_batch.global_num_tokens_cpu)
    own = forward_batch.out_cache_loc.shape[0] if decode_graph is None else math.prod(decode_graph)
    if layout.gathered:
        return own * layout.dp_size
    return own // layout.group_size if layout.scattered else own
