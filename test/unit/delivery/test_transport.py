"""Rows between two real processes: right bytes, released once, nothing left whoever is killed."""

import gc
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from sglang.srt.layers.moe.routed_experts import transport
from sglang.srt.layers.moe.routed_experts.descriptor import BAD_WORD, READY_WORD, RowsDescriptor
from sglang.srt.layers.moe.routed_experts.reader import RoutedExpertsError, RowsReader
from sglang.srt.layers.moe.routed_experts.transport import RowsArena

MB = 1 << 20
SHAPE = (5, 4, 2)
fork = multiprocessing.get_context("fork")


def filled(arena, shape=SHAPE, dtype="uint8", seed=0, ready=True):
    """A block with random ids, and the ids."""
    ids = np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)
    block = arena.allocate(ids.nbytes)
    block.rows.numpy()[:] = np.frombuffer(ids.tobytes(), np.uint8)
    block.header[READY_WORD] = int(ready)
    return block, ids


def described(block, shape=SHAPE, dtype="uint8", start_len=0, wanted="auto"):
    return RowsDescriptor(dtype, shape, start_len, wanted, block=block.describe())


def segments_of(pid):
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in names if "sglang-routed-experts" in name]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_another_process_reads_the_same_rows_and_releases_them(dtype):
    arena = RowsArena(4 * MB, first_segment=MB)
    block, ids = filled(arena, dtype=dtype)
    message = pickle.dumps(described(block, dtype=dtype, start_len=7))
    assert len(message) < 1000, "a descriptor is all that is pickled"

    def answer(results):
        descriptor = pickle.loads(message)
        reader = RowsReader()
        rows = reader.read(descriptor).copy()
        reader.release(descriptor)
        results.put((os.getpid(), rows, descriptor.start_len))

    results = fork.Queue()
    child = fork.Process(target=answer, args=(results,), daemon=True)
    child.start()
    pid, rows, start_len = results.get(timeout=60)
    child.join()
    assert pid != os.getpid() and start_len == 7
    assert rows.dtype == dtype and np.array_equal(rows, ids)
    arena.allocate(1)
    assert arena.blocks_in_flight == 1, "the released block came back, the new one is out"


def test_reading_waits_until_the_rows_are_complete():
    arena = RowsArena(MB, first_segment=MB)
    block, ids = filled(arena, ready=False)
    descriptor = described(block)
    with pytest.raises(RoutedExpertsError, match="not collected within"):
        RowsReader().read(descriptor, timeout_s=0.05)

    def read_late(results):
        results.put(RowsReader().read(descriptor).copy())

    results = fork.Queue()
    child = fork.Process(target=read_late, args=(results,), daemon=True)
    child.start()
    time.sleep(0.2)
    assert results.empty()
    block.header[READY_WORD] = 1
    assert np.array_equal(results.get(timeout=60), ids)
    child.join()


def test_rows_that_were_never_captured_are_an_error_not_zeros():
    arena = RowsArena(MB, first_segment=MB)
    block, _ = filled(arena)
    block.header[BAD_WORD] = 1
    with pytest.raises(RoutedExpertsError, match="not every row was captured"):
        RowsReader().read(described(block))


def test_a_block_is_reused_only_after_release_and_only_once_complete():
    arena = RowsArena(MB, first_segment=MB)
    block, _ = filled(arena, shape=(900, 256, 4), ready=False)
    descriptor = described(block, shape=(900, 256, 4))
    reader = RowsReader()
    assert arena.allocate(200_000) is None, "in flight"
    reader.release(descriptor)
    assert arena.allocate(200_000) is None, "the collect kernel may still write"
    block.header[READY_WORD] = 1
    assert arena.allocate(200_000) is not None


def test_a_second_release_does_not_free_the_next_owner():
    arena = RowsArena(MB, first_segment=MB)
    big = (900, 256, 4)
    reader = RowsReader()
    first = described(filled(arena, shape=big)[0], shape=big)
    reader.release(first)
    second_block, ids = filled(arena, shape=big, seed=1)
    second = described(second_block, shape=big)
    assert second.block.offset == first.block.offset
    reader.release(first)
    assert arena.allocate(200_000) is None, "the second request's block is still out"
    assert np.array_equal(reader.read(second), ids)
    with pytest.raises(RoutedExpertsError, match="given up"):
        reader.read(first)
    assert not reader.still_ours(first) and reader.still_ours(second)


def test_a_block_that_was_never_described_returns_by_itself():
    arena = RowsArena(MB, first_segment=MB)
    block, _ = filled(arena, shape=(900, 256, 4))
    assert arena.allocate(200_000) is None
    del block
    assert arena.allocate(200_000) is not None


def test_blocks_of_a_reader_that_died_come_back_after_a_while():
    """Counted from when the reader is told: rows of a retracted request may lie for longer."""
    now = [0.0]
    arena = RowsArena(MB, first_segment=MB, clock=lambda: now[0])
    block, _ = filled(arena, shape=(900, 256, 4))
    now[0] = transport._LEASE_SECONDS + 1
    descriptor = described(block, shape=(900, 256, 4))
    now[0] = 2 * transport._LEASE_SECONDS
    assert arena.allocate(200_000) is None
    now[0] = 2 * transport._LEASE_SECONDS + 2
    assert arena.allocate(200_000) is not None
    with pytest.raises(RoutedExpertsError, match="given up"):
        RowsReader().read(descriptor)


def test_a_reader_that_comes_minutes_late_finds_nothing_whoever_has_the_memory_now():
    """The range is cut in other pieces by then: where the old header lay, others have rows."""
    now = [0.0]
    arena = RowsArena(MB, first_segment=MB, clock=lambda: now[0])
    taken = [filled(arena, shape=(300, 48, 8))[0] for _ in range(3)]
    late = described(taken[1], shape=(300, 48, 8))
    for block in taken[::2]:
        RowsReader().release(described(block, shape=(300, 48, 8)))
    now[0] = transport._LEASE_SECONDS + 1
    reader = RowsReader()
    assert reader.still_ours(late)
    arena._reclaim(3)
    assert not reader.still_ours(late)
    block = arena.allocate(900_000)
    block.rows.fill_(1)
    reader.release(late)
    assert bool((block.rows == 1).all()) and not reader.still_ours(late)


def test_a_full_arena_does_not_look_at_every_block_for_each_request():
    now = [1.0]
    arena = RowsArena(MB, first_segment=MB, clock=lambda: now[0])
    blocks = [arena.allocate(9_000) for _ in range(80)]
    assert arena.allocate(500_000) is None
    looks = []
    arena._reclaim = looks.append
    assert arena.allocate(500_000) is None and looks == [transport._CHECKS_PER_ALLOCATION]
    now[0] += transport._PAUSE_WHEN_FULL
    assert arena.allocate(500_000) is None and looks[-1] == len(blocks)


def test_grows_by_segments_up_to_its_capacity_and_registers_each():
    registered = []
    arena = RowsArena(3 * MB, lambda _, address, size: registered.append((address, size)), MB)
    assert registered and arena.num_bytes == MB
    blocks = [arena.allocate(700_000) for _ in range(3)]
    assert all(blocks) and arena.num_bytes == 3 * MB and len(registered) == 3
    assert arena.allocate(700_000) is None
    for block, (address, size) in zip(blocks, registered):
        assert address <= block.rows.data_ptr() < address + size
    assert RowsArena(3 * MB, first_segment=MB).allocate(2_500_000) is None, "1 MB is taken"
    assert RowsArena(8 * MB, first_segment=MB).allocate(2_500_000) is not None


def test_no_shared_memory_means_no_block_and_a_warning_that_says_so(caplog):
    def refuse(owner, address, size):
        raise RuntimeError("out of pinned memory")

    arena = RowsArena(4 * MB, refuse, MB)
    assert arena.allocate(10) is None and arena.num_bytes == 0
    assert "out of pinned memory" in caplog.text and "travel in the message" in caplog.text
    gc.collect()
    assert not segments_of(os.getpid())


def test_random_use_never_hands_out_overlapping_blocks():
    rng = np.random.default_rng(0)
    arena = RowsArena(4 * MB, first_segment=MB)
    reader = RowsReader()
    out = []
    for _ in range(3000):
        if out and rng.random() < 0.5:
            descriptor, ids = out.pop(rng.integers(len(out)))
            assert np.array_equal(reader.read(descriptor), ids)
            reader.release(descriptor)
        else:
            shape = (int(rng.integers(1, 400)), 48, 8)
            size = int(np.prod(shape))
            block = arena.allocate(size)
            if block is None:
                continue
            ids = rng.integers(0, 255, shape).astype(np.uint8)
            block.rows.numpy()[:] = ids.reshape(-1)
            block.header[READY_WORD] = 1
            out.append((described(block, shape), ids))
    for descriptor, ids in out:
        assert np.array_equal(reader.read(descriptor), ids)
        reader.release(descriptor)
    arena._reclaim(len(arena._leases))
    assert arena.blocks_in_flight == 0 and arena.num_bytes <= 4 * MB
    assert [s._free for s in arena._segments] == [[(0, s.num_bytes)] for s in arena._segments]


def test_rows_in_the_message_and_no_rows():
    ids = np.arange(40, dtype=np.uint16).reshape(SHAPE)
    reader = RowsReader()
    inline = RowsDescriptor("uint16", SHAPE, 0, "int32", data=ids.tobytes())
    assert np.array_equal(reader.read(pickle.loads(pickle.dumps(inline))), ids)
    empty = RowsDescriptor("uint8", (0, 4, 2), 9, "auto")
    assert reader.read(empty).shape == (0, 4, 2)
    reader.release(inline)
    reader.release(empty)
    with pytest.raises(RoutedExpertsError, match="because"):
        reader.read(RowsDescriptor("uint8", SHAPE, 0, "auto", error="because"))


@pytest.mark.parametrize("killed", ["scheduler", "reader"])
def test_kill_9_leaves_nothing(killed):
    """The survivor keeps working; neither /dev/shm nor a process keeps a segment."""
    before = set(os.listdir("/dev/shm"))

    def scheduler(channel):
        arena = RowsArena(MB, first_segment=MB)
        block, _ = filled(arena)
        channel.send((os.getpid(), described(block)))
        time.sleep(600)

    def reading(channel, descriptor):
        rows = RowsReader().read(descriptor)
        channel.send(rows.sum())
        time.sleep(600)

    parent_end, child_end = fork.Pipe()
    owner = fork.Process(target=scheduler, args=(child_end,), daemon=True)
    owner.start()
    pid, descriptor = parent_end.recv()
    parent_end, child_end = fork.Pipe()
    answerer = fork.Process(target=reading, args=(child_end, descriptor), daemon=True)
    answerer.start()
    total = parent_end.recv()
    assert len(set(segments_of(pid))) == 1
    first, second = (owner, answerer) if killed == "scheduler" else (answerer, owner)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    reader = RowsReader()
    if killed == "reader":
        assert reader.read(descriptor).sum() == total
    else:
        with pytest.raises(RoutedExpertsError, match="SGLANG_ROUTED_EXPERTS_TRANSPORT=message"):
            reader.read(descriptor)
        reader.release(descriptor)
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    assert set(os.listdir("/dev/shm")) == before


def test_segments_of_ended_schedulers_are_unmapped():
    def scheduler(channel):
        arena = RowsArena(MB, first_segment=MB)
        channel.send(described(filled(arena)[0]))
        channel.recv()

    reader = RowsReader()
    for _ in range(3):
        parent_end, child_end = fork.Pipe()
        process = fork.Process(target=scheduler, args=(child_end,), daemon=True)
        process.start()
        reader.read(parent_end.recv())
        parent_end.send("done")
        process.join()
    assert len(reader._segments) == 1


def test_another_file_under_the_same_number_is_not_touched(tmp_path):
    arena = RowsArena(MB, first_segment=MB)
    descriptor = described(filled(arena)[0])
    victim = tmp_path / "victim"
    victim.write_bytes(b"\x01" * MB)
    with open(victim, "r+b") as file:
        ref = descriptor.block._replace(fd=file.fileno(), segment="0" * 16)
        other = RowsDescriptor("uint8", SHAPE, 0, "auto", block=ref)
        with pytest.raises(RoutedExpertsError, match="another file"):
            RowsReader().read(other)
        RowsReader().release(other)
    assert victim.read_bytes() == b"\x01" * MB
