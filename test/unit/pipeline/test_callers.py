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
            if of.endswith(("get_global_experts_capturer()", ".routed_experts_capturer")):
                yield capturer, node.attr


@pytest.mark.parametrize("path", list(callers()), ids=lambda path: str(path.relative_to(TREE)))
def test_names(path: Path) -> None:
    missing = [
        name for of, name in names_used(ast.parse(path.read_text())) if not hasattr(of, name)
    ]
    assert not missing


def test_there_are_callers() -> None:
    found = [name for path in callers() for _, name in names_used(ast.parse(path.read_text()))]
    assert {"capture_topk_ids", "in_graph", "before_graph", "on_forward_end", "collect"} <= set(
        found
    )


def test_every_forward_of_the_scheduler_waits_for_what_it_collects() -> None:
    """Collects run on the schedule stream: a forward on another stream may write the same KV slots."""
    scheduler = ast.parse((TREE / "srt/managers/scheduler.py").read_text())
    on_forward_stream = [
        node
        for node in ast.walk(scheduler)
        if isinstance(node, ast.With)
        and any(ast.unparse(i.context_expr) == "self.forward_stream_ctx" for i in node.items)
    ]
    assert on_forward_stream
    for node in on_forward_stream:
        assert ast.unparse(node.body[0]) == "self.forward_stream.wait_stream(self.schedule_stream)"


def test_without_the_flag_no_kernel_is_read() -> None:
    """Platforms may have a Triton that is too old for them."""
    script = (
        "import sys; import sglang.srt.managers.scheduler, sglang.srt.layers.moe.topk; "
        "sys.exit('sglang.srt.layers.moe.routed_experts.programs' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
