"""On PYTHONPATH of a server under test: any host synchronization inside our code raises, and the server dies of it.

Wraps the capturer's entry points, through which all of our code on the scheduler's thread is reached, in
torch.cuda.set_sync_debug_mode("error").
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "sglang.srt.layers.moe.routed_experts_capturer"
_ENTRY_POINTS = ("on_forward_end", "on_result", "collect", "keep_earned")


def _guard(function):
    def guarded(self, *args, **kwargs):
        import torch

        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return guarded


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_and_guard(module):
            execute(module)
            for entry in _ENTRY_POINTS:
                owner = module._TargetCapturer
                setattr(owner, entry, _guard(getattr(owner, entry)))
            print("routed experts: host synchronization raises", flush=True)

        spec.loader.exec_module = exec_and_guard
        return spec


sys.meta_path.insert(0, _Finder())
