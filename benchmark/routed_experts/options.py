"""Command-line options that the scripts share, and what they make of them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import host
import model
from servers import Engine, Setup
from sessions import STALL_ARGUMENTS


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--trees", type=Path, required=True, help="folder with ours/, base/ and peer/")
    add("--site", type=Path, help="folder of Python packages for the servers")
    add("--results", type=Path, required=True, help="JSON to write, or to go on with")
    add("--work", type=Path, default=Path("build/bench-host/work"), help="logs, configs, traces")
    add("--model", choices=model.MODELS, default="qwen3-30b-a3b")
    add("--layers", type=int, help="another number of layers than the model has")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tp", type=int, default=1, help="GPUs that each server runs on")
    add("--piecewise", action="store_true", help="leave piecewise CUDA graphs on")
    add("--server-args", default="", help="further arguments for every server")
    return made


def setup(arguments: argparse.Namespace, timed: bool) -> Setup:
    """The servers' setup; writes the model's config.

    Args:
        timed: measure the scheduler's thread inside the servers.
    """
    work = arguments.work.resolve()
    shape = model.named(arguments.model, arguments.layers)
    shape.write(work / "model")
    shape.write_draft(work / "draft")
    return Setup(
        trees=arguments.trees.resolve(),
        site=arguments.site.resolve() if arguments.site else None,
        work=work,
        model=shape,
        device=arguments.device,
        tp=arguments.tp,
        piecewise=arguments.piecewise,
        timed=timed,
        extra=shlex.split(arguments.server_args),
    )


def header(made: Setup) -> dict[str, Any]:
    """The head of the results file."""
    about = host.header(made.trees / "ours", made.site, made.device, made.tp)
    _, *arguments = made.arguments(Engine("ours", True))  # the first is the model's folder
    return {
        **about,
        "model": made.model.describe(),
        "server": " ".join(arguments),
        "server_stall": " ".join(STALL_ARGUMENTS),
    }
