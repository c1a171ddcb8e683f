"""The capture buffer and the binding of the target model's top-k modules to its layers.

    top-k kernel -> CaptureBuffer.ids[layer, token, column]

A top-k module is bound by hanging a `LayerCapture` on its `TopKConfig`, which the base hands to every routing function;
a block that routes without TopK, and hands over its ids by itself, by hanging it on the block.
A draft model's modules are never bound, so they cannot write, whatever their layer ids are.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.policy import RowShape

_ATTRIBUTE = "routed_experts_capture"
_OWN_ROUTING = "captures_its_own_routing"  # set by seams in model files
_LAYER_IN_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_ROUTER_NAME = re.compile(r"(?:^|\.)(?:gate|gating|wg|router)(?:\.|$)")


class CaptureBuffer:
    """Ids at a fixed address, layer-major: one layer's part is contiguous. `width` is top-k plus fused shared experts.

    Written by the forward alone (by top-k kernels directly, or by one copy a layer), on the forward stream and inside
    CUDA graphs. Dense layers are never written and stay zero, which is what the wire promises for them.

    Attributes:
        ids: int32 [layers, capacity, width]. Read behind the forward, on the same stream.
        graph_ids: int32 [layers, MOST_SPREAD_TOKENS at most, width], of decode CUDA graphs that file their own rows
            (graphs.py): written and read inside one graph. The layers' parts lie closer together than in `ids`, where
            a prefill chunk fits between: some 5 us a step less (benchmark/routed_experts/graph_pairs.py, "apart").
    """

    def __init__(self, shape: RowShape, capacity: int, width: int, device: str) -> None:
        self.capacity = capacity
        self.ids, self.graph_ids = (
            torch.zeros((shape.num_layers, tokens, width), dtype=torch.int32, device=device)
            for tokens in (capacity, min(capacity, kernels.MOST_SPREAD_TOKENS))
        )

    @property
    def num_bytes(self) -> int:
        return sum(ids.numel() * ids.itemsize for ids in (self.ids, self.graph_ids))


class LayerCapture:
    """One bound top-k module's place in the capture buffer."""

    def __init__(self, layer: int, name: str, buffer: CaptureBuffer, direct: bool) -> None:
        self.layer = layer
        self.name = name
        self.direct = direct
        self.num_tokens = 0  # of the last forward that ran eagerly, or was recorded in a CUDA graph
        self.places = buffer.ids[layer], buffer.graph_ids[layer]
        self._rows = self.places[0]

    def capture_for(self, graph: bool) -> None:
        """From now on into `graph_ids`, while a decode graph that files its own rows is recorded; or into `ids` again."""
        self._rows = self.places[int(graph)]

    @property
    def reached(self) -> bool:
        return self.num_tokens > 0

    def output(self, num_tokens: int, top_k: int) -> torch.Tensor | None:
        """Where a kernel may write its ids: int32 [num_tokens, top_k], or None if they must be copied instead.

        None too for more tokens than the buffer holds: a direct write would run into the next layer.
        """
        capacity, width = self._rows.shape
        if not self.direct or top_k != width or num_tokens > capacity:
            return None
        return self._rows[:num_tokens]

    def write(self, topk_ids: torch.Tensor) -> None:
        """Take over one forward's ids [tokens, <= width], unless the kernel has written them here itself.

        A forward beyond the buffer's capacity is left out; the capturer marks its rows as bad.
        """
        num_tokens, columns = topk_ids.shape
        # A traced graph (piecewise CUDA graphs) copies always: addresses cannot be compared there.
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.num_tokens = num_tokens
        if num_tokens > self._rows.shape[0]:
            return
        if not compiling and self.direct and topk_ids.data_ptr() == self._rows.data_ptr():
            return
        self._rows[:num_tokens, :columns].copy_(topk_ids)


def capture_topk_ids(router: object, topk_ids: torch.Tensor) -> None:
    """Seam in the base's routing, before logical ids become physical ones. Does nothing for unbound modules.

    router: a TopK's config, or the block that routes without one.
    """
    layer = getattr(router, _ATTRIBUTE, None)
    if layer is not None:
        layer.write(topk_ids)


def direct_topk_output(topk_config: object, router_logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keyword arguments that let a kernel write its ids into the capture buffer, or none of them.

    Not while a graph is traced (piecewise CUDA graphs): there the ids are copied, inside the traced graph.
    """
    layer = getattr(topk_config, _ATTRIBUTE, None)
    if layer is None or torch.compiler.is_compiling():
        return {}
    out = layer.output(router_logits.shape[0], topk_config.top_k)
    return {} if out is None else {"topk_ids_out": out}


def layer_index(name: str, layer_id: int | None) -> int | None:
    """A module's decoder layer: what it says itself, else the number in its name (Granite-MoE's top-k says nothing)."""
    if layer_id is not None:
        return layer_id
    found = _LAYER_IN_NAME.search(name)
    return int(found.group(1)) if found else None


def find_topk_modules(model: nn.Module) -> dict[str, nn.Module]:
    from sglang.srt.layers.moe.topk import TopK

    return {name: module for name, module in model.named_modules() if isinstance(module, TopK)}


def find_own_routers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if getattr(m, _OWN_ROUTING, False)}


def buffer_width(model: nn.Module) -> int:
    """Columns that the model's top-k modules write, fused shared experts included. 0 if there are none."""
    return max((m.topk_config.top_k for m in find_topk_modules(model).values()), default=0)


def bind_layers(
    model: nn.Module, shape: RowShape, buffer: CaptureBuffer, direct: bool
) -> list[LayerCapture]:
    """Bind everything that routes in the target model to its layer.

    Raises:
        ValueError: naming the MoE layers whose routing never reaches the capture, and why.
    """
    bound: dict[int, LayerCapture] = {}
    problems: list[str] = []
    own_routers = find_own_routers(model)
    for name, module in (find_topk_modules(model) | own_routers).items():
        layer = layer_index(name, getattr(module, "layer_id", None))
        problem = _why_not_captured(module, layer, shape)
        if problem is None and layer in bound:
            problem = f"shares layer {layer} with {bound[layer].name}"
        if problem is not None:
            problems.append(f"{name}: {problem}")
            continue
        bound[layer] = LayerCapture(layer, name, buffer, direct)
        setattr(getattr(module, "topk_config", module), _ATTRIBUTE, bound[layer])
    missed = {
        name: layer
        for name, layer in _expert_layers(model).items()
        if name.rpartition(".")[0] not in own_routers
    }
    missed |= _foreign_experts(model, shape.num_experts)
    problems += [
        f"{name}: its routing does not go through TopK"
        for name, layer in missed.items()
        if layer not in bound
    ]
    if problems or not bound:
        raise ValueError(
            "--enable-return-routed-experts cannot capture the routing of these MoE layers; start without the flag, or "
            "with another --moe-runner-backend or --model-impl: "
            + ("; ".join(problems) or f"{type(model).__name__} has no TopK")
        )
    return list(bound.values())


def _why_not_captured(module: nn.Module, layer: int | None, shape: RowShape) -> str | None:
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    from sglang.srt.layers.moe import get_moe_runner_backend

    if layer is None:
        return "no layer id"
    if not 0 <= layer < shape.num_layers:
        return f"layer {layer} is outside the model's {shape.num_layers} layers"
    if getattr(module, _OWN_ROUTING, False):
        fits = module.top_k == shape.top_k
        return None if fits else f"top-k {module.top_k} where the config says {shape.top_k}"
    config = module.topk_config
    if config.top_k - config.num_fused_shared_experts != shape.top_k:
        return f"top-k {config.top_k - config.num_fused_shared_experts} where the config says {shape.top_k}"
    backend = get_moe_runner_backend()
    output_format = config.output_format
    if output_format is None and backend.is_triton_kernels():
        output_format = TopKOutputFormat.TRITON_KERNEL
    if output_format is None and (backend.is_flashinfer_trtllm() or backend.is_flashinfer_mxfp4()):
        output_format = TopKOutputFormat.BYPASSED
    if output_format not in (None, TopKOutputFormat.STANDARD):
        return f"top-k format {output_format.name} (the MoE kernel routes by itself)"
    return None


def _expert_layers(model: nn.Module) -> dict[str, int | None]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return {
        name: layer_index(name, getattr(module, "layer_id", None))
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE)
    }


def _foreign_experts(model: nn.Module, num_experts: int) -> dict[str, int]:
    """Modules that are experts, or their router, by the look of their weights, whoever wrote them: name to layer.

    That is how MoE blocks are found that keep nothing of SGLang's: those of transformers' code, in which SGLang replaces
    the experts that it knows, in some layers perhaps and not in others.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        layer = layer_index(name, None)
        if layer is not None and _holds_experts(name, module, num_experts):
            found[name] = layer
    return found


def _holds_experts(name: str, module: nn.Module, num_experts: int) -> bool:
    """One module an expert, a weight [experts, ..., ...], or a router's weight [experts, hidden]."""
    if isinstance(module, nn.ModuleList):
        return len(module) == num_experts
    dimensions = (3, 2) if _ROUTER_NAME.search(name) else (3,)
    return any(
        weight.dim() in dimensions and weight.shape[0] == num_experts
        for weight in module.parameters(recurse=False)
    )
