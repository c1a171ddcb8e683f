"""This repository on the real base: everything fits, and nothing is left of what does not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from unit.patchkit.small import commit_all, git, snapshot, tree_of
from unit.patchkit.test_patch import applies_everywhere, unpack
from unit.patchkit.test_wheel import check_record, pip, wheel_of


@pytest.fixture
def checkout(real, tmp_path):
    """A git checkout of the base, as a fork of it would begin."""
    root = tmp_path / "checkout"
    unpack(real, root / "python")
    git(root, "init", "--quiet")
    for key, value in (("user.name", "F"), ("user.email", "f@f.invalid")):
        git(root, "config", key, value)
    commit_all(root, "the base")
    return root


def test_everything_fits_and_nothing_is_copied(real):
    result = real.run("check")
    assert result.code == 0, result.err


def test_the_base_is_the_release_untouched_and_a_second_run_changes_nothing(real, tmp_path):
    assert real.run("branch").code == 0
    hashes = [git(real.built, "rev-parse", ref) for ref in ("base", "routed-experts")]
    assert real.run("branch").code == 0
    assert [git(real.built, "rev-parse", ref) for ref in ("base", "routed-experts")] == hashes
    assert real.run("branch", "--out", tmp_path / "fresh").code == 0
    fresh = tmp_path / "fresh"
    assert [git(fresh, "rev-parse", ref) for ref in ("base", "routed-experts")] == hashes
    git(fresh, "checkout", "--quiet", "base")
    released = unpack(real, tmp_path / "released")
    same = subprocess.run(["diff", "-r", released, fresh / "python"], check=False)
    assert same.returncode == 0


def test_patches_apply(real, tmp_path):
    applies_everywhere(real, tmp_path)


def test_the_wheel_installs_and_reports_its_version(real, tmp_path):
    wheel = wheel_of(real)
    check_record(wheel)
    pip("install", "--target", tmp_path, wheel)
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (
        done.stdout.strip() == real.project().base.patched_version == "0.5.10.post1+routedexperts1"
    )


def test_pip_install_of_the_checkout_gives_the_same_wheel(real, tmp_path):
    wheel = wheel_of(real)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", real.root],
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_onto_a_checkout_of_the_base(real, checkout):
    assert real.run("branch").code == 0
    result = real.run("branch", "--onto", checkout)
    assert result.code == 0, result.err
    assert tree_of(checkout, "HEAD") != tree_of(checkout, "routed-experts")
    assert git(checkout, "diff", "HEAD", "routed-experts") == git(
        real.built, "diff", "base", "routed-experts"
    )
    assert git(checkout, "status", "--porcelain") == ""


def test_onto_a_checkout_with_an_altered_anchor_there_is_no_trace(real, checkout):
    edit = real.project().ours().edits[-1]
    file = checkout / edit.path
    # Every name of the file with another letter before it: no anchor is what it was.
    file.write_text(re.sub(r"(?<![\w'\"])([a-z_]{5,})\b(?!['\"])", r"\1x", file.read_text()))
    commit_all(checkout, "altered")
    before = snapshot(checkout)
    result = real.run("branch", "--onto", checkout)
    assert result.code == 1
    assert f"{edit.path}: rule '" in result.err
    assert snapshot(checkout) == before


def test_onto_a_checkout_in_which_a_file_moved_there_is_no_trace(real, checkout):
    edit = next(e for e in real.project().ours().edits if "/srt/" in e.path)
    name = edit.path.rsplit("/", 1)[1]
    git(checkout, "mv", edit.path, f"python/sglang/lang/{name}")
    commit_all(checkout, "moved")
    before = snapshot(checkout)
    result = real.run("branch", "--onto", checkout)
    assert result.code == 1
    assert f"{edit.path} is missing. Moved? Perhaps to python/sglang/lang/" in result.err
    assert snapshot(checkout) == before
