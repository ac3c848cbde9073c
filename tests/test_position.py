"""Position terms: each equation written out pair by pair, heads shared or not, terms bound to a call, rotations."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from by_hand import judge, scaled_dot

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, DIM, START = 2, 4, 2, 4, 6, 6, 1


def content() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, HEADS, Q_LEN, DIM), torch.randn(BATCH, KV_HEADS, K_LEN, DIM)


def by_pairs(one, dtype) -> torch.Tensor:
    """A matrix from one(batch row, head, i, j, displacement), pair by pair."""
    total = torch.empty(BATCH, HEADS, Q_LEN, K_LEN, dtype=dtype)
    for b, h, i, j in itertools.product(*map(range, total.shape)):
        total[b, h, i, j] = one(b, h, i, j, i + START - j)
    return total


def of_head(x: torch.Tensor, h: int) -> torch.Tensor:
    """A parameter of one head, when there is one for each, or the one for all."""
    return x[h] if x.shape[0] == HEADS else x[0]


@pytest.mark.parametrize("own", [1, HEADS], ids=["shared", "a head each"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_static(attention, own, scale):
    q, k = content()
    term = rg.Static(rg.Table(3, clip=2), readout=torch.nn.Parameter(torch.randn(own, 3)), scale=scale)
    torch.nn.init.normal_(term.features.values)

    def formula(q, k, v, R):
        bias = lambda b, h, i, j, d: of_head(v, h) @ R[max(-2, min(2, d)) + 2] * scale  # noqa: E731
        return scaled_dot(q, k) + by_pairs(bias, q.dtype)

    found = attention(q, k, position=term, q_start=START).logits.dense()
    judge(found, formula, q, k, term.readout, term.features.values)


def test_static_with_features_of_each_head(attention):
    q, k = content()
    term = rg.Static(rg.Table(3, clip=2, heads=HEADS))
    assert term.readout.shape == (HEADS, 3)
    torch.nn.init.normal_(term.features.values)

    def formula(q, k, v, R):
        bias = lambda b, h, i, j, d: v[h] @ R[h, max(-2, min(2, d)) + 2]  # noqa: E731
        return scaled_dot(q, k) + by_pairs(bias, q.dtype)

    found = attention(q, k, position=term, q_start=START).logits.dense()
    judge(found, formula, q, k, term.readout, term.features.values)
    alone = rg.Static(rg.Network(HEADS))  # one number a head: it is the bias itself
    assert alone.readout.tolist() == [[1.0]] and "readout" not in dict(alone.named_parameters())


@pytest.mark.parametrize("kind", [rg.FromQuery, rg.FromKey])
@pytest.mark.parametrize("own", [1, HEADS], ids=["shared", "a head each"])
@pytest.mark.parametrize("weighted", [True, False], ids=["W", "no W"])
@pytest.mark.parametrize("offset", [True, False], ids=["c", "no c"])
def test_from_query_and_from_key(attention, kind, own, weighted, offset):
    q, k = content()
    width = 3 if weighted else DIM
    term = kind.learn(rg.Table(width, clip=2), DIM, own, weight=weighted, offset=offset, scale=0.5)
    for parameter in term.parameters():
        torch.nn.init.normal_(parameter)

    def formula(q, k, R, W, c):
        def bias(b, h, i, j, d):
            x = q[b, h, i] if kind is rg.FromQuery else k[b, h // (HEADS // KV_HEADS), j]  # the shared key
            x = x if c is None else x + of_head(c, h)
            x = x if W is None else x @ of_head(W, h)
            return x @ R[max(-2, min(2, d)) + 2] * 0.5

        return scaled_dot(q, k) + by_pairs(bias, q.dtype)

    found = attention(q, k, position=term, q_start=START).logits.dense()
    judge(found, formula, q, k, term.features.values, term.weight, term.offset)


def test_terms_see_q_and_k_as_given(attention):
    """Before rotation and normalisation, and whatever multiplies the score."""
    q, k = content()
    term = rg.recipes.shaw(DIM, 2)
    torch.nn.init.normal_(term.features.values)
    alone = lambda q, k, term, **more: rg.attention(q, k, q_start=START, **more, position=term).steps()  # noqa: E731
    for more in ({"score": rg.Cosine()}, {"score": rg.Euclidean()}, {"scale": 7.0}):
        A = attention(q, k, position=term, q_start=START, **more)
        formula = lambda q, k, term: alone(q, k, None, **more).logits + sum(alone(q, k, term).terms.values())  # noqa: B023, E731
        judge(A.logits.dense(), formula, q, k, term, what=str(more))
    A = attention(q, k, position=rg.Rotary() + term, q_start=START)
    formula = lambda q, k, term: alone(q, k, rg.Rotary()).logits + sum(alone(q, k, term).terms.values())  # noqa: E731
    judge(A.logits.dense(), formula, q, k, term, what="rotary")


def test_a_constant_is_a_bias_per_query_or_per_key(attention):
    q, k = content()
    for kind in (rg.FromQuery, rg.FromKey):
        term = kind.learn(rg.Constant(), DIM, HEADS)

        def formula(q, k, u, kind=kind):
            one = lambda b, h, i, j, d: (q[b, h, i] if kind is rg.FromQuery else k[b, h // 2, j]) @ u[h, :, 0]  # noqa: E731
            return scaled_dot(q, k) + by_pairs(one, q.dtype)

        judge(attention(q, k, position=term).logits.dense(), formula, q, k, term.weight, what=kind.__name__)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_terms_add(attention, order):
    q, k = content()
    terms = [rg.recipes.t5(HEADS), rg.recipes.shaw(DIM, 2), rg.Static(rg.Constant(), HEADS)]
    chosen = [terms[n] for n in order]
    sums = chosen[0] + chosen[1] + chosen[2], rg.Terms(chosen), chosen, (chosen[0] + chosen[1], [chosen[2]])
    logits = [attention(q, k, position=s, q_start=START).logits.dense() for s in sums]
    assert all(torch.equal(x, logits[0]) for x in logits)
    assert len(sums[0]) == 3 and sums[0][1] is chosen[1]
    names = {name for name, _ in sums[0].named_parameters()}
    assert names == {f"parts.{n}.{name}" for n, t in enumerate(chosen) for name, _ in t.named_parameters()}


@pytest.mark.parametrize("shape", [(BATCH, HEADS, Q_LEN, 1), (1, HEADS, 1, 1), (BATCH, 1, Q_LEN, 1)])
def test_a_gate_multiplies_a_term_for_one_call(attention, shape):
    q, k = content()
    gate = torch.randn(shape)
    for term in (rg.recipes.t5(HEADS), rg.recipes.shaw(DIM, 2), rg.FromKey.learn(rg.Constant(), DIM, HEADS)):

        def formula(q, k, term, gate):
            steps = rg.attention(q, k, position=term, q_start=START).steps()
            return steps.scaled + gate * sum(steps.terms.values())

        A = attention(q, k, position=term.bind(gate=gate), q_start=START)
        judge(A.logits.dense(), formula, q, k, term, gate, what=term.describe())
        assert "gate" in term.bind(gate=gate).describe()


def test_a_term_may_read_another_query_or_key(attention):
    q, k = content()
    other = torch.randn(BATCH, HEADS, Q_LEN, 3), torch.randn(BATCH, KV_HEADS, K_LEN, 3)
    table = rg.Table(3, clip=2)
    torch.nn.init.normal_(table.values)
    bound = rg.FromQuery(table).bind(query=other[0]), rg.FromKey(table).bind(key=other[1])
    for side, term in enumerate(bound):

        def formula(q, k, R, x, side=side):
            def bias(b, h, i, j, d):
                return (x[b, h // (HEADS // KV_HEADS), j] if side else x[b, h, i]) @ R[max(-2, min(2, d)) + 2]

            return scaled_dot(q, k) + by_pairs(bias, q.dtype)

        found = attention(q, k, position=term, q_start=START).logits.dense()
        judge(found, formula, q, k, table.values, other[side], what=term.describe())


def turn(x: torch.Tensor, place: float, pairs: list[tuple[int, int]], omega) -> torch.Tensor:
    """Each pair of dimensions turned by place times its frequency, one pair at a time."""
    y = x.clone()
    for (a, b), w in zip(pairs, omega, strict=True):
        cos, sin = math.cos(place * w), math.sin(place * w)
        y[a], y[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return y


ROTATIONS = {
    "halves": (rg.Rotary(), [(0, 3), (1, 4), (2, 5)], [10000 ** (-n / 3) for n in range(3)]),
    "neighbours": (rg.Rotary(interleaved=True), [(0, 1), (2, 3), (4, 5)], [10000 ** (-n / 3) for n in range(3)]),
    "first four": (rg.Rotary(4), [(0, 2), (1, 3)], [1.0, 0.01]),
    "base": (rg.Rotary(4, base=100.0), [(0, 2), (1, 3)], [1.0, 0.1]),
    "frequencies": (rg.Rotary(frequencies=torch.tensor([2.0, 1.0, 0.5])), [(0, 3), (1, 4), (2, 5)], [2.0, 1.0, 0.5]),
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations(attention, kind):
    q, k = content()
    term, pairs, omega = ROTATIONS[kind]

    def formula(q, k):
        def dot(b, h, i, j, d):
            turned = turn(k[b, h // (HEADS // KV_HEADS), j], j, pairs, omega)
            return turn(q[b, h, i], i + START, pairs, omega) @ turned / math.sqrt(DIM)

        return by_pairs(dot, q.dtype)

    A = attention(q, k, position=term, q_start=START)
    judge(A.logits.dense(), formula, q, k, what="logits")
    steps = A.steps()
    judge(steps.terms[term.describe()], lambda q, k: formula(q, k) - scaled_dot(q, k), q, k, what="rotated - plain")


def test_a_rotated_dot_product_sees_only_the_displacement(attention):
    q, k = (torch.randn(1, 1, 1, DIM, dtype=torch.float64) for _ in range(2))
    seen = [attention(q, k, position=rg.Rotary(), q_start=s + 3, k_start=s).logits.dense() for s in (0, 5, 1000)]
    assert max(abs(float(x - seen[0])) for x in seen) < 1e-12


@pytest.mark.parametrize("points", [False, True], ids=["grid", "points"])
def test_on_a_grid_the_axes_share_the_dimensions(attention, points):
    x = torch.randn(1, 1, 7, 8)
    places = [(0, 0), *itertools.product(range(2), range(3))]  # the first token has no place, and is not turned
    geometry = rg.Grid(2, 3, unplaced=1)
    if points:  # whatever stands where its place would be
        geometry = rg.Points(torch.tensor([(5, 7), *places[1:]]), torch.tensor([False] + [True] * 6))

    def formula(x):
        rows = []
        for token, (row, column) in zip(x[0, 0], places, strict=True):
            y = turn(token, row, [(0, 2), (1, 3)], [1.0, 0.01])
            rows.append(turn(y, column, [(4, 6), (5, 7)], [1.0, 0.01]))
        y = torch.stack(rows)
        return (y @ y.T / math.sqrt(8))[None, None]

    judge(attention(x, x, geometry=geometry, position=rg.Rotary()).logits.dense(), formula, x)


def test_terms_train_move_and_save():
    make = lambda: rg.recipes.transformer_xl(2, 4) + rg.recipes.t5(2) + rg.Rotary()  # noqa: E731
    term, fresh = make(), make()
    fresh.load_state_dict(term.state_dict())
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    assert torch.equal(*(rg.attention(q, k, position=t).logits.dense() for t in (term, fresh)))
    assert all(p.dtype == torch.float64 for p in term.double().parameters())


def test_a_given_readout_keeps_its_graph():
    """Numbers that come from elsewhere (a hypernetwork, say) are used as they are, and pass their gradient on."""
    source = torch.randn(2, 5, requires_grad=True)
    term = rg.Static(rg.Clipped(2), readout=2 * source)
    q, k, v = (torch.randn(1, 2, 6, 3) for _ in range(3))
    (rg.attention(q, k, position=term) @ v).sum().backward()
    assert not list(term.parameters()) and source.grad.abs().sum() > 0
