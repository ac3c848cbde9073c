"""Geometries: index to place and back by hand, tokens without a place, and displacements as the profile shows them."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


def test_a_line_counts_its_tokens():
    line = rg.Line()
    assert line.axes == 1 and line.size() is None and line.placed(torch.arange(3)) is None
    assert line.coordinates(torch.tensor([[0, 7], [3, 4]])).tolist() == [[[0], [7]], [[3], [4]]]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 2), (2, 3, 4)])
@pytest.mark.parametrize("unplaced", [0, 2])
def test_a_grid_is_row_major(shape, unplaced):
    grid = rg.Grid(*shape, unplaced=unplaced)
    count = math.prod(shape)
    assert grid.axes == len(shape) and grid.size() == count + unplaced
    places = grid.coordinates(torch.arange(unplaced, count + unplaced))
    assert [tuple(p) for p in places.tolist()] == list(itertools.product(*map(range, shape)))
    place = grid.placed(torch.arange(count + unplaced))
    assert place is None if not unplaced else place.tolist() == [False] * unplaced + [True] * count


@pytest.mark.parametrize("batch", [None, 2])
def test_points_look_up_their_coordinates(batch):
    lead = () if batch is None else (batch,)
    coords, placed = torch.randn(*lead, 6, 2), torch.rand(*lead, 6) < 0.5
    points = rg.Points(coords, placed)
    assert points.axes == 2 and points.size() == 6 and not points.enumerable
    rows = torch.tensor([[4, 0, 5]] if batch is None else [[4, 0, 5], [1, 1, 2]])
    found, has = points.coordinates(rows), points.placed(rows)
    for b, (row, at) in enumerate(zip(found, rows, strict=True)):
        own = (coords, placed) if batch is None else (coords[b], placed[b])
        assert torch.equal(row, own[0][at]) and torch.equal(has[b], own[1][at])
    if batch is not None:  # one row of indices serves every batch row
        assert torch.equal(points.coordinates(rows[:1]), coords[:, rows[0]])


def test_no_gradient_flows_into_coordinates():
    coords = torch.randn(4, 2, requires_grad=True)
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    A = rg.attention(x, x, geometry=rg.Points(coords), position=rg.Static(rg.Slope(2), 1))
    (A @ x).sum().backward()
    assert coords.grad is None and x.grad is not None


def by_hand(A, q_places, k_places, low, shape) -> torch.Tensor:
    """Mass per displacement, pair by pair."""
    total = torch.zeros(*A.shape[:2], *shape, dtype=A.dtype)
    for (i, p), (j, o) in itertools.product(enumerate(q_places), enumerate(k_places)):
        if p is not None and o is not None:
            at = tuple(a - b - lowest for a, b, lowest in zip(p, o, low, strict=True))
            total[(slice(None), slice(None), *at)] += A[:, :, i, j]
    return total


def test_queries_and_keys_on_grids_of_different_sizes(attention):
    q, k = torch.randn(1, 2, 2 * 3, 4, dtype=torch.float64), torch.randn(1, 2, 4 * 2 + 1, 4, dtype=torch.float64)
    A = attention(q, k, geometry=(rg.Grid(2, 3), rg.Grid(4, 2, unplaced=1)))
    q_places, k_places = list(itertools.product(range(2), range(3))), [None, *itertools.product(range(4), range(2))]
    found = A.profile()
    expected = by_hand(A.dense(), q_places, k_places, (-3, -1), (5, 4))
    assert found.shape == (1, 2, 5, 4) and (found - expected).abs().max() < 1e-12
    turned = A.reversed()
    expected = by_hand(turned.dense(), k_places, q_places, (-1, -2), (5, 4))
    assert (turned.profile() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_part_of_a_grid_by_its_start(attention, shape):
    """Queries 2 and 3 of a grid of six, against all its keys, see what rows 2 and 3 of the whole see."""
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64)
    grid, term = rg.Grid(*shape), rg.Static(rg.Cells(*shape), 1).double().requires_grad_(False)
    whole = attention(x, x, geometry=grid, position=term)
    part = attention(x[:, :, 2:4], x, geometry=grid, position=term, q_start=2)
    assert torch.equal(part.logits.dense(), whole.logits[..., 2:4, :])
    places = list(itertools.product(*map(range, shape)))
    low, sizes = [1 - n for n in shape], [2 * n - 1 for n in shape]
    expected = by_hand(part.dense(), places[2:4], places, low, sizes)
    assert (part.profile() - expected).abs().max() < 1e-12


def test_a_grid_of_one_axis_is_a_line(attention):
    x = torch.randn(1, 2, 6, 4)
    term = rg.recipes.t5(2).requires_grad_(False)
    on_grid, on_line = (attention(x, x, geometry=g, position=term) for g in (rg.Grid(6), rg.Line()))
    assert torch.equal(on_grid.logits.dense(), on_line.logits.dense())
    assert on_grid.profile().shape == on_line.profile().shape == (1, 2, 11)


def test_geometries_print_as_they_are_written():
    assert str(rg.Grid(2, 3)) == "Grid(2, 3)" and str(rg.Grid(2, unplaced=1)) == "Grid(2, unplaced=1)"
    assert str(rg.Line()) == "Line()" and str(rg.Points(torch.zeros(4, 2))) == "Points([4, 2])"


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), (1, 1, 1, 1)])
def test_a_grid_of_no_shape(shape):
    with pytest.raises(ValueError, match="shape: expected one to three positive integers, found"):
        rg.Grid(*shape)


@pytest.mark.parametrize("unplaced", [-1, 1.0])
def test_a_grid_with_a_wrong_number_of_unplaced_tokens(unplaced):
    with pytest.raises(ValueError, match=f"unplaced: expected a number of tokens >= 0, found {unplaced}"):
        rg.Grid(2, unplaced=unplaced)


BAD_POINTS = {
    "list": ([[0, 0]], None, r"coords: expected a tensor \[length, axes\] or \[batch, length, axes\], found list"),
    "one axis": (torch.zeros(4), None, r"coords: expected a tensor \[length, axes\] .* found \(4,\)"),
    "bool": (torch.zeros(4, 2).bool(), None, "coords: expected integers or real numbers, found torch.bool"),
    "complex": (torch.zeros(4, 2) * 1j, None, "coords: expected integers or real numbers, found torch.complex64"),
    "NaN": (torch.full((4, 2), math.nan), None, "coords: expected finite numbers, found 8 that are NaN or infinite"),
    "float": (torch.zeros(4, 2), torch.ones(4), r"placed: expected a boolean of shape \(4,\), found torch.float32"),
    "short": (torch.zeros(4, 2), torch.ones(3) > 0, r"placed: expected a boolean of shape \(4,\), .* shape \(3,\)"),
    "placed list": (torch.zeros(4, 2), [True] * 4, r"placed: expected a boolean of shape \(4,\), found list"),
}


@pytest.mark.parametrize("kind", BAD_POINTS)
def test_bad_points(kind):
    coords, placed, message = BAD_POINTS[kind]
    with pytest.raises(ValueError, match=message):
        rg.Points(coords, placed)
