"""Write docs/refusals.md: what the flag refuses (policy.py), and why the rest is allowed.

Run with the branch on the path:  PYTHONPATH=build/sglang/python python tools/refusals.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/refusals.md"
ARGUMENTS = ROOT / "tools/arguments.yml"

INTRODUCTION = """\
# What --enable-return-routed-experts refuses

Written by `tools/refusals.py` from `policy.py` and `tools/arguments.yml`; change those.

Rows are right, or the server does not start. Each configuration in the first table is refused at
start-up, before the model loads, with an error that names both arguments and says what to do. No
argument and no environment variable turns a refusal off.

Refused as well, before loading: a dense model, and one whose top-k differs from layer to layer.
After loading: a model with a sparse layer whose routing is not captured; the error names the layers
(see [routing_paths.md](routing_paths.md)).
"""


def read_arguments() -> dict[str, list[dict[str, Any]]]:
    """arguments.yml by section: groups of `arguments` (fields of ServerArgs) and a `why`."""
    return yaml.safe_load(ARGUMENTS.read_text())


def option(field: str) -> str:
    """A field of ServerArgs as its argument is typed."""
    return f"`{_typed()[field]}`"


@cache
def _typed() -> dict[str, str]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    typed = {}
    for action in parser._actions:
        typed.setdefault(action.dest, action.option_strings[0])
        # Short names such as --tp-size are those of the fields.
        typed |= {name[2:].replace("-", "_"): name for name in action.option_strings}
    return typed


def document() -> str:
    """The text of docs/refusals.md."""
    arguments = read_arguments()
    return "\n".join(
        [
            INTRODUCTION,
            "## Refused",
            "",
            *_refused(),
            "",
            "## Allowed, and why",
            "",
            *_allowed(arguments["allowed"]),
            "",
            "## No bearing on rows",
            "",
            *_unrelated(arguments["unrelated"]),
            "",
        ]
    )


def _refused() -> Iterator[str]:
    from sglang.srt.layers.moe.routed_experts.policy import REFUSALS

    yield "| argument | why | what to do |"
    yield "|---|---|---|"
    for refusal in REFUSALS:
        yield f"| `{refusal.flag}` | {refusal.why} | {refusal.advice} |"


def _allowed(groups: list[dict[str, Any]]) -> Iterator[str]:
    yield "| arguments | why rows stay right |"
    yield "|---|---|"
    for group in groups:
        yield f"| {', '.join(map(option, group['arguments']))} | {group['why']} |"


def _unrelated(groups: list[dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        yield f"- {group['why']}: {', '.join(map(option, group['arguments']))}"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
