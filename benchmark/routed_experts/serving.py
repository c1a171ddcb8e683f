"""Serving figures: pairs of servers on one GPU, measured in turn, A B and then B A.

    python serving.py --trees DIR --site DIR --results FILE [--sessions ours,duel,..] [--budget S]

Results are written after every run, and a call goes on with the file that it is given: split the
benchmark over as many calls as it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import signal
import sys
import time
from dataclasses import asdict, replace

import aiohttp
import load
import options
import scheduler_time
import stall
from profile_step import profile_decode
from results import Results, ResultsError
from servers import Engine, Fleet, Server, ServerError
from sessions import ON_ONE_GPU, SESSIONS, Case, Session
from step_trace import TraceError


class OutOfTime(Exception):
    """What comes next does not fit into the time that is left."""


class Serving:
    """Runs sessions until they are done or the time is up."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._deadline = time.monotonic() + arguments.budget
        self._setup = options.setup(arguments, timed=arguments.time_scheduler)
        self._results = Results(arguments.results, options.header(self._setup))
        self._fleet = Fleet(self._setup)
        scheduler_time.clear(self._setup.times)
        self._startup = min(150.0, arguments.startup)  # seconds that a start will take
        self._seconds: dict[tuple[Engine, str, Case], float] = {}

    def run(self) -> bool:
        """Whether every session went well, as far as time allowed."""
        try:
            return all([self._try_session(name) for name in self._arguments.sessions])
        except OutOfTime as error:
            print(f"time is up: {error}; call again to go on", flush=True)
            return True
        finally:
            self._fleet.stop()

    def _try_session(self, name: str) -> bool:
        try:
            self._run_session(name, SESSIONS[name])
            return True
        except (ServerError, load.LoadError, aiohttp.ClientError, OSError) as error:
            kind = type(error).__name__
            print(f"session {name}: {kind}: {error}", file=sys.stderr, flush=True)
            return False
        finally:
            # Before the next session stops servers that this one has measured.
            scheduler_time.store(self._setup.times, self._results)

    def _run_session(self, name: str, session: Session) -> None:
        todo = self._missing_rounds(name, session)
        stalls = stall.missing(session.stalls, self._results)
        if not todo and not stalls:
            print(f"{name}: nothing left to measure", flush=True)
            return
        self._need(self._startup, f"starting the servers of {name}")
        servers = self._start(session)
        if stalls:
            self._need(45 * len(stalls), "stalls")
            lengths = [tokens // self._arguments.shorten for tokens in stall.PROMPT_TOKENS]
            wanted, shape = session.stalls, self._setup.model
            stall.measure_stalls(servers, wanted, shape, self._results, lengths)
            return
        asyncio.run(self._warm_up(session, servers))
        for case, turn in todo:
            self._run_round(name, session, case, turn, servers)
        for engine, server in servers.items():
            if self._setup.device == "cuda" and not self._profiled(engine):
                self._need(30, f"profile of {engine}")
                try:
                    profile_decode(server, self._setup, self._results)
                except (load.LoadError, TraceError) as error:
                    print(f"no profile of {engine}: {error}", file=sys.stderr, flush=True)

    def _start(self, session: Session) -> dict[Engine, Server]:
        begin = time.monotonic()
        limit = min(begin + self._arguments.startup, self._deadline)
        servers = self._fleet.require(session.engines, limit)
        self._startup = max(60.0, 1.2 * (time.monotonic() - begin))
        return servers

    def _cases(self, session: Session) -> list[Case]:
        by = self._arguments.shorten
        return [
            replace(case, input_len=case.input_len // by, output_len=case.output_len // by)
            for case in session.cases
            if case.batch in self._arguments.batches
        ]

    def _missing_rounds(self, name: str, session: Session) -> list[tuple[Case, int]]:
        """(case, turn) of what is left to run; by turns, so that no case waits for another."""
        if not session.configurations:
            return []
        last = session.configurations[-1], session.configurations[0]
        todo = []
        for case in self._cases(session):
            rows = [session.key(engine, asked, case) for engine, asked in last]
            done = min(self._results.rounds(name, row) for row in rows)
            wanted = self._arguments.pairs if case.often else self._arguments.few_pairs
            todo += [(case, turn) for turn in range(done, wanted)]
        return sorted(todo, key=lambda entry: entry[1])

    def _run_round(
        self, name: str, session: Session, case: Case, turn: int, servers: dict[Engine, Server]
    ) -> None:
        """Every configuration once, with the same prompts; every other turn backwards."""
        order = session.configurations[:: -1 if turn % 2 else 1]
        self._need(sum(self._guess(*each, case) for each in order), f"{name}, batch {case.batch}")
        now = datetime.datetime.now(datetime.timezone.utc)
        for engine, asked in order:
            begin = time.monotonic()
            request = load.Request(case.input_len, case.output_len, asked)
            run = asyncio.run(
                load.run_batch(
                    servers[engine].url, self._setup.model, request, case.batch, seed=turn
                )
            )
            self._seconds[engine, asked, case] = time.monotonic() - begin
            key = session.key(engine, asked, case)
            values = {k: v for k, v in asdict(run).items() if v is not None}
            self._results.add_run(key, f"{name}/{now:%Y-%m-%dT%H:%M:%S.%f}", **values)
            print(_line(name, case, engine, asked, run), flush=True)

    def _guess(self, engine: Engine, asked: str, case: Case) -> float:
        """Seconds that a run will take: what it took before, or something on the safe side."""
        return self._seconds.get((engine, asked, case), 20)

    def _need(self, seconds: float, what: str) -> None:
        left = self._deadline - time.monotonic()
        if seconds > left:
            raise OutOfTime(f"{what} may take {seconds:.0f} s, {left:.0f} s are left")

    def _profiled(self, engine: Engine) -> bool:
        return engine.drafted or any(
            entry["engine"] == engine.name and entry["flag"] == engine.flag
            for entry in self._results.data.get("profile", [])
        )

    async def _warm_up(self, session: Session, servers: dict[Engine, Server]) -> None:
        """Compile what is compiled on first use: every load, every way of asking, both servers."""

        async def one(engine: Engine, url: str) -> None:
            for case in self._cases(session):
                for asked in session.asked[engine]:
                    request = load.Request(case.input_len, 3, asked)
                    await load.run_batch(url, self._setup.model, request, case.batch, seed=99)

        begin = time.monotonic()
        await asyncio.gather(*(one(engine, server.url) for engine, server in servers.items()))
        print(f"warmed up in {time.monotonic() - begin:.0f} s", flush=True)


def _line(name: str, case: Case, engine: Engine, asked: str, run: load.Run) -> str:
    return (
        f"{name:5} batch {case.batch:<4} {engine!s:9} asked {asked:5} {run.output_tps:8.1f} tok/s, "
        f"ttft {run.ttft_s:6.3f} s, latency {run.latency_s:6.3f} s, step {run.step_ms:7.3f} ms, "
        f"{run.answer_mb:6.1f} MB, {run.accept_length or 1} a step {'; '.join(run.problems[:2])}"
    )


def _end(*_: object) -> None:
    """End in good order, once: `timeout` sends the signal twice, and servers are to be stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> None:
    parser = options.parser(__doc__)
    add = parser.add_argument
    add("--sessions", type=lambda text: text.split(","), default=ON_ONE_GPU)
    add("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 64, 256])
    add("--pairs", type=int, default=5, help="rounds of batch 1 and 64")
    add("--few-pairs", type=int, default=2, help="rounds of batch 8 and 256")
    add("--shorten", type=int, default=1, help="divide prompts and answers, to try the script")
    add("--budget", type=float, default=1e9, help="seconds after which nothing new is begun")
    add("--startup", type=float, default=240, help="seconds that servers have to start")
    add("--time-scheduler", action="store_true", help="also time the scheduler's thread")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    if unknown := set(arguments.sessions) - set(SESSIONS):
        parser.error(f"no such session: {', '.join(unknown)}; there are {', '.join(SESSIONS)}")
    try:
        sys.exit(0 if Serving(arguments).run() else 1)
    except ResultsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
