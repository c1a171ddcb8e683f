"""An edit: one structural rule over one base file, and the text of ours that it brings in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit import yamlfile
from patchkit.problem import Problem

SUFFIX = ".edits.yml"
MOST_LINES = 5
OPERATIONS = ("before", "after", "prepend", "append", "fix", "delete")
METAVARIABLE = re.compile(r"\$\$\$([A-Z_][A-Z0-9_]*)|\$([A-Z_][A-Z0-9_]*)")
_KEYS = {"name", "commit", "why", "matches", "rule", "constraints", "utils", *OPERATIONS}
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Edit:
    """One entry of an edits file. `source` is `file:line`, for messages."""

    path: str
    source: str
    name: str
    commit: str
    why: str
    matches: int
    rule: Mapping[str, Any]
    operation: str
    text: str

    @property
    def lines(self) -> int:
        """Lines of our text at each match; a line that is only a metavariable is the base's."""
        if self.operation == "delete":
            return 0
        text = self.text.removesuffix("\n").split("\n")
        return sum(not METAVARIABLE.fullmatch(line.strip()) for line in text)

    def __str__(self) -> str:
        return f"{self.path}: rule '{self.name}' ({self.source})"


def load(root: Path, file: Path) -> tuple[list[Edit], list[str]]:
    """Read one edits file: its edits, and what is wrong with it (all of it, not just the first)."""
    relative = file.relative_to(root).as_posix()
    target = relative.removesuffix(SUFFIX) + ".py"
    try:
        data = yamlfile.load(file)
    except Problem as problem:
        return [], [str(problem)]
    if not isinstance(data, dict) or set(data) != {"edits"} or not isinstance(data["edits"], list):
        return [], [f"{relative}: wants one key, `edits`, with a list under it"]
    edits: list[Edit] = []
    problems: list[str] = []
    if not file.read_text(encoding="utf-8").startswith("#"):
        problems.append(f"{relative}: the first line must be a comment: what is this seam for?")
    for number, entry in enumerate(data["edits"], 1):
        faults = _faults(entry)
        if not faults and entry["name"] in {e.name for e in edits}:
            faults = ["the name stands twice in this file"]
        if faults:
            label = entry.get("name", f"number {number}") if isinstance(entry, dict) else number
            line = getattr(entry, "line", 0)
            problems += [f"{relative}:{line}: edit '{label}': {fault}" for fault in faults]
            continue
        operation = next(o for o in OPERATIONS if o in entry)
        extra = {k: entry[k] for k in ("constraints", "utils") if k in entry}
        edits.append(
            Edit(
                path=target,
                source=f"{relative}:{entry.line}",
                name=entry["name"],
                commit=entry["commit"],
                why=" ".join(entry["why"].split()),
                matches=entry["matches"],
                rule={"rule": entry["rule"], **extra},
                operation=operation,
                text="" if operation == "delete" else entry[operation],
            )
        )
    return edits, problems


def _faults(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return ["wants a mapping with name, commit, why, matches, rule and one operation"]
    faults = [f"unknown key `{key}`" for key in sorted(set(entry) - _KEYS)]
    for key in ("name", "commit", "why"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            faults.append(f"`{key}` must be text")
    if not faults and not _NAME.fullmatch(entry["name"]):
        faults.append("`name` must be kebab-case")
    if type(entry.get("matches")) is not int or entry["matches"] < 1:
        faults.append("`matches` must say how many nodes the rule matches (1 or more)")
    if not isinstance(entry.get("rule"), dict):
        faults.append("`rule` must be an ast-grep rule object")
    operations = [o for o in OPERATIONS if o in entry]
    if len(operations) != 1:
        faults.append(f"wants exactly one of {', '.join(OPERATIONS)}, has {len(operations)}")
    elif operations[0] == "delete":
        return faults if entry["delete"] is True else [*faults, "`delete` must be true"]
    elif not isinstance(entry[operations[0]], str) or not entry[operations[0]].strip():
        faults.append(f"`{operations[0]}` must be text")
    elif operations[0] == "fix":
        faults += _unbound(entry)
    return faults + (_too_long(entry, operations[0]) if not faults else [])


def _unbound(entry: Mapping[str, Any]) -> list[str]:
    """Metavariables that the text uses and no part of the rule captures."""
    rule = repr([entry.get("rule"), entry.get("constraints"), entry.get("utils")])
    bound = {m.group() for m in METAVARIABLE.finditer(rule)}
    used = {m.group() for m in METAVARIABLE.finditer(entry["fix"])}
    return [f"`fix` uses {v}, which the rule does not capture" for v in sorted(used - bound)]


def _too_long(entry: Mapping[str, Any], operation: str) -> list[str]:
    edit = Edit("", "", "", "", "", 1, {}, operation, entry[operation])
    if edit.lines <= MOST_LINES:
        return []
    return [
        f"inserts {edit.lines} lines, at most {MOST_LINES} are a seam: move the logic to a file "
        "of ours and call it"
    ]
