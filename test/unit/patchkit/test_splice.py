"""How each operation lands in a text."""

from __future__ import annotations

import pytest

from patchkit import matcher, splice
from patchkit.edits import OPERATIONS, Edit


def edit(rule, number=0, **operation) -> Edit:
    ((name, text),) = operation.items()
    assert name in OPERATIONS
    rule = {"rule": {"pattern": rule} if isinstance(rule, str) else rule}
    return Edit("x.py", "x.edits.yml:1", f"e{number}", "c", "why", 1, rule, name, text)


def edited(text: str | bytes, *edits: Edit) -> str:
    raw = text.encode() if isinstance(text, str) else text
    found = list(zip(edits, matcher.find(raw, [e.rule for e in edits])))
    assert all(len(matches) == e.matches for e, matches in found), found
    new = splice.apply(raw, splice.plan(raw, found))
    return new.decode()


def test_before_and_after_are_whole_lines_indented_like_the_node():
    text = "def f():\n  if x:\n     go(\n        1,\n     )\n  end()\n"
    new = edited(
        text,
        edit("go($X)", before="a()\nif b:\n    c()\n\nd()\n"),
        edit("go($X)", 1, after="z()"),
    )
    assert new == (
        "def f():\n  if x:\n     a()\n     if b:\n         c()\n\n     d()\n"
        "     go(\n        1,\n     )\n     z()\n  end()\n"
    )


def test_a_node_in_the_middle_of_a_line_takes_the_indentation_of_its_line():
    new = edited(
        "if x:\n    a = 1; go(2)  # why\n",
        edit(
            "go($X)",
            before="b()",
        ),
    )
    assert new == "if x:\n    b()\n    a = 1; go(2)  # why\n"
    new = edited("if x:\n    a = 1; go(2)  # why\n", edit("go($X)", after="b()"))
    assert new == "if x:\n    a = 1; go(2)  # why\n    b()\n"


def test_prepend_and_append_are_inline():
    new = edited("x = go(a, b)\n", edit("a", prepend="q, "), edit("b", 1, append=", c=1"))
    assert new == "x = go(q, a, b, c=1)\n"


def test_fix_substitutes_single_and_multiple_metavariables():
    new = edited(
        "def f():\n    x = go(a, [1, 2], *c)\n",
        edit("$X = go($A, $$$REST)", fix="$X = do($$$REST, was=$A)"),
    )
    assert new == "def f():\n    x = do([1, 2], *c, was=a)\n"


def test_delete_takes_the_whole_lines_of_a_node():
    text = "import a\nimport b\nif x:\n    go(\n        1,\n    )\n    end()\n"
    b = {"kind": "import_statement", "regex": "^import b$"}
    new = edited(text, edit(b, delete=""), edit("go($$$A)", 1, delete=""))
    assert new == "import a\nif x:\n    end()\n"


def test_delete_of_a_node_that_shares_its_line_is_refused():
    for text in ("a = go(1)\n", "go(1); end()\n", "if x: go(1)\n", "go(1)  # why\n"):
        with pytest.raises(splice.Unfit, match="shares its lines"):
            edited(text, edit("go(1)", delete=""))


def test_fix_with_no_argument_for_a_multiple_metavariable_is_empty():
    assert edited("go()\n", edit("go($$$ARGS)", fix="do($$$ARGS)")) == "do()\n"


def test_fix_indents_its_further_lines_like_the_line_of_the_node():
    new = edited("def f():\n    return go(1)\n", edit("go($A)", fix="do(\n    $A,\n)\n"))
    assert new == "def f():\n    return do(\n        1,\n    )\n"


def test_fix_moves_the_lines_of_a_captured_block_with_it():
    text = "def f():\n    for i in a:\n        if i:\n\n            go(i)\n"
    rule = {"pattern": "for $I in $A:\n    $$$BODY"}
    new = edited(text, edit(rule, fix="with c:\n    for $I in $A:\n        $$$BODY\n"))
    assert new == (
        "def f():\n    with c:\n        for i in a:\n            if i:\n\n                go(i)\n"
    )


def test_fix_refuses_to_change_the_inside_of_a_multi_line_string():
    text = 'def f():\n    go("""a\n    b""")\n'
    assert edited(text, edit("go($A)", fix="do($A)")) == 'def f():\n    do("""a\n    b""")\n'
    with pytest.raises(splice.Unfit, match="multi-line string"):
        edited(text, edit("go($A)", fix="if x:\n    do($A)"))


def test_dollars_that_are_no_metavariables_stay():
    assert edited("go(1)\n", edit("go($A)", fix="do('$', '$5', $A)")) == "do('$', '$5', 1)\n"


def test_backslashes_of_text_and_value_stay():
    assert edited(r"go('\n\1')" + "\n", edit("go($A)", fix=r"do('\g<0>\t', $A)")) == (
        r"do('\g<0>\t', '\n\1')" + "\n"
    )


@pytest.mark.parametrize("before", ["", "s = '日本語 é 🦜'\n", "x = '🦜'; "])
def test_multi_byte_characters_before_the_match(before):
    assert edited(f"{before}go('é', a)\n", edit("a", append=", 'ü'")) == (
        f"{before}go('é', a, 'ü')\n"
    )


def test_text_at_one_point_keeps_the_order_of_the_file():
    new = edited("go()\n", *(edit("go()", n, before=f"b{n}()") for n in range(3)))
    assert new == "b0()\nb1()\nb2()\ngo()\n"
    new = edited("go()\n", *(edit("go()", n, after=f"b{n}()") for n in range(3)))
    assert new == "go()\nb0()\nb1()\nb2()\n"
    new = edited("go(a)\n", *(edit("a", n, append=f", b{n}") for n in range(3)))
    assert new == "go(a, b0, b1, b2)\n"


def test_after_one_statement_comes_before_what_is_put_before_the_next():
    text = "if x:\n    go()\nend()\n"
    new = edited(text, edit("end()", before="b()"), edit("go()", 1, after="a()"))
    assert new == "if x:\n    go()\n    a()\nb()\nend()\n"


def test_after_nested_statements_that_end_together_the_inner_one_comes_first():
    text = "if x:\n    go()\n"
    outer = edit({"kind": "if_statement"}, after="outer()")
    assert edited(text, outer, edit("go()", 1, after="inner()")) == (
        "if x:\n    go()\n    inner()\nouter()\n"
    )


def test_a_fix_and_lines_around_it():
    new = edited(
        "go(1)\n", edit("go($A)", fix="do($A)"), edit("go($A)", 1, before="b()"),
        edit("go($A)", 2, after="a()"),
    )  # fmt: skip
    assert new == "b()\ndo(1)\na()\n"


def test_an_edit_inside_what_another_replaces_is_refused():
    with pytest.raises(splice.Unfit, match="'e1' lies inside what 'e0' replaces"):
        edited("go(a)\n", edit("go($A)", fix="do()"), edit("a", 1, append=", b"))
    with pytest.raises(splice.Unfit, match="inside"):
        edited("go(a)\n", edit("go($A)", fix="do()"), edit("go(a)", 1, fix="da()"))


def test_tabs():
    assert edited("if x:\n\tgo()\n", edit("go()", after="a()")) == "if x:\n\tgo()\n\ta()\n"


def test_line_ends_of_windows_are_kept():
    text = b"if x:\r\n    go(1)\r\n    end()\r\n"
    new = edited(text, edit("go($A)", fix="do(\n    $A\n)"), edit("end()", 1, before="b()\n"))
    assert new == "if x:\r\n    do(\r\n        1\r\n    )\r\n    b()\r\n    end()\r\n"


def test_a_file_that_ends_without_a_newline():
    assert edited("if x:\n    go()", edit("go()", after="a()\nb()\n")) == (
        "if x:\n    go()\n    a()\n    b()"
    )


def test_decorators():
    text = "class A:\n    @p\n    def f(self):\n        pass\n"
    function = {"kind": "function_definition"}
    assert "@p\n    @q\n    def f" in edited(text, edit(function, before="@q"))
    decorated = {"kind": "decorated_definition"}
    assert "    g()\n    @p\n" in edited(text, edit(decorated, before="g()"))
    assert edited(text, edit(decorated, after="g()")).endswith("        pass\n    g()\n")


def test_many_matches_of_one_rule():
    e = edit("go($A)", append=".x")
    raw = b"go(1)\ngo(2)\n"
    assert splice.apply(raw, splice.plan(raw, [(e, matcher.find(raw, [e.rule])[0])])) == (
        b"go(1).x\ngo(2).x\n"
    )


def test_a_rule_that_ast_grep_does_not_take_is_told_apart_from_the_others():
    rules = [{"rule": {"pattern": "go()"}}, {"rule": {"kind": "nonsense"}}]
    good, bad = matcher.find(b"go()\n", rules)
    assert len(good) == 1
    assert isinstance(bad, matcher.BadRule)
    assert "nonsense" in str(bad)


def test_constraints():
    rule = {"rule": {"pattern": "go($A)"}, "constraints": {"A": {"regex": "^b$"}}}
    (matches,) = matcher.find(b"go(a)\ngo(b)\n", [rule])
    assert [m.start for m in matches] == [6]


def test_syntax_errors_that_only_the_compiler_sees():
    assert splice.syntax_error(b"x = 1\n", "x") is None
    assert "return" in splice.syntax_error(b"return 1\n", "x")
    assert splice.syntax_error(b"def f(:\n", "x")
