"""dist/*.patch, applied where a user applies them."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from unit.patchkit.small import EDITS, Small, git


def unpack(small: Small, target: Path) -> Path:
    """The base untouched, as pip would lay it into `target`."""
    (wheel,) = (small.root / "build" / "cache").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def applies_everywhere(small: Small, tmp_path: Path) -> None:
    """The patches of `small` give the branch's content in a checkout and in site-packages."""
    result = small.run("patch")
    assert result.code == 0, result.err
    patches = sorted((small.root / "dist").glob("*.patch"))
    assert [str(p) for p in patches] == result.out.splitlines()[-len(patches) :]
    expected = content(small.built / "python")
    unpack(small, tmp_path / "checkout" / "python")
    git(tmp_path / "checkout", "init", "--quiet")
    git(tmp_path / "checkout", "apply", *map(str, patches))
    assert content(tmp_path / "checkout" / "python") == expected
    assert content(tmp_path / "checkout" / "test") == content(small.built / "test")
    site = unpack(small, tmp_path / "site-packages")
    for patch in patches:
        command = ["git", "apply", "-p2", "--include=sglang/*", patch]
        subprocess.run(command, cwd=site, check=True)
    assert content(site) == expected


def test_they_apply_to_an_untouched_base(small, tmp_path):
    applies_everywhere(small, tmp_path)


def test_a_second_run_gives_the_same_and_stale_ones_go(small):
    small.run("patch")
    dist = small.root / "dist"
    (dist / "0009-stale.patch").write_text("old\n")
    (dist / "notes.patch").write_text("somebody's\n")
    first = content(dist)
    small.run("patch")
    assert first.keys() - content(dist).keys() == {"0009-stale.patch"}
    assert all(first[name] == text for name, text in content(dist).items())


def test_settings_of_the_user_do_not_change_them(small, tmp_path, monkeypatch):
    small.run("patch")
    first = content(small.root / "dist")
    settings = tmp_path / "gitconfig"
    settings.write_text("[diff]\n noprefix = true\n[format]\n signOff = true\n suffix = .txt\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    small.run("patch")
    assert content(small.root / "dist") == first


def test_nothing_is_written_when_a_rule_does_not_fit(small):
    small.edits(EDITS.replace("self.step(0)", "self.stop(0)"))
    assert small.run("patch").code == 1
    assert not (small.root / "dist").exists()
