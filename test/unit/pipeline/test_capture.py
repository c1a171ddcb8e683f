"""Binding top-k modules to layers, and what they write."""

import re

import pytest
import torch
import transformers
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import nn

from sglang.srt.layers.moe.routed_experts import capture
from sglang.srt.layers.moe.routed_experts.policy import RowShape

SHAPE = RowShape(num_layers=3, top_k=2, num_experts=8)


@pytest.fixture(autouse=True)
def server_args(tmp_path) -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))


def model(*topks: TopK, names: tuple = ()) -> nn.Module:
    root = nn.Module()
    root.layers = nn.ModuleList()
    for topk in topks:
        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.topk = topk
        root.layers.append(layer)
    return root


def buffer(width: int = 2, capacity: int = 5) -> capture.CaptureBuffer:
    return capture.CaptureBuffer(SHAPE, capacity, width, "cpu")


def run(topk: TopK, logits: torch.Tensor) -> torch.Tensor:
    return topk.forward_native(torch.zeros(len(logits), 4), logits).topk_ids


def test_each_layer_writes_its_own_place_and_dense_layers_stay_zero() -> None:
    ids = buffer()
    first, third = TopK(2, layer_id=0), TopK(2, layer_id=2)
    capture.bind_layers(model(first, third), SHAPE, ids, direct=False)
    expected = run(first, torch.randn(4, 8)), run(third, torch.randn(4, 8))
    assert torch.equal(ids.ids[0, :4], expected[0].int())
    assert torch.equal(ids.ids[2, :4], expected[1].int())
    assert not ids.ids[1].any() and not ids.ids[:, 4:].any()


def test_a_module_without_layer_id_is_bound_by_its_name() -> None:
    ids = buffer()
    layers = capture.bind_layers(model(TopK(2), TopK(2)), SHAPE, ids, direct=False)
    assert [layer.layer for layer in layers] == [0, 1]


def test_a_draft_is_never_bound_and_cannot_write() -> None:
    ids, draft = buffer(), TopK(2, layer_id=0)
    capture.bind_layers(model(TopK(2, layer_id=0)), SHAPE, ids, direct=False)
    run(draft, torch.randn(3, 8))
    assert not ids.ids.any()


def test_a_forward_beyond_the_buffer_writes_nothing() -> None:
    ids, topk = buffer(capacity=5), TopK(2, layer_id=1)
    (layer,) = capture.bind_layers(model(topk), SHAPE, ids, direct=True)
    run(topk, torch.randn(6, 8))
    assert not ids.ids.any() and layer.reached
    assert layer.output(6, 2) is None and layer.output(5, 2) is not None


def test_direct_output_is_the_buffer_itself_and_is_not_copied() -> None:
    ids, topk = buffer(width=2), TopK(2, layer_id=1)
    capture.bind_layers(model(topk), SHAPE, ids, direct=True)
    out = capture.direct_topk_output(topk.topk_config, torch.randn(3, 8))["topk_ids_out"]
    assert out.shape == (3, 2) and out.data_ptr() == ids.ids[1].data_ptr()
    out.fill_(5)
    capture.capture_topk_ids(topk.topk_config, out)
    assert (ids.ids[1, :3] == 5).all()


def test_a_narrower_layer_is_copied_never_direct() -> None:
    """Fused shared experts widen the buffer; a kernel that writes narrower rows must not write there."""
    ids, topk = buffer(width=3), TopK(2, layer_id=1)
    capture.bind_layers(model(topk), SHAPE, ids, direct=True)
    assert capture.direct_topk_output(topk.topk_config, torch.randn(3, 8)) == {}
    expected = run(topk, torch.randn(3, 8))
    assert torch.equal(ids.ids[1, :3, :2], expected.int())


@pytest.mark.parametrize(
    "topks, words",
    [
        ((TopK(2, layer_id=7),), "layer 7 is outside the model's 3 layers"),
        ((TopK(2, layer_id=1), TopK(2, layer_id=1)), "shares layer 1 with layers.0.mlp.topk"),
        ((TopK(3, layer_id=0),), "top-k 3 where the config says 2"),
        ((TopK(2, layer_id=0, output_format=TopKOutputFormat.BYPASSED),), "format BYPASSED"),
        ((), "has no TopK"),
    ],
)
def test_what_cannot_be_captured_is_named(topks: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        capture.bind_layers(model(*topks), SHAPE, buffer(), direct=False)
    assert "--enable-return-routed-experts" in str(error.value)


FOREIGN = {
    "Qwen2MoeConfig": {"num_experts": 8, "mlp_only_layers": [1]},
    "GptOssConfig": {"num_local_experts": 8},
    "GraniteMoeConfig": {"num_local_experts": 8},
    "JambaConfig": {"num_experts": 8},  # every other layer
    "DeepseekV3Config": {"n_routed_experts": 8, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("config", FOREIGN)
def test_one_layer_of_transformers_own_experts_is_named(config: str) -> None:
    """Whatever else is bound, and however its author calls them. Its dense layers are not named."""
    chosen = {"num_experts_per_tok": 2, "num_hidden_layers": 3} | FOREIGN[config]
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(getattr(transformers, config)(**chosen))
    sparse = [1] if config in ("JambaConfig", "DeepseekV3Config") else [0]
    ours = model(*(TopK(2, layer_id=layer) for layer in range(3)))
    for layer, block in enumerate(theirs.layers):
        if layer in sparse or not holds_experts(block):
            ours.layers[layer] = block
    with pytest.raises(ValueError, match="does not go through TopK") as error:
        capture.bind_layers(ours, SHAPE, buffer(), direct=False)
    named = {int(i) for i in re.findall(r"layers\.(\d+)\.", str(error.value))}
    assert named == set(sparse)


def holds_experts(block: nn.Module) -> bool:
    return any("xpert" in name or "moe" in name for name, _ in block.named_modules())


def test_width_counts_fused_shared_experts() -> None:
    assert capture.buffer_width(model(TopK(3, layer_id=0, num_fused_shared_experts=1))) == 3
    assert capture.buffer_width(nn.Module()) == 0


@pytest.mark.parametrize(
    "name, layer_id, expected",
    [
        ("model.layers.12.mlp.topk", None, 12),
        ("model.layers.12.mlp.topk", 3, 3),
        ("transformer.blocks.4.ffn.topk", None, 4),
        ("model.topk", None, None),
    ],
)
def test_layer_index(name: str, layer_id: int | None, expected: int | None) -> None:
    assert capture.layer_index(name, layer_id) == expected


def test_a_traced_graph_captures_as_other_forwards_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piecewise CUDA graphs are traced, once, whatever decode graphs were recorded before and after."""
    ids, topk = buffer(capacity=9), TopK(2, layer_id=1)
    (layer,) = capture.bind_layers(model(topk), SHAPE, ids, direct=True)
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def route(chosen: torch.Tensor) -> torch.Tensor:
        assert not capture.direct_topk_output(topk.topk_config, chosen)
        capture.capture_topk_ids(topk.topk_config, chosen * 1)
        return chosen + 1

    for in_graph, tokens in ((False, 6), (True, 2), (False, 7)):
        chosen = torch.randint(1, 8, (tokens, 2), dtype=torch.int32)
        layer.capture_for(in_graph)
        (layer.write if in_graph else route)(chosen)
        assert torch.equal((ids.graph_ids if in_graph else ids.ids)[1, :tokens], chosen)
    assert not ids.graph_ids[1, 2:].any()
