"""The CPU engine, wherever the plan chooses it, against the definition, under the one error budget."""

from __future__ import annotations

import pytest
import torch
from comparing import KINDS, compare, cut, plain_case, results
from descriptions import cases
from hypothesis import given, settings
from support import Largest
from torch import nn

import regard as rg
from regard.engines import cpu
from regard.engines.cpu import native


@given(case=cases())
@settings(max_examples=80, deadline=None, derandomize=True)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "PyTorch"])
@pytest.mark.parametrize("small", [False, True], ids=["whole", "small blocks"])
def test_the_chosen_engine_equals_the_definition(small, compiled, case):
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, small)
        if not compiled:
            patch.setattr(native, "_load", lambda: (None, "not wanted"))
        compare(case, torch.float32, None)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("geometry, shape, terms, mask", KINDS)
def test_every_kind_stays_within_the_budget(geometry, shape, terms, mask, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "FEW", 1)  # these are few queries: our own kernel all the same
    if dtype != torch.float32 and "nearest" in mask:
        pytest.skip("rounding to half precision changes which keys are nearest")
    compare(plain_case(geometry=geometry, q_shape=shape, k_shape=shape, terms=terms, mask=mask), dtype, "cpu")


@pytest.mark.parametrize("starts", ["numbers", "rows"])
@pytest.mark.parametrize("mask", ["causal", "window", "causal & lengths"])
@pytest.mark.parametrize("terms", [(), ("t5",), ("t5", "slope", "shaw")])
def test_longer_than_a_block(terms, mask, starts):
    case = plain_case(q_shape=(300,), k_shape=(280,), terms=terms, mask=mask, starts=starts, v_dim=6, sink=True)
    compare(case, torch.float32, "cpu")


def test_gradients_have_the_same_bits_every_time():
    torch.use_deterministic_algorithms(False)
    case = plain_case(q_shape=(300,), k_shape=(300,), terms=("t5", "shaw", "key table"))
    first, second = (results(case, torch.float32, "cpu") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_what_the_fused_kernel_cannot_do_is_said():
    q = torch.randn(1, 1, 4, 4)
    for words, keywords in {
        "dot products only": {"score": rg.InverseDistance()},
        "no softcap": {"softcap": 2.0},
        "dropout is not the same": {"dropout": 0.5},
        "one number as its scale": {"scale": nn.Parameter(torch.ones(1))},
    }.items():
        plan = rg.attention(q, q, **keywords).plan
        assert plan.engine == "tiled" and words in dict(plan.refused)["cpu"]


def test_memory_of_a_learned_bias_is_linear():
    """Forward and backward make no tensor of N x N numbers."""
    n = 8192
    q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
    A = rg.attention(q, k, position=rg.recipes.t5(1) + rg.recipes.shaw(8, 16))
    problem = A._still
    with torch.no_grad(), Largest() as seen:
        out, lse = cpu.forward(problem, v)
        needs = [x.is_floating_point() for x in problem.operands]
        cpu.backward(problem, v, out, lse, out, lse, needs)
    assert cpu.feeding.ROWS * n <= seen.numbers < n * n // 8
