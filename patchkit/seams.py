"""The seams table: every base file that the branch touches, why, and with how many lines."""

from __future__ import annotations

from patchkit.problem import Problem
from patchkit.project import Project

_BEGIN, _END = "<!-- seams -->", "<!-- /seams -->"


def table(project: Project) -> str:
    """The table in Markdown, generated from the edits and from `replaces` of the base."""
    ours = project.ours()
    rows = [(e.path, f"`{e.name}`", e.why, e.lines * e.matches) for e in ours.edits]
    rows += [
        (path, "whole file", "ours in its place; a fork's own version is refused",
         ours.files[path].count(b"\n"))
        for path in project.base.replaces
        if path in ours.files
    ]  # fmt: skip
    rows.sort(key=lambda row: row[0])  # stable: within a file, the order of its edits
    inserted = sum(e.lines * e.matches for e in ours.edits)
    files = len({e.path for e in ours.edits})
    lines = ["| base file | rule | why | lines inserted |", "|---|---|---|---:|"]
    shown = ""
    for path, rule, why, count in rows:
        name = "" if path == shown else f"`{path.removeprefix('python/sglang/')}`"
        lines.append(f"| {name} | {rule} | {why.replace('|', chr(92) + '|')} | {count} |")
        shown = path
    lines += ["", f"{inserted} lines at {len(ours.edits)} seams in {files} files of the base."]
    return "\n".join(lines)


def write(project: Project) -> None:
    """Print the table and put it between the markers of README.md, if README.md has them."""
    new = table(project)
    print(new)
    readme = project.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if _BEGIN in text and _END in text:
        readme.write_text(_with(text, new), encoding="utf-8")


def check(project: Project) -> None:
    """Raise a `Problem` unless README.md shows the table as it is now."""
    readme = project.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if _BEGIN not in text or _END not in text:
        raise Problem(f"README.md has no place for the table: put {_BEGIN} and {_END} there")
    if _with(text, table(project)) != text:
        raise Problem("the seams table of README.md is stale: run `make seams` and commit it")


def _with(text: str, new: str) -> str:
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{new}\n{_END}{rest.partition(_END)[2]}"
