"""benchmarks/trace.py measures what it says: small, here, and with every number of its page."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

PATH = Path(__file__).parents[1] / "benchmarks" / "trace.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("trace_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_it_records_opens_and_compares(benchmark, tmp_path):
    run = benchmark.recording(32, 1, (2, 16, 2))
    assert run["MiB"] == pytest.approx(2 * (2 * 32 * 16 + 2 * 32) * 4 / 2**20)
    assert all(ms > 0 for ms in run["milliseconds"].values())
    found = benchmark.opening(600, 2, 2, 8, tmp_path)
    assert found["bits equal"] and found["tiles"] == 8 and found["largest error of a weight"] < 1e-6
    results = {"recording": run, "opening": found, "layers": 2, "dim": 16, "heads": 2}
    page = benchmark.page({**results, "date": "today", "machine": "any", "torch": "x", "transformers": "y"})
    assert "the same bits as" in page and f"| plain | {run['milliseconds']['plain']:.0f} |" in page
