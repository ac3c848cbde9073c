"""Every summary against what a dense A gives, on random descriptions, whole and in parts."""

from __future__ import annotations

import pytest
import torch
from descriptions import Case, cases
from hypothesis import given, settings
from support import all_within_budget, within_budget
from torch import Tensor

import regard as rg
from regard.engines.tiled import strips
from regard.summaries import Share, Summary

ENUMERABLE = ("line", "grid", "class grid", "video")


def by_displacement(x: Tensor, case: Case, q_len: int, k_len: int) -> Tensor:
    """Sums over pairs of one displacement, from the dense matrix, pair by pair."""
    if case.geometry == "line":
        total = x.new_zeros(*x.shape[:2], q_len + k_len - 1 if q_len and k_len else 0)
        for i in range(q_len):
            for j in range(k_len):
                total[..., i - j + k_len - 1] += x[..., i, j]
        return total
    alone = 1 if case.geometry == "class grid" else 0
    total = x.new_zeros(*x.shape[:2], *(a + b - 1 for a, b in zip(case.q_shape, case.k_shape, strict=True)))
    for i in range(alone, q_len):
        for j in range(alone, k_len):
            p = torch.unravel_index(torch.tensor(i - alone), case.q_shape)
            r = torch.unravel_index(torch.tensor(j - alone), case.k_shape)
            at = tuple(int(a - b) + n - 1 for a, b, n in zip(p, r, case.k_shape, strict=True))
            total[(..., *at)] += x[..., i, j]
    return total


def dense_summaries(case: Case, A: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """The definitions of docs/maths.md, eq. 27 to 33, on stored matrices."""
    q_len, k_len = A.shape[-2:]
    seen = (logits > -torch.inf).to(A)
    found = {"received": A.sum(-2), "entropy": torch.special.entr(A).sum(-1)}
    first = torch.zeros(q_len, k_len, dtype=torch.bool)
    first[:, :1] = True
    could = (seen * first).amax(-1) if k_len else torch.zeros(A.shape[:-1])
    mass = (A * first).sum(-1)
    found["mass"] = mass
    found["share"] = (mass * could).sum(-1) / could.sum(-1).clamp(min=1)
    high, wide = max(1, -(-q_len // 3)), max(1, -(-k_len // 3))
    cells = -(-q_len // high), -(-k_len // wide)
    pooled = {name: A.new_zeros(*A.shape[:2], *cells) for name in ("sum", "count", "max")}
    for a in range(cells[0]):
        for b in range(cells[1]):
            at = (..., slice(a * high, (a + 1) * high), slice(b * wide, (b + 1) * wide))
            pooled["sum"][..., a, b] = A[at].sum((-2, -1))
            pooled["count"][..., a, b] = seen[at].sum((-2, -1))
            pooled["max"][..., a, b] = A[at].amax((-2, -1))
    found.update({f"heat map {name}": x for name, x in pooled.items()})
    if case.geometry in ENUMERABLE:
        found["profile"] = by_displacement(A, case, q_len, k_len)
    return found


def asked(case: Case) -> dict[str, Summary]:
    start = 2 if case.geometry == "line" and case.starts == "numbers" else 0
    wanted: dict[str, Summary] = {
        "received": rg.Received(),
        "entropy": rg.Entropy(),
        "mass": rg.Mass(rg.keys(start)),
        "share": rg.Share(rg.keys(start)),
        "heat map": rg.Heatmap(3),
    }
    if case.geometry in ENUMERABLE:
        wanted["profile"] = rg.Profile()
    return wanted


def flat(results: dict) -> dict[str, Tensor]:
    found = dict(results)
    pooled = found.pop("heat map")
    assert torch.equal(pooled.mean, pooled.sum / pooled.count.clamp(min=1).to(pooled.sum.dtype))
    return {**found, "heat map sum": pooled.sum, "heat map count": pooled.count, "heat map max": pooled.max}


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("small", [False, True])
@given(case=cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_summaries_are_those_of_the_dense_matrix(engine, small, case):
    if case.starts == "rows":
        case = Case(**{**vars(case), "starts": "zero"})  # the first key is at another position in each row
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if small:
            patch.setattr(strips, "STRIP", 8)
            patch.setattr(strips, "MIN_ROWS", 2)
        built = case.build(torch.float32)
        wanted = asked(case)
        results = built.matrix(engine).summarize(*wanted.values())
        found = flat(dict(zip(wanted, results, strict=True)))
        runs = []
        for exact, nudge in ((False, False), (True, False), (True, True)):
            R = case.build(torch.float32, exact, nudge).matrix("reference")
            runs.append(dense_summaries(case, R.dense(), R.logits.dense()))
        all_within_budget(found, *runs)


@given(case=cases(geometries=ENUMERABLE))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_toeplitz_share_is_the_explained_variance(case):
    """By its words: one minus the variance left within displacements over all of it, over visible placed pairs."""
    built = case.build(torch.float64)
    with torch.no_grad():
        share = built.matrix().toeplitz_share()
        R = built.matrix("reference")
        A, seen = R.dense(), (R.logits.dense() > -torch.inf).double()
    _, _, q_len, k_len = built.sizes
    mass, count = (by_displacement(x, case, q_len, k_len).flatten(2) for x in (A, seen))
    squares = by_displacement(A.square(), case, q_len, k_len).flatten(2).sum(-1)
    total = squares - mass.sum(-1).square() / count.sum(-1).clamp(min=1)
    left = squares - (mass.square() / count.clamp(min=1)).sum(-1)
    expected = torch.where(total > 1e-12 * squares, 1 - left / total, 1.0).clamp(0, 1)
    assert ((share - expected).abs() < 1e-6).all()


@given(case=cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_top_keys_are_the_first_of_a_stable_sort(case):
    built = case.build(torch.float64)
    with torch.no_grad():
        top = built.matrix("reference").topk(3)
        R = built.matrix("reference")
        A, logits = R.dense(), R.logits.dense()
    k_len = logits.shape[-1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :3]
    none = logits.gather(-1, order) == -torch.inf
    index = torch.full((*logits.shape[:-1], 3), -1)
    weights = torch.zeros(*logits.shape[:-1], 3, dtype=torch.float64)
    index[..., : min(3, k_len)] = order.masked_fill(none, -1)
    weights[..., : min(3, k_len)] = A.gather(-1, order).masked_fill(none, 0.0)
    assert torch.equal(top.indices, index) and torch.equal(top.weights, weights)


def test_ties_go_to_the_lower_index():
    q, k = torch.zeros(1, 1, 50, 4), torch.randn(1, 1, 4000, 4)
    top = rg.attention(q, k, q_start=3990, mask=rg.window(20, 0)).topk(4)
    assert torch.equal(top.indices[0, 0, 0], torch.tensor([3970, 3971, 3972, 3973]))
    assert torch.equal(rg.attention(q, k).topk(3).indices[0, 0], torch.arange(3).expand(50, 3))


@pytest.mark.parametrize(
    "summary", [rg.TopK(3), rg.Heatmap(4), rg.Profile(), rg.Received(), rg.Entropy(), rg.Mass(rg.causal), rg.Toeplitz()]
)
def test_parts_merge_to_the_whole(summary, monkeypatch):
    """Two states, each of half the strips, merged and finished, are the whole pass."""
    monkeypatch.setattr(strips, "STRIP", 40)
    monkeypatch.setattr(strips, "MIN_ROWS", 2)
    q, k = torch.randn(2, 2, 20, 4, dtype=torch.float64), torch.randn(2, 2, 20, 4, dtype=torch.float64)
    A = rg.attention(q, k, position=rg.recipes.t5(2).double())
    problem, states = A._still, [None, None]
    with torch.no_grad():
        states = [summary.start(problem) for _ in range(2)]
        count = 0
        for block in strips.each_block(problem):
            for rows, cols in strips.each_strip(block.problem):
                summary.update(states[count % 2], strips.Strip(block, rows, cols))
                count += 1
        merged = summary.finish(summary.merge(*states), problem)
    whole = A.summarize(summary)[0]
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (merged, whole)), strict=True):
        if isinstance(a, Tensor):
            within_budget(a.float(), b.float(), b.double())


def test_top_keys_of_column_halves_merge_by_logit_then_index():
    top = rg.TopK(2)
    a = [torch.tensor([[[[2.0, 1.0]]]]), torch.tensor([[[[0.4, 0.2]]]]), torch.tensor([[[[7, 3]]]])]
    b = [torch.tensor([[[[2.0, -torch.inf]]]]), torch.tensor([[[[0.4, 0.0]]]]), torch.tensor([[[[5, -1]]]])]
    for merged in (top.merge(a, b), top.merge(b, a)):
        assert merged[2].tolist() == [[[[5, 7]]]]


def test_shares():
    tokens = torch.tensor([3, 1, 4, 3, 1, 4, 3])
    n = len(tokens)
    q = k = torch.zeros(1, 1, n, 2)
    sharp = rg.attention(
        q, k, position=rg.Static(rg.Cells(n), readout=50.0 * torch.eye(2 * n - 1)[n][None]), mask=rg.causal
    )
    assert sharp.previous_share().item() == pytest.approx(1.0)  # queries 1 .. n - 1 see a key before them
    assert sharp.self_share().item() == pytest.approx(1 / n)  # query 0 has nothing else
    match = torch.zeros(n, n)
    for i in range(n):
        for j in range(1, i + 1):
            match[i, j] = tokens[j - 1] == tokens[i]
    A = rg.attention(q, k, mask=rg.causal)
    rows = match.any(-1)
    expected = ((A.dense()[0, 0] * match).sum(-1)[rows]).mean()
    assert A.induction_share(tokens).item() == pytest.approx(expected.item())
    assert A.first_key_share().item() == pytest.approx(sum(1 / i for i in range(1, n + 1)) / n)
    assert A.sink_share().item() == 0
    with_sink = rg.attention(q, k, sink=torch.zeros(1))
    assert with_sink.sink_share().item() == pytest.approx(1 / (n + 1))
    assert with_sink.share(rg.keys(0, n)).item() == pytest.approx(n / (n + 1))


def test_what_cannot_be_summarised_says_why():
    q = k = torch.zeros(1, 1, 3, 2)
    scattered = rg.attention(q, k, geometry=rg.Points(torch.rand(3, 2)))
    with pytest.raises(ValueError, match="Profile: displacements between Points"):
        scattered.profile()
    with pytest.raises(TypeError, match="depends on positions only"):
        Share(rg.nearest(2))
    with pytest.raises(TypeError, match="summarize: expected summaries"):
        scattered.summarize("entropy")
    with pytest.raises(ValueError, match="offset\\(0, 1\\) names 2 axes, the geometry has 1"):
        rg.attention(q, k).share(rg.offset(0, 1))


def test_a_new_summary_is_one_small_class():
    class LargestWeight(Summary):
        joins = ("max",)

        def start(self, problem):
            return [problem.q.new_zeros(problem.q.shape[:2])]

        def update(self, state, strip):
            at = strip.batch, strip.heads
            state[0][at] = torch.maximum(state[0][at], strip.weights.amax((-2, -1)))

    q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4)
    A = rg.attention(q, k)
    torch.testing.assert_close(A.summarize(LargestWeight())[0], A.dense().amax((-2, -1)))
