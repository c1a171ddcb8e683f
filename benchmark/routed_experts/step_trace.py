"""What a decode step launches, and what the flag adds to it, read from traces of torch's profiler.

A step of 64 tokens takes 20 ms and differs by more from run to run than the flag adds, so totals
say nothing: the kernels of a step are counted by name. What the flag adds are the names that come
more often with it than without.

    python step_trace.py FILE.trace.json.gz ..     looks at traces that serving.py has left
"""

from __future__ import annotations

import bisect
import gzip
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_EDGE = 2  # steps at either end of a trace that may be incomplete
_NAME_LENGTH = 120
_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(RuntimeError):
    """The trace shows no decode step."""


def read(path: Path) -> dict[str, Any]:
    """What a step launches, as `summarize` says it, of a trace file."""
    return summarize(json.loads(gzip.decompress(path.read_bytes())))


def summarize(trace: Mapping[str, Any]) -> dict[str, Any]:
    """What one decode step launches.

    A step is what the host launches from one CUDA graph to the next; each kernel belongs to the
    step in which it was launched, whenever it ran. Steps at the edges of the trace are left out.
    Counts and microseconds are medians.

    Returns:
        {"steps", "gpu_us", "kernels", "by_name": [{"name", "count", "us"}, ..]}
    """
    events = trace["traceEvents"]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    graphs = sorted(e["ts"] for e in events if e.get("name") == "cudaGraphLaunch")
    if len(graphs) <= 2 * _EDGE:
        raise TraceError(f"{len(graphs)} launches of CUDA graphs in the trace: no decode steps")
    steps: list[Counter[str]] = [Counter() for _ in graphs]
    times: list[Counter[str]] = [Counter() for _ in graphs]
    for event in events:
        if event.get("cat") in _ON_THE_GPU:
            at = launched.get(event.get("args", {}).get("correlation"))
            step = bisect.bisect_right(graphs, at) - 1 if at is not None else -1
            if step >= 0:
                name = event["name"][:_NAME_LENGTH]
                steps[step][name] += 1
                times[step][name] += event["dur"]
    steps, times = steps[_EDGE:-_EDGE], times[_EDGE:-_EDGE]
    names = set().union(*steps)
    by_name = [
        {
            "name": name,
            "count": round(statistics.median(step[name] for step in steps)),
            "us": round(statistics.median(step[name] for step in times), 2),
        }
        for name in names
    ]
    return {
        "steps": len(steps),
        "gpu_us": round(statistics.median(step.total() for step in times), 1),
        "kernels": round(statistics.median(step.total() for step in steps)),
        "by_name": sorted((e for e in by_name if e["count"]), key=lambda e: (-e["us"], e["name"])),
    }


def added(
    off: Sequence[Mapping[str, Any]], on: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a step has more of with the flag than without, from the `by_name` of both."""
    before = {each["name"]: each["count"] for each in off}
    more = []
    for each in on:
        difference = each["count"] - before.get(each["name"], 0)
        if difference > 0:
            us = round(each["us"] * difference / each["count"], 2)
            more.append({"name": each["name"], "count": difference, "us": us})
    return more


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        step = read(Path(name))
        print(f"{name}: {step['steps']} steps of {step['kernels']} kernels, {step['gpu_us']} us")
        for each in step["by_name"]:
            print(f"{each['count']:6} {each['us']:10.2f} us  {each['name']}")


if __name__ == "__main__":
    main()
