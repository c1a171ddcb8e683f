"""Timing on the GPU by replays of CUDA graphs, and of the host by its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_SAMPLES = 40


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median, and between which values 80% of the samples lie."""

    us: float
    us_p10: float
    us_p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        cuts = np.percentile(np.array(seconds) * 1e6, (50, 10, 90)).round(3)
        return cls(*map(float, cuts))


def gpu_time(device: str, launch: Callable[[int], None], repeat: int) -> Timing:
    """Time of one of `launch(0)`, .. `launch(repeat - 1)`, a CUDA graph that is replayed often.

    On device "cpu", where this only tries a script, the calls are timed by the host's clock.
    """
    if device == "cpu":
        return Timing.of([_wall(launch, 1)])
    for i in range(repeat):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeat):
            launch(i)
    for _ in range(3):
        graph.replay()
    return Timing.of([_replay(graph, repeat) for _ in range(_SAMPLES)])


def host_time(device: str, call: Callable[[], None], repeat: int, every: int) -> Timing:
    """Time that `call` keeps the host's thread, without what it leaves to the GPU.

    Args:
        every: calls after which the GPU may catch up, so that its queue is never full.
    """
    seconds = []
    repeat = repeat if device == "cuda" else 3
    for i in range(repeat):
        if device == "cuda" and i % every == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return Timing.of(seconds[repeat // 10 :])


def _wall(launch: Callable[[int], None], repeat: int) -> float:
    begin = time.perf_counter()
    for i in range(repeat):
        launch(i)
    return (time.perf_counter() - begin) / repeat


def _replay(graph: torch.cuda.CUDAGraph, repeat: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat
