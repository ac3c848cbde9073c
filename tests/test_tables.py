"""Tables that are kept for the next call: never stale, never too many, and never in the way of a gradient."""

from __future__ import annotations

import copy

import pytest
import torch

import regard as rg
from regard import tables
from regard.lower import static_table


@pytest.fixture(autouse=True)
def empty(monkeypatch) -> tables.Kept:
    """A store of its own for each test."""
    store = tables.Kept()
    monkeypatch.setattr("regard.lower.kept", store)
    return store


def step(term: rg.Static, k_len: int, q_len: int = 1) -> torch.Tensor:
    """The table of a step of decoding."""
    q, k = torch.zeros(1, 2, q_len, 4), torch.zeros(1, 2, k_len, 4)
    A = rg.attention(q, k, position=term, q_start=k_len - q_len)
    return static_table(term, A._description, torch.float32)


def fresh(term: rg.Static, k_len: int, q_len: int = 1) -> torch.Tensor:
    delta = torch.arange(1 - q_len, k_len)[:, None]
    if q_len > 1:
        delta = torch.arange(k_len - q_len - (k_len - 1), k_len)[:, None]
    return (term.readout[:, term.features.index(delta)] * term.scale)[None]


@torch.no_grad()
def test_steps_take_slices_of_one_table(empty):
    term = rg.recipes.t5(2)
    found = [step(term, n) for n in (5, 6, 900, 1023)]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1 and len(empty.tables) == 1
    for n, x in zip((5, 6, 900, 1023), found, strict=True):
        assert torch.equal(x, fresh(term, n))
    assert torch.equal(step(term, 3000, 7), fresh(term, 3000, 7)) and len(empty.tables) == 2


CHANGES = {
    "in place": lambda p: p.add_(1),
    "behind its back": lambda p: p.data.mul_(3),  # leaves the version as it was
    "other data": lambda p: setattr(p, "data", torch.randn_like(p)),
    "one number": lambda p: p.data[1, 3].add_(1e-6),
    "through memory": lambda p: p.detach().numpy().__setitem__((0, 1), 7.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_never_stale(change):
    term = rg.recipes.t5(2)
    for _ in range(3):
        assert torch.equal(step(term, 50), fresh(term, 50))
        change(term.readout)


@torch.no_grad()
def test_terms_that_look_alike_are_told_apart(empty):
    one = rg.recipes.t5(2)
    other = copy.deepcopy(one)
    other.readout.add_(1)
    narrow = rg.Static(rg.Buckets(32, 64), 2, readout=one.readout)
    scaled = rg.Static(rg.Buckets(32, 128), 2, readout=one.readout, scale=0.5)
    for _ in range(2):
        for term in (one, other, narrow, scaled):
            assert torch.equal(step(term, 300), fresh(term, 300))


def test_gradients_flow_past_it(empty):
    term = rg.recipes.t5(2)
    with torch.no_grad():
        step(term, 40)
    table = step(term, 40)
    (grad,) = torch.autograd.grad(table.sum(), term.readout)
    assert grad.sum() == table.numel()
    q = torch.randn(1, 2, 1, 4, requires_grad=True)
    frozen = rg.recipes.t5(2).requires_grad_(False)
    k = torch.randn(1, 2, 40, 4)
    (rg.attention(q, k, position=frozen, q_start=39) @ k).sum().backward()
    assert q.grad is not None and len(empty.tables) == 2


def test_made_under_inference_mode_it_serves_outside(empty):
    term = rg.recipes.t5(2).requires_grad_(False)
    with torch.inference_mode():
        step(term, 40)
    q = torch.randn(1, 2, 1, 4, requires_grad=True)
    k = torch.randn(1, 2, 40, 4)
    (rg.attention(q, k, position=term, q_start=39) @ k).sum().backward()
    assert q.grad is not None and len(empty.tables) == 1


@torch.no_grad()
def test_the_oldest_go_first(empty, monkeypatch):
    monkeypatch.setattr(tables.Kept, "most", 3 * 2 * 1025)
    terms = [rg.recipes.t5(2) for _ in range(5)]
    for term in terms:
        step(term, 40)
    assert len(empty.tables) == 3 and empty.numbers == sum(x.numel() for _, x in empty.tables.values())
    places = [key[0] for key in empty.tables]
    assert places == [term.readout.data_ptr() for term in terms[2:]]
    step(terms[2], 41)
    assert next(iter(empty.tables))[0] == terms[3].readout.data_ptr()
    assert empty.numbers == sum(x.numel() for _, x in empty.tables.values())


@torch.no_grad()
def test_what_is_too_large_is_not_kept(empty, monkeypatch):
    monkeypatch.setattr(tables.Kept, "table", 1000)
    term = rg.recipes.t5(2)
    assert torch.equal(step(term, 40), fresh(term, 40)) and not empty.tables
    monkeypatch.setattr(tables.Kept, "table", 1 << 20)
    monkeypatch.setattr(tables.Kept, "values", 10)
    assert torch.equal(step(term, 40), fresh(term, 40)) and not empty.tables


def test_bins_of_a_grid_are_kept_for_each_kind(monkeypatch):
    """The same grid, with other bins, other shapes and other entries for tokens without a place."""
    tables.grid_bins.cache_clear()
    made, make = [], tables.grid_displacements
    monkeypatch.setattr(tables, "grid_displacements", lambda *given: made.append(given) or make(*given))
    for _ in range(2):  # made, then found
        for shape, unplaced in (((3, 4), 0), ((3, 4), 1), ((4, 3), 0)):
            place = rg.Grid(*shape, unplaced=unplaced)
            x = torch.randn(1, 2, 12 + unplaced, 4)
            for term in (rg.recipes.swin(2, (4, 4)), rg.recipes.beit(2, (4, 4)), rg.recipes.sam(4, (4, 4))):
                found, expected = (
                    rg.attention(x, x, position=term, geometry=place, engine=engine) for engine in (None, "reference")
                )
                torch.testing.assert_close(found.dense(), expected.dense())
    assert len(made) == 8
