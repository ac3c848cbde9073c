"""In which order rows are looked at: those that are done are spread over all, and the nearest stand for the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: thin strips of the sample
THIN = 256


def nearest(there: Tensor) -> Tensor:
    """For each of some places, the nearest at which `there` is true; itself where none is."""
    places, wanted = there.nonzero().flatten(), torch.arange(len(there))
    if not len(places):
        return wanted
    after = torch.searchsorted(places, wanted).clamp(max=len(places) - 1)
    before = (after - 1).clamp(min=0)
    nearer = (wanted - places[before]).abs() < (places[after] - wanted).abs()
    return torch.where(nearer, places[before], places[after])


def order_of(units: int, step: int, thin: int = THIN) -> list[range]:
    """Thin units spread over all, then the gaps between them, both in bit-reversed order.

    Without thin ones, steps: a device that computes thousands of rows at once gains nothing from few.
    """
    if units <= step:
        return [range(units)] if units else []
    if not thin:
        steps = [range(first, min(first + step, units)) for first in range(0, units, step)]
        return [steps[n] for n in bit_reversed(len(steps))]
    count = min(units, thin)
    at = [n * units // count for n in range(count)]
    order = [range(at[n], at[n] + 1) for n in bit_reversed(count)]
    gaps: list[range] = []
    for first, last in zip(at, [*at[1:], units], strict=True):
        gaps += [range(n, min(n + step, last)) for n in range(first + 1, last, step)]
    return order + [gaps[n] for n in bit_reversed(len(gaps))]


def bit_reversed(count: int) -> Iterator[int]:
    """0 .. count - 1, each as far from those before it as halving goes."""
    bits = max(count - 1, 0).bit_length()
    for n in range(1 << bits):
        turned = int(f"{n:0{bits}b}"[::-1], 2) if bits else 0
        if turned < count:
            yield turned
