"""Each rewrite by itself: the same numbers before and after."""

from __future__ import annotations

import math

import pytest
import torch
from support import within_budget

import regard as rg
from regard import lower
from regard.description import describe
from regard.engines import reference
from regard.tables import take


def description(q, k, **changes):
    names = "score scale position mask geometry q_start k_start softcap sink engine".split()
    return describe(q, k, **{**dict.fromkeys(names), "dropout": 0.0, **changes})


def vectors(heads=2, kv_heads=2, q_len=5, k_len=6, dim=4):
    return torch.randn(2, heads, q_len, dim).double(), torch.randn(2, kv_heads, k_len, dim).double()


def same(found, expected):
    """Equal in float64 to what a float32 can tell."""
    within_budget(found.float(), expected.float(), expected)


def test_cosine_is_the_dot_of_unit_vectors():
    q, k = vectors()
    a, b = lower.cosine(q, k)
    same(a @ b.mT, torch.nn.functional.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1))


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
def test_euclidean_is_a_dot_and_two_biases(heads, kv_heads):
    q, k = vectors(heads, kv_heads)
    a, b, row, column = lower.euclidean(q, k)
    b = b.repeat_interleave(heads // kv_heads, dim=1)
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    same(a @ b.mT + row.unsqueeze(-1) + column.unsqueeze(-2), -torch.cdist(q, k).square() / 2)


def test_euclidean_does_not_cancel_far_from_the_origin():
    q, k = (x.float() + 1000 for x in vectors())
    found = rg.attention(q, k, score=rg.Euclidean()).dense()
    exact = rg.attention(q.double(), k.double(), score=rg.Euclidean(), engine="reference").dense()
    plain = rg.attention(q, k, score=rg.Euclidean(), engine="reference").dense()
    within_budget(found, plain, exact)


def test_euclidean_is_centred_without_the_infinite_keys():
    q, k = vectors()
    k[0, 0, 0] = torch.inf
    assert lower.euclidean(q, k)[0].isfinite().all()


@pytest.mark.parametrize(
    "feature", [rg.Buckets(8, 6), rg.Clipped(2), rg.Cells(16), rg.Slope(), rg.Sinusoid([0.7, 0.2])]
)
@pytest.mark.parametrize("starts", [(0, 0), (7, 3)])
def test_static_terms_are_tables(feature, starts):
    q, k = vectors()
    term = rg.Static(feature, 2).double()
    table = lower.static_table(term, description(q, k, q_start=starts[0], k_start=starts[1]), torch.float64)
    assert table.shape == (1, 2, 10)
    for i in range(5):
        for j in range(6):
            delta = torch.tensor([[starts[0] + i - starts[1] - j]])
            same(table[0, :, i - j + 5], term.readout @ feature(delta).double()[0])


def test_static_tables_on_a_grid_have_three_entries_for_tokens_without_a_place():
    q, k = vectors(q_len=7, k_len=7)
    term = rg.recipes.beit(2, (2, 3)).double()
    table = lower.static_table(term, description(q, k, geometry=rg.Grid(2, 3, unplaced=1)), torch.float64)
    assert table.shape == (1, 2, 15 + 3)
    same(table[0], term.readout)


@pytest.mark.parametrize("f", [2, 9])
@pytest.mark.parametrize("per_head", [1, 2])
def test_the_weight_goes_to_the_smaller_side(f, per_head):
    x, rows, weight = (torch.randn(*s).double() for s in ((2, 2, 5, 4), (1, 1, 7, f), (per_head, 4, f)))
    u, table = lower.fold(x, weight, rows, 2, 0.5)
    assert u.shape[-1] == table.shape[-1] == min(f, 4)
    same(u @ table.mT, 0.5 * (x @ weight) @ rows.mT)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("order", ["cos_sin", "sin_cos", "sin|cos"])
def test_the_addition_theorem_makes_a_sinusoid_a_dot_product(side, order):
    q, k = vectors()
    place = torch.randn(11, 2).double()
    geometry = rg.Points(place[:5]), rg.Points(place[5:])
    wave = rg.Sinusoid([1.7, 0.3], order=order)
    read = torch.randn(2, 2, 5 if side == "query" else 6, 4).double()
    a, b = lower.addition_theorem(wave, read, side, description(q, k, geometry=geometry), 1)
    waves = wave((place[:5, None] - place[None, 5:])[..., 1:])
    same(a @ b.mT, torch.einsum(f"bh{'i' if side == 'query' else 'j'}f,ijf->bhij", read, waves))


def test_rotary_depends_on_displacement_only():
    q, k = vectors(dim=8)
    term = rg.Rotary()
    products = [
        torch.matmul(a, b.mT)
        for a, b in (lower.rotary(term, description(q, k, q_start=s + 3, k_start=s)) for s in (0, 1000))
    ]
    same(products[1], products[0])


@pytest.mark.parametrize("injective", [False, True])
def test_take_and_its_gradient(injective):
    values = torch.randn(3, 40, 2, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(40), torch.randperm(40)]) if injective else torch.randint(40, (2, 90))
    torch.autograd.gradcheck(lambda v: take(v, index, injective), values, fast_mode=True)
    assert torch.equal(take(values, index, injective), values[:, index].movedim(1, 0))


def test_the_definition_reads_the_description_not_the_rewrites(monkeypatch):
    """A wrong rewrite must not change the reference, or nothing would judge it."""
    q, k = vectors()
    before = rg.attention(q, k, score=rg.Cosine(), position=rg.Rotary(), engine="reference").dense()
    monkeypatch.setattr(lower, "cosine", lambda q, k: (q, k))
    monkeypatch.setattr(lower, "rotary", lambda term, d: (d.q, d.k))
    after = rg.attention(q, k, score=rg.Cosine(), position=rg.Rotary(), engine="reference").dense()
    wrong = rg.attention(q, k, score=rg.Cosine(), position=rg.Rotary()).dense()
    assert torch.equal(before, after) and not torch.allclose(before, wrong)


def test_inverse_distance_of_an_exact_match_takes_everything():
    scores = reference.score(rg.InverseDistance(), torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]]))
    assert torch.softmax(scores, -1).tolist() == [[[[1.0, 0.0]]]] and math.isfinite(scores.max())
