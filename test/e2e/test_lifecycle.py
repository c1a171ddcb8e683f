"""Nothing is left behind: not by a server that is stopped, nor by an interrupted demo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang.test.routed_experts.server import FLAG, Server, ServerFailed

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "demo.py"
# Python's semaphores, 32 bytes each: the base kills the process that would remove them.
SEMAPHORES = "sem.mp-"


def descendants(pid: int) -> set[int]:
    """Ids of all processes below `pid`, in whatever session."""
    below = {pid}
    for entry in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in below:
            below.add(entry)
    return below - {pid}


def running(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(pid)
    return found


def wait_until_gone(pids: set[int], seconds: float = 30) -> set[int]:
    deadline = time.monotonic() + seconds
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running(pids)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_demo_leaves_no_process(number: signal.Signals, status: int) -> None:
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for line in demo.stdout:
            if "is starting: 5 s" in line or "is up" in line:
                break
        below = descendants(demo.pid)
        assert below, "the server is not there yet"
        os.kill(demo.pid, number)
        assert demo.wait(timeout=60) == status
        assert wait_until_gone(below) == set()
    finally:
        demo.kill()
        demo.wait()


def test_a_server_that_cannot_start_says_why_and_is_gone(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tiny_model, (FLAG, "--no-such-flag"), log=tmp_path / "log")
    with pytest.raises(ServerFailed, match="no-such-flag"):
        server.__enter__()
    assert server.pids() == []


def test_a_stopped_server_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with Server(tiny_model, (FLAG,), log=tmp_path / "log", start_timeout=600) as server:
        pids = set(server.pids())
        assert len(pids) >= 3
    assert wait_until_gone(pids, 5) == set()
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if not name.startswith(SEMAPHORES)}
