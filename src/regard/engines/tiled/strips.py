"""Strips of A: whole visible rows of some heads, few enough to be small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...lower import mask_form
from ...masks import Mask
from ...normal import Problem, each_head, index_size, pick_heads, wide
from ...tables import take
from ..reference import keep
from .grids import is_whole, line_of, window_sums
from .pieces import logits_of, meets, scatter
from .places import indices, pair_index, see
from .skews import diagonal_sums

#: numbers in a strip, as many as stay in a CPU's cache; and how many times as many on a GPU, where each operation on
#: fewer takes as long
STRIP, WIDER = 1 << 21, 8
#: rows in a strip at the least, however long they are
MIN_ROWS = 16


class Block(NamedTuple):
    """Some batch rows and heads of a problem, in the precision it is computed in, bins expanded."""

    problem: Problem
    batch: slice
    heads: slice


def ready(problem: Problem) -> Problem:
    """The problem as tiles want it: computing precision, bins expanded to displacements, shared operands to heads."""
    dtype, heads = wide_type(problem), problem.q.shape[1]
    operands = [x.to(dtype) if x.dtype.is_floating_point else x for x in problem.operands]
    operands = [each_head(x, heads) for x in operands]
    pieces = []
    for piece in problem.form.pieces:
        if piece.lookup >= 0:
            rows = operands[piece.slots[1]][0]
            operands[piece.slots[1]] = take(rows, operands[piece.lookup][:, 0], piece.config[0])
        pieces.append(piece._replace(lookup=-1))
    form = problem.form._replace(pieces=tuple(pieces))
    return problem._replace(
        form=form, q=problem.q.to(dtype), k=each_head(problem.k, heads).to(dtype), operands=operands
    )


class Strip:
    """Whole visible rows of A for some heads, as summaries see them. What several summaries need is computed once."""

    def __init__(self, block: Block, rows: slice, cols: slice, lse: Tensor | None = None):
        self.problem, self.batch, self.heads, self.rows, self.cols = block.problem, block.batch, block.heads, rows, cols
        self.logits = logits_of(block.problem, rows, cols)
        if lse is None:
            self.weights, self.lse = softmax(block.problem, self.logits)
        else:  # known already
            self.weights, self.lse = torch.exp(self.logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)), lse
        self._visible: Tensor | None = None

    @property
    def visible(self) -> Tensor:
        """The mask as 0 and 1, in the weights' dtype."""
        if self._visible is None:
            mask = self.problem.form.mask
            if mask is None:
                self._visible = torch.ones_like(self.weights)
            else:
                seen = see(self.problem, mask, self.rows, self.cols)
                self._visible = seen.to(self.weights.dtype).expand(self.weights.shape)
        return self._visible

    def pairs(self, mask: Mask) -> Tensor:
        """Which pairs of this strip lie in a set: booleans that broadcast to the weights."""
        operands = list(self.problem.operands)
        form = mask_form(mask, operands, None)
        for slot in range(len(self.problem.operands), len(operands)):
            x = operands[slot]
            x = x[self.batch] if x.shape[0] > 1 else x
            operands[slot] = x[:, self.heads] if x.shape[1] > 1 else x
        return see(self.problem._replace(operands=operands), form, self.rows, self.cols)

    def add_by_displacement(self, total: Tensor, x: Tensor) -> None:
        """Add the sums of x over pairs of one displacement to total [batch, heads, n] (n of the whole geometry)."""
        form = self.problem.form
        if not x.numel():
            return
        if form.q_geometry[0] == "line":
            low, sums = diagonal_sums(x, self.rows, self.cols, self.problem.k.shape[2])
            total[self.batch, self.heads, low : low + sums.shape[-1]] += sums
        else:
            space = ("grid", tuple(range(len(form.q_geometry[1]))))
            if is_whole(space, self.problem, self.rows, self.cols) and len(space[1]) == 2:
                at, sums = window_sums(x, self.problem, self.rows)
                total[self.batch, self.heads, at] += sums
                return
            index = pair_index(space, self.problem, self.rows, self.cols)
            n = index_size(space, form, 0, 0)
            total[self.batch, self.heads] += scatter(x, index, n, meets(space, form))[..., : n - 3].sum(-2)


def wide_type(problem: Problem) -> torch.dtype:
    return wide(problem.q.dtype)


def numbers(problem: Problem) -> int:
    """How many a strip has."""
    return STRIP * WIDER if problem.q.is_cuda else STRIP


def parts_of(problem: Problem, per_head: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Batch rows and heads that together fill a strip; one head at a time when a head is larger than that.

    A head counts as its pairs, unless something else is said.
    """
    batch, heads, q_len, k_len = problem.sizes
    per_head, strip = max(q_len * k_len if per_head is None else per_head, 1), numbers(problem)
    h_step = max(1, min(heads, strip // per_head))
    b_step = max(1, min(batch, strip // (per_head * heads))) if h_step == heads else 1
    for b in range(0, batch, b_step):
        for h in range(0, heads, h_step):
            yield slice(b, min(b + b_step, batch)), slice(h, min(h + h_step, heads))


def each_block(problem: Problem) -> Iterator[Block]:
    """The same, each with its problem ready for tiles."""
    for part in parts_of(problem):
        yield Block(ready(problem.select(*part)), *part)


def each_strip(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Rows that fill a strip, with the columns any of them can see."""
    _, _, q_len, k_len = problem.sizes
    step = max(MIN_ROWS, numbers(problem) // max(k_len * problem.q.shape[0] * problem.q.shape[1], 1))
    line = line_of(problem.form)
    step = max(line, step // line * line)
    for first in range(0, q_len, step):
        rows = slice(first, min(first + step, q_len))
        yield rows, columns(problem, rows)


def columns(problem: Problem, rows: slice) -> slice:
    """The keys that any of these rows can see."""
    form, k_len = problem.form, problem.k.shape[2]
    if form.mask is None or form.q_start >= 0 or form.k_start >= 0:
        return slice(0, k_len)
    q_start, k_start = problem.starts
    low, high = key_range(form.mask, rows.start + q_start, rows.stop - 1 + q_start)
    first = 0 if low is None else min(max(low - k_start, 0), k_len)
    last = k_len if high is None else min(max(high - k_start + 1, first), k_len)
    return slice(first, last)


def key_range(mask: tuple, first: int, last: int) -> tuple[int | None, int | None]:
    """Smallest and largest key position that queries at first .. last may see; None where the mask does not say."""
    if mask[0] == "within":
        lo, hi = mask[1:]
        return (None if hi is None else first - hi), (None if lo is None else last - lo)
    if mask[0] == "range" and mask[1] == "k":
        return mask[2], mask[3]
    if mask[0] in ("and", "or"):
        ranges = [key_range(part, first, last) for part in mask[1:]]
        lows, highs = [r[0] for r in ranges], [r[1] for r in ranges]
        if mask[0] == "or":
            return _extreme(min, lows, False), _extreme(max, highs, False)
        return _extreme(max, lows, True), _extreme(min, highs, True)
    return None, None


def _extreme(choose: Callable, bounds: list[int | None], skip: bool) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return choose(known) if known and (skip or len(known) == len(bounds)) else None


def softmax(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of whole rows (eq. 19, 20), with one exponential a number: no gradient flows here."""
    sink = problem.operands[problem.form.sink].unsqueeze(-1) if problem.form.sink >= 0 else None
    if not logits.shape[-1]:
        lse = logits.new_full(logits.shape[:-1], -torch.inf) if sink is None else sink.expand(logits.shape[:-1])
        return logits, lse
    top = logits.amax(-1) if sink is None else torch.maximum(logits.amax(-1), sink)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: weights 0, lse -inf
    weights = torch.exp_(logits - top.unsqueeze(-1))
    total = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink - top)
    weights /= total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return weights, top + torch.log(total)


def drop(p: Problem, x: Tensor, rows: slice, cols: slice) -> Tensor:
    if not p.form.dropout:
        return x
    kept = keep(p.operands[p.form.seeds], indices(rows, x.device), indices(cols, x.device), p.form.dropout)
    return x * kept / (1 - p.form.dropout)


def values_of(v: Tensor, block: Block, heads: int) -> Tensor:
    """The values a block multiplies, one set for all its heads or one for each."""
    own = pick_heads(v[block.batch], block.heads, heads)
    return each_head(own, block.problem.q.shape[1]).to(block.problem.q.dtype)
