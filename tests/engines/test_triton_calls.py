"""What the GPU engine does before its kernels: how many are launched, and how many of PyTorch's operations beside them.

Each costs the host more than a small kernel runs, so they are counted, exactly. No GPU is needed: launches are noted
and not made, and all that precedes them is done on the CPU.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from regard import plan
from regard.engines import ops
from regard.engines import triton as engine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

#: operations that run nothing on a device
IDLE = {
    "view", "expand", "transpose", "unsqueeze", "squeeze", "permute", "slice", "select", "detach", "alias", "t",
    "_unsafe_view", "_reshape_alias", "as_strided", "split", "unbind", "empty", "new_empty", "empty_like",
}  # fmt: skip

SIDE = 16  # of a grid
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": rg.causal},
    "T5": {"position": rg.recipes.t5(2)},
    "T5, causal": {"position": rg.recipes.t5(2), "mask": rg.causal},
    "learned": {"position": rg.Static(rg.Cells(SIDE * SIDE), 2)},
    "Swin": {"position": rg.recipes.swin(2, (SIDE, SIDE)), "geometry": rg.Grid(SIDE, SIDE)},
    "BEiT": {"position": rg.recipes.beit(2, (SIDE, SIDE)), "geometry": rg.Grid(SIDE, SIDE, unplaced=1)},
    "SAM": {"position": rg.recipes.sam(16, (SIDE, SIDE)), "geometry": rg.Grid(SIDE, SIDE)},
}
#: launches, and PyTorch's operations, of a forward pass; of a forward and a backward pass
EXPECTED: dict[str, tuple[int, int, int, int]] = {
    "plain": (1, 0, 4, 0),
    "causal": (1, 0, 4, 0),
    "T5": (2, 0, 9, 0),
    "T5, causal": (2, 0, 9, 0),
    "learned": (2, 0, 8, 0),
    "Swin": (2, 0, 8, 0),
    "BEiT": (4, 0, 13, 2),
    "SAM": (2, 0, 10, 2),
}


class Count(TorchDispatchMode):
    """Every operation that would run something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in IDLE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """The kernels that would be launched, by name. The engine believes to be on its device."""
    from regard.engines.triton import launch

    made: list[str] = []

    def tell(kernel, shape, call):  # where a kernel would be compiled and launched for the first time
        made.append(kernel.fn.__name__)
        return SimpleNamespace(name=kernel.fn.__name__)

    monkeypatch.setattr(launch, "_tell", tell)
    monkeypatch.setattr(launch, "start", lambda kernel, *rest: made.append(kernel.name))
    for name in ("_ready", "_called"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(engine, "refuse", lambda *given: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("regard.description._has_nan", lambda x: False)  # looked for on the CPU only
    monkeypatch.setattr(ops, "_nobody_watches", lambda tensors: True)  # the counting itself is not to be seen
    plan._plan.cache_clear()
    yield made
    plan._plan.cache_clear()


def counted(call, launches: list[str]) -> tuple[list[str], Counter[str]]:
    """Kernels and operations of a call, when one like it has been before."""
    call()
    launches.clear()
    with Count() as count:
        call()
    return list(launches), count.seen


@pytest.mark.parametrize("name", CASES)
def test_launches_and_operations_of_a_call(name, launches):
    given = CASES[name]
    size = given["geometry"].size() if "geometry" in given else SIDE * SIDE
    q, k, v = (torch.randn(1, 2, size, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    learned = list(given["position"].parameters()) if "position" in given else []
    d_out = torch.randn(1, 2, size, 16, dtype=torch.bfloat16)

    def forward():
        return rg.attention(q, k, engine="triton", **given) @ v

    def training():
        return torch.autograd.grad(forward(), [q, k, v, *learned], d_out)

    with torch.no_grad():
        kernels, operations = counted(forward, launches)
    there, back = counted(training, launches)
    found = len(kernels), sum(operations.values()), len(there), sum(back.values())
    assert found == EXPECTED[name], f"{kernels} {dict(operations)}; {there} {dict(back)}"


def test_another_length_makes_no_new_kernel(launches, monkeypatch):
    """Kernels are found by what the compiler sees of their arguments, not by lengths; calls by their very numbers."""
    from regard.engines.triton import launch

    term = rg.recipes.t5(2)
    for size in (64, 80, 96, 64, 80):
        x = torch.randn(1, 2, size, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            rg.attention(x, x, position=term, engine="triton", mask=rg.causal) @ x
    assert len(launch._ready) == 2
    assert launches.count("forward_kernel") == 5 == launches.count("lay_kernel")
    monkeypatch.setattr(launch, "CALLS", 1)
    with torch.no_grad():
        rg.attention(x[:, :, :48], x[:, :, :48], position=term, engine="triton", mask=rg.causal) @ x[:, :, :48]
    assert len(launch._called) <= 2  # what is remembered is bounded


def test_a_pointer_that_is_not_aligned_is_another_kernel(launches):
    from regard.engines.triton import launch

    room = torch.randn(1, 2, 64 * 16 + 1, dtype=torch.bfloat16)
    for first in (0, 1):
        x = room[..., first : first + 1024].unflatten(-1, (64, 16))
        with torch.no_grad():
            rg.attention(x, x, engine="triton") @ x
    assert len(launch._ready) == 2


#: launches, and PyTorch's operations, of a summary, without a mask and with one
LOOKS: dict[str, tuple[Any, tuple[int, int], tuple[int, int]]] = {
    "heat map": (rg.Heatmap(16), (3, 1), (5, 1)),
    "received": (rg.Received(), (3, 0), (4, 0)),
    "entropy": (rg.Entropy(), (2, 0), (2, 0)),
    "profile": (rg.Profile(), (4, 0), (4, 0)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_launches_and_operations_of_a_look(name, launches):
    summary, *expected = LOOKS[name]
    q, k = (torch.randn(1, 2, SIDE * SIDE, 16, dtype=torch.bfloat16) for _ in range(2))
    for mask, want in zip((None, rg.causal), expected, strict=True):
        term = rg.recipes.t5(2)
        kernels, operations = counted(
            lambda: rg.attention(q, k, position=term, mask=mask, engine="triton").summarize(summary),  # noqa: B023
            launches,
        )
        assert (len(kernels), sum(operations.values())) == want, f"{mask}: {kernels} {dict(operations)}"


def test_a_launch_whose_numbers_are_known_looks_at_its_pointers(launches):
    """A table that begins between whole vectors is another kernel, though its layout is known."""
    from regard.engines.triton import launch

    x = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    room = torch.randn(2 * 32 + 1)
    term = rg.recipes.t5(2).requires_grad_(False)
    for first in (0, 1, 0, 1):
        term.readout.data = room[first : first + 64].unflatten(0, (2, 32))
        rg.attention(x, x, position=term, engine="triton") @ x
    assert len(launch._ready) == 3 and launches.count("lay_kernel") == 4


def test_launches_that_are_remembered_are_bounded(launches, monkeypatch):
    from regard.engines.triton import launch

    monkeypatch.setattr(launch, "CALLS", 3)
    monkeypatch.setattr(launch, "_starts", {})
    for size in (16, 32, 48, 64):
        x = torch.randn(1, 2, size, 16, dtype=torch.bfloat16, requires_grad=True)
        (rg.attention(x, x, engine="triton") @ x).sum().backward()
    assert len(launch._called) <= 3 and len(launch._starts) <= 3
