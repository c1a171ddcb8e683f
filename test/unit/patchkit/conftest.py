"""Fixtures: a small project, a fork, the real project, and commands that obey permissions."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from patchkit.project import Project
from unit.patchkit.small import (
    BASE_FILES,
    EDITS,
    OUR_ROUTER,
    ROOT,
    SERIES,
    Small,
    commit_all,
    git,
    make_base,
)


@pytest.fixture
def small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Small:
    """A project with edits, a file that replaces one of the base, a new file and a test."""
    project = Small(tmp_path / "a project" / "with spaces", capsys)
    project.root.mkdir(parents=True)
    make_base(project.root, BASE_FILES)
    project.write("patchkit/series.yml", SERIES)
    project.edits(EDITS)
    project.write("python/sglang/srt/router.py", OUR_ROUTER)
    project.write("python/sglang/first_stub.py", "STUB = True\n")
    project.write("test/registered/rl/test_router.py", "def test_router():\n    pass\n")
    return project


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A checkout of a fork: the small base with commits, a stash, and a branch of its own."""
    root = tmp_path / "the fork's checkout"
    files = {f"python/{n}": t for n, t in BASE_FILES.items() if ".dist-info" not in n}
    for name, text in {**files, "README.md": "a fork\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    git(root, "init", "--quiet", "--initial-branch=main")
    for key, value in (("user.name", "F"), ("user.email", "f@f.invalid")):
        git(root, "config", key, value)
    commit_all(root, "the fork")
    git(root, "branch", "topic")
    (root / "README.md").write_text("stashed\n")
    git(root, "stash", "--quiet")
    return root


@pytest.fixture
def real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Small:
    """A copy of this repository, on the real base (downloaded once into build/cache)."""
    cache = Project(ROOT).base_tree.wheel.parent
    root = tmp_path / "this project"
    for part in ("python", "patchkit", "test", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        root.mkdir(exist_ok=True)
        copy(ROOT / part, root / part)
    (root / "build").mkdir()
    (root / "build" / "cache").symlink_to(cache)
    return Small(root, capsys)


@pytest.fixture
def obeying_modes() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to which permission bits apply, also where the tests run as root."""
    libc = ctypes.CDLL(None, use_errno=True)

    def drop() -> None:
        if os.geteuid() == 0 and libc.prctl(24, 1, 0, 0, 0):  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
            raise OSError(ctypes.get_errno(), "cannot drop CAP_DAC_OVERRIDE")

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, preexec_fn=drop, capture_output=True, text=True, check=False
        )

    return run
