"""The operators promise what they give: shapes, dtypes and strides, which a compiled graph builds on."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.engines import ops

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "projected": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "cut out": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "one for all heads": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
}


@pytest.mark.parametrize("engine", [None, "tiled"])
@pytest.mark.parametrize("terms", [None, "t5", "shaw"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_lie_as_promised(layout, terms, engine):
    term = None if terms is None else {"t5": rg.recipes.t5(2), "shaw": rg.recipes.shaw(8, 4)}[terms]
    q, k, v = (LAYOUTS[layout](torch.randn(2, 2, 60, 8)) for _ in range(3))
    problem = rg.attention(q, k, position=term)._still
    spec = ops.spec_of(problem, engine)
    operands = [x.detach() for x in problem.operands]
    common = operands, list(problem.starts), problem.scale, spec
    args = problem.q, problem.k, v, *common
    torch.library.opcheck(ops.forward, args, test_utils="test_faketensor")
    out, lse = ops.forward(*args)
    needs = [x.is_floating_point() for x in operands]
    args = problem.q, problem.k, v, out, lse, torch.randn_like(out), lse, operands, needs, *common[1:]
    torch.library.opcheck(ops.backward, args, test_utils="test_faketensor")
