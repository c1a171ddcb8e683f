"""Copies: runs of lines of ours that also stand in the base. There must be none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

RUN = 6
_WORDS = re.compile(r"(?:\W*\w){6}")
_IMPORT = re.compile(r"(from [\w.]+ )?import ")


def find(ours: Mapping[str, str], theirs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Name every run of `RUN` or more lines of a text of ours that one of `theirs` has as well.

    Indentation, blank lines, imports and lines with hardly a word in them do not count.

    Args:
        ours: path -> text.
        theirs: pairs of path and text.
    """
    windows: dict[tuple[str, ...], tuple[str, int]] = {}
    for path, text in ours.items():
        lines = _telling(text)
        for i in range(len(lines) - RUN + 1):
            run = lines[i : i + RUN]
            windows.setdefault(tuple(line for _, line in run), (path, run[0][0]))
    known = {line for window in windows for line in window}
    for path, text in theirs:
        if sum(line.strip() in known for line in text.split("\n")) < RUN:
            continue  # nearly every file of the base
        lines = _telling(text)
        for ours_too, group in groupby(lines, key=lambda numbered: numbered[1] in known):
            run = list(group) if ours_too else []
            for i in range(len(run) - RUN + 1):
                if at := windows.get(tuple(line for _, line in run[i : i + RUN])):
                    yield (
                        f"{at[0]}:{at[1]}: {RUN} lines that also stand in the base, at "
                        f"{path}:{run[i][0]}: write them anew"
                    )


def _telling(text: str) -> list[tuple[int, str]]:
    """The lines that say something, without indentation, with their numbers."""
    stripped = ((n, line.strip()) for n, line in enumerate(text.split("\n"), 1))
    return [(n, line) for n, line in stripped if _WORDS.match(line) and not _IMPORT.match(line)]
