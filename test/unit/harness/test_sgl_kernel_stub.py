"""The stand-in for sgl_kernel: any name can be imported, none called, and it yields to the real."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, engine: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` after sglang's stand-in had its chance, with `paths` importable."""
    start = f"import sys; sys.path[:0] = {[str(p) for p in paths]!r}\n"
    start += "from sglang import _sgl_kernel_stub as stub\n"
    environment = {"SGLANG_USE_CPU_ENGINE": engine, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def package(folder: Path, text: str) -> Path:
    (folder / "sgl_kernel").mkdir(parents=True)
    (folder / "sgl_kernel" / "__init__.py").write_text(text)
    return folder


def test_any_name_can_be_imported_and_says_so_when_called() -> None:
    result = run(
        "from sgl_kernel import rmsnorm\n"
        "from sgl_kernel.kvcacheio import transfer_kv_all_layer as transfer\n"
        "from sgl_kernel.scalar_type import scalar_types\n"
        "scalar_types.uint4b8\n"
        "transfer(1, x=2)",
        "1",
    )
    assert "sgl_kernel.kvcacheio.transfer_kv_all_layer is a compiled kernel" in result.stderr
    assert "--attention-backend torch_native" in result.stderr


def test_a_package_that_works_is_left_alone(tmp_path: Path) -> None:
    real = package(tmp_path, "def rmsnorm(): return 'real'")
    result = run("import sgl_kernel; print(sgl_kernel.rmsnorm())", "1", real)
    assert result.stdout.strip() == "real", result.stderr


@pytest.mark.parametrize("error", ["ImportError('libcuda.so.1')", "OSError('libcuda.so.1')"])
def test_a_package_that_does_not_load_is_replaced(tmp_path: Path, error: str) -> None:
    broken = package(tmp_path, f"import sgl_kernel.loads\nraise {error}")
    (broken / "sgl_kernel" / "loads.py").write_text("half = True")
    code = "import sgl_kernel.loads; print(type(sgl_kernel.loads).__name__)"
    result = run(code, "1", broken)
    assert result.stdout.strip() == "_StubModule", result.stderr


def test_without_the_cpu_engine_nothing_is_replaced() -> None:
    result = run("import sgl_kernel", "0")
    assert "No module named 'sgl_kernel'" in result.stderr
