"""Tables and a picture from the results files.

    python report.py [--results FOLDER] [--into FILE ..]     (`make bench-report`)

Puts tables between their markers in the files named, such as `<!-- figures -->` and
`<!-- /figures -->` (also: absolute, growth, published), and the picture beside the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import picture
from costs import OFF, RELEASES, costs
from growth import growth, table
from results import ResultsError, merge, middle, paired_ratios

HERE = Path(__file__).resolve().parent
Data = Mapping[str, Any]

ENGINES = RELEASES | {"ours-drafted": "ours with drafts"}
ASKED = {"no": "not asked", "int32": "all ask, int32", "auto": "all ask, auto"}
_BATCH = 64


def figures(data: Data) -> str:
    """README's tables: throughput against the flag off, and what a step and a request cost."""
    tables = (
        _ratios(data, "output_tps", "output tok/s / flag off"),
        costs(data),
        _caption(data),
    )
    return "\n\n".join(filter(None, tables))


def absolute(data: Data) -> str:
    """Tokens a second as they were measured, and what the flag does to the first token."""
    batches = sorted({row["batch"] for row in data["rows"]})
    lines = [
        [
            f"{ENGINES[engine]}, {ASKED[asked] if flag else 'flag off'}",
            *(_median_tps(data, (engine, flag, asked, batch)) for batch in batches),
        ]
        for engine in ENGINES
        for flag, asked in ((False, "no"), *((True, asked) for asked in ASKED))
    ]
    tps = table(["output tok/s", *(f"batch {b}" for b in batches)], lines)
    return "\n\n".join(
        filter(None, (tps, _ratios(data, "ttft_s", "last first token, seconds / flag off")))
    )


def _median_tps(data: Data, key: tuple[str, bool, str, int]) -> str:
    runs = [
        tps
        for row in data["rows"]
        if (row["engine"], row["flag"], row["asked"], row["batch"]) == key
        for tps in row["output_tps"]
    ]
    return f"{middle(runs):,.0f}" if runs else ""


def _ratios(data: Data, field: str, what: str) -> str:
    """Ratios to the flag off, by engine, what was asked, and batch; and of ours to the peer."""
    rows = [row for row in data["rows"] if row["flag"]]
    batches = sorted({row["batch"] for row in rows})
    lines = []
    for engine in ENGINES:
        for asked in ASKED:
            name = f"{ENGINES[engine]}, {ASKED[asked]}"
            lines.append([name, *(_ratio(data, rows, engine, asked, b, field) for b in batches)])
    off, base = [row for row in data["rows"] if not row["flag"]], {"engine": "base"}
    name = "ours over 0.5.10.post1, both without the flag"
    lines.append([name, *(_ratio(data, off, "ours", "no", b, field, base) for b in batches)])
    for asked in ("no", "int32"):
        name = f"ours over 0.5.11, {ASKED[asked]}"
        peer = {"engine": "peer", "flag": True, "asked": asked}
        lines.append([name, *(_ratio(data, rows, "ours", asked, b, field, peer) for b in batches)])
    return table([what, *(f"batch {b}" for b in batches)], lines)


def _ratio(
    data: Data,
    rows: Iterable[Data],
    engine: str,
    asked: str,
    batch: int,
    field: str,
    reference: Data | None = None,
) -> str:
    ratios = [
        ratio
        for row in rows
        if (row["engine"], row["asked"], row["batch"]) == (engine, asked, batch)
        for ratio in paired_ratios(data, row, reference or OFF[engine], field)
    ]
    if not ratios:
        return ""
    return f"{middle(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _caption(data: Data) -> str:
    software = ", ".join(f"{name} {version}" for name, version in data["software"].items())
    wrong = sum(bool(problem) for row in data["rows"] for problem in row["problems"])
    faults = f" In {wrong} runs rows were wrong or missing; see the JSON." if wrong else ""
    return (
        f"{', '.join(_when(data))}. {data.get('model', '')}. 1,024 tokens in and 512 out (batch 256: 128 and 256). "
        f"{_drafts(data)}"
        "Medians of ratios taken pair by pair, lowest and highest in brackets; below 1 is a loss "
        "of throughput, above 1 a later first token. 0.5.10.post1 is compared with our tree "
        f"started without the flag.{faults} Software: {software}; the base pins torch 2.9.1 and "
        "sglang-kernel 0.4.1."
    )


def _drafts(data: Data) -> str:
    rows = [row for row in data["rows"] if row["engine"] == "ours-drafted"]
    lengths = [length for row in rows for length in row["accept_length"]]
    if not lengths:
        return ""
    return (
        "With drafts: 256 in and 512 out, an EAGLE draft model with random weights whose drafts "
        f"the base is told to accept, {min(lengths):.2f} to {max(lengths):.2f} tokens a step. "
    )


def published(data: Data) -> str:
    """Throughput and latency at batch 64, nobody asks, in the form of the releases' own table."""
    rows = {
        (r["engine"], r["flag"]): r
        for r in data["rows"]
        if (r["batch"], r["asked"]) == (_BATCH, "no")
    }
    if not rows:
        return ""
    first = rows.get(("base", True))
    lines = []
    for engine, flag in (("ours", False), ("base", True), ("peer", True), ("ours", True)):
        if row := rows.get((engine, flag)):
            against = _against(data, row, first) if first else ["", ""]
            tps, latency = middle(row["output_tps"]), middle(row["latency_s"])
            name = f"{ENGINES[engine]}, flag {'on' if flag else 'off'}"
            lines.append([name, f"{tps:,.0f}", against[0], f"{latency:.2f} s", against[1]])
    head = ["batch 64, 1,024 in, 512 out", "output tok/s", "", "latency", ""]
    return "\n\n".join((table(head, lines), f"`{data['server']}`\n\n{_caption(data)}"))


def _against(data: Data, row: Data, first: Data) -> list[str]:
    """Change of tok/s and of latency against the row `first`, from runs of the same round."""
    if row is first:
        return ["", ""]
    fields = ("output_tps", "latency_s")
    ratios = [paired_ratios(data, row, first, field) for field in fields]
    return [f"{middle(each) - 1:+.1%}" if each else "" for each in ratios]


def put(text: str, marker: str, file: Path) -> bool:
    """Put `text` between the marker's two lines in `file`. Whether they are there."""
    whole = file.read_text()
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
    new, count = re.subn(
        pattern, lambda found: f"{found[1]}{text}\n{found[2]}", whole, flags=re.DOTALL
    )
    if count:
        file.write_text(new)
    return bool(count)


def _read(results: Path) -> dict[str, Any]:
    """All results in a folder. The kernels' may be of another tree: they stand in tables of their own.

    Raises:
        ResultsError: there are none, or two do not go together.
    """
    kernels, pairs = results / "kernels.json", results / "gpu" / "graph_pairs.json"
    files = sorted(set(results.glob("*.json")) - {kernels}) or [kernels]
    data = {"rows": [], "stall": [], **merge(file for file in files if file.exists())}
    if kernels.exists():
        measured = json.loads(kernels.read_text())
        data |= {name: measured[name] for name in ("kernels", "host_time") if name in measured}
        data["kernels_of"] = ", ".join(_when(measured))
    if pairs.exists():
        data["graph_pairs"] = json.loads(pairs.read_text())["batches"]
    return data


def _when(data: Data) -> tuple[str, str, str]:
    machine = data["machine"]
    return f"{machine[:1].upper()}{machine[1:]}", data["date"], f"commit {data['commit'][:9]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of *.json")
    parser.add_argument("--into", type=Path, nargs="*", default=[], help="files with markers")
    arguments = parser.parse_args()
    try:
        data = _read(arguments.results)
    except ResultsError as error:
        sys.exit(f"error: {error}")
    texts = {"figures": figures(data), "absolute": absolute(data), "growth": growth(data)}
    texts["growth"] += f"\n\n{data['kernels_of']}." if "kernels_of" in data else ""
    several = sorted(arguments.results.glob("tp*/serving.json"))
    texts["published"] = "\n\n".join(published(json.loads(file.read_text())) for file in several)
    for file in arguments.into:
        found = [marker for marker, text in texts.items() if put(text, marker, file)]
        print(f"{file}: {', '.join(found) or 'no markers'}")
    if not arguments.into:
        print("\n\n".join(texts.values()))
    target = arguments.results / "figures.png"
    picture.draw(data, target)
    print(target)


if __name__ == "__main__":
    main()
