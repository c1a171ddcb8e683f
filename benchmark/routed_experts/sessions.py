"""What is compared: sessions of servers that share the GPUs, and their loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from servers import Engine

OURS_OFF, OURS_ON = Engine("ours", False), Engine("ours", True)
PEER_OFF, PEER_ON = Engine("peer", False), Engine("peer", True)
BASE_OFF, BASE_ON = Engine("base", False), Engine("base", True)
# By default the Triton back end cuts a sequence into 8 parts. One of 32,000 tokens beside 32 short
# ones then doubles the time of a decode step, rows or not, which would hide what its end costs.
# Memory for the parts grows with the largest graph.
STALL_ARGUMENTS = (
    "--triton-attention-num-kv-splits=256",
    "--max-running-requests=64",
    *("--cuda-graph-bs", "1", "32", "33"),
)
OURS_STALL, PEER_STALL = (Engine(name, True, STALL_ARGUMENTS) for name in ("ours", "peer"))
# A chain of three drafts by a draft model with random weights. What it proposes is never right, so
# the base is told to accept two drafts in every step: the same work and the same accept length with
# the flag and without. The pool is smaller than elsewhere: two more models are on the GPU.
DRAFTED_ARGUMENTS = (
    "--speculative-algorithm=EAGLE",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
    "--max-total-tokens=53248",
    "--max-running-requests=64",
    *("--cuda-graph-bs", "1", "64"),
)
OURS_DRAFTED_OFF, OURS_DRAFTED_ON = (
    Engine("ours", flag, DRAFTED_ARGUMENTS, drafted=True) for flag in (False, True)
)


@dataclass(frozen=True)
class Case:
    """A load. `often`: run --pairs times, else --few-pairs times."""

    batch: int
    input_len: int
    output_len: int
    often: bool

    @property
    def key(self) -> dict[str, int]:
        return {"batch": self.batch, "input_len": self.input_len, "output_len": self.output_len}


# 256 requests have shorter prompts and answers: at 1,024 + 512 tokens they would need 36 GiB of KV
# pool, and two servers would not fit. Their steps are shorter for it, so whatever the flag adds
# weighs more, not less.
CASES = (
    Case(64, 1024, 512, often=True),
    Case(1, 1024, 512, often=True),
    Case(8, 1024, 512, often=False),
    Case(256, 128, 256, often=False),
)


DRAFTED_CASES = (Case(64, 256, 512, often=True), Case(1, 256, 512, often=True))


@dataclass(frozen=True)
class Session:
    """Servers; `asked` says what each is asked, in order (every other round in reverse).

    stalls: how long a finishing request holds up the others is measured instead, asked so. "no" is
        the control: what a long request costs the others without any rows.
    cases: its loads.
    """

    asked: dict[Engine, Sequence[str]]
    stalls: dict[Engine, Sequence[str]] = field(default_factory=dict)
    cases: Sequence[Case] = CASES

    @property
    def engines(self) -> list[Engine]:
        return list(self.asked or self.stalls)

    @property
    def configurations(self) -> list[tuple[Engine, str]]:
        return [(engine, asked) for engine, all_asked in self.asked.items() for asked in all_asked]

    def key(self, engine: Engine, asked: str, case: Case) -> dict[str, Any]:
        """The results row of one configuration under one load."""
        return {"engine": engine.label, "flag": engine.flag, "asked": asked, **case.key}


# In an order in which few servers have to be started anew.
SESSIONS = {
    "ours": Session({OURS_OFF: ["no"], OURS_ON: ["no", "int32", "auto"]}),
    "duel": Session({OURS_ON: ["no", "int32", "auto"], PEER_ON: ["no", "int32"]}),
    "stall": Session({}, stalls={OURS_STALL: ["auto", "int32", "no"], PEER_STALL: ["int32"]}),
    "drafts": Session(
        {OURS_DRAFTED_OFF: ["no"], OURS_DRAFTED_ON: ["no", "int32", "auto"]}, cases=DRAFTED_CASES
    ),
    "peer": Session({PEER_OFF: ["no"], PEER_ON: ["no", "int32"]}),
    "base": Session({OURS_OFF: ["no"], BASE_ON: ["no", "int32"]}),
    "off": Session({BASE_OFF: ["no"], OURS_OFF: ["no"]}),
    # As the releases' own table has it: nobody asks. Four servers share the GPUs: four GPUs at
    # least.
    "published": Session({engine: ["no"] for engine in (OURS_OFF, BASE_ON, PEER_ON, OURS_ON)}),
}
ON_ONE_GPU = [name for name in SESSIONS if name != "published"]
