"""How the cost of pack, file and collect grows, from the kernels alone: no server, no model.

    python kernels.py --results FILE [--trees DIR --site DIR]

GPU time is that of CUDA graph replays. Beside it stand the bytes that had to move, and the copies
that pack replaces: one a layer, int32, into a buffer [tokens, layers, top_k]. A decode step is
packed and filed by one kernel, `pack_and_file`; longer steps by two. Host time is that of the
scheduler's thread in `RowFiler.file_step` and `RowCollector.collect`, launches included.

The capture buffer lies in the L2 cache when it is packed, here as in a server, where the top-k
kernels have just written it. The store is host memory, its slots in random order.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import host
import torch
from results import Results
from timing import Timing, gpu_time, host_time

REPOSITORY = Path(__file__).resolve().parents[2]
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)
PREFILL_TOKENS = (512, 2_048, 8_192, 16_384)
COLLECT_ROWS = (1_500, 8_192, 32_000, 128_000)
STORE_SLOTS = 200_000
_SETS = 4  # sets of slots, so that no launch writes where the one before it wrote


@dataclass(frozen=True)
class Shape:
    """A model as pack sees it. Ids are one byte up to 256 experts, two above."""

    layers: int = 48
    top_k: int = 8
    experts: int = 128

    @property
    def dtype_name(self) -> str:
        return "uint8" if self.experts <= 256 else "uint16"

    @property
    def row_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * self.row_dtype.itemsize


# Layers and top-k of real models: from small ones to 94 layers (Qwen3-235B-A22B) and top-22 of 512.
SHAPES = (
    *(Shape(layers=n) for n in (12, 24, 60, 94)),
    *(Shape(top_k=k) for k in (2, 4, 6)),
    Shape(top_k=10, experts=512),
    Shape(top_k=22, experts=512),
    Shape(layers=94, top_k=22, experts=512),
)


class Bench:
    """Tensors of one shape, in the places where a server has them."""

    def __init__(
        self, kernels: ModuleType, device: str, shape: Shape, tokens: int, num_slots: int
    ) -> None:
        self._kernels, self._device, self._shape = kernels, device, shape
        size = (shape.layers, tokens, shape.top_k)
        self._buffer = torch.randint(shape.experts, size, dtype=torch.int32, device=device)
        self._token_major = self._buffer.permute(1, 0, 2).contiguous()
        columns = shape.layers * shape.top_k
        self._rows = torch.zeros((tokens, columns), dtype=shape.row_dtype, device=device)
        self._status = torch.zeros(tokens, dtype=torch.uint8, device=device)
        self._store = self._host_memory(num_slots, shape.row_bytes)
        self._store_status = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._locations = [self._random_slots(tokens) for _ in range(_SETS)]
        self._packed_slots = torch.zeros_like(self._locations[0])

    def check(self) -> None:
        """A figure of wrong rows is worth nothing: pack, file and collect must give the buffer."""
        tokens = min(len(self._rows), 65)
        self._pack(tokens, 0)
        self._file(self._packed_slots, tokens)
        self._compare(tokens)
        if self._files_at_once(tokens):
            self._store.zero_()
            self._store_status.zero_()
            self._pack_and_file(tokens, 0)
            self._compare(tokens)

    def _compare(self, tokens: int) -> None:
        """Collect what the first set of slots holds, and compare it with the buffer."""
        out = self._host_memory(tokens, self._shape.row_bytes)
        header = self._host_memory(16, 4).view(torch.int32).view(-1)
        self._collect(self._locations[0][:tokens].int(), out, header)
        if self._device == "cuda":
            torch.cuda.synchronize()
        want = self._buffer[:, :tokens].permute(1, 0, 2).reshape(tokens, -1)
        got = out.view(self._shape.row_dtype)
        if not torch.equal(got.int(), want.cpu()) or header.any():
            sys.exit(f"error: wrong rows for {self._shape}: run the tests of the kernels")

    def step(self, tokens: int) -> Iterator[dict[str, Any]]:
        """One step of `tokens`: the copies that pack replaces, pack, file, both at once."""
        ids = self._shape.layers * self._shape.top_k * tokens
        packed = self._shape.row_bytes * tokens

        def copies(_: int) -> None:
            for layer in range(self._shape.layers):
                self._token_major[:tokens, layer].copy_(self._buffer[layer, :tokens])

        def file(i: int) -> None:
            self._file(self._locations[i % _SETS], tokens)

        def pack(i: int) -> None:
            self._pack(tokens, i)

        yield self._entry("copies", tokens, 8 * ids, gpu_time(self._device, copies, 8))
        timing = gpu_time(self._device, pack, 32)
        yield self._entry("pack", tokens, 4 * ids + packed + 17 * tokens, timing)
        # Of the file kernel's bytes, those that cross the bus.
        timing = gpu_time(self._device, file, 32 if tokens <= 1_024 else 8)
        yield self._entry("file", tokens, packed, timing)
        if self._files_at_once(tokens):
            timing = gpu_time(self._device, lambda i: self._pack_and_file(tokens, i), 32)
            yield self._entry("pack_and_file", tokens, 4 * ids + packed + 9 * tokens, timing)

    def collect(self, rows: int) -> dict[str, Any]:
        """Gather `rows` rows from the store into an answer."""
        self._store_status.fill_(self._kernels.FILED)
        out = self._host_memory(rows, self._shape.row_bytes)
        header = self._host_memory(16, 4).view(torch.int32).view(-1)
        slots = [self._random_slots(rows).int() for _ in range(_SETS)]

        def collect(i: int) -> None:
            self._collect(slots[i % _SETS], out, header)

        timing = gpu_time(self._device, collect, _SETS)
        return self._entry("collect", rows, 2 * rows * self._shape.row_bytes, timing)

    def _pack(self, tokens: int, i: int) -> None:
        slots, shape = self._locations[i % _SETS][:tokens], self._shape
        target = self._rows, self._packed_slots, self._status
        self._kernels.pack(self._buffer, 0, slots, *target, shape.top_k, shape.experts)

    def _files_at_once(self, tokens: int) -> bool:
        """Whether a step of so many tokens is packed and filed by one kernel."""
        return self._device == "cuda" and tokens <= self._kernels.MOST_SPREAD_TOKENS

    def _pack_and_file(self, tokens: int, i: int) -> None:
        slots, shape = self._locations[i % _SETS][:tokens], self._shape
        store = self._store.view(shape.row_dtype)
        target = store, self._store_status, shape.top_k, shape.experts
        self._kernels.launch_pack_and_file(self._buffer, 0, slots, *target)

    def _file(self, slots: torch.Tensor, tokens: int) -> None:
        rows, store = self._kernels.as_units(self._rows), self._kernels.as_units(self._store)
        self._kernels.file(rows, slots, self._status, tokens, store, self._store_status)

    def _collect(self, slots: torch.Tensor, out: torch.Tensor, header: torch.Tensor) -> None:
        store, out = self._kernels.as_units(self._store), self._kernels.as_units(out)
        self._kernels.collect(store, self._store_status, slots, out, header)

    def _random_slots(self, count: int) -> torch.Tensor:
        """Distinct slots; never slot 0, which is padding's."""
        return (1 + torch.randperm(len(self._store) - 1)[:count]).to(self._device)

    def _host_memory(self, rows: int, row_bytes: int) -> torch.Tensor:
        size = (rows, row_bytes)
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._device == "cuda")

    def _entry(self, what: str, tokens: int, num_bytes: int, timing: Timing) -> dict[str, Any]:
        gb_s = round(num_bytes / timing.us / 1e3, 2)
        about = {"what": what, "tokens": tokens, **asdict(self._shape)}
        return {**about, **asdict(timing), "bytes": num_bytes, "gb_s": gb_s}


def gpu_figures(device: str) -> Iterator[dict[str, Any]]:
    """Every figure of the kernels, the most wanted first."""
    kernels = _of_ours("kernels")
    bench = Bench(kernels, device, Shape(), max(PREFILL_TOKENS), STORE_SLOTS)
    bench.check()
    for tokens in sorted({*DECODE_TOKENS, *PREFILL_TOKENS}):
        yield from bench.step(tokens)
    for rows in COLLECT_ROWS:
        yield bench.collect(rows)
    for shape in SHAPES:
        bench = Bench(kernels, device, shape, 8_192, 20_000)
        bench.check()
        for tokens in (64, 8_192):
            yield from bench.step(tokens)


def host_figures(device: str) -> Iterator[dict[str, Any]]:
    """The scheduler's thread: a decode step, and a request that finishes."""
    names = "store", "collector", "transport", "reader", "shape"
    store, collector, transport, reader, shapes = map(_of_ours, names)
    shape = shapes.RowShape(num_layers=48, top_k=8, num_experts=128)
    filer = store.RowFiler(8_192, shape, device)
    filer.open(STORE_SLOTS)
    buffer = torch.randint(128, (48, 8_192, 8), dtype=torch.int32, device=device)
    for tokens in (1, 64, 256, 8_192):
        slots = torch.arange(1, tokens + 1, device=device)
        step = host_time(device, lambda slots=slots: filer.file_step(buffer, 0, slots), 1_000, 8)
        yield {"what": "file_step", "tokens": tokens, **asdict(step)}
    register = store.register_host_memory if device == "cuda" else None
    arena = transport.RowsArena(1 << 30, register, first_segment=1 << 30)
    answers = reader.RowsReader()
    rows_of = collector.RowCollector(filer, shape, device, arena)
    pool = SimpleNamespace(
        req_to_token=torch.randint(1, STORE_SLOTS, (4, 32_064), dtype=torch.int32, device=device)
    )
    for tokens in (500, 1_500, 8_192, 32_000):
        req = SimpleNamespace(
            req_pool_idx=1,
            origin_input_ids=[0] * tokens,
            output_ids=[0],
            output_ids_through_stop=[0],
            routed_experts_start_len=0,
            routed_experts_dtype="auto",
        )
        descriptors = []
        timing = host_time(
            device, lambda req=req, to=descriptors: to.append(rows_of.collect(req, pool)), 20, 1
        )
        for descriptor in descriptors:
            answers.release(descriptor)
        yield {"what": "collect", "tokens": tokens, **asdict(timing)}


def _of_ours(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.layers.moe.routed_experts.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON to write")
    parser.add_argument("--trees", type=Path, help="folder with ours/; else build/sglang")
    parser.add_argument("--site", type=Path, help="folder of packages that ours/ needs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no GPU here (--device cpu tries the script without one)")
    tree = arguments.trees / "ours" if arguments.trees else REPOSITORY / "build" / "sglang"
    sys.path[:0] = [str(tree / "python"), *([str(arguments.site)] if arguments.site else [])]
    about = host.header(tree, arguments.site, arguments.device)
    results = Results(arguments.results, about)
    for section, figures in (("kernels", gpu_figures), ("host_time", host_figures)):
        same = ("what", "tokens", "layers", "top_k", "experts")
        for figure in figures(arguments.device):
            results.replace(section, same, [figure])
            shape = f"{figure.get('layers', 48)} x {figure.get('top_k', 8)}"
            print(
                f"{section:9} {figure['what']:9} {figure['tokens']:6} tokens {shape:8} "
                f"{figure['us']:9.2f} us ({figure['us_p10']:.2f} to {figure['us_p90']:.2f}) "
                f"{figure.get('gb_s', 0):8.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
