"""RowsDelivery with a scheduler in another process: settled, gone, aborted, too many."""

import asyncio
import gc
import multiprocessing
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import fastapi
import numpy as np
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang.srt.layers.moe.routed_experts import in_flight
from sglang.srt.layers.moe.routed_experts.delivery import RowsDelivery
from sglang.srt.layers.moe.routed_experts.descriptor import READY_WORD, RowsDescriptor
from sglang.srt.layers.moe.routed_experts.transport import RowsArena
from sglang.srt.layers.moe.routed_experts.wire import WireRows, decode_routed_experts

MB = 1 << 20
SHAPE = (100, 48, 8)
STOP = {"type": "stop"}
ABORT = {"type": "abort", "message": "gone"}
fork = multiprocessing.get_context("fork")


class Scheduler:
    """Another process that owns an arena: makes blocks, says how many are still out."""

    def __init__(self):
        self._here, there = fork.Pipe()
        self._process = fork.Process(target=self._serve, args=(there,), daemon=True)
        self._process.start()

    @staticmethod
    def _serve(channel):
        arena = RowsArena(4 * MB, first_segment=4 * MB)
        while True:
            seed, wanted, ready_after = channel.recv()
            if seed is None:
                arena._reclaim(1000)
                channel.send(arena.blocks_in_flight)
                continue
            block = arena.allocate(int(np.prod(SHAPE)))
            block.rows.numpy()[:] = rows_of(seed).reshape(-1)
            channel.send(RowsDescriptor("uint8", SHAPE, 0, wanted, block=block.describe()))
            time.sleep(ready_after)
            block.header[READY_WORD] = 1

    def rows(self, seed=0, wanted="int32", ready_after=0.0):
        self._here.send((seed, wanted, ready_after))
        return self._here.recv()

    def blocks_in_flight(self):
        self._here.send((None, None, 0))
        return self._here.recv()

    def kill(self):
        self._process.kill()
        self._process.join()


def rows_of(seed):
    return np.random.default_rng(seed).integers(0, 128, SHAPE).astype(np.uint8)


@pytest.fixture
def scheduler():
    process = Scheduler()
    yield process
    process.kill()


@pytest.fixture
def delivery(monkeypatch):
    config = SimpleNamespace(num_hidden_layers=48, num_experts=128, num_experts_per_tok=8)
    return RowsDelivery(
        SimpleNamespace(
            server_args=SimpleNamespace(enable_return_routed_experts=True, tokenizer_worker_num=2),
            model_config=SimpleNamespace(hf_text_config=config),
            enable_metrics=False,
        )
    )


def state(asked=True, **fields):
    obj = GenerateReqInput(text="a", return_routed_experts=asked, **fields)
    return SimpleNamespace(obj=obj, routed_experts=None, output_ids=[])


def message(*descriptors, finished=STOP, tokens=3):
    return SimpleNamespace(
        routed_experts=list(descriptors) if any(descriptors) else None,
        finished_reasons=[finished] * len(descriptors),
        completion_tokens=[tokens] * len(descriptors),
    )


def aborted(tokens):
    return {"meta_info": {"finish_reason": ABORT, "completion_tokens": tokens}}


async def settled(delivery, one, as_text=True):
    kept = {"meta_info": {}}  # the manager keeps it where requests are dumped
    out = await delivery.settle(one, kept, as_text)
    assert kept == {"meta_info": {}}
    return out["meta_info"]


def test_rows_reach_meta_info_and_the_block_is_back(delivery, scheduler):
    async def run():
        one, other = state(), state(routed_experts_dtype="auto")
        output = message(scheduler.rows(1), scheduler.rows(2, "auto", ready_after=0.1))
        delivery.attach(one, output, 0)
        delivery.attach(other, output, 1)
        return await settled(delivery, one), await settled(delivery, other, as_text=False)

    int32, auto = asyncio.run(run())
    assert isinstance(int32["routed_experts"], str)
    assert isinstance(auto["routed_experts"], WireRows)
    assert int32["routed_experts_info"]["dtype"] == "int32"
    assert np.array_equal(decode_routed_experts(int32), rows_of(1))
    auto["routed_experts"] = auto["routed_experts"].text()
    assert auto["routed_experts_info"] == {"dtype": "uint8", "shape": [100, 48, 8], "start_len": 0}
    assert np.array_equal(decode_routed_experts(auto), rows_of(2))
    assert scheduler.blocks_in_flight() == 0


def test_the_loop_is_free_while_rows_are_not_ready(delivery, scheduler):
    async def run():
        one = state()
        delivery.attach(one, message(scheduler.rows(1, ready_after=0.5)), 0)
        waiting = asyncio.ensure_future(settled(delivery, one))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, waiting.result()

    ticks, meta = asyncio.run(run())
    assert ticks > 10 and np.array_equal(decode_routed_experts(meta), rows_of(1))


def test_unfinished_and_unasked_requests_have_no_field(delivery, scheduler):
    async def run():
        running, silent = state(), state(asked=False)
        delivery.attach(running, message(None, finished=None), 0)
        # Nothing may come for a request that did not ask; if it does, it must not leak.
        delivery.attach(silent, message(scheduler.rows()), 0)
        delivery.attach(silent, SimpleNamespace(finished_reasons=[STOP]), 0)
        return await settled(delivery, running), await settled(delivery, silent)

    assert asyncio.run(run()) == ({}, {})
    assert scheduler.blocks_in_flight() == 0


def test_nobody_waits_any_more(delivery, scheduler):
    """State gone; client gone before its rows were ready; waiter cancelled in the middle."""

    async def run():
        delivery.discard(message(scheduler.rows()), 0)
        delivery.attach(state(), message(scheduler.rows(ready_after=0.1)), 0)
        for delay in (0.0, 0.05):
            one = state()
            delivery.attach(one, message(scheduler.rows(ready_after=0.2)), 0)
            waiting = asyncio.ensure_future(settled(delivery, one))
            await asyncio.sleep(delay)
            waiting.cancel()
        await asyncio.sleep(0)
        del one, waiting
        while scheduler.blocks_in_flight():
            await asyncio.sleep(0.01)
        gc.collect()
        await asyncio.sleep(0.05)
        return delivery._in_flight.total

    assert asyncio.run(asyncio.wait_for(run(), 20)) == 0


@pytest.mark.parametrize("start_len", [0, 7])
def test_aborted_before_its_prefill_ended(delivery, start_len):
    async def run():
        wants = {"routed_experts_start_len": start_len, "routed_experts_dtype": "auto"}
        queued, prefilling = state(**wants), state(**wants)
        delivery.attach_aborted(queued, SimpleNamespace(routed_experts=None), aborted(tokens=0))
        delivery.attach(prefilling, message(None, finished=ABORT, tokens=0), 0)
        return await settled(delivery, queued), await settled(delivery, prefilling)

    for meta in asyncio.run(run()):
        assert meta == {
            "routed_experts": "",
            "routed_experts_start_len": start_len,
            "routed_experts_info": {"dtype": "uint8", "shape": [0, 48, 8], "start_len": start_len},
        }


@pytest.mark.parametrize("answered", [60, 41, 0])
def test_aborted_after_it_was_retracted(delivery, scheduler, answered):
    """50 tokens in, 51 out; the scheduler got further than what this process was told."""

    async def run():
        one = state(routed_experts_dtype="auto")
        rows = replace(scheduler.rows(4, "auto"), prompt_tokens=50)
        out = aborted(answered)
        delivery.attach_aborted(one, SimpleNamespace(routed_experts=rows), out)
        return (await delivery.settle(one, out, as_text=True))["meta_info"]

    meta = asyncio.run(run())
    assert meta["prompt_tokens"] == 50
    assert np.array_equal(decode_routed_experts(meta), rows_of(4)[: 50 + answered - 1])
    assert scheduler.blocks_in_flight() == 0


def test_rows_that_should_be_there_and_are_not_are_an_error(delivery, scheduler):
    async def run():
        metas = []
        for output in (
            message(None),
            message(RowsDescriptor("uint8", SHAPE, 0, "int32", error="not every row was captured")),
        ):
            one = state()
            delivery.attach(one, output, 0)
            metas.append(await settled(delivery, one))
        gone = scheduler.rows()
        scheduler.kill()
        one = state()
        delivery.attach(one, message(gone), 0)
        return [*metas, await settled(delivery, one)]

    none, bad, gone = asyncio.run(run())
    assert "returned no routed experts" in none["routed_experts_error"]
    assert "not every row" in bad["routed_experts_error"]
    assert "SGLANG_ROUTED_EXPERTS_TRANSPORT=message" in gone["routed_experts_error"]
    assert not any("routed_experts" in meta for meta in (none, bad, gone))


def test_requests_wait_while_too_much_is_in_flight(delivery, scheduler, monkeypatch):
    delivery._in_flight.limit = 2 * int(np.prod(SHAPE))

    async def run():
        held = []
        for _ in range(3):
            one = state()
            delivery.attach(one, message(scheduler.rows()), 0)
            held.append(await settled(delivery, one, as_text=False))
        await delivery.admit(GenerateReqInput(text="a"))  # does not ask: goes through
        asking = asyncio.ensure_future(delivery.admit(state().obj))
        await asyncio.sleep(0.1)
        assert not asking.done()
        held.pop()
        await asyncio.wait_for(asking, 5)
        monkeypatch.setattr(in_flight, "_PATIENCE_SECONDS", 0.05)
        delivery._in_flight.limit = 0
        with pytest.raises(fastapi.HTTPException, match="SGLANG_ROUTED_EXPERTS_IN_FLIGHT_MB"):
            await delivery.admit(state().obj)
        held.clear()
        await delivery.admit(state().obj)

    asyncio.run(run())


def test_what_is_sent_late_or_from_another_thread_is_counted_down():
    async def run():
        seen = []
        counter = in_flight.BytesInFlight(10, seen.append)
        claims = [counter.claim(5), counter.claim(6)]
        thread = threading.Thread(target=claims.clear)
        thread.start()
        thread.join()
        await asyncio.sleep(0.01)
        return list(seen), counter.claim(1)

    seen, late = asyncio.run(run())
    assert seen[:2] == [5, 11] and seen[-1] == 0
    del late  # its loop is closed: nothing to count, nothing raised
