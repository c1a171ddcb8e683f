"""Rows of a server with overlap scheduling against one without, and of both against transformers.

The server without overlap copies within each step: the baseline. Not one id may differ, on any of
the three endpoints. A model of 48 layers, 128 experts, top-8, made on the spot, which transformers
can judge: on one rank, and with DP attention over two (on the CPU with fewer layers and experts; a
host with GPUs needs two). Hosts with two GPUs or more also run the full Qwen3-30B-A3B, from
ROUTED_EXPERTS_MODEL (a folder or a repository), with four and DeepEP scattered over them as well.

    ROUTED_EXPERTS_IDS=9517440 python test/registered/rl/test_return_routed_experts.py    # the
    published scale
"""

import importlib.util
import itertools
import os
import random
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch
from sglang.test.ci.ci_register import register_cuda_ci

from sglang.test.routed_experts.client import ENDPOINTS, Answer, Ask, Client
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import FLAG, NO_OVERLAP, Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model

register_cuda_ci(est_time=900, suite="stage-b-test-2-gpu-large")

IDS = int(os.environ.get("ROUTED_EXPERTS_IDS", "300000"))  # to compare at least, for each endpoint
GPUS = torch.cuda.device_count()
FULL_MODEL = os.environ.get("ROUTED_EXPERTS_MODEL", "Qwen/Qwen3-30B-A3B")  # or a folder
FULL_SHAPE = Shape(layers=48, experts=128, top_k=8)
WORDS = ("each", "token", "is", "sent", "to", "few", "experts", "in", "every", "layer")


class Overlap:
    """The tests; a subclass has the model, and the flags beside those about overlap."""

    ranks: ClassVar[str]  # as the verdicts name them
    flags: ClassVar[Sequence[str]]
    environment: ClassVar[dict[str, str]] = {}
    ids: ClassVar[int] = IDS
    prompt_words: ClassVar[tuple[int, int]] = (4, 24)
    new_tokens: ClassVar[int] = 100
    off: ClassVar[dict[str, list[Answer]]]
    on: ClassVar[dict[str, list[Answer]]]
    model: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.scratch = tempfile.TemporaryDirectory(prefix="routed-experts-test-")
        cls.model = cls.prepare(Path(cls.scratch.name))
        try:
            cls.off = cls._serve("overlap off", (*cls.flags, NO_OVERLAP))
            cls.on = cls._serve("overlap on", cls.flags)
        except BaseException:
            cls.scratch.cleanup()
            raise

    @classmethod
    def tearDownClass(cls) -> None:
        cls.scratch.cleanup()

    @classmethod
    def prepare(cls, scratch: Path) -> Path:
        """The folder of the model."""
        raise NotImplementedError

    @classmethod
    def _serve(cls, name: str, flags: Sequence[str]) -> dict[str, list[Answer]]:
        """Answers of a server with these flags to the same requests, for each endpoint."""
        log = Path(cls.scratch.name) / "server.log"
        say(f"{cls.ranks} {name}: starting the server")
        answers = {}
        with (
            mock.patch.dict(os.environ, cls.environment),
            Server(cls.model, (FLAG, *flags), log=log, gpu=GPUS > 0, start_timeout=900) as server,
        ):
            client = Client(server.url, cls.model)
            for endpoint in ENDPOINTS:
                asks = list(cls.requests(endpoint, client))
                started = time.monotonic()
                answers[endpoint] = client.ask_all(asks, at_once=128)
                seconds = time.monotonic() - started
                done = f"{endpoint} answered {len(asks)} requests in {seconds:.0f} s"
                say(f"{cls.ranks} {name}: {done}")
        return answers

    @classmethod
    def requests(cls, endpoint: str, client: Client) -> Iterator[Ask]:
        """Requests whose rows hold enough ids. Some start alike; none ends early."""
        rng = random.Random(endpoint)
        beginnings = [" ".join(rng.choices(WORDS, k=8)) for _ in range(4)]
        ids = cls.ids
        for number in itertools.count():
            rest = " ".join(rng.choices(WORDS, k=rng.randint(*cls.prompt_words)))
            text = f"{rng.choice(beginnings)} {number} {rest}"
            yield Ask(text, endpoint, new_tokens=cls.new_tokens, sampling={"ignore_eos": True})
            prompt = client.chat_prompt(text) if "chat" in endpoint else text
            rows = len(client.tokenizer(prompt)["input_ids"]) + cls.new_tokens - 1
            ids -= rows * client.layers * client.top_k
            if ids <= 0:
                return

    def compare(self, endpoint: str) -> None:
        tally = Tally()
        for off, on in zip(self.off[endpoint], self.on[endpoint]):
            self.assertEqual(off.text, on.text, "another text has other rows")
            self.assertEqual(len(off.rows), off.counted - 1)
            tally.add(on.rows, off.rows)
        self.judge(endpoint, tally)
        self.assertGreaterEqual(tally.ids, self.ids)

    def judge(self, what: str, tally: Tally) -> None:
        verdict = "FAIL" if tally.mismatches else "ok"
        say(f"{self.ranks} {what} ... {verdict}   {tally}")
        self.assertEqual(tally.mismatches, 0)

    def test_generate(self) -> None:
        self.compare("/generate")

    def test_chat(self) -> None:
        self.compare("/v1/chat/completions")

    def test_completions(self) -> None:
        self.compare("/v1/completions")


class AgainstTransformers(Overlap):
    """With a model small enough for transformers on the CPU."""

    def test_transformers(self) -> None:
        router = TransformersRouter(self.model)
        for endpoint in ENDPOINTS:
            off, on = Tally(), Tally()
            expected = router.route([answer.tokens for answer in self.off[endpoint]])
            for i, rows in enumerate(expected):
                off.add(self.off[endpoint][i].rows, rows)
                on.add(self.on[endpoint][i].rows, rows)
            self.judge(f"{endpoint}, overlap off against transformers", off)
            self.judge(f"{endpoint}, overlap on against transformers", on)


class TestAnyMachine(AgainstTransformers, unittest.TestCase):
    """On the CPU a decode step costs the same for any batch: each endpoint's requests are one."""

    ranks = "tp 1"
    flags = ("--max-running-requests", "128", "--max-total-tokens", "65536")
    prompt_words = (4, 60)
    new_tokens = 64

    @classmethod
    def prepare(cls, scratch: Path) -> Path:
        return make_model(scratch / "model", FULL_SHAPE)


@unittest.skipIf(GPUS == 1, "needs two GPUs, or none")
class TestTwoRanks(AgainstTransformers, unittest.TestCase):
    """Two ranks on the CPU are slow at experts and at decoding: few of those, little of that."""

    ranks = "tp 2 dp 2"
    flags = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--chunked-prefill-size", "512")
    environment: ClassVar[dict[str, str]] = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ids = IDS if GPUS else min(IDS, 700_000)
    prompt_words = (4, 120)
    new_tokens = 64 if GPUS else 12
    shape: ClassVar[Shape] = FULL_SHAPE if GPUS else Shape(layers=12, experts=16, top_k=8)

    @classmethod
    def prepare(cls, scratch: Path) -> Path:
        return make_model(scratch / "model", cls.shape)


@unittest.skipIf(GPUS < 2, "the full model needs two GPUs")
class TestFullModel(Overlap, unittest.TestCase):
    ranks = "tp 2 dp 2, full model"
    # Batches differ from run to run: only kernels that do not care give one text and one routing.
    flags = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-deterministic-inference",
             "--dtype", "bfloat16")  # fmt: skip

    @classmethod
    def prepare(cls, scratch: Path) -> Path:
        from huggingface_hub import snapshot_download

        return Path(FULL_MODEL if Path(FULL_MODEL).is_dir() else snapshot_download(FULL_MODEL))


@unittest.skipIf(
    GPUS < 4 or importlib.util.find_spec("deep_ep") is None,
    "DeepEP, with two ranks of attention each, needs four GPUs",
)
class TestDeepEP(TestFullModel):
    ranks = "tp 4 dp 2 deepep, full model"
    flags = ("--tp", "4", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "deepep",
             "--enable-deterministic-inference", "--dtype", "bfloat16")  # fmt: skip


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    unittest.main(verbosity=0)  # the verdicts are the progress
