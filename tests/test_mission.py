"""The mission's numbers, M0 to M2: the soft look-up, the matrix A, the causal mask and the cache.

Each test is a sentence of the mission with its numbers, computed by the public API, by the plan's engine
and by the definition. M3 and M4 are in test_mission_position.py, M5 in test_mission_looking.py.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from by_hand import judge, printed, scaled_dot, softmax

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


def vectors(*rows: list[float] | float) -> torch.Tensor:
    """Rows of numbers as [1, 1, length, dim] in float64."""
    values = torch.tensor(rows, dtype=torch.float64)
    return values.reshape(1, 1, len(rows), -1)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# M0: the soft look-up

STORE = vectors(51.0, 56.0, 58.0), vectors(40.0, 43.0, 48.0)
QUERY = vectors(57.0)


def look_up(attention, query=QUERY, **description) -> float:
    k, v = STORE
    return float(attention(query, k, **description) @ v)


def test_the_two_nearest_keys_give_45_5(attention):
    for score in (rg.InverseDistance(), rg.Euclidean(2.0)):
        A = attention(QUERY, STORE[0], score=score, mask=rg.nearest(2))
        assert printed(A.dense().flatten(), 12) == [0.0, 0.5, 0.5]  # each at distance 1
        assert look_up(attention, score=score, mask=rg.nearest(2)) == pytest.approx(45.5, abs=1e-12)


def test_inverse_distance_gives_45_0769(attention):
    A = attention(QUERY, STORE[0], score=rg.InverseDistance())
    assert A.dense().flatten().tolist() == pytest.approx([1 / 13, 6 / 13, 6 / 13], abs=1e-12)
    assert printed(look_up(attention, score=rg.InverseDistance()), 4) == 45.0769


def test_an_exact_match_takes_all_the_weight(attention):
    k, v = STORE
    for i in range(3):
        A = attention(k[:, :, i : i + 1], k, score=rg.InverseDistance())
        assert A.dense().flatten().tolist() == [float(i == j) for j in range(3)]
        assert float(A @ v) == float(v[0, 0, i])
    twice = attention(vectors(56.0), vectors(56.0, 51.0, 56.0), score=rg.InverseDistance())
    assert twice.dense().flatten().tolist() == pytest.approx([0.5, 0.0, 0.5], abs=1e-12)  # several matches share it


@pytest.mark.parametrize("sigma, number", [(2.0, 45.4656), (4.0, 44.7110)])
def test_a_gaussian_weight(attention, sigma, number):
    weights = torch.tensor([math.exp(-(d**2) / (2 * sigma**2)) for d in (6, 1, 1)], dtype=torch.float64)
    A = attention(QUERY, STORE[0], score=rg.Euclidean(sigma))
    assert A.dense().flatten().tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=1e-12)
    assert printed(look_up(attention, score=rg.Euclidean(sigma)), 4) == number


def test_the_raw_dot_product_saturates_on_the_largest_key(attention):
    assert printed(look_up(attention, scale=1.0), 4) == 48.0
    assert printed(look_up(attention, query=vectors(50.0), scale=1.0), 4) == 48.0  # whatever is asked


def test_the_upside_down_weight_gives_41_375(attention):
    A = attention(QUERY, STORE[0], score=rg.InverseDistance(-1))
    assert A.dense().flatten().tolist() == pytest.approx([6 / 8, 1 / 8, 1 / 8], abs=1e-12)  # |q-k| / Σ|q-k|
    assert look_up(attention, score=rg.InverseDistance(-1)) == pytest.approx(41.375, abs=1e-12)


def test_one_query_becomes_many(attention):
    q, k, v = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 6, 3), torch.randn(1, 1, 6, 2)
    A = attention(q, k)
    assert A.shape == (1, 1, 4, 6) and (A @ v).shape == (1, 1, 4, 2)  # n_q x n_k times n_k x d_v
    judge(A @ v, lambda q, k, v: softmax(scaled_dot(q, k)) @ v, q, k, v)


def test_self_attention_and_cross_attention(attention):
    x1, x2 = torch.randn(9, 1, 2, 8), torch.randn(9, 1, 11, 8)  # 你好 looking at Hello World, letter by letter
    W = [torch.randn(8, 5) / 8**0.5 for _ in range(3)]
    for x in (x1, x2):
        q, k, v = x1 @ W[0], x @ W[1], x @ W[2]
        A = attention(q, k)
        assert A.shape == (9, 1, 2, x.shape[2])
        judge(A @ v, lambda q, k, v: softmax(scaled_dot(q, k)) @ v, q, k, v)


def test_training_the_projections_lowers_the_loss_and_sharpens_the_matrix(attention):
    labels = torch.eye(8)[torch.randperm(8)]
    x1, x2 = torch.eye(8)[None, None], labels[None, None]  # each query has one key that is about the same thing
    v = torch.randn(1, 1, 8, 4)
    target = labels.mT @ v
    W = [torch.nn.Parameter(0.1 * torch.randn(8, 8)) for _ in range(2)]
    optimiser = torch.optim.Adam(W, lr=0.1)
    losses, entropies = [], []
    for _ in range(60):
        A = attention(x1 @ W[0], x2 @ W[1])
        loss = (A @ v - target).square().mean()
        losses.append(loss.item())
        entropies.append(A.entropy().mean().item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0] / 20
    assert entropies[0] > 0.99 * math.log(8) and entropies[-1] < entropies[0] / 2
    assert (attention(x1 @ W[0], x2 @ W[1]).dense().argmax(-1) == labels.mT.argmax(-1)).all()


# M1: the matrix A


def test_rows_are_queries_and_sum_to_one(attention):
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 7, 5)
    A = attention(q, k, position=rg.recipes.t5(3).requires_grad_(False), softcap=2.0)
    assert A.shape == (2, 3, 4, 7)
    judge(A.dense().sum(-1), lambda q, k: softmax(scaled_dot(q, k)).sum(-1), q, k)
    assert torch.equal(A[1, 2, 3, :], A.dense()[1, 2, 3]) and float(A[1, 2, 3, 6]) == float(A.dense()[1, 2, 3, 6])


def test_d_v_differs_from_d_k(attention):
    A = attention(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4))
    assert (A @ torch.randn(1, 1, 3, 5)).shape == (1, 1, 3, 5)


def test_each_step_of_the_pipeline_can_be_seen(attention):
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 5)
    term = rg.recipes.t5(2)
    steps = attention(q, k, position=term, mask=rg.causal).steps(v)
    judge(steps.scores, lambda q, k: q @ k.mT, q, k, what="Q Kᵀ")
    judge(steps.scaled, scaled_dot, q, k, what="÷ √d_k")
    (name,) = steps.terms
    assert name == term.describe()
    hand = functools.partial(bias_of_t5, term)
    judge(steps.terms[name], lambda b: hand(b).expand(1, 2, 3, 3), term.readout, what="position")
    judge(steps.logits, lambda q, k, b: scaled_dot(q, k) + hand(b), q, k, term.readout, what="+ position")
    assert torch.equal(steps.visible, torch.ones(1, 2, 3, 3).tril().bool())
    assert torch.equal(steps.masked == -torch.inf, ~steps.visible)
    whole = lambda q, k, b: softmax((scaled_dot(q, k) + hand(b)).masked_fill(~steps.visible, -torch.inf))  # noqa: E731
    judge(steps.weights, whole, q, k, term.readout, what="softmax")
    judge(steps.out, lambda q, k, b, v: whole(q, k, b) @ v, q, k, term.readout, v, what="· V")
    one = attention(q, k, position=term, mask=rg.causal)[0, 1].steps(v[0, 1])
    for found, all_heads in zip(one, steps, strict=True):
        if isinstance(found, dict):
            found, all_heads = found[name], all_heads[name]
        assert torch.equal(found, all_heads[0, 1])


def bias_of_t5(term: rg.Static, readout: torch.Tensor) -> torch.Tensor:
    """The bias of three tokens: for distances this small a bucket is a distance, and the future has the second half."""
    at = torch.tensor([[0, 17, 18], [1, 0, 17], [2, 1, 0]])
    return readout[:, at][None]


@pytest.mark.parametrize("name, dot, cosine", [([1, 2, 3], 14, 1), ([-1, -2, -3], -14, -1), ([1, 1, 1], 6, 0.9258)])
def test_king_against_queen_car_and_crown(attention, name, dot, cosine):
    king, other = vectors([1, 2, 3]), vectors(name)
    assert float(attention(king, other, scale=1.0).logits[0, 0, 0, 0]) == dot
    assert printed(attention(king, other, score=rg.Cosine()).logits[0, 0, 0, 0], 4) == cosine


def test_an_invitation_against_three_characters(attention):
    invite = vectors([0.8, 0.2, 0.7])
    keys = vectors([0.2, 0.8, 0.3], [0.3, 0.7, 0.4], [0.1, 0.9, 0.2])
    assert printed(attention(invite, keys, scale=1.0).logits.dense().flatten(), 10) == [0.53, 0.66, 0.40]


def test_scores_of_the_same_data(attention):
    q, k = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 5, 3)
    squares = lambda q, k: (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)  # noqa: E731
    lengths = lambda q, k: q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2)  # noqa: E731
    formulas = {
        rg.Dot(): scaled_dot,
        rg.Cosine(): lambda q, k: q @ k.mT / lengths(q, k),
        rg.Euclidean(1.5): lambda q, k: -squares(q, k) / (2 * 1.5**2),
        rg.InverseDistance(2.0): lambda q, k: -2 * squares(q, k).sqrt().log(),
    }
    for score, formula in formulas.items():
        judge(attention(q, k, score=score).logits.dense(), formula, q, k, what=str(score))
    # Euclidean is a dot product plus one bias per key; the query's own norm cancels in the softmax
    by_dot = lambda q, k: softmax((q @ k.mT - k.square().sum(-1).unsqueeze(-2) / 2) / 1.5**2)  # noqa: E731
    judge(attention(q, k, score=rg.Euclidean(1.5)).dense(), by_dot, q, k)


def test_softmax_of_four_scores(attention):
    A = attention(vectors(1.0), vectors(3.5, -2.1, 8.7, 0.3), scale=1.0)
    assert A.logits.dense().flatten().tolist() == [3.5, -2.1, 8.7, 0.3]
    assert printed(A.dense().flatten(), 4) == [0.0055, 0.0000, 0.9943, 0.0002]


def test_raw_dots_of_512_dimensions_spread_by_22_6(attention):
    assert printed(math.sqrt(512), 1) == 22.6
    raw = attention(torch.randn(32, 1, 64, 512), torch.randn(32, 1, 64, 512), scale=1.0).logits.dense()
    spread = raw.flatten(1).std(dim=1)  # thirty-two measurements, and their own uncertainty
    assert abs(spread.mean() - math.sqrt(512)) < 4 * spread.std() / math.sqrt(32)


def test_without_scaling_softmax_saturates_and_its_gradient_vanishes(attention):
    found = {}
    for dim in (8, 64, 512):
        for scale in (1 / math.sqrt(dim), 1.0):
            # with one query every key has its own displacement: a table's gradient is the gradient of the logits
            table = rg.Static(rg.Cells(16), readout=torch.nn.Parameter(torch.zeros(64, 31)))
            A = attention(torch.randn(1, 64, 1, dim), torch.randn(1, 64, 16, dim), scale=scale, position=table)
            (A @ torch.randn(1, 64, 16, 4)).sum().backward()
            slope = table.readout.grad.norm(dim=-1)
            found[dim, scale == 1.0] = A.entropy().median().item(), slope.median().item()
    for raw in (False, True):
        entropies, slopes = zip(*(found[dim, raw] for dim in (8, 64, 512)), strict=True)
        for values in (entropies, slopes):
            falling = values[0] > 2 * values[1] > 4 * values[2]
            steady = max(values) < 1.5 * min(values)
            assert falling if raw else steady, (raw, values)


def positioned(attention, q, k, term):
    """An A with a term of every kind, a window and documents, whose transpose is easy to get wrong."""
    q_ids, k_ids = torch.arange(q.shape[2])[None] % 2, torch.arange(k.shape[2])[None] % 3
    return attention(q, k, position=term, mask=rg.window(3, 1) & ~rg.documents(q_ids, k_ids), q_start=2)


def test_reversed_is_softmax_over_queries_of_the_transposed_logits(attention):
    q, k, x = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 7, 4), torch.randn(2, 2, 5, 3)
    term = rg.recipes.t5(2, buckets=8, max_distance=6) + rg.recipes.shaw(4, 2)
    term = term + rg.FromKey.learn(rg.Sinusoid([1.0, 0.3]), 4, 2)
    for parameter in term.parameters():
        torch.nn.init.normal_(parameter)
    for make in (lambda attention, q, k, term: attention(q, k), positioned):
        A = make(attention, q, k, term)
        turned, logits = A.reversed(), lambda q, k, term: make(rg.attention, q, k, term).steps().masked.mT  # noqa: B023
        assert turned.shape == (2, 2, 7, 5)
        judge(turned.logits.dense(), logits, q, k, term, what="logits")
        judge(turned.dense(), lambda *all: softmax(logits(*all)), q, k, term, what="weights")  # noqa: B023
        judge(turned @ x, lambda x, *all: softmax(logits(*all)) @ x, x, q, k, term, what="product")  # noqa: B023
        assert not torch.allclose(turned.dense(), A.dense().mT, atol=1e-2)
        judge(turned.reversed().dense(), lambda *all: softmax(logits(*all).mT), q, k, term, what="twice")  # noqa: B023


def test_direction_does_not_matter_only_when_q_kt_is_symmetric(attention):
    x, S = torch.randn(3, 1, 5, 4), torch.randn(4, 4) / 4
    for make in (lambda x, S: x, lambda x, S: 2 * x, lambda x, S: x @ (S + S.mT)):
        A = attention(x, make(x, S))
        for found in (A.dense(), A.reversed().dense()):
            judge(found, lambda x, S: softmax(scaled_dot(x, make(x, S))), x, S)  # noqa: B023
    A = attention(x @ torch.randn(4, 4), x @ torch.randn(4, 4))  # self-attention alone does not make it so
    assert not torch.allclose(A.dense(), A.reversed().dense(), atol=1e-2)


def test_each_head_has_its_own_matrix_then_concat_and_w_o(attention):
    x = torch.randn(2, 6, 12)
    W = [torch.randn(12, 12) / 12**0.5 for _ in range(4)]
    split = lambda x, w: (x @ w).unflatten(-1, (3, 4)).transpose(1, 2)  # noqa: E731
    q, k, v = (split(x, w) for w in W[:3])
    A = attention(q, k, position=rg.recipes.alibi(3))
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()

    def one(h, q, k, slopes):
        return softmax(scaled_dot(q[:, h : h + 1], k[:, h : h + 1])[:, 0] - slopes[h] * distance)

    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2])
    for h in range(3):
        judge(A[:, h].dense(), functools.partial(one, h), q, k, slopes, what=f"head {h}")

    def whole(x, slopes, *W):
        q, k, v = (split(x, w) for w in W[:3])
        return torch.cat([one(h, q, k, slopes) @ v[:, h] for h in range(3)], dim=-1) @ W[3]

    y = (A @ v).transpose(1, 2).flatten(2) @ W[3]
    assert y.shape == x.shape
    judge(y, whole, x, slopes, *W)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_and_multi_query_heads_are_repeated_heads(attention, kv_heads):
    q, k, v = (torch.randn(2, heads, 5, 4) for heads in (4, kv_heads, kv_heads))
    term = rg.recipes.deberta(4, 4, buckets=4, max_position=8)
    for parameter in term.parameters():
        torch.nn.init.normal_(parameter)
    shared = attention(q, k, position=term)
    every = lambda x: x.repeat_interleave(4 // kv_heads, dim=1)  # noqa: E731
    repeated = lambda q, k, term: rg.attention(q, every(k), position=term, engine="reference")  # noqa: E731
    judge(shared.dense(), lambda *all: repeated(*all).dense(), q, k, term)
    judge(shared @ v, lambda v, *all: repeated(*all) @ every(v), v, q, k, term)
    judge(shared[1] @ v[1], lambda v, *all: (repeated(*all) @ every(v))[1], v, q, k, term, what="one batch row")
    judge(shared[:, 3] @ v[:, -1], lambda v, *all: (repeated(*all) @ every(v))[:, 3], v, q, k, term, what="one head")


# M2: the causal mask and the cache


def test_with_the_causal_mask_the_sum_stops_at_t(attention):
    q, k, v = torch.randn(4, 1, 6, 4), torch.randn(4, 1, 6, 4), torch.randn(4, 1, 6, 3)

    def up_to(t, q, k, v):
        weights = softmax(scaled_dot(q[:, :, t : t + 1], k[:, :, : t + 1]))[:, :, 0]
        return sum(weights[..., j, None] * v[:, :, j] for j in range(t + 1))

    seen, free = attention(q, k, mask=rg.causal), attention(q, k)
    for t in range(6):
        judge((seen @ v)[:, :, t], functools.partial(up_to, t), q, k, v, what=f"y_{t}")
        later = torch.where(torch.arange(6)[:, None] > t, 100.0, v)  # what does not exist yet while decoding
        assert torch.equal((seen @ later)[:, :, t], (seen @ v)[:, :, t])
        assert t == 5 or not torch.allclose((free @ later)[:, :, t], (free @ v)[:, :, t])


KINDS = {
    "none": lambda: None,
    "T5": lambda: rg.recipes.t5(2, buckets=8, max_distance=6),
    "T5 one way": lambda: rg.recipes.t5(2, buckets=8, max_distance=6, bidirectional=False),
    "ALiBi": lambda: rg.recipes.alibi(2),
    "learned table": lambda: rg.Static(rg.Table(3, clip=3, heads=2)),
    "a bin a displacement": lambda: rg.Static(rg.Cells(9), 2),
    "network": lambda: rg.Static(rg.Network(2, hidden=8, bound=2.0)),
    "FromQuery": lambda: rg.recipes.shaw(4, 3),
    "FromKey": lambda: rg.FromKey.learn(rg.Table(3, index=rg.LogBuckets(4, 8)), 4, 2, offset=True),
    "DeBERTa": lambda: rg.recipes.deberta(2, 4, buckets=4, max_position=8),
    "Transformer-XL": lambda: rg.recipes.transformer_xl(2, 4),
    "Rotary": lambda: rg.Rotary(),
    "Rotary and ALiBi": lambda: rg.Rotary(2) + rg.recipes.alibi(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_the_cache_gives_the_one_shot_result(attention, kind):
    length = 9
    q, k, v = randn(2, 2, length, 4), randn(2, 1, length, 4), randn(2, 1, length, 3)
    term = KINDS[kind]()
    if term is not None:
        term = term.double()
        for parameter in term.parameters():
            torch.nn.init.normal_(parameter)
    once = attention(q, k, position=term, mask=rg.causal) @ v
    decode = lambda a, b: attention(q[:, :, a:b], k[:, :, :b], position=term, mask=rg.causal, q_start=a)  # noqa: E731
    one_by_one = torch.cat([decode(t, t + 1) @ v[:, :, : t + 1] for t in range(length)], dim=2)
    in_chunks = torch.cat([decode(a, b) @ v[:, :, :b] for a, b in ((0, 4), (4, 5), (5, 9))], dim=2)
    for steps in (one_by_one, in_chunks):
        assert (steps - once).abs().max() <= 1e-12
    if term is not None:  # a query that stood at the start of its chunk would see other distances
        wrong = attention(q[:, :, 5:], k, position=term, q_start=0) @ v
        assert (wrong - attention(q[:, :, 5:], k, position=term, q_start=5) @ v).abs().max() > 1e-6


def test_rows_of_a_batch_may_stand_at_different_places(attention):
    q, k, v = randn(2, 2, 1, 4), randn(2, 2, 9, 4), randn(2, 2, 9, 3)
    term = rg.recipes.transformer_xl(2, 4).double()
    together = attention(q, k, position=term, mask=rg.causal, q_start=torch.tensor([3, 8])) @ v
    for row, t in enumerate((3, 8)):
        one = slice(row, row + 1)
        alone = attention(q[one], k[one, :, : t + 1], position=term, mask=rg.causal, q_start=t) @ v[one, :, : t + 1]
        assert (together[one] - alone).abs().max() <= 1e-12


def test_score_pairs_of_sixteen_steps(attention):
    T = 16
    x = torch.randn(1, 1, T, 2)

    def pairs(first: int, last: int, mask=None) -> int:
        """Score pairs of queries first .. last - 1 against keys 0 .. last - 1."""
        A = attention(x[:, :, first:last], x[:, :, :last], mask=mask, q_start=first)
        return int(A.heatmap(1).count)

    assert sum(pairs(0, t + 1) for t in range(T)) == 1496  # every step anew, no mask
    assert sum(pairs(0, t + 1, rg.causal) for t in range(T)) == 816  # every step anew, causally
    assert sum(pairs(t, t + 1) for t in range(T)) == 136  # one query against the cache
    assert pairs(0, T, rg.causal) == 136 and pairs(0, T) == T * T
