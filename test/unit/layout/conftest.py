"""Batches of every rank, padded by the base's own code; of process groups only the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang.srt.layers import dp_attention
from sglang.srt.model_executor import forward_batch_info

FIRST_SLOT = 1000


@dataclass
class PaddedBatch:
    """A batch of one rank after the base has padded it.

    Attributes:
        own: its tokens, without padding.
        buffer_tokens: the length that the base gives the buffer of all DP ranks' tokens.
    """

    batch: ForwardBatch
    own: int
    buffer_tokens: int


@pytest.fixture
def pad(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PaddedBatch]:
    """`pad(tokens of each DP rank, rank)`: that rank's batch after `prepare_mlp_sync_batch`."""

    def run(
        counts: Sequence[int],
        dp_rank: int = 0,
        *,
        group_size: int = 1,
        prefill: bool = False,
    ) -> PaddedBatch:
        own = counts[dp_rank] if len(counts) > 1 else counts[0]
        ranks = {
            "get_attention_tp_size": group_size,
            "get_attention_cp_size": 1,
            "get_attention_dp_rank": dp_rank,
        }
        for name, value in ranks.items():
            monkeypatch.setattr(forward_batch_info, name, lambda value=value: value)
        monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", len(counts))
        monkeypatch.setattr(dp_attention, "_ATTN_DP_RANK", dp_rank)
        batch = _batch(own, list(counts), prefill)
        batch.prepare_mlp_sync_batch(_RUNNER)
        return PaddedBatch(batch, own, batch.global_dp_buffer_len)

    return run


_RUNNER = SimpleNamespace(
    attn_backend=SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1),
    is_draft_worker=False,
    server_args=SimpleNamespace(enable_two_batch_overlap=False),
)


def _batch(own: int, counts: list[int], prefill: bool) -> ForwardBatch:
    """A request a token where the rank decodes, one in all where it prefills, or idle."""
    requests = min(own, 1) if prefill else own
    mode = ForwardMode.IDLE if own == 0 else ForwardMode.EXTEND if prefill else ForwardMode.DECODE
    lengths = torch.full((requests,), 7, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=requests,
        input_ids=torch.zeros(own, dtype=torch.int64),
        req_pool_indices=torch.zeros(requests, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.arange(FIRST_SLOT, FIRST_SLOT + own),
        positions=torch.zeros(own, dtype=torch.int64),
        lora_ids=[None] * requests,
        is_extend_in_batch=prefill,
    )
    batch.global_num_tokens_cpu = list(counts)
    batch.global_num_tokens_gpu = torch.tensor(counts)
    batch.global_num_tokens_for_logprob_cpu = list(counts)
    if prefill and own:
        batch.extend_seq_lens = torch.tensor([own])
    return batch
