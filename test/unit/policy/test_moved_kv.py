"""Rows stay at the KV slots where a verify forward put them. Where the base then moves the KV, it is refused.

What the base moves, and when, is read from its code: every call of `move_kv_cache`, and the
conditions around it.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang
from sglang.srt.layers.moe.routed_experts.policy import REFUSALS

BASE = Path(sglang.__file__).parent / "srt"
# Algorithm and overlap -> the file whose code runs after the target's verify forward.
VERIFIERS = {
    ("EAGLE", False): "eagle_info.py",
    ("EAGLE3", False): "eagle_info.py",
    ("STANDALONE", False): "eagle_info.py",
    ("EAGLE", True): "eagle_worker_v2.py",
    ("EAGLE3", True): "eagle_worker_v2.py",
    ("STANDALONE", True): "standalone_worker_v2.py",
    ("NGRAM", False): "ngram_info.py",
}
Condition = tuple[str, bool]


@functools.cache
def parsed(word: str) -> dict[Path, ast.Module]:
    """The base's files in which a word occurs."""
    texts = {path: path.read_bytes() for path in BASE.rglob("*.py")}
    return {path: ast.parse(text) for path, text in texts.items() if word.encode() in text}


def moves() -> Iterator[tuple[str, str, str, list[Condition]]]:
    """(file, function, whose KV, conditions) of every call of move_kv_cache outside the KV pools."""
    for path, tree in parsed("move_kv_cache").items():
        if path.parent.name != "mem_cache":
            for found in _moves_in(tree, "", []):
                yield str(path.relative_to(BASE)), *found


def _moves_in(
    node: ast.AST, function: str, conditions: list[Condition]
) -> Iterator[tuple[str, str, list[Condition]]]:
    if isinstance(node, ast.FunctionDef):
        function, conditions = node.name, []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "move_kv_cache":
        yield function, ast.unparse(node.func.value), conditions
    for name, value in ast.iter_fields(node):
        around = conditions
        if isinstance(node, ast.If) and name != "test":
            around = [*conditions, (ast.unparse(node.test), name == "body")]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _moves_in(child, function, around)


def is_called(function: str) -> bool:
    nodes = (node for tree in parsed(function).values() for node in ast.walk(tree))
    return any(isinstance(n, ast.Call) and getattr(n.func, "attr", "") == function for n in nodes)


def may_hold(condition: Condition, page_size: int, topk: int) -> bool:
    """Whether the condition is true for these values, or is about something else."""
    test, holds = condition
    worker = SimpleNamespace(topk=topk, page_size=page_size)
    try:
        return bool(eval(test, {}, {"self": worker, "page_size": page_size})) == holds
    except (NameError, AttributeError):
        return True


def refused(algorithm: str, page_size: int, topk: int) -> bool:
    args = SimpleNamespace(
        speculative_algorithm=algorithm, page_size=page_size, speculative_eagle_topk=topk
    )
    refusal = next(r for r in REFUSALS if r.flag == "--speculative-eagle-topk")
    return refusal.applies(args)


def test_the_base_moves_kv_where_it_did() -> None:
    """Another place would need a verdict of its own."""
    found = {(file, function, whose) for file, function, whose, _ in moves()}
    of_target = "batch.token_to_kv_pool_allocator.get_kvcache()"
    assert found == {
        ("speculative/eagle_info.py", "verify", of_target),
        ("speculative/ngram_info.py", "_free_cache", of_target),
        # A draft's own KV has no rows.
        (
            "speculative/eagle_worker.py",
            "_draft_preprocess_decode",
            "self.draft_model_runner.token_to_kv_pool",
        ),
        # Nobody calls this function: see below.
        (
            "speculative/eagle_worker_v2.py",
            "move_accepted_tokens_to_target_kvcache",
            "self.token_to_kv_pool_allocator.get_kvcache()",
        ),
    }
    assert not is_called("move_accepted_tokens_to_target_kvcache")


@pytest.mark.parametrize(("worker", "file"), VERIFIERS.items(), ids=str)
def test_what_moves_is_refused_and_nothing_else(worker: tuple[str, bool], file: str) -> None:
    algorithm, overlapped = worker
    conditions = [
        conditions
        for found, function, whose, conditions in moves()
        if found == f"speculative/{file}" and "draft" not in whose and is_called(function)
    ]
    for page_size, topk in itertools.product((1, 16, 64), (1, 2, 8)):
        if overlapped and topk > 1:
            continue  # the base does not start: "Spec v2 currently only supports topk = 1"
        moved = any(all(may_hold(c, page_size, topk) for c in each) for each in conditions)
        assert refused(algorithm, page_size, topk) == moved, (page_size, topk)


def test_no_drafts_nothing_moves() -> None:
    assert not refused(None, 16, 8)
