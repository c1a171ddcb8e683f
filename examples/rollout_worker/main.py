"""Roll out a batch on a running server, and score it in a trainer with and without replay.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts &
    python examples/rollout_worker/main.py --url http://127.0.0.1:30000 --model MODEL

Trainer and engine compute a little differently, so that some tokens would take other experts in
the trainer: the first line of the table. With the engine's routes replayed, none do.
"""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext

import torch
from replay import completion_logprobs, replayed
from rollout import Sample, rollout
from transformers import Qwen3MoeForCausalLM


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--url", required=True, help="of the server")
    arguments.add_argument("--model", required=True, help="the same Qwen3-MoE, for transformers")
    arguments.add_argument("--dtype", default="bfloat16", help="of the trainer")
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--new-tokens", type=int, default=64)
    given = arguments.parse_args()
    dtype = getattr(torch, given.dtype)
    trainer = Qwen3MoeForCausalLM.from_pretrained(given.model, dtype=dtype).eval()
    rng = random.Random(0)
    letters = range(min(256, trainer.config.vocab_size))
    prompts = [rng.choices(letters, k=rng.randint(5, 50)) for _ in range(given.prompts)]
    samples = rollout(given.url, prompts, given.new_tokens)
    tokens = sum(len(sample.tokens) for sample in samples)
    print(f"{len(samples)} completions, {tokens} tokens, experts of the first: "
          f"{tuple(samples[0].experts.shape)} [tokens, layers, top_k]")  # fmt: skip
    print("trainer     logprob differs by: mean   largest")
    for name, replay in (("free", False), ("replayed", True)):
        differences = torch.cat([difference(trainer, sample, replay) for sample in samples])
        print(f"{name:12}{differences.mean():23.6f}{differences.max():10.6f}")


@torch.inference_mode()
def difference(trainer: Qwen3MoeForCausalLM, sample: Sample, replay: bool) -> torch.Tensor:
    """|trainer's log-probability - engine's|, [completion]."""
    tokens = sample.tokens.to(trainer.device)
    with replayed(trainer, sample.experts) if replay else nullcontext():
        logprobs = completion_logprobs(trainer, tokens, len(sample.logprobs))
    return (logprobs.cpu() - sample.logprobs).abs()


if __name__ == "__main__":
    main()
