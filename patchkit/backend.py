"""The build backend (PEP 517): `pip install .` builds the patched wheel with patchkit itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkit import wheel
from patchkit.problem import Problem
from patchkit.project import Project


class UnsupportedOperation(Exception):
    """Frontends know this name: there is no source distribution of a patched base."""


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Write the wheel to `wheel_directory` and return its file name."""
    try:
        project = Project(Path(__file__).parent.parent)
        return wheel.build(project, Path(wheel_directory)).name
    except Problem as problem:
        raise SystemExit(f"patchkit: {problem}") from None


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Not offered: build wheels from a checkout of this repository."""
    raise UnsupportedOperation("there is no sdist: use `make wheel` in a checkout")
