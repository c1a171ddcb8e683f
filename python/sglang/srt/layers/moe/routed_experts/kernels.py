"""The moves of a row: pack (device buffer -> ring), file (ring -> host store), collect (store -> answer).

Each move has one entry point that picks Triton on a GPU and plain torch on the CPU engine; the two must agree byte
for byte (test/unit/pipeline/test_kernels.py runs the Triton side in the interpreter). Once packed, a row is so many
bytes (`layers * top_k * itemsize`), moved as `as_units` sees them: in the widest integers that fit.

Row status, one byte a KV slot: UNFILED (nothing was ever filed there), FILED, BAD (a step could not capture it).
Collect looks for rows that are not FILED, and the answer then carries an error instead of rows.
"""

from __future__ import annotations

import torch
import triton

from sglang.srt.layers.moe.routed_experts.descriptor import BAD_WORD
from sglang.srt.layers.moe.routed_experts.launch import Launcher

UNFILED, FILED, BAD = 0, 1, 2
PACK_TILE = 4096  # ids a program of a prefill chunk packs
COLLECT_TILE = 1024  # units a program gathers; more programs hide the latency of the bus
MOST_SPREAD_TOKENS = 512  # up to here each token has a program of its own: a decode step

_launch_pack = Launcher("pack_kernel")
_launch_file = Launcher("file_kernel")
_launch_pack_and_file = Launcher("pack_and_file_kernel")
_launch_collect = Launcher("collect_kernel")


def as_units(rows: torch.Tensor) -> torch.Tensor:
    """View rows [n, columns] of any type in the widest integers that divide a row: the fewest accesses."""
    row_bytes = rows.shape[1] * rows.itemsize
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)


def pack(
    buffer: torch.Tensor,
    first_row: int,
    cache_loc: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    status: torch.Tensor,
    top_k: int,
    num_experts: int,
) -> None:
    """Turn `len(cache_loc)` tokens of the capture buffer into rows, beside their KV slots and their status.

    Args:
        buffer: int32 [layers, capacity, width], a layer's part contiguous; columns from top_k on are fused shared
            experts: dropped.
        first_row: this rank's first token in the buffer.
        cache_loc: int64 [n], KV slot of each token.
        rows: uint8 or uint16 [>= n, layers * top_k], contiguous, written.
        slots: int64 [>= n], written: a snapshot, for `cache_loc` is the scheduler's to reuse.
        status: uint8 [>= n], written: FILED, or BAD where an id lies outside [0, num_experts).
    """
    num_tokens = cache_loc.shape[0]
    if num_tokens == 0:
        return
    if rows.is_cuda:
        launch_pack(buffer, first_row, cache_loc, rows, slots, status, top_k, num_experts)
        return
    ids = buffer[:, first_row : first_row + num_tokens, :top_k]
    ids = ids.permute(1, 0, 2).reshape(num_tokens, -1)
    bad = ((ids < 0) | (ids >= num_experts)).any(dim=1)
    rows[:num_tokens] = ids.to(rows.dtype)
    status[:num_tokens] = bad.to(torch.uint8) + FILED
    slots[:num_tokens] = cache_loc


def launch_pack(
    buffer: torch.Tensor,
    first_row: int,
    cache_loc: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    status: torch.Tensor,
    top_k: int,
    num_experts: int,
) -> None:
    """The Triton side of `pack`; the interpreter runs it on CPU tensors."""
    assert cache_loc.dtype == torch.int64  # see Launcher: the types of a variant do not change
    num_tokens = cache_loc.shape[0]
    num_layers, _, width = buffer.shape
    columns = num_layers * top_k
    block_c = triton.next_power_of_2(columns)
    block_t = 1 if num_tokens <= MOST_SPREAD_TOKENS else max(1, PACK_TILE // block_c)
    _launch_pack(
        triton.cdiv(num_tokens, block_t),
        (buffer, cache_loc, rows, slots, status, first_row, num_tokens, buffer.stride(0)),
        (width, top_k, columns, num_experts, block_t, block_c),
        num_warps=4,
    )


def file(
    rows: torch.Tensor,
    slots: torch.Tensor,
    status: torch.Tensor,
    num_tokens: int,
    store: torch.Tensor,
    store_status: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Put packed rows where their KV slots say.

    Args:
        rows, slots, status: what `pack` wrote, rows by `as_units`.
        num_tokens: how many of them.
        store: [num_slots, units], by `as_units`; host memory that the GPU can address, or any on the CPU engine.
        store_status: uint8 [num_slots], on the device.
        stream: where to launch; the current stream by default.
    """
    if num_tokens == 0:
        return
    if rows.is_cuda:
        launch_file(rows, slots, status, num_tokens, store, store_status, stream)
        return
    slots = slots[:num_tokens]
    keep = (slots > 0) & (slots < store.shape[0])
    kept = slots[keep]
    store[kept] = rows[:num_tokens][keep]
    store_status[kept] = status[:num_tokens][keep]


def launch_file(
    rows: torch.Tensor,
    slots: torch.Tensor,
    status: torch.Tensor,
    num_tokens: int,
    store: torch.Tensor,
    store_status: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """The Triton side of `file`."""
    num_slots, units = store.shape
    _launch_file(
        num_tokens,
        (rows, slots, status, store, store_status, num_slots),
        (units, store.itemsize, triton.next_power_of_2(units)),
        num_warps=1,
        stream=stream,
    )


def launch_pack_and_file(
    buffer: torch.Tensor,
    first_row: int,
    cache_loc: torch.Tensor,
    store: torch.Tensor,
    store_status: torch.Tensor,
    top_k: int,
    num_experts: int,
) -> None:
    """`pack` and `file` in one launch, for a few tokens: straight from the capture buffer to the host store.

    Args:
        buffer, first_row, cache_loc, top_k, num_experts: as for `pack`.
        store: uint8 or uint16 [num_slots, layers * top_k], host memory that the GPU can address.
        store_status: uint8 [num_slots], on the device.
    """
    assert cache_loc.dtype == torch.int64
    num_layers, _, width = buffer.shape
    num_slots, columns = store.shape
    _launch_pack_and_file(
        cache_loc.shape[0],
        (buffer, cache_loc, store, store_status, first_row, buffer.stride(0), num_slots),
        (width, top_k, columns, num_experts, triton.next_power_of_2(num_layers * top_k)),
        num_warps=4,
    )


def collect(
    store: torch.Tensor,
    store_status: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    header: torch.Tensor,
) -> None:
    """Gather a request's rows into its answer.

    Args:
        store, store_status: as for `file`.
        slots: int32 [n] on the device, the request's KV slots in order.
        out: [n, units], by `as_units`; shared memory.
        header: int32 [>= 2], shared memory: word BAD becomes 1 if any of these rows is not FILED.
    """
    if slots.shape[0] == 0:
        return
    if slots.is_cuda:
        launch_collect(store, store_status, slots, out, header)
        return
    slots = slots.long()
    out.copy_(store[slots])
    if bool((store_status[slots] != FILED).any()):
        header[BAD_WORD] = 1


def launch_collect(
    store: torch.Tensor,
    store_status: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    header: torch.Tensor,
) -> None:
    """The Triton side of `collect`."""
    assert slots.dtype == torch.int32
    constants = collect_constants(out)
    _launch_collect(
        triton.cdiv(out.shape[0], constants[2]),
        (store, store_status, slots, out, header[BAD_WORD:], out.shape[0]),
        constants,
        num_warps=4,
    )


def collect_constants(rows: torch.Tensor) -> tuple[int, int, int, int]:
    """What names the variant of the collect kernel for rows [n, units] by `as_units`."""
    block_u = triton.next_power_of_2(rows.shape[1])
    return rows.shape[1], rows.itemsize, max(1, COLLECT_TILE // block_u), block_u


def launch_collect_at(
    store: int,
    store_status: int,
    slots: int,
    out: int,
    bad: int,
    num_rows: int,
    constants: tuple[int, int, int, int],
) -> None:
    """`launch_collect` by addresses, for a variant that has been launched with tensors before."""
    programs = -(-num_rows // constants[2])
    arguments = store, store_status, slots, out, bad, num_rows
    _launch_collect(programs, arguments, constants, num_warps=4)
