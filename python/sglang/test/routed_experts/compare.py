"""Counting differences between two sets of rows."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Tally:
    """How many ids were compared, and how many differed."""

    ids: int = 0
    mismatches: int = 0

    def add(self, rows: np.ndarray | None, expected: np.ndarray) -> None:
        """Compare two arrays [rows, layers, top_k], as sets for each token and layer.

        The order within a set is a matter of taste: equal weights may come in any. Rows that are
        missing or too many count with all their ids.
        """
        found = np.empty((0, *expected.shape[1:]), np.int32) if rows is None else rows
        if found.shape[1:] != expected.shape[1:]:
            raise AssertionError(f"rows of {found.shape[1:]} where {expected.shape[1:]} is right")
        common = min(len(found), len(expected))
        longer = max(len(found), len(expected))
        self.ids += longer * int(np.prod(expected.shape[1:]))
        self.mismatches += (longer - common) * int(np.prod(expected.shape[1:]))
        self.mismatches += different_ids(found[:common], expected[:common])

    def __str__(self) -> str:
        return f"{self.mismatches} / {self.ids} mismatches"


def different_ids(rows: np.ndarray, expected: np.ndarray) -> int:
    """How many ids [rows, layers, top_k] are not in the expected set of their token and layer."""
    rows, expected = np.sort(rows, axis=-1), np.sort(expected, axis=-1)
    suspects = (rows != expected).any(axis=-1)
    rows, expected = rows[suspects], expected[suspects]
    known = (rows[:, :, None] == expected[:, None, :]).any(axis=-1)
    repeated = np.zeros_like(known)
    repeated[:, 1:] = rows[:, 1:] == rows[:, :-1]
    return int((~known | repeated).sum())
