"""Why EPLB is allowed: the base's routing gives away logical ids before it turns them physical."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from torch import nn

from sglang.srt.layers.moe import topk as base_topk
from sglang.srt.layers.moe.routed_experts.capture import CaptureBuffer, bind_layers
from sglang.srt.layers.moe.routed_experts.shape import RowShape

EXPERTS, REPLICAS, TOP_K, TOKENS, PADDING = 16, 24, 4, 50, 6


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].topk = base_topk.TopK(
            TOP_K, layer_id=0, use_grouped_topk=True, num_expert_group=1, topk_group=1
        )


def dispatch(algorithm: str) -> ExpertLocationDispatchInfo:
    """Every physical id differs from its logical one; the first half of the experts have two."""
    physical = torch.randperm(REPLICAS, generator=torch.Generator().manual_seed(2))
    first, second = physical[:EXPERTS], physical[EXPERTS:]
    all_replicas = torch.full((EXPERTS, 2), -1)
    all_replicas[:, 0] = first
    all_replicas[: len(second), 1] = second
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=first,
        partial_logical_to_all_physical_map=all_replicas,
        partial_logical_to_all_physical_map_num_valid=(all_replicas >= 0).sum(dim=1),
        num_physical_experts=REPLICAS,
    )


@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_captured_ids_are_logical(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU engine leaves the conversion out; it is plain torch, so that it runs here as well.
    monkeypatch.setattr(base_topk, "_is_cuda", True)
    monkeypatch.setattr(base_topk, "grouped_topk", base_topk.grouped_topk_gpu)
    model = OneLayer()
    buffer = CaptureBuffer(RowShape(1, TOP_K, EXPERTS), TOKENS, TOP_K, "cpu")
    bind_layers(model, RowShape(1, TOP_K, EXPERTS), buffer, direct=False)
    logits = torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(1))
    info = dispatch(algorithm)

    with torch.compiler.set_stance("force_eager"):
        used = base_topk.select_experts(
            hidden_states=logits,
            router_logits=logits,
            topk_config=model.layers[0].topk.topk_config,
            layer_id=0,
            num_token_non_padded=torch.tensor(TOKENS - PADDING),
            expert_location_dispatch_info=info,
        ).topk_ids

    real = slice(TOKENS - PADDING)
    chosen = logits.topk(TOP_K, dim=-1).indices
    captured = buffer.ids[0].long()
    assert torch.equal(captured[real].sort().values, chosen[real].sort().values)
    replicas = info.partial_logical_to_all_physical_map[captured[real]]
    assert (replicas == used[real].unsqueeze(-1)).any(dim=-1).all()
    assert not torch.equal(used[real].long(), captured[real])
    assert (used[TOKENS - PADDING :] == -1).all()
