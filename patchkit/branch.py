"""The branch: build/sglang, a git repository with the base (tag `base`) and our commits on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from patchkit import plan
from patchkit.git import BRANCH, Repo
from patchkit.problem import Problem
from patchkit.project import Project

_BUILT = "refs/patchkit/built"  # what the last build left; a branch elsewhere is somebody's work
_BUSY = "patchkit-busy"  # file in .git: a build has begun to move the branch and has not ended


def build(project: Project, out: Path | None = None) -> Repo:
    """Build or update the branch at `out` (default build/sglang).

    Files whose content does not change keep their time stamp. A build that is interrupted is taken
    up by the next. Work of yours in `out` is refused, not overwritten.

    Raises:
        Problem: a rule or a file does not fit, or `out` holds something that no build made.
    """
    out = (out or project.build / "sglang").absolute()
    ours = project.ours()
    with project.lock():
        tree = project.base_tree
        steps = plan.make(tree, ours, project.series, project.base.replaces)
        repo = Repo(out, ours=True)
        _refuse_foreign(repo)
        for leftover in _siblings(out):
            shutil.rmtree(leftover, ignore_errors=True)
        if not _has_base(repo, project):
            _start(project, out)
        head = repo.commit_steps("refs/tags/base", steps, project.series)
        _move(repo, head)
    print(f"{out}: {len(steps)} commits on {project.base.version}, {BRANCH} is {head[:12]}")
    return repo


def _refuse_foreign(repo: Repo) -> None:
    """Stop if `repo` holds what no build of ours put there."""
    if not repo.root.exists():
        return
    if not (repo.root / ".git").exists() or not repo.has(_BUILT):
        raise Problem(f"{repo.root} is not something that patchkit built: move it away")
    if (repo.root / ".git" / _BUSY).exists():
        return  # not somebody's work: an interrupted build
    if changed := repo.changed():
        raise Problem(
            f"{repo.root} has changes that no build made: {', '.join(changed[:5])}. Carry them "
            f"over to python/ in this project, then delete {repo.root}"
        )
    if not repo.has(BRANCH) or repo.git("rev-parse", BRANCH) != repo.git("rev-parse", _BUILT):
        raise Problem(
            f"{repo.root}: branch {BRANCH} has commits that no build made. Give them a branch of "
            f"their own (git branch mine {BRANCH}) and `git reset --hard {_BUILT}`"
        )


def _has_base(repo: Repo, project: Project) -> bool:
    try:
        commit = repo.git("rev-parse", "refs/tags/base")
        return repo.git("config", "patchkit.base") == f"{commit} {_identity(project)}"
    except Problem:
        return False


def _identity(project: Project) -> str:
    """All that the base's commit depends on."""
    series = project.series
    return " ".join((project.base.sha256, series.author, series.email, series.date))


def _siblings(out: Path) -> tuple[Path, Path]:
    """Where a repository is made, and where the one that it replaces waits for its end."""
    return out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")


def _start(project: Project, out: Path) -> None:
    """Put a repository that holds nothing but the base at `out`, whole or not at all."""
    print(f"unpacking {project.base.project} {project.base.version} to {out}", flush=True)
    new, old = _siblings(out)
    new.mkdir(parents=True)
    repo = Repo(new, ours=True)
    repo.git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}")
    for key, value in (("core.autocrlf", "false"), ("core.fileMode", "false"),
                       ("core.excludesFile", os.devnull), ("gc.auto", "0")):  # fmt: skip
        repo.git("config", key, value)
    project.base_tree.unpack(new)
    repo.git("add", "--all", "--force")
    message = f"{project.base.project} {project.base.version}, as released on PyPI\n"
    commit = repo.commit_tree(repo.git("write-tree"), [], message, project.series)
    for ref in ("refs/tags/base", f"refs/heads/{BRANCH}", _BUILT):
        repo.git("update-ref", ref, commit)
    repo.git("config", "patchkit.base", f"{commit} {_identity(project)}")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _move(repo: Repo, head: str) -> None:
    """Bring the branch, the index and the work tree to `head`."""
    busy = repo.root / ".git" / _BUSY
    on_branch = repo.git("rev-parse", "--symbolic-full-name", "HEAD") == f"refs/heads/{BRANCH}"
    if on_branch and repo.git("rev-parse", "HEAD") == head and not busy.exists():
        return
    busy.touch()
    (repo.root / ".git" / "index.lock").unlink(missing_ok=True)
    repo.git("symbolic-ref", "HEAD", f"refs/heads/{BRANCH}")
    repo.git("reset", "--quiet", "--hard", head)
    repo.git("update-ref", _BUILT, head)
    busy.unlink()
