"""Install the newest of the given wheels into this environment, unless it is there already.

    python examples/demo/install.py dist/*.whl

Without dependencies: the environment is locked, and the wheel would ask for the GPU's packages.
"""

import hashlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    wheel = max(map(Path, sys.argv[1:]), key=lambda path: path.stat().st_mtime)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    stamp = Path(sys.prefix) / "branch"
    if stamp.exists() and stamp.read_text() == digest and _is_installed():
        return
    print(f"installing {wheel.name}", flush=True)
    stamp.unlink(missing_ok=True)
    command = [
        Path(sys.prefix) / "bin" / "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
    ]
    command += ["--offline", "--no-deps", "--reinstall", "--compile-bytecode", wheel]
    subprocess.run(command, check=True)
    stamp.write_text(digest)


def _is_installed() -> bool:
    try:
        return bool(version("sglang"))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
