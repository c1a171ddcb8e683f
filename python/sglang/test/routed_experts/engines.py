"""Engines of many models, one after another, in processes of their own, from one import of SGLang.

Importing SGLang with all its model files takes some ten seconds, and an engine has three processes.
Here one process imports it, and all others are forked from that one: an engine of a tiny model is
up in a second. Only for the CPU engine: CUDA does not survive a fork.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_IMPORTS = [
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",  # imports every model file
]
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # The models are tiny: threads that wait for one another are not faster than one.
    "OMP_NUM_THREADS": "1",
    # Grouped top-k is compiled, for a minute. Its ids are captured behind it either way.
    "TORCHDYNAMO_DISABLE": "1",
}
_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "enable_return_routed_experts": True,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "random_seed": 0,
    "log_level": "warning",
}


class EngineFailed(RuntimeError):
    """The engine did not start, or died. The message ends with the end of its log."""


def generate(engine: Any, requests: Sequence[dict[str, Any]]) -> list[Any]:
    """A job: one call of `Engine.generate` for each request, with its keyword arguments."""
    return [engine.generate(**request) for request in requests]


class Engines:
    """Starts an engine, gives it a job, stops it.

    Takes over multiprocessing's one fork server, so there is one instance a process.
    """

    def __init__(self) -> None:
        os.environ |= _ENVIRONMENT
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTS)

    def run(
        self,
        model: Path,
        job: Callable[..., Any],
        *arguments: Any,
        log: Path,
        before: Callable[[], None] | None = None,
        timeout: float = 300,
        **options: Any,
    ) -> Any:
        """What `job(engine, *arguments)` returns, called in the engine's process.

        Args:
            job: a function of an importable module; what it returns is pickled.
            log: where the engine's output goes.
            before: called in the engine's process before it starts.
            timeout: seconds until the answer must be there, start-up included.
            options: of `sglang.Engine`, beside those that the CPU engine needs.

        Raises:
            EngineFailed: with the end of the log.
        """
        reader, writer = self._context.Pipe(duplex=False)
        task = (before, job, arguments, _OPTIONS | {"model_path": str(model)} | options)
        process = self._context.Process(target=_run, args=(writer, log, task))
        process.start()
        writer.close()
        try:
            if not reader.poll(timeout):
                raise EngineFailed(f"no answer after {timeout:.0f} s; {_end_of(log)}")
            answer, error = reader.recv()
        except EOFError:
            raise EngineFailed(f"the engine's process died; {_end_of(log)}") from None
        finally:
            process.join(5)
            process.kill()  # its children die with it
            process.join()
        if error:
            raise EngineFailed(f"{error}\n{_end_of(log)}")
        return answer


def _run(writer: Connection, log: Path, task: tuple) -> None:
    before, job, arguments, options = task
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        with _forking(), tempfile.TemporaryDirectory(prefix="routed-experts-") as folder:
            tempfile.tempdir = folder
            from sglang.srt.entrypoints.engine import Engine

            if before:
                before()
            engine = Engine(**options)
            try:
                writer.send((job(engine, *arguments), None))
            finally:
                engine.shutdown()
    except BaseException:
        writer.send((None, traceback.format_exc()))


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """The engine asks for fresh interpreters, for CUDA's sake; fork instead."""
    multiprocessing.set_start_method("fork", force=True)
    ask, multiprocessing.set_start_method = multiprocessing.set_start_method, lambda *a, **k: None
    try:
        yield
    finally:
        multiprocessing.set_start_method = ask


def _end_of(log: Path, lines: int = 30) -> str:
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f"its log, {log}, ends with:\n" + "\n".join(line[:2000] for line in text[-lines:])
