"""Pack, file and collect: the Triton kernels (in the interpreter, or on a GPU) against plain torch, byte for byte."""

import pytest
import torch

from sglang.srt.layers.moe.routed_experts import kernels, programs
from sglang.srt.layers.moe.routed_experts.policy import RowShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

NUM_SLOTS = 300
LAYERS, TOP_K, EXPERTS, TOKENS = (1, 60), (1, 6, 8, 9), (256, 257, 512), (1, 63, 64, 65)
# Every pair of values at least once; the interpreter takes seconds for each of the 96 combinations.
CASES = [
    (RowShape(num_layers=layers, top_k=top_k, num_experts=experts), tokens)
    for i, layers in enumerate(LAYERS)
    for j, top_k in enumerate(TOP_K)
    for k, experts in enumerate(EXPERTS)
    for tokens in TOKENS
    if DEVICE == "cuda" or TOKENS.index(tokens) == (i + j + k) % len(TOKENS)
]


def random_ids(shape: RowShape, capacity: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        0, shape.num_experts, (shape.num_layers, capacity, width), generator=generator
    )
    return ids.to(torch.int32)


def ring(shape: RowShape, capacity: int, device: str):
    columns = shape.num_layers * shape.top_k
    rows = torch.zeros((capacity, columns), dtype=getattr(torch, shape.dtype_name), device=device)
    slots = torch.full((capacity,), -7, dtype=torch.int64, device=device)
    return rows, slots, torch.zeros(capacity, dtype=torch.uint8, device=device)


def host_memory(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, pin_memory=DEVICE == "cuda")


def test_kernels_are_what_we_think() -> None:
    interpreted = type(programs.pack_kernel).__name__ == "InterpretedFunction"
    assert interpreted == (DEVICE == "cpu")


@pytest.mark.parametrize("shape, num_tokens", CASES, ids=str)
def test_a_row_survives_the_whole_way(shape: RowShape, num_tokens: int) -> None:
    width, capacity, first = shape.top_k + 1, num_tokens + 9, 5
    ids = random_ids(shape, capacity, width, seed=num_tokens)
    ids[0, first + num_tokens // 2, 0] = -1  # one bad row
    ids[:, : first - 1, :] = -1  # another rank's rows: none of our business
    generator = torch.Generator().manual_seed(7)
    cache_loc = torch.randperm(NUM_SLOTS - 1, generator=generator)[:num_tokens] + 1
    cache_loc[-1] = 0  # padding

    outcomes = {}
    for name, device, pack, file, collect in (
        ("torch", "cpu", kernels.pack, kernels.file, kernels.collect),
        ("triton", DEVICE, kernels.launch_pack, kernels.launch_file, kernels.launch_collect),
    ):
        rows, slots, status = ring(shape, capacity, device)
        store = host_memory(NUM_SLOTS, shape.row_bytes)
        store_status = torch.zeros(NUM_SLOTS, dtype=torch.uint8, device=device)
        out = host_memory(num_tokens, shape.row_bytes)
        header = torch.zeros(16, dtype=torch.int32, pin_memory=DEVICE == "cuda")
        loc = cache_loc.to(device)
        pack(ids.to(device), first, loc, rows, slots, status, shape.top_k, shape.num_experts)
        units = kernels.as_units(store)
        file(kernels.as_units(rows), slots, status, num_tokens, units, store_status)
        collect(units, store_status, loc.to(torch.int32), kernels.as_units(out), header)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        outcomes[name] = [
            t.cpu().clone()
            for t in (rows.view(torch.uint8), slots, status, store, store_status, out, header)
        ]
    for ours, reference in zip(outcomes["triton"], outcomes["torch"]):
        assert torch.equal(ours, reference)

    # And the reference itself against indexing that shares nothing with it.
    _, _, _, store, store_status, out, header = outcomes["torch"]
    for token, slot in enumerate(cache_loc.tolist()):
        expected = ids[:, first + token, : shape.top_k].reshape(-1)
        got = out[token].view(getattr(torch, shape.dtype_name)).to(torch.int32)
        if slot == 0:
            assert store_status[0] == kernels.UNFILED and not store[0].any()
        elif token == num_tokens // 2:
            assert store_status[slot] == kernels.BAD
        else:
            assert torch.equal(got, expected) and store_status[slot] == kernels.FILED
    assert header.tolist()[:2] == [0, 1], "a bad row, and padding that was never filed"


@pytest.mark.parametrize("num_tokens", [1, 3, 64])
@pytest.mark.parametrize("shape", [RowShape(7, 3, 256), RowShape(48, 8, 300)], ids=str)
def test_packed_and_filed_at_once_is_the_same(shape: RowShape, num_tokens: int) -> None:
    width, first = shape.top_k + 1, 2
    ids = random_ids(shape, num_tokens + first, width, seed=num_tokens)
    ids[-1, first, shape.top_k - 1] = shape.num_experts  # the first row is bad
    ids[:, :, shape.top_k :] = -1  # shared experts: dropped
    generator = torch.Generator().manual_seed(3)
    cache_loc = torch.randperm(NUM_SLOTS - 1, generator=generator)[:num_tokens] + 1
    cache_loc[num_tokens // 2 + 1 :][:1] = 0  # padding
    cache_loc[num_tokens // 2 + 2 :][:1] = NUM_SLOTS  # no such slot
    dtype = getattr(torch, shape.dtype_name)
    rows, slots, status = ring(shape, num_tokens, "cpu")
    stores = [host_memory(NUM_SLOTS, shape.row_bytes) for _ in range(2)]
    statuses = [torch.zeros(NUM_SLOTS, dtype=torch.uint8, device=d) for d in ("cpu", DEVICE)]
    kernels.pack(ids, first, cache_loc, rows, slots, status, shape.top_k, shape.num_experts)
    units = kernels.as_units(rows)
    kernels.file(units, slots, status, num_tokens, kernels.as_units(stores[0]), statuses[0])
    kernels.launch_pack_and_file(
        ids.to(DEVICE),
        first,
        cache_loc.to(DEVICE),
        stores[1].view(dtype),
        statuses[1],
        shape.top_k,
        shape.num_experts,
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(stores[0], stores[1]) and torch.equal(statuses[0], statuses[1].cpu())
    assert statuses[0][cache_loc[0]] == kernels.BAD


@pytest.mark.parametrize("shape", [RowShape(3, 2, 256), RowShape(1, 1, 512)], ids=str)
def test_no_tokens_is_no_work(shape: RowShape) -> None:
    rows, slots, status = ring(shape, 4, DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    kernels.pack(
        random_ids(shape, 4, shape.top_k, 0).to(DEVICE),
        0,
        none,
        rows,
        slots,
        status,
        shape.top_k,
        8,
    )
    store = host_memory(4, shape.row_bytes)
    store_status = torch.zeros(4, dtype=torch.uint8, device=DEVICE)
    kernels.file(kernels.as_units(rows), slots, status, 0, store, store_status)
    assert not rows.view(torch.uint8).any() and not store.any() and not store_status.any()
    header = torch.zeros(16, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    kernels.collect(
        store, store_status, none.to(torch.int32), host_memory(0, shape.row_bytes), header
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert not header.any()


@pytest.mark.parametrize("num_tokens", [1, 513, 600])
def test_wide_blocks_of_a_prefill_chunk(num_tokens: int) -> None:
    """Above 512 tokens a program packs several; the last one is partly empty."""
    shape = RowShape(num_layers=4, top_k=8, num_experts=128)
    ids = random_ids(shape, num_tokens, shape.top_k, seed=1)
    cache_loc = torch.arange(1, num_tokens + 1)
    expected, got = ring(shape, num_tokens, "cpu"), ring(shape, num_tokens, DEVICE)
    kernels.pack(ids, 0, cache_loc, *expected, shape.top_k, shape.num_experts)
    kernels.launch_pack(
        ids.to(DEVICE), 0, cache_loc.to(DEVICE), *got, shape.top_k, shape.num_experts
    )
    for a, b in zip(expected, got):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
