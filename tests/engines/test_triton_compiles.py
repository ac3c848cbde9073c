"""The GPU engine's smaller kernels go through Triton's compiler, for a GPU that need not be there.

The interpreter runs more than the compiler takes: a name that changes its type in a branch, a generator, a pointer that
may be None. So each kernel is compiled for sm_90 with the arguments that a call gives it.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from test_triton_calls import CASES, SIDE

import regard as rg
from regard import plan
from regard.engines import triton as engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there"),
]

MODULES = ("launch", "leave", "axes")  # where kernels are launched from
SMALL = {
    "T5": {"lay_kernel", "line_kernel", "bins_kernel"},
    "learned": {"lay_kernel", "line_kernel"},
    "Swin": {"lay_kernel", "grid_kernel"},
    "BEiT": {"rows_kernel", "join_kernel", "leave_kernel", "few_kernel", "finish_kernel"},
    "SAM": {"meet_kernel", "content_kernel", "feature_kernel", "entry_kernel"},
}


class Absent:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """The kernels of a call, compiled and not launched: those that are asked for, by name."""
    from triton.runtime import driver

    from regard.engines.triton import launch

    wanted: set[str] = set()
    made: set[str] = set()

    def run(kernel, programs, tiling, *args, **flags):
        name = kernel.fn.__name__
        if name in wanted:
            assert kernel.warmup(*args, **flags, **launch.options_of(tiling), grid=(programs,)).asm["cubin"]
            made.add(name)

    for module in [importlib.import_module(f"regard.engines.triton.{name}") for name in MODULES]:
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(launch, "_called", {})
    monkeypatch.setattr(engine, "refuse", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "_active", Absent())
    plan._plan.cache_clear()
    yield wanted, made
    plan._plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_kernels_are_taken_by_the_compiler(name, dtype, compiled):
    wanted, made = compiled
    wanted |= SMALL[name]
    given = CASES[name]
    size = given["geometry"].size() if "geometry" in given else SIDE * SIDE
    q, k, v = (torch.randn(1, 2, size, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    out = rg.attention(q, k, engine="triton", **given) @ v
    torch.autograd.grad(out, [q, k, v, *given["position"].parameters()], torch.randn(out.shape, dtype=dtype))
    assert made == wanted
