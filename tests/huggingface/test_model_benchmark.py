"""The benchmark of models: it judges by the error against a wider type, and shows no speed of what is wrong."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import huggingface as benchmark

import regard as rg


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Bloom in bfloat16 on few tokens, memory not measured; gives the results of both passes and the page."""
    monkeypatch.setitem(benchmark.SUITES, "cpu", (2, 256, torch.bfloat16))
    monkeypatch.setitem(benchmark.MOST, "cpu", 256)

    def measure(*more: str) -> tuple[dict, str]:
        given = ["cpu", "--case", "Bloom", "--passes", "forward", "training", "--repeat", "1", "--seconds", "0.01"]
        benchmark.main([*given, "--only", "error", "time", "--out", str(tmp_path), *more])
        results = json.loads((tmp_path / "huggingface-cpu.json").read_text(encoding="utf-8"))
        return results["cases"]["Bloom"], (tmp_path / "huggingface-cpu.md").read_text(encoding="utf-8")

    return measure


def test_judged_by_a_wider_type(small):
    """Bloom rounds the places of far keys in bfloat16, so that Regard differs from it by more than either rounds."""
    case, page = small()
    for mode, error in case["error"].items():
        assert 0 < error["regard"] < error["eager"] / 2, mode
        assert case["time"][mode]["regard"]["ms"] > 0
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| Bloom")]
    assert [row[2] for row in rows] == ["forward", "forward + backward"]
    for row, error in zip(rows, case["error"].values(), strict=True):
        assert row[-2:] == [f"{error['eager']:.0e}", f"{error['regard']:.0e} |"]


def test_no_speed_of_what_is_wrong(small, monkeypatch):
    product = rg.AttentionMatrix.__matmul__
    monkeypatch.setattr(rg.AttentionMatrix, "__matmul__", lambda A, v: 1.5 * product(A, v))
    case, page = small("--passes", "forward")
    assert "its error is" in case["time"]["forward"]["regard"]["why"] and "ms" in case["time"]["forward"]["eager"]
    assert "no (1)" in page and "1. its error is" in page


def test_distances():
    exact = [torch.tensor([3.0, 4.0]), torch.tensor([[0.0]])]
    made = [torch.tensor([3.0, 4.5]), torch.tensor([[0.0]])]
    assert benchmark.distance(made[:1], exact[:1], "forward") == 0.5 / 4
    assert math.isclose(benchmark.distance(made, exact, "training"), 0.1)  # zeros have no error of their own
    assert benchmark.too_far({"eager": 0.01, "regard": 0.02}, torch.bfloat16) is None
    assert benchmark.too_far({"sdpa": 0.01, "regard": 0.04}, torch.bfloat16) is not None
    assert benchmark.too_far({"eager": 0.01, "why": "broken"}, torch.bfloat16) == "broken"
