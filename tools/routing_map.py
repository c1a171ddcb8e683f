"""Write docs/routing_paths.md: how each MoE model of the base routes, and whether capture sees it.

Reads the model files' syntax trees, imports none of them: python tools/routing_map.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "build/sglang/python/sglang/srt/models"
DOCUMENT = ROOT / "docs/routing_paths.md"
PACKAGE = "sglang.srt.models"
DRAFT_SUFFIXES = ("NextN", "MTP", "Eagle", "Eagle3")

INTRODUCTION = """\
# Which routing paths the capture sees

Written by `tools/routing_map.py` from the model files; a test keeps it true.

A MoE block that routes through `TopK` is captured, whatever the model: capture stands where every
top-k path of `TopK` ends, before logical ids become physical ones. Blocks are bound to decoder
layers after loading, by the index in their module's name where they have no `layer_id`. Draft
models (NextN, MTP, EAGLE) use the same blocks, but are never bound, and are left out below. A model
is named beside every block that its code refers to; its config says which it has, if any.

Paths on CUDA: *softmax* and *sigmoid* are `fused_topk`, whose kernel writes straight into the
capture buffer. *biased grouped* does so where it takes FlashInfer's kernel (no fused shared
experts, a power of two of experts, groups of a fitting size). Otherwise, and for *grouped*,
*custom* (the model's own function, called by `TopK`) and *native* (torch), it is one copy a layer.
*own* is a block that routes without `TopK` and hands over its ids by a seam of ours. Where a cell
names several, the model's config decides. Fused shared experts are columns, which are dropped.

The output format decides whether there are ids at all: `triton_kernel`, `flashinfer_trtllm` and
`flashinfer_mxfp4` (`--moe-runner-backend`) route inside the MoE kernel and are refused with the
flag. Models marked *standard* return ids with some of these back ends where they are not quantized;
they are refused all the same.
"""

BYPASSED = """
## Blocks that capture does not see

Each of them is an error at start-up that names the layers, as are experts, of a single layer even,
that SGLang does not replace in a model run by transformers' code: they are known by the shapes of
their weights. `--model-impl mindspore` routes outside torch and is refused.

| file: block | how it routes | models |
|---|---|---|
"""

SHOWN = """
Two-batch overlap, `--enable-torch-compile` and compiled piecewise graphs are refused
([refusals.md](refusals.md)).

## Shown against transformers

Allowed mismatches are none in all of this.

### On the CPU engine

`test/e2e/test_families.py` serves small random models of these families and compares every id with
the choice of transformers' router on the same weights. It also shows that no choice was so close
that rounding could have changed it.

| family | path on the CPU engine |
|---|---|
| Qwen2-MoE | softmax; a shared expert beside the routed ones |
| Mixtral, OLMoE | softmax |
| Granite-MoE | softmax; bound by name, its top-k has no `layer_id` |
| GLM-4-MoE | biased grouped, one group; a dense first layer |
| DeepSeek-V2 | grouped; a dense first layer, shared experts |
| DeepSeek-V3 | biased grouped, several groups; a dense first layer, a shared expert |
| Mixtral for quantized weights | own |
| Qwen2-MoE, OLMoE, GLM-4-MoE by transformers' code | own |
| Qwen3-VL-MoE (`test_wrapper.py`) | softmax; text alone and with images, whose tokens have rows too |

The same test shows it with fused shared experts (DeepSeek-V3 and GLM-4-MoE, fused as on CUDA), with
a LoRA adapter in a batch of both, and with chunks mixed into decode steps. Qwen3-MoE is compared by
the other end-to-end tests. `test_eplb.py` moves experts between two ranks, three times, with
replicas, static and dynamic dispatch (the base's CPU engine leaves counting and physical ids out;
the test puts them back).

These do not run on the CPU engine, for reasons of the base:

| family | why not |
|---|---|
| GPT-OSS | `server_args.py` asserts an attention backend that knows attention sinks, `torch_native` does not; `fused_moe_native.py` knows neither its experts' biases nor their activation |
| Qwen3-Next | `layers/attention/linear/kernels/gdn_triton.py` asks for compiled CPU kernels of `sgl_kernel` when it is imported |
| DeepSeek by transformers' code | the KV pool has latent keys, `models/transformers.py` gives it whole ones |
| any family with `--page-size` above 1 | `mem_cache/allocator.py` allocates slots by a Triton kernel |

### On one H200

torch 2.11, sglang-kernel 0.4.2; `benchmark/routed_experts/results/gpu/{topk_paths,path_values}.json`.

`python test/gpu/topk_paths.py` calls each kernel behind `TopK`, 36 cases of 1 to 4,096 tokens,
eager, replayed in a CUDA graph and with padding: softmax, sigmoid, with and without bias and
renormalization, grouped, biased grouped by FlashInfer, `moe_fused_gate`, `kimi_k2_moe_fused_gate`
and compiled, fused shared experts, Llama 4's and PhiMoE's functions, LongCat's torch path, and
static and dynamic dispatch of experts. 1,396,065 ids were those recomputed from the logits. Binding adds
no kernel to the direct paths, and one copy to each other.

`python test/gpu/path_values.py` runs engines of models whose routers see exact inputs: neither
attention nor experts write to the residual stream (quantized ones a millionth), so that half
precision cannot change a choice.

| engine | path | with |
|---|---|---|
| DeepSeek-V3, 256 experts | biased grouped: `moe_fused_gate` | fused shared expert; prefill in piecewise graphs |
| the same, not fused | biased grouped: FlashInfer, direct | `--page-size 64` |
| DeepSeek-V3, 64 experts | biased grouped: FlashInfer, direct | EPLB with 8 redundant experts, static and dynamic: 3 rebalances each, on one rank |
| DeepSeek-V2 | grouped, compiled | `--page-size 16`; prefill in piecewise graphs |
| GLM-4-MoE | biased grouped, compiled | fused shared expert, `--page-size 16`; prefill in piecewise graphs |
| Qwen3-MoE | softmax, direct | fp8 made at start-up, fp8 in blocks, int8; GPTQ and AWQ in 4 bits by the Triton kernels |
| GPT-OSS | softmax, direct | bfloat16, router with a bias; prefill in piecewise graphs |
| Qwen3-Next | softmax, direct | bfloat16 (in float16 the base fails in its linear attention); both schedulers of its states |

5,044,416 ids, no mismatch. Tokens for which bfloat16 could round two scores of GPT-OSS or Qwen3-Next
into a tie are left out. Not shown on a GPU: Marlin's kernels for 4-bit experts (still being compiled
after four minutes).
"""


@dataclass
class Block:
    """A class, function or constant of a model file, with what it says about routing."""

    file: str
    name: str
    uses: set[tuple[str, str]] = field(default_factory=set)  # keys of other blocks
    topk: list[ast.Call] = field(default_factory=list)
    native: bool = False
    has_experts: bool = False
    own_topk: bool = False
    captures_itself: bool = False
    may_be_none: set[str] = field(default_factory=set)  # variables that some branch leaves at None

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.name


class Models:
    """All model files: blocks by (file, name), and the architectures that each file registers."""

    def __init__(self, folder: Path) -> None:
        self.blocks: dict[tuple[str, str], Block] = {}
        self.architectures: dict[str, tuple[str, str]] = {}
        self._reachable: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for path in sorted(folder.rglob("*.py")):
            self._read(path.relative_to(folder).with_suffix("").as_posix(), path)

    def reaching(self, block: Block) -> list[str]:
        """Architectures, drafts left out, whose modules can contain the block."""
        return sorted(
            name
            for name, key in self.architectures.items()
            if not name.endswith(DRAFT_SUFFIXES) and block.key in self.reachable(key)
        )

    def reachable(self, start: tuple[str, str]) -> set[tuple[str, str]]:
        """Keys of the blocks that a block, or one that it refers to, refers to; with itself."""
        if start not in self._reachable:
            seen: set[tuple[str, str]] = set()
            todo = [start]
            while todo:
                key = todo.pop()
                if key not in seen and key in self.blocks:
                    seen.add(key)
                    todo.extend(self.blocks[key].uses)
            self._reachable[start] = seen
        return self._reachable[start]

    def _read(self, file: str, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        defined = {name: node for node in tree.body if (name := _defined_name(node))}
        names = {name: (file, name) for name in defined} | dict(_imported_models(tree))
        for name, node in defined.items():
            self.blocks[file, name] = _read_block(file, name, node, names)
        if "EntryClass" in defined:
            entries = defined["EntryClass"].value
            for entry in entries.elts if isinstance(entries, ast.List) else [entries]:
                self.architectures[ast.unparse(entry)] = names[ast.unparse(entry)]


def _imported_models(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        module = f"{PACKAGE}.{node.module}" if node.level == 1 else node.module
        if module.startswith(PACKAGE + "."):
            file = module[len(PACKAGE) + 1 :].replace(".", "/")
            for alias in node.names:
                yield alias.asname or alias.name, (file, alias.name)


def _defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return node.name
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        return _target(node)
    return None


def _read_block(file: str, name: str, node: ast.stmt, names: dict[str, tuple[str, str]]) -> Block:
    block = Block(file, name)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            block.uses.add(names[part.id])
        elif isinstance(part, ast.Call):
            if isinstance(part.func, ast.Name) and part.func.id == "TopK":
                block.topk.append(part)
            elif isinstance(part.func, ast.Attribute) and part.func.attr == "topk":
                block.own_topk |= ast.unparse(part.func) == "torch.topk"
        elif isinstance(part, ast.Assign):
            block.has_experts |= _target(part) == "self.experts"
            block.captures_itself |= _target(part) == "captures_its_own_routing"
            if isinstance(part.value, ast.Attribute) and part.value.attr == "forward_native":
                block.native |= _target(part) == "self.topk.forward"
            if isinstance(part.value, ast.Constant) and part.value.value is None:
                block.may_be_none.add(_target(part))
    return block


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def document(folder: Path = MODELS) -> str:
    """The text of docs/routing_paths.md for the model files in a folder."""
    models = Models(folder)
    captured = [b for b in models.blocks.values() if len(b.topk) == 1 or b.captures_itself]
    lines = [
        INTRODUCTION,
        "| file: block | path | `layer_id` | fused shared | format | models |",
        "|---|---|---|---|---|---|",
    ]
    for block in captured:
        options = {word.arg: word.value for call in block.topk for word in call.keywords}
        cells = [
            f"{block.file}: `{block.name}`",
            _path(block, options),
            "given" if "layer_id" in options else "by name",
            "yes" if "num_fused_shared_experts" in options else "",
            "standard" if "STANDARD" in ast.unparse(options.get("output_format", _NONE)) else "",
            ", ".join(models.reaching(block)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(BYPASSED.rstrip("\n"))
    for block, how in bypassing(models):
        cells = [f"{block.file}: `{block.name}`", how, ", ".join(models.reaching(block))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + SHOWN


_NONE = ast.Constant(None)


def _path(block: Block, options: dict[str, ast.expr]) -> str:
    """The paths that `select_experts` can take with these arguments, in its order."""
    if block.captures_itself:
        return "own"
    if block.native:
        return "native"
    grouped = ast.unparse(options.get("use_grouped_topk", ast.Constant(False)))
    paths = []
    if grouped != "False":
        if "correction_bias" in options:
            paths.append("biased grouped")
        paths.append("grouped")
    if grouped != "True":
        custom = ast.unparse(options.get("custom_routing_function", _NONE))
        if custom != "None":
            paths.append("custom")
        if custom == "None" or custom in block.may_be_none:
            scoring = ast.unparse(options.get("scoring_func", ast.Constant("softmax")))
            paths.append(scoring.strip("'") if "'" in scoring else "softmax or sigmoid")
    return ", ".join(paths)


def bypassing(models: Models) -> Iterator[tuple[Block, str]]:
    for block in models.blocks.values():
        if len(block.topk) > 1:
            yield block, "several `TopK` in a layer, each for a part of the tokens"
        elif block.has_experts and not block.captures_itself and not _has_topk(models, block):
            own = "own routing (`torch.topk`)" if block.own_topk else "gets ids that others chose"
            yield block, own


def _has_topk(models: Models, block: Block) -> bool:
    """Whether the block, or a block it is made of or derived from, routes through TopK."""
    return any(models.blocks[key].topk for key in models.reachable(block.key))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
