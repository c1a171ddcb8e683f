"""Ends what a server leaves behind when it is killed.

    python -S -E orphans.py        started by the server's process itself, in the session that it leads

Every process of a server asks to be killed with the one that started it. One that has not come so far when that happens,
still importing, asks too late and stays for ever. So this one waits for the server's end, gives the others the time in
which they end by themselves, and kills the rest.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE = 10.0  # seconds


def of_session(leader: int) -> list[int]:
    """Ids of the processes in the session that `leader` leads, or has led; zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # "pid (name) state parent group session ...", and the name may hold anything
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.name))
    return found


def main() -> None:
    session, own = os.getsid(0), os.getpid()
    while os.getppid() == session:
        time.sleep(0.2)
    deadline = time.monotonic() + PATIENCE
    while set(left := of_session(session)) != {own} and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in set(left) - {own}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
