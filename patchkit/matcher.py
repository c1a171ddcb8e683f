"""The matcher: which nodes of a Python text a rule selects, as ast-grep sees them.

One ast-grep process reads one file for all of its rules. Offsets are in bytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.problem import Problem


@dataclass(frozen=True)
class Match:
    """One matched node: bytes `[start, end)`, and the byte spans of the rule's metavariables."""

    start: int
    end: int
    variables: Mapping[str, tuple[int, int]]


class BadRule(Exception):
    """ast-grep does not take a rule; the message is its own."""


def find(text: bytes, rules: Sequence[Mapping[str, Any]]) -> list[list[Match] | BadRule]:
    """For each rule (`rule`, and perhaps `constraints`, `utils`), its matches in file order."""
    with tempfile.TemporaryDirectory(prefix="patchkit-") as scratch:
        Path(scratch, "text.py").write_bytes(text)
        try:
            return list(_scan(scratch, rules))
        except BadRule:
            return [_scan_one(scratch, rule) for rule in rules]  # which of them is it?


def _scan_one(scratch: str, rule: Mapping[str, Any]) -> list[Match] | BadRule:
    try:
        return _scan(scratch, [rule])[0]
    except BadRule as bad:
        return bad


def _scan(scratch: str, rules: Sequence[Mapping[str, Any]]) -> list[list[Match]]:
    documents = (
        json.dumps({"id": f"rule-{i}", "language": "Python", "severity": "hint", **rule})
        for i, rule in enumerate(rules)
    )
    Path(scratch, "rules.yml").write_text("\n---\n".join(documents), encoding="utf-8")
    done = subprocess.run(
        [_ast_grep(), "scan", "--rule", "rules.yml", "--json=compact", "text.py"],
        cwd=scratch, capture_output=True, check=False, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        causes = done.stderr.split("Caused by")[-1].split("\n\n")[0].splitlines()
        raise BadRule("; ".join(c.strip("╰▻ ") for c in causes if c.strip()))
    found: list[list[Match]] = [[] for _ in rules]
    for node in json.loads(done.stdout):
        found[int(node["ruleId"].removeprefix("rule-"))].append(_match(node))
    return [sorted(matches, key=lambda m: (m.start, m.end)) for matches in found]


def _match(node: Mapping[str, Any]) -> Match:
    captured = node.get("metaVariables") or {}
    variables = {name: _span(v) for name, v in captured.get("single", {}).items()}
    for name, nodes in captured.get("multi", {}).items():
        if nodes:  # with the commas and blanks between them
            variables[name] = (_span(nodes[0])[0], _span(nodes[-1])[1])
    start, end = _span(node)
    return Match(start, end, variables)


def _span(node: Mapping[str, Any]) -> tuple[int, int]:
    offsets = node["range"]["byteOffset"]
    return offsets["start"], offsets["end"]


@cache
def _ast_grep() -> str:
    """The executable that the package ast-grep-cli installed for this very interpreter."""
    try:
        files = importlib.metadata.files("ast-grep-cli") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "ast-grep" and os.access(file.locate(), os.X_OK):
            return str(Path(file.locate()).resolve())
    found = shutil.which("ast-grep")
    if found is None:
        raise Problem(
            f"ast-grep is not installed for {sys.executable}: use the targets of the Makefile, "
            "which install it, or `pip install -r requirements/build.txt`"
        )
    return found
