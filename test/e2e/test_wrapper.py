"""A wrapper of a language model (Qwen3-VL-MoE) on the CPU engine: text alone, and with images, against transformers.

An image's tokens have rows like all others. Mismatches allowed: none; no choice is close (see test_families.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, BatchFeature

from sglang.srt.layers.moe.routed_experts.wire import extract_routed_experts_from_meta_info
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.engines import Engines, generate
from sglang.test.routed_experts.families import LAYERS
from sglang.test.routed_experts.router_probe import RouterProbe
from sglang.test.routed_experts.vision import IMAGE, TOP_K, make_vision_model

NEW_TOKENS = 8
PROMPTS = (
    "What is it?",
    "The river rose in the night. " * 4,
    f"{IMAGE} What is it?",
    f"One {IMAGE} two {IMAGE} three",
)
SIZES = ((96, 128), (64, 64), (32, 160))


def test_rows_of_text_and_of_images(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    probe = RouterProbe(make_vision_model(tmp_path / "model"))
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    paths = iter(str(tmp_path / f"{i}.png") for i in range(len(SIZES)))
    images = [[next(paths) for _ in range(prompt.count(IMAGE))] for prompt in PROMPTS]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    requests = [
        {
            "prompt": prompt,
            "image_data": files or None,
            "sampling_params": sampling,
            "return_routed_experts": True,
            "return_logprob": True,
        }
        for prompt, files in zip(PROMPTS, images)
    ]
    outputs = Engines().run(
        tmp_path / "model",
        generate,
        requests * 2,  # the second time, prompts are in the prefix cache
        log=tmp_path / "engine.log",
        skip_tokenizer_init=False,
        mm_attention_backend="sdpa",
    )
    for prompt, files, output in zip(PROMPTS * 2, images * 2, outputs):
        inputs = processor(
            text=[prompt], images=[Image.open(f) for f in files] or None, return_tensors="pt"
        )
        compare(probe, inputs, output)


def compare(probe: RouterProbe, inputs: BatchFeature, output: dict[str, Any]) -> None:
    meta = output["meta_info"]
    sampled = [token for _, token, *_ in meta["output_token_logprobs"]]
    tokens = inputs.pop("input_ids")[0].tolist()
    assert meta["prompt_tokens"] == len(tokens)
    inputs.pop("attention_mask")
    if (kinds := inputs.pop("mm_token_type_ids", None)) is not None:
        more = torch.zeros((1, len(sampled) - 1), dtype=kinds.dtype)
        inputs["mm_token_type_ids"] = torch.cat([kinds, more], dim=1)
    expected, logprobs = probe.route(tokens + sampled, **inputs)
    rows = extract_routed_experts_from_meta_info(output).reshape(-1, LAYERS, TOP_K)
    tally = Tally()
    tally.add(rows, expected)
    ours = np.array([value for value, *_ in meta["output_token_logprobs"]])
    drift = float(np.abs(ours - logprobs[-len(ours) :]).max())
    assert tally.mismatches == 0, (tally, drift, probe.margin)
    assert drift < probe.margin / 4, f"{drift=} is too much for a {probe.margin=}: no proof"
