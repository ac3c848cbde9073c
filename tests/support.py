"""What tests share: the one error budget, and buffers that start as NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def within_budget(found: Tensor, plain: Tensor, exact: Tensor, what: str = "result") -> None:
    """The error of `found` against float64 is at most twice plain PyTorch's in the same dtype, plus one rounding.

    found: by the code under test; plain: by dense PyTorch in the same dtype; exact: by dense PyTorch in float64.
    """
    all_within_budget({what: found}, {what: plain}, {what: exact})


def all_within_budget(
    found: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    nudged: dict[str, Tensor] | None = None,
) -> None:
    """The same for several results of one kind, which share plain PyTorch's largest error.

    In a tensor of a few numbers plain PyTorch may be right to the last bit by luck. So property tests on tiny problems
    also measure what one rounding is worth: `nudged` is the float64 result for inputs moved by one rounding each.
    """
    plain_error = max((_error(plain[name], exact[name], name) for name in exact), default=0.0)
    moved = max((_error(nudged[name], exact[name], name) for name in exact), default=0.0) if nudged else 0.0
    for name in exact:
        rounding = torch.finfo(found[name].dtype).eps * max(_largest(x) for x in exact.values())
        error = _error(found[name], exact[name], name)
        assert error <= 2 * plain_error + max(rounding, moved), (
            f"{name}: error {error:.3e}, plain PyTorch's {plain_error:.3e}, one rounding {max(rounding, moved):.3e}"
        )


def _error(found: Tensor, exact: Tensor, what: str) -> float:
    """The largest distance from the exact result; infinities and NaNs must stand in the same places."""
    assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
    found, exact = found.detach().double(), exact.detach().double()
    odd = ~torch.isfinite(exact)
    same = torch.equal(found[odd].nan_to_num(nan=123.0), exact[odd].nan_to_num(nan=123.0))
    assert same and bool(torch.isfinite(found[~odd]).all()), f"{what}: infinities or NaNs differ"
    return _largest(torch.where(odd, 0.0, found - exact))


def _largest(x: Tensor) -> float:
    x = x.detach().double()
    return x[torch.isfinite(x)].abs().max().item() if bool(torch.isfinite(x).any()) else 0.0


class Largest(TorchDispatchMode):
    """Watches every operation and remembers the largest tensor made, in numbers.

    An operator's inside is not seen: call the engine's functions themselves.
    """

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Every uninitialised tensor starts as NaN (or as the largest integer), so that reading one shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
