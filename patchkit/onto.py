"""The same commits onto HEAD of somebody's checkout of a fork: a new branch there, or no trace."""

from __future__ import annotations

import hashlib
from pathlib import Path

from patchkit import plan
from patchkit.git import BRANCH, GitError, GitTree, Repo
from patchkit.problem import Problem
from patchkit.project import Ours, Project


def build(project: Project, checkout: Path) -> str:
    """Create branch `routed-experts` on HEAD of `checkout` and return its hash.

    Index, work tree, the branch that is checked out and every other ref stay as they are; objects
    are written only once everything fits.

    Raises:
        Problem: `checkout` is not in a state to take the branch, or a rule or file does not fit it.
    """
    repo = Repo(checkout.absolute())
    head = _refuse(repo)
    tree = GitTree(repo, head)
    ours = project.ours()
    steps = plan.make(tree, ours, project.series, _replaceable(repo, tree, project, ours))
    added = {path for step in steps for path in step.files} - set(tree.paths)
    if blocked := sorted(p for p in added if (repo.root / p).exists()):
        raise Problem(f"{checkout}: untracked, and the branch adds it: {', '.join(blocked)}")
    last = repo.commit_steps(head, steps, project.series)
    # The old value: this must create the branch, not move one that appeared meanwhile.
    repo.git("update-ref", f"refs/heads/{BRANCH}", last, "0" * len(last))
    print(f"{checkout}: branch {BRANCH} ({last[:12]}), {len(steps)} commits on {head[:12]}")
    print(f"to use it: git -C '{checkout}' switch {BRANCH}")
    return last


def _replaceable(
    repo: Repo, tree: GitTree, project: Project, ours: Ours
) -> dict[str, tuple[str, ...]]:
    """`replaces` of the base, and what the checkout's own history shows to be the release's.

    The wheel lacks files that a clone has (its tests), so no hash of theirs is recorded.
    """
    replaces = dict(project.base.replaces)
    tag = f"refs/tags/{project.base.tag}"
    theirs = sorted(p for p in ours.files if p not in replaces and p in tree.paths)
    if theirs and not repo.has(tag):
        print(
            f"{repo.root} lacks the tag {project.base.tag}, which would show whether "
            f"{', '.join(theirs)} is the release's own: git fetch origin tag {project.base.tag}"
        )
    elif theirs:
        released = GitTree(repo, tag)
        for path in theirs:
            replaces[path] = (hashlib.sha256(released.read(path) or b"").hexdigest(),)
    return replaces


def _refuse(repo: Repo) -> str:
    """Stop unless `repo` is a clean checkout of a fork without our branch; return its HEAD."""
    root = repo.root
    if not root.is_dir():
        raise Problem(f"{root} is not a directory: ONTO wants a git checkout of an SGLang fork")
    try:
        top = repo.git("rev-parse", "--show-toplevel")
    except GitError as error:
        raise Problem(
            f"{root} is not a git checkout (a bare repository is none): clone the fork and give "
            f"the clone's directory. {error}"
        ) from None
    if Path(top).resolve() != root.resolve():
        raise Problem(f"{root} is no git checkout of its own, it lies inside {top}: give the root")
    try:
        head = repo.git("rev-parse", "--verify", "HEAD^{commit}")
    except GitError:
        raise Problem(f"{root} has no commit yet: there is nothing to put a branch on") from None
    if taken := repo.git("for-each-ref", "--format=%(refname:short)", f"refs/heads/{BRANCH}"):
        raise Problem(
            f"{root}: branch {taken.split()[0]} is there already: rename or delete it "
            f"(git branch -m {BRANCH} {BRANCH}-old), then try again"
        )
    if changed := repo.changed():
        raise Problem(
            f"{root} has changes that are not committed ({', '.join(changed[:5])}): commit or "
            "stash them"
        )
    if not any(p.startswith("python/sglang/") for p in GitTree(repo, head).paths):
        raise Problem(f"{root} has no python/sglang in HEAD: is this a checkout of SGLang?")
    return head
