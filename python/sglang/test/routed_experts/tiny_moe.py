"""The model under test: a small random Qwen3-MoE whose routing cannot be changed by rounding.

With ordinary random weights, one choice in a few million lies so close to another that the batch
size or the BLAS decides it, and every later layer and token differs after that. Here the router's
scores are odd integers plus a tie-break of its own for every expert, so that any float32 engine
makes the same choices: a single different id is a fault of the engine, not luck.

How: a token's embedding is a random code of +-1. The residual stream is the code, a constant one,
and two memories. In every layer sharp attention replaces the memories: the first by part of the
code of the token a few places back, the second by a shuffle of the memories that the layer before
had there, so that deep layers look far back. Router and output head multiply all that by random
signs. Experts run on random weights and write far below what a choice needs to change.
"""

import json
import math
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 264  # 256 bytes and the special tokens, padded to a multiple of 8

_HEADS = 4  # two that write the memories anew, two that clear them
_SHARPNESS = 16.0  # weights off the attended token are below exp(-60)
_TEMPERATURE = 4.0  # divides scores; keeps the experts' shares of a token comparable
_EXPERT_OUTPUT = 1e-6


@dataclass(frozen=True)
class Shape:
    """Size of the model. `hidden` is a multiple of 32: half code, a quarter for each memory.

    recall: weight of the memories for the next token. Below one, the last token alone often decides
        it, so that a draft model that knows no other (drafts.py) is often right. A power of two.
    """

    layers: int = 8
    experts: int = 32
    top_k: int = 4
    hidden: int = 64
    max_tokens: int = 8192
    seed: int = 0
    recall: float = 1.0

    def __post_init__(self) -> None:
        if self.hidden % 32:
            raise ValueError(f"hidden must be a multiple of 32, not {self.hidden}")
        if not 0 < self.top_k <= self.experts:
            raise ValueError(f"top_k must be within 1..{self.experts}, not {self.top_k}")


def make_model(folder: Path, shape: Shape) -> Path:
    """Write config, float32 weights and byte-level tokenizer of a model into `folder`.

    The same shape gives the same model. The config is written last: a folder that holds it is
    complete and is kept, if it is of this shape.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape)
    stamp = folder / "config.json"
    wanted = json.dumps(config.to_dict() | {"shape": vars(shape)}, default=str, sort_keys=True)
    made_for = folder / "made_for.json"
    if stamp.exists() and made_for.exists() and made_for.read_text() == wanted:
        return folder
    stamp.unlink(missing_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    printable = tokenizer.encode(string.ascii_letters + string.digits + string.punctuation + " \n")
    weights = _weights(shape, config, printable)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    made_for.write_text(wanted)
    config.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be sent; three special tokens and a chat template."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _config(shape: Shape) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="float32",
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        head_dim=shape.hidden // _HEADS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        num_hidden_layers=shape.layers,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        intermediate_size=shape.hidden,
        moe_intermediate_size=shape.hidden // 4,
        max_position_embeddings=shape.max_tokens,
        rope_theta=10000.0,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )


def _weights(shape: Shape, config: Qwen3MoeConfig, printable: list[int]) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(shape.seed)
    hidden, eps = shape.hidden, config.rms_norm_eps
    one = hidden // 2 - 1  # where the constant lies

    def signs(*size: int) -> torch.Tensor:
        return torch.randint(0, 2, size, generator=rng).float() * 2 - 1

    def scores(rows: int) -> torch.Tensor:
        """[rows, hidden]: random signs, and for each row a tie-break on the constant."""
        weight = signs(rows, hidden)
        weight[:, one] = torch.randperm(rows, generator=rng) * (2 / rows)
        return weight / _TEMPERATURE

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(*size, generator=rng) * std

    embedding = signs(VOCABULARY, hidden)
    embedding[:, one] = 1
    embedding[:, one + 1 :] = 0
    head = scores(VOCABULARY)
    head[:, one + 1 :] *= shape.recall
    unprintable = torch.ones(VOCABULARY, dtype=torch.bool)
    unprintable[printable] = False
    head[unprintable, one] = -1000
    unit = torch.full((hidden,), math.sqrt(1 + eps))
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": unit,
    }
    for i in range(shape.layers):
        layer = {
            "input_layernorm.weight": unit if i else torch.full((hidden,), math.sqrt(0.5 + eps)),
            "post_attention_layernorm.weight": unit,
            "mlp.gate.weight": scores(shape.experts),
        }
        layer |= {f"self_attn.{k}": v for k, v in _attention(hidden, config, i == 0, rng).items()}
        inner = config.moe_intermediate_size
        for e in range(shape.experts):
            expert = f"mlp.experts.{e}"
            layer[f"{expert}.gate_proj.weight"] = normal(inner, hidden, std=hidden**-0.5)
            layer[f"{expert}.up_proj.weight"] = normal(inner, hidden, std=hidden**-0.5)
            layer[f"{expert}.down_proj.weight"] = normal(hidden, inner, std=_EXPERT_OUTPUT)
        weights |= {f"model.layers.{i}.{name}": tensor.clone() for name, tensor in layer.items()}
    return weights


def _attention(
    hidden: int, config: Qwen3MoeConfig, first: bool, rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """Projections of a layer: heads 0, 1 copy from 1 to 3 tokens back; 2, 3 clear what is there."""
    dim = config.head_dim
    one, memory = hidden // 2 - 1, hidden // 2
    angles = config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
    query, key, value = (torch.zeros(_HEADS, dim, hidden) for _ in range(3))
    out = torch.zeros(hidden, _HEADS, dim)
    back = [*(torch.randint(1, 4, (2,), generator=rng).tolist()), 0, 0]
    for head, places in enumerate(back):
        query[head, :, one] = torch.cat([(angles * places).cos(), -(angles * places).sin()])
        key[head, : dim // 2, one] = 1
        target = torch.arange(dim)
        out[memory + (head % 2) * dim + target, head, target] = 1 if head < 2 else -1
        if head >= 2:
            source = memory + (head % 2) * dim + target
        elif head == 0 or first:
            source = torch.randperm(one, generator=rng)[:dim]
        else:
            source = memory + torch.randperm(2 * dim, generator=rng)[:dim]
        sign = torch.randint(0, 2, (dim,), generator=rng).float() * 2 - 1
        value[head, target, source] = sign if head < 2 else torch.ones(dim)
    norm = torch.full((dim,), _SHARPNESS)
    return {
        "q_proj.weight": query.reshape(-1, hidden),
        "k_proj.weight": key.reshape(-1, hidden),
        "v_proj.weight": value.reshape(-1, hidden),
        "o_proj.weight": out.reshape(hidden, -1),
        "q_norm.weight": norm,
        "k_norm.weight": norm,
    }
