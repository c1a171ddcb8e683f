"""Kernels of a step, out of a trace in which they run later than they are launched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import step_trace

LAYERS = 3


def _trace(steps: int, extra: dict[str, float]) -> dict:
    """Steps of one graph with LAYERS "moe" kernels and one "sample" kernel; `extra` outside it.

    Kernels run most of a step after their launch; those of the last step are cut off.
    """
    events: list[dict] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    correlation = 0

    def launch(at: float, call: str, kernels: list[tuple[str, float]], kept: bool) -> None:
        nonlocal correlation
        correlation += 1
        args = {"correlation": correlation}
        events.append({"cat": "cuda_runtime", "name": call, "ts": at, "dur": 1, "args": args})
        for i, (name, us) in enumerate(kernels):
            if kept:
                begin = at + 90 + i
                events.append({"cat": "kernel", "name": name, "ts": begin, "dur": us, "args": args})

    for step in range(steps):
        at, kept = 100.0 * step, step < steps - 1
        launch(at, "cudaGraphLaunch", [("moe", 10.0)] * LAYERS, kept)
        launch(at + 20, "cudaLaunchKernel", [("sample", 2.0)], kept)
        for name, us in extra.items():
            launch(at + 30, "cuLaunchKernelEx", [(name, us)], kept)
    # Of a graph launched before the trace began, some kernels are seen without their launch.
    events += [{"cat": "kernel", "name": "moe", "ts": 1, "dur": 10, "args": {"correlation": 0}}]
    return {"traceEvents": events}


def test_a_step_is_what_was_launched_in_it() -> None:
    step = step_trace.summarize(_trace(10, {"pack": 5.0, "file": 3.0}))
    assert step["steps"] == 6
    assert step["kernels"] == LAYERS + 3
    assert step["gpu_us"] == 40.0
    assert step["by_name"][0] == {"name": "moe", "count": LAYERS, "us": 30.0}


def test_added_kernels() -> None:
    off = step_trace.summarize(_trace(10, {}))["by_name"]
    on = step_trace.summarize(_trace(12, {"pack": 5.0, "file": 3.0}))["by_name"]
    added = step_trace.added(off, on)
    assert {each["name"]: (each["count"], each["us"]) for each in added} == {
        "pack": (1, 5.0),
        "file": (1, 3.0),
    }
    more = [{"name": "copy", "count": 50, "us": 100.0}]
    few = [{"name": "copy", "count": 2, "us": 4.0}]
    assert step_trace.added(few, more) == [{"name": "copy", "count": 48, "us": 96.0}]


def test_a_trace_without_decode_steps_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(_trace(3, {})).encode()))
    with pytest.raises(step_trace.TraceError, match="3 launches"):
        step_trace.read(path)
