"""Each rewrite by itself: the same numbers before and after."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from support import within_budget

import regard as rg
from regard import calls as remembered
from regard import lower
from regard.calls import known_calls as calls
from regard.description import describe
from regard.engines import reference
from regard.normal import Kept
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


# Calls like one another are checked and lowered once: what is kept must never be what another call wants


def terms():
    """Terms whose form is kept, by name: made anew, so that nobody else has called with them."""
    return {
        "T5": rg.recipes.t5(2),
        "ALiBi": rg.recipes.alibi(2),
        "learned": rg.Static(rg.Cells(9), 2),
        "table": rg.Static(rg.Table(1, clip=3), 2),
        "two": rg.recipes.t5(2) + rg.Static(rg.Clipped(3), 2),
        "Shaw": rg.recipes.shaw(4, 3),
        "both sides": rg.FromQuery(rg.Table(4, clip=3)) + rg.FromKey(rg.Table(4, clip=2)),
    }


def lowered(q, k, again=True, **changes):
    """What a call is lowered to, by bins; and, if not `again`, by somebody who remembers nothing."""
    if not again:
        known = dict(calls)
        calls.clear()
    d = description(q, k, **changes)
    found = lower.lower(d, bins=True)
    if not again:
        calls.clear()
        calls.update(known)
    return found


def alike(found, expected):
    assert (found.form, found.starts, found.scale) == (expected.form, expected.starts, expected.scale)
    pairs = zip([found.q, found.k, *found.operands], [expected.q, expected.k, *expected.operands], strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def numbers(term):
    """Something plain that a term, or what it is made of, says of itself."""
    for module in term.modules():
        if isinstance(module, (rg.Static, rg.FromQuery)):
            module.scale = 0.25
            return


CHANGES = {
    "nothing": lambda term: None,
    "in place": lambda term: [p.data.add_(1.0) for p in term.parameters()],
    "data": lambda term: [setattr(p, "data", torch.randn_like(p)) for p in term.parameters()],
    "dtype": lambda term: term.double(),
    "strides": lambda term: [setattr(p, "data", p.data.mT.contiguous().mT) for p in term.parameters()],
    "a number": numbers,
    "no gradient": lambda term: term.requires_grad_(False),
    "evaluating": lambda term: term.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", terms())
def test_a_call_like_one_before_has_its_own_numbers(name, change):
    term = terms()[name]
    x = torch.randn(3, 2, 2, 7, 4)
    first = lowered(x[0], x[1], position=term)
    assert isinstance(first.form, Kept) and lowered(x[1], x[2], position=term).form is first.form
    with torch.no_grad():
        CHANGES[change](term)
    alike(lowered(x[2], x[0], position=term), lowered(x[2], x[0], again=False, position=term))


def test_a_parameter_that_is_replaced_is_another():
    term = rg.recipes.t5(2)
    x = torch.randn(2, 2, 5, 4)
    before = lowered(x, x, position=term).operands[0]
    term.readout = torch.nn.Parameter(torch.randn_like(term.readout))
    after = lowered(x, x, position=term).operands[0]
    assert torch.equal(after[0], term.readout) and not torch.equal(before, after)


OTHERS = {
    "length": lambda x, t: ((x[:, :, :5], x[:, :, :5]), {}),
    "keys": lambda x, t: ((x, x[:, :, :5]), {"q_start": 2}),
    "heads": lambda x, t: ((x, x[:, :1]), {}),
    "batch": lambda x, t: ((x[:1], x[:1]), {}),
    "dtype": lambda x, t: ((x.double(), x.double()), {}),
    "start": lambda x, t: ((x, x), {"q_start": 3, "k_start": 1}),
    "scale": lambda x, t: ((x, x), {"scale": 0.3}),
    "softcap": lambda x, t: ((x, x), {"softcap": 3.0}),
    "causal": lambda x, t: ((x, x), {"mask": rg.causal}),
    "window": lambda x, t: ((x, x), {"mask": rg.window(2)}),
    "wider": lambda x, t: ((x, x), {"mask": rg.window(3)}),
    "masks": lambda x, t: ((x, x), {"mask": rg.window(3) & rg.keys(0, 4)}),
    "lengths": lambda x, t: ((x, x), {"mask": rg.lengths([3, 5])}),
    "shorter": lambda x, t: ((x, x), {"mask": rg.lengths([2, 4])}),
    "two tensors": lambda x, t: ((x, x.clone()), {}),
    "one tensor": lambda x, t: ((x, x), {}),
    "gate": lambda x, t: ((x, x), {"position": t.bind(gate=torch.rand(2, 2, 7, 1))}),
    "sink": lambda x, t: ((x, x), {"sink": torch.randn(2)}),
    "starts": lambda x, t: ((x, x), {"q_start": torch.tensor([1, 2])}),
    "another term": lambda x, t: ((x, x), {"position": t + rg.recipes.alibi(2)}),
    "on a grid": lambda x, t: (
        (x[:, :, :6], x[:, :, :6]), {"position": rg.recipes.swin(2, (2, 3)), "geometry": rg.Grid(2, 3)}
    ),
    "on another": lambda x, t: (
        (x[:, :, :6], x[:, :, :6]), {"position": rg.recipes.swin(2, (3, 2)), "geometry": rg.Grid(3, 2)}
    ),
}  # fmt: skip


def test_calls_that_differ_share_nothing():
    """Each after all others, twice over: none is taken for another."""
    term = rg.Static(rg.Clipped(3), 2)
    x = torch.randn(2, 2, 7, 4)
    for name in [*OTHERS, *reversed(OTHERS)]:
        (q, k), given = OTHERS[name](x, term)
        given = {"position": term, **given}
        alike(lowered(q, k, **given), lowered(q, k, again=False, **given))


def test_a_query_that_was_its_own_key_is_not_taken_for_it():
    """Terms that read one tensor share an operand: not so in the next call, whose queries are not its keys."""
    term = terms()["both sides"]
    x, y = torch.randn(2, 2, 2, 7, 4)
    lowered(x, x, position=term)
    alike(lowered(x, y, position=term), lowered(x, y, again=False, position=term))


def test_what_is_remembered_of_calls_is_bounded_and_holds_no_parameters(monkeypatch):
    monkeypatch.setattr(remembered, "CALLS", 4)
    x = torch.randn(1, 2, 12, 4)
    term = rg.recipes.t5(2)
    for n in range(1, 12):
        lowered(x[:, :, :n], x[:, :, :n], position=term)
    assert len(calls) <= 4
    gone = weakref.ref(term.readout)
    del term
    gc.collect()
    assert gone() is None


def test_gradients_flow_through_a_call_like_one_before():
    term = rg.recipes.t5(2)
    x = torch.randn(1, 2, 6, 4)
    with torch.inference_mode():
        lowered(x, x, position=term)
    for _ in range(2):
        table = lowered(x, x, position=term).operands[0]
        (grad,) = torch.autograd.grad(table.square().sum(), term.readout)
        assert torch.equal(grad, 2 * term.readout.detach())


def test_bad_numbers_are_seen_in_a_call_like_one_before():
    term, x = rg.recipes.t5(2), torch.randn(1, 2, 6, 4)
    lowered(x, x, position=term)
    with torch.no_grad():
        term.readout[0, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN in readout"):
        lowered(x, x, position=term)


def test_an_argument_of_another_kind_is_not_taken_for_an_equal_one():
    x = torch.randn(1, 2, 6, 4)
    lowered(x, x, q_start=1, mask=rg.causal)
    with pytest.raises(ValueError, match="q_start: expected a position"):
        lowered(x, x, q_start=True, mask=rg.causal)
    with pytest.raises(TypeError, match="q_start: expected a whole number"):
        lowered(x, x, q_start=1.0, mask=rg.causal)


def test_a_parameter_that_no_longer_fits_is_refused_after_calls_that_it_did():
    x = torch.randn(1, 2, 6, 4)
    term = rg.recipes.t5(2)
    lowered(x, x, position=term)
    term.readout.data = torch.randn(3, 32)
    with pytest.raises(ValueError, match="readout: expected one set"):
        lowered(x, x, position=term)
