"""The results file: going on with one, what a change of our tree drops, pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from results import Results, ResultsError, merge, paired_ratios

HEADER = {
    "machine": "one GPU",
    "date": "2026-12-01",
    "commit": "c1",
    "tree": "t1",
    "model": "some shape",
    "software": {},
}
SHAPE = {"batch": 64, "input_len": 1024, "output_len": 512}
OFF = {"engine": "ours", "flag": False, "asked": "no", **SHAPE}
ON = {**OFF, "flag": True}
BASE = {**ON, "engine": "base"}


def _two_rounds(results: Results) -> None:
    for name, off, on in (("ours/1", 100.0, 99.0), ("ours/2", 200.0, 199.0)):
        results.add_run(OFF, name, output_tps=off)
        results.add_run(ON, name, output_tps=on)


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    _two_rounds(Results(path, HEADER))
    again = Results(path, {**HEADER, "date": "2026-12-02"})
    assert again.rounds("ours", ON) == 2
    assert again.rounds("peer", ON) == 0
    again.add_run(ON, "ours/3", output_tps=1.0)
    rows = json.loads(path.read_text())["rows"]
    assert [row["output_tps"] for row in rows] == [[100.0, 200.0], [99.0, 199.0, 1.0]]


def test_another_tree_of_ours_drops_what_ours_gave_with_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results(path, HEADER)
    _two_rounds(results)
    results.add_run(BASE, "base/1", output_tps=80.0)
    for engine in ("ours", "peer"):
        key = {"engine": engine, "asked": "int32", "prompt_tokens": 500}
        results.add_stall(key, longest_gap_ms=20.0)
    results.replace("kernels", ("what",), [{"what": "pack", "us": 5.0}])
    later = Results(path, {**HEADER, "commit": "c2", "tree": "t2"})
    kept = [(row["engine"], row["flag"]) for row in later.data["rows"]]
    assert kept == [("ours", False), ("base", True)]
    assert [entry["engine"] for entry in later.data["stall"]] == ["peer"]
    assert later.data["kernels"] == []
    assert later.data["commit"] == "c2"


@pytest.mark.parametrize("field", ["machine", "model"])
def test_another_subject_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.json"
    _two_rounds(Results(path, HEADER))
    before = path.read_text()
    with pytest.raises(ResultsError, match=field):
        Results(path, {**HEADER, field: "other"})
    assert path.read_text() == before


def test_runs_are_paired_by_round(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEADER)
    results.add_run(OFF, "ours/1", output_tps=100.0)
    results.add_run(OFF, "ours/2", output_tps=400.0)
    results.add_run(ON, "ours/2", output_tps=300.0)
    results.add_run(ON, "duel/1", output_tps=1.0)
    on = results.data["rows"][1]
    assert paired_ratios(results.data, on, {"flag": False}, "output_tps") == [0.75]
    assert paired_ratios(results.data, on, {"engine": "peer"}, "output_tps") == []


def test_replace_keeps_the_others(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEADER)
    for tokens, us in ((1, 5.0), (64, 6.0), (1, 4.0)):
        results.replace(
            "kernels", ("what", "tokens"), [{"what": "pack", "tokens": tokens, "us": us}]
        )
    assert [(k["tokens"], k["us"]) for k in results.data["kernels"]] == [(64, 6.0), (1, 4.0)]


def test_merge_joins_rows_and_refuses_another_tree(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{n}.json" for n in (1, 2, 3))
    Results(first, HEADER).add_run(OFF, "ours/1", output_tps=1.0)
    Results(second, HEADER).add_run(OFF, "ours/2", output_tps=2.0)
    kernels = {key: value for key, value in HEADER.items() if key != "model"}
    Results(third, kernels).replace("kernels", ("what",), [{"what": "pack"}])
    merged = merge([first, second, third])
    assert merged["rows"] == [{**OFF, "output_tps": [1.0, 2.0], "round": ["ours/1", "ours/2"]}]
    assert merged["kernels"] == [{"what": "pack"}]
    assert merged["model"] == "some shape"
    Results(third, {**HEADER, "tree": "t2"})
    with pytest.raises(ResultsError, match="another tree"):
        merge([first, third])
    with pytest.raises(ResultsError, match="no results"):
        merge([])
