"""Tests run the built tree: `make test`, or pytest with PYTHONPATH=build/sglang/python."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

if not Path("/dev/nvidiactl").exists():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_report_header() -> str:
    """Say which SGLang is under test: an installed one is an easy mistake to make."""
    spec = importlib.util.find_spec("sglang")
    return f"sglang under test: {Path(spec.origin).parent if spec and spec.origin else 'none'}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Show the end of the server's log beside the failure of a test that used it."""
    report = (yield).get_result()
    for value in getattr(item, "funcargs", {}).values():
        if report.failed and hasattr(value, "log_tail"):
            report.sections.append(("the server's log ends with", value.log_tail()))
