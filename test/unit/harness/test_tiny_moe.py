"""The model under test: the same each time, no choice that rounding could change, much variety."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.tiny_moe import Shape, make_model

SHAPE = Shape(layers=6, experts=32, top_k=4)
TEXT = "The river rose in the night. Ä 你 {}[]\n" * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), SHAPE)


def tokens(model: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(text)["input_ids"]


def test_a_token_a_byte_and_back(model: Path) -> None:
    ids = tokens(model, TEXT)
    assert len(ids) == len(TEXT.encode())
    assert AutoTokenizer.from_pretrained(model).decode(ids) == TEXT


def test_every_choice_is_won_by_far(model: Path) -> None:
    """Rounding is about 1e-6 here; the closest choice must be a thousand times as far."""
    loaded = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([tokens(model, TEXT)])
        scores = torch.stack(loaded(ids, output_router_logits=True).router_logits).log()
        head = loaded(ids).logits
    best = scores.topk(SHAPE.top_k + 1).values
    assert (best[..., -2] - best[..., -1]).min() > 5e-3
    two = head.topk(2).values
    assert (two[..., 0] - two[..., 1]).min() > 1e-3


def test_routing_is_spread_and_depends_on_what_came_before(model: Path) -> None:
    router = TransformersRouter(model)
    ids = tokens(model, TEXT)
    rows, other = router.route([ids, [ids[0] + 1, *ids[1:]]])
    assert rows.shape == (len(ids) - 1, SHAPE.layers, SHAPE.top_k)
    used = [len(np.unique(rows[:, layer])) for layer in range(SHAPE.layers)]
    assert min(used) > 0.8 * SHAPE.experts
    # A change in the first token is seen by later ones, in deep layers further on.
    reach = [np.nonzero((rows[:, i] != other[:, i]).any(axis=1))[0].max() for i in (0, 5)]
    assert 0 < reach[0] < reach[1]


def test_batches_and_padding_change_nothing(model: Path) -> None:
    router = TransformersRouter(model)
    ids = tokens(model, TEXT)
    sequences = [ids[:2], ids[:150], ids[3:60], ids[:3]]
    for together, sequence in zip(router.route(sequences), sequences):
        assert (router.route([sequence])[0] == together).all()


def test_the_same_shape_gives_the_same_model(model: Path, tmp_path: Path) -> None:
    weights = "model.safetensors"
    made = (make_model(tmp_path, SHAPE) / weights).read_bytes()
    assert made == (model / weights).read_bytes()
    other = make_model(tmp_path, Shape(layers=6, experts=32, top_k=4, seed=1)) / weights
    assert other.read_bytes() != made


def test_an_unfinished_model_is_made_again(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path, SHAPE)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"half")
    make_model(tmp_path, SHAPE)
    whole = (model / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("wrong", [{"hidden": 48}, {"top_k": 33}, {"top_k": 0}])
def test_an_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Shape(**wrong)
