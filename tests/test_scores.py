"""Scores: each against its formula written by hand, with gradients, and the cases where a formula has no value."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from by_hand import judge, scaled_dot, softmax

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


def distance(q, k):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1).sqrt()


def cosine(q, k):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / (q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2))


SCORES = {
    rg.Dot(): scaled_dot,
    rg.Cosine(): cosine,
    rg.Euclidean(): lambda q, k: -distance(q, k).square() / 2,
    rg.Euclidean(2.5): lambda q, k: -distance(q, k).square() / (2 * 2.5**2),
    rg.InverseDistance(): lambda q, k: -distance(q, k).log(),
    rg.InverseDistance(2): lambda q, k: -2 * distance(q, k).log(),
    rg.InverseDistance(-1.5): lambda q, k: 1.5 * distance(q, k).log(),
}


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_weights_and_gradients(attention, score, kv_heads):
    q, k = torch.randn(4, 4, 9, 3), torch.randn(4, kv_heads, 11, 3)
    A = attention(q, k, score=score)
    judge(A.logits.dense(), SCORES[score], q, k, what="logits")
    judge(A.dense(), lambda q, k: softmax(SCORES[score](q, k)), q, k, what="weights")
    shapes = (1, 4, 2, 3), (1, kv_heads, 3, 3), (1, kv_heads, 3, 2)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, score=score) @ v, given)


def test_only_the_dot_product_is_scaled_by_itself(attention):
    q, k = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16)
    for score, formula in SCORES.items():
        usual = 0.25 if score == rg.Dot() else 1.0
        judge(attention(q, k, score=score, scale=3.0).logits.dense(), lambda q, k: 3.0 / usual * formula(q, k), q, k)  # noqa: B023
        assert score.default_scale(16) == usual


@pytest.mark.parametrize("shape", [(1,), (3, 1, 1), (5, 1), (2, 1, 5, 1), (2, 3, 5, 1)])
def test_a_scale_may_be_a_tensor(attention, shape):
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    for score, formula in SCORES.items():
        usual = 0.5 if score == rg.Dot() else 1.0
        scale = torch.rand(shape) + 0.5
        found = attention(q, k, score=score, scale=scale).logits.dense()
        judge(found, lambda q, k, scale: scale / usual * formula(q, k), q, k, scale, what=str(score))  # noqa: B023


def test_cosine_of_a_zero_vector_is_zero(attention):
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    q[0, 0, 1] = k[0, 0, 2] = 0.0
    logits = attention(q, k, score=rg.Cosine()).logits.dense()[0, 0]
    assert (logits[1] == 0).all() and (logits[:, 2] == 0).all()
    assert (logits.abs() <= 1 + torch.finfo(torch.float32).eps).all()


def test_euclidean_does_not_lose_its_digits_far_from_the_origin(attention):
    """|q|² and |k|² are then far larger than |q - k|²: float32 would cancel, unless the origin is moved first."""
    q, k = (torch.randn(1, 2, 6, 4) + 1000 for _ in range(2))
    A = attention(q, k, score=rg.Euclidean())
    judge(A.logits.dense(), SCORES[rg.Euclidean()], q, k, what="logits")
    judge(A.dense(), lambda q, k: softmax(SCORES[rg.Euclidean()](q, k)), q, k, what="weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_matches_share_all_the_weight(attention, dtype):
    k = torch.tensor([[1.0, 2.0], [3.0, 1.0], [1.0, 2.0], [1.0, 2.0]], dtype=dtype)[None, None]
    A = attention(k[:, :, 1:3], k, score=rg.InverseDistance())
    by_hand = torch.tensor([[0, 1, 0, 0], [1 / 3, 0, 1 / 3, 1 / 3]], dtype=torch.float64)[None, None]
    judge(A.dense(), lambda met: met / met.sum(-1, keepdim=True), (by_hand > 0).to(dtype))
    judge(A @ k, lambda w, k: w @ k, by_hand.to(dtype), k)


def test_with_a_negative_power_an_exact_match_gets_no_weight(attention):
    k = torch.tensor([1.0, 3.0, 4.0]).reshape(1, 1, 3, 1)
    A = attention(k[:, :, :1], k, score=rg.InverseDistance(-1))
    judge(A.dense().flatten(), lambda d: d / d.sum(), torch.tensor([0.0, 2.0, 3.0]))
    assert float(A.heatmap(1).count) == 3  # it may be looked at; nothing makes one look
    alone = attention(k[:, :, :1], k[:, :, :1], score=rg.InverseDistance(-1))
    assert float(alone.dense()) == 0 and float(alone.lse) == -math.inf


@pytest.mark.parametrize("power", [1.0, -1.0])
def test_an_exact_match_has_a_finite_gradient(attention, power):
    x = torch.randn(1, 1, 4, 3)
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    (attention(q, k, score=rg.InverseDistance(power)) @ torch.randn(1, 1, 4, 2)).sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("sigma", [0, -1.0, math.inf, math.nan, "wide"])
def test_a_bad_sigma(sigma):
    with pytest.raises(ValueError, match=r"sigma: expected a positive number, found"):
        rg.Euclidean(sigma)


@pytest.mark.parametrize("power", [0, math.inf, math.nan, "two"])
def test_a_bad_power(power):
    with pytest.raises(ValueError, match=r"power: expected a finite number other than zero, found"):
        rg.InverseDistance(power)
