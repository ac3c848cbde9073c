"""Summaries of A: exact, from one pass over strips, never storing A (maths.md, eq. 26 to 33).

A summary is start / update / merge / finish. An engine shows it strips (whole rows of weights, with logits, mask and
places); it keeps a state that can be merged with another part's and finished into a result. To add one, subclass
Summary.

A strip offers: weights, logits, visible (0 and 1), lse; batch, heads, rows, cols (slices of the whole);
pairs(mask) and add_by_displacement(total, x).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import Mask, keys, offset
from .normal import Problem, index_size, wide


class Top(NamedTuple):
    """The strongest keys of each query: [.., q_len, k] both; (0, -1) where there are fewer than k."""

    weights: Tensor
    indices: Tensor


class Pooled(NamedTuple):
    """A in cells of rows x columns: sums, visible pairs and maxima, each [.., cells, cells]."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]
    max: Tensor
    cell: tuple[int, int]  # queries and keys in a cell; the last cells may have fewer

    @property
    def mean(self) -> Tensor:
        """Mean weight of the visible pairs of each cell, 0 where none is visible."""
        return self.sum / self.count.clamp(min=1).to(self.sum.dtype)


class Summary:
    """Base of all summaries. A state is a list of tensors whose leading axes are [batch, heads]."""

    #: how `merge` joins each tensor of two states
    joins: tuple[str, ...] = ("sum",)

    def start(self, problem: Problem) -> list[Tensor]:
        """The state before any strip."""
        raise TypeError(f"{type(self).__name__} defines no start")

    def update(self, state: list[Tensor], strip: Any) -> None:
        """Take in one strip, in place."""
        raise TypeError(f"{type(self).__name__} defines no update")

    def merge(self, a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        """The state of two parts of A that share no pair."""
        return [torch.maximum(x, y) if join == "max" else x + y for join, x, y in zip(self.joins, a, b, strict=True)]

    def finish(self, state: list[Tensor], problem: Problem) -> Any:
        """The result, with leading axes [batch, heads]."""
        return state[0]


def _zeros(problem: Problem, *shape: int, fill: float = 0.0) -> Tensor:
    return torch.full((*problem.q.shape[:2], *shape), fill, dtype=wide(problem.q.dtype), device=problem.q.device)


class TopK(Summary):
    """The k largest logits of each query, with their weights; the lower index first on ties."""

    def __init__(self, k: int):
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected a positive integer, found {k!r}")
        self.k = k

    def start(self, problem: Problem) -> list[Tensor]:
        q_len = problem.q.shape[2]
        logits = _zeros(problem, q_len, self.k, fill=-torch.inf)
        return [logits, _zeros(problem, q_len, self.k), torch.full_like(logits, -1, dtype=torch.long)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        count = min(self.k, strip.logits.shape[-1])
        if not count:
            return
        values, index = _top(strip.logits, count)
        none = values == -torch.inf
        weights = strip.weights.gather(-1, index).masked_fill(none, 0.0)
        index = (index + strip.cols.start).masked_fill(none, -1)
        at = strip.batch, strip.heads, strip.rows, slice(0, count)
        for total, part in zip(state, (values, weights, index), strict=True):
            total[at] = part

    def merge(self, a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        logits, weights, index = (torch.cat(pair, dim=-1) for pair in zip(a, b, strict=True))
        late = torch.where(index < 0, torch.iinfo(torch.long).max, index)
        by_index = late.argsort(dim=-1, stable=True)
        order = by_index.gather(-1, logits.gather(-1, by_index).argsort(dim=-1, descending=True, stable=True))
        return [x.gather(-1, order[..., : self.k]) for x in (logits, weights, index)]

    def finish(self, state: list[Tensor], problem: Problem) -> Top:
        return Top(state[1], state[2])


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits, ties by the lower index. NaN counts as the largest, as in PyTorch."""
    values, index = logits.topk(count, dim=-1)
    last = values[..., -1:]
    tied = (logits == last).sum(-1, keepdim=True)
    inside = (values == last).sum(-1, keepdim=True)
    if bool(((tied > inside) & (last > -torch.inf)).any()):  # topk may have left out a lower index of the last value
        order = logits.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return logits.gather(-1, order), order
    by_index = index.argsort(dim=-1)
    values, index = values.gather(-1, by_index), index.gather(-1, by_index)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(-1, order), index.gather(-1, order)


class Heatmap(Summary):
    """A pooled into at most `cells` x `cells` cells of equal size, or into cells of `cell` x `cell`.

    of    "weights", or "logits" for what softmax sees: sums and maxima of the pairs that may meet
    """

    joins = ("sum", "sum", "max")

    def __init__(self, cells: int | None = None, *, cell: int | None = None, of: str = "weights"):
        if (cells is None) == (cell is None):
            raise ValueError(f"Heatmap: expected either cells or cell, found cells={cells!r} and cell={cell!r}")
        for name, x in (("cells", cells), ("cell", cell)):
            if x is not None and (not isinstance(x, int) or x < 1):
                raise ValueError(f"{name}: expected a positive integer, found {x!r}")
        if of not in ("weights", "logits"):
            raise ValueError(f"of: expected 'weights' or 'logits', found {of!r}")
        self.cells, self.size, self.of = cells, cell, of

    def cell(self, problem: Problem) -> tuple[int, int]:
        """Queries and keys in a cell."""
        if self.cells is None:
            assert self.size is not None
            return self.size, self.size
        q_len, k_len = problem.q.shape[2], problem.k.shape[2]
        return max(1, -(-q_len // self.cells)), max(1, -(-k_len // self.cells))

    def start(self, problem: Problem) -> list[Tensor]:
        high, wide = self.cell(problem)
        shape = -(-problem.q.shape[2] // high), -(-problem.k.shape[2] // wide)
        total, count = (_zeros(problem, *shape) for _ in range(2))
        peak = _zeros(problem, *shape, fill=self.least)
        return [total, count.double(), peak]  # counts pass what a float32 can count

    @property
    def least(self) -> float:
        """The maximum of nothing."""
        return 0.0 if self.of == "weights" else -torch.inf

    def update(self, state: list[Tensor], strip: Any) -> None:
        high, wide = self.cell(strip.problem)
        if not strip.weights.numel():
            return
        (top, above, below), (left, before, after) = (
            _cells(span, size) for span, size in ((strip.rows, high), (strip.cols, wide))
        )
        peaks = sums = strip.weights
        if self.of == "logits":
            peaks, sums = strip.logits, strip.logits.masked_fill(strip.visible == 0, 0.0)
        cells = []
        for x, outside in ((sums, 0.0), (strip.visible, 0.0), (peaks, self.least)):
            x = torch.nn.functional.pad(x, (before, after, above, below), value=outside)
            cells.append(x.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high)))
        at = strip.batch, strip.heads, slice(top, top + cells[0].shape[-4]), slice(left, left + cells[0].shape[-2])
        state[0][at] += cells[0].sum((-3, -1))
        state[1][at] += cells[1].sum((-3, -1), dtype=torch.float64)
        state[2][at] = torch.maximum(state[2][at], cells[2].amax((-3, -1)))

    def finish(self, state: list[Tensor], problem: Problem) -> Pooled:
        total, count, peak = state
        return Pooled(total, count, peak, self.cell(problem))


def _cells(span: slice, size: int) -> tuple[int, int, int]:
    """The first cell a span touches, and how far its cells reach beyond it on either side."""
    first, last = span.start // size, -(-span.stop // size)
    return first, span.start - first * size, last * size - span.stop


class Profile(Summary):
    """Mass per displacement, the smallest first: [.., q_len + k_len - 1] on a line, one axis each on a grid."""

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem, _displacements(problem, "Profile"))]

    def update(self, state: list[Tensor], strip: Any) -> None:
        strip.add_by_displacement(state[0], strip.weights)

    def finish(self, state: list[Tensor], problem: Problem) -> Tensor:
        return on_axes(state[0], problem)


def _displacements(problem: Problem, name: str) -> int:
    form = problem.form
    if form.q_geometry[0] == "points":
        raise ValueError(f"{name}: displacements between Points cannot be listed; give coordinates on a Line or Grid")
    if form.q_geometry[0] == "line":
        return index_size(("line",), form, problem.q.shape[2], problem.k.shape[2])
    return index_size(("grid", tuple(range(len(form.q_geometry[1])))), form, 0, 0) - 3


def on_axes(x: Tensor, problem: Problem) -> Tensor:
    """Displacements [.., n] with one axis for each axis of the geometry."""
    form = problem.form
    if form.q_geometry[0] == "line":
        return x
    return x.unflatten(-1, [a + b - 1 for a, b in zip(form.q_geometry[1], form.k_geometry[1], strict=True)])


class Received(Summary):
    """Mass each key receives: [.., k_len]."""

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem, problem.k.shape[2])]

    def update(self, state: list[Tensor], strip: Any) -> None:
        state[0][strip.batch, strip.heads, strip.cols] += strip.weights.sum(-2)


class Entropy(Summary):
    """-sum_j A log A of each query, in nats: [.., q_len]. A sink's share is not part of it."""

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem, problem.q.shape[2])]

    def update(self, state: list[Tensor], strip: Any) -> None:
        state[0][strip.batch, strip.heads, strip.rows] += torch.special.entr(strip.weights).sum(-1)


class LogSumExp(Summary):
    """Log-sum-exp of each query's logits, the sink included: [.., q_len]."""

    joins = ("max",)

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem, problem.q.shape[2], fill=-torch.inf)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        state[0][strip.batch, strip.heads, strip.rows] = strip.lse


class Mass(Summary):
    """Mass of each query on a set of pairs: [.., q_len]."""

    joins = ("sum", "max")

    def __init__(self, pairs: Mask):
        if not isinstance(pairs, Mask) or pairs.scored:
            raise TypeError(f"pairs: expected a mask that depends on positions only, found {pairs!r}")
        self.pairs = pairs

    def start(self, problem: Problem) -> list[Tensor]:
        self.pairs.check(*problem.sizes, _axes(problem))
        return [_zeros(problem, problem.q.shape[2]), _zeros(problem, problem.q.shape[2])]

    def update(self, state: list[Tensor], strip: Any) -> None:
        inside = strip.pairs(self.pairs)
        at = strip.batch, strip.heads, strip.rows
        state[0][at] += (strip.weights * inside).sum(-1)
        if strip.weights.shape[-1]:
            state[1][at] = torch.maximum(state[1][at], (strip.visible * inside).amax(-1))


def _axes(problem: Problem) -> int:
    kind, *rest = problem.form.q_geometry
    return 1 if kind == "line" else len(rest[0]) if kind == "grid" else rest[0]


class Share(Mass):
    """The share of the mass that lies on a set of pairs, among the queries that see such a pair: [batch, heads]."""

    def finish(self, state: list[Tensor], problem: Problem) -> Tensor:
        return (state[0] * state[1]).sum(-1) / state[1].sum(-1).clamp(min=1)


def SelfShare() -> Share:
    """The diagonal: query and key at the same position."""
    return Share(offset(0))


def PreviousShare() -> Share:
    """The key just before the query."""
    return Share(offset(1))


def FirstKeyShare() -> Share:
    """The first key of the sequence, on which many heads rest. Not the sink, which is a logit of its own."""
    return Share(keys(0))


class SinkShare(Summary):
    """The share the sink takes, over all queries: [batch, heads]; 0 without a sink."""

    joins = ("sum", "sum")

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem), _zeros(problem)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        at = strip.batch, strip.heads
        if strip.problem.form.sink >= 0:
            sink = strip.problem.operands[strip.problem.form.sink].unsqueeze(-1)
            state[0][at] += torch.exp(sink - strip.lse).sum(-1)
        state[1][at] += strip.weights.shape[-2]

    def finish(self, state: list[Tensor], problem: Problem) -> Tensor:
        return state[0] / state[1].clamp(min=1)


class Toeplitz(Summary):
    """How much of the variance of A's visible entries their displacement explains (eq. 33): [batch, heads], 0 to 1."""

    joins = ("sum", "sum", "sum")

    def start(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem, _displacements(problem, "Toeplitz")) for _ in range(3)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        # the share is the same for A less a constant, and float32 keeps more of what is left
        off = strip.weights - strip.visible / max(strip.problem.k.shape[2], 1)
        for total, x in zip(state, (off, strip.visible, off.square()), strict=True):
            strip.add_by_displacement(total, x)

    def finish(self, state: list[Tensor], problem: Problem) -> Tensor:
        mass, count, squares = (x.double() for x in state)
        mean = mass.sum(-1).square() / count.sum(-1).clamp(min=1)
        explained = (mass.square() / count.clamp(min=1)).sum(-1) - mean
        all_of_it = squares.sum(-1) - mean
        flat = all_of_it <= 1e-12 * squares.sum(-1)  # no variance: nothing is left unexplained
        return torch.where(flat, 1.0, explained / all_of_it.masked_fill(flat, 1.0)).clamp(0, 1).to(state[0].dtype)
