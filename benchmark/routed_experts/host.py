"""What stands beside every figure: the machine, its software, and which tree of ours ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "sglang-kernel", "numpy", "aiohttp")


def header(tree: Path, site: Path | None, device: str, gpus: int = 1) -> dict[str, Any]:
    """The head of a results file.

    Args:
        tree: our tree, built: where prepare.sh unpacked it, or build/sglang.
        site: folder of packages that the servers use beside the interpreter's.
        device: "cuda" or "cpu".
        gpus: on how many of them a server runs.
    """
    commit, built = identity(tree)
    return {
        "machine": machine(device, gpus),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "tree": built,
        "software": software(site, device),
    }


def identity(tree: Path) -> tuple[str, str]:
    """(this repository's commit, the hash of the tree that was built from it)."""
    noted = tree / "COMMIT"  # written by prepare.sh, for a host that has no repository
    if noted.exists():
        commit, built = noted.read_text().split()
        return commit, built
    return _git(Path(__file__).parent, "HEAD"), _git(tree, "HEAD:python")


def machine(device: str, gpus: int = 1) -> str:
    """The accelerator's name as its driver says it, or the processor's."""
    if device == "cpu":
        return f"CPU engine, {platform.machine()}"
    return f"{'one' if gpus == 1 else gpus} {_nvidia_smi('name')}"


def software(site: Path | None, device: str) -> dict[str, str]:
    """Versions as the servers see them: those of `site` come first."""
    path = [str(site), *sys.path] if site else sys.path
    found = {
        d.metadata["Name"].lower(): d.version
        for d in reversed(list(importlib.metadata.distributions(path=path)))
    }
    driver = {"driver": _nvidia_smi("driver_version")} if device == "cuda" else {}
    versions = {name: found[name] for name in _PACKAGES if name in found}
    return {"python": platform.python_version(), **versions, **driver}


def _nvidia_smi(field: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: no NVIDIA GPU here ({error}); --device cpu tries the scripts without one")
    return answer.stdout.splitlines()[0].strip()


def _git(folder: Path, revision: str) -> str:
    command = ["git", "-C", str(folder), "rev-parse", revision]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
