"""Rows of tokens that are scattered over the attention-TP group, joined by one gather a step.

    each rank:       capture buffer | pack own tokens -> own share | all-gather -> all shares
    answering rank:  shares -> ring slot, in token order           (all on the forward stream)

The base scatters a batch in equal, consecutive parts (it pads to a multiple of the group's size),
so shares laid one behind the other are the batch. Gathering packed rows, once a step, moves a
quarter (or half) of the bytes of gathering ids, in one collective instead of one a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.shape import RowShape

if TYPE_CHECKING:
    from sglang.srt.distributed import GroupCoordinator

_ALIGNMENT = 16  # bytes: what Triton assumes of the pointers of a variant that it compiled


class RowGather:
    """Joins a step's rows from all ranks of an attention-TP group.

    Every rank must call `join` in the same steps. Owns `_own` (written by pack, read by the
    collective) and `_shares` (written by the collective, read by `unpack`), on the forward stream.
    """

    def __init__(
        self, group: GroupCoordinator, capacity: int, shape: RowShape, width: int, device: str
    ) -> None:
        """
        Args:
            group: the attention-TP group.
            capacity: tokens of one rank's share at most.
            width: columns of the capture buffer.
        """
        self._group = group
        self._shape = shape
        share = self._share_bytes(capacity)
        self._own = torch.zeros(share, dtype=torch.uint8, device=device)
        self._shares = torch.zeros(group.world_size * share, dtype=torch.uint8, device=device)
        self._no_slots = torch.zeros((2, _aligned(capacity)), dtype=torch.int64, device=device)
        self._num_tokens = 0
        for num_tokens in {1, min(capacity, kernels.MOST_SPREAD_TOKENS + 1)}:  # compile now
            ids = torch.zeros(
                (shape.num_layers, num_tokens, width), dtype=torch.int32, device=device
            )
            self._pack(ids, num_tokens)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self._own, self._shares, self._no_slots))

    def join(self, buffer: torch.Tensor, num_tokens: int, whole: bool) -> None:
        """Exchange the first `num_tokens` rows of every rank's capture buffer. A collective.

        Args:
            buffer: int32 [layers, capacity, width], this rank's.
            num_tokens: of a rank's share, the same on every rank; at most `capacity`.
            whole: whether they were captured here; else the group learns that they are bad.
        """
        self._num_tokens = num_tokens
        share = self._share_bytes(num_tokens)
        self._pack(buffer, num_tokens)
        if not whole:
            self._own[self._status_offset(num_tokens) : share].fill_(kernels.BAD)
        self._group.all_gather_into_tensor(
            self._shares[: self._group.world_size * share], self._own[:share]
        )

    def unpack(self, rows: torch.Tensor, status: torch.Tensor) -> None:
        """Lay out what `join` brought, in token order.

        Args:
            rows: uint8 or uint16 [>= n, layers * top_k], contiguous; n tokens, of the whole group,
                are written.
            status: uint8 [>= n].
        """
        n, ranks, at = (
            self._num_tokens,
            self._group.world_size,
            self._status_offset(self._num_tokens),
        )
        shares = self._shares[: ranks * self._share_bytes(n)].view(ranks, -1)
        rows[: ranks * n].view(torch.uint8).view(ranks, -1).copy_(
            shares[:, : n * self._shape.row_bytes]
        )
        status[: ranks * n].view(ranks, n).copy_(shares[:, at : at + n])

    def _pack(self, buffer: torch.Tensor, num_tokens: int) -> None:
        rows = self._own[: num_tokens * self._shape.row_bytes]
        no_slots, scratch = self._no_slots
        kernels.pack(
            buffer,
            0,
            no_slots[:num_tokens],
            rows.view(getattr(torch, self._shape.dtype_name)).view(num_tokens, -1),
            scratch,
            self._own[self._status_offset(num_tokens) :],
            self._shape.top_k,
            self._shape.num_experts,
        )

    def _status_offset(self, num_tokens: int) -> int:
        return _aligned(num_tokens * self._shape.row_bytes)

    def _share_bytes(self, num_tokens: int) -> int:
        return self._status_offset(num_tokens) + _aligned(num_tokens)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
