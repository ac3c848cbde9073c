"""Parts of A by the GPU engine under Triton's interpreter, against plain tiles. Run by `test_triton_parts.py`.

As with `triton_interpreted.py`, TRITON_INTERPRET=1 must be set before kernels are imported.
"""

from __future__ import annotations

import pytest
import torch
from inside import watched
from support import all_within_budget

import regard as rg
from regard.engines import tiled
from regard.engines import triton as engine
from regard.summaries import LogSumExp


@pytest.fixture(autouse=True)
def nothing_is_read_elsewhere():
    with watched():
        yield


HIGH, WIDE = 5, 8
LENGTH = HIGH * WIDE


def described(name: str, dtype: torch.dtype) -> rg.AttentionMatrix:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, LENGTH, 16).unbind()
    given = {
        "T5, causal": {"position": rg.recipes.t5(heads=2), "mask": rg.causal, "q_start": 3},
        "slopes": {"position": rg.recipes.alibi(heads=2), "mask": rg.window(9, 4)},
        "clipped, from the query": {"position": rg.recipes.shaw(dim=16, clip=4)},
        "grid": {"position": rg.Static(rg.Cells(HIGH, WIDE), 2), "geometry": rg.Grid(HIGH, WIDE)},
    }[name]
    with torch.no_grad():
        for parameter in given["position"].parameters():
            parameter.normal_()
    given["position"] = given["position"].to(dtype).requires_grad_(False)
    return rg.attention(q.to(dtype), k.to(dtype), **given, engine="tiled")


def looked_at(module, A: rg.AttentionMatrix, rows: slice, cols: slice, known: bool) -> dict[str, torch.Tensor]:
    part = A._still.part(rows, cols)
    summaries = [rg.Heatmap(cell=4), LogSumExp(), rg.Entropy(), rg.TopK(2), rg.Received(), rg.Profile()]
    states = module.reduce(part, summaries, None, A.lse[:, :, rows] if known else None)
    cells, lse, entropy, top, received, profile = states
    found = {"sum": cells[0], "count": cells[1], "max": cells[2], "lse": lse[0], "entropy": entropy[0]}
    return found | {"top": top[1], "received": received[0], "profile": profile[0]}


@pytest.mark.parametrize(
    ("rows", "cols"),
    [(slice(5, 37), slice(3, 36)), (slice(0, 20), slice(20, LENGTH)), (slice(16, LENGTH), slice(0, LENGTH))],
)
@pytest.mark.parametrize("name", ["T5, causal", "slopes", "clipped, from the query", "grid"])
def test_a_part_by_kernels(name, rows, cols):
    A, exact = described(name, torch.float32), described(name, torch.float64)
    assert engine.refuse(A._still.form, "cpu", "float32") is None
    for known in (True, False) if cols == slice(0, LENGTH) else (True,):
        found, plain, right = (
            looked_at(module, x, rows, cols, known) for module, x in ((engine, A), (tiled, A), (tiled, exact))
        )
        all_within_budget(found, plain, right)
