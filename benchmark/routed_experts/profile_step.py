"""Decode steps of 64 tokens under torch's profiler, in servers; step_trace.py reads them."""

from __future__ import annotations

import asyncio
import gzip
import time
from pathlib import Path

import load
import step_trace
from results import Results
from servers import Server, Setup

BATCH = 64
_STEPS = 24


def profile_decode(server: Server, setup: Setup, results: Results) -> None:
    """Profile decode steps of 64 tokens on a server, and keep what one step launches.

    The trace stays in the work folder.

    Raises:
        LoadError: there is no trace.
        TraceError: there is no decode step in it.
    """
    name = f"{server.engine.name}-{'on' if server.engine.flag else 'off'}"
    folder = setup.work / "traces" / name
    for old in folder.glob("*.gz"):
        old.unlink()
    asyncio.run(_drive(server.url, setup, folder))
    step = step_trace.read(_wait_for(folder).rename(folder.parent / f"{name}.trace.json.gz"))
    key = {"engine": server.engine.name, "flag": server.engine.flag, "batch": BATCH}
    results.replace("profile", tuple(key), [{**key, **step}])
    print(f"profile {name}: {step['kernels']} kernels, {step['gpu_us']} us a step", flush=True)


async def _drive(url: str, setup: Setup, folder: Path) -> None:
    """Profile in the middle of 64 requests' decoding."""
    prefill = load.Request(input_len=1024, output_len=2)
    before = await load.run_batch(url, setup.model, prefill, BATCH, seed=6)
    request = load.Request(input_len=1024, output_len=250)
    running = asyncio.create_task(load.run_batch(url, setup.model, request, BATCH, seed=7))
    await asyncio.sleep(before.latency_s + 0.5)
    want = {
        "output_dir": str(folder),
        "num_steps": _STEPS,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
    }
    async with (
        load.open_session() as session,
        session.post(f"{url}/start_profile", json=want) as answer,
    ):
        if answer.status != 200:
            raise load.LoadError(f"/start_profile: {answer.status} {(await answer.text())[:300]}")
    await running


def _wait_for(folder: Path, seconds: float = 60) -> Path:
    """The trace in `folder`, once it is written whole."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in folder.glob("*.gz"):
            try:
                gzip.decompress(path.read_bytes())
                return path
            except (EOFError, gzip.BadGzipFile):
                pass  # still being written
        time.sleep(0.5)
    raise load.LoadError(f"no trace in {folder} after {seconds:.0f} s")
