"""Splicing: how edits land in a text.

All rules of a file are matched against its *original* text, never against the result of another
edit, so that their order decides nothing but this: texts put at the same point keep file order.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patchkit.edits import METAVARIABLE, Edit
from patchkit.matcher import Match


class Order(NamedTuple):
    """What decides between texts for the same point (see `_order`)."""

    point: int
    phase: int
    nesting: int
    edit: int


@dataclass(frozen=True)
class Splice:
    """Bytes `[start, end)` of the original become `text`; an insertion has `start == end`."""

    start: int
    end: int
    text: bytes
    edit: Edit
    order: Order


class Unfit(Exception):
    """An edit cannot be spliced; the message says why."""


def plan(text: bytes, found: Sequence[tuple[Edit, Sequence[Match]]]) -> list[Splice]:
    """Turn the matches of a file's edits into splices of `text`, in the order of their points.

    Raises:
        Unfit: two edits want the same bytes, a multi-line value cannot be re-indented, or a
            deleted node shares its lines.
    """
    splices = sorted(
        (_splice(text, e, m, i) for i, (e, matches) in enumerate(found) for m in matches),
        key=lambda s: s.order,
    )
    taken: Splice | None = None  # the last replacement
    for s in splices:
        if taken is not None and s.start < taken.end:
            raise Unfit(f"'{s.edit.name}' lies inside what '{taken.edit.name}' replaces")
        if s.end > s.start:
            taken = s
    return splices


def apply(text: bytes, splices: Iterable[Splice]) -> bytes:
    """Return `text` with `splices` (as `plan` gives them, or some of those) done."""
    parts: list[bytes] = []
    at = 0
    for s in splices:
        parts += [text[at : s.start], s.text]
        at = s.end
    return b"".join([*parts, text[at:]])


def syntax_error(text: bytes, path: str) -> str | None:
    """What Python says about `text` as a module, None if it compiles."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return None


def _splice(text: bytes, edit: Edit, match: Match, number: int) -> Splice:
    line = text.rfind(b"\n", 0, match.start) + 1
    indent = _indent(text, line)
    newline = b"\r\n" if b"\r\n" in text[line : _line_end(text, match.start)] else b"\n"
    if edit.operation == "fix":
        start, end, new = match.start, match.end, _fixed(text, edit, match, indent)
    elif edit.operation == "delete":
        start, end, new = line, _line_end(text, _last_byte(text, match)), b""
        if text[start:end].strip() != text[match.start : match.end].strip():
            raise Unfit(f"'{edit.name}' would delete more than its node: it shares its lines")
    else:
        new = edit.text.encode()
        if edit.operation in ("before", "after"):
            new = _indented(new.removesuffix(b"\n") + b"\n", indent)
        start = {
            "before": line,
            "after": _line_end(text, _last_byte(text, match)),
            "prepend": match.start,
            "append": match.end,
        }[edit.operation]
        end = start
    if newline != b"\n":
        new = re.sub(rb"\r?\n", newline, new)
    if edit.operation == "after" and start and text[start - 1 : start] != b"\n":
        new = newline + new.removesuffix(newline)  # the file ends without a newline
    return Splice(start, end, new, edit, _order(edit.operation, start, len(indent), number))


def _order(operation: str, point: int, indent: int, edit: int) -> Order:
    """At one point: what ends there comes before what starts there, and of the whole lines after
    nested statements that end together, those of the inner statement come first."""
    phase = ("append", "after", "before", "prepend", "fix", "delete").index(operation)
    return Order(point, phase, -indent if operation == "after" else 0, edit)


def _fixed(text: bytes, edit: Edit, match: Match, indent: bytes) -> bytes:
    template = _indented(edit.text.encode().removesuffix(b"\n"), indent, first=False)

    def value(hole: re.Match[bytes]) -> bytes:
        span = match.variables.get((hole[1] or hole[2]).decode())
        if span is None:  # an optional part that this node does not have
            return b""
        line = template.rfind(b"\n", 0, hole.start()) + 1
        there = _indent(template, line) if line else indent
        return _moved(text, span, there, edit)

    return re.sub(METAVARIABLE.pattern.encode(), value, template)


def _moved(text: bytes, span: tuple[int, int], to: bytes, edit: Edit) -> bytes:
    """The captured text, its lines after the first moved to the indentation `to`."""
    value = text[slice(*span)]
    here = _indent(text, text.rfind(b"\n", 0, span[0]) + 1)
    if here == to or b"\n" not in value:
        return value
    if b'"""' in value or b"'''" in value:
        raise Unfit(f"'{edit.name}' would re-indent a multi-line string; keep it at its depth")
    first, *rest = value.split(b"\n")
    return b"\n".join([first, *(to + r.removeprefix(here) if r.strip() else r for r in rest)])


def _indented(text: bytes, indent: bytes, first: bool = True) -> bytes:
    lines = text.split(b"\n")
    return b"\n".join(
        indent + line if line.strip() and (first or i) else line for i, line in enumerate(lines)
    )


def _indent(text: bytes, line: int) -> bytes:
    return re.compile(rb"[ \t]*").match(text, line).group()  # type: ignore[union-attr]


def _line_end(text: bytes, at: int) -> int:
    """Where the line after the one of byte `at` starts."""
    end = text.find(b"\n", at)
    return len(text) if end < 0 else end + 1


def _last_byte(text: bytes, match: Match) -> int:
    """The node's last byte that is not blank: a node may take the newline after it along."""
    return match.start + max(len(text[match.start : match.end].rstrip()) - 1, 0)
