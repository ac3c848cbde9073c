"""The CPU engine, wherever the plan chooses it, against the definition, under the one error budget."""

from __future__ import annotations

import pytest
import torch
from comparing import KINDS, compare, cut, plain_case, results
from descriptions import cases
from hypothesis import given, settings
from support import Largest, all_within_budget, within_budget
from torch import nn

import regard as rg
from regard.engines import cpu
from regard.engines.cpu import attending, native, sources
from regard.engines.reference import keep


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
        "one number as its scale": {"scale": nn.Parameter(torch.ones(1))},
    }.items():
        plan = rg.attention(q, q, **keywords).plan
        assert plan.engine == "tiled" and words in dict(plan.refused)["cpu"]


def test_dropout_needs_the_compiled_passes(monkeypatch):
    q = torch.randn(1, 1, 4, 4)
    assert rg.attention(q, q, dropout=0.5).plan.engine == ("cpu" if native.library() is not None else "tiled")
    assert "compute in float32" in dict(rg.attention(q.double(), q.double(), dropout=0.5).plan.refused)["cpu"]
    monkeypatch.setattr(native, "_load", lambda: (None, "not wanted"))
    form = rg.attention(q, q, dropout=0.5).plan.form
    assert "they are missing (not wanted)" in cpu.refuse(form, "cpu", "float32")


COMPILED = pytest.mark.skipif(native.library() is None, reason=f"no compiled passes here: {native.missing()}")


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "terms, mask, sink",
    [((), "none", False), (("t5", "shaw"), "causal", True), (("key table",), "causal & lengths", False)],
)
def test_dropout_longer_than_a_block(terms, mask, sink, dtype):
    case = plain_case(q_shape=(150,), k_shape=(140,), terms=terms, mask=mask, starts="numbers", sink=sink, dropout=0.3)
    compare(case, dtype, "cpu")


@COMPILED
@pytest.mark.parametrize("q_len", [3, 80], ids=["few queries", "many queries"])
def test_dropout_drops_what_the_definition_drops(q_len):
    """With v the identity the product is A itself, less what is dropped (eq. 25)."""
    k_len = 600
    q, k = torch.randn(2, 3, q_len, 8), torch.randn(2, 1, k_len, 8)
    A = rg.attention(q, k, dropout=0.4, engine="cpu")
    out = A @ torch.eye(k_len).expand(2, 1, k_len, k_len)
    problem = A._still
    seeds = problem.operands[problem.form.seeds]
    kept = keep(seeds, torch.arange(q_len), torch.arange(k_len), 0.4)
    assert torch.equal(out != 0, kept) and 0.55 < kept.float().mean() < 0.65
    torch.testing.assert_close(out, A.dense() * kept / 0.6)
    assert torch.equal(A[1:, 1:] @ torch.eye(k_len).expand(1, 1, k_len, k_len) != 0, kept[1:, 1:])


@COMPILED
@pytest.mark.parametrize("turned", [False, True], ids=["A", "reversed"])
@pytest.mark.parametrize("mask", [None, rg.causal], ids=["all", "causal"])
@pytest.mark.parametrize("length", [48, 117, 530])
def test_bins_are_read_sixteen_at_a_time(length, mask, turned):
    """DeBERTa's terms, on both sides, at lengths that are whole squares of 16 x 16 and at others."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, length, 8).unbind()
    keys, queries = torch.randn(2, 2, 32, 8).unbind()
    found = []
    for engine, dtype in (("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, keys, queries)]
        terms = rg.recipes.deberta(2, 8, buckets=16, max_position=length, keys=leaves[2], queries=leaves[3])
        A = rg.attention(*leaves[:2], position=terms, mask=mask, engine=engine)
        out = (A.reversed() if turned else A) @ v.to(dtype)
        grads = torch.autograd.grad((out * v.to(dtype).cos()).sum(), leaves)
        found.append({"out": out, **{f"gradient {n}": x for n, x in enumerate(grads)}})
    all_within_budget({"out": found[0].pop("out")}, *({"out": x.pop("out")} for x in found[1:]))
    all_within_budget(*found)


@COMPILED
def test_a_step_over_a_bin_is_not_smooth():
    """Few bins for many distances leave some out: such a map is read pair by pair, and rightly."""
    assert sources.is_smooth(torch.tensor([0, 0, 1, 2, 2])) and sources.is_smooth(torch.tensor([5, 4, 4, 3]))
    assert not any(sources.is_smooth(torch.tensor(x)) for x in ([0, 2], [0, 1, 0], [3, 1]))
    bins = rg.LogBuckets(40, 42)  # sixteen neighbours read more than sixteen bins
    table = rg.Table(8, index=bins, values=torch.randn(bins.dim, 8))
    q, k, v = torch.randn(3, 1, 2, 100, 8).unbind()
    found = [
        rg.attention(q.to(dtype), k.to(dtype), position=rg.FromQuery(table) + rg.FromKey(table), engine=engine)
        @ v.to(dtype)
        for engine, dtype in (("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    ]
    within_budget(*found)


@COMPILED
def test_two_terms_with_an_entry_for_every_displacement():
    """The kernel multiplies one of them itself; the rows it is given move on for both."""
    q, k, v = torch.randn(3, 1, 2, 700, 8).unbind()
    terms = rg.FromQuery(rg.Sinusoid(torch.rand(4))) + rg.FromQuery(rg.Sinusoid(torch.rand(4)))
    assert 700 > attending.ROOM // (2 * 1399)  # more than one part
    found = [
        rg.attention(q.to(dtype), k.to(dtype), position=terms, engine=engine) @ v.to(dtype)
        for engine, dtype in (("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    ]
    within_budget(*found)


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
