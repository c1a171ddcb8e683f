"""`check`: what it finds, and that it finds nothing where nothing is."""

from __future__ import annotations

import hashlib

from unit.patchkit.small import BASE_FILES, ENGINE, ROUTER, make_base

BODY = ENGINE.partition("class Engine:\n")[2]


def test_a_project_in_order(small):
    result = small.run("check")
    assert result.code == 0, result.err
    assert "3 files and 3 edits fit 1.0.post1" in result.out


def test_lines_of_the_base(small):
    small.write("python/sglang/srt/ours.py", "class Ours:\n    x = 1\n\n" + BODY)
    result = small.run("check")
    assert result.code == 1
    assert "python/sglang/srt/ours.py:4: 6 lines that also stand in the base" in result.err
    assert "python/sglang/srt/engine.py:6" in result.err


def test_lines_of_the_base_with_other_indentation_and_blank_lines(small):
    moved = "\n\n".join(f"    {line.strip()}" for line in BODY.splitlines())
    small.write("test/unit/ours.py", f'"""\n{moved}\n"""\n')
    assert "6 lines that also stand in the base" in small.run("check").err


def test_fewer_lines_are_nobody_s(small):
    five = "\n".join([line for line in BODY.splitlines() if line.strip()][:5])
    small.write("python/sglang/srt/ours.py", f"class Ours:\n{five}\n        return 0\n")
    assert small.run("check").code == 0


def test_imports_and_brackets_are_nobody_s(small):
    files = "import aaaaaaa\nfrom bbbbbbb import c\nimport ddddddd\nx = (\n)\n[\n]\npass\n" * 2
    make_base(small.root, BASE_FILES | {"sglang/imports.py": files})
    small.write("python/sglang/srt/ours.py", files)
    assert small.run("check").code == 0


def test_a_file_of_the_base_that_is_replaced_but_not_declared(small):
    small.write("python/sglang/srt/engine.py", "x = 1\n")
    (small.root / "python/sglang/srt/engine.edits.yml").unlink()
    result = small.run("check")
    assert result.code == 1
    assert "python/sglang/srt/engine.py replaces a file of 1.0.post1" in result.err
    assert hashlib.sha256(ENGINE.encode()).hexdigest() in result.err


def test_a_hash_that_is_not_the_base_s(small):
    bases = small.root / "patchkit/bases.yml"
    known = hashlib.sha256(ROUTER.encode()).hexdigest()
    bases.write_text(bases.read_text().replace(known, "0" * 64))
    assert known in small.run("check").err


def test_a_file_of_ours_that_is_no_python(small):
    small.write("python/sglang/first_stub.py", "def f(:\n")
    assert "python/sglang/first_stub.py: invalid syntax" in small.run("check").err
