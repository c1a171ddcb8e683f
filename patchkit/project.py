"""The project on disk: what of it is ours, and where built things go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from patchkit import edits
from patchkit.base import Base, BaseTree
from patchkit.edits import Edit
from patchkit.problem import refuse_all
from patchkit.series import Series

_TREES = ("python", "test/registered")
_NOT_OURS = {"__pycache__", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True)
class Ours:
    """What this project writes: whole files by their path in the branch, edits by file."""

    files: dict[str, bytes]
    edits: list[Edit]
    commits: dict[str, str]
    """Path of a whole file -> name of its commit."""


class Project:
    """One checkout of this repository."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.build = self.root / "build"
        self.dist = self.root / "dist"

    @cached_property
    def base(self) -> Base:
        return Base.load(self.root / "patchkit" / "bases.yml")

    @cached_property
    def series(self) -> Series:
        return Series.load(self.root / "patchkit" / "series.yml")

    @cached_property
    def base_tree(self) -> BaseTree:
        return self.base.fetch(self.build / "cache")

    def ours(self) -> Ours:
        """Read everything of ours, or raise a `Problem` that lists all that is wrong with it."""
        files: dict[str, bytes] = {}
        found: list[Edit] = []
        commits: dict[str, str] = {}
        problems: list[str] = []
        for path in self._walk():
            name = path.relative_to(self.root).as_posix()
            if name.endswith(edits.SUFFIX):
                some, faults = edits.load(self.root, path)
                faults += self._misplaced(path, some)
                found += some
                problems += faults
                continue
            commit = self.series.commit_of(name)
            if commit is None:
                problems.append(f"{name}: fits the `files` of no commit in patchkit/series.yml")
            else:
                files[name], commits[name] = path.read_bytes(), commit
        refuse_all(problems, "the files of this project are not in order:")
        return Ours(files, found, commits)

    def _walk(self) -> Iterator[Path]:
        for tree in _TREES:
            for path in sorted((self.root / tree).rglob("*")):
                ours = not _NOT_OURS & set(path.parts) and path.suffix != ".pyc"
                if ours and path.is_file():
                    yield path

    def _misplaced(self, path: Path, some: list[Edit]) -> list[str]:
        faults = [
            f"{e.source}: edit '{e.name}': commit '{e.commit}' is none of "
            + ", ".join(self.series.names)
            for e in some
            if e.commit not in self.series.names
        ]
        whole = path.with_name(path.name.removesuffix(edits.SUFFIX) + ".py")
        if whole.exists():
            faults.append(f"{path.relative_to(self.root)}: {whole.name} beside it is ours, whole")
        return faults

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the build directory for this process; a second build waits for the first."""
        import fcntl

        self.build.mkdir(parents=True, exist_ok=True)
        with (self.build / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another build in this checkout to end", flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
