"""The mission's numbers, M3 and M4: relative position on a line and on grids, by the plan's engine and the definition.

Pairs are written as the mission writes them, (query, key) counted from 1; displacements are query minus key.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from by_hand import judge, printed, scaled_dot

import regard as rg

OMEGA = (math.pi / 2, math.pi / 3)
READOUT = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
F = [[2, 0.5, -1.5, -1], [0.5, 2, 0.5, -1.5], [-1.5, 0.5, 2, 0.5], [-1, -1.5, 0.5, 2]]


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


def nothing(length: int) -> torch.Tensor:
    """Tokens without content, so that only positions speak."""
    return torch.zeros(1, 1, length, 1, dtype=torch.float64)


def one_at(cells: rg.Cells, *delta: int) -> rg.Static:
    """The rule over displacements that scores 1 at one of them and 0 elsewhere."""
    readout = torch.zeros(1, cells.dim, dtype=torch.float64)
    readout[0, cells.index(torch.tensor(delta))] = 1.0
    return rg.Static(cells, readout=readout)


def lit(matrix: torch.Tensor) -> set[tuple[int, int]]:
    """Where a matrix [1, 1, q_len, k_len] is 1; elsewhere it must be 0."""
    assert set(matrix.unique().tolist()) <= {0.0, 1.0}
    return {(int(i) + 1, int(j) + 1) for i, j in matrix[0, 0].nonzero()}


# M3: one axis

RIGHT = {(1, 3), (2, 4), (3, 5), (4, 6)}


def test_look_two_to_the_right_as_a_score(attention):
    A = attention(nothing(6), nothing(6), position=one_at(rg.Cells(6), -2))
    assert lit(A.logits.dense()) == RIGHT
    weights = A.dense()[0, 0]
    for row in range(6):
        if row < 4:
            assert printed(weights[row], 4) == [0.3522 if key == row + 2 else 0.1296 for key in range(6)]
        else:
            assert weights[row].tolist() == pytest.approx([1 / 6] * 6, abs=1e-12)


def test_look_two_to_the_right_as_a_mask(attention):
    A = attention(nothing(6), nothing(6), mask=rg.offset(-2))
    assert lit(A.dense()) == RIGHT
    assert A.logits[0, 0, 0].isfinite().tolist() == [False, False, True, False, False, False]
    assert (A.dense()[0, 0, 4:] == 0).all() and (A.lse[0, 0, 4:] == -torch.inf).all()
    v = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(1, 1, 6, 1)
    assert (A @ v).flatten().tolist() == [3, 4, 5, 6, 0, 0]


def test_the_same_displacement_is_the_same_diagonal(attention):
    term = rg.Static(rg.Table(3, clip=4), readout=torch.randn(1, 3))
    logits = attention(nothing(6), nothing(6), position=term.double()).logits.dense()[0, 0]
    for delta in range(-5, 6):
        assert len(logits.diagonal(-delta).unique()) == 1


def test_the_features_are_a_table_from_displacement_to_vector():
    R = rg.Sinusoid(OMEGA)(torch.arange(-3, 4)[:, None])
    assert R.shape == (7, 4)
    for row, delta in zip(R, range(-3, 4), strict=True):
        by_hand = [f(omega * delta) for omega in OMEGA for f in (math.cos, math.sin)]
        assert row.tolist() == pytest.approx(by_hand, abs=1e-12)
    assert printed(R @ READOUT, 12) == [-1, -1.5, 0.5, 2, 0.5, -1.5, -1]


def test_the_matrix_f_is_the_table_read_out(attention):
    term = rg.Static(rg.Sinusoid(OMEGA), readout=READOUT[None])
    assert printed(attention(nothing(4), nothing(4), position=term).logits.dense()[0, 0], 12) == F


def test_adding_position_to_content_has_four_parts(attention):
    p = rg.Sinusoid(OMEGA)(torch.arange(4)[:, None])[None, None]
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    parts = [attention(a, b, scale=1.0).logits.dense() for a in (x, p) for b in (x, p)]
    whole = attention(x + p, x + p, scale=1.0).logits.dense()
    assert (whole - sum(parts)).abs().max() <= 1e-12
    assert printed(parts[3][0, 0], 12) == F  # P Pᵀ depends on q - k alone
    for mixed in parts[:3]:
        assert len(mixed[0, 0].diagonal().unique()) > 1  # the other three do not


@pytest.mark.parametrize("weight", [None, torch.eye(4, dtype=torch.float64)[None]], ids=["no W", "W = I"])
@pytest.mark.parametrize("kind", [rg.FromQuery, rg.FromKey])
def test_a_query_or_a_key_that_equals_v_gives_f_again(attention, kind, weight):
    reader, other = READOUT.expand(1, 1, 4, 4), torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    q, k = (reader, other) if kind is rg.FromQuery else (other, reader)
    term = kind(rg.Sinusoid(OMEGA), weight=weight)
    assert printed(attention(q, k, position=term).logits.dense()[0, 0], 12) == F


@pytest.mark.parametrize("kind", [rg.FromQuery, rg.FromKey])
def test_the_content_decides_which_distances_matter(attention, kind):
    length, heads, dim = 5, 2, 3
    q, k = torch.randn(1, heads, length, dim), torch.randn(1, heads, length, dim)
    term = kind(rg.Sinusoid(OMEGA), weight=torch.randn(heads, dim, 4), offset=torch.randn(heads, dim), scale=0.7)

    def by_hand(q, k, W, c, omega):
        total = torch.empty(1, heads, length, length, dtype=q.dtype)
        for h, i, j in itertools.product(range(heads), range(length), range(length)):
            reader = (q[0, h, i] if kind is rg.FromQuery else k[0, h, j]) + c[h]
            R = torch.stack([f(w * (i - j)) for w in omega for f in (torch.cos, torch.sin)]).to(q.dtype)
            total[0, h, i, j] = reader @ W[h] @ R * 0.7
        return scaled_dot(q, k) + total

    A = attention(q, k, position=term)
    judge(A.logits.dense(), by_hand, q, k, term.weight, term.offset, torch.tensor(OMEGA))


def test_v_is_learned_from_data(attention):
    """What the true readout makes of the values is enough to find the readout: the loss falls, and f comes out."""
    true = rg.Static(rg.Sinusoid(OMEGA), readout=READOUT[None])
    values = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    target = attention(nothing(12), nothing(12), position=true) @ values
    found = rg.Static(rg.Sinusoid(OMEGA), 1).double()
    optimiser = torch.optim.Adam(found.parameters(), lr=0.05)
    losses = []
    for _ in range(250):
        loss = (attention(nothing(12), nothing(12), position=found) @ values - target).square().mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0] / 1000
    assert (found.readout - READOUT).abs().max() < 0.1


def test_v_w_and_r_all_learn(attention):
    q, k, v = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    terms = [
        rg.Static(rg.Sinusoid(OMEGA, learn=True), 2),
        rg.Static(rg.Table(3, clip=2), 2),
        rg.Static(rg.Network(2, hidden=4)),
        rg.recipes.t5(2),
        rg.Static(rg.Slope(), 2),
        rg.FromQuery.learn(rg.Sinusoid(OMEGA, learn=True), 4, 2, offset=True),
        rg.FromKey.learn(rg.Table(3, clip=2), 4, 2, offset=True),
    ]
    (attention(q, k, position=terms) @ v).square().sum().backward()
    for term in terms:
        for name, parameter in term.named_parameters():
            if not (isinstance(term, rg.Static) and isinstance(term.features, rg.Network) and name == "readout"):
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} of {term.describe()}"


# M4: grids


def test_a_matrix_of_six_tokens_and_a_grid_of_six_by_six(attention):
    assert attention(nothing(6), nothing(6)).shape.numel() == 36
    A = attention(nothing(36), nothing(36), geometry=rg.Grid(6, 6))
    assert A.shape == (1, 1, 36, 36) and A.shape.numel() == 1296


NEIGHBOURS = {(1, 2), (2, 3), (4, 5), (5, 6)}


def test_positions_of_a_2_x_3_grid():
    places = rg.Grid(2, 3).coordinates(torch.arange(6)).tolist()
    assert places == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_look_one_cell_to_the_right(attention):
    grid = rg.Grid(2, 3)
    score = attention(nothing(6), nothing(6), geometry=grid, position=one_at(rg.Cells(2, 3), 0, -1))
    assert lit(score.logits.dense()) == NEIGHBOURS
    A = attention(nothing(6), nothing(6), geometry=grid, mask=rg.offset(0, -1))
    assert lit(A.dense()) == NEIGHBOURS
    for cell in (3, 6):  # no right neighbour
        assert (A.dense()[0, 0, cell - 1] == 0).all() and A.lse[0, 0, cell - 1] == -torch.inf


def test_the_flat_rule_also_lights_3_4(attention):
    for description in ({"mask": rg.offset(-1)}, {"mask": rg.offset(-1), "geometry": rg.Grid(2, 3)}):
        A = attention(nothing(6), nothing(6), **description)  # one number is a displacement in the sequence
        assert lit(A.dense()) == NEIGHBOURS | {(3, 4)}


def cells_of(*shape: int) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def displacements(*shape: int) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(1 - n, n) for n in shape)))


@pytest.mark.parametrize("shape", [(2, 3), (3, 1), (2, 2, 3)])
def test_a_static_table_over_displacements(attention, shape):
    count, heads = math.prod(shape), 2
    term = rg.Static(rg.Cells(*shape), readout=torch.randn(heads, len(displacements(*shape)), dtype=torch.float64))
    A = attention(nothing(count).expand(-1, heads, -1, -1), nothing(count), geometry=rg.Grid(*shape), position=term)
    logits, seen = A.logits.dense(), {}
    for (i, p), (j, o) in itertools.product(enumerate(cells_of(*shape)), repeat=2):
        delta = tuple(a - b for a, b in zip(p, o, strict=True))
        entry = displacements(*shape).index(delta)
        assert torch.equal(logits[0, :, i, j], term.readout[:, entry])
        assert seen.setdefault(delta, logits[0, 0, i, j]) == logits[0, 0, i, j]  # block-Toeplitz
    assert len(seen) == len(displacements(*shape))


def test_rows_and_columns_met_by_the_query(attention):
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    term = rg.recipes.sam(4, (2, 3))
    row, column = (part.feature.values for part in term.features.parts)
    for values in (row, column):
        torch.nn.init.normal_(values)

    def by_hand(q, k, row, column):
        total = torch.empty(1, 2, 6, 6, dtype=q.dtype)
        for (i, p), (j, o) in itertools.product(enumerate(cells_of(2, 3)), repeat=2):
            vector = row[p[0] - o[0] + 1] + column[p[1] - o[1] + 2]
            total[..., i, j] = q[:, :, i] @ vector
        return scaled_dot(q, k) + total

    judge(attention(q, k, geometry=rg.Grid(2, 3), position=term).logits.dense(), by_hand, q, k, row, column)


def test_a_class_token_has_no_place(attention):
    """BEiT's three entries: a query without a place, a key without one, both."""
    term = rg.recipes.beit(1, (2, 2)).double()
    with torch.no_grad():
        term.readout.copy_(torch.arange(12.0))
    grid = rg.Grid(2, 2, unplaced=1)
    A = attention(nothing(5), nothing(5), geometry=grid, position=term)
    logits = A.logits.dense()[0, 0]
    assert torch.equal(A.reversed().logits.dense()[0, 0], logits.mT)
    assert logits[0].tolist() == [11, 9, 9, 9, 9] and logits[1:, 0].tolist() == [10, 10, 10, 10]
    patches = attention(nothing(4), nothing(4), geometry=rg.Grid(2, 2), position=term).logits.dense()[0, 0]
    assert torch.equal(logits[1:, 1:], patches)
    swin = rg.Static(rg.Cells(2, 2), readout=torch.ones(1, 9, dtype=torch.float64))
    bare = attention(nothing(5), nothing(5), geometry=grid, position=swin).logits.dense()[0, 0]
    assert bare.tolist() == [[0.0] * 5] + [[0.0] + [1.0] * 4] * 4  # without entries of its own it adds nothing
    near = attention(nothing(5), nothing(5), geometry=grid, mask=rg.window((0, 1), (0, 1))).dense()[0, 0]
    assert (near[0] == 0).all() and (near[:, 0] == 0).all()  # a displacement it has not is never near


@pytest.mark.parametrize("whole", [True, False], ids=["integers", "reals"])
def test_points_that_list_a_grid_are_that_grid(attention, whole):
    q, k = torch.randn(2, 2, 6, 4), torch.randn(2, 1, 6, 4)
    coords = torch.tensor(cells_of(2, 3))
    terms = [rg.Static(rg.Slope(2), 2), rg.Static(rg.Network(2, axes=2, hidden=4)), rg.Rotary()]
    per_axis = rg.PerAxis(rg.Sinusoid(OMEGA), rg.Sinusoid([0.1, 2.0]))
    terms += [rg.FromQuery.learn(per_axis, 4, 2), rg.FromKey.learn(per_axis, 4, 2)]
    if whole:  # bins need whole coordinates
        terms += [rg.Static(rg.Cells(2, 3), 2), rg.recipes.sam(4, (2, 3))]
    mask = rg.window((0, 2), (1, 2))
    points = rg.Points(coords if whole else coords.float())
    for term in terms:
        A = attention(q, k, geometry=points, position=term, mask=mask)
        on_grid = lambda q, k, term: rg.attention(q, k, geometry=rg.Grid(2, 3), position=term, mask=mask).steps()  # noqa: E731
        judge(A.logits.dense(), lambda *all: on_grid(*all).masked, q, k, term, what=term.describe())  # noqa: B023


def test_each_row_of_a_batch_may_have_its_own_layout(attention):
    coords = torch.randint(0, 4, (2, 5, 2))
    term = rg.Static(rg.Cells(4, 4), readout=torch.randn(1, 49, dtype=torch.float64))
    x = nothing(5).expand(2, -1, -1, -1)
    logits = attention(x, x, geometry=rg.Points(coords), position=term).logits.dense()
    for b, i, j in itertools.product(range(2), range(5), range(5)):
        delta = tuple((coords[b, i] - coords[b, j]).tolist())
        assert logits[b, 0, i, j] == term.readout[0, displacements(4, 4).index(delta)]
