"""Features: R for every displacement against its formula, written by hand, in whole numbers where it can be."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from by_hand import judge

import regard as rg

MOST = 600
FAR = torch.arange(-MOST, MOST + 1)[:, None]


def bins(feature: rg.Feature, delta: torch.Tensor = FAR) -> list[int]:
    """The bin of each displacement, and R is its unit vector."""
    index = feature.index(delta)
    assert 0 <= int(index.min()) and int(index.max()) < feature.dim
    assert torch.equal(feature(delta), torch.eye(feature.dim)[index])
    return index.tolist()


@pytest.mark.parametrize("clip", [0, 1, 7])
def test_clipped(clip):
    assert bins(rg.Clipped(clip)) == [max(-clip, min(clip, d)) + clip for d in range(-MOST, MOST + 1)]
    assert rg.Clipped(clip).dim == 2 * clip + 1


def log_bucket(distance: int, exact: int, count: int, most: int) -> int:
    """exact + floor((count - exact) log(distance / exact) / log(most / exact)), by powers of fractions."""
    if distance < exact:
        return distance
    steps, base = Fraction(distance, exact) ** (count - exact), Fraction(most, exact)
    reached = 0
    while exact + reached < count - 1 and base ** (reached + 1) <= steps:
        reached += 1
    return exact + reached


@pytest.mark.parametrize("count, most", [(32, 128), (8, 6), (16, 20), (4, 2)])
@pytest.mark.parametrize("both", [True, False])
def test_t5_buckets(count, most, both):
    feature = rg.Buckets(count, most + (0 if both else count), bidirectional=both)
    per_side, limit = count // (2 if both else 1), most + (0 if both else count)
    expected = []
    for delta in range(-MOST, MOST + 1):
        if both:  # keys ahead of the query have the second half
            expected.append((per_side if delta < 0 else 0) + log_bucket(abs(delta), per_side // 2, per_side, limit))
        else:
            expected.append(log_bucket(max(delta, 0), per_side // 2, per_side, limit))
    assert bins(feature) == expected
    assert feature.dim == count


def test_t5_buckets_of_the_published_size():
    feature = rg.Buckets(32, 128)
    starts = [d for d in range(1, MOST) if feature.index(torch.tensor([d])) != feature.index(torch.tensor([d - 1]))]
    assert starts == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]  # 8 · 2^(n / 2), rounded up


@pytest.mark.parametrize("count, most", [(4, 8), (6, 117), (8, 16), (256, 512), (32, 500)])
def test_deberta_buckets(count, most):
    mid = count // 2

    def bucket(delta: int) -> int:
        if abs(delta) <= mid:
            return delta
        # the smallest n with (|δ| / mid)^(mid - 1) <= ((most - 1) / mid)^n
        target = (mid - 1) * math.log(abs(delta) / mid) / math.log((most - 1) / mid)
        near = round(target)
        exact = math.isclose(target, near) and Fraction(abs(delta), mid) ** (mid - 1) == Fraction(most - 1, mid) ** near
        return int(math.copysign(mid + (near if exact else math.ceil(target)), delta))

    expected = [min(max(bucket(d) + count, 0), 2 * count - 1) for d in range(-MOST, MOST + 1)]
    assert bins(rg.LogBuckets(count, most)) == expected
    assert rg.LogBuckets(count, most).dim == 2 * count


def test_deberta_buckets_without_a_largest_position():
    expected = [min(max(d + 16, 0), 31) for d in range(-MOST, MOST + 1)]
    assert bins(rg.LogBuckets(16, None)) == expected


@pytest.mark.parametrize("extents", [(4,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("unplaced", [False, True])
def test_cells_number_displacements_row_major(extents, unplaced):
    feature = rg.Cells(*extents, unplaced=unplaced)
    every = list(itertools.product(*(range(1 - n, n) for n in extents)))
    assert feature.dim == len(every) + 3 * unplaced and feature.axes == len(extents)
    assert bins(feature, torch.tensor(every)) == list(range(len(every)))
    n = len(every)
    assert feature.unplaced_index() == ((n, n + 1, n + 2) if unplaced else None)


@pytest.mark.parametrize("heads", [None, 3])
def test_a_table_gives_the_vector_of_the_bin(heads):
    lead = () if heads is None else (heads,)
    for options in ({"clip": 2}, {"cells": (MOST + 1,)}, {"index": rg.Buckets(8, 6)}):
        table = rg.Table(5, heads=heads, **options)
        assert table.values.shape == (*lead, table.bins.dim, 5)
        assert torch.equal(table(FAR), table.values[..., table.bins.index(FAR), :])
    values = torch.randn(5, 4)
    given = rg.Table(4, clip=2, values=values)
    assert torch.equal(given.values, values) and not list(given.parameters())  # given numbers stay as they are
    assert list(rg.Table(4, clip=2, values=torch.nn.Parameter(values)).parameters())


@pytest.mark.parametrize("order", ["cos_sin", "sin_cos", "sin|cos"])
@pytest.mark.parametrize("learn", [False, True])
def test_sinusoids(order, learn):
    omega = [1.0, 0.25, 0.03]
    feature = rg.Sinusoid(omega, order=order, learn=learn)
    columns = {
        "cos_sin": [(f, n) for n in range(3) for f in (torch.cos, torch.sin)],
        "sin_cos": [(f, n) for n in range(3) for f in (torch.sin, torch.cos)],
        "sin|cos": [(f, n) for f in (torch.sin, torch.cos) for n in range(3)],
    }[order]
    by_hand = lambda w: torch.stack([f(w[n] * FAR[:, 0]) for f, n in columns], dim=-1)  # noqa: E731
    judge(feature(FAR), by_hand, feature.frequencies)
    assert [p.shape for p in feature.parameters()] == ([(3,)] if learn else [])
    cos, sin = feature.split(feature(FAR))
    assert torch.equal(feature.combine(cos, sin), feature(FAR)) and torch.equal(cos, feature.parts(FAR)[0])


def test_the_transformers_frequencies():
    expected = [10000 ** (-2 * i / 8) for i in range(4)]
    assert rg.Sinusoid.geometric(8).tolist() == pytest.approx(expected, rel=1e-15)


def test_slopes():
    assert rg.Slope()(FAR).flatten().tolist() == [-abs(d) for d in range(-MOST, MOST + 1)]
    places = torch.tensor([[3, 4], [0, 0], [-5, 12]])
    assert rg.Slope(2)(places).flatten().tolist() == [-5, 0, -13]


@pytest.mark.parametrize("bound", [None, 16.0])
@pytest.mark.parametrize("axes, extent", [(1, 4.0), (2, (3.0, 7.0))])
def test_a_network_of_the_displacement(bound, axes, extent):
    network = rg.Network(3, axes=axes, hidden=5, extent=extent, bound=bound)
    torch.nn.init.normal_(network.bias1)
    delta = torch.tensor(list(itertools.product(range(-3, 4), repeat=axes)))

    def by_hand(W1, b1, W2):
        spread = torch.tensor([extent] * axes if isinstance(extent, float) else extent, dtype=W1.dtype)
        x = torch.sign(delta) * torch.log2(1 + 8 * delta.abs() / spread) / 3
        raw = torch.relu(x.to(W1.dtype) @ W1.T + b1) @ W2.T
        raw = raw if bound is None else bound / (1 + torch.exp(-raw))
        return raw.T.unsqueeze(-1)

    assert network(delta).shape == (3, len(delta), 1)
    judge(network(delta), by_hand, network.weight1, network.bias1, network.weight2)


def test_a_constant():
    feature = rg.Constant()
    assert torch.equal(feature(FAR), torch.ones(len(FAR), 1)) and torch.equal(feature.unplaced(), torch.ones(3, 1))


def test_one_axis_and_a_sum_over_axes():
    row, column = rg.Table(4, cells=(3,)), rg.Table(4, clip=1)
    delta = torch.tensor(list(itertools.product(range(-2, 3), repeat=2)))
    on_row, on_column = row(delta[:, :1]), column(delta[:, 1:])
    assert torch.equal(rg.OnAxis(0, row)(delta), on_row) and torch.equal(rg.OnAxis(1, column)(delta), on_column)
    assert torch.equal(rg.PerAxis(row, column)(delta), on_row + on_column)
    assert rg.PerAxis(row, column).axes == 2 and rg.OnAxis(1, column).axes == 2


@pytest.mark.parametrize(
    "feature",
    [rg.Clipped(5), rg.Buckets(32, 128), rg.Buckets(8, 6, False), rg.LogBuckets(8, 16), rg.LogBuckets(8, None),
     rg.Table(3, clip=4), rg.Constant()],
    ids=lambda f: f.describe(),
)  # fmt: skip
def test_beyond_its_reach_a_feature_is_constant(feature):
    """The plan leaves out work where a table is constant, so a reach must never be too short."""
    reach = feature.reach
    beyond, ahead = torch.arange(reach, reach + 500)[:, None], -torch.arange(reach, reach + 500)[:, None]
    for side in (beyond, ahead):
        assert len(feature(side).unique(dim=0)) == 1


def test_a_feature_of_ones_own_needs_only_a_forward():
    class Parity(rg.Feature):
        dim = 1

        def forward(self, delta):
            return (delta % 2).float()

    x = torch.zeros(1, 1, 4, 1)
    for engine in (None, "reference"):
        logits = rg.attention(
            x, x, position=rg.Static(Parity(), readout=torch.ones(1, 1)), engine=engine
        ).logits.dense()
        assert logits[0, 0].tolist() == [[float((i - j) % 2) for j in range(4)] for i in range(4)]


BAD = {
    "clip": (lambda: rg.Clipped(-1), "clip: expected .* >= 0, found -1"),
    "clip 2": (lambda: rg.Clipped(1.5), "clip: expected .* >= 0, found 1.5"),
    "buckets": (lambda: rg.Buckets(2), "count, max_distance: expected count >= 4 .* found 2 and 128"),
    "distance": (lambda: rg.Buckets(32, 8), "count, max_distance: .* max_distance > 8 .* found 32 and 8"),
    "log buckets": (lambda: rg.LogBuckets(5), "count, max_position: expected an even count >= 4 .* found 5 and 512"),
    "cells": (lambda: rg.Cells(2, 0), r"extents: expected positive integers, one an axis, found \(2, 0\)"),
    "no cells": (lambda: rg.Cells(), r"extents: expected positive integers, one an axis, found \(\)"),
    "no table": (lambda: rg.Table(3), "Table: give exactly one of clip, cells and index"),
    "two tables": (lambda: rg.Table(3, clip=1, cells=(2,)), "Table: give exactly one of clip, cells and index"),
    "values": (lambda: rg.Table(3, clip=1, values=torch.zeros(2, 3)), r"values: expected shape .3, 3., found .2, 3."),
    "NaN": (lambda: rg.Table(2, clip=0, values=torch.tensor([[1.0, math.nan]])), "values: .* found 1 .* NaN .* of 2"),
    "order": (lambda: rg.Sinusoid([1.0], order="cos"), r"order: expected 'cos_sin', .* 'sin\|cos', found 'cos'"),
    "frequencies": (lambda: rg.Sinusoid([]), r"frequencies: expected a row of numbers, found shape \(0,\)"),
    "frequency": (lambda: rg.Sinusoid([math.inf]), "frequencies: expected finite numbers, found 1 .* of 1"),
    "extent": (lambda: rg.Network(2, axes=2, extent=(1, 0)), "extent: expected 2 positive numbers, found .1, 0."),
    "axis": (lambda: rg.OnAxis(0, rg.Cells(2, 2)), r"feature: expected a feature of one axis, found Cells\(2, 2\)"),
    "axis number": (lambda: rg.OnAxis(-1, rg.Clipped(2)), "axis: expected an axis from 0 on, found -1"),
    "dims": (lambda: rg.PerAxis(rg.Clipped(1), rg.Clipped(2)), "features: expected one an axis, all of one dim, found"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_features_are_refused_when_made(kind):
    make, message = BAD[kind]
    with pytest.raises(ValueError, match=message):
        make()
