"""The kernels of the GPU engine under Triton's interpreter, against the definition. Run by `test_triton.py`.

TRITON_INTERPRET=1 must be set before kernels are imported, and would change the plans of other tests: so this file is
no test module by name, and runs in a process of its own. Tiles are small there, so small problems have several, and
the cases below run every loop and every branch of every kernel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comparing import compare as compare_each
from comparing import plain_case
from descriptions import Case
from inside import watched
from support import all_within_budget, within_budget

import regard as rg
from regard.engines import triton as engine


@pytest.fixture(autouse=True)
def nothing_is_read_elsewhere():
    with watched():
        yield


LONG, SHORT = (40,), (37,)
NEAR = {"q_shape": (28,), "k_shape": (26,)}  # a table without a clip ends at 31


def line(**changes) -> Case:
    usual = dict(batch=1, heads=2, kv_heads=1, q_shape=LONG, k_shape=SHORT, starts="numbers", v_dim=5)
    return plain_case(**{**usual, **changes})


def grid(kind: str, shape: tuple[int, int], *terms: str, **changes) -> Case:
    return plain_case(batch=1, heads=2, kv_heads=2, geometry=kind, q_shape=shape, k_shape=shape, terms=terms, **changes)


CASES = {
    "plain": line(),
    "every head its own keys": line(kv_heads=2, mask="causal"),
    "scaled down": line(scale="tensor", terms=("constant",)),
    "clipped table": line(terms=("t5",)),
    "clipped table, causal, starts a row, sink": line(batch=2, terms=("t5",), mask="causal", starts="rows", sink=True),
    "two tables, window, softcap": line(terms=("t5", "cells"), mask="window", softcap=True, **NEAR),
    "slope": line(terms=("slope",)),
    "slope, causal, sink": line(terms=("slope", "constant"), mask="causal", sink=True),
    "gated table, slope": line(terms=("gated t5", "slope"), mask="causal & lengths"),
    "long table, dropout": line(terms=("cells",), dropout=0.3, **NEAR),
    "gathered, lengths of both": line(batch=2, terms=("shaw", "key table"), mask="query lengths"),
    "gathered twice gated": line(terms=("gated t5", "gated shaw", "cells"), **NEAR),
    "documents": line(batch=2, terms=("key constant",), mask="documents"),
    "dense, distances": line(score="euclidean", scale="tensor", mask="dense heads", softcap=True),
    "keys of a range": line(mask="keys", terms=("causal t5",)),
    "one diagonal": line(mask="offset", starts="zero"),
    "grid": grid("grid", (4, 8), "cells"),
    "grid whose lines are tiles": grid("grid", (3, 16), "cells"),
    "grid whose lines are two tiles": grid("grid", (3, 32), "cells"),
    "grid whose lines do not fill tiles": grid("grid", (4, 5), "cells", "slope"),
    "class token beside a table": grid("class grid", (4, 8), "class cells"),
    "the same, keys shared": replace(grid("class grid", (2, 8), "class cells"), kv_heads=1),
    "the same, lines do not fill tiles": grid("class grid", (4, 5), "class cells"),
    "grid with a class token": grid("class grid", (3, 5), "class cells", "per axis query"),
    "axes": grid("grid", (3, 16), "per axis query", "cells"),
    "axes, lines cut, causal": grid("grid", (4, 5), "per axis query", mask="causal", dropout=0.3),
    "axes of keys": grid("grid", (4, 5), "per axis key", "one axis"),
}


def results(case: Case, dtype: torch.dtype, engine: str, exact: bool = False, nudge: bool = False) -> dict:
    """Product, log-sum-exp, and gradients of a random function of both."""
    built = case.build(dtype, exact, nudge)
    A = built.matrix(engine)
    out, lse = A @ built.v, A.lse
    random = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for x in (out, torch.where(lse.isfinite(), lse, 0.0)):
        loss = loss + (x.double() * torch.randn(x.shape, generator=random, dtype=torch.float64)).sum()
    grads = torch.autograd.grad(loss, list(built.leaves.values()), allow_unused=True)
    found = {"out": out, "lse": lse}
    for (name, leaf), grad in zip(built.leaves.items(), grads, strict=True):
        found[f"gradient to {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def compare(case: Case, dtype: torch.dtype) -> None:
    found, plain = results(case, dtype, "triton"), results(case, dtype, "reference")
    exact, nudged = (results(case, dtype, "reference", exact=True, nudge=n) for n in (False, True))
    for kind in (True, False):
        names = [name for name in found if name.startswith("gradient") == kind]
        all_within_budget(*({name: x[name] for name in names} for x in (found, plain, exact, nudged)))


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_definition(name):
    compare(CASES[name], torch.float32)


@pytest.mark.parametrize("geometry, shape, term", [("line", (7,), "key table"), ("class grid", (3, 2), "per axis key")])
def test_content_terms_of_few_tokens(geometry, shape, term):
    """Each gradient by itself: what a strip's weights miss of one is multiplied by the content of keys."""
    case = plain_case(geometry=geometry, q_shape=shape, k_shape=shape, terms=(term,))
    compare_each(case, torch.float32, "triton")


@pytest.mark.parametrize("name", ["plain", "clipped table", "axes", "slope", "slope, causal, sink"])
def test_half_precision(name):
    compare(CASES[name], torch.float16)


@pytest.mark.parametrize("way", ["line", "sink", "grid", "one row", "table"])
def test_logits_very_far_apart(way):
    """Weights are relative to one number a row. Where a row's logits are out of its reach it is done again."""
    torch.manual_seed(3)
    given = {}
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    if way == "one row":
        k[:, :, 60] = 900 * q[:, :, 3]  # one pair, far from the diagonal, in a row of the first block
    elif way != "table":
        q = 60 * q
    if way == "sink":
        given["sink"] = torch.tensor([500.0, -500.0])
    if way == "grid":
        given |= {"position": rg.recipes.sam(8, (4, 16)).double(), "geometry": rg.Grid(4, 16)}
    if way == "table":  # far below 0, and no key near the diagonal is seen, where the pass looks first
        position = rg.Static(rg.Cells(64), 2).double().requires_grad_(False)
        position.readout.copy_(torch.stack([torch.linspace(-700, -450, 127), torch.linspace(400, 600, 127)]))
        given |= {"position": position, "mask": rg.window(None, -20)}
    found, plain, exact = [], [], []
    for into, which, dtype in (
        (found, "triton", torch.float),
        (plain, "reference", torch.float),
        (exact, "reference", torch.double),
    ):
        own = {name: x.to(dtype) if hasattr(x, "to") else x for name, x in given.items()}
        A = rg.attention(q.to(dtype), k.to(dtype), engine=which, **own)
        into += [(A @ v.to(dtype)).detach(), A.lse.detach()]
    seen = exact[1][exact[1] > -torch.inf]
    assert (seen.amax() - seen.amin()).abs() > 200
    for one in zip(found, plain, exact, strict=True):
        within_budget(*one)


def test_no_case_runs_on_another_engine(monkeypatch):
    """The tiled engine stays out: nothing above is its work."""
    monkeypatch.setattr(engine.tiled, "forward", lambda *a: pytest.fail("the tiled engine was asked"))
    monkeypatch.setattr(engine.tiled, "backward", lambda *a: pytest.fail("the tiled engine was asked"))
    results(CASES["plain"], torch.float32, "triton")
    built = CASES["axes"].build()
    assert built.matrix("triton").plan.engine == "triton"


def test_turned_around():
    """Scales and gates a key, from a matrix turned around."""
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    scale, v = torch.rand(1, 2, 20, 1) + 0.5, torch.randn(1, 2, 20, 3, requires_grad=True)
    found, plain, exact = [], [], []
    for into, which, dtype in (
        (found, "triton", None),
        (plain, "reference", None),
        (exact, "reference", torch.double),
    ):
        cast = [x.to(dtype or torch.float32) for x in (q, k, scale)]
        A = rg.attention(cast[0], cast[1], scale=cast[2], engine=which, mask=rg.causal).reversed()
        into.append(A @ v.to(cast[0].dtype))
    within_budget(found[0], plain[0], exact[0])


def test_gradients_have_the_same_bits_every_time():
    for name in ("clipped table", "grid", "axes"):
        first, second = (results(CASES[name], torch.float32, "triton") for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first), name


def test_wide_heads_go_to_the_tiled_engine_and_the_log_says_so(caplog):
    q = torch.randn(1, 1, 4, 300)
    with caplog.at_level("INFO", logger="regard"):
        found = rg.attention(q, q, engine="triton") @ q
    assert "heads of 300 numbers" in caplog.text
    assert "note  heads of 300 numbers, at most 256: the tiled engine computes it" in str(
        rg.attention(q, q, engine="triton").plan
    )
    torch.testing.assert_close(found, rg.attention(q, q, engine="tiled") @ q)


def test_the_first_call_is_told(caplog):
    q = torch.randn(1, 1, 4, 24)
    with caplog.at_level("INFO", logger="regard"):
        for _ in range(2):
            rg.attention(q, q, engine="triton", softcap=7.0) @ q
    assert caplog.text.count("compiled forward_kernel") == 1


def test_inputs_of_any_strides():
    q, k, v = (torch.randn(20, 8, 2, 1) for _ in range(3))
    loose = [x.permute(3, 2, 0, 1)[..., ::2] for x in (q, k, v)]
    dense = [x.contiguous() for x in loose]
    found = [rg.attention(a, b, engine="triton", mask=rg.causal) @ c for a, b, c in (loose, dense)]
    assert torch.equal(*found)
    assert found[0].transpose(1, 2).is_contiguous()  # heads join for free
