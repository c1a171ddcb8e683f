"""On PYTHONPATH of a server under test: any host synchronization inside our code raises, and the server dies of it.

Wraps the capturer's entry points, through which all of our code on the scheduler's thread is reached, in
torch.cuda.set_sync_debug_mode("error").
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "sglang.srt.layers.moe.routed_experts_capturer"
_ENTRY_POINTS = (
    "before_graph",
    "on_forward_end",
    "on_result",
    "collect",
    "keep_earned",
    "keep_replaced",
)


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


class After(importlib.abc.MetaPathFinder):
    """Does something to a module right after it was imported."""

    def __init__(self, name, action) -> None:
        self._name, self._action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_and_act(module):
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_and_act
        return spec


def _guard_entry_points(module) -> None:
    for entry in _ENTRY_POINTS:
        owner = module._TargetCapturer
        setattr(owner, entry, _guard(getattr(owner, entry)))
    print("routed experts: host synchronization raises", flush=True)


sys.meta_path.insert(0, After(_MODULE, _guard_entry_points))
