"""The table of the seams, and README.md, which shows it."""

from __future__ import annotations

from unit.patchkit.small import EDITS

TABLE = """\
| base file | rule | why | lines inserted |
|---|---|---|---:|
| `srt/engine.py` | `begin` | it begins here | 1 |
|  | `sized` | a larger pool | 1 |
|  | `end` | it ends here | 1 |
| `srt/router.py` | whole file | ours in its place; a fork's own version is refused | 2 |

3 lines at 3 seams in 1 files of the base."""


def test_it_is_printed_and_put_into_the_readme(small):
    readme = small.write("README.md", "# A\n\n<!-- seams -->\nold\n<!-- /seams -->\n\nafter é\n")
    result = small.run("seams")
    assert result.code == 0
    assert result.out == TABLE + "\n"
    expected = f"# A\n\n<!-- seams -->\n{TABLE}\n<!-- /seams -->\n\nafter é\n"
    assert readme.read_text(encoding="utf-8") == expected
    assert small.run("seams", "--check").code == 0
    small.run("seams")
    assert readme.read_text(encoding="utf-8") == expected


def test_a_stale_readme(small):
    readme = small.write("README.md", "<!-- seams -->\n<!-- /seams -->\n")
    small.run("seams")
    small.edits(EDITS.replace("a larger pool", "a pool | twice"))
    before = readme.read_text()
    result = small.run("seams", "--check")
    assert result.code == 1
    assert "run `make seams`" in result.err
    assert readme.read_text() == before
    assert "a pool \\| twice" in small.run("seams").out


def test_a_readme_without_a_place_for_it(small):
    assert small.run("seams").code == 0
    assert not (small.root / "README.md").exists()
    small.write("README.md", "nothing\n")
    assert small.run("seams").code == 0
    assert (small.root / "README.md").read_text() == "nothing\n"
    assert "has no place for the table" in small.run("seams", "--check").err


def test_lines_count_once_a_match(small):
    text = EDITS.replace(
        "matches: 1\n    rule: {pattern: self.step(0)}\n    after",
        "matches: 2\n    rule: {pattern: self.step(0)}\n    after",
    )
    small.edits(text)
    assert "| `end` | it ends here | 2 |" in small.run("seams").out
