"""The Triton programs behind kernels.py, which says what their arguments are.

A row's status is 1 (FILED) or, where an id is no expert's, 2 (BAD).
"""

import triton
import triton.language as tl


# Integers and pointers that change from step to step are not specialized on: a variant met first in the middle of
# serving would compile there. RowFiler.open and RowCollector launch every variant that is left.
@triton.jit(
    do_not_specialize=["first_row", "num_tokens", "layer_stride"],
    do_not_specialize_on_alignment=["cache_loc_ptr"],
)
def pack_kernel(
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
def file_kernel(
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
    do_not_specialize=["first_row", "layer_stride", "num_slots"],
    do_not_specialize_on_alignment=["cache_loc_ptr"],
)
def pack_and_file_kernel(
    buffer_ptr,
    cache_loc_ptr,
    store_ptr,
    store_status_ptr,
    first_row,
    layer_stride,
    num_slots,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(cache_loc_ptr + token).to(tl.int64)
    if (slot > 0) & (slot < num_slots):
        columns = tl.arange(0, BLOCK_C)
        mask = columns < COLUMNS
        source = (
            (columns // TOP_K).to(tl.int64) * layer_stride
            + (first_row + token).to(tl.int64) * WIDTH
            + columns % TOP_K
        )
        ids = tl.load(buffer_ptr + source, mask=mask, other=0)
        bad = tl.max(((ids < 0) | (ids >= NUM_EXPERTS)).to(tl.int32), axis=0)
        row = ids.to(store_ptr.dtype.element_ty)
        tl.store(store_ptr + slot * COLUMNS + columns, row, mask=mask)
        tl.store(store_status_ptr + slot, (1 + bad).to(tl.uint8))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "out_ptr", "bad_ptr"],
)
def collect_kernel(
    store_ptr,
    store_status_ptr,
    slots_ptr,
    out_ptr,
    bad_ptr,
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
        tl.store(bad_ptr, 1)
