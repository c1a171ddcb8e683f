"""The results file: one JSON that grows with every measurement and is never half written.

    {"machine", "date", "commit", "tree", "model", "software", "server", "server_stall",
     "rows": [{"engine", "flag", "asked", "batch", "input_len", "output_len",
               "output_tps": [..], "ttft_s": [..], "latency_s": [..], "step_ms": [..],
               "answer_mb": [..], "problems": [..], "round": [..]}],
     "stall": [{"engine", "asked", "prompt_tokens", "longest_gap_ms": [..], "quiet_gap_ms": [..],
                "kv_splits": [..] (of runs that had other splits than "server_stall" says)}],
     "profile": [..], "scheduler_time": [..], "kernels": [..], "host_time": [..]}

Lists of one row run in parallel: entry i is one run. Two runs of the same `round` were made right
after one another, with the same prompts; only such runs are compared.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROW_KEY = ("engine", "flag", "asked", "batch", "input_len", "output_len")
STALL_KEY = ("engine", "asked", "prompt_tokens")
_SUBJECT = ("machine", "model")
# What a change of our tree puts out of date. Everything else, the flag off included, stays.
_OURS = ("rows", "stall", "profile", "scheduler_time", "kernels", "host_time")


class ResultsError(RuntimeError):
    """The results cannot be put together."""


class Results:
    """A results file, read at the start if it is there, written after every measurement."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """
        Args:
            path: the file; may exist, and is then continued. What it says of another `tree` of ours
                is dropped.
            header: "machine", "date", "commit", "tree", "model", "software", "server" (arguments),
                "server_stall" (those added where stalls are measured).

        Raises:
            ResultsError: the file holds figures of another machine or model.
        """
        self.path = path
        self.data: dict[str, Any] = dict(header)
        earlier = json.loads(path.read_text()) if path.exists() else {}
        if earlier:
            _check_subject(earlier, header, path)
            self.data |= {k: v for k, v in earlier.items() if isinstance(v, list)}
            if earlier.get("tree") != header.get("tree"):
                print(f"{path} holds figures of another tree of ours: dropped", flush=True)
                for section in _OURS:
                    self.data[section] = [e for e in self.data.get(section, []) if not _is_ours(e)]
        self.data.setdefault("rows", [])
        self.data.setdefault("stall", [])
        self.save()

    def add_run(self, key: Mapping[str, Any], round_name: str, **values: Any) -> None:
        """Append one run to the row of `key`, which names every field of ROW_KEY."""
        self._append(_entry(self.data["rows"], ROW_KEY, key), round=round_name, **values)

    def add_stall(self, key: Mapping[str, Any], **values: Any) -> None:
        """Append one measurement to the entry of `key`, which names every field of STALL_KEY."""
        self._append(_entry(self.data["stall"], STALL_KEY, key), **values)

    def replace(
        self, section: str, same: Sequence[str], entries: Iterable[Mapping[str, Any]]
    ) -> None:
        """Put `entries` in place of those of `section` that agree with one in all of `same`."""
        entries = list(entries)
        new = {tuple(entry.get(name) for name in same) for entry in entries}
        old = self.data.get(section, [])
        kept = [e for e in old if tuple(e.get(name) for name in same) not in new]
        self.data[section] = kept + entries
        self.save()

    def rounds(self, session: str, key: Mapping[str, Any]) -> int:
        """How many rounds of `session` the row of `key` has."""
        row = next((r for r in self.data["rows"] if all(r[f] == key[f] for f in ROW_KEY)), None)
        return sum(name.startswith(f"{session}/") for name in row["round"]) if row else 0

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(_one_line_an_entry(self.data))
        os.replace(part, self.path)

    def _append(self, entry: dict[str, Any], **values: Any) -> None:
        for name, value in values.items():
            entry.setdefault(name, []).append(value)
        self.save()


def merge(files: Iterable[Path]) -> dict[str, Any]:
    """What several results files say together.

    Raises:
        ResultsError: there is no file, or two differ in machine, model or tree of ours.
    """
    merged: dict[str, Any] = {}
    for path in files:
        data = json.loads(path.read_text())
        if merged:
            _check_subject(data, merged, path)
            if data.get("tree") != merged.get("tree"):
                raise ResultsError(f"{path} is of another tree of ours than the files before it")
        for name, value in data.items():
            if name in ("rows", "stall"):
                key = ROW_KEY if name == "rows" else STALL_KEY
                for entry in value:
                    target = _entry(merged.setdefault(name, []), key, entry)
                    for field in entry.keys() - set(key):
                        target[field] = target.get(field, []) + entry[field]
            elif isinstance(value, list):
                merged[name] = merged.get(name, []) + value
            else:
                merged[name] = value
    if not merged:
        raise ResultsError("no results yet: run `make bench` on a machine with a GPU")
    return merged


def paired_ratios(
    data: Mapping[str, Any], row: Mapping[str, Any], reference: Mapping[str, Any], field: str
) -> list[float]:
    """`field` of `row`'s runs over that of the reference's run of the same round.

    Args:
        row: one of data["rows"].
        reference: in what the other side differs from `row`, such as {"flag": False}.
    """
    key = {**{f: row[f] for f in ROW_KEY}, **reference}
    other = next((r for r in data["rows"] if all(r[f] == key[f] for f in ROW_KEY)), None)
    if other is None:
        return []
    by_round = dict(zip(other["round"], other[field]))
    pairs = zip(row["round"], row[field])
    return [value / by_round[name] for name, value in pairs if by_round.get(name)]


def middle(values: Iterable[float]) -> float | None:
    """The median, or None of nothing."""
    values = list(values)
    return statistics.median(values) if values else None


def _entry(
    entries: list[dict[str, Any]], fields: Sequence[str], key: Mapping[str, Any]
) -> dict[str, Any]:
    """The entry that agrees with `key` in all of `fields`, made if it is not there."""
    for entry in entries:
        if all(entry[f] == key[f] for f in fields):
            return entry
    entries.append({f: key[f] for f in fields})
    return entries[-1]


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return entry.get("engine", "ours").startswith("ours") and entry.get("flag", True)


def _check_subject(data: Mapping[str, Any], header: Mapping[str, Any], path: Path) -> None:
    for field in _SUBJECT:
        if field in data and field in header and data[field] != header[field]:
            raise ResultsError(
                f"{path} is of {field} {data[field]!r}, this is of {header[field]!r}: figures of "
                "both do not belong into one table. Name another file, or remove it."
            )


def _one_line_an_entry(data: Mapping[str, Any]) -> str:
    """JSON in which a changed entry is a changed line."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            lines = ",\n".join("  " + json.dumps(entry) for entry in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
