"""On PYTHONPATH of a server with several draft layers, on a host without FlashAttention 3's kernels.

The base gives these draft layers FlashAttention 3 whatever --attention-backend says. Here they get
Triton's, for graphs of as many tokens as that layer has: what a draft proposes is not under test,
what the target makes of it is. Guards against synchronization as sync_guard does.
"""

import runpy
import sys
from pathlib import Path

_DRAFTS = "sglang.srt.layers.attention.flashattention_backend"


def _give_drafts_triton(module) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class DraftLayerBackend(TritonAttnBackend):
        def __init__(self, model_runner, skip_prefill=False, speculative_step_id=0):
            super().__init__(model_runner, skip_prefill)
            self.speculative_num_steps += speculative_step_id

        def init_forward_metadata_capture_cuda_graph(self, *args, **kwargs):
            super().init_forward_metadata_capture_cuda_graph(*args, **kwargs)
            metadata = self.forward_metadata  # Triton's has no window for this mode in a graph
            metadata.window_kv_indptr = metadata.kv_indptr
            metadata.window_kv_indices = metadata.kv_indices

    module.FlashAttentionBackend = DraftLayerBackend
    print("several draft layers: attention by Triton", flush=True)


_guard = runpy.run_path(str(Path(__file__).parents[1] / "sync_guard" / "sitecustomize.py"))
sys.meta_path.insert(0, _guard["After"](_DRAFTS, _give_drafts_triton))
