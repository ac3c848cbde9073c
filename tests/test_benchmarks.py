"""The benchmarks measure what they say: every way to do a case computes the same, and the tables show it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import all_within_budget

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import cases
import flex
import measure
import report
import run
import today
from setting import Setting

#: one case of each description: neither its length nor its device makes a difference here
KINDS = {
    (c.term, c.causal, c.asks, c.q_len, c.v_dim - c.dim, c.dtype if c.device == "cpu" else "float32"): c
    for c in cases.GPU + cases.CPU
}.values()


def small(case: cases.Case) -> Setting:
    """More tokens than Shaw's clip, on a grid that is no square."""
    dtype = case.dtype if case.device == "cpu" else "float32"
    return Setting(replace(case.small(150, dim=16), dtype=dtype), device="cpu")


def ways(s: Setting) -> dict[str, object]:
    found = {"ours": s.ours(), **today.ways(s)}
    if not s.case.asks:
        found["flex"] = flex.way(s, compiled=False)
    return {name: way for name, way in found.items() if callable(way)}


def listed(result) -> dict[str, torch.Tensor]:
    """Results by number; a stored A's heat map has no counts, for every pair of it is visible."""
    parts = result if isinstance(result, tuple) and not hasattr(result, "_fields") else (result,)
    found = [x for part in parts for x in measure.tensors((part.sum, part.max) if hasattr(part, "cell") else part)]
    return {str(at): x.detach() for at, x in enumerate(found)}


def nudged(s: Setting) -> Setting:
    """In float64, every number moved by one rounding of its dtype: what a rounding is worth on a small problem."""
    moved = measure.double(s)
    for x in [moved.q, moved.k, moved.v, *(moved.position.parameters() if moved.position is not None else ())]:
        sign = 1 - 2 * (torch.arange(x.numel()).reshape(x.shape) * 7 // 3 % 2)
        x.data = x.data * (1 + sign * torch.finfo(s.dtype).eps)
    return moved


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", KINDS, ids=lambda c: f"{c.name}-{c.dtype}")
def test_every_way_computes_the_same(case):
    s = small(case)
    for x in (s.q, s.k, s.v):
        x.requires_grad_(False)  # FlexAttention on CPU asks for that
    with torch.no_grad():
        plain, *exact = (listed(x.ours("reference")()) for x in (s, measure.double(s), nudged(s)))
        found = {name: listed(way()) for name, way in ways(s).items()}
    assert "eager" in found and ("bias" in found) == (not case.asks and s.position is not None)
    assert ("ready" in found) == (s.term.static and not case.asks)
    assert ("flex" in found) == (case.term in flex.MODS and not case.asks)
    for result in found.values():
        all_within_budget(result, plain, *exact)


@pytest.mark.parametrize("case", [c for c in KINDS if "training" in c.passes], ids=lambda c: f"{c.name}-{c.dtype}")
def test_every_way_has_the_same_gradients(case):
    s = small(case)
    plain, *exact = (listed(x.train(x.ours("reference"))()) for x in (s, measure.double(s), nudged(s)))
    assert len(exact[0]) == len(s.leaves)
    for name, way in ways(s).items():
        if name in ("ours", "bias", "eager"):
            all_within_budget(listed(s.train(way)()), plain, *exact)


def test_reshape_lays_out_what_indexing_would():
    for q_len, k_len in ((5, 5), (3, 9), (9, 3), (1, 8), (8, 1)):
        table, rows = torch.randn(2, q_len + k_len - 1), torch.randn(2, q_len + k_len - 1, 4)
        x = torch.randn(2, q_len, 4)
        at = torch.arange(q_len)[:, None] - torch.arange(k_len) + k_len - 1
        assert torch.equal(today.skew(table, q_len, k_len), table[:, at])
        torch.testing.assert_close(today.by_query(x, rows, q_len, k_len), torch.einsum("hid,hijd->hij", x, rows[:, at]))


def test_a_run_writes_what_it_measured_and_keeps_the_rest(tmp_path, monkeypatch, capsys):
    tiny = [cases.Case("t5", "t5", 16, heads=1, dim=8, v_dim=8, forward=1000.0, training=0.001, memory=(0, 1e6))]
    tiny += [cases.Case("look", "plain", 16, heads=1, dim=8, v_dim=8, asks=("entropy",), passes=("forward",))]
    monkeypatch.setitem(run.SUITES, "cpu", tiny)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "SAMPLE", 1e-6)
    monkeypatch.setattr(measure, "LEAST", 0.0)
    run.main(["cpu", "--repeat", "1", "--no-memory", "--peers", "bias", "eager"])
    first = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert set(first["cases"]) == {"t5/16", "look/16"}
    times = first["cases"]["t5/16"]["time"]
    assert set(times["forward"]) == {"plain", "ours", "bias", "eager"} and times["forward"]["plain"]["ratio"] == 1.0
    assert times["training"]["ours"]["ms"] > 0
    assert first["cases"]["t5/16"]["errors"]["training"]["ours"] < 1e-4
    first["cases"]["t5/16"]["time"]["forward"]["bias"] = {"ms": 5.0, "ratio": 77.0, "date": "2020-02-02"}
    (tmp_path / "cpu.json").write_text(json.dumps(first), encoding="utf-8")
    run.main(["cpu", "--quick", "--case", "t5"])
    second = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert second["cases"]["t5/16"]["time"]["forward"]["bias"]["ratio"] == 77.0
    assert second["cases"]["look/16"] == first["cases"]["look/16"]
    shown = (tmp_path / "cpu.md").read_text(encoding="utf-8")
    assert "77.00, 2020-02-02" in shown and "1 met, 1 missed" in shown
    with pytest.raises(SystemExit, match="--case: expected some of look, t5, found t6"):
        run.main(["cpu", "--case", "t6"])


def test_memory_is_the_peak_of_a_process_of_its_own():
    """Eager PyTorch stores A and its like; ours does not."""
    case = cases.Case("t5", "t5", 2048, heads=1, dim=8, v_dim=8, passes=("forward",))
    found = {name: measure._in_a_process(case, name)["forward"]["MiB"] for name in ("ours", "eager")}
    assert found["eager"] > 3 * 2048**2 * 4 / 2**20 > 2 * found["ours"]


def test_the_table_marks_targets_and_says_why_a_peer_has_no_figure():
    results = {
        "suite": "gpu", "date": "2026-01-02", "machine": {"GPU": "a large one"},
        "cases": {
            "a/8": {
                "case": {"name": "a", "what": "a bias", "shape": "N8", "targets": {"forward": 1.1, "memory": [2, 10]}},
                "time": {"forward": {
                    "plain": {"ms": 2.0, "ratio": 1.0, "backend": "cuDNN"}, "ours": {"ms": 2.4, "ratio": 1.2},
                    "flex": {"why": "does not compile"}, "eager": {"ms": 9, "ratio": 4.5, "date": "2025-01-01"},
                }},
                "memory": {"forward": {"plain": {"MiB": 20.0}, "ours": {"MiB": 49.0}, "flex": {"why": "no memory"}}},
                "errors": {"forward": {"ours": 1e-3, "plain": 2e-3}},
            },
        },
    }  # fmt: skip
    lines = report.table(results).splitlines()
    row = "| a bias | N8 | forward | 2.00 (cuDNN) | **1.20** | 1.1 | **missed** | 4.50, 2025-01-01 | no (1) |"
    assert row in lines and "1. does not compile" in lines
    assert "| a bias | N8 | forward | 20.0 | 49.0 | 50 | met |  | no (2) |" in lines
    assert "| a bias | N8 | forward | 1.0e-03 | 2.0e-03 |" in lines
    assert "Targets: 1 met, 1 missed." in lines
    times = results["cases"]["a/8"]["time"]["forward"]
    times["plain"]["date"], times["ours"]["ratio"] = "2026-01-01", 1.102  # an older run, and a narrow miss
    assert "| 2.00 (cuDNN), 2026-01-01 | **1.102** | 1.1 | **missed** |" in report.table(results)


def test_committed_tables_are_those_of_the_committed_results():
    for stored in [run.RESULTS / f"{suite}.json" for suite in cases.SUITES]:
        if not stored.is_file():
            continue  # that suite has not been measured yet
        results = json.loads(stored.read_text(encoding="utf-8"))
        assert stored.with_suffix(".md").read_text(encoding="utf-8") == report.table(results)
        assert set(results["cases"]) <= {case.key for case in cases.SUITES[results["suite"]]}
