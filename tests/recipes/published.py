"""What the tests of the recipes share: the models' own attention modules, run as they are, and compared with A.

The published code is built from small configurations with random weights. Its q, k and v are taken where it makes them,
its parameters are given to our recipe, and then A must be its matrix and A @ v its mixture. Both sides are float64 and
add in a different order, so a plain bound says it all: there is no lower precision here to have a budget for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

import regard as rg

#: None is what the plan chooses by itself
ENGINES = (None, "tiled", "reference")
#: relative to the largest value; float64 rounds at 2e-16
CLOSE = 1e-10


def close(found: Tensor, expected: Tensor, what: str = "result") -> None:
    assert found.dtype == expected.dtype == torch.float64, f"{what}: {found.dtype} and {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= CLOSE * largest, f"{what}: differs by {error:.3e}, the largest value is {largest:.3e}"


def agree(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, context: Tensor, rows: Tensor | None = None, **how) -> None:
    """A is the published matrix and A @ v the published mixture, on every engine.

    q, k, v: [batch, heads, length, dim]; weights: [batch, heads, q_len, k_len]; context: [batch, q_len, heads * dim],
    before the output projection; rows: [batch, q_len], the queries that count (all when None); how: for `attention`.
    """
    keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if rows is None else rows
    for engine in ENGINES:
        A = rg.attention(q, k, engine=engine, **how)
        close(A.dense().transpose(1, 2)[keep], weights.transpose(1, 2)[keep], f"A of engine {engine}")
        close(merge(A @ v)[keep], context[keep], f"A @ v of engine {engine}")


def same_gradients(q: Tensor, k: Tensor, v: Tensor, context: Tensor, ours: list, theirs: list, **how) -> None:
    """The gradients of paired parameters through A @ v and through the published module are the same.

    ours: our parameters, each as (parameter, from the gradient's shape to theirs) or the very same tensor;
    theirs: the published ones.
    """
    seed = torch.randn_like(context)
    expected = torch.autograd.grad(context, theirs, seed, retain_graph=True)
    ours = [x if isinstance(x, tuple) else (x, lambda g: g) for x in ours]
    for engine in ENGINES:
        out = merge(rg.attention(q, k, engine=engine, **how) @ v)
        found = torch.autograd.grad(out, [parameter for parameter, _ in ours], seed, retain_graph=True)
        for number, ((_, turn), got, want) in enumerate(zip(ours, found, expected, strict=True)):
            close(turn(got), want, f"gradient {number} of engine {engine}")


def split(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * dim] to [batch, heads, length, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[batch, heads, length, dim] to [batch, length, heads * dim]."""
    return x.transpose(1, 2).flatten(-2)


class Taps:
    """What flows through some submodules while a model runs: `outs[name]` leaves it, `ins[name]` enters it."""

    def __init__(self, **modules: nn.Module):
        self.ins: dict[str, Tensor] = {}
        self.outs: dict[str, Tensor] = {}
        for name, module in modules.items():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str):
        def hook(module: nn.Module, given: tuple, result: Tensor) -> None:
            self.ins[name], self.outs[name] = given[0], result

        return hook


@contextmanager
def wide() -> Iterator[None]:
    """Run published code without its casts to float32: they would hide all but seven digits.

    Many modules take the softmax in float32, or make sinusoids and coordinates with `.float()`. Nothing else changes.
    Not for T5 or DeBERTa: their buckets are *defined* by logarithms rounded to float32.
    """
    softmax = nn.functional.softmax
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim)),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def randomise(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Weights large enough that every part of the score shows (many published biases start at zero)."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, std)
    return module.double().eval()


def load(parameter: Tensor, values: Tensor) -> None:
    """Give a recipe's parameter a published one's values."""
    assert parameter.shape == values.shape, f"found {tuple(values.shape)}, expected {tuple(parameter.shape)}"
    with torch.no_grad():
        parameter.copy_(values)
