"""A lazy A treated as a tensor: sizes, detach, to; and what it says of everything else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import regard as rg


@pytest.fixture
def A():
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    position = rg.recipes.t5(heads=4) + rg.Static(rg.Clipped(2), 4).bind(gate=torch.rand(2, 4, 6, 1))
    return rg.attention(
        q, torch.randn(2, 2, 6, 8), position=position, mask=rg.causal & rg.lengths(torch.tensor([6, 4])), dropout=0.2
    )


def test_sizes(A):
    assert (A.ndim, A.dim(), A.size(), A.size(-1), A.numel(), len(A)) == (4, 4, A.shape, 6, 288, 2)
    assert A[0].ndim == 3 and A[0, 1].size(0) == 6
    assert A[1][None].shape == (1, 4, 6, 6) and torch.equal(A[1][None].dense()[0], A.dense()[1])


def test_detach_shares_everything_but_gradients(A):
    still = A.detach()
    assert A.requires_grad and not still.requires_grad
    assert torch.equal(still.dense(), A.dense()) and not still.dense().requires_grad
    assert still._description.q.data_ptr() == A._description.q.data_ptr()
    v = torch.randn(2, 2, 6, 3, requires_grad=True)
    out = still @ v
    assert torch.equal(out, A @ v)  # the same entries are dropped
    out.sum().backward()
    assert v.grad is not None and A._description.q.grad is None
    assert all(p.grad is None for term in A._description.terms for p in getattr(term, "term", term).parameters())
    with torch.no_grad():
        A._description.q.mul_(2)
    with pytest.raises(RuntimeError, match=r"q: .* changed in place"):
        still.dense()


def test_a_part_detaches_like_the_whole(A):
    assert torch.equal(A[1, 2].detach().dense(), A.dense()[1, 2])


def test_to_another_dtype_keeps_gradients(A):
    wide = A.to(torch.float64)
    assert wide.dtype == torch.float64 and A.double().dtype == torch.float64
    q, k = A._description.q.double(), A._description.k.double()
    want = rg.attention(q, k, position=list(A._description.terms), mask=A._description.mask)
    assert (wide.dense() - want.dense()).abs().max() < 1e-12
    wide[0, 0, 3].square().sum().backward()
    assert A._description.q.grad.abs().max() > 0
    assert A.to("cpu") is A and A.to(torch.float32) is A and A.float() is A and A.cpu() is A
    assert A.bfloat16().dtype == torch.bfloat16 and A.half().dtype == torch.float16
    with pytest.raises(TypeError, match=r"to: weights are floating-point numbers, found torch\.int64"):
        A.to(torch.int64)


def test_detached_matrices_are_copied_and_pickled(A):
    for made in (copy.deepcopy(A.detach()), pickle.loads(pickle.dumps(A.detach()))):
        assert torch.equal(made.dense(), A.dense())


@pytest.mark.parametrize("name", ["mean", "sum", "numpy", "softmax", "transpose", "permute"])
def test_the_rest_says_what_to_call_instead(A, name):
    with pytest.raises(AttributeError, match=rf"A is lazy and has no {name}: multiply it .*A\.dense\(\)"):
        getattr(A, name)
    assert not hasattr(A, name) and not hasattr(A, "nonsense")


def test_functions_of_torch_too(A):
    with pytest.raises(TypeError, match=r"stack does not take a lazy A: .*A\.dense\(\)"):
        torch.stack([A, A])
