"""Speculative decoding on the CPU engine: in torch, what the base has as CUDA kernels alone.

For chains of drafts (--speculative-eagle-topk 1) and the workers that run ahead (v2). Scheduler,
workers, models and everything about rows are the real ones.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def speculate_on_cpu() -> None:
    """In this process and those forked from it, let the EAGLE workers run on the CPU."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang.srt.speculative import eagle_info_v2, eagle_utils, eagle_worker_v2, spec_utils

    os.environ["SGLANG_ENABLE_SPEC_V2"] = "1"
    torch.cuda.synchronize = torch.Tensor.record_stream = _nothing
    MHATokenToKVPool._init_kv_copy_and_warmup = _nothing  # for KV that moves: not in a chain
    eagle_utils.sgl_build_tree_kernel_efficient = _build_chain
    eagle_utils.verify_tree_greedy_func = eagle_info_v2.verify_tree_greedy_func = _verify_chain
    spec_utils.assign_req_to_token_pool_func = _assign_slots
    eagle_info_v2.assign_extend_cache_locs_func = _slots_to_verify
    eagle_info_v2.assign_draft_cache_locs_page_size_1 = _Kernel(_slots_to_draft)
    eagle_worker_v2.fill_new_verified_id = _Kernel(_last_accepted)
    DraftBackendFactory.create_decode_backend = _draft_attention
    DraftBackendFactory.create_draft_extend_backend = _nothing
    TorchNativeAttnBackend.get_verify_buffers_to_fill_after_draft = lambda self: [None, None]
    extend = TorchNativeAttnBackend.forward_extend
    TorchNativeAttnBackend.forward_extend = _verify_as_extend(extend)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Kernel:
    """Launched like one of Triton's."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _draft_attention(factory: Any) -> SimpleNamespace:
    """The draft's attention in each further step. It looks at the verified tokens alone."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    one = TorchNativeAttnBackend(factory.draft_model_runner)
    backends = [one] * factory.speculative_num_steps
    return SimpleNamespace(attn_backends=backends, init_forward_metadata=_nothing)


def _verify_as_extend(extend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Verifying a chain is extending every request by as many tokens."""

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **options: Any
    ) -> torch.Tensor:
        batch = forward_batch
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, **options)
        verified = batch.seq_lens
        drafts = torch.full_like(verified, batch.spec_info.draft_token_num)
        batch.extend_prefix_lens, batch.extend_seq_lens = verified, drafts
        batch.seq_lens = verified + drafts
        try:
            return extend(self, q, k, v, layer, batch, **options)
        finally:
            batch.seq_lens = verified
            batch.extend_prefix_lens = batch.extend_seq_lens = None

    return forward_extend


def _build_chain(
    parents: Any,
    scores: Any,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mask_mode: Any,
) -> None:
    assert topk == 1
    positions.copy_((seq_lens[:, None] + torch.arange(tokens)).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))


def _verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts as long as they are what the target says, and its next token after them."""
    right = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1)
    accept_token_num.copy_(right.sum(1))
    index = torch.arange(candidates.numel(), dtype=accept_index.dtype).view_as(candidates)
    accept_index.copy_(torch.where(index - index[:, :1] <= accept_token_num[:, None], index, -1))
    predicts.copy_(target_predict.flatten())
    return predicts, accept_index, accept_token_num


def _assign_slots(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    batch_size: int,
) -> None:
    parts = slots.split((end - start).tolist())
    for request, first, last, part in zip(requests, start, end, parts):
        req_to_token[request, first:last] = part.to(req_to_token.dtype)


def _slots_to_verify(req_to_token: torch.Tensor, **of: torch.Tensor) -> torch.Tensor:
    return _slots(req_to_token, of["req_pool_indices"], of["start_offset"], of["end_offset"])


def _slots(
    req_to_token: torch.Tensor, requests: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    ranges = zip(requests, start, end)
    return torch.cat([req_to_token[request, first:last] for request, first, last in ranges]).long()


def _slots_to_draft(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    end = seq_lens + topk * steps
    slots.copy_(_slots(req_to_token, requests, seq_lens, end))


def _last_accepted(
    accepted: torch.Tensor, accept_lens: torch.Tensor, last: torch.Tensor, tokens: int
) -> None:
    last.copy_(accepted.view(-1, tokens).gather(1, accept_lens[:, None].long() - 1)[:, 0])
