"""Time of the scheduler's thread: what each call of the feature costs it, measured inside a server.

Started in place of `python -m sglang.launch_server`, with the same arguments. Every process of the
server runs this file's top level again, which wraps the calls below in two readings of the clock.
The main module of a process that was spawned is not "__main__", so only the first starts a server.
"""

from __future__ import annotations

import array
import functools
import importlib
import inspect
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from results import Results

STEP_CALLS = ("before_graph", "on_forward_end", "copy_to_cpu", "on_result", "finalize")
COLLECT_CALLS, SEND_CALLS = ("collect", "get_routed_experts"), ("send_output",)
# What ours consist of. Only with SCHEDULER_TIME_PARTS=1, for the readings of the clock add up.
PARTS = {
    "routed_experts.store.RowFiler": ("file_step", "filed_here"),
    "routed_experts.launch.Launcher": ("__call__",),
    "routed_experts.collector.RowCollector": (
        "_gather",
        "_new_block",
        "_collect",
        "_mark_ready",
        "_answer",
    ),
    "routed_experts_capturer._TargetCapturer": ("_get_local_range", "_is_captured"),
}
_WRITE_NOW = "write-now"

_calls: dict[tuple[str, int], array.array[float]] = {}


def store(folder: Path, results: Results) -> None:
    """Put what the running servers have measured so far into `results`.

    Args:
        folder: holds a folder for each engine that is timed; may be absent.
    """
    engines = [path for path in sorted(folder.glob("*")) if path.is_dir()]
    for engine in engines:
        (engine / _WRITE_NOW).touch()
    time.sleep(1.0 if engines else 0.0)
    entries = []
    for engine in engines:
        merged: dict[tuple[str, int], list[float]] = {}
        for path in engine.glob("*.json"):
            for name, tokens, spent in json.loads(path.read_text()):
                merged.setdefault((name, tokens), []).extend(spent)
        entries += [
            {
                "engine": engine.name,
                "call": name,
                "tokens": tokens,
                "calls": len(spent),
                "us": round(1e6 * statistics.median(spent), 2),
                "us_p90": round(1e6 * sorted(spent)[int(0.9 * len(spent))], 2),
            }
            for (name, tokens), spent in sorted(merged.items())
            if len(spent) >= 3
        ]
    if entries:
        results.replace("scheduler_time", ("engine", "call", "tokens"), entries)


def clear(folder: Path) -> None:
    """Forget what servers of an earlier call have measured."""
    shutil.rmtree(folder, ignore_errors=True)


def wrap(owner: type, name: str, size: Callable[..., int | None]) -> None:
    """Replace `owner.name` by itself, timed.

    Args:
        size: tells from its arguments how many tokens a call is about; None: do not keep it.
    """
    plain = vars(owner)[name]

    @functools.wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            spent = time.perf_counter() - begin
            tokens = size(*args, **kwargs)
            if tokens is not None:
                _calls.setdefault((name, tokens), array.array("d")).append(spent)

    setattr(owner, name, timed)


def wrap_everything() -> None:
    from sglang.srt.managers.scheduler import SenderWrapper

    from sglang.srt.layers.moe import routed_experts_capturer

    for owner in list(vars(routed_experts_capturer).values()):
        if inspect.isclass(owner) and owner.__module__ == routed_experts_capturer.__name__:
            for name in (*STEP_CALLS, *COLLECT_CALLS):
                if inspect.isfunction(vars(owner).get(name)):
                    wrap(owner, name, _tokens)
    wrap(SenderWrapper, "send_output", _rows_sent)
    if "SCHEDULER_TIME_PARTS" in os.environ:
        _wrap_parts()


def _wrap_parts() -> None:
    for path, names in PARTS.items():
        module, _, owner = path.rpartition(".")
        try:
            found = importlib.import_module(f"sglang.srt.layers.moe.{module}")
        except ModuleNotFoundError:  # another tree than ours
            return
        for name in names:
            wrap(getattr(found, owner), name, _part_size)


def _part_size(*args: Any, **kwargs: Any) -> int:
    """Tokens, rows, bytes or programs: the largest that the arguments tell."""
    values = [getattr(value, "out_cache_loc", value) for value in args[1:]]
    numbers = [value for value in values if isinstance(value, int)]
    lengths = [value.numel() for value in values if hasattr(value, "numel") and value.dim() == 1]
    return max([0, *numbers, *lengths])


def _tokens(*args: Any, **kwargs: Any) -> int | None:
    """Tokens of a step, or rows of a request that asked; 0 where the arguments do not say."""
    for value in (*args, *kwargs.values()):
        if (slots := getattr(value, "out_cache_loc", None)) is not None:
            return len(slots)
        if hasattr(value, "origin_input_ids"):
            if not value.return_routed_experts:
                return None
            return len(value.origin_input_ids) + len(value.output_ids) - 1
    return kwargs.get("seqlen", 1) - 1


def _rows_sent(*args: Any, **kwargs: Any) -> int | None:
    """How many rows a message of the scheduler's brings, itself or described; None if nobody's answer ends with it."""
    if not any(reason for arg in args for reason in getattr(arg, "finished_reasons", None) or ()):
        return None
    all_rows = next((r for arg in args if (r := getattr(arg, "routed_experts", None))), ())
    return sum(rows.shape[0] for rows in all_rows if rows is not None)


def _write_when_asked(folder: Path) -> None:
    """Not while anything is measured: `store` asks in between."""
    written = 0
    while True:
        time.sleep(0.2)
        try:
            asked = (folder / _WRITE_NOW).stat().st_mtime_ns
        except FileNotFoundError:
            continue
        if asked != written:
            written = asked
            part = folder / f"{os.getpid()}.part"
            part.write_text(json.dumps([[*key, list(spent)] for key, spent in _calls.items()]))
            part.replace(part.with_suffix(".json"))


if "SCHEDULER_TIME_DIR" in os.environ and __name__ in ("__main__", "__mp_main__"):
    # The server must not find the files beside this one instead of packages of the same name.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    wrap_everything()
    _folder = Path(os.environ["SCHEDULER_TIME_DIR"])
    _folder.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_write_when_asked, args=(_folder,), daemon=True).start()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
