"""Each event of the pipeline, held and taken away: with it rows are right however slow a stream is, without it not.

Real streams and kernels, no server. A "long kernel" (torch.cuda._sleep) delays one stream on purpose.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: the CPU engine has no streams to order", allow_module_level=True)

from sglang.srt.layers.moe.routed_experts import store as store_module
from sglang.srt.layers.moe.routed_experts.capture import CaptureBuffer, LayerCapture
from sglang.srt.layers.moe.routed_experts.collector import RowCollector
from sglang.srt.layers.moe.routed_experts.descriptor import READY_WORD
from sglang.srt.layers.moe.routed_experts.graphs import SelfFilingGraphs
from sglang.srt.layers.moe.routed_experts.layout import RankLayout
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.store import RING_SLOTS, RowFiler
from sglang.srt.layers.moe.routed_experts.streams import SideStream

SHAPE = RowShape(num_layers=6, top_k=4, num_experts=64)
CAPACITY, NUM_SLOTS = 1024, 8192
MANY = 700  # a prefill is packed, and filed on the side stream
FEW = 200  # a decode step is filed at once
LONG = 200_000_000  # cycles: about 0.1 s


class Pipeline:
    """One rank's filer and collector, a schedule stream and a forward stream, as the scheduler has them."""

    def __init__(self) -> None:
        self.filer = RowFiler(CAPACITY, SHAPE, "cuda")
        self.filer.open(NUM_SLOTS)
        self.collector = RowCollector(self.filer, SHAPE, "cuda", arena=None)
        self.forward = torch.cuda.Stream()
        self.schedule = self.collects_on = torch.cuda.Stream()
        self.forwards_wait = True  # for the schedule stream, as run_batch lets them
        self.buffer = CaptureBuffer(SHAPE, CAPACITY, SHAPE.top_k, "cuda")
        self.pool = SimpleNamespace(
            req_to_token=torch.zeros((4, 2048), dtype=torch.int32, device="cuda")
        )
        self.record_graph()
        torch.cuda.synchronize()

    def record_graph(self) -> None:
        """A decode graph of FEW tokens that files its own rows."""
        layers = [LayerCapture(i, f"{i}", self.buffer, True) for i in range(SHAPE.num_layers)]
        graphs = SelfFilingGraphs(RankLayout(), self.buffer, layers, self.filer)
        self.ids = torch.zeros((FEW, SHAPE.top_k), dtype=torch.int32, device="cuda")
        self.slots = torch.zeros(FEW, dtype=torch.int64, device="cuda")
        batch = SimpleNamespace(out_cache_loc=self.slots)
        step = graphs.record(batch, lambda: [layer.write(self.ids) for layer in layers])
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            step()
        assert graphs.filed(FEW)

    def run(self, value: int, first_slot: int, num_tokens: int) -> torch.cuda.Event:
        """A forward that routes everything to expert `value` and writes KV slots from `first_slot` on."""
        with torch.cuda.stream(self.forward):
            if self.forwards_wait:
                self.forward.wait_stream(self.schedule)
            cache_loc = torch.arange(first_slot, first_slot + num_tokens, device="cuda")
            self.buffer.ids.fill_(value)
            return self.end(self.filer.file_step(self.buffer.ids, 0, cache_loc))

    def replay(self, value: int, first_slot: int) -> torch.cuda.Event:
        """As `run`, by the graph."""
        with torch.cuda.stream(self.forward):
            if self.forwards_wait:
                self.forward.wait_stream(self.schedule)
            self.slots.copy_(torch.arange(first_slot, first_slot + FEW, device="cuda"))
            self.ids.fill_(value)
            self.filer.wait_for_earlier()
            self.graph.replay()
            return self.end(self.filer.filed_here())

    def end(self, filed: torch.cuda.Event | None) -> torch.cuda.Event:
        if filed is None:  # as the base does behind sampling
            filed = torch.cuda.Event()
            filed.record()
        return filed

    def give(self, request: int, first_slot: int, num_tokens: int) -> None:
        """KV slots of a request, as the scheduler assigns them."""
        with torch.cuda.stream(self.schedule):
            self.pool.req_to_token[request, :num_tokens] = torch.arange(
                first_slot, first_slot + num_tokens, device="cuda", dtype=torch.int32
            )

    def answer(self, request: int, num_tokens: int) -> Callable[[], list[int]]:
        """Collect as the scheduler does; the returned function waits and gives the distinct ids (-1: an error)."""
        req = SimpleNamespace(req_pool_idx=request, input_embeds=None)
        with torch.cuda.stream(self.collects_on):
            block = self.collector._gather(req, self.pool, 0, num_tokens)

        def result() -> list[int]:
            torch.cuda.synchronize()
            ready, bad = block.header[:2].tolist()
            return [-1] if bad or not ready else sorted(set(block.rows.tolist()))

        return result

    def delay(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)


def ring_slot(p: Pipeline) -> list[int]:
    """The side stream is slow; later steps must not pack over a ring slot that is still being filed."""
    p.give(0, 100, MANY)
    torch.cuda.synchronize()
    p.delay(p.filer._stream.stream)
    p.run(7, 100, MANY)
    for i in range(RING_SLOTS):
        filed = p.run(20 + i, 2000, MANY)
    p.collector.step_processed(filed)
    return p.answer(0, MANY)()


def file_before_read(p: Pipeline) -> list[int]:
    """The side stream is slow; an answer must not be read from the store before its step was filed."""
    p.give(0, 100, MANY)
    p.run(3, 100, MANY)
    torch.cuda.synchronize()
    p.delay(p.filer._stream.stream)
    p.collector.step_processed(p.run(7, 100, MANY))
    return p.answer(0, MANY)()


def slots_before_collect(p: Pipeline) -> list[int]:
    """The schedule stream is slow; slot ids must be followed behind their writing and before the next owner's."""
    p.run(7, 100, MANY)
    p.collector.step_processed(p.run(3, 2000, MANY))
    p.give(0, 2000, MANY)
    torch.cuda.synchronize()
    p.delay(p.schedule)
    p.give(0, 100, MANY)
    rows = p.answer(0, MANY)
    p.give(0, 2000, MANY)  # the row of req_to_token is somebody else's at once
    return rows()


def collect_before_next_filing(p: Pipeline) -> list[int]:
    """The schedule stream is slow; the freed slots are filed over by a later step only after the collect."""
    p.give(0, 100, MANY)
    p.collector.step_processed(p.run(7, 100, MANY))
    torch.cuda.synchronize()
    p.delay(p.schedule)
    rows = p.answer(0, MANY)
    p.run(9, 100, MANY)
    return rows()


def collect_before_next_filing_at_once(p: Pipeline) -> list[int]:
    """The same for a decode step, which is filed on the forward stream."""
    p.give(0, 100, FEW)
    p.collector.step_processed(p.run(7, 100, FEW))
    torch.cuda.synchronize()
    p.delay(p.schedule)
    rows = p.answer(0, FEW)
    p.run(9, 100, FEW)
    return rows()


def collect_before_next_graph(p: Pipeline) -> list[int]:
    """The same for a decode step whose graph files its rows."""
    p.give(0, 100, FEW)
    p.collector.step_processed(p.replay(7, 100))
    torch.cuda.synchronize()
    p.delay(p.schedule)
    rows = p.answer(0, FEW)
    p.replay(9, 100)
    return rows()


def side_before_graph(p: Pipeline) -> list[int]:
    """The side stream is slow; a graph that files into a prefill's slots must do so after it, not before."""
    p.give(0, 100, FEW)
    torch.cuda.synchronize()
    p.delay(p.filer._stream.stream)
    p.run(3, 100, MANY)
    p.collector.step_processed(p.replay(7, 100))
    torch.cuda.synchronize()
    return p.answer(0, FEW)()


def side_before_at_once(p: Pipeline) -> list[int]:
    """The side stream is slow; a decode step that reuses a prefill's slots must be filed after it, not before."""
    p.give(0, 100, FEW)
    torch.cuda.synchronize()
    p.delay(p.filer._stream.stream)
    p.run(3, 100, MANY)
    p.collector.step_processed(p.run(7, 100, FEW))
    torch.cuda.synchronize()
    return p.answer(0, FEW)()


def pack_before_file(p: Pipeline) -> list[int]:
    """The forward is slow; the side stream must not file a ring slot before it was packed."""
    p.give(0, 100, MANY)
    torch.cuda.synchronize()
    p.delay(p.forward)
    p.collector.step_processed(p.run(7, 100, MANY))
    return p.answer(0, MANY)()


def without_ring_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "current_stream_waits", lambda event: None)


def without_filed_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(p.collector, "step_processed", lambda filed: None)
    p.collector._filed = None


def without_slots_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    p.collects_on = torch.cuda.Stream()


def without_collect_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    p.forwards_wait = False


def without_side_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "current_stream_waits", lambda event: None)


def without_packed_wait(p: Pipeline, patch: pytest.MonkeyPatch) -> None:
    wait, packed = SideStream.wait, [slot.packed for slot in p.filer._ring]
    patch.setattr(
        SideStream, "wait", lambda self, event: None if event in packed else wait(self, event)
    )


CASES = [
    (ring_slot, without_ring_wait),
    (file_before_read, without_filed_wait),
    (slots_before_collect, without_slots_wait),
    (collect_before_next_filing, without_collect_wait),
    (pack_before_file, without_packed_wait),
    (collect_before_next_filing_at_once, without_collect_wait),
    (collect_before_next_graph, without_collect_wait),
    (side_before_at_once, without_side_wait),
    (side_before_graph, without_side_wait),
]


@pytest.mark.parametrize("scenario, _", CASES, ids=lambda f: f.__name__)
def test_rows_are_right_however_slow_a_stream_is(scenario, _) -> None:
    assert scenario(Pipeline()) == [7]


@pytest.mark.parametrize("scenario, take_away", CASES, ids=lambda f: f.__name__)
def test_and_wrong_without_the_event(scenario, take_away, monkeypatch) -> None:
    pipeline = Pipeline()
    take_away(pipeline, monkeypatch)
    assert scenario(pipeline) != [7]


def test_no_host_synchronization() -> None:
    """Nothing between a forward's end and an answer's launch makes the host wait."""
    p = Pipeline()
    p.give(0, 100, MANY)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * RING_SLOTS):
            p.run(7, 100, MANY)
            p.run(7, 900, FEW)
            p.collector.step_processed(p.replay(7, 900))
        rows = p.answer(0, MANY)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows() == [7]


def test_whoever_sees_ready_sees_the_rows() -> None:
    """Looked at by the host the moment that READY is up; the memory held the rows before these."""
    p = Pipeline()
    for i in range(300):
        value = i % 50 + 1
        p.give(0, 100, MANY)
        p.collector.step_processed(p.run(value, 100, MANY))
        req = SimpleNamespace(req_pool_idx=0, input_embeds=None)
        with torch.cuda.stream(p.schedule):
            block = p.collector._gather(req, p.pool, 0, MANY)
        header, rows = block.header.numpy(), block.rows.numpy()
        while not header[READY_WORD]:
            pass
        assert (rows == value).all()


def test_a_graph_files_each_replay_where_its_slots_say() -> None:
    p = Pipeline()
    for i in range(5):
        p.give(i % 4, 100 + 300 * i, FEW)
        p.collector.step_processed(p.replay(i + 1, 100 + 300 * i))
        assert p.answer(i % 4, FEW)() == [i + 1]
    assert not p.buffer.ids.any(), "what other forwards capture is left alone"
