"""The base's prefix caches, which put their own KV slots in place of a request's: its answer keeps what it was sampled with.

Real caches, allocators, store and collector, called in the order of the scheduler; experts are the test's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool, SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

from sglang.srt.layers.moe import routed_experts_capturer
from sglang.srt.layers.moe.routed_experts.collector import RowCollector
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.reader import RowsReader
from sglang.srt.layers.moe.routed_experts.store import RowFiler
from sglang.srt.mem_cache import mamba_radix_cache

SHAPE = RowShape(num_layers=2, top_k=2, num_experts=64)
TOKENS, LONGEST = 256, 64
PROMPT = [11, 12, 13, 14, 15, 16]


class StatePool:
    """States of a hybrid model: none that matters here."""

    def __init__(self) -> None:
        self._next = 100

    def fork_from(self, value: torch.Tensor) -> torch.Tensor:
        self._next += 1
        return torch.tensor([self._next])

    def free(self, value: torch.Tensor) -> None:
        pass


def radix(pool: ReqToTokenPool, page_size: int = 1, is_eagle: bool = False) -> BasePrefixCache:
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, page_size, torch.bfloat16, "cpu", None, False
        )
    return RadixCache(CacheInitParams(False, pool, allocator, page_size, is_eagle=is_eagle))


def hybrid(pool: ReqToTokenPool) -> BasePrefixCache:
    pool.mamba_pool = StatePool()
    pool.get_mamba_indices = torch.tensor
    allocator = TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", None, False)
    return MambaRadixCache(CacheInitParams(False, pool, allocator, 1))


def sliding_window(pool: ReqToTokenPool) -> BasePrefixCache:
    kv = SWAKVPool(TOKENS, TOKENS, 1, torch.bfloat16, 1, 1, [1], [0], False, "cpu")
    allocator = SWATokenToKVPoolAllocator(TOKENS, TOKENS, 1, torch.bfloat16, "cpu", kv, False)
    return SWARadixCache(CacheInitParams(False, pool, allocator, 1, sliding_window_size=4))


class Capturer(routed_experts_capturer._TargetCapturer):
    def __init__(self, collector: RowCollector) -> None:
        self._collector = collector


class Rank:
    """A scheduler's prefills, without the scheduler."""

    def __init__(self, make_cache, **options) -> None:
        self.filer = RowFiler(LONGEST, SHAPE, "cpu")
        self.filer.open(TOKENS + 64)
        self.collector = RowCollector(self.filer, SHAPE, "cpu", None)
        self.pool = ReqToTokenPool(
            size=8, max_context_len=LONGEST, device="cpu", enable_memory_saver=False
        )
        self.cache = make_cache(self.pool, **options)
        self._rows = iter(range(8))

    def admit(self, prompt: list[int], logprobs: bool = False) -> SimpleNamespace:
        """Look the prompt up and give it KV slots, page after page."""
        req = SimpleNamespace(
            req_pool_idx=next(self._rows),
            origin_input_ids=prompt,
            fill_ids=prompt,
            output_ids=[],
            return_routed_experts=True,
            routed_experts_start_len=0,
            routed_experts_dtype="int32",
            return_logprob=logprobs,
            logprob_start_len=0 if logprobs else -1,
            extra_key=None,
            priority=0,
            mamba_last_track_seqlen=None,
            swa_uuid_for_lock=None,
        )
        key = RadixKey([] if logprobs else prompt[:-1], None)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        req.cache_protected_len = len(found.device_indices)
        req.last_node = found.last_device_node
        locked = self.cache.inc_lock_ref(req.last_node)
        req.swa_uuid_for_lock = getattr(locked, "swa_uuid_for_lock", None)
        page = self.cache.page_size
        count = len(prompt) - req.cache_protected_len
        own = self.cache.token_to_kv_pool_allocator.alloc(-(-count // page) * page)[:count]
        slots = torch.cat([found.device_indices, own])
        self.pool.write((req.req_pool_idx, slice(0, len(prompt))), slots.int())
        req.own_slots = own
        return req

    def prefill(self, *reqs: SimpleNamespace, experts: list[int]) -> None:
        """One forward; request i is routed to `experts[i]`. Then its result is processed."""
        slots = torch.cat([req.own_slots for req in reqs])
        counts = torch.tensor([len(req.own_slots) for req in reqs])
        routed = torch.tensor(experts).repeat_interleave(counts).int()
        buffer = torch.zeros((2, LONGEST, 2), dtype=torch.int32)
        buffer[:, : len(routed)] = routed[None, :, None]
        self.collector.step_processed(self.filer.file_step(buffer, 0, slots))
        for req in reqs:
            req.output_ids.append(7)
            req.output_ids_through_stop = req.output_ids
            self.cache.cache_unfinished_req(req)

    def answer(self, req: SimpleNamespace) -> list[int]:
        return RowsReader().read(self.collector.collect(req, self.pool))[:, 0, 0].tolist()


@pytest.fixture(
    params=[
        (radix, {}),
        (radix, {"page_size": 2}),
        (radix, {"page_size": 4}),
        (radix, {"is_eagle": True}),
        (hybrid, {}),
        (sliding_window, {}),
    ],
    ids=lambda case: case[0].__name__ + "".join(f" {k}={v}" for k, v in case[1].items()),
)
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rank:
    make_cache, options = request.param
    args = SimpleNamespace(mamba_cache_chunk_size=64)
    monkeypatch.setattr(mamba_radix_cache, "get_global_server_args", lambda: args)
    rank = Rank(make_cache, **options)
    monkeypatch.setattr(routed_experts_capturer, "_capturer", Capturer(rank.collector))
    return rank


def test_a_prompt_that_comes_again_under_other_weights(rank: Rank) -> None:
    first = rank.admit(PROMPT)
    rank.prefill(first, experts=[1])
    again = rank.admit(PROMPT)
    rank.prefill(again, experts=[6])
    assert rank.answer(first) == [1] * len(PROMPT)
    assert rank.answer(again)[-1] == 6, "the token was sampled by the new weights"


def test_one_prompt_twice_in_a_forward(rank: Rank) -> None:
    reqs = [rank.admit(PROMPT), rank.admit(PROMPT)]
    rank.prefill(*reqs, experts=[1, 6])
    assert rank.answer(reqs[0]) == [1] * len(PROMPT)
    assert rank.answer(reqs[1])[-1] == 6, "the other request's forward is not its own"


def test_logprobs_of_a_prompt_that_is_cached(rank: Rank) -> None:
    rank.prefill(rank.admit(PROMPT), experts=[1])
    again = rank.admit(PROMPT, logprobs=True)
    rank.prefill(again, experts=[6])
    assert rank.answer(again) == [6] * len(PROMPT)


def test_a_new_prompt_costs_nothing(rank: Rank) -> None:
    """Nothing is kept where nothing is replaced: neither of a new prompt nor of one that shares a beginning."""
    rank.prefill(rank.admit(PROMPT), experts=[1])
    longer = rank.admit([*PROMPT, 17, 18], logprobs=False)
    rank.prefill(longer, experts=[6])
    assert getattr(longer, "routed_experts_sampled", None) is None
    assert rank.answer(longer)[-2:] == [6, 6]
