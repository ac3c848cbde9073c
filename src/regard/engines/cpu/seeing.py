"""Where a strip lies, which of its pairs are visible and which lie in a set, for the summaries of looking.py.

Most masks show each row an interval of keys (causal, windows, some keys): then two numbers a row say it all, and no
pair is looked at. Others are laid out for the strip, once for all heads that share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...lower import mask_form
from ...masks import Mask
from ...normal import Problem
from ..tiled.places import see
from ..tiled.skews import unskew
from ..tiled.strips import Block, columns
from . import native

Interval = tuple[Tensor, Tensor]  # first column of each row, and the one after the last, both [rows]


class Seen:
    """A strip: some rows and columns of some batch rows and heads."""

    def __init__(self, problem: Problem, block: Block, rows: slice, cols: slice):
        self.problem, self.rows, self.cols = problem, rows, cols
        every = columns(problem, rows)
        self.whole = every.stop - every.start
        self.at = block.batch, block.heads
        self.size = rows.stop - rows.start, cols.stop - cols.start
        self._meets: dict[int, Tensor] = {}

    def interval(self, mask: tuple | None) -> Interval | None:
        """The columns of this strip that a mask shows each row, where they are one interval."""
        p, (count, width) = self.problem, self.size
        begin, end = torch.zeros(count, dtype=torch.long), torch.full((count,), width)
        if mask is None:
            return begin, end
        if p.form.q_start >= 0 or p.form.k_start >= 0:
            return None
        key = p.starts[1] + self.cols.start  # the position of column 0
        for part in mask[1:] if mask[0] == "and" else (mask,):
            if part[0] == "within":
                here = torch.arange(self.rows.start, self.rows.stop) + p.starts[0] - key  # δ to column 0
                low, high = part[1:]
                begin = begin if high is None else torch.maximum(begin, here - high)
                end = end if low is None else torch.minimum(end, here - low + 1)
            elif part[:2] == ("range", "k"):
                begin, end = begin.clamp(min=part[2] - key), end.clamp(max=part[3] - key + 1)
            else:
                return None
        return begin, torch.maximum(begin, end)

    def visible(self) -> Tensor:
        """The mask laid out: booleans that broadcast to the strip. For problems that have one."""
        assert self.problem.form.mask is not None
        return see(self.problem.select(*self.at), self.problem.form.mask, self.rows, self.cols)

    def count(self, cell: int, skip: int, cells: int) -> Tensor:
        """Visible pairs of each row in each cell of columns: broadcasts to [batch, heads, rows, cells]."""
        edges = (torch.arange(cells + 1) * cell - skip).clamp(0, self.size[1])
        shown = self.interval(self.problem.form.mask)
        if shown is not None:
            begin, end = (x[:, None] for x in shown)
            return (torch.minimum(end, edges[1:]) - torch.maximum(begin, edges[:-1])).clamp(min=0).double()
        up_to = torch.nn.functional.pad(self.visible().expand(-1, -1, *self.size).cumsum(-1), (1, 0))
        return (up_to[..., edges[1:]] - up_to[..., edges[:-1]]).double()

    def by_displacement(self) -> Tensor:
        """Visible pairs of each diagonal, that of column - row = 1 - rows first: [.., rows + cols - 1]."""
        p, mask, (count, width) = self.problem, self.problem.form.mask, self.size
        if mask is not None and (mask[0] != "within" or self.interval(mask) is None):
            return unskew(self.visible().expand(-1, -1, *self.size).double()).sum(-2)
        ahead = torch.arange(1 - count, width)
        pairs = (width - ahead).clamp(max=count) - (-ahead).clamp(min=0)
        if mask is not None:
            delta = self.rows.start - self.cols.start + p.starts[0] - p.starts[1] - ahead
            for bound, way in ((mask[1], 1), (mask[2], -1)):
                pairs = pairs if bound is None else pairs.masked_fill(way * delta < way * bound, 0)
        return pairs.double()

    def _set(self, pairs: Mask) -> tuple[Problem, tuple]:
        """This strip's problem with what a set of pairs needs among its operands, and the set as a form."""
        p = self.problem.select(*self.at)
        operands = list(p.operands)
        form = mask_form(pairs, operands, None)
        batch, heads = self.at
        for slot in range(len(p.operands), len(operands)):
            x = operands[slot]
            x = x[batch] if x.shape[0] > 1 else x
            operands[slot] = x[:, heads] if x.shape[1] > 1 else x
        return p._replace(operands=operands), form

    def tell(self, share: native.Share, pairs: Mask) -> object:
        """Says to look.c which pairs lie in a set; hands back what must stay alive until it has looked."""
        p, form = self._set(pairs)
        held, shown = self.interval(form), self.interval(self.problem.form.mask)
        if held is not None:
            share.begin, share.end = (native.pointer(x) for x in held)
            if shown is not None:
                self._meets[id(pairs)] = torch.minimum(held[1], shown[1]) > torch.maximum(held[0], shown[0])
                return held
        inside = see(p, form, self.rows, self.cols).expand(-1, -1, -1, self.size[1]).contiguous()
        seen = inside if self.problem.form.mask is None else inside & self.visible()
        self._meets[id(pairs)] = seen.any(-1)
        if held is None:
            share.inside = native.pointer(inside)
            share.batch, share.head, share.row = (0 if inside.shape[n] == 1 else inside.stride(n) for n in range(3))
        return held, inside

    def meets(self, pairs: Mask) -> Tensor:
        """Which rows see a pair of a set that look.c was told of: booleans that broadcast to [batch, heads, rows]."""
        return self._meets[id(pairs)]
