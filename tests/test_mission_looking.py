"""The mission, M5: what one sees in A. Every summary against the dense matrix it is of, every explanation added up.

Summaries are computed from a pass that never stores A; here A is small enough to store, so each is also done by hand.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from by_hand import judge, softmax

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


def term() -> rg.Terms:
    made = rg.recipes.t5(2, buckets=8, max_distance=6) + rg.recipes.shaw(4, 2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.requires_grad_(False)


def looking(attention, q, k, position, sink):
    """Nine queries at positions 2 to 10 look at twelve keys, three keys ahead at most; a sink takes a share."""
    mask = rg.window(None, 3) & ~rg.keys(4)
    return attention(q, k, position=position, mask=mask, q_start=2, sink=sink)


INPUTS = ((2, 2, 9, 4), (2, 1, 12, 4))


def inputs() -> list:
    return [*(torch.randn(shape) for shape in INPUTS), term(), torch.randn(2)]


def judge_summary(attention, summary, formula, make=looking, given=None, what="summary"):
    """A summary of A against a formula of A's dense steps."""
    given = inputs() if given is None else given
    judge(summary(make(attention, *given)), lambda *all: formula(make(rg.attention, *all).steps()), *given, what=what)


def line_displacements(A: torch.Tensor, q_start: int) -> torch.Tensor:
    q_len, k_len = A.shape[-2:]
    return q_start + torch.arange(q_len)[:, None] - torch.arange(k_len)


# Summaries


def test_mass_per_displacement(attention):
    def formula(steps):
        delta = line_displacements(steps.weights, 2)
        each = range(2 - 11, 2 + 9)  # the smallest first
        return torch.stack([(steps.weights * (delta == d)).sum((-2, -1)) for d in each], dim=-1)

    judge_summary(attention, lambda A: A.profile(), formula)


@pytest.mark.parametrize("unplaced", [0, 1])
def test_mass_per_displacement_on_a_grid(attention, unplaced):
    grid = rg.Grid(2, 3, unplaced=unplaced)
    places = list(itertools.product(range(2), range(3)))

    def formula(steps):
        A, total = steps.weights, steps.weights.new_zeros(2, 2, 3, 5)
        for (i, p), (j, o) in itertools.product(enumerate(places), repeat=2):
            total[:, :, p[0] - o[0] + 1, p[1] - o[1] + 2] += A[:, :, i + unplaced, j + unplaced]
        return total

    make = lambda attention, q, k: attention(q, k, geometry=grid)  # noqa: E731
    given = [torch.randn(2, 2, 6 + unplaced, 4) for _ in range(2)]
    judge_summary(attention, lambda A: A.profile(), formula, make, given)


def test_entropy_of_each_query(attention):
    def formula(steps):
        logs = torch.where(steps.visible, steps.masked - steps.lse.unsqueeze(-1), 0.0)
        return -(steps.weights * logs).sum(-1)

    judge_summary(attention, lambda A: A.entropy(), formula)
    same = torch.zeros(1, 1, 8, 2)
    assert attention(same, same).entropy().flatten().tolist() == pytest.approx([math.log(8)] * 8)


def test_mass_each_key_receives(attention):
    judge_summary(attention, lambda A: A.received(), lambda steps: steps.weights.sum(-2))


def share(steps, pairs):
    """Mass on the pairs, averaged over the queries that see one of them."""
    sees = (steps.visible & pairs).any(-1)
    return ((steps.weights * pairs).sum(-1) * sees).sum(-1) / sees.sum(-1).clamp(min=1)


def test_self_previous_and_first_key_shares(attention):
    delta = lambda steps: line_displacements(steps.weights, 2)  # noqa: E731
    first = lambda steps: torch.arange(12).expand(9, 12) == 0  # noqa: E731
    judge_summary(attention, lambda A: A.self_share(), lambda s: share(s, delta(s) == 0), what="self")
    judge_summary(attention, lambda A: A.previous_share(), lambda s: share(s, delta(s) == 1), what="previous")
    judge_summary(attention, lambda A: A.first_key_share(), lambda s: share(s, first(s)), what="first key")
    judge_summary(attention, lambda A: A.share(rg.keys(2, 5)), lambda s: share(s, (delta(s) > -99) & _keys(2, 5)))
    judge_summary(attention, lambda A: A.mass(rg.keys(2, 5)), lambda s: (s.weights * _keys(2, 5)).sum(-1))


def _keys(first: int, last: int) -> torch.Tensor:
    return (torch.arange(12) >= first) & (torch.arange(12) <= last)


def test_the_sinks_share_is_what_the_keys_do_not_get(attention):
    given = inputs()
    judge_summary(attention, lambda A: A.sink_share(), lambda s: 1 - s.weights.sum(-1).mean(-1), given=given)
    judge_summary(attention, lambda A: A.lse, lambda s: s.lse, given=given, what="lse includes the sink")
    assert (attention(given[0], given[1]).sink_share() == 0).all()


def test_a_sink_is_a_key_without_a_value_whose_logit_is_known(attention):
    q, k, _, sink = inputs()

    def formula(q, k, sink):
        logits = rg.attention(q, k).steps().masked
        return softmax(torch.cat([logits, sink[:, None, None].expand(2, 2, 9, 1)], dim=-1))[..., :-1]

    judge(attention(q, k, sink=sink).dense(), formula, q, k, sink)


def test_induction_on_a_repeated_sequence(attention):
    tokens = torch.tensor([3, 1, 4, 2, 0, 3, 1, 4, 2, 0])
    x = torch.eye(5)[tokens]
    before = torch.cat([torch.zeros(1, 5), x[:-1]])  # each key says which token came before it
    A = attention(30 * x[None, None], before[None, None], mask=rg.causal, scale=1.0)
    assert A.topk(1).indices[0, 0, 5:, 0].tolist() == [1, 2, 3, 4, 5]  # the token after the earlier copy
    assert A.induction_share(tokens).item() == pytest.approx(1.0)
    pairs = torch.zeros(10, 10, dtype=torch.bool)
    for i, j in itertools.product(range(10), range(1, 10)):
        pairs[i, j] = j <= i and tokens[j - 1] == tokens[i]
    assert pairs.sum() == 5
    make = lambda attention, q, k: attention(q, k, mask=rg.causal)  # noqa: E731
    given = [torch.randn(2, 2, 10, 4) for _ in range(2)]
    judge_summary(attention, lambda A: A.induction_share(tokens), lambda s: share(s, pairs), make, given)


def toeplitz(steps, groups):
    """The share of the variance of the visible entries that their group explains, from its definition."""
    out = torch.empty(steps.weights.shape[:2], dtype=steps.weights.dtype)
    for b, h in itertools.product(*map(range, out.shape)):
        A, seen = steps.weights[b, h], steps.visible[b, h]
        mean = A[seen].mean()
        explained = sum(
            (seen & (groups == g)).sum() * (A[seen & (groups == g)].mean() - mean).square()
            for g in groups.unique()
            if (seen & (groups == g)).any()
        )
        out[b, h] = explained / (A[seen] - mean).square().sum()
    return out


def test_toeplitz_share(attention):
    judge_summary(attention, lambda A: A.toeplitz_share(), lambda s: toeplitz(s, line_displacements(s.weights, 2)))
    groups = torch.tensor([[5 * (a[0] - b[0]) + a[1] - b[1] for b in CELLS] for a in CELLS])
    make = lambda attention, q, k: attention(q, k, geometry=rg.Grid(2, 3))  # noqa: E731
    given = [2 * torch.randn(2, 2, 6, 4) for _ in range(2)]
    judge_summary(attention, lambda A: A.toeplitz_share(), lambda s: toeplitz(s, groups), make, given, what="grid")


CELLS = list(itertools.product(range(2), range(3)))


def test_the_toeplitz_share_of_a_purely_relative_matrix_is_one(attention):
    nothing = torch.zeros(1, 2, 20, 1)
    bias = rg.Static(rg.Clipped(3), readout=torch.randn(2, 7))
    # queries 5 to 14 all see seven keys, the same seven displacements: A depends on q - k alone
    A = attention(nothing[:, :, 5:15], nothing, position=bias, mask=rg.window(3, 3), q_start=5)
    assert A.toeplitz_share().flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    # at the edges of a whole sequence the rows see fewer keys, so softmax makes less of it relative
    assert (attention(nothing, nothing, position=bias, mask=rg.window(3, 3)).toeplitz_share() < 0.999).all()


def test_top_keys_rank_by_logit_with_the_lower_index_first(attention):
    given = inputs()
    A = looking(attention, *given)
    weights, indices = A.topk(4)
    logits = A.logits.dense()
    for b, h, i in itertools.product(range(2), range(2), range(9)):
        order = sorted(range(12), key=lambda j: (-logits[b, h, i, j].item(), j))[:4]
        order = [j if logits[b, h, i, j] > -torch.inf else -1 for j in order]
        assert indices[b, h, i].tolist() == order
    judge_summary(
        attention,
        lambda A: A.topk(4).weights,
        lambda s: torch.where(indices >= 0, s.weights.gather(-1, indices.clamp(min=0)), 0.0),
        given=given,
    )
    assert torch.equal(weights > 0, indices >= 0)


def test_top_keys_on_ties_and_when_there_are_too_few(attention):
    k = torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0]).reshape(1, 1, 5, 1)
    A = attention(torch.ones(1, 1, 5, 1), k, mask=rg.causal)
    weights, indices = A.topk(4)
    assert indices[0, 0].tolist() == [[0, -1, -1, -1], [1, 0, -1, -1], [1, 0, 2, -1], [1, 3, 0, 2], [1, 3, 4, 0]]
    assert (weights[indices < 0] == 0).all() and (weights[indices >= 0] > 0).all()
    everything = A.topk(7)  # more than there are keys
    assert everything.indices.shape == (1, 1, 5, 7) and everything.indices[0, 0, 4].tolist() == [1, 3, 4, 0, 2, -1, -1]
    tiny = attention(torch.ones(1, 1, 1, 1), 1e3 * k, scale=1.0).topk(5)  # weights underflow, logits still rank
    assert tiny.indices.flatten().tolist() == [1, 3, 4, 0, 2] and tiny.weights[0, 0, 0, 3] == 0


@pytest.mark.parametrize("cells", [1, 4, 5, 9, 12, 512])
def test_a_pooled_picture(attention, cells):
    given = inputs()
    high, wide = math.ceil(9 / cells), math.ceil(12 / cells)
    picture = looking(attention, *given).heatmap(cells)
    assert picture.cell == (high, wide)
    blocks = [(slice(a, a + high), slice(b, b + wide)) for a in range(0, 9, high) for b in range(0, 12, wide)]
    shape = len(range(0, 9, high)), len(range(0, 12, wide))

    def pooled(x, how):
        return torch.stack([how(x[..., a, b]) for a, b in blocks], dim=-1).unflatten(-1, shape)

    count = lambda s: pooled(s.visible.to(s.weights), lambda x: x.sum((-2, -1)))  # noqa: E731
    judge_summary(attention, lambda A: A.heatmap(cells).count, count, given=given, what="count")
    total = lambda s: pooled(s.weights, lambda x: x.sum((-2, -1)))  # noqa: E731
    judge_summary(attention, lambda A: A.heatmap(cells).sum, total, given=given, what="sum")
    judge_summary(
        attention, lambda A: A.heatmap(cells).mean, lambda s: total(s) / count(s).clamp(min=1), given=given, what="mean"
    )
    peak = lambda s: pooled(s.weights, lambda x: x.amax((-2, -1)))  # noqa: E731
    judge_summary(attention, lambda A: A.heatmap(cells).max, peak, given=given, what="max")


def test_several_summaries_in_one_pass_are_the_same(attention):
    A = looking(attention, *inputs())
    top, heat, profile = A.summarize(rg.TopK(3), rg.Heatmap(4), rg.Profile())
    alone = A.topk(3), A.heatmap(4), A.profile()
    for found, expected in zip((*top, *heat[:3], profile), (*alone[0], *alone[1][:3], alone[2]), strict=True):
        assert torch.equal(found, expected)
    assert not profile.requires_grad


def test_a_head_of_a_batch_row_is_summarised_alone(attention):
    A = looking(attention, *inputs())
    for name in ("profile", "received", "entropy", "self_share", "sink_share", "toeplitz_share", "first_key_share"):
        whole, one = getattr(A, name)(), getattr(A[1, 1], name)()
        assert torch.equal(one, whole[1, 1]), name


# Explanations

EXPLAINED = {
    "dot": lambda: {},
    "scale": lambda: {"scale": torch.randn(2, 9, 1)},
    "cosine": lambda: {"score": rg.Cosine(), "scale": 3.0},
    "euclidean": lambda: {"score": rg.Euclidean(1.5)},
    "inverse distance": lambda: {"score": rg.InverseDistance()},
    "softcap": lambda: {"softcap": 1.5},
    "rotary": lambda: {"position": rg.Rotary()},
    "rotary with euclidean": lambda: {"position": rg.Rotary(), "score": rg.Euclidean(1.5)},
    "rotary with cosine": lambda: {"position": rg.Rotary(), "score": rg.Cosine(), "scale": torch.randn(2, 9, 1)},
    "terms": lambda: {"position": rg.Rotary() + rg.recipes.deberta(2, 4, buckets=4) + rg.recipes.alibi(2)},
    "the same term twice": lambda: {"position": rg.Static(rg.Slope(), 2) + rg.Static(rg.Slope(), 2)},
    "masked and sunk": lambda: {"mask": rg.causal, "sink": 0.3, "q_start": 2, "softcap": 2.0},
}


@pytest.mark.parametrize("kind", EXPLAINED)
def test_the_parts_of_an_explanation_add_up_to_the_logit(attention, kind):
    q, k = (torch.randn(shape, dtype=torch.float64) for shape in INPUTS)
    options = {name: x.double() if hasattr(x, "double") else x for name, x in EXPLAINED[kind]().items()}
    A = attention(q, k, **options)
    with torch.no_grad():
        steps = A.steps()
    for b, h, i, j in ((0, 0, 0, 0), (0, 1, 3, 11), (1, 0, 8, 2), (1, 1, 5, 6)):
        said = A[b, h].explain(i, j)
        assert said.parts["content"] == pytest.approx(float(steps.scaled[b, h, i, j]), abs=1e-12)
        assert set(said.parts) == {"content", *steps.terms}
        for name, value in steps.terms.items():
            assert said.parts[name] == pytest.approx(float(value[b, h, i, j]), abs=1e-12)
        total = sum(said.parts.values())
        if "softcap" in options:
            total = options["softcap"] * math.tanh(total / options["softcap"])
        assert total == pytest.approx(float(steps.logits[b, h, i, j]), abs=1e-12)
        assert said.visible == bool(steps.visible[b, h, i, j])
        assert said.logit == pytest.approx(total if said.visible else -math.inf, abs=1e-12)
        assert said.weight == pytest.approx(math.exp(said.logit - said.lse), abs=1e-12)
        assert said.weight == pytest.approx(float(steps.weights[b, h, i, j]), abs=1e-12)
        assert all(name in str(said) for name in said.parts) and ("(masked)" in str(said)) == (not said.visible)


def test_each_term_has_its_own_line_in_an_explanation(attention):
    q, k = (torch.randn(shape, dtype=torch.float64) for shape in INPUTS)
    position = rg.Rotary() + rg.recipes.transformer_xl(2, 4) + rg.recipes.t5(2)
    A = attention(q, k, position=position.double())
    said = A[1, 0].explain(3, 7)
    assert list(said.parts) == ["content", *(term.describe() for term in position)]


@pytest.mark.parametrize("kind", [kind for kind in EXPLAINED if kind != "masked and sunk"])
def test_turned_around_the_parts_are_the_same(attention, kind):
    q, k = (torch.randn(shape, dtype=torch.float64) for shape in INPUTS)
    options = {name: x.double() if hasattr(x, "double") else x for name, x in EXPLAINED[kind]().items()}
    A = attention(q, k, **options)
    there, back = A[1, 0].explain(3, 7), A.reversed()[1, 0].explain(7, 3)
    assert back.parts == pytest.approx(there.parts, abs=1e-12)
    assert back.logit == pytest.approx(there.logit, abs=1e-12) and back.weight != pytest.approx(there.weight, abs=1e-6)
