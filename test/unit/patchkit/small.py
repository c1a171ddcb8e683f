"""A small base and a project on it, made on the spot; git, and what a directory holds."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchkit.__main__ import main
from patchkit.project import Project

ROOT = Path(__file__).resolve().parents[3]

ENGINE = '''\
"""An engine. é日本"""
import os


class Engine:
    def start(self, size):
        self.pool = make_pool(size)
        self.step(0)
        return self.pool

    def step(self, n):
        for i in range(n):
            self.pool.use(i)
        return n
'''
ROUTER = "def route(x):\n    return x\n"
BASE_FILES = {
    "sglang/__init__.py": "",
    "sglang/_version.py": (
        "__version__ = version = '1.0.post1'\n__version_tuple__ = version_tuple = (1, 0, 'post1')\n"
    ),
    "sglang/srt/engine.py": ENGINE,
    "sglang/srt/router.py": ROUTER,
    "sglang/data.json": "{}\n",
    "tools/tag.py": "print()\n",
    "sglang-1.0.post1.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0.post1\n"
        "Requires-Dist: six\n\nVersion: 1.0.post1 is described here.\n"
    ),
    "sglang-1.0.post1.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ),
    "sglang-1.0.post1.dist-info/entry_points.txt": "[console_scripts]\nsgl = tools.tag:main\n",
    "sglang-1.0.post1.dist-info/RECORD": "sglang-1.0.post1.dist-info/RECORD,,\n",
}
SERIES = """\
author: A B <a@b.invalid>
date: 2026-01-01T00:00:00+00:00
commits:
  - {name: first, subject: The first, body: "Why.", files: ["python/sglang/first*"]}
  - {name: second, subject: The second, body: "Why.", files: ["python/sglang/srt/*"]}
  - {name: tests, subject: The tests, body: "Why.", files: ["test/registered/*"]}
"""
# Edits of both commits meet in one file; one is at the same point as another's.
EDITS = """\
# the engine starts and ends a forward
edits:
  - name: begin
    commit: second
    why: it begins here
    matches: 1
    rule: {pattern: self.step(0)}
    before: |
      begin(self)
  - name: sized
    commit: first
    why: a larger pool
    matches: 1
    rule: {pattern: make_pool($SIZE)}
    fix: make_pool(2 * $SIZE)
  - name: end
    commit: second
    why: it ends here
    matches: 1
    rule: {pattern: self.step(0)}
    after: |
      end(self)
"""
OUR_ROUTER = "def route(x):\n    return x + 1\n"


@dataclass
class Result:
    code: int
    out: str
    err: str


@dataclass
class Small:
    """A small project in `root` on a small base, as `patchkit` sees it."""

    root: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def built(self) -> Path:
        return self.root / "build" / "sglang"

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return file

    def edits(self, text: str, path: str = "python/sglang/srt/engine.edits.yml") -> None:
        self.write(path, text)

    def run(self, *args: str | Path) -> Result:
        """Run patchkit in this process."""
        self.capsys.readouterr()
        code = main(["--project", str(self.root), *map(str, args)])
        return Result(code, *self.capsys.readouterr())

    def command(self, *args: str | Path) -> list[str]:
        """The command that runs patchkit in a process of its own (from the repository's root)."""
        return [sys.executable, "-m", "patchkit", "--project", str(self.root), *map(str, args)]

    def project(self) -> Project:
        return Project(self.root)


def make_base(root: Path, files: dict[str, str], version: str = "1.0.post1") -> None:
    """Put a wheel with `files` into the cache of the project at `root`, and name it the base."""
    cache = root / "build" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
    router = hashlib.sha256(files.get("sglang/srt/router.py", "").encode()).hexdigest()
    bases = root / "patchkit" / "bases.yml"
    bases.parent.mkdir(exist_ok=True)
    bases.write_text(
        f"""\
base: {version}
label: ours1
bases:
  {version}:
    project: sglang
    tag: v{version}
    wheel: {wheel.name}
    sha256: {hashlib.sha256(wheel.read_bytes()).hexdigest()}
    replaces:
      python/sglang/srt/router.py: [{router}]
"""
    )


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {args}: {done.stderr}"
    return done.stdout.strip()


def commit_all(root: Path, message: str) -> None:
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--allow-empty", "--message", message)


def snapshot(root: Path, objects: bool = True) -> dict[str, tuple[int, bytes]]:
    """Every file under `root` with time stamp and content: index, refs, reflogs, work tree.

    Without `objects`, loose objects (unreachable ones harm nobody) are left out.
    """
    return {
        str(p.relative_to(root)): (p.lstat().st_mtime_ns, p.read_bytes())
        for p in sorted(root.rglob("*"))
        if p.is_file() and (objects or ".git/objects/" not in p.as_posix())
    }


def tree_of(root: Path, ref: str) -> str:
    return git(root, "rev-parse", f"{ref}^{{tree}}")
