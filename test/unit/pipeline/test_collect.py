"""Filing and collecting on the CPU engine's path: which rows an answer holds, and when it holds an error instead."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.collector import RowCollector
from sglang.srt.layers.moe.routed_experts.descriptor import GENERATION_WORD
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.reader import RoutedExpertsError, RowsReader
from sglang.srt.layers.moe.routed_experts.store import RING_SLOTS, RowFiler
from sglang.srt.layers.moe.routed_experts.streams import InOrderEvent
from sglang.srt.layers.moe.routed_experts.transport import RowsArena

SHAPE = RowShape(num_layers=3, top_k=2, num_experts=300)
CAPACITY, NUM_SLOTS = 16, 200


class Rank:
    """One rank's filer, collector and reader, and what a scheduler keeps beside them."""

    def __init__(self, arena: RowsArena | None) -> None:
        self.filer = RowFiler(CAPACITY, SHAPE, "cpu")
        self.filer.open(NUM_SLOTS)
        self.collector = RowCollector(self.filer, SHAPE, "cpu", arena)
        self.pool = SimpleNamespace(req_to_token=torch.zeros((4, 64), dtype=torch.int32))
        self.reader = RowsReader()

    def forward(self, row: int, start: int, slots: list[int], run: int = 0) -> np.ndarray:
        """Compute tokens [start, start + len(slots)) of pool row `row` into `slots`. Returns their ids."""
        ids = torch.tensor(
            [
                [[expert(run, start + t, layer, k) for k in range(2)] for t in range(len(slots))]
                for layer in range(3)
            ],
            dtype=torch.int32,
        )
        self.pool.req_to_token[row, start : start + len(slots)] = torch.tensor(slots)
        buffer = torch.full((3, CAPACITY, 2), -1, dtype=torch.int32)
        buffer[:, : len(slots)] = ids
        self.collector.step_processed(self.filer.file_step(buffer, 0, torch.tensor(slots)))
        return ids.permute(1, 0, 2).numpy()

    def read(self, req: SimpleNamespace) -> np.ndarray:
        descriptor = self.collector.collect(req, self.pool)
        try:
            return self.reader.read(descriptor).copy()
        finally:
            self.reader.release(descriptor)


def expert(run: int, token: int, layer: int, k: int) -> int:
    return (run * 101 + token * 7 + layer * 3 + k) % 300


def request(prompt: int, output: int, start_len: int = 0, row: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        req_pool_idx=row,
        origin_input_ids=[0] * prompt,
        output_ids=[0] * output,
        output_ids_through_stop=[0] * output,
        routed_experts_start_len=start_len,
        routed_experts_dtype="int32",
        input_embeds=None,
        fill_ids=[0] * prompt,
        cache_protected_len=0,
        return_logprob=False,
        logprob_start_len=-1,
        routed_experts_sampled=None,
    )


@pytest.fixture(params=["shared memory", "message"])
def rank(request: pytest.FixtureRequest) -> Rank:
    shared = request.param == "shared memory"
    return Rank(RowsArena(1 << 20, first_segment=1 << 20) if shared else None)


def test_rows_of_prefill_and_decode_in_order(rank: Rank) -> None:
    rows = [rank.forward(1, 0, [50, 7, 9, 120])]
    rows += [rank.forward(1, 4 + i, [60 - i]) for i in range(3)]
    expected = np.concatenate(rows)
    assert np.array_equal(rank.read(request(prompt=4, output=4)), expected)
    assert np.array_equal(rank.read(request(prompt=4, output=2)), expected[:5]), "through the stop"


@pytest.mark.parametrize("start_len", [0, 1, 3, 4, 5, 6, 7, 100])
def test_start_len_cuts_the_front_and_past_the_end_nothing_is_left(
    rank: Rank, start_len: int
) -> None:
    expected = rank.forward(1, 0, list(range(10, 16)))
    got = rank.read(request(prompt=4, output=3, start_len=start_len))
    assert got.shape[1:] == (3, 2) and np.array_equal(got, expected[start_len:])


def test_padding_goes_nowhere(rank: Rank) -> None:
    rank.forward(1, 0, [5, 6, 0, 0])
    assert rank.filer.store.status[0] == kernels.UNFILED
    assert not rank.filer.store.rows[0].any()


def test_a_slot_that_was_never_filed_is_an_error(rank: Rank) -> None:
    rank.forward(1, 0, [5, 6, 7])
    rank.pool.req_to_token[1, 1] = 99
    with pytest.raises(RoutedExpertsError, match="not every row was captured"):
        rank.read(request(prompt=3, output=1))


def test_a_step_that_could_not_be_captured_spoils_its_own_rows_only(rank: Rank) -> None:
    good = rank.forward(1, 0, [5, 6, 7])
    rank.pool.req_to_token[2, :20] = torch.arange(30, 50)
    rank.collector.step_processed(rank.filer.mark_bad(torch.arange(30, 50)))  # above CAPACITY
    with pytest.raises(RoutedExpertsError):
        rank.read(request(prompt=20, output=1, row=2))
    assert np.array_equal(rank.read(request(prompt=3, output=1)), good)
    again = rank.forward(2, 0, [30, 31])
    assert np.array_equal(rank.read(request(prompt=2, output=1, row=2)), again), "a slot recovers"


def test_an_id_out_of_range_in_a_real_row_is_an_error(rank: Rank) -> None:
    rank.pool.req_to_token[1, :2] = torch.tensor([5, 6])
    buffer = torch.zeros((3, CAPACITY, 2), dtype=torch.int32)
    buffer[2, 1, 0] = 300
    rank.collector.step_processed(rank.filer.file_step(buffer, 0, torch.tensor([5, 6])))
    with pytest.raises(RoutedExpertsError):
        rank.read(request(prompt=2, output=1))
    assert rank.read(request(prompt=1, output=1)).shape == (1, 3, 2)


def test_rows_earned_before_a_retraction_stay(rank: Rank) -> None:
    """The prefix is recomputed with other weights (run 1); the token sampled from row 4 was sampled before."""
    before = rank.forward(1, 0, [5, 6, 7, 8, 9])
    req = request(prompt=4, output=2)
    rank.collector.keep_earned(req, rank.pool)
    rank.forward(3, 0, [5, 6, 7, 8, 9], run=2)  # somebody else's now
    after = rank.forward(1, 0, [20, 21, 22, 23, 24, 25], run=1)
    req.output_ids = req.output_ids_through_stop = [0] * 3
    assert np.array_equal(rank.read(req), np.concatenate([before, after[5:]]))


def test_retracted_twice_with_a_start(rank: Rank) -> None:
    rows = [rank.forward(1, 0, [5, 6, 7, 8])]
    req = request(prompt=4, output=1, start_len=2)
    rank.collector.keep_earned(req, rank.pool)
    rows.append(rank.forward(1, 0, [10, 11, 12, 13, 14], run=1)[4:])
    req.output_ids = [0] * 2
    rank.collector.keep_earned(req, rank.pool)
    rows.append(rank.forward(1, 0, [20, 21, 22, 23, 24, 25], run=2)[5:])
    req.output_ids = req.output_ids_through_stop = [0] * 3
    assert np.array_equal(rank.read(req), np.concatenate(rows)[2:])


@pytest.mark.parametrize("cached, kept", [(4, 1), (3, 0), (1, 0)])
def test_what_the_first_token_was_sampled_with_stays(rank: Rank, cached: int, kept: int) -> None:
    """All of the prompt was computed; the cache has had the first `cached` of its tokens before."""
    before = rank.forward(2, 0, [5, 6, 7, 8])
    own = rank.forward(1, 0, [20, 21, 22, 23], run=1)
    req = request(prompt=4, output=1)
    rank.collector.keep_replaced(req, rank.pool, cached)
    assert (req.routed_experts_sampled is not None) == bool(kept)
    rank.pool.req_to_token[1, :cached] = torch.tensor([5, 6, 7, 8][:cached])
    rank.forward(3, 0, [20, 21, 22, 23][:cached], run=2)  # somebody else's now
    later = rank.forward(1, 4, [30, 31], run=1)
    req.output_ids = req.output_ids_through_stop = [0] * 3
    expected = np.concatenate([before[: cached - kept], own[cached - kept :], later])
    assert np.array_equal(rank.read(req), expected)


def test_slots_that_the_cache_gave_are_not_kept(rank: Rank) -> None:
    """A prefix hit of three tokens, and of all four by now."""
    rank.forward(2, 0, [5, 6, 7, 8])
    rank.pool.req_to_token[1, :3] = torch.tensor([5, 6, 7])
    rank.forward(1, 3, [23], run=1)
    req = request(prompt=4, output=1)
    req.cache_protected_len, req.return_logprob, req.logprob_start_len = 3, True, 0
    rank.collector.keep_replaced(req, rank.pool, 4)
    assert (req.routed_experts_sampled.start, req.routed_experts_sampled.count) == (3, 1)


def test_all_that_logprobs_were_computed_with_stays_over_a_retraction(rank: Rank) -> None:
    rank.forward(2, 0, [5, 6, 7, 8])
    own = rank.forward(1, 0, [20, 21, 22, 23], run=1)
    req = request(prompt=4, output=1, start_len=1)
    req.return_logprob, req.logprob_start_len = True, 0
    rank.collector.keep_replaced(req, rank.pool, 4)
    rank.pool.req_to_token[1, :4] = torch.tensor([5, 6, 7, 8])
    later = rank.forward(1, 4, [30], run=1)
    req.output_ids = [0] * 2
    rank.collector.keep_earned(req, rank.pool)
    again = rank.forward(1, 0, [40, 41, 42, 43, 44, 45], run=2)
    req.output_ids = req.output_ids_through_stop = [0] * 3
    assert np.array_equal(rank.read(req), np.concatenate([own[1:], later, again[5:]]))


def test_a_kept_row_that_was_not_captured_is_an_error(rank: Rank) -> None:
    rank.forward(2, 0, [5, 6, 7, 8])
    rank.pool.req_to_token[1, :4] = torch.tensor([5, 6, 7, 20])  # nothing was ever filed at 20
    req = request(prompt=4, output=1)
    rank.collector.keep_replaced(req, rank.pool, 4)
    rank.pool.req_to_token[1, 3] = 8
    with pytest.raises(RoutedExpertsError):
        rank.read(req)


def test_what_is_kept_is_held_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule stream may be far behind: nobody else may get the memory that it is to read."""
    arena = RowsArena(1 << 20, first_segment=1 << 20)
    rank = Rank(arena)
    behind = InOrderEvent()
    behind.query = lambda: False
    monkeypatch.setattr(
        "sglang.srt.layers.moe.routed_experts.collector.new_event", lambda _: behind
    )
    rank.forward(1, 0, [5, 6, 7])
    req = request(prompt=3, output=1)
    rank.collector.keep_earned(req, rank.pool)
    kept = req.routed_experts_earned.block.header[GENERATION_WORD].item()
    rank.read(req)
    rank.read(request(prompt=3, output=1))
    assert kept in [lease.generation for lease in arena._leases]
    behind.query = lambda: True
    for _ in range(2):
        rank.read(request(prompt=3, output=1))
    assert kept not in [lease.generation for lease in arena._leases]


def test_answers_do_not_depend_on_later_steps() -> None:
    """An answer is taken at once; what the slots hold afterwards is not its business."""
    rank = Rank(RowsArena(1 << 20, first_segment=1 << 20))
    expected = rank.forward(1, 0, [5, 6, 7])
    descriptor = rank.collector.collect(request(prompt=3, output=1), rank.pool)
    for step in range(2 * RING_SLOTS):
        rank.forward(2, 0, [5, 6, 7], run=step + 1)
    assert np.array_equal(rank.reader.read(descriptor), expected)
    rank.reader.release(descriptor)


def test_no_room_sends_rows_in_the_message_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Rank(RowsArena(4096, first_segment=4096))
    expected = rank.forward(1, 0, list(range(1, 17)))
    held = []
    for _ in range(20):
        held.append(rank.collector.collect(request(prompt=16, output=1), rank.pool))
        assert np.array_equal(rank.reader.read(held[-1]), expected)
    inline = [d for d in held if d.data is not None]
    assert 0 < len(inline) < len(held)
    assert caplog.text.count("SGLANG_ROUTED_EXPERTS_SHM_MB") == 1
    for descriptor in held:
        rank.reader.release(descriptor)
    assert rank.collector.collect(request(prompt=16, output=1), rank.pool).data is None, (
        "room again"
    )


def test_a_retracted_request_that_is_dropped_gives_its_memory_back() -> None:
    arena = RowsArena(1 << 20, first_segment=1 << 20)
    rank = Rank(arena)
    rank.forward(1, 0, [5, 6, 7])
    req = request(prompt=3, output=1)
    rank.collector.keep_earned(req, rank.pool)
    del req
    rank.read(request(prompt=3, output=1))
    rank.read(request(prompt=3, output=1))
    assert arena.blocks_in_flight <= 1
