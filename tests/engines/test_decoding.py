"""Few queries against many keys: the compiled kernel against the definition, and where it leaves the work to others."""

from __future__ import annotations

import copy

import pytest
import torch
from support import all_within_budget

import regard as rg
from regard.engines import cpu
from regard.engines.cpu import decoding, native

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled passes here: {native.missing()}")

LONG = 2 * decoding.PART + 37  # keys in three parts, the last one not whole


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """Whether the kernel took each product."""
    taken = []

    def decode(problem, v):
        found = decoding.decode(problem, v)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(cpu, "decode", decode)
    return taken


TERMS = {
    "none": lambda: None,
    "t5": lambda: rg.recipes.t5(4),
    "alibi": lambda: rg.recipes.alibi(4),
    "t5, alibi and shaw": lambda: rg.recipes.t5(4) + rg.recipes.alibi(4) + rg.recipes.shaw(8, 5),
    "transformer_xl": lambda: rg.recipes.transformer_xl(4, 8),
}
MASKS = {
    "none": lambda: None,
    "causal": lambda: rg.causal,
    "window": lambda: rg.window(2500, 3),
    "causal and lengths": lambda: rg.causal & rg.lengths([LONG - 9, 1000]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", TERMS.values(), ids=TERMS)
@torch.no_grad()
def test_several_parts(make, mask, served):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, LONG, 8), torch.randn(2, 2, LONG, 20)
    term, sink = make(), torch.randn(4)
    results = []
    for dtype, engine in ((torch.float32, "cpu"), (torch.float32, "reference"), (torch.float64, "reference")):
        place = None if term is None else copy.deepcopy(term).to(dtype)
        A = rg.attention(
            q.to(dtype), k.to(dtype), position=place, mask=mask(), q_start=LONG - 5, sink=sink.to(dtype), engine=engine
        )  # fmt: skip
        results.append({"out": A @ v.to(dtype), "lse": A.lse})
    all_within_budget(*results)
    assert any(served)


@pytest.mark.parametrize("dim, v_dim", [(64, 64), (128, 128), (64, 96), (80, 16), (7, 3), (1, 1)])
@pytest.mark.parametrize("q_len, heads", [(1, 2), (1, 16), (5, 6), (16, 2)])
def test_widths_and_rows(dim, v_dim, q_len, heads, served):
    """Every way through the kernel: rows by four and one by one, whole vectors and what is left over."""
    q, k, v = torch.randn(2, heads, q_len, dim), torch.randn(2, 2, 77, dim), torch.randn(2, 2, 77, v_dim)
    found, plain, exact = (
        {"out": rg.attention(q.to(t), k.to(t), engine=e) @ v.to(t)}
        for t, e in ((torch.float32, None), (torch.float32, "reference"), (torch.float64, "reference"))
    )
    all_within_budget(found, plain, exact)
    assert served == [heads // 2 * q_len <= decoding.ROWS]


def test_keys_and_values_are_read_where_they_lie(served):
    """Views of any layout: a cache with room for more, heads inside, values for each head and keys for groups."""
    q = torch.randn(1, 4, 1, 8)
    cache = torch.randn(1, 100, 2, 3, 8)  # batch, length, heads, three of something, dim
    k, v = cache[:, :60, :, 0].transpose(1, 2), cache[:, :60, :, 2].transpose(1, 2)
    wide = v.repeat_interleave(2, dim=1)
    backwards = torch.randn(1, 2, 8, 60).mT
    for keys, values in ((k, v), (k, wide), (backwards, v), (k, backwards)):
        expected = rg.attention(q, keys, engine="reference") @ values
        torch.testing.assert_close(rg.attention(q, keys) @ values, expected)
    assert served == [True] * 4


def test_threads_change_nothing():
    """Parts are cut by length alone, and put together in order: the same bits however many threads there are."""
    q, k, v = torch.randn(1, 3, 1, 64), torch.randn(1, 3, LONG, 64), torch.randn(1, 3, LONG, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            A = rg.attention(q, k, position=rg.recipes.alibi(3), q_start=LONG - 1)
            found.append((A @ v, A.lse))
    finally:
        torch.set_num_threads(before)
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mask", [rg.causal, rg.lengths([40, 40]), rg.causal & rg.lengths([40, 40])], ids=str)
def test_what_nobody_sees_does_not_count(mask, bad, served):
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    clean = rg.attention(q, k, mask=mask, q_start=37) @ v
    k[1, 0, 45:] = bad
    spoiled = rg.attention(q, k, mask=mask, q_start=37)
    torch.testing.assert_close(spoiled @ v, clean)
    assert spoiled.lse.isfinite().all() and all(served)


def test_rows_that_see_nothing():
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    A = rg.attention(q, k, mask=rg.causal, q_start=0, k_start=2)  # the first two queries stand before every key
    out = A @ v
    assert (out[:, :, :2] == 0).all() and (A.lse[:, :, :2] == -torch.inf).all()
    torch.testing.assert_close(out[:, :, 2], v[:, :, 0])


def test_others_do_what_it_does_not(served):
    q, k, v = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    term = rg.Static(rg.Buckets(8, 6), 2)
    gate = torch.rand(2, 2, 2, 1)
    for keywords in (
        {"position": term.bind(gate=gate)},
        {"position": term, "q_start": torch.tensor([3, 9])},
        {"mask": rg.dense(torch.rand(2, 1, 2, 40) > 0.3)},
    ):
        found = rg.attention(q, k, engine="cpu", **keywords) @ v
        torch.testing.assert_close(found, rg.attention(q, k, engine="reference", **keywords) @ v)
    assert served == [False] * 3
