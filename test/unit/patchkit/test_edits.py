"""What an edits file may say, and what is said of one that is not in order."""

from __future__ import annotations

import pytest

from unit.patchkit.small import EDITS, git

GOOD = """\
# what for
edits:
  - name: one
    commit: first
    why: because
    matches: 1
    rule: {pattern: self.step(0)}
    before: one()
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# what for\n", ""), "first line must be a comment"),
        (("edits:", "edit:"), "wants one key, `edits`"),
        (("  - name: one\n    ", "  - "), "`name` must be text"),
        (("name: one", "name: One Two"), "`name` must be kebab-case"),
        (("commit: first", "commit: third"), "commit 'third' is none of first, second, tests"),
        (("why: because", "why: ''"), "`why` must be text"),
        (("    matches: 1\n", ""), "`matches` must say how many"),
        (("matches: 1", "matches: 0"), "`matches` must say how many"),
        (("matches: 1", "matches: true"), "`matches` must say how many"),
        (("{pattern: self.step(0)}", "self.step(0)"), "`rule` must be an ast-grep rule object"),
        (("    before: one()\n", ""), "wants exactly one of before, after, prepend, append, fix"),
        (("before: one()", "delete: yes please"), "`delete` must be true"),
        (("before: one()", "before: one()\n    delete: true"), "exactly one of"),
        (("before: one()", "before: one()\n    after: two()"), "exactly one of"),
        (("before: one()", "before: ''"), "`before` must be text"),
        (("before: one()", "before: one()\n    color: red"), "unknown key `color`"),
        (("before: one()", "before: one()\n    before: two()"), "the key 'before' stands twice"),
        (("before: one()", "fix: two($A)"), "`fix` uses $A, which the rule does not capture"),
        (("before: one()", 'before: "1\\n2\\n3\\n4\\n5\\n6"'), "inserts 6 lines, at most 5"),
        (("before: one()", "before: [one"), "is not the YAML that patchkit reads"),
    ],
)
def test_what_is_not_in_order(small, change, message):
    assert GOOD.count(change[0]) == 1
    small.edits(GOOD.replace(*change))
    result = small.run("branch")
    assert result.code == 1
    assert message in result.err
    assert "python/sglang/srt/engine.edits.yml" in result.err
    assert not small.built.exists()


def test_one_name_twice(small):
    small.edits(GOOD + GOOD.partition("edits:\n")[2])
    assert "the name stands twice" in small.run("branch").err


def test_all_faults_are_named_at_once(small):
    small.edits(GOOD.replace("why: because", "").replace("matches: 1", ""))
    small.edits(GOOD.replace("commit: first", "commit: none"), "python/sglang/srt/b.edits.yml")
    err = small.run("branch").err
    assert "`why` must be text" in err
    assert "`matches` must say" in err
    assert "commit 'none'" in err


def test_five_lines_are_a_seam(small):
    small.edits(GOOD.replace("before: one()", 'before: "1\\n2\\n3\\n4\\n5\\n"'))
    assert small.run("branch").code == 0


def test_lines_that_are_only_a_metavariable_do_not_count(small):
    fix = 'fix: "if 1:\\n    self.step(\\n        $A\\n    )"'
    text = GOOD.replace("self.step(0)", "self.step($A)").replace("before: one()", fix)
    small.edits(text)
    assert small.run("branch").code == 0
    assert "| 3 |" in small.run("seams").out


def test_a_file_that_is_whole_and_edited(small):
    small.edits(EDITS, "python/sglang/srt/router.edits.yml")
    err = small.run("branch").err
    assert "router.edits.yml: router.py beside it is ours, whole" in err


def test_a_file_that_belongs_to_no_commit(small):
    small.write("python/sglang/unknown.py", "x = 1\n")
    err = small.run("branch").err
    assert "python/sglang/unknown.py: fits the `files` of no commit in patchkit/series.yml" in err


def test_caches_of_python_are_not_ours(small):
    small.write("python/sglang/__pycache__/x.cpython-311.pyc", "x")
    assert small.run("branch").code == 0


def test_a_file_belongs_to_the_last_commit_that_it_fits(small):
    small.write("python/sglang/first_later.py", "x = 1\n")
    series = small.root / "patchkit/series.yml"
    series.write_text(
        series.read_text().replace("srt/*", "srt/*', 'python/sglang/*_later.py").replace('"', "'")
    )
    assert small.run("branch").code == 0
    shown = git(small.built, "show", "--format=%s", "--name-only", "routed-experts~1")
    assert shown.splitlines()[0] == "The second"
    assert "python/sglang/first_later.py" in shown.splitlines()
