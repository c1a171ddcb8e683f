"""Servers under measurement: a process group each, and no more of them than a session compares."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model import Model

HERE = Path(__file__).resolve().parent

# Two servers of Qwen3-30B-A3B's shape fill an H200: 57 GiB of weights each, so the KV pool is just
# what 64 requests of 1,024 + 512 tokens need, and the graphs are those of the batch sizes that are
# measured (33: the stall's 32 + 1).
KV_TOKENS = 100_352
GRAPH_BATCHES = (1, 8, 32, 33, 64, 256)
# The workers that run ahead of the scheduler, and three tokens from every step whatever is drafted.
_DRAFTED = {
    "SGLANG_ENABLE_SPEC_V2": "1",
    "SGLANG_SIMULATE_ACC_LEN": "3",
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
}
_LOG_TAIL = 40


class ServerError(RuntimeError):
    """A server did not start, or died. The message holds the end of its log."""


@dataclass(frozen=True)
class Engine:
    """What is started: "ours", "base" or "peer", with --enable-return-routed-experts or without.

    arguments: server arguments that this session needs and others do not; the last one of a kind
        counts.
    drafted: with speculative decoding, in which every step accepts as many tokens.
    """

    name: str
    flag: bool
    arguments: tuple[str, ...] = ()
    drafted: bool = False

    @property
    def label(self) -> str:
        """What its results go by."""
        return f"{self.name}-drafted" if self.drafted else self.name

    def __str__(self) -> str:
        return f"{self.label} {'on' if self.flag else 'off'}"


@dataclass(frozen=True)
class Setup:
    """What every server of a call has in common.

    Attributes:
        trees: folder that holds `<engine>/python/sglang` for each engine.
        site: folder of Python packages put behind the tree, or None where the interpreter has them.
        work: folder for configs, logs and traces.
        device: "cuda" or "cpu" (the CPU engine: to try the scripts, its figures mean nothing).
        tp: GPUs of each server; every server runs on the same ones.
        piecewise: leave the base's piecewise CUDA graphs on. Off by default: their capture takes
            longer than most measurements here, and they touch prefill alone.
        timed: measure the scheduler's thread (scheduler_time.py).
        extra: further server arguments.
    """

    trees: Path
    site: Path | None
    work: Path
    model: Model
    device: str = "cuda"
    tp: int = 1
    piecewise: bool = False
    timed: bool = False
    extra: Sequence[str] = ()

    def command(self, engine: Engine, port: int) -> list[str]:
        timed = self.timed and engine.flag and not engine.drafted
        launcher = [str(HERE / "scheduler_time.py")] if timed else ["-m", "sglang.launch_server"]
        return [sys.executable, *launcher, *self.arguments(engine), f"--port={port}"]

    @property
    def times(self) -> Path:
        """Where servers whose scheduler is timed write, in a folder for each engine."""
        return self.work / "scheduler_time"

    def arguments(self, engine: Engine) -> list[str]:
        return [
            f"--model-path={self.work / 'model'}",
            "--load-format=dummy",
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--host=127.0.0.1",
            "--sampling-backend=pytorch",
            "--grammar-backend=none",
            "--disable-radix-cache",
            "--incremental-streaming-output",
            "--log-level=info",
            "--max-running-requests=256",
            f"--max-total-tokens={KV_TOKENS}",
            *([f"--tp-size={self.tp}"] if self.tp > 1 else []),
            *(["--enable-return-routed-experts"] if engine.flag else []),
            *(self._gpu_arguments() if self.device == "cuda" else self._cpu_arguments()),
            *engine.arguments,
            *([f"--speculative-draft-model-path={self.work / 'draft'}"] if engine.drafted else []),
            *self.extra,
        ]

    def _gpu_arguments(self) -> list[str]:
        return [
            "--attention-backend=triton",
            # The pool is bounded by --max-total-tokens; this only lets two servers share the GPU.
            "--mem-fraction-static=0.98",
            "--chunked-prefill-size=8192",
            "--cuda-graph-bs",
            *map(str, GRAPH_BATCHES),
            *([] if self.piecewise else ["--disable-piecewise-cuda-graph"]),
        ]

    @staticmethod
    def _cpu_arguments() -> list[str]:
        return ["--device=cpu", "--attention-backend=torch_native", "--disable-overlap-schedule"]

    def environment(self, engine: Engine) -> dict[str, str]:
        path = [str(self.trees / engine.name / "python"), *([str(self.site)] if self.site else [])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "HF_HUB_OFFLINE": "1",
            "NCCL_NVLS_ENABLE": "0",  # a fault in NVLink multicast can take all GPUs of a host down
            "SCHEDULER_TIME_DIR": str(self.times / engine.name),
            **({"SGLANG_USE_CPU_ENGINE": "1"} if self.device == "cpu" else {}),
            **(_DRAFTED if engine.drafted else {}),
        }


class Server:
    """One running server. `url` answers once `wait` has returned."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.engine = engine
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = setup.work / f"{engine.label}-{'on' if engine.flag else 'off'}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                setup.command(engine, port),
                cwd=setup.work,
                env=setup.environment(engine),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # noqa: PLW1509  (a group to end as a whole, in the caller's session)
            )

    def ended(self) -> bool:
        return self._process.poll() is not None

    def ready(self) -> bool:
        """Whether it answers.

        Raises:
            ServerError: it has ended.
        """
        if self.ended():
            raise ServerError(f"{self.engine} ended:\n{self.log_tail()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def check_pool(self) -> None:
        """Two servers side by side are not comparable if one has got less KV pool than the other.

        Raises:
            ServerError: the pool is smaller than it was meant to be.
        """
        found = re.findall(r"max_total_num_tokens=(\d+)", self.log.read_text(errors="replace"))
        asked = [re.match(r"--max-total-tokens=(\d+)", each) for each in self.engine.arguments]
        needed = next((int(match[1]) for match in asked if match), KV_TOKENS)
        if found and int(found[-1]) < needed:
            raise ServerError(
                f"{self.engine} has a KV pool of {found[-1]} tokens, {needed} are needed: too "
                "little GPU memory was free when it started"
            )

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines[-_LOG_TAIL:])

    def stop(self) -> None:
        for name in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, name)
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break


class Fleet:
    """The servers that are up. Keeps those that the next session needs as well."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._servers: dict[Engine, Server] = {}

    def require(self, engines: Sequence[Engine], deadline: float) -> dict[Engine, Server]:
        """Stop every other server, start what is missing (at the same time), and wait for all.

        Args:
            deadline: time.monotonic() by which all must answer.

        Raises:
            ServerError: one ended, or was not ready in time.
        """
        for engine in set(self._servers) - set(engines):
            self._servers.pop(engine).stop()
        for engine in [engine for engine, server in self._servers.items() if server.ended()]:
            dead = self._servers.pop(engine)
            print(f"{engine} has died:\n{dead.log_tail()}", flush=True)
            dead.stop()
        starting = [engine for engine in engines if engine not in self._servers]
        begin = time.monotonic()
        for engine in starting:
            self._servers[engine] = Server(self._setup, engine)
        waiting = set(starting)
        while waiting:
            waiting = {engine for engine in waiting if not self._servers[engine].ready()}
            if waiting and time.monotonic() > deadline:
                server = self._servers[min(waiting, key=str)]
                raise ServerError(f"{server.engine} was not ready in time:\n{server.log_tail()}")
            time.sleep(0.5)
        for engine in starting:
            self._servers[engine].check_pool()
        if starting:
            names = ", ".join(map(str, starting))
            print(f"up after {time.monotonic() - begin:.0f} s: {names}", flush=True)
        return {engine: self._servers[engine] for engine in engines}

    def stop(self) -> None:
        while self._servers:
            self._servers.popitem()[1].stop()


def _free_port() -> int:
    """Not one that the system would give: 0.5.11 also takes the port 10,000 above it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
