"""The patches: dist/NNNN-*.patch, one a commit, which `git apply` takes on an untouched base.

In a checkout of SGLang (`python/sglang/...`), from its root:

    git apply dist/*.patch

Where SGLang lies in site-packages, as pip puts it, from that directory (not inside a git
repository: `git apply` would take the paths from its root); `--include` leaves out the registered
tests, which such an installation has no place for:

    cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    git apply -p2 --include='sglang/*' /patches/*.patch
"""

from __future__ import annotations

import shutil
from pathlib import Path

from patchkit import branch
from patchkit.git import BRANCH
from patchkit.project import Project

_NAME = "[0-9][0-9][0-9][0-9]-*.patch"


def build(project: Project) -> list[Path]:
    """Write the commits of the branch as patches to dist/, in place of the last ones there."""
    repo = branch.build(project)
    project.dist.mkdir(exist_ok=True)
    scratch = project.build / "patches"
    with project.lock():
        shutil.rmtree(scratch, ignore_errors=True)
        repo.git(
            "format-patch", "--quiet", "--no-signature", "--no-numbered", "--full-index",
            "--output-directory", str(scratch), f"refs/tags/base..refs/heads/{BRANCH}",
        )  # fmt: skip
        new = sorted(scratch.glob(_NAME))
        for old in {p.name for p in project.dist.glob(_NAME)} - {p.name for p in new}:
            (project.dist / old).unlink()
        patches = [p.replace(project.dist / p.name) for p in new]
    for patch in patches:
        print(patch)
    return patches
