"""The explorer's maps on a GPU: the tiles are A's, q and k are moved once, and a trace is opened there."""

from __future__ import annotations

import pytest
import torch
from support import within_budget

import regard as rg
from regard.engines.triton import launch
from regard.views import atlas as atlas_module
from regard.views import cells as cells_module
from regard.views import pools as pools_module
from regard.views.atlas import Atlas
from regard.views.server.doing import Doing
from regard.views.server.sources import Source, Sources, trace_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def matrix(dtype: torch.dtype = torch.float32, length: int = 3000) -> rg.AttentionMatrix:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, length, 64).to(dtype)
    position = rg.recipes.t5(heads=2).requires_grad_(False)
    position.readout.normal_()
    return rg.attention(q, k, position=position.to(dtype), mask=rg.causal)


@pytest.mark.parametrize("few", [0, 1 << 24], ids=["kernels", "plain"])
@pytest.mark.parametrize("cell", [1, 4, 16, 32, 64])
def test_tiles_of_every_kind_of_level_are_those_of_A(cell, few, monkeypatch):
    monkeypatch.setattr(atlas_module, "FEW", few)  # the finer levels by kernels as well
    monkeypatch.setattr(pools_module, "STEP_DEVICE", 1000 * 3000)  # three steps, the last of them ragged
    A, exact = matrix()[0, 1], matrix(torch.float64)[0, 1]
    atlas = Atlas(A.to("cuda"))
    atlas.levels = [1, 4, 16, 32, 64]
    while atlas.step():
        pass
    assert atlas.exact and atlas.A.plan.engine == "triton" and len(atlas.weights.order) > 2
    assert all(x.is_cuda for x in (*atlas.weights.cells, atlas.weights.lse))
    for row, col in ((0, 0), (len(range(0, 3000, 256 * cell)) - 1, 0)):
        tile = atlas.tile(cell, row, col)
        span = slice(row * 256 * cell, min((row + 1) * 256 * cell, 3000)), slice(0, min(256 * cell, 3000))
        plain, right = (each.to(x)[span] for each, x in ((A, torch.float32), (exact, torch.float64)))
        within_budget(tile.mean.nan_to_num(), pooled(plain, span, cell).float(), pooled(right, span, cell))


def test_a_first_picture_compiles_nothing(monkeypatch):
    monkeypatch.setattr(cells_module, "_known", set())
    begun, run = [], launch.run
    monkeypatch.setattr(
        "regard.engines.triton.summaries.run", lambda kernel, *a, **b: (begun.append(kernel), run(kernel, *a, **b))
    )
    atlas = Atlas(matrix(length=20_000)[0, 1].to("cuda"))
    top = atlas.levels[-1]
    first, fine = atlas.tile(top, 0, 0), atlas.tile(1, 40, 3)
    assert not begun and not first.exact and fine.exact
    while atlas.step():
        pass
    exact = atlas.tile(top, 0, 0)
    assert begun and exact.exact
    plain, right = (matrix(x, length=20_000)[0, 1, 10240:10496, 768:1024] for x in (torch.float32, torch.float64))
    within_budget(fine.mean, plain, right)
    near = (first.mean[1:-1, 0] / exact.mean[1:-1, 0]).log().abs()  # sixteen rows of some hundred
    assert near.median() < 0.5


def pooled(x: torch.Tensor, span: tuple[slice, slice], cell: int) -> torch.Tensor:
    """Means of the visible pairs of each cell."""
    rows, cols = (torch.arange(each.start, each.stop) for each in span)
    seen = (cols <= rows[:, None]).to(x)
    more = (0, -x.shape[1] % cell, 0, -x.shape[0] % cell)
    total, count = (
        torch.nn.functional.pad(y, more).unflatten(1, (-1, cell)).unflatten(0, (-1, cell)).sum((1, 3))
        for y in (x * seen, seen)
    )
    return total / count.clamp(min=1)


def test_a_trace_is_moved_once_for_all_its_heads():
    sources = Sources(device="cuda")
    source = sources.add("x", trace_of(matrix()))
    (seen,) = source.seen
    before = torch.cuda.memory_allocated()
    whole = seen.matrix()
    heads = [seen.matrix(n) for n in (0, 1)]
    assert all(A.device.type == "cuda" for A in (whole, *heads))
    q = 3000 * 64 * 4 * 2
    assert torch.cuda.memory_allocated() - before < 3 * q  # q and k of both heads, and little besides
    within_budget(heads[1][100:110, :].cpu(), matrix()[0, 1, 100:110, :], matrix(torch.float64)[0, 1, 100:110, :])
    sources.close()


def test_what_heads_do_comes_from_a_sample_there_too():
    source = Source("1", "x", "trace")
    source.fill(trace_of(matrix(length=20_000)), device=torch.device("cuda"))
    doing = Doing(source.seen[0])
    while not doing.sampled:
        assert doing.step()
    told = doing.told()
    assert told is not None and 0 < told[0]["of_rows"] < 0.2
    entropy = matrix(length=20_000).to("cuda")[0, 0].entropy().mean().item()
    assert told[0]["entropy"] == pytest.approx(entropy, rel=0.05)
