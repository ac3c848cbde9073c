"""Cells of a map; and how A is asked for them while kernels are still being compiled.

On a GPU the kernels that fill a map take seconds to compile where they never ran before. Until they are there, a sample
of the rows, and what is zoomed into, comes from plain operations (the tiled engine): they compute the same, nothing has
to be compiled for them, and they are slower only where there are many pairs.
"""

from __future__ import annotations

import copy
import functools
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Heatmap, Summary


class Cells(NamedTuple):
    """Sums, visible pairs and maxima of some cells, [.., rows, columns] each."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]
    max: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], of: str, device: torch.device | None = None) -> Cells:
        """Of nothing yet. On the CPU zeros take no memory until they are written."""
        total, count = (torch.zeros(shape, device=device) for _ in range(2))
        least = 0.0 if of == "weights" else -torch.inf
        return cls(total, count, torch.zeros(shape, device=device) if not least else total.new_full(shape, least))

    def merged(self, times: int) -> Cells:
        """Cells of `times` x `times` of these."""
        if times == 1:
            return self
        rows, cols = self.sum.shape[-2:]
        more = (0, -cols % times, 0, -rows % times)

        def grouped(x: Tensor, fill: float) -> Tensor:
            x = torch.nn.functional.pad(x, more, value=fill) if any(more) else x
            return x.unflatten(-1, (-1, times)).unflatten(-3, (-1, times))

        # along rows first: the memory is read in order
        total, count = (grouped(x, 0.0).sum(-1).sum(-2) for x in (self.sum, self.count))
        return Cells(total, count, grouped(self.max, -torch.inf).amax(-1).amax(-2))

    def part(self, rows: slice, cols: slice) -> Cells:
        return Cells(*(x[..., rows, cols] for x in self))

    def here(self) -> Cells:
        """The same on the CPU, in one copy."""
        return self if self.sum.device.type == "cpu" else Cells(*torch.stack([*self]).cpu().unbind())

    def shown(self) -> tuple[Tensor, Tensor]:
        """Mean and maximum of the visible pairs; NaN where there is none."""
        none = self.count == 0
        mean = (self.sum / self.count.clamp(min=1)).masked_fill(none, torch.nan)
        return mean.float(), self.max.masked_fill(none, torch.nan).float()

    def range(self) -> Tensor:
        """The largest maximum and the smallest positive mean, -inf and inf where there is none: [2]."""
        mean = self.sum / self.count.clamp(min=1)
        smallest = mean.masked_fill(~(mean > 0), torch.inf).amin()
        return torch.stack([self.max.masked_fill(~torch.isfinite(self.max), -torch.inf).amax(), smallest])

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self)


class Sample(NamedTuple):
    """Cells of a few rows, and their first column without the first key."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]
    max: Tensor
    first_sum: Tensor
    first_count: Tensor
    first_max: Tensor


class Sampled(Heatmap):
    """Cells of a few rows, by plain operations: kernels are for Heatmap itself, what is derived from it sees strips."""

    joins = (*Heatmap.joins, *Heatmap.joins)  # type: ignore[assignment]

    def start(self, problem: Any) -> list[Tensor]:
        state = super().start(problem)
        return [*state, *(x[..., :1].clone() for x in state)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        super().update(state[:3], strip)
        _, wide = self.cell(strip.problem)
        cols = slice(max(1, strip.cols.start), min(wide, strip.cols.stop))
        if cols.stop <= cols.start:
            return
        inside = slice(cols.start - strip.cols.start, cols.stop - strip.cols.start)
        rest = {name: getattr(strip, name)[..., inside] for name in ("weights", "logits", "visible")}
        same = {name: getattr(strip, name) for name in ("problem", "batch", "heads", "rows")}
        super().update(state[3:], SimpleNamespace(cols=cols, **rest, **same))

    def finish(self, state: list[Tensor], problem: Any) -> Sample:  # type: ignore[override]
        return Sample(*state)


def plainly(summary: Summary) -> Summary:
    """The same summary by plain operations: of a class of its own, which no kernel is for."""
    made: Any = copy.copy(summary)
    kind: Any = type(summary)
    made.__class__ = _derived(kind)
    return made


@functools.cache
def _derived(kind: Any) -> Any:
    return type(f"Plain{kind.__name__}", (kind,), {"__doc__": kind.__doc__})


#: rows and columns that fill several cells of any level, so that tiles are cut in the same way
MANY = 1024
#: windows that kernels have been asked for in this process, by what they are compiled for
_known: set[tuple] = set()
_lock = threading.Lock()


def kind_of(A: AttentionMatrix, rows: int, cols: int, *summaries: Summary) -> tuple | None:
    """What a window of so many rows and columns is compiled for; None where nothing is."""
    if A.device.type == "cpu" or not A.plan.fused:
        return None
    asked = tuple((type(each).__name__, getattr(each, "size", None), getattr(each, "of", None)) for each in summaries)
    return A.plan.form, A.dtype, str(A.device), tuple(A.shape), alike(rows), alike(cols), asked


def alike(length: int) -> int:
    """What the compiler sees of a length: whether it is a multiple of 16. Of few rows or columns, all of it."""
    return length if length < MANY or length % 16 else MANY


def is_known(kind: tuple | None) -> bool:
    """Whether such a window compiles nothing."""
    with _lock:
        return kind is None or kind in _known


def learn(kind: tuple | None) -> None:
    """Such a window has been computed."""
    with _lock:
        _known.add(kind)  # type: ignore[arg-type]
