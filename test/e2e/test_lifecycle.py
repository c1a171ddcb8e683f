"""Nothing is left behind: not by a server that is stopped or loses a process, nor by an interrupted demo."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from sglang.test.routed_experts.client import Ask, Client
from sglang.test.routed_experts.server import FLAG, NO_OVERLAP, Server, ServerFailed

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
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ctrl-C reaches nothing that a shell has put into the background, these tests perhaps.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
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
        client = Client(server.url, tiny_model)
        client.post(Ask("Three at once", new_tokens=3, sampling={"n": 3})).raise_for_status()
    assert server.lines("Remaining number of requests 0.")
    assert wait_until_gone(pids, 5) == set()
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if not name.startswith(SEMAPHORES)}


def served(*flags: str) -> pytest.MarkDecorator:
    return pytest.mark.served(FLAG, *flags)


@pytest.mark.last
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("scheduler", marks=served("--chunked-prefill-size", "256")),
        pytest.param("detokenizer", marks=served("--chunked-prefill-size", "256", NO_OVERLAP)),
        pytest.param(
            "launch_server",
            marks=served("--max-total-tokens", "1200", "--schedule-conservativeness", "0.05"),
        ),
    ],
)
def test_kill_9_of_any_process_leaves_no_shared_memory(
    server: Server, client: Client, in_shm_before: set[str], killed: str
) -> None:
    assert client.ask(Ask("x" * 50)).rows is not None
    pids = server.pids()
    holders = [pid for pid in pids if shares_rows(pid)]
    assert len(holders) == 2, "the scheduler owns a segment, the answering process maps it"
    os.kill(next(pid for pid in pids if killed in command(pid)), signal.SIGKILL)
    assert wait_until_gone(set(pids), 60) == set(), "the others end by themselves"
    left = set(os.listdir("/dev/shm")) - in_shm_before
    assert not [name for name in left if "sglang" in name or "routed" in name]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def shares_rows(pid: int) -> bool:
    return "memfd:sglang-routed-experts" in Path(f"/proc/{pid}/maps").read_text()
