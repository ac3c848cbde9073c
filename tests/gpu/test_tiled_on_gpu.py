"""The engine that takes everything, on a GPU: the same budget, the same bits, and inside compiled models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import regard as rg

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from comparing import KINDS, compare, plain_case, results

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("geometry, shape, terms, mask", KINDS)
def test_every_kind_stays_within_the_budget(geometry, shape, terms, mask):
    case = plain_case(geometry=geometry, q_shape=shape, k_shape=shape, terms=terms, mask=mask)
    compare(case, torch.float32, None, "cuda")


@pytest.mark.parametrize("score", ["cosine", "euclidean", "inverse"])
def test_every_score_stays_within_the_budget(score):
    compare(
        plain_case(score=score, scale="tensor", terms=("rotary",), softcap=True, sink=True), torch.float32, None, "cuda"
    )


@pytest.mark.parametrize("geometry, terms", [("line", ("t5", "shaw", "key table")), ("places", ("per axis query",))])
def test_gradients_have_the_same_bits_every_time(geometry, terms):
    torch.use_deterministic_algorithms(False)
    case = plain_case(geometry=geometry, q_shape=(300,), k_shape=(300,), terms=terms)
    first, second = (results(case, torch.float32, None, device="cuda") for _ in range(2))
    for name in first:
        if "gradient of out" in name or "gradient of lse" in name:
            assert torch.equal(first[name], second[name]), name


def test_compiled_in_half_precision():
    term = (rg.recipes.t5(4) + rg.recipes.shaw(16, 8)).cuda()
    q, k, v = (torch.randn(2, 4, 200, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def layer(q, k, v):
        return rg.attention(q, k, position=term, mask=rg.causal) @ v

    found, expected = torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v)
    torch.testing.assert_close(found, expected)
    leaves = [q, k, v, *term.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad(y.float().square().sum(), leaves) for y in (found, expected)))


def test_summaries_on_the_gpu_are_those_of_the_cpu():
    q, k = (torch.randn(1, 2, 700, 16) for _ in range(2))
    term = rg.recipes.t5(2)
    here = rg.attention(q, k, position=term, mask=rg.causal)
    asked = (rg.TopK(4), rg.Heatmap(32), rg.Profile(), rg.Received(), rg.Entropy(), rg.Toeplitz())
    found = here.summarize(*asked)
    there = rg.attention(q.cuda(), k.cuda(), position=term.cuda(), mask=rg.causal).summarize(*asked)
    for a, b in zip(found, there, strict=True):
        for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (a, b)), strict=True):
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(x, y.cpu(), rtol=1e-4, atol=1e-5)
