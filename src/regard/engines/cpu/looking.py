"""Summaries in one compiled pass over each strip: softmax, and all that was asked for, while a row is in the cache.

A strip's logits come from one matrix product that starts from its bias, as in the backward pass. The states are those
of summaries.py; a summary that native.c does not know is shown strips by the tiled engine, in a pass of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Problem
from ...summaries import Entropy, Heatmap, Profile, Received, Summary, TopK
from .. import tiled
from ..tiled import strips
from ..tiled.places import see
from ..tiled.strips import columns
from . import native
from .feeding import feed
from .sources import Layer, blocks_of_heads, is_compiled, own_of, scratch, sources_of

FUSED = (TopK, Heatmap, Profile, Received, Entropy)
Report = Callable[[int, int], None] | None


def reduce(problem: Problem, summaries: Sequence[Summary], progress: Report = None) -> list[Any]:
    """One pass over A for the summaries that are compiled, one for the others: each one's state after all of A."""
    ready = is_compiled(problem) and 0 not in problem.sizes
    maps = [summary.cells for summary in summaries if type(summary) is Heatmap]
    known = [ready and _fuses(summary, problem, maps[:1]) for summary in summaries]
    states: list[Any] = [None] * len(summaries)
    for fused in (True, False):
        some = [n for n, know in enumerate(known) if know is fused]
        if not some:
            continue
        look = _look if fused else tiled.reduce
        for n, state in zip(some, look(problem, [summaries[n] for n in some], progress), strict=True):
            states[n] = state
    return states


def _fuses(summary: Summary, problem: Problem, cells: list[int]) -> bool:
    """A pass gives displacements on a line only, and heat maps of one size."""
    if type(summary) is Heatmap:
        return [summary.cells] == cells
    return type(summary) in FUSED and (type(summary) is not Profile or problem.form.q_geometry[0] == "line")


def _look(problem: Problem, summaries: Sequence[Summary], progress: Report) -> list[Any]:
    """States after every strip. Batch rows with NaN or infinity are left to the plain passes, which know what to do."""
    batch, heads, q_len, k_len = problem.sizes
    states = [summary.start(problem) for summary in summaries]
    fed, sources, rest = sources_of(problem, feed(problem))
    done, odd = 0, torch.zeros(batch, dtype=torch.bool)
    for block in blocks_of_heads(problem):
        layer, own = Layer(problem, fed, sources, rest, block), own_of(problem, block)
        q, k = own(problem.q).flatten(0, 1), own(problem.k).expand(*layer.planes, -1, -1).flatten(0, 1)
        sink = None if problem.form.sink < 0 else own(problem.operands[problem.form.sink]).expand(layer.planes)
        step = max(strips.MIN_ROWS, strips.STRIP // (len(q) * k_len))
        for first in range(0, q_len, step):
            rows = slice(first, min(first + step, q_len))
            cols = columns(problem, rows)
            if cols.stop > cols.start:
                strip = scratch.take("strip", (*layer.planes, rows.stop - rows.start, cols.stop - cols.start))
                there = layer.bias(strip, rows, cols)
                strip.flatten(0, 1).baddbmm_(q[:, rows], k[:, cols].mT, beta=int(there), alpha=problem.scale)
                seen = _Seen(problem, layer, rows, cols)
                lse = _take_in(seen, strip, summaries, states, None if sink is None else sink.contiguous())
                if lse is not None:
                    odd[block.batch] |= (lse.isnan() | (lse == torch.inf)).any(-1).any(-1)
            done += len(q) * (rows.stop - rows.start)
            if progress is not None:
                progress(done, batch * heads * q_len)
    scratch.clear()
    for row in odd.nonzero().flatten().tolist():
        part = problem.select(slice(row, row + 1), slice(0, heads))
        for state, right in zip(states, tiled.reduce(part, summaries), strict=True):
            for total, x in zip(state, right, strict=True):
                total[row : row + 1] = x
    return states


class _Seen:
    """Where a strip is, and which of its pairs are visible."""

    def __init__(self, problem: Problem, layer: Layer, rows: slice, cols: slice):
        self.problem, self.layer, self.rows, self.cols = problem, layer, rows, cols
        self.at = layer.block.batch, layer.block.heads

    def count(self, cell: int, skip: int, cells: int) -> Tensor:
        """Visible pairs of each row in each cell of columns: broadcasts to [batch, heads, rows, cells]."""
        p, rows, cols = self.problem, self.rows, self.cols
        edges = torch.arange(cells + 1) * cell - skip + cols.start
        edges = edges.clamp(cols.start, cols.stop)
        mask, plain = p.form.mask, p.form.q_start < 0 and p.form.k_start < 0
        if mask is None or (mask[0] == "within" and plain):
            lo, hi = (None, None) if mask is None else mask[1:]
            here = torch.arange(rows.start, rows.stop)[:, None] + p.starts[0] - p.starts[1]  # δ to key 0
            left, right = edges[:-1], edges[1:]
            begin = left if hi is None else torch.maximum(left, here - hi)
            end = right if lo is None else torch.minimum(right, here - lo + 1)
            return (end - begin).clamp(min=0).expand(rows.stop - rows.start, -1).double()
        seen = see(p.select(*self.at), mask, rows, cols).expand(-1, -1, rows.stop - rows.start, cols.stop - cols.start)
        up_to = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
        at = edges - cols.start
        return (up_to[..., at[1:]] - up_to[..., at[:-1]]).double()


def _take_in(
    seen: _Seen, strip: Tensor, summaries: Sequence[Summary], states: list[Any], sink: Tensor | None
) -> Tensor | None:
    """Show a strip of logits to the summaries; it is used up. The log-sum-exp if some row is not finite, else None."""
    planes, rows, cols = strip.shape[:2], *strip.shape[2:]
    threads, kinds = torch.get_num_threads(), {type(summary) for summary in summaries}
    room: dict[str, Tensor] = {"lse": scratch.take("lse", (*planes, rows))}
    if Entropy in kinds:
        room["entropy"] = scratch.take("entropy", (*planes, rows))
    if Received in kinds:
        room["received"] = scratch.take("received", (threads, *planes, cols), torch.float64).zero_()
    if Profile in kinds:
        room["profile"] = scratch.take("profile", (threads, *planes, rows + cols - 1), torch.float64).zero_()
    told = native.Look(sink=native.pointer(sink))
    maps = [s for s in summaries if type(s) is Heatmap]
    tops = [s for s in summaries if type(s) is TopK]
    high = wide = 1
    if maps:
        high, wide = maps[0].cell(seen.problem)
        first = seen.cols.start // wide
        told.cell, told.skip = wide, seen.cols.start - first * wide
        told.cells = -(-seen.cols.stop // wide) - first
        for name in ("cell_sum", "cell_max"):
            room[name] = scratch.take(name, (*planes, rows, told.cells))
    if tops:
        told.top = min(max(s.k for s in tops), cols)
        room["top_logit"] = scratch.take("top_logit", (*planes, rows, told.top))
        room["top_index"] = scratch.take("top_index", (*planes, rows, told.top), torch.long)
    for name, x in room.items():
        setattr(told, name, native.pointer(x))
    odd = native.call("regard_look", ctypes.byref(told), planes[0] * planes[1], rows, cols, native.pointer(strip))
    for summary, state in zip(summaries, states, strict=True):
        _deposit(summary, state, seen, room, (high, wide))
    return room["lse"] if odd else None


def _deposit(
    summary: Summary, state: list[Tensor], seen: _Seen, room: dict[str, Tensor], cell: tuple[int, int]
) -> None:
    """From what a pass found to a summary's state."""
    (batch, heads), rows, cols = seen.at, seen.rows, seen.cols
    if isinstance(summary, Entropy):
        state[0][batch, heads, rows] += room["entropy"]
    elif isinstance(summary, Received):
        state[0][batch, heads, cols] += room["received"].sum(0)
    elif isinstance(summary, Profile):
        sums = room["profile"].sum(0).flip(-1)
        low = rows.start - cols.stop + seen.problem.k.shape[2]
        state[0][batch, heads, low : low + sums.shape[-1]] += sums
    elif isinstance(summary, TopK):
        count = min(summary.k, room["top_logit"].shape[-1])
        logits, index = (room[name][..., :count] for name in ("top_logit", "top_index"))
        weights = torch.exp(logits - room["lse"].unsqueeze(-1)).masked_fill(index < 0, 0.0)
        index = torch.where(index < 0, index, index + cols.start)
        for total, part in zip(state, (logits, weights, index), strict=True):
            total[batch, heads, rows, :count] = part
    else:
        high, wide = cell
        first, cells = cols.start // wide, room["cell_sum"].shape[-1]
        counts = seen.count(wide, cols.start - first * wide, cells).expand(room["cell_sum"].shape)
        top, bottom = rows.start // high, -(-rows.stop // high)
        edges = (
            0,
            0,
            rows.start - top * high,
            bottom * high - rows.stop,
        )  # the last cells of a strip may go on in the next
        lines = [torch.nn.functional.pad(x, edges).unflatten(-2, (-1, high)) for x in (room["cell_sum"], counts)]
        peaks = torch.nn.functional.pad(room["cell_max"], edges).unflatten(-2, (-1, high))
        where = (batch, heads, slice(top, bottom), slice(first, first + cells))
        for total, x in zip(state, lines, strict=False):
            total[where] += x.sum(-2)
        state[2][where] = torch.maximum(state[2][where], peaks.amax(-2))
