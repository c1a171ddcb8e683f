"""The branch on a fork's HEAD: there, and nothing else moved; or refused, and no trace."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

from unit.patchkit.small import ENGINE, OUR_ROUTER, commit_all, git, snapshot
from unit.patchkit.test_branch import killed

ENGINE_PATH = "python/sglang/srt/engine.py"
ROUTER_PATH = "python/sglang/srt/router.py"
TEST_PATH = "test/registered/rl/test_router.py"


def refused(small, fork, *parts: str) -> None:
    """The command fails, says `parts`, and no byte and no time stamp of the checkout differs."""
    before = snapshot(fork)
    result = small.run("branch", "--onto", fork)
    assert result.code == 1, result.out
    for part in parts:
        assert part in result.err
    assert snapshot(fork) == before


def refs(root) -> dict[str, str]:
    lines = git(root, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return dict(line.split() for line in lines)


def test_the_branch_is_there_and_nothing_else_moved(small, fork):
    (fork / "notes.txt").write_text("untracked\n")
    before, old_refs, head = (
        snapshot(fork, objects=False),
        refs(fork),
        git(fork, "rev-parse", "HEAD"),
    )
    result = small.run("branch", "--onto", fork)
    assert result.code == 0, result.err
    assert "switch routed-experts" in result.out
    new_refs = refs(fork)
    made = new_refs.pop("refs/heads/routed-experts")
    assert new_refs == old_refs
    assert git(fork, "rev-parse", "routed-experts~3") == head
    after = snapshot(fork, objects=False)
    assert after.keys() - before.keys() <= {
        ".git/refs/heads/routed-experts", ".git/logs/refs/heads/routed-experts"
    }  # fmt: skip
    assert {p: after[p] for p in before} == before
    # The same commits as in build/sglang: message, author, date and what they change.
    small.run("branch")
    shape = ("log", "--format=%an %ae %ad %cd%n%B", "--patch", "--full-index")
    assert git(fork, *shape, f"{head}..{made}") == git(small.built, *shape, "base..routed-experts")
    git(fork, "switch", "--quiet", "routed-experts")
    assert git(fork, "status", "--porcelain") == "?? notes.txt"
    assert (fork / ROUTER_PATH).read_text() == OUR_ROUTER


def test_a_fork_that_changed_other_lines_of_the_same_file(small, fork):
    text = ENGINE.replace("class Engine", "THEIRS = 1\n\n\nclass Engine").replace("n)", "n )")
    (fork / ENGINE_PATH).write_text(text)
    commit_all(fork, "theirs")
    assert small.run("branch", "--onto", fork).code == 0
    edited = git(fork, "show", f"routed-experts:{ENGINE_PATH}")
    assert "THEIRS = 1" in edited
    assert "begin(self)" in edited


def test_modes_are_kept(small, fork):
    (fork / ENGINE_PATH).chmod(0o755)
    commit_all(fork, "executable")
    assert small.run("branch", "--onto", fork).code == 0
    assert git(fork, "ls-tree", "routed-experts", ENGINE_PATH).startswith("100755")
    assert git(fork, "ls-tree", "routed-experts", ROUTER_PATH).startswith("100644")


def test_a_detached_head_and_a_linked_work_tree(small, fork, tmp_path):
    linked = tmp_path / "linked"
    git(fork, "worktree", "add", "--quiet", "--detach", str(linked))
    assert small.run("branch", "--onto", linked).code == 0
    assert git(linked, "rev-parse", "routed-experts~3") == git(fork, "rev-parse", "HEAD")


def test_a_changed_file_in_the_work_tree(small, fork):
    (fork / "README.md").write_text("changed\n")
    refused(small, fork, "not committed", "README.md", "commit or stash")


def test_a_changed_file_in_the_index(small, fork):
    (fork / "README.md").write_text("changed\n")
    git(fork, "add", "README.md")
    refused(small, fork, "not committed", "README.md")


def test_an_untracked_file_where_the_branch_adds_one(small, fork):
    (fork / TEST_PATH).parent.mkdir(parents=True)
    (fork / TEST_PATH).write_text("mine\n")
    refused(small, fork, "untracked", TEST_PATH)


def test_not_a_repository(small, tmp_path):
    plain = tmp_path / "plain"
    (plain / "python/sglang").mkdir(parents=True)
    refused(small, plain, "is not a git checkout")
    refused(small, plain / "none", "is not a directory")


def test_a_directory_inside_a_repository(small, fork):
    before = snapshot(fork)
    result = small.run("branch", "--onto", fork / "python")
    assert result.code == 1
    assert "give the root" in result.err
    assert snapshot(fork) == before


def test_a_bare_repository(small, fork, tmp_path):
    git(fork, "clone", "--quiet", "--bare", ".", str(tmp_path / "bare"))
    refused(small, tmp_path / "bare", "is not a git checkout")


def test_a_repository_without_commits(small, tmp_path):
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    refused(small, tmp_path / "empty", "no commit yet")


def test_a_repository_without_sglang(small, fork):
    shutil.rmtree(fork / "python")
    commit_all(fork, "gone")
    refused(small, fork, "no python/sglang")


@pytest.mark.parametrize("name", ["routed-experts", "routed-experts/mine"])
def test_the_branch_is_there_already(small, fork, name):
    git(fork, "branch", name)
    refused(small, fork, f"branch {name} is there already")


def test_a_second_time(small, fork):
    assert small.run("branch", "--onto", fork).code == 0
    refused(small, fork, "branch routed-experts is there already")


def test_a_missing_anchor_and_one_too_many(small, fork):
    text = (
        ENGINE.replace("make_pool(size)", "Pool(size)")
        + "\n    def again(self):\n        self.step(0)\n"
    )
    (fork / ENGINE_PATH).write_text(text)
    commit_all(fork, "theirs")
    refused(
        small, fork,
        f"{ENGINE_PATH}: rule 'sized'", "found 0, expected 1",
        f"{ENGINE_PATH}: rule 'begin'", "rule 'end'", "found 2 (lines 8, 17), expected 1",
    )  # fmt: skip


def test_a_base_file_that_moved(small, fork):
    (fork / "python/sglang/core").mkdir()
    git(fork, "mv", ENGINE_PATH, "python/sglang/core/engine.py")
    commit_all(fork, "moved")
    refused(
        small, fork,
        f"{ENGINE_PATH} is missing. Moved? Perhaps to python/sglang/core/engine.py",
        "3 rules need it",
    )  # fmt: skip


def test_a_file_that_we_replace_whole_and_the_fork_changed(small, fork):
    (fork / ROUTER_PATH).write_text("def route(x):\n    return x  # theirs\n")
    commit_all(fork, "theirs")
    refused(small, fork, ROUTER_PATH, "somebody changed it")


def test_a_file_that_we_replace_whole_and_the_fork_lacks(small, fork):
    git(fork, "rm", "--quiet", ROUTER_PATH)
    commit_all(fork, "gone")
    refused(small, fork, f"{ROUTER_PATH} is missing. Moved?")


def test_a_file_that_we_add_and_the_fork_has(small, fork):
    (fork / "python/sglang/first_stub.py").write_text("THEIRS = 1\n")
    commit_all(fork, "theirs")
    refused(small, fork, "python/sglang/first_stub.py", "somebody changed it")


def test_a_test_of_the_release_is_replaced_if_history_shows_that_it_is_the_release_s(small, fork):
    (fork / TEST_PATH).parent.mkdir(parents=True)
    (fork / TEST_PATH).write_text("released = True\n")
    commit_all(fork, "as released")
    before = snapshot(fork)
    result = small.run("branch", "--onto", fork)
    assert result.code == 1
    assert TEST_PATH in result.err
    assert "git fetch origin tag v1.0.post1" in result.out
    assert snapshot(fork) == before
    git(fork, "tag", "v1.0.post1")
    commit_all(fork, "later work")
    assert small.run("branch", "--onto", fork).code == 0
    assert "def test_router" in git(fork, "show", f"routed-experts:{TEST_PATH}")


def test_a_test_of_the_release_that_the_fork_changed(small, fork):
    git(fork, "tag", "v1.0.post1")
    (fork / TEST_PATH).parent.mkdir(parents=True)
    (fork / TEST_PATH).write_text("theirs = True\n")
    commit_all(fork, "theirs")
    refused(small, fork, TEST_PATH, "somebody changed it")


def test_everything_that_does_not_fit_is_named_at_once(small, fork):
    (fork / ROUTER_PATH).write_text("theirs = 1\n")
    (fork / ENGINE_PATH).write_text("x = 1\n")
    commit_all(fork, "theirs")
    refused(small, fork, "what does not fit (4)", "'begin'", "'sized'", "'end'", ROUTER_PATH)


def test_an_edit_that_leaves_no_python(small, fork):
    (fork / ENGINE_PATH).write_text(ENGINE.replace("self.step(0)", "x = [\n1,\nself.step(0)\n]"))
    commit_all(fork, "theirs")
    refused(small, fork, f"{ENGINE_PATH}: rule 'begin'", "no Python any more")


def test_a_checkout_that_cannot_be_written(small, fork, obeying_modes):
    before = snapshot(fork)
    folders = [p for p in [fork, *fork.rglob("*")] if p.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = obeying_modes(small.command("branch", "--onto", fork))
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 1
    assert str(fork) in done.stderr
    assert "ermission" in done.stderr
    assert snapshot(fork) == before


def test_interrupted_anywhere_it_leaves_the_checkout_as_it_was(small, fork):
    before = snapshot(fork, objects=False)
    after, code = 0, -signal.SIGKILL
    while True:
        code = killed(small, after, "branch", "--onto", fork)
        if code != -signal.SIGKILL:
            break
        assert snapshot(fork, objects=False) == before, f"killed at {after}"
        after += 1
    assert code == 0
    assert after > 5, "it was hardly ever interrupted"
    assert (
        subprocess.run(["git", "fsck"], cwd=fork, capture_output=True, check=False).returncode == 0
    )
