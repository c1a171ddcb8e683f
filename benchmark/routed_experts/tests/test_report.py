"""The report: ratios where there are pairs, losses as they are, markers, a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import report
from results import Results

HEADER = {
    "machine": "one GPU",
    "date": "2026-12-01",
    "commit": "c" * 40,
    "tree": "t",
    "model": "some shape",
    "software": {"torch": "2.11.0"},
}
TIME = {"us": 9.0, "us_p10": 8.0, "us_p90": 10.0}
SHAPE = {"batch": 64, "input_len": 1024, "output_len": 512}


def _results(path: Path) -> dict:
    results = Results(path, HEADER)
    off, on, peer = ("ours", False, 1_000.0), ("ours", True, 990.0), ("peer", True, 1_100.0)
    base = "base", False, 1_250.0
    rounds = {"ours/1": (off, on), "ours/2": (on, off), "duel/1": (on, peer), "off/1": (base, off)}
    for name, servers in rounds.items():
        for engine, flag, tps in servers:
            key = {"engine": engine, "flag": flag, "asked": "no", **SHAPE}
            results.add_run(key, name, output_tps=tps, ttft_s=1.0, latency_s=2.0, problems=[])
    for tokens, gaps in ((500, [20.0, 21.0, 22.0]), (32_000, [70.0, 71.0, 90.0])):
        key = {"engine": "peer", "asked": "int32", "prompt_tokens": tokens}
        for gap in gaps:
            results.add_stall(key, longest_gap_ms=gap, quiet_gap_ms=20.0)
    steps = {"on_forward_end": 64, "on_result": 0, "collect": 32_063}
    entries = [
        {"engine": "ours", "call": call, "tokens": tokens, "us": 20.0}
        for call, tokens in steps.items()
    ]
    results.replace("scheduler_time", ("call",), entries)
    return results.data


def test_figures_tell_wins_and_losses(tmp_path: Path) -> None:
    text = report.figures(_results(tmp_path / "r.json"))
    assert "| ours, not asked | 0.990 (0.990 to 0.990) |" in text
    assert "| ours over 0.5.11, not asked | 0.900 (0.900 to 0.900) |" in text
    assert "| ours over 0.5.10.post1, both without the flag | 0.800 (0.800 to 0.800) |" in text
    assert "0.5.11, not asked |" not in text.replace("over 0.5.11", "")  # it was not paired
    assert "+50.0 ms (71.0, 90.0 at most; 20.0 in the steps before; 21.0 as 500 leave)" in text
    assert "| scheduler's thread, a decode step of 64 |  |  | 40 us |" in text
    assert "commit ccccccccc" in text


def test_published_table(tmp_path: Path) -> None:
    """Changes are taken round by round, against the base with the flag on."""
    results = Results(tmp_path / "r.json", {**HEADER, "server": "--tp-size=4"})
    speeds = {("base", True): (800.0, 900.0), ("ours", True): (1_000.0, 1_080.0)}
    for (engine, flag), runs in speeds.items():
        key = {"engine": engine, "flag": flag, "asked": "no", **SHAPE}
        for i, tps in enumerate(runs):
            times = {"latency_s": 4_000 / tps, "ttft_s": 1.0}
            results.add_run(key, f"published/{i}", output_tps=tps, problems=[], **times)
    text = report.published(results.data)
    assert "| 0.5.10.post1, flag on | 850 |  | 4.72 s |  |" in text
    assert "| ours, flag on | 1,040 | +22.5% | 3.85 s | -18.3% |" in text
    assert "--tp-size=4" in text
    assert "0.5.11, flag on" not in text  # it did not run


def test_drafts_have_lines_and_a_pair_of_their_own(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEADER)
    for engine, on in (("ours", 900.0), ("ours-drafted", 980.0)):
        for flag, tps in ((False, 1_000.0), (True, on)):
            key = {"engine": engine, "flag": flag, "asked": "no", **SHAPE}
            drafts = {"accept_length": 2.99} if engine == "ours-drafted" else {}
            results.add_run(key, "r/1", output_tps=tps, problems=[], **drafts)
    text = report.figures(results.data)
    assert "| ours with drafts, not asked | 0.980 (0.980 to 0.980) |" in text
    assert "| ours, not asked | 0.900 (0.900 to 0.900) |" in text
    assert "2.99 to 2.99 tokens a step" in text


def test_graphs_of_one_process_say_what_the_flag_adds(tmp_path: Path) -> None:
    data = _results(tmp_path / "r.json")
    data["graph_pairs"] = [
        {
            "batch": 64,
            "recordings": [
                {"variant": variant, "added_us": us}
                for variant, us in (("off", -3.0), ("off", 3.0), ("on", 2.0), ("on", 8.0))
            ],
            "kernels": [
                {"name": "ours", "on": [1, 2.64], "off": [0, 0.0]},
                {"name": "another's", "on": [48, 90.0], "off": [48, 60.0]},
            ],
        }
    ]
    text = report.figures(data)
    assert "| kernels added to a decode step of 64 |  |  | 1 |" in text
    assert "| their GPU time |  |  | 2.6 us |" in text
    assert "|  |  | +5 us (+2 to +8; without, -3 to +3) |" in text


def test_kernels_of_another_tree_have_a_date_of_their_own(tmp_path: Path) -> None:
    _results(tmp_path / "r.json")
    kernels = Results(tmp_path / "kernels.json", {**HEADER, "tree": "u", "commit": "d" * 40})
    kernels.replace("host_time", ("what",), [{"what": "collect", "tokens": 1, **TIME}])
    command = [sys.executable, report.__file__, "--results", str(tmp_path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "commit ccccccccc" in text and "One GPU, 2026-12-01, commit ddddddddd." in text


def test_wrong_rows_are_told(tmp_path: Path) -> None:
    data = _results(tmp_path / "r.json")
    data["rows"][0]["problems"][0] = ["request 0 has no rows"]
    assert "In 1 runs rows were wrong or missing" in report.figures(data)


def test_tables_go_between_markers_and_a_picture_is_drawn(tmp_path: Path) -> None:
    _results(tmp_path / "r.json")
    readme = tmp_path / "README.md"
    readme.write_text("# A\n<!-- figures -->\nold\n<!-- /figures -->\nend\n")
    command = [sys.executable, report.__file__, "--results", str(tmp_path), "--into", str(readme)]
    for _ in range(2):
        subprocess.run(command, check=True)
    text = readme.read_text()
    assert text.startswith("# A\n<!-- figures -->\n| output tok/s")
    assert text.endswith("\n<!-- /figures -->\nend\n")
    assert "old" not in text
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_without_results_it_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, report.__file__, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "make bench" in done.stderr
