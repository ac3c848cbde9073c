"""Summaries by compiled passes: the states of the definition, whatever the mask, the blocks and the set of pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from descriptions import cases
from hypothesis import given, settings
from support import all_within_budget

import regard as rg
from regard.engines import cpu, tiled
from regard.engines.cpu import looking, native
from regard.engines.tiled import strips
from regard.summaries import LogSumExp

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled passes here: {native.missing()}")


def asked(q_len: int, k_len: int, batch: int) -> dict[str, rg.Summary]:
    wanted = {
        "lse": LogSumExp(),
        "toeplitz": rg.Toeplitz(),
        "profile": rg.Profile(),
        "received": rg.Received(),
        "entropy": rg.Entropy(),
        "on the diagonal": rg.SelfShare(),
        "before": rg.PreviousShare(),
        "first key": rg.FirstKeyShare(),
        "near": rg.Mass(rg.window(2, 1) & rg.keys(1, 5)),
        "not near": rg.Mass(~rg.window(2, 1)),
        "marked": rg.Share(rg.dense(torch.arange(q_len * k_len).view(q_len, k_len) % 3 == 0)),
    }
    if q_len == k_len:
        ids = (torch.arange(q_len) + torch.arange(batch)[:, None]) % 3
        wanted["induction"] = rg.Share(rg.induction(ids))
    return wanted


def states(A: rg.AttentionMatrix, engine) -> dict[str, torch.Tensor]:
    batch, _, q_len, k_len = A.shape
    found = {}
    # apart: what adds up rows would have their log-sum-exp found before for all of them
    for down in (True, False):
        wanted = {n: x for n, x in asked(q_len, k_len, batch).items() if (type(x) in looking.DOWN) is down}
        found |= dict(zip(wanted, engine.reduce(A._still, list(wanted.values()), None, None), strict=True))
    return {f"{name} {n}": x for name, state in found.items() for n, x in enumerate(state)}


@pytest.mark.parametrize("blocked", [False, True], ids=["whole rows", "blocks of keys"])
@given(case=cases(geometries=("line",)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_states_are_those_of_the_definition(blocked, case):
    case = replace(
        case, dropout=0.0, score="dot", softcap=False, scale="default", mask=case.mask.replace("nearest", "keys")
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        A = case.build(torch.float32).matrix()
        if A.plan.engine != "cpu" or 0 in A.shape:
            return
        plain, exact, nudged = (
            states(case.build(torch.float32, e, n).matrix("reference"), rg.plan.definition())
            for e, n in ((False, False), (True, False), (True, True))
        )
        patch.setattr(strips, "STRIP", 8)
        patch.setattr(strips, "MIN_ROWS", 2)
        if blocked:
            patch.setattr(looking, "LONG", 2)
            patch.setattr(looking, "ROWS", 3)
        all_within_budget(states(A, cpu), plain, exact, nudged)


@pytest.mark.parametrize(
    "mask", [None, rg.causal, rg.window(40, 30), rg.lengths([100, 300]), rg.causal & rg.keys(7, 200)]
)
def test_of_many_rows(mask):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 300, 16).unbind()
    runs = []
    for engine, dtype in ((cpu, torch.float32), (tiled, torch.float32), (tiled, torch.float64)):
        A = rg.attention(q.to(dtype), k.to(dtype), mask=mask, position=rg.recipes.alibi(3))
        runs.append(states(A, engine))
    all_within_budget(*runs)


def test_they_are_looked_at_in_one_pass(monkeypatch):
    """On a line none of these is left to the tiled engine."""
    monkeypatch.setattr(tiled, "reduce", lambda *_: pytest.fail("left to the tiled engine"))
    q = torch.randn(1, 2, 60, 8)
    states(rg.attention(q, q, mask=rg.causal, engine="cpu"), cpu)


def test_rows_with_infinity_are_left_to_those_who_know():
    q, k = torch.randn(2, 2, 2, 20, 8).unbind()
    k[1, 0, 3, 2] = torch.inf
    A = rg.attention(q, k, mask=rg.causal)
    found, plain = states(A, cpu), states(A, tiled)
    for name, x in plain.items():
        assert torch.equal(found[name][1].isnan(), x[1].isnan()), name
        torch.testing.assert_close(found[name], x, equal_nan=True)
