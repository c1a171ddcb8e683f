"""The wheel: installs over the official one, and says what it is."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from unit.patchkit.small import OUR_ROUTER, Small, snapshot

INFO = "sglang-1.0.post1+ours1.dist-info"


def wheel_of(small: Small) -> Path:
    result = small.run("wheel")
    assert result.code == 0, result.err
    (wheel,) = (small.root / "dist").glob("*.whl")
    assert str(wheel) == result.out.splitlines()[-1]
    return wheel


def pip(*args: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", *args, "--quiet", "--no-compile", "--no-deps", "--no-index",
         "--disable-pip-version-check", "--root-user-action=ignore"],
        check=True,
        # The tree under test has metadata of its own, which pip would take for what is installed.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip


def check_record(wheel: Path) -> None:
    """RECORD names every file of the wheel, once, with its hash and size."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        assert sorted(r[0] for r in rows) == sorted(archive.namelist())
        assert rows[-1] == [record, "", ""]
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            assert (digest, size) == (f"sha256={expected.decode()}", str(len(content))), name


def test_content(small):
    wheel = wheel_of(small)
    assert wheel.name == "sglang-1.0.post1+ours1-py3-none-any.whl"
    check_record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("sglang/srt/router.py").decode() == OUR_ROUTER
        assert b"begin(self)" in archive.read("sglang/srt/engine.py")
        assert archive.read("sglang/first_stub.py") == b"STUB = True\n"
        metadata = archive.read(f"{INFO}/METADATA").decode()
        assert "\nVersion: 1.0.post1+ours1\n" in metadata
        assert "Requires-Dist: six\n\nVersion: 1.0.post1 is described" in metadata
        scope: dict = {}
        exec(archive.read("sglang/_version.py"), scope)
    assert scope["__version__"] == "1.0.post1+ours1"
    assert scope["__version_tuple__"] == (1, 0, "post1", "ours1")
    assert {"tools/tag.py", f"{INFO}/entry_points.txt", f"{INFO}/WHEEL"} <= names
    assert not any(n.startswith(("test/", "sglang-1.0.post1.dist-info")) for n in names)


def test_same_input_same_bytes(small):
    first = wheel_of(small).read_bytes()
    assert wheel_of(small).read_bytes() == first


def test_an_empty_file_of_ours_replaces_one_that_is_not(small):
    small.write("python/sglang/srt/router.py", "")
    with zipfile.ZipFile(wheel_of(small)) as archive:
        assert archive.read("sglang/srt/router.py") == b""


def test_it_installs_over_the_base(small, tmp_path):
    (base,) = (small.root / "build/cache").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    pip("--python", python, "install", base)
    pip("--python", python, "install", wheel_of(small))
    code = (
        "import importlib.metadata as m, sglang._version as v, sglang.srt.router as r; "
        "print(m.version('sglang'), v.version, r.route(1))"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0.post1+ours1", "1.0.post1+ours1", "2"]
    assert [p.name for p in (tmp_path / "env").rglob("sglang*.dist-info")] == [INFO]


def test_nothing_is_written_when_a_rule_does_not_fit(small):
    wheel_of(small)
    before = snapshot(small.root / "dist")
    (small.root / "python/sglang/srt/router.py").write_text("def route(")
    small.edits("# x\nedits: [{}]\n")
    assert small.run("wheel").code == 1
    assert snapshot(small.root / "dist") == before
