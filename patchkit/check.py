"""The check: is what this project writes in order, does it fit the base, is nothing copied?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from patchkit import copies, plan, splice
from patchkit.problem import refuse_all
from patchkit.project import Ours, Project

_OURS = ("python", "test", "patchkit", "benchmark", "examples")


def run(project: Project) -> None:
    """Raise a `Problem` that lists what is wrong, or say what was checked."""
    ours = project.ours()
    problems = [*_unknown(project, ours), *_broken(ours), *_copied(project)]
    refuse_all(problems, "the files of this project are not in order:")
    plan.make(project.base_tree, ours, project.series, project.base.replaces)
    print(
        f"{len(ours.files)} files and {len(ours.edits)} edits fit {project.base.version}, "
        "and nothing in them is copied from it"
    )


def _unknown(project: Project, ours: Ours) -> Iterator[str]:
    """Files that `replaces` lacks, or has with other hashes than the base's."""
    base = project.base
    for path in sorted(ours.files.keys() & project.base_tree.paths):
        theirs = hashlib.sha256(project.base_tree.read(path) or b"").hexdigest()
        if theirs not in base.replaces.get(path, ()):
            yield (
                f"{path} replaces a file of {base.version}: add {theirs} to its `replaces` in "
                "patchkit/bases.yml"
            )


def _broken(ours: Ours) -> Iterator[str]:
    for path, content in ours.files.items():
        if path.endswith(".py") and (error := splice.syntax_error(content, path)):
            yield f"{path}: {error}"


def _copied(project: Project) -> Iterator[str]:
    files = (p for tree in _OURS for p in sorted((project.root / tree).rglob("*.py")))
    texts = {p.relative_to(project.root).as_posix(): p.read_text("utf-8") for p in files}
    tree = project.base_tree
    theirs = (
        (path, (tree.read(path) or b"").decode(errors="replace"))
        for path in sorted(tree.paths)
        if path.endswith(".py")
    )
    return copies.find(texts, theirs)
