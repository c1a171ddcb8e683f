"""The capture buffer's size: term by term, and against what the base admits to a prefill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang.srt.layers.moe.routed_experts.shape import largest_forward_tokens

Build = Callable[..., ServerArgs]
CONTEXT = 4096
MOST = 4096  # running requests, where nobody says


def test_a_chunk_bounds_a_prefill(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=8192)
    assert largest_forward_tokens(args, CONTEXT, 256) == 8192


def test_a_mixed_batch_has_room_for_the_running_requests(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=8192, enable_mixed_chunk=True)
    assert largest_forward_tokens(args, CONTEXT, 256) == 8192 + 256


def test_without_chunks_one_prompt_may_be_as_long_as_the_context(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=-1, max_prefill_tokens=2048)
    assert largest_forward_tokens(args, CONTEXT, 16) == CONTEXT
    args = server_args(chunked_prefill_size=-1, max_prefill_tokens=16384)
    assert largest_forward_tokens(args, CONTEXT, 16) == 16384


def test_a_decode_step_holds_every_running_request(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=64)
    assert largest_forward_tokens(args, CONTEXT, 256) == 256
    assert largest_forward_tokens(args, CONTEXT) == MOST
    args = server_args(chunked_prefill_size=64, max_running_requests=100)
    assert largest_forward_tokens(args, CONTEXT) == 100


def test_a_verify_step_holds_every_draft_token(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=64)
    args.speculative_num_draft_tokens = 8
    assert largest_forward_tokens(args, CONTEXT, 256) == 256 * 8


def test_a_rank_of_dp_attention_has_its_part_of_chunk_and_requests(server_args: Build) -> None:
    args = server_args(
        tp_size=4,
        dp_size=2,
        enable_dp_attention=True,
        chunked_prefill_size=256,
        max_running_requests=601,
    )
    # 300 requests a rank; the attention-TP group has two ranks, and its batches an even length.
    assert largest_forward_tokens(args, CONTEXT) == 300
    assert largest_forward_tokens(args, CONTEXT, 127) == 128


def test_replicas_do_not_share_requests(server_args: Build) -> None:
    args = server_args(dp_size=2, chunked_prefill_size=64, max_running_requests=600)
    assert largest_forward_tokens(args, CONTEXT) == 600


def test_padding_reaches_the_next_multiple_of_the_group(server_args: Build) -> None:
    args = server_args(tp_size=4, chunked_prefill_size=66)
    args.speculative_num_draft_tokens = 3
    assert largest_forward_tokens(args, CONTEXT, 21) == 24 * 3
    assert largest_forward_tokens(args, CONTEXT, 4) == 68


def test_a_piecewise_graph_is_captured_at_its_full_size(server_args: Build) -> None:
    args = server_args(chunked_prefill_size=64)
    args.disable_piecewise_cuda_graph = False
    args.piecewise_cuda_graph_tokens = [512, 1024]
    assert largest_forward_tokens(args, CONTEXT, 16) == 1024


class Admission:
    """The base's prefill scheduling, with an empty KV pool."""

    def __init__(self, args: ServerArgs) -> None:
        set_global_server_args_for_scheduler(args)
        self.args = args
        allocator = TokenToKVPoolAllocator(10**6, torch.float32, "cpu", None, False)
        params = CacheInitParams(
            disable=args.disable_radix_cache,
            req_to_token_pool=ReqToTokenPool(64, CONTEXT, "cpu", False),
            token_to_kv_pool_allocator=allocator,
            page_size=1,
        )
        self.cache = (ChunkCache if args.disable_radix_cache else RadixCache)(params)
        self.allocator = allocator

    def tokens(self, prompts: Iterator[int], ignore_eos: bool) -> int:
        """Tokens in the prefill batch made of the first of these prompt lengths."""
        args = self.args
        chunk = args.chunked_prefill_size
        adder = PrefillAdder(
            1,
            self.cache,
            self.allocator,
            None,
            0.7,
            args.max_prefill_tokens,
            chunk if chunk > 0 else None,
        )
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=ignore_eos)
        for number, length in enumerate(prompts):
            request = Req(str(number), "", [number] * length, sampling)
            request.init_next_round_input(self.cache)
            admitted = adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
            if admitted != AddReqResult.CONTINUE:
                break
        return sum(request.extend_input_len for request in adder.can_run_list)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("disable_radix_cache", [False, True])
@pytest.mark.parametrize("chunk", [-1, 1000])
def test_no_admitted_prefill_exceeds_the_buffer(
    chunk: int, disable_radix_cache: bool, ignore_eos: bool, server_args: Build
) -> None:
    args = server_args(
        chunked_prefill_size=chunk,
        max_prefill_tokens=2500,
        disable_radix_cache=disable_radix_cache,
    )
    admission = Admission(args)
    bound = largest_forward_tokens(args, CONTEXT, 16)
    generator = random.Random(1)
    for longest in (200, 1500, CONTEXT - 1):
        for _ in range(20):
            prompts = (generator.randint(2, longest) for _ in itertools.count())
            assert 0 < admission.tokens(prompts, ignore_eos) <= bound


def test_the_last_prompt_may_overshoot_by_its_whole_length(server_args: Build) -> None:
    """Why the bound is a sum: the longer of the two would be too little."""
    args = server_args(chunked_prefill_size=-1, max_prefill_tokens=2500, disable_radix_cache=True)
    prompts = iter([2499, CONTEXT - 1, 5])
    admitted = Admission(args).tokens(prompts, ignore_eos=True)
    assert max(2500, CONTEXT) < admitted <= largest_forward_tokens(args, CONTEXT, 16)
