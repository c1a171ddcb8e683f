"""Stands in for the compiled package `sgl_kernel` on the CPU engine.

The CPU engine's plain-torch path calls none of these kernels, but the modules that it imports name
them. The GPU build of the package (1.4 GB) cannot be loaded without a driver, so on a machine
without one it need not be installed: any name can be imported from the stand-in, and raises when it
is called.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

_PACKAGE = "sgl_kernel"


def install_on_cpu_engine() -> bool:
    """Put the stand-in in place if the CPU engine is asked for and no real `sgl_kernel` loads.

    Returns whether the stand-in is in place. A `sgl_kernel` built for this machine is left alone.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    if any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        return True
    if _real_package_loads():
        return False
    sys.meta_path.insert(0, _StubFinder())
    return True


def _real_package_loads() -> bool:
    if importlib.util.find_spec(_PACKAGE) is None:
        return False
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError):  # OSError: a shared library of the driver is missing
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
        return False
    return True


class _MissingKernel:
    """A name of the absent package: may be passed around and looked into, raises when called."""

    def __init__(self, qualified_name: str) -> None:
        self.__name__ = qualified_name

    def __getattr__(self, name: str) -> "_MissingKernel":
        return _missing(self.__name__, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(
            f"{self.__name__} is a compiled kernel, and no sgl_kernel loads on this machine. "
            "The CPU engine does without it if started with --attention-backend torch_native; "
            "otherwise install a sgl_kernel built for this machine."
        )


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> _MissingKernel:
        return _missing(self.__name__, name)


def _missing(owner: str, name: str) -> _MissingKernel:
    if name.startswith(
        "__"
    ):  # protocols (copying, pickling, ...) must not find one that isn't there
        raise AttributeError(name)
    return _MissingKernel(f"{owner}.{name}")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves `sgl_kernel` and whatever is imported from below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: every name is made when it is asked for."""
