"""The base: which release of SGLang we build on, fetched once and checked against its hash."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from patchkit import yamlfile
from patchkit.problem import Problem

_LABEL = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*")


@dataclass(frozen=True)
class Base:
    """One release: the wheel, its hash, and the hashes of the files that ours may replace.

    `tag` is the release's tag in SGLang's own repository.
    """

    project: str
    version: str
    tag: str
    wheel: str
    sha256: str
    replaces: Mapping[str, tuple[str, ...]]
    label: str

    @property
    def patched_version(self) -> str:
        """The base's version plus our local label, as the wheel carries it."""
        return f"{self.version}+{self.label}"

    @classmethod
    def load(cls, path: Path) -> Base:
        """Read the base that `bases.yml` points at."""
        data = yamlfile.load(path)
        try:
            version, label = data["base"], data["label"]
            entry = data["bases"][version]
            base = cls(
                project=entry["project"],
                version=version,
                tag=entry["tag"],
                wheel=entry["wheel"],
                sha256=entry["sha256"],
                replaces={p: tuple(h) for p, h in (entry.get("replaces") or {}).items()},
                label=label,
            )
        except (KeyError, TypeError) as error:
            raise Problem(f"{path} lacks {error}; the file's comments say what it holds") from None
        if not _LABEL.fullmatch(label):
            raise Problem(f"{path}: label {label!r} is not lower-case letters and digits")
        return base

    def fetch(self, cache: Path) -> BaseTree:
        """Return the unpacked view of the wheel, downloading it into `cache` if it is not there."""
        target = cache / self.wheel
        if not target.exists() or _sha256(target) != self.sha256:
            self._download(target)
        return BaseTree(target)

    def _download(self, target: Path) -> None:
        print(f"fetching {self.project} {self.version} (once; kept in {target.parent})", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wanted = Path(scratch, "base.txt")
            wanted.write_text(f"{self.project}=={self.version} --hash=sha256:{self.sha256}\n")
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
                 "--only-binary=:all:", "--disable-pip-version-check", "--quiet",
                 "--dest", scratch, "--requirement", str(wanted)],
                capture_output=True, check=False, text=True,
            )  # fmt: skip
            got = Path(scratch, self.wheel)
            if done.returncode or not got.exists():
                raise Problem(
                    f"pip could not fetch {self.project} {self.version}: check the network and "
                    f"pip's index settings, or put {self.wheel} into {target.parent} yourself.\n"
                    + done.stderr.strip()
                )
            os.replace(got, target)


class BaseTree:
    """The files of a wheel as they lie in the branch: `sglang/x.py` is `python/sglang/x.py`."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self._zip = zipfile.ZipFile(wheel)

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(f"python/{n}" for n in self._zip.namelist() if not n.endswith("/"))

    def read(self, path: str) -> bytes | None:
        """The content of `path`, or None if the base has no such file."""
        return self._zip.read(path.removeprefix("python/")) if path in self.paths else None

    def unpack(self, root: Path) -> None:
        """Write every file of the base under `root` (an empty directory)."""
        self._zip.extractall(root / "python")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
