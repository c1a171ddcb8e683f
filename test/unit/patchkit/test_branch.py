"""build/sglang: what is in it, that it is the same each time, that a build can be interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

import patchkit.git
from patchkit.__main__ import main
from unit.patchkit.small import (
    BASE_FILES,
    EDITS,
    OUR_ROUTER,
    ROOT,
    git,
    make_base,
    snapshot,
    tree_of,
)

ENGINE_PATH = "python/sglang/srt/engine.py"


def test_commits_in_order_on_the_base_as_it_was_released(small):
    result = small.run("branch")
    assert result.code == 0, result.err
    subjects = git(small.built, "log", "--reverse", "--format=%s", "base..routed-experts")
    assert subjects.splitlines() == ["The first", "The second", "The tests"]
    assert git(small.built, "rev-list", "--count", "base") == "1"
    for name, text in BASE_FILES.items():
        released = subprocess.run(
            ["git", "show", f"base:python/{name}"], cwd=small.built, capture_output=True, check=True
        )
        assert released.stdout.decode() == text
    assert git(small.built, "status", "--porcelain", "--ignored") == ""
    assert (small.built / "python/sglang/srt/router.py").read_text() == OUR_ROUTER
    assert (small.built / "test/registered/rl/test_router.py").exists()


def test_each_commit_has_its_own_edits_of_a_file_that_several_edit(small):
    small.run("branch")
    first, second = (
        git(small.built, "show", f"{ref}:{ENGINE_PATH}") for ref in ("base~0", "routed-experts~1")
    )
    after_first = git(small.built, "show", f"routed-experts~2:{ENGINE_PATH}")
    assert "2 * size" not in first
    assert "make_pool(2 * size)" in after_first
    assert "begin(self)" not in after_first
    assert "        begin(self)\n        self.step(0)\n        end(self)\n" in second
    assert "make_pool(2 * size)" in second


def test_a_second_run_changes_nothing(small):
    small.run("branch")
    before, refs = snapshot(small.built, objects=False), git(small.built, "show-ref")
    result = small.run("branch")
    assert result.code == 0
    assert snapshot(small.built, objects=False) == before
    assert git(small.built, "show-ref") == refs


def test_same_input_same_hashes_wherever_it_is_built(small, tmp_path):
    small.run("branch")
    small.run("branch", "--out", tmp_path / "elsewhere")
    for ref in ("base", "routed-experts"):
        assert git(small.built, "rev-parse", ref) == git(tmp_path / "elsewhere", "rev-parse", ref)


def test_an_update_gives_what_a_fresh_build_gives_and_rewrites_only_what_changed(small, tmp_path):
    small.run("branch")
    before = snapshot(small.built / "python")
    small.write("python/sglang/srt/router.py", "def route(x):\n    return 2\n")
    small.run("branch")
    after = snapshot(small.built / "python")
    assert {p for p in after if after[p] != before[p]} == {"sglang/srt/router.py"}
    small.run("branch", "--out", tmp_path / "fresh")
    assert git(small.built, "rev-parse", "HEAD") == git(tmp_path / "fresh", "rev-parse", "HEAD")


def test_what_is_taken_out_of_the_project_goes_from_the_branch(small):
    small.run("branch")
    (small.root / "python/sglang/srt/router.py").unlink()
    (small.root / "python/sglang/first_stub.py").unlink()
    (small.root / "python/sglang/srt/engine.edits.yml").unlink()
    small.run("branch")
    assert (small.built / "python/sglang/srt/router.py").read_text() == (
        BASE_FILES["sglang/srt/router.py"]
    )
    assert not (small.built / "python/sglang/first_stub.py").exists()
    assert git(small.built, "diff", "--stat", "base", "HEAD", "--", "python") == ""


def test_another_base(small):
    small.run("branch")
    old = git(small.built, "rev-parse", "base")
    files = {n.replace("1.0.post1", "1.1"): t for n, t in BASE_FILES.items()}
    make_base(small.root, files | {"sglang/new.py": "x = 1\n"}, "1.1")
    result = small.run("branch")
    assert result.code == 0, result.err
    assert git(small.built, "rev-parse", "base") != old
    assert (small.built / "python/sglang/new.py").exists()
    assert git(small.built, "status", "--porcelain") == ""


def test_a_damaged_wheel_in_the_cache_is_not_used(small, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (wheel,) = (small.root / "build/cache").iterdir()
    wheel.write_bytes(wheel.read_bytes() + b"damage")
    result = small.run("branch")
    assert result.code == 1
    assert "pip could not fetch sglang 1.0.post1" in result.err
    assert not small.built.exists()


def test_a_rule_that_does_not_fit_leaves_the_branch_as_it_was(small):
    small.run("branch")
    before = snapshot(small.built)
    small.edits(EDITS.replace("self.step(0)", "self.stop(0)").replace("make_pool($", "range($"))
    result = small.run("branch")
    assert result.code == 1
    assert "what does not fit (2), and nothing was changed" in result.err
    for rule, line in (("begin", 3), ("end", 16)):
        assert (
            f"{ENGINE_PATH}: rule '{rule}' (python/sglang/srt/engine.edits.yml:{line}) "
            "found 0, expected 1"
        ) in result.err
    assert snapshot(small.built) == before


def test_a_rule_that_ast_grep_does_not_take(small):
    small.edits(EDITS.replace("{pattern: self.step(0)}", "{kind: nonsense}"))
    result = small.run("branch")
    assert result.code == 1
    assert "rule 'begin'" in result.err
    assert "Kind `nonsense` is invalid" in result.err
    assert not small.built.exists()


def test_work_in_the_built_tree_is_refused_not_overwritten(small):
    small.run("branch")
    (small.built / ENGINE_PATH).write_text("mine\n")
    before = snapshot(small.built)
    result = small.run("branch")
    assert result.code == 1
    assert ENGINE_PATH in result.err
    assert "changes that no build made" in result.err
    assert snapshot(small.built) == before


def test_commits_on_the_built_branch_are_refused_not_dropped(small):
    small.run("branch")
    git(small.built, "-c", "user.name=I", "-c", "user.email=i@i.invalid",
        "commit", "--quiet", "--allow-empty", "--message", "mine")  # fmt: skip
    head = git(small.built, "rev-parse", "HEAD")
    result = small.run("branch")
    assert result.code == 1
    assert "commits that no build made" in result.err
    assert git(small.built, "rev-parse", "HEAD") == head


def test_a_directory_that_is_not_ours_is_left_alone(small, fork):
    (small.root / "build" / "sglang").mkdir()
    (small.root / "build" / "sglang" / "file").write_text("mine\n")
    result = small.run("branch")
    assert result.code == 1
    assert "not something that patchkit built" in result.err
    before = snapshot(fork)
    assert small.run("branch", "--out", fork).code == 1
    assert snapshot(fork) == before


def test_a_branch_that_is_checked_out_elsewhere_comes_back(small):
    small.run("branch")
    git(small.built, "checkout", "--quiet", "base")
    assert small.run("branch").code == 0
    assert git(small.built, "symbolic-ref", "--short", "HEAD") == "routed-experts"
    assert git(small.built, "status", "--porcelain") == ""


def test_a_read_only_target(small, obeying_modes):
    build = small.root / "build"
    (build / ".lock").touch()
    build.chmod(0o555)
    try:
        done = obeying_modes(small.command("branch"))
    finally:
        build.chmod(0o755)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert "check that the directory is writable" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in build.iterdir()) == [".lock", "cache"]
    assert small.run("branch").code == 0


def test_neither_settings_nor_environment_of_the_caller_change_the_result(
    small, tmp_path, monkeypatch
):
    small.run("branch")
    expected = git(small.built, "rev-parse", "HEAD")
    settings = tmp_path / "gitconfig"
    settings.write_text("[core]\n autocrlf = true\n[commit]\n gpgSign = true\n[init]\n x = y\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-repository"))
    result = small.run("branch", "--out", tmp_path / "again")
    monkeypatch.undo()
    assert result.code == 0, result.err
    assert git(tmp_path / "again", "rev-parse", "HEAD") == expected
    assert git(tmp_path / "again", "status", "--porcelain") == ""


def test_builds_at_the_same_time_wait_for_each_other(small):
    several = [
        subprocess.Popen(small.command("branch"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [process.communicate(timeout=60)[1] for process in several]
    assert [p.returncode for p in several] == [0, 0, 0], errors
    assert git(small.built, "status", "--porcelain") == ""


# Git commands that read, or write objects more or less, which nobody sees.
UNSEEN = {"rev-parse", "ls-tree", "cat-file", "status", "hash-object", "write-tree", "update-index"}


def killed(small, after: int, *args) -> int:
    """Run patchkit in a process that ends, as by `kill -9`, at its `after`-th step that can be seen
    on the disk; return its exit status (negative: the signal)."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    steps = iter(range(after))

    def counted(call):
        def wrapper(*args, **kwargs):
            if not {str(a) for a in args} & UNSEEN and next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    # From here on this is the child, and nothing that it changes comes back.
    code = 2
    try:
        tempfile.tempdir = str(small.root.parent)
        patchkit.git.Repo.raw = counted(patchkit.git.Repo.raw)
        for name in ("rename", "mkdir", "touch", "unlink"):
            setattr(Path, name, counted(getattr(Path, name)))
        shutil.rmtree = counted(shutil.rmtree)
        code = main(["--project", str(small.root), *map(str, args)])
    finally:
        os._exit(code)


@pytest.mark.parametrize("update", [False, True], ids=["first build", "update"])
def test_the_next_build_takes_up_an_interrupted_one(small, tmp_path, update):
    if update:
        small.write("python/sglang/srt/router.py", "def route(x):\n    return 0\n")
        small.run("branch")
        small.write("python/sglang/srt/router.py", OUR_ROUTER)
    start = tmp_path / "start"
    subprocess.run(["cp", "-a", small.root / "build", start], check=True)
    assert small.run("branch", "--out", tmp_path / "whole").code == 0
    expected = git(tmp_path / "whole", "rev-parse", "HEAD")
    after, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        subprocess.run(["rm", "-rf", small.root / "build"], check=True)
        subprocess.run(["cp", "-a", start, small.root / "build"], check=True)
        code = killed(small, after, "branch")
        result = small.run("branch")
        assert result.code == 0, f"killed at {after}: {result.err}"
        assert git(small.built, "rev-parse", "routed-experts", "HEAD").split() == [expected] * 2
        assert git(small.built, "status", "--porcelain") == ""
        assert sorted(p.name for p in (small.root / "build").iterdir()) == [
            ".lock", "cache", "sglang"
        ]  # fmt: skip
        after += 1
    assert code == 0
    assert after > 10, "the build was hardly ever interrupted"


def test_an_interrupted_checkout_is_finished(small):
    """Killed within git: a lock left behind, some files written, others not."""
    small.run("branch")
    expected = git(small.built, "rev-parse", "HEAD"), tree_of(small.built, "HEAD")
    (small.built / ".git/patchkit-busy").touch()
    (small.built / ".git/index.lock").touch()
    (small.built / ENGINE_PATH).write_text("half of i")
    (small.built / "python/sglang/first_stub.py").unlink()
    git(small.built, "update-ref", "--no-deref", "refs/heads/routed-experts", "base")
    result = small.run("branch")
    assert result.code == 0, result.err
    assert (git(small.built, "rev-parse", "HEAD"), tree_of(small.built, "HEAD")) == expected
    assert git(small.built, "status", "--porcelain") == ""
