"""The documents say what the code does, and leave no argument and no MoE model out."""

from __future__ import annotations

import dataclasses
from collections import Counter

from sglang.srt.server_args import ServerArgs

from sglang.srt.layers.moe.routed_experts.policy import REFUSALS
from tools import refusals, routing_map


def classified() -> list[str]:
    groups = refusals.read_arguments()
    return [name for section in groups.values() for group in section for name in group["arguments"]]


def refused() -> set[str]:
    return {r.flag[2:].replace("-", "_") for r in REFUSALS if r.flag.startswith("--")}


def test_every_argument_of_the_base_is_refused_allowed_or_unrelated() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    names = Counter(classified()) + Counter(refused())
    assert fields - names.keys() == set(), "say in tools/arguments.yml what these mean for rows"
    assert names.keys() - fields == set(), "the base has no such arguments"
    assert [name for name, count in names.items() if count > 1] == []


def test_refusals_and_documents_use_the_names_that_are_typed() -> None:
    for refusal in REFUSALS:
        if refusal.flag.startswith("--"):
            assert refusals.option(refusal.flag[2:].replace("-", "_")) == f"`{refusal.flag}`"


def test_the_table_of_refusals_is_current() -> None:
    assert refusals.DOCUMENT.read_text() == refusals.document(), "run tools/refusals.py"


def test_the_map_of_routing_paths_is_current() -> None:
    assert routing_map.DOCUMENT.read_text() == routing_map.document(), "run tools/routing_map.py"


def test_the_map_knows_every_file_that_routes() -> None:
    """A plain search of the files must not find more than the syntax trees told."""
    models = routing_map.Models(routing_map.MODELS)
    mapped = {block.file for block in models.blocks.values() if block.topk}
    bypassing = {block.file for block, _ in routing_map.bypassing(models)}
    own = {block.file for block in models.blocks.values() if block.captures_itself}
    assert mapped == files_with("= TopK(")
    assert own == files_with("capture_topk_ids(self, ")
    assert bypassing == {"ernie45_moe_vl"}
    assert files_with("FusedMoE(") - mapped - own - bypassing == set()


def files_with(text: str) -> set[str]:
    return {
        path.relative_to(routing_map.MODELS).with_suffix("").as_posix()
        for path in routing_map.MODELS.rglob("*.py")
        if text in path.read_text(encoding="utf-8-sig")
    }
