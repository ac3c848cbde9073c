"""Plans: plain data, printable, cached by structure, with reasons."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.normal import decode
from regard.plan import ENGINES, engine_module


def matrix(length: int = 8, **keywords) -> rg.AttentionMatrix:
    q = torch.randn(1, 2, length, 8)
    return rg.attention(q, q, **keywords)


def test_one_plan_for_one_structure_whatever_the_length():
    term = rg.recipes.t5(2)
    assert matrix(8, position=term).plan is matrix(50, position=term, q_start=3, k_start=1).plan
    assert matrix(8, position=term).plan is not matrix(8, position=term, mask=rg.causal).plan


def test_the_text_of_a_plan_is_the_plan():
    plan = matrix(position=rg.recipes.deberta(2, 8), mask=rg.causal & rg.lengths([4]), softcap=3.0).plan
    assert decode(plan.spec) == (plan.engine, plan.form)


def test_a_plan_says_what_runs_and_what_was_rewritten():
    A = matrix(
        position=rg.recipes.alibi(2) + rg.recipes.t5(2) + rg.recipes.shaw(8, 3),
        mask=rg.causal & rg.window(5) | rg.keys(0),
        softcap=30.0,
        sink=0.0,
        dropout=0.1,
    )
    told = str(A.plan)
    for words in (
        "engine  tiled (cpu, float32)",
        "not  cpu: the fused kernel has no softcap",
        "slope times distance, computed",
        "table b[head, i - j], constant from 128 on",
        "<u_i, R[i - j]>, R kept by bins, constant from 3 on",
        "((causal & 0 <= i - j <= 5) | 0 <= key <= 0)",
        "30 * tanh(logit / 30)",
        "sink",
        "dropout  0.1, in products only",
    ):
        assert words in told, told


def test_a_plan_tells_what_was_done_to_q_and_k():
    assert "Rotary(base=10000): q and k turned by their places" in str(matrix(position=rg.Rotary()).plan)
    assert "Cosine: q and k normalised" in str(matrix(score=rg.Cosine()).plan)
    assert "Euclidean: a dot product and two biases" in str(matrix(score=rg.Euclidean()).plan)


def test_an_engine_can_be_asked_for_and_an_unknown_one_is_refused():
    assert matrix(engine="reference").plan.engine == "reference"
    with pytest.raises(ValueError, match="engine: expected one of cpu, triton, tiled, reference, found 'cuda'"):
        str(matrix(engine="cuda").plan)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_the_same_functions(name):
    module = engine_module(name)
    for function in ("refuse", "forward", "tile", "reduce"):
        assert callable(getattr(module, function))


def test_a_refused_engine_gives_its_reason(monkeypatch):
    from regard import plan as planning
    from regard.engines import tiled

    monkeypatch.setattr(tiled, "refuse", lambda *_: "not today")
    planning._plan.cache_clear()
    try:
        A = matrix(score=rg.InverseDistance())
        assert "not  tiled: not today" in str(A.plan) and A.plan.engine == "reference"
        with pytest.raises(ValueError, match="engine: tiled cannot run this: not today"):
            str(matrix(engine="tiled").plan)
    finally:
        planning._plan.cache_clear()
