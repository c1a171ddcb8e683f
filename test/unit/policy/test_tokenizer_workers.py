"""The patch of uvicorn's health check, which has a limit of its own."""

from __future__ import annotations

import pytest
from sglang.srt.managers.multi_tokenizer_mixin import monkey_patch_uvicorn_multiprocessing
from uvicorn.supervisors import multiprocess


def test_the_limit_is_ours_whoever_asks_and_however_often_it_was_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    class Process:
        def is_alive(self, timeout: float = 5) -> bool:
            limits.append(timeout)
            return True

    monkeypatch.setattr(multiprocess, "Process", Process)
    for _ in range(2):
        monkey_patch_uvicorn_multiprocessing(timeout=30)
    assert Process().is_alive() and Process().is_alive(5) and Process().is_alive(timeout=5)
    assert limits == [30, 30, 30]
