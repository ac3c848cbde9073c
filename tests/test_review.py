"""Corners that a careful reader found: each was wrong once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import within_budget
from torch import nn

import regard as rg


@pytest.mark.parametrize("layout", ["transposed", "every other", "expanded"])
def test_any_memory_layout(layout):
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()
    turn = {
        "transposed": lambda x: x.mT.contiguous().mT,
        "every other": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
        "expanded": lambda x: x[..., :1].expand(-1, -1, -1, 16),
    }[layout]
    q, k, v = (turn(x).requires_grad_() for x in (q, k, v))
    odd, plain = rg.attention(q, k) @ v, rg.attention(q.contiguous(), k.contiguous()) @ v.contiguous()
    torch.testing.assert_close(odd, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), (q, k, v)) for y in (odd, plain)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_masked_key_that_is_not_finite_reaches_nobody(bad):
    q, k, v = torch.randn(3, 1, 1, 300, 4).unbind()
    k[0, 0, 299] = bad
    for mask in (rg.lengths([299]), rg.causal & rg.window(3) & ~rg.keys(299), rg.documents(torch.arange(300) // 299)):
        out = rg.attention(q, k, mask=mask) @ v
        assert out[:, :, :299].isfinite().all()


def test_forward_mode_and_functional_gradients_refuse():
    q, k = torch.randn(2, 1, 1, 5, 4).unbind()
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: rg.attention(x, k) @ k, (q,), (k,))


def test_reversing_points_with_rows_for_tokens_without_a_place():
    q, k = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64).unbind()
    where = rg.Points(torch.randint(3, (6, 2)), torch.arange(6) % 3 > 0)
    term = rg.Static(rg.Cells(3, 3, unplaced=True), 2).double()
    A, R = (rg.attention(q, k, position=term, geometry=where, engine=e).reversed().dense() for e in (None, "reference"))
    within_budget(A.float(), R.float(), R)


def test_the_log_sum_exp_is_the_callers_own():
    q = torch.randn(1, 1, 5, 4)
    A = rg.attention(q, q)
    A.lse.add_(1)
    torch.testing.assert_close(A.dense().sum(-1), torch.ones(1, 1, 5))


def test_one_broken_query_leaves_the_other_cells_of_a_heat_map():
    q = torch.randn(1, 1, 12, 4)
    q[0, 0, 1] = torch.nan
    cells = rg.attention(q, torch.randn(1, 1, 12, 4)).heatmap(4).sum[0, 0]
    assert cells[0].isnan().all() and cells[1:].isfinite().all()


def test_counts_and_shares_of_a_long_matrix():
    q = torch.zeros(1, 1, 9000, 1)
    A = rg.attention(q, q, mask=rg.causal)
    assert A.heatmap(1).count.item() == 9000 * 9001 // 2
    assert rg.attention(q[:, :, :1000], q[:, :, :1000]).toeplitz_share().item() == 1.0


def test_learned_waves_in_low_precision_know_their_place():
    wave = rg.Sinusoid([1.0], learn=True).bfloat16()
    place = torch.tensor([[1001.0]])
    assert (wave(place) - rg.Sinusoid([1.0])(place)).abs().max() < 1e-6


def test_a_replaced_parameter_is_noticed():
    q = torch.randn(1, 2, 5, 4)
    term = rg.recipes.t5(2)
    A = rg.attention(q, q, position=term)
    A.entropy()
    term.readout = nn.Parameter(torch.randn(2, 32))
    with pytest.raises(RuntimeError, match=r"position: .* has been replaced"):
        A.entropy()


def test_one_network_for_several_heads_between_points():
    q, k, v = torch.randn(3, 1, 2, 4, 4).unbind()
    where = rg.Points(torch.randn(4, 2))
    term = rg.Static(rg.Network(1, axes=2, hidden=3))
    (rg.attention(q, k, position=term, geometry=where) @ v).sum().backward()
    assert term.features.weight2.grad.isfinite().all()


def test_terms_without_a_weight():
    q, k = torch.randn(2, 1, 2, 4, 2, dtype=torch.float64).unbind()
    where = rg.Points(torch.randn(4, 1, dtype=torch.float64))
    for keywords in ({"position": rg.FromQuery(rg.Sinusoid([0.3])), "geometry": where},):
        A, R = (rg.attention(q, k, engine=e, **keywords).dense() for e in (None, "reference"))
        within_budget(A.float(), R.float(), R)
    one = q[..., :1]
    A, R = (rg.attention(one, one, position=rg.FromKey(rg.Constant()), engine=e).dense() for e in (None, "reference"))
    within_budget(A.float(), R.float(), R)


def test_looking_in_inference_mode_does_not_spoil_training():
    q, v = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4, requires_grad=True)
    A = rg.attention(q, q)
    with torch.inference_mode():
        A.topk(1), A @ v, A.lse
    (A @ v).sum().backward()


def test_made_outside_autocast_and_used_inside():
    q, v = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    A = rg.attention(q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert (A @ v).dtype == torch.float32


def test_copies_and_pickles():
    q, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    A = rg.attention(q, q, position=rg.recipes.t5(2), mask=rg.causal)[0]
    for twin in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        torch.testing.assert_close(twin @ v[0], A @ v[0])


def test_masks_are_not_true_or_false():
    with pytest.raises(TypeError, match="combine masks with"):
        rg.causal and rg.lengths([2])


def test_sums_of_terms():
    assert len(list(sum([rg.recipes.t5(2), rg.recipes.alibi(2)]).terms())) == 2


@pytest.mark.parametrize("far", [1e4, 1e20])
def test_euclidean_with_one_key_far_away(far):
    q, k = torch.randn(2, 1, 1, 8, 4).unbind()
    k[0, 0, 1] = far
    found, plain = (rg.attention(q, k, score=rg.Euclidean(), engine=e).dense() for e in (None, "reference"))
    exact = rg.attention(q.double(), k.double(), score=rg.Euclidean(), engine="reference").dense()
    within_budget(found, plain, exact)


def test_a_column_of_a_long_matrix_is_differentiable_without_its_rows(monkeypatch):
    from regard import matrix

    q = torch.randn(1, 1, 50, 4, dtype=torch.float64, requires_grad=True)
    A = rg.attention(q, q, position=rg.recipes.t5(1).double())
    whole = torch.autograd.grad(A[0, 0, :, 5].square().sum(), q)[0]
    monkeypatch.setattr(matrix, "ROWS", 100)
    column = torch.autograd.grad(A[0, 0, :, 5].square().sum(), q)[0]
    within_budget(column.float(), whole.float(), whole)
