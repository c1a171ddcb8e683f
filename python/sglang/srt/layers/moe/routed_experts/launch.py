"""Launching a Triton kernel in every step at a few microseconds of the scheduler's thread.

The programs are imported when one is launched, not before: servers without the flag import nothing that the Triton of
their platform may be too old for (programs.py needs 3.2).
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import torch

from sglang.srt.layers.moe.routed_experts.streams import current_handle


class Launcher:
    """Calls one kernel's compiled variants, past the JIT's dispatch.

    On each call the JIT inspects every argument to find the variant to run. Here the constexprs alone name it, so the
    caller keeps what else a variant depends on the same: types and alignments of the pointers. What a compiled kernel
    then does in Python, for the hooks of Triton's own profiler, is left out too. With streams.py's objects that took
    `RowFiler.file_step` from 18 to 9 us (`make bench-kernels`, one H200, 2026-12-01).

    Args:
        name: of a `triton.jit` function in programs.py whose constexprs come last and whose other integers are not
            specialized on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._variants: dict[tuple, Any] = {}

    def __call__(
        self,
        programs: int,
        arguments: tuple,
        constants: tuple,
        num_warps: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launch on `stream`, or on the current one. The first call of a variant compiles it."""
        compiled = self._variants.get(constants)
        if compiled is not None:
            run, function, metadata = compiled
            handle = current_handle() if stream is None else stream.cuda_stream
            no_hooks = None, None, None
            run(programs, 1, 1, handle, function, metadata, *no_hooks, *arguments, *constants)
            return
        kernel = getattr(importlib.import_module(f"{__package__}.programs"), self._name)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            launched = kernel[(programs,)](*arguments, *constants, num_warps=num_warps)
        if launched is not None:  # the interpreter compiles nothing
            self._variants[constants] = launched.run, launched.function, launched.packed_metadata
