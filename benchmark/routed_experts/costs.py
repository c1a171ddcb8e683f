"""What a decode step and a request's end cost, as a Markdown table from the results files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import step_trace
from growth import table
from results import middle
from scheduler_time import COLLECT_CALLS, SEND_CALLS, STEP_CALLS

Data = Mapping[str, Any]

RELEASES = {"ours": "ours", "peer": "0.5.11", "base": "0.5.10.post1"}
# What a row is compared with: the same engine without the flag, but the base with our tree (session
# "base"), which does nothing then either; session "off" says whether that is so.
OFF = {
    "ours": {"engine": "ours", "flag": False, "asked": "no"},
    "peer": {"engine": "peer", "flag": False, "asked": "no"},
    "base": {"engine": "ours", "flag": False, "asked": "no"},
    "ours-drafted": {"engine": "ours-drafted", "flag": False, "asked": "no"},
}
_BATCH = 64
_LONG = 32_000  # tokens of a long request


def costs(data: Data) -> str:
    """What a decode step, a request's end and a stall cost, a column an engine."""
    engines = list(reversed(RELEASES))
    lines = [
        ["kernels added to a decode step of 64", *(_kernels(data, e, "count") for e in engines)],
        ["their GPU time", *(_kernels(data, e, "us") for e in engines)],
        *(
            [
                f"GPU time of a decode step of {pairs['batch']}, graphs with the flag less graphs without",
                *("" for _ in engines[1:]),
                _added(pairs),
            ]
            for pairs in data.get("graph_pairs", [])
        ),
        [
            "scheduler's thread, a decode step of 64",
            *(_scheduler(data, e, STEP_CALLS, (0, _BATCH)) for e in engines),
        ],
        *(
            [
                f"scheduler's thread, a request of 32,000 rows ends: {what}",
                *(_scheduler(data, e, calls, range(_LONG, _LONG + 200)) for e in engines),
            ]
            for what, calls in (("its rows", COLLECT_CALLS), ("its message", SEND_CALLS))
        ),
        *(
            [
                f"longest gap of 32 others as 32,000 rows leave, less that as 500 leave, {name}",
                *(_stall(data, e, asked) for e in engines),
            ]
            for asked, name in (("int32", "int32"), ("auto", "auto"), ("no", "no rows"))
        ),
    ]
    return table(["", *(RELEASES[e] for e in engines)], lines)


def _kernels(data: Data, engine: str, field: str) -> str:
    steps = {(p["engine"], p["flag"]): p for p in data.get("profile", []) if p["batch"] == _BATCH}
    on, off = steps.get((engine, True)), steps.get((OFF[engine]["engine"], False))
    pairs = next((p for p in data.get("graph_pairs", []) if p["batch"] == _BATCH), None)
    if engine == "ours" and pairs:
        which = ("count", "us").index(field)
        more = sum(k["on"][which] - k["off"][which] for k in pairs["kernels"] if _is_added(k))
    elif on and off:
        more = sum(each[field] for each in step_trace.added(off["by_name"], on["by_name"]))
    else:
        return ""
    return f"{more:.0f}" if field == "count" else f"{more:.1f} us"


def _is_added(kernel: Data) -> bool:
    """Whether the flag launches it more often; `kernel` is an entry of graph_pairs.py."""
    return kernel["on"][0] > kernel["off"][0]


def _added(pairs: Data) -> str:
    """Microseconds that recordings with the flag took more than those without took on average."""
    off, on = (
        sorted(r["added_us"] for r in pairs["recordings"] if r["variant"] == variant)
        for variant in ("off", "on")
    )
    return (
        f"{sum(on) / len(on):+.0f} us ({on[0]:+.0f} to {on[-1]:+.0f}; "
        f"without, {off[0]:+.0f} to {off[-1]:+.0f})"
    )


def _scheduler(data: Data, engine: str, calls: Sequence[str], tokens: Sequence[int]) -> str:
    spent = [
        entry["us"]
        for entry in data.get("scheduler_time", [])
        if entry["engine"] == engine and entry["call"] in calls and entry["tokens"] in tokens
    ]
    if not spent:
        return ""
    return f"{sum(spent) / 1e3:.2f} ms" if sum(spent) >= 1e3 else f"{sum(spent):.0f} us"


def _stall(data: Data, engine: str, asked: str) -> str:
    entries = {
        entry["prompt_tokens"]: entry
        for entry in data["stall"]
        if (entry["engine"], entry["asked"]) == (engine, asked)
    }
    if not entries:
        return ""
    long, short = entries[max(entries)], entries[min(entries)]
    gaps, usual = long["longest_gap_ms"], middle(short["longest_gap_ms"])
    return (
        f"{middle(gaps) - usual:+.1f} ms ({middle(gaps):.1f}, {max(gaps):.1f} at most; "
        f"{middle(long['quiet_gap_ms']):.1f} in the steps before; {usual:.1f} as 500 leave)"
    )
