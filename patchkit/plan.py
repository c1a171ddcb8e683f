"""The plan: all commits against one tree, worked out in memory before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Protocol

from patchkit import matcher, splice
from patchkit.edits import Edit
from patchkit.matcher import BadRule
from patchkit.problem import refuse_all
from patchkit.project import Ours
from patchkit.series import Commit, Series


class Tree(Protocol):
    """A tree that the branch is put on: the base's wheel, or HEAD of a fork."""

    @property
    def paths(self) -> Collection[str]: ...

    def read(self, path: str) -> bytes | None: ...


@dataclass(frozen=True)
class Step:
    """One commit: the new content of every file that it changes."""

    commit: Commit
    files: Mapping[str, bytes]


def make(
    tree: Tree, ours: Ours, series: Series, replaces: Mapping[str, tuple[str, ...]]
) -> list[Step]:
    """Work out every commit, in order; those that would change nothing are left out.

    Args:
        replaces: path -> sha256 of each version of that file which ours may replace.

    Raises:
        Problem: lists every rule and file that does not fit `tree`.
    """
    problems = [p for path in ours.files for p in _unknown(tree, path, replaces, ours.files[path])]
    by_file = {path: list(es) for path, es in groupby(ours.edits, key=lambda e: e.path)}
    stages: dict[str, dict[str, bytes]] = {}
    with ThreadPoolExecutor(4) as pool:
        for path, (versions, faults) in zip(
            by_file, pool.map(lambda item: _stages(tree, *item, series), by_file.items())
        ):
            stages[path] = versions
            problems += faults
    refuse_all(problems, f"what does not fit ({len(problems)}), and nothing was changed:")
    steps = []
    for commit in series.commits:
        files = {p: v[commit.name] for p, v in stages.items() if commit.name in v}
        files |= {
            p: content
            for p, content in ours.files.items()
            if ours.commits[p] == commit.name and tree.read(p) != content
        }
        if files:
            steps.append(Step(commit, dict(sorted(files.items()))))
    return steps


def _unknown(
    tree: Tree, path: str, replaces: Mapping[str, tuple[str, ...]], ours: bytes
) -> list[str]:
    """Why the whole file `path` of ours may not replace what `tree` has there."""
    theirs = tree.read(path)
    if theirs is None:
        return [_moved(tree, path)] if path in replaces else []
    if theirs == ours or hashlib.sha256(theirs).hexdigest() in replaces.get(path, ()):
        return []
    return [
        f"{path}: our file would replace it whole, but its content is none that we know: somebody "
        "changed it. Bring the change into our file, then add the sha256 of theirs "
        f"({hashlib.sha256(theirs).hexdigest()}) to `replaces` in patchkit/bases.yml"
    ]


def _stages(
    tree: Tree, path: str, edits: list[Edit], series: Series
) -> tuple[dict[str, bytes], list[str]]:
    """Content of `path` after each commit that edits it, and what does not fit."""
    text = tree.read(path)
    if text is None:
        return {}, [_moved(tree, path) + f"; {len(edits)} rules need it"]
    found, problems = [], []
    for edit, matches in zip(edits, matcher.find(text, [e.rule for e in edits])):
        if isinstance(matches, BadRule):
            problems.append(f"{edit} is not a rule that ast-grep takes: {matches}")
        elif len(matches) != edit.matches:
            lines = ", ".join(str(text.count(b"\n", 0, m.start) + 1) for m in matches)
            where = f" (lines {lines})" if matches else ""
            problems.append(f"{edit} found {len(matches)}{where}, expected {edit.matches}")
        else:
            found.append((edit, matches))
    if problems:
        return {}, problems
    try:
        splices = splice.plan(text, found)
    except splice.Unfit as unfit:
        return {}, [f"{path}: {unfit}"]
    versions: dict[str, bytes] = {}
    done: set[str] = set()
    for commit in series.names:
        done.add(commit)
        if any(e.commit == commit for e in edits):
            versions[commit] = splice.apply(text, [s for s in splices if s.edit.commit in done])
            error = splice.syntax_error(versions[commit], path)
            if error:
                return {}, [_culprit(text, path, edits, splices, error)]
    return versions, []


def _culprit(
    text: bytes, path: str, edits: list[Edit], splices: list[splice.Splice], error: str
) -> str:
    """Name the first edit after which the text does not compile any more."""
    if own := splice.syntax_error(text, path):
        return f"{path}: this Python cannot compile it even without our edits: {own}"
    for n, edit in enumerate(edits, 1):
        some = [s for s in splices if s.edit in edits[:n]]
        if alone := splice.syntax_error(splice.apply(text, some), path):
            return f"{edit}: after `{edit.operation}` the file is no Python any more: {alone}"
    return f"{path}: the edits of one commit are no Python without a later one's: {error}"


def _moved(tree: Tree, path: str) -> str:
    name = PurePosixPath(path).name
    others = sorted(p for p in tree.paths if PurePosixPath(p).name == name)[:3]
    return f"{path} is missing. Moved?" + (f" Perhaps to {' or '.join(others)}" if others else "")
