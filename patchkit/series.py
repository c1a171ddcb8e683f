"""The series: which commits the branch has, in which order, and what belongs to which."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit import yamlfile
from patchkit.problem import Problem


@dataclass(frozen=True)
class Commit:
    """One commit of the branch; `files` are globs of whole files of ours."""

    name: str
    subject: str
    body: str
    files: tuple[str, ...]

    @property
    def message(self) -> str:
        return f"{self.subject}\n\n{self.body.strip()}\n"


@dataclass(frozen=True)
class Series:
    """The commits in order, with the author and date that all of them carry."""

    author: str
    email: str
    date: str
    commits: tuple[Commit, ...]

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.commits]

    def commit_of(self, path: str) -> str | None:
        """Name of the last commit that the whole file `path` fits, None if it fits none."""
        fits = [c.name for c in self.commits if any(fnmatchcase(path, g) for g in c.files)]
        return fits[-1] if fits else None

    @classmethod
    def load(cls, path: Path) -> Series:
        """Read `series.yml`."""
        data = yamlfile.load(path)
        try:
            author, _, email = data["author"].partition(" <")
            commits = tuple(
                Commit(c["name"], c["subject"], c["body"], tuple(c["files"]))
                for c in data["commits"]
            )
            date = data["date"]
            # YAML reads a bare time stamp as a datetime; git wants the text.
            date = date if isinstance(date, str) else date.isoformat()
        except (KeyError, TypeError, AttributeError) as error:
            raise Problem(f"{path}: {error!r}; the file's comments say what it holds") from None
        series = cls(author, email.rstrip(">"), date, commits)
        if len(set(series.names)) != len(series.names):
            raise Problem(f"{path}: two commits have the same name")
        return series
