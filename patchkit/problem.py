"""The one exception that patchkit raises on purpose: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class Problem(Exception):
    """A message for the person at the keyboard; the command ends with exit status 1."""


def refuse_all(problems: Iterable[str], headline: str) -> None:
    """Raise one `Problem` that lists every entry of `problems`, or return if there are none."""
    found = list(problems)
    if found:
        raise Problem("\n".join([headline, *(f"  - {p}" for p in found)]))
