"""How the kernels' cost grows, as Markdown tables from the results files; and how a table is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]


def growth(data: Data) -> str:
    """How the kernels' cost grows: tokens, layers and top-k, and rows of a request."""
    all_kernels = data.get("kernels", [])
    parts = []
    usual = [k for k in all_kernels if (k["layers"], k["top_k"], k["experts"]) == (48, 8, 128)]
    steps = sorted({k["tokens"] for k in usual if k["what"] != "collect"})
    head = ["", "copies a layer, int32", "pack and file at once", "pack", "file", "file GB/s"]
    parts.append(
        table(
            ["tokens, 48 layers x top-8 of 128", *head[1:]],
            [[f"{n:,}", *_step_cells([k for k in usual if k["tokens"] == n])] for n in steps],
        )
    )
    shapes = sorted({(k["layers"], k["top_k"], k["experts"]) for k in all_kernels})
    lines = []
    for tokens in (64, 8_192):
        for shape in shapes:
            about = "{} x {} of {}".format(*shape)
            at = [
                k
                for k in all_kernels
                if (k["layers"], k["top_k"], k["experts"], k["tokens"]) == (*shape, tokens)
            ]
            lines.append([f"{about}, {tokens:,} tokens", *_step_cells(at)])
    parts.append(table(["layers x top-k", *head[1:]], lines))
    collected = [k for k in usual if k["what"] == "collect"]
    parts.append(
        table(
            ["rows of a request, collected", "time", "GB/s over the bus"],
            [[f"{k['tokens']:,}", _spread(k), f"{k['gb_s']:.1f}"] for k in collected],
        )
    )
    parts.append(
        table(
            ["scheduler's thread", "tokens", "time"],
            [[f"`{h['what']}`", f"{h['tokens']:,}", _spread(h)] for h in data.get("host_time", [])],
        )
    )
    return "\n\n".join(filter(None, parts))


def _step_cells(entries: Sequence[Data]) -> list[str]:
    by_name = {entry["what"]: entry for entry in entries}
    names = ("copies", "pack_and_file", "pack", "file")
    times = [_spread(by_name[name]) if name in by_name else "" for name in names]
    return [*times, f"{by_name['file']['gb_s']:.1f}" if "file" in by_name else ""]


def _spread(entry: Data) -> str:
    digits = 1 if entry["us"] < 1_000 else 0
    low, high = entry["us_p10"], entry["us_p90"]
    return f"{entry['us']:,.{digits}f} us ({low:,.{digits}f} to {high:,.{digits}f})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown; lines without any figure are left out, and so is a table without lines."""
    told = [line for line in lines if any(line[1:])]
    if not told:
        return ""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *told))
