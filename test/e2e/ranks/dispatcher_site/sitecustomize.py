"""On PYTHONPATH of a server under test: `--moe-a2a-backend deepep` on the CPU engine.

The dispatcher is replaced by one over gloo, and the experts by the CPU engine's, for DeepEP and
DeepGEMM are CUDA libraries. Who has which tokens, and how they are padded, stays the base's own.
"""

import importlib.abc
import importlib.util
import sys


def _replace_dispatcher(layer_module):
    import torch
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang.srt.distributed import get_tp_group

    class GlooDispatcher(BaseDispatcher):
        """Every rank sees all tokens and runs its own experts; the results are summed up."""

        def __init__(self, config):
            super().__init__()
            self.group = get_tp_group()
            self.first = self.group.rank_in_group * config.num_local_experts
            self.num_local = config.num_local_experts

        def dispatch(self, hidden_states, topk_output):
            self.n = hidden_states.shape[0]
            counts = [0] * self.group.world_size
            torch.distributed.all_gather_object(counts, self.n, group=self.group.cpu_group)
            self.most = max(counts)
            # A rank without tokens makes int32 ids, the CPU engine's top-k int64: one type for the collective.
            ids = self._everyones(topk_output.topk_ids.long(), -1)
            here = (ids >= self.first) & (ids < self.first + self.num_local)
            local = StandardTopKOutput(
                self._everyones(topk_output.topk_weights, 0),
                torch.where(here, ids - self.first, -1),
                topk_output.router_logits,
            )
            return StandardDispatchOutput(self._everyones(hidden_states, 0), None, local)

        def combine(self, combine_input):
            summed = self.group.all_reduce(combine_input.hidden_states)
            start = self.group.rank_in_group * self.most
            return summed[start : start + self.n]

        def _everyones(self, own, fill):
            padded = own.new_full((self.most, own.shape[1]), fill)
            padded[: self.n] = own
            return self.group.all_gather(padded, dim=0)

    layer_module.create_moe_dispatcher = GlooDispatcher
    print("experts: dispatched over gloo", flush=True)


def _use_the_engines_experts(ep_module):
    # Where this is true, DeepEPMoE leaves its experts to FusedMoE.
    ep_module.DeepEPMoE.deprecate_flag = property(lambda self: True, lambda self, value: None)


def _do_not_count_padding(batch_module):
    # The CPU engine's top-k cannot be told where padding begins; it routes padding like any token.
    batch_module.enable_num_token_non_padded = lambda server_args: False


_CHANGES = {
    "sglang.srt.layers.moe.fused_moe_triton.layer": _replace_dispatcher,
    "sglang.srt.layers.moe.ep_moe.layer": _use_the_engines_experts,
    "sglang.srt.model_executor.forward_batch_info": _do_not_count_padding,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_and_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_and_change
        return spec


sys.meta_path.insert(0, _Finder())
