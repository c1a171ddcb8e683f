"""Git, by its plumbing: objects and refs are written, index and work tree of the user are not."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from patchkit.plan import Step
from patchkit.problem import Problem
from patchkit.series import Series

BRANCH = "routed-experts"


class GitError(Problem):
    """A git command failed; the message carries what git said."""


class Repo:
    """A git work tree at `root`. GIT_* variables of whoever called do not count.

    In a repository that is `ours` (not a user's checkout) the user's git settings do not either.
    """

    def __init__(self, root: Path, ours: bool = False) -> None:
        self.root = root
        self._settings = (
            {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull} if ours else {}
        )

    def git(self, *args: str, stdin: bytes | None = None, **env: str) -> str:
        """Run one git command and return its output without the last newline."""
        return self.raw(*args, stdin=stdin, **env).decode(errors="replace").rstrip("\n")

    def raw(self, *args: str, stdin: bytes | None = None, **env: str) -> bytes:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        # Looking at a repository must not refresh its index behind the user's back.
        clean |= self._settings
        clean |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        try:
            done = subprocess.run(
                ["git", *args],
                cwd=self.root,
                input=stdin,
                capture_output=True,
                check=False,
                env=clean | env,
            )
        except FileNotFoundError:
            raise Problem("git is not installed (or the directory vanished): install git") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise GitError(f"git {args[0]} failed in {self.root}: {said}")
        return done.stdout

    def has(self, ref: str) -> bool:
        try:
            self.git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except GitError:
            return False
        return True

    def changed(self) -> list[str]:
        """Tracked files that differ from HEAD, in the index or in the work tree."""
        status = self.git("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
        return [entry[3:] for entry in status.split("\0") if entry]

    def commit_steps(self, parent: str, steps: Sequence[Step], series: Series) -> str:
        """Write one commit a step on top of `parent` and return the last one's hash."""
        parent = self.git("rev-parse", f"{parent}^{{commit}}")
        modes = GitTree(self, parent).modes
        with tempfile.TemporaryDirectory(prefix="patchkit-") as scratch:
            index = {"GIT_INDEX_FILE": os.path.join(scratch, "index")}
            self.git("read-tree", parent, **index)
            for step in steps:
                entries = [
                    f"{modes.get(path, '100644')} {self._blob(content)}\t{path}\0"
                    for path, content in step.files.items()
                ]
                self.git(
                    "update-index", "-z", "--index-info", stdin="".join(entries).encode(), **index
                )
                tree = self.git("write-tree", **index)
                parent = self.commit_tree(tree, [parent], step.commit.message, series)
        return parent

    def commit_tree(self, tree: str, parents: Sequence[str], message: str, series: Series) -> str:
        who = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (
                ("NAME", series.author), ("EMAIL", series.email), ("DATE", series.date),
            )
        }  # fmt: skip
        on = [word for parent in parents for word in ("-p", parent)]
        utf8 = ("-c", "i18n.commitEncoding=utf-8")
        return self.git(*utf8, "commit-tree", tree, *on, stdin=message.encode(), **who)

    def _blob(self, content: bytes) -> str:
        return self.git("hash-object", "-w", "--stdin", stdin=content)


class GitTree:
    """The files of a commit, as a plan reads them."""

    def __init__(self, repo: Repo, commit: str) -> None:
        self._repo = repo
        self._commit = commit

    @cached_property
    def modes(self) -> Mapping[str, str]:
        listing = self._repo.git("ls-tree", "-r", "-z", "--full-tree", self._commit)
        entries = (line.split("\t", 1) for line in listing.split("\0") if line)
        return {path: info.split()[0] for info, path in entries}

    @property
    def paths(self) -> Mapping[str, str]:
        return self.modes

    def read(self, path: str) -> bytes | None:
        if path not in self.modes:
            return None
        return self._repo.raw("cat-file", "blob", f"{self._commit}:{path}")
