"""A server for a test or a demo: started on a free port, and gone afterwards whatever happens."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import requests

from sglang.test.routed_experts import orphans
from sglang.test.routed_experts.orphans import of_session

FLAG = "--enable-return-routed-experts"
NO_OVERLAP = "--disable-overlap-schedule"

_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--max-total-tokens", "32768"),  # without it the KV pool takes most of the host's memory
)
# sgl_kernel has no float32 kernels; the models of tiny_moe.py are exact in float16 too.
GPU_FLAGS = (
    "--dtype",
    "float16",
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
)
_FLAGS = (
    *("--grammar-backend", "none", "--random-seed", "0"),
    *("--max-running-requests", "64", "--sleep-on-idle", "--skip-server-warmup"),
)
_LOG_LINES = 40
_PORTS = 250
# Becomes the server, and is killed when the process that started it ends: prctl(PR_SET_PDEATHSIG).
# What it leaves behind then is orphans.py's.
_LAUNCHER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, '-S', '-E', sys.argv[1]); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class ServerFailed(RuntimeError):
    """The server did not come up, or died. The message ends with the end of its log."""


class Server:
    """`with Server(model, flags) as server:` the engine answers at `server.url`.

    It runs in a session and a temporary folder of its own. If this process is killed, it dies as
    well.

    Args:
        model: folder with config, weights and tokenizer.
        flags: added to those that a small machine needs; a later flag wins.
        log: where its output goes.
        gpu: run on CUDA; default: the CPU engine.
        start_timeout: seconds until it must answer.
        progress: called about once a second with a line for the user while it starts.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str] = (),
        *,
        log: Path,
        gpu: bool = False,
        start_timeout: float = 300,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.flags = tuple(flags)
        self.log = log
        self.url = ""
        self._gpu = gpu
        self._start_timeout = start_timeout
        self._progress = progress or (lambda line: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def __enter__(self) -> "Server":
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the process that answers still runs."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Ids of the processes of this server that still run, its children's included."""
        return of_session(self._process.pid) if self._process else []

    def lines(self, *parts: str) -> list[str]:
        """Lines of its output that hold all of `parts`; none before it has any output."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in text if all(part in line for part in parts)]

    def wait_for_line(self, *parts: str, seen: int = 0, seconds: float = 120) -> None:
        """Return once more than `seen` lines of its output hold all of `parts`.

        Raises:
            TimeoutError: with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while len(self.lines(*parts)) <= seen:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing of {parts} after {seconds:.0f} s; {self._where()}")
            time.sleep(0.02)

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The end of what the server printed, without the noise of libraries."""
        noise = ("Warning", "warnings.warn", "[Gloo]", "server_args=")
        return "\n".join([x[:400] for x in self.lines() if not any(n in x for n in noise)][-lines:])

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="routed-experts-server-")
        self._ports = _reserve_ports()
        port = self._ports.getsockname()[1] - _PORTS + 1
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", _LAUNCHER, orphans.__file__]
        command += ["-m", "sglang.launch_server"]
        command += ["--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *_FLAGS]
        command += [*(GPU_FLAGS if self._gpu else _CPU_FLAGS), *self.flags]
        environment = os.environ | {"TMPDIR": self._folder, "HF_HUB_OFFLINE": "1"}
        # Every process of the server imports the same hundred thousand lines: compile them once.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if not self._gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            # A second thread gains nothing on a model this small; on a busy machine it costs
            # minutes.
            environment["OMP_NUM_THREADS"] = "1"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while True:
            elapsed = time.monotonic() - started
            if not self.alive:
                raise ServerFailed(f"the server ended while it started; {self._where()}")
            if elapsed > self._start_timeout:
                raise ServerFailed(f"the server was not up after {elapsed:.0f} s; {self._where()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            self._progress(f"the server is starting: {elapsed:.0f} s (log: {self.log})")
            time.sleep(1)

    def _where(self) -> str:
        return f"its log, {self.log}, ends with:\n{self.log_tail()}"

    def stop(self, patience: float = 15) -> None:
        """End all its processes and remove its folder, Ctrl-C or not. Safe to call twice."""
        if self._process is None:
            return
        with _uninterrupted():
            self._process.terminate()
            deadline = time.monotonic() + patience
            while of_session(self._process.pid) and time.monotonic() < deadline:
                self._process.poll()  # a dead child stays in the process table until it is asked
                time.sleep(0.1)
            while left := of_session(self._process.pid):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.poll()
                time.sleep(0.05)
            self._process.wait()
            self._process = None
            self._ports.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _reserve_ports() -> socket.socket:
    """`_PORTS` free ports, nobody else's of this harness while the socket lives that is bound to the last.

    With DP attention the base listens on more than the first: on some from the 233rd on. They lie
    below those that connections are given, which might be taken before the server comes to them.
    """
    for first in random.sample(range(10_000, 32_000, _PORTS), k=22_000 // _PORTS):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", first + _PORTS - 1))
            for port in (first, *range(first + 233, first + 243)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        return held
    raise ServerFailed("no free ports between 10000 and 32000")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
