"""The three moves of a row: pack (device buffer -> ring), file (ring -> host store), collect (store -> answer).

Each move has one entry point that picks Triton on a GPU and plain torch on the CPU engine; the two must agree byte
for byte (test/unit/pipeline/test_kernels.py runs the Triton side in the interpreter). Once packed, a row is so many
bytes (`layers * top_k * itemsize`), moved as `as_units` sees them: in the widest integers that fit.

Row status, one byte a KV slot: UNFILED (nothing was ever filed there), FILED, BAD (a step could not capture it).
Collect looks for rows that are not FILED, and the answer then carries an error instead of rows.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl

from sglang.srt.layers.moe.routed_experts.launch import Launcher

UNFILED, FILED, BAD = 0, 1, 2
READY_WORD, BAD_WORD = 0, 1
PACK_TILE = 4096  # ids a program of a prefill chunk packs
COLLECT_TILE = 1024  # units a program gathers; more programs hide the latency of the bus
MOST_SPREAD_TOKENS = 512  # up to here each token has a program of its own: a decode step


# Integers and pointers that change from step to step are not specialized on: a variant met first in the middle of
# serving would compile there. RowFiler.open and RowCollector launch every variant that is left.
@triton.jit(
    do_not_specialize=["first_row", "num_tokens", "layer_stride"],
    do_not_specialize_on_alignment=["cache_loc_ptr"],
)
def _pack_kernel(
    buffer_ptr,
    cache_loc_ptr,
    rows_ptr,
    slots_ptr,
    status_ptr,
    first_row,
    num_tokens,
    layer_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_C)
    real = tokens < num_tokens
    mask = real[:, None] & (columns < COLUMNS)[None, :]
    source = (
        (columns // TOP_K).to(tl.int64)[None, :] * layer_stride
        + (first_row + tokens).to(tl.int64)[:, None] * WIDTH
        + (columns % TOP_K)[None, :]
    )
    ids = tl.load(buffer_ptr + source, mask=mask, other=0)
    out_of_range = ((ids < 0) | (ids >= NUM_EXPERTS)).to(tl.int32)
    bad = tl.max(out_of_range, axis=1)
    target = tokens.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tl.store(rows_ptr + target, ids.to(rows_ptr.dtype.element_ty), mask=mask)
    tl.store(status_ptr + tokens, (1 + bad).to(tl.uint8), mask=real)
    tl.store(slots_ptr + tokens, tl.load(cache_loc_ptr + tokens, mask=real), mask=real)


@triton.jit(do_not_specialize=["num_slots"])
def _file_kernel(
    rows_ptr,
    slots_ptr,
    status_ptr,
    store_ptr,
    store_status_ptr,
    num_slots,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,  # not used; tells variants of the same number of units apart
    BLOCK_U: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    # Slot 0 is where the base writes padding; it never belongs to a request.
    if (slot > 0) & (slot < num_slots):
        units = tl.arange(0, BLOCK_U)
        mask = units < UNITS
        row = tl.load(rows_ptr + token * UNITS + units, mask=mask)
        tl.store(store_ptr + slot * UNITS + units, row, mask=mask)
        tl.store(store_status_ptr + slot, tl.load(status_ptr + token))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "out_ptr", "header_ptr"],
)
def _collect_kernel(
    store_ptr,
    store_status_ptr,
    slots_ptr,
    out_ptr,
    header_ptr,
    num_rows,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,  # not used; tells variants of the same number of units apart
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = rows < num_rows
    units = tl.arange(0, BLOCK_U)
    slots = tl.load(slots_ptr + rows, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & (units < UNITS)[None, :]
    data = tl.load(store_ptr + slots[:, None] * UNITS + units[None, :], mask=mask)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * UNITS + units[None, :], data, mask=mask)
    status = tl.load(store_status_ptr + slots, mask=real, other=1)
    bad = tl.sum((status != 1).to(tl.int32), axis=0)
    # A plain store: the header is host memory, where a GPU across PCIe has no atomics.
    if bad > 0:
        tl.store(header_ptr + 1, 1)


_launch_pack = Launcher(_pack_kernel)
_launch_file = Launcher(_file_kernel)
_launch_collect = Launcher(_collect_kernel)


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
        buffer: int32 [layers, capacity, width], contiguous; columns from top_k on are fused shared experts: dropped.
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
    num_layers, capacity, width = buffer.shape
    columns = num_layers * top_k
    block_c = triton.next_power_of_2(columns)
    block_t = 1 if num_tokens <= MOST_SPREAD_TOKENS else max(1, PACK_TILE // block_c)
    _launch_pack(
        triton.cdiv(num_tokens, block_t),
        (buffer, cache_loc, rows, slots, status, first_row, num_tokens, capacity * width),
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
    stream: Optional[torch.cuda.Stream] = None,
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
    stream: Optional[torch.cuda.Stream] = None,
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
    num_rows, units = out.shape
    block_u = triton.next_power_of_2(units)
    block_r = max(1, COLLECT_TILE // block_u)
    _launch_collect(
        triton.cdiv(num_rows, block_r),
        (store, store_status, slots, out, header, num_rows),
        (units, store.itemsize, block_r, block_u),
        num_warps=4,
    )


def mark_ready(header: torch.Tensor, one: torch.Tensor) -> None:
    """Raise READY in an answer's header behind everything launched on the current stream.

    Args:
        header: int32 [>= 1], shared memory.
        one: int32 [1] on the device, holds 1. A copy in stream order, not a kernel's store: the rows before it are
            then visible to any process that sees it, without a fence of ours.
    """
    header[READY_WORD : READY_WORD + 1].copy_(one, non_blocking=True)
