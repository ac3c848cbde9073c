"""Edges: empty sequences, one token, rows that see nothing, and NaN or infinity in q, k and v.

Nothing to look at gives zeros, a log-sum-exp of -inf and a zero gradient, never NaN. What is not finite flows as it
does in plain PyTorch, and reaches no other row.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from by_hand import judge, scaled_dot, widen
from support import all_within_budget
from torch import Tensor

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


TERMS = {
    "no term": lambda: None,
    "t5": lambda: rg.recipes.t5(2),
    "alibi": lambda: rg.recipes.alibi(2),
    "cells": lambda: rg.Static(rg.Cells(9), 2),
    "network": lambda: rg.Static(rg.Network(2, hidden=3)),
    "shaw": lambda: rg.recipes.shaw(4, 2),
    "transformer-xl": lambda: rg.recipes.transformer_xl(2, 4),
    "deberta": lambda: rg.recipes.deberta(2, 4),
    "rotary": lambda: rg.Rotary(),
    "gated": lambda: rg.recipes.t5(2).bind(gate=torch.randn(2, 2, 1, 1)),
}
SCORES = [rg.Dot(), rg.Cosine(), rg.Euclidean(), rg.InverseDistance()]
SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 3), (3, 2)]


def leaves(q_len: int, k_len: int) -> list[Tensor]:
    shapes = (2, 2, q_len, 4), (2, 1, k_len, 4), (2, 1, k_len, 3)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def everything(A: rg.AttentionMatrix) -> dict[str, Tensor]:
    """All that can be asked of A, by name."""
    top, heat = A.topk(2), A.heatmap(2)
    found = {"dense": A.dense(), "lse": A.lse, "band": A.band(1), "reversed": A.reversed().dense()}
    found |= {"top weights": top.weights, "sum": heat.sum, "count": heat.count, "max": heat.max, "mean": heat.mean}
    found |= {"received": A.received(), "entropy": A.entropy(), "mass": A.mass(rg.causal), "share": A.share(rg.causal)}
    found |= {"self": A.self_share(), "previous": A.previous_share(), "first": A.first_key_share()}
    found |= {"sink": A.sink_share(), "weights": A.steps().weights}
    return found | {"profile": A.profile(), "toeplitz": A.toeplitz_share()}


def shapes(q_len: int, k_len: int) -> dict[str, tuple[int, ...]]:
    one, rows = (2, 2), (2, 2, q_len)
    cells = (2, 2, min(q_len, 2), min(k_len, 2))
    expected = {"dense": (*rows, k_len), "lse": rows, "band": (*rows, 3), "reversed": (2, 2, k_len, q_len)}
    expected |= {"top weights": (*rows, 2), "sum": cells, "count": cells, "max": cells, "mean": cells}
    expected |= {"received": (2, 2, k_len), "entropy": rows, "mass": rows, "share": one}
    expected |= {"self": one, "previous": one, "first": one, "sink": one, "weights": (*rows, k_len), "toeplitz": one}
    return expected | {"profile": (2, 2, q_len + k_len - 1 if q_len and k_len else 0)}


def check_all(A: rg.AttentionMatrix, v: Tensor, given: list[Tensor]) -> None:
    """Shapes as promised, nothing NaN, and a finite gradient for everything that was given."""
    q_len, k_len = A.shape[-2:]
    y = A @ v
    found = everything(A)
    assert y.shape == (2, 2, q_len, 3) and {name: tuple(x.shape) for name, x in found.items()} == shapes(q_len, k_len)
    for name, x in {**found, "product": y}.items():
        assert not x.isnan().any(), name
    lse = A.lse
    loss = y.sum() + A.dense().square().sum() + A.band(1).sum() + lse[lse.isfinite()].sum()
    for name, grad in enumerate(torch.autograd.grad(loss, given, allow_unused=True)):
        assert grad is None or grad.isfinite().all(), name


def parameters(term) -> list[Tensor]:
    return list(getattr(term, "term", term).parameters()) if term is not None else []


@pytest.mark.parametrize("q_len, k_len", SIZES)
@pytest.mark.parametrize("kind", TERMS)
def test_few_tokens_or_none(attention, q_len, k_len, kind):
    term = TERMS[kind]()
    q, k, v = leaves(q_len, k_len)
    for mask in (None, rg.causal) if kind != "t5" else (None, rg.causal, rg.nearest(2), rg.offset(-1)):
        A = attention(q, k, position=term, mask=mask, q_start=0)
        check_all(A, v, [q, k, v, *parameters(term)])
    if not k_len:
        assert (A @ v == 0).all() and (A.lse == -torch.inf).all() and (A.topk(2).indices == -1).all()


@pytest.mark.parametrize("q_len, k_len", SIZES)
@pytest.mark.parametrize("score", SCORES, ids=str)
def test_few_tokens_or_none_with_any_score(attention, q_len, k_len, score):
    q, k, v = leaves(q_len, k_len)
    sink = torch.zeros(2, requires_grad=True)
    for options in ({}, {"softcap": 2.0}, {"sink": sink}, {"mask": rg.causal, "sink": sink, "softcap": 2.0}):
        check_all(attention(q, k, score=score, q_start=0, **options), v, [q, k, v, sink])


def test_no_batch_row(attention):
    q, k, v = (torch.randn(0, heads, 3, 4, requires_grad=True) for heads in (2, 1, 1))
    A = attention(q, k, position=rg.recipes.t5(2), mask=rg.causal)
    assert (A @ v).shape == (0, 2, 3, 4) and A.dense().shape == (0, 2, 3, 3) and A.entropy().shape == (0, 2, 3)
    (A @ v).sum().backward()
    assert q.grad.shape == q.shape


def test_no_dimension(attention):
    """Vectors of nothing are all alike: every key gets the same weight."""
    q, k = torch.zeros(1, 1, 2, 0), torch.zeros(1, 1, 4, 0)
    assert attention(q, k).dense().flatten().tolist() == [0.25] * 8
    assert attention(q, k).__matmul__(torch.ones(1, 1, 4, 0)).shape == (1, 1, 2, 0)


def test_one_token_looks_at_itself(attention):
    q, k, v = leaves(1, 1)
    for kind in TERMS.values():
        A = attention(q, k, position=kind(), mask=rg.causal)
        assert torch.equal(A @ v, v.expand(2, 2, 1, 3)) and (A.dense() == 1).all() and (A.entropy() == 0).all()
        assert (A.self_share() == 1).all() and (A.toeplitz_share() == 1).all()


BLIND = {  # row 2 of batch row 0 sees nothing
    "dense": lambda: rg.dense(torch.ones(2, 1, 4, 5).bool() & ~torch.eye(4)[2].bool()[:, None]),
    "offset": lambda: rg.offset(-3),
    "documents": lambda: rg.documents(torch.tensor([[0, 0, -1, 1]]), torch.tensor([[0, 0, 1, 1, 0]])),
    "lengths": lambda: rg.lengths([0, 5]),
    "and nearest": lambda: rg.lengths([0, 5]) & rg.nearest(2),
    "no key": lambda: rg.causal & ~rg.causal,
}


@pytest.mark.parametrize("kind, name", [*((kind, "dense") for kind in TERMS), *(("t5", name) for name in BLIND)])
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
def test_a_row_that_sees_nothing(attention, kind, name, sink):
    term = TERMS[kind]()
    q, k, v = leaves(4, 5)
    logit = torch.randn(2, requires_grad=True) if sink else None
    A = attention(q, k, position=term, mask=BLIND[name](), q_start=0, sink=logit)
    blind = (A.logits.dense() == -torch.inf).all(-1)
    assert blind[0, :, 2].all()
    assert ((A @ v)[blind] == 0).all() and (A.dense()[blind] == 0).all()
    assert (A.entropy()[blind] == 0).all() and (A.topk(2).indices[blind] == -1).all() and (A.band(2)[blind] == 0).all()
    expected = torch.full_like(A.lse, -torch.inf) if logit is None else logit[:, None].expand(A.lse.shape)
    assert torch.equal(A.lse[blind], expected[blind])
    loss = ((A @ v) * torch.randn(2, 2, 4, 3)).sum() + (A.dense() * torch.randn(2, 2, 4, 5)).sum()
    given = [q, k, v, *parameters(term)] + ([logit] if sink else [])
    grads = torch.autograd.grad(loss, given)
    assert (grads[0][blind] == 0).all() and all(g.isfinite().all() for g in grads)
    if blind.all():
        assert all((g == 0).all() for g in grads)
    check_all(A, v, given)


# What is not finite


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Dense attention in PyTorch's own words, and its gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    weights = torch.softmax(scaled_dot(q, k).masked_fill(~visible, -torch.inf), dim=-1)
    out = weights @ v.repeat_interleave(2, dim=1)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    return {"product": out, "weights": weights, **dict(zip(("d_q", "d_k", "d_v"), grads, strict=True))}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "causal"])
def test_what_is_not_finite_flows_as_in_plain_pytorch(attention, value, where, masked):
    x = dict(zip("qkv", leaves(5, 5), strict=True))
    with torch.no_grad():
        x[where][0, 0, 3, 1] = value
    A = attention(x["q"], x["k"], mask=rg.causal if masked else None)
    out, weights = A @ x["v"], A.dense()
    grads = torch.autograd.grad(out.sum(), list(x.values()))
    found = {"product": out, "weights": weights, **dict(zip(("d_q", "d_k", "d_v"), grads, strict=True))}
    visible = torch.ones(5, 5).tril().bool() if masked else torch.ones(5, 5).bool()
    expected = plain(*x.values(), visible), plain(*map(widen, x.values()), visible)
    values, gradients = ("product", "weights"), ("d_q", "d_k", "d_v")
    for names in (values, gradients):
        all_within_budget({n: found[n] for n in names}, *({n: e[n] for n in names} for e in expected))
    assert out[1].isfinite().all()  # another batch row
    if where == "q":  # another query, another head
        assert out[0, 1].isfinite().all() and out[0, 0, [0, 1, 2, 4]].isfinite().all()
    if where == "k" and masked:  # queries that cannot see it
        assert out[0, :, :3].isfinite().all()


@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("kind", TERMS)
def test_nan_stays_in_its_batch_row_whatever_is_asked(attention, kind, where):
    term = TERMS[kind]()
    given = leaves(4, 5)
    with torch.no_grad():
        spoiled = [x.clone() for x in given]
        spoiled[where][0, 0, 1, 2] = math.nan
        pair = []
        for q, k, v in (given, spoiled):
            A = attention(q, k, position=term, mask=rg.window(None, 2), q_start=1)
            pair.append({"product": A @ v, "indices": A.topk(2).indices, **everything(A)})
    for name, clean in pair[0].items():
        assert torch.equal(pair[1][name][1], clean[1]), name
        if where == 0:  # and in its head, where it is a query's
            assert torch.equal(pair[1][name][0, 1], clean[0, 1]), name


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_bad_key_under_any_score(attention, score, value):
    """As its formula has it: an infinitely far key gets no weight, and NaN is NaN for those who see it."""
    q, k, v = (x.detach() for x in leaves(4, 5))
    k[0, 0, 4, 1] = value
    out = attention(q, k, score=score) @ v
    assert torch.equal(out[1:], attention(q[1:], k[1:], score=score) @ v[1:])
    hidden = attention(q, k, score=score, mask=rg.keys(0, 3)) @ v
    alone = lambda q, k, v: rg.attention(q, k[:, :, :4], score=score, engine="reference") @ v[:, :, :4]  # noqa: E731
    judge(hidden, alone, q, k, v, what="nobody sees it")
    if math.isnan(value) or isinstance(score, rg.Cosine):
        assert out[0].isnan().all()
    elif isinstance(score, (rg.Euclidean, rg.InverseDistance)):
        judge(out[:1], alone, q[:1], k[:1], v[:1], what="infinitely far")
