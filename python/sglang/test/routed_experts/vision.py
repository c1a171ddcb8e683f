"""A small random Qwen3-VL-MoE with its processor: a wrapper whose language model's config lies inside."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from sglang.test.routed_experts.families import LAYERS, draw
from sglang.test.routed_experts.tiny_moe import byte_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"  # in a prompt, where an image belongs
VOCABULARY = 264
EXPERTS, TOP_K = 16, 4
_PIXELS = 32  # of an image token's side: two patches


def make_vision_model(folder: Path, seed: int = 0) -> nn.Module:
    """Write config, float32 weights, tokenizer and image processor into `folder`.

    Returns:
        transformers' model with these weights, in evaluation mode: the reference.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": LAYERS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,  # hub configs have it
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],  # the base counts on three
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3VLMoeForConditionalGeneration._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        draw(model)
    model.save_pretrained(folder)
    _as_on_the_hub(folder / "model.safetensors")
    size = {"shortest_edge": _PIXELS**2, "longest_edge": 16 * _PIXELS**2}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, size=size
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    return model.eval()


def _as_on_the_hub(path: Path) -> None:
    """The hub has experts' weights [experts, inputs, outputs]; transformers 5 saves them the other way round."""
    tensors = {
        name: x.transpose(1, 2).contiguous() if ".experts." in name else x
        for name, x in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
