"""Summaries by kernels on a GPU: the shared budget at sizes of many tiles, long rows, and the same bits twice."""

from __future__ import annotations

import copy

import pytest
import torch
from support import within_budget

import regard as rg
from regard.summaries import LogSumExp

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ASKED = (rg.TopK(8), rg.TopK(20), rg.Heatmap(64), rg.Profile(), rg.Received(), rg.Entropy())


def make(kind: str, keys: int, dim: int, dtype: torch.dtype) -> tuple:
    """q of 300 queries at the end of so many keys, k, and a description."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, heads, length, dim, device=DEVICE).to(dtype) for heads, length in ((4, 300), (2, keys)))
    position = None
    if "t5" in kind:
        position = rg.recipes.t5(4).to(DEVICE)
        position.readout.data = torch.randn_like(position.readout).to(dtype).float()
    return q, k, {"position": position, "q_start": keys - 300, "mask": rg.causal if "causal" in kind else None}


def results(q, k, description, engine: str) -> dict[str, torch.Tensor]:
    A = rg.attention(q, k, engine=engine, **description)
    found = {}
    for n, result in enumerate(A.summarize(*ASKED, progress=False)):
        parts = result if isinstance(result, tuple) else (result,)
        found |= {f"{n}.{m}": x for m, x in enumerate(parts) if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("keys, dim", [(1000, 64), (4096, 128), (9000, 64), (9000, 80)])
@pytest.mark.parametrize("kind", ["plain", "t5", "causal", "t5 causal"])
def test_summaries_stay_within_the_budget(kind, keys, dim, dtype):
    """9000 keys are too many for groups of eight: groups are of several tiles there."""
    q, k, description = make(kind, keys, dim, dtype)
    found, plain = results(q, k, description, "triton"), results(q, k, description, "reference")
    again = results(q, k, description, "triton")
    if description["position"] is not None:
        description["position"].double()
    exact = results(q.double(), k.double(), description, "reference")
    for name in exact:
        within_budget(found[name], plain[name], exact[name], name)
        assert torch.equal(found[name], again[name]), f"{name}: other bits the second time"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [slice(30_208, 30_720), slice(59_904, 60_000)], ids=["middle", "end"])
def test_some_rows_of_a_long_head(rows, dtype):
    """As the explorer asks: cells of 256, which come with the rows in half precision, and in a second pass else."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 60_000, 64, device=DEVICE).to(dtype)
    position = rg.recipes.t5(1).requires_grad_(False).to(DEVICE)
    position.readout.data = torch.randn_like(position.readout).to(dtype).float()
    asked = (rg.Heatmap(cell=256), LogSumExp(), rg.Entropy())

    def look(engine: str, kind: torch.dtype, lse: torch.Tensor | None = None) -> list[torch.Tensor]:
        own = copy.deepcopy(position).to(kind)
        A = rg.attention(q.to(kind), k.to(kind), position=own, mask=rg.causal, engine=engine)
        cells, *others = A.window(rows, slice(None), *(asked if lse is None else asked[:2]), lse=lse)
        return [*cells[:3], *others]

    found, plain, exact = look("triton", dtype), look("tiled", dtype), look("tiled", torch.float64)
    assert torch.equal(found[1], exact[1]), "visible pairs"
    for n, (mine, other, right) in enumerate(zip(found, plain, exact, strict=True)):
        within_budget(mine, other, right, str(n))
    lse = found[3]  # given, it is what it is: its rounding is nobody's error
    known = look("triton", dtype, lse), look("tiled", dtype, lse), look("tiled", torch.float64, lse.double())
    for n, (mine, other, right) in enumerate(zip(*known, strict=True)):
        within_budget(mine, other, right, f"log-sum-exp known: {n}")
