"""Every file of SGLang that calls the capturer finds what it calls, on platforms too that no test runs on."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang
from sglang.srt.layers.moe import routed_experts_capturer

MODULE = routed_experts_capturer.__name__
TREE = Path(sglang.__file__).parent


def callers() -> Iterator[Path]:
    for path in sorted(TREE.rglob("*.py")):
        if "routed_experts_capturer" in path.read_text(errors="replace"):
            yield path


def names_used(tree: ast.AST) -> Iterator[tuple[object, str]]:
    """(object, attribute): what is imported from the module, and what is called on a capturer."""
    capturer = routed_experts_capturer.get_global_experts_capturer()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == MODULE:
            yield from ((routed_experts_capturer, name.name) for name in node.names)
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            if of.endswith(("get_global_experts_capturer()", "self.routed_experts_capturer")):
                yield capturer, node.attr


@pytest.mark.parametrize("path", list(callers()), ids=lambda path: str(path.relative_to(TREE)))
def test_names(path: Path) -> None:
    missing = [
        name for of, name in names_used(ast.parse(path.read_text())) if not hasattr(of, name)
    ]
    assert not missing


def test_there_are_callers() -> None:
    found = [name for path in callers() for _, name in names_used(ast.parse(path.read_text()))]
    assert {"capture_topk_ids", "on_forward_end", "collect"} <= set(found)


def test_without_the_flag_no_kernel_is_read() -> None:
    """Platforms may have a Triton that is too old for them."""
    script = (
        "import sys; import sglang.srt.managers.scheduler, sglang.srt.layers.moe.topk; "
        "sys.exit('sglang.srt.layers.moe.routed_experts.programs' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
