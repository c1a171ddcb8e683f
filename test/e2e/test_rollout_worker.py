"""examples/rollout_worker on a real server: rows of the engine, replayed in transformers."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeForCausalLM

from sglang.test.routed_experts.client import Client
from sglang.test.routed_experts.families import Family, make_family
from sglang.test.routed_experts.server import FLAG

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rollout_worker"
OF_THE_CONFIG = (
    *("vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"),
    *("num_hidden_layers", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("intermediate_size", "moe_intermediate_size", "max_position_embeddings"),
)

served = pytest.mark.served(FLAG, "--chunked-prefill-size", "256")


@pytest.fixture
def ordinary(client: Client, tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    """The server runs a model whose experts matter to its output: ordinary random weights."""
    config = AutoConfig.from_pretrained(tiny_model)
    options = {name: getattr(config, name) for name in OF_THE_CONFIG}
    make_family(tmp_path / "ordinary", Family("Qwen3MoeConfig", options))
    client.load(tmp_path / "ordinary")
    yield tmp_path / "ordinary"
    client.load(tiny_model)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules can be imported."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    torch.set_num_threads(1)  # a second one gains nothing on a model this small


@served
def test_replayed_routes_give_the_engines_logprobs(
    client: Client, ordinary: Path, example: None
) -> None:
    from main import difference
    from rollout import rollout

    prompts = [list(range(40, 40 + length)) for length in (1, 8, 30)]
    samples = rollout(client.url, prompts, new_tokens=30)
    trainer = Qwen3MoeForCausalLM.from_pretrained(ordinary, dtype=torch.float32).eval()
    for prompt, sample in zip(prompts, samples):
        rows = len(prompt) + len(sample.logprobs) - 1
        assert sample.experts.shape == (rows, client.layers, client.top_k)
        assert difference(trainer, sample, replay=True).max() < 1e-4
        sample.experts[:] = sample.experts.roll(1, dims=0)
        assert difference(trainer, sample, replay=True).max() > 0.1, "another token's routes"


@served
def test_the_script_shows_what_replay_is_for(
    client: Client,
    ordinary: Path,
    example: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from main import main

    monkeypatch.setattr(sys, "argv", ["main.py", "--url", client.url, "--model", str(ordinary)])
    main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    (free, apart, _), (replayed, together, _) = lines
    assert (free, replayed) == ("free", "replayed")
    assert float(together) < 0.7 * float(apart)
