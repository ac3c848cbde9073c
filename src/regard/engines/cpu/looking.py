"""Summaries in one compiled pass over each strip: softmax, and all that was asked for, while a row is in the cache.

A strip's logits come from one matrix product that starts from its bias, as in the backward pass. The states are those
of summaries.py; a summary that look.c does not know is shown strips by the tiled engine, in a pass of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Problem
from ...summaries import Entropy, Heatmap, LogSumExp, Mass, Profile, Received, Share, Summary, Toeplitz, TopK
from .. import tiled
from ..tiled import strips
from ..tiled.strips import columns
from . import native
from .feeding import feed
from .panels import scratch
from .seeing import Seen
from .sources import Layer, blocks_of_heads, is_compiled, own_of, sources_of

FUSED = (TopK, Heatmap, Profile, Received, Entropy, LogSumExp, Toeplitz, Mass, Share)
#: those that add up rows of weights: they need each row's log-sum-exp before
DOWN = (Profile, Received, Toeplitz)
Report = Callable[[int, int], None] | None
#: rows longer than this are looked at so many at a time, in blocks of keys: a strip of few long rows would read all
#: keys again for each of them
LONG, ROWS = 1 << 15, 512


def reduce(
    problem: Problem, summaries: Sequence[Summary], progress: Report = None, lse: Tensor | None = None
) -> list[Any]:
    """One pass over A for the summaries that are compiled, one for the others: each one's state after all of A.

    `lse` is that of the rows, where it is known; then the keys may be a part of them (`Problem.part`).
    """
    ready = is_compiled(problem) and 0 not in problem.sizes
    long = ready and problem.k.shape[2] > LONG
    if not long and not problem.is_part:
        lse = None  # strips hold whole rows: their own softmax is closer than exp(logit - lse)
    if long and lse is None and any(type(summary) in DOWN for summary in summaries):
        lse = _look(problem, [LogSumExp()], None, None)[0][0]
    maps = [_kind(summary, problem) for summary in summaries if type(summary) is Heatmap]
    known = [ready and _fuses(summary, problem, maps[:1]) for summary in summaries]
    states: list[Any] = [None] * len(summaries)
    for fused in (True, False):
        some = [n for n, know in enumerate(known) if know is fused]
        if not some:
            continue
        look = _look if fused else tiled.reduce
        for n, state in zip(some, look(problem, [summaries[n] for n in some], progress, lse), strict=True):
            states[n] = state
    return states


def _kind(summary: Heatmap, problem: Problem) -> tuple[int, int, str]:
    return *summary.cell(problem), summary.of


def _fuses(summary: Summary, problem: Problem, maps: list[tuple[int, int, str]]) -> bool:
    """A pass gives displacements on a line only, and heat maps of one kind."""
    if type(summary) is Heatmap:
        return [_kind(summary, problem)] == maps
    on_line = problem.form.q_geometry[0] == "line"
    return type(summary) in FUSED and (on_line or type(summary) not in (Profile, Toeplitz))


def _look(problem: Problem, summaries: Sequence[Summary], progress: Report, known: Tensor | None) -> list[Any]:
    """States after every strip. Heads with NaN or infinity are left to the plain passes, which know what to do."""
    batch, heads, q_len, k_len = problem.sizes
    states = [summary.start(problem) for summary in summaries]
    fed, sources, rest = sources_of(problem, feed(problem))
    done, odd = 0, torch.zeros(batch, heads, dtype=torch.bool)
    for block in blocks_of_heads(problem):
        layer, own = Layer(problem, fed, sources, rest, block), own_of(problem, block)
        q, k = own(problem.q).flatten(0, 1), own(problem.k).expand(*layer.planes, -1, -1).flatten(0, 1)
        sink = None
        if problem.form.sink >= 0:
            sink = own(problem.operands[problem.form.sink]).expand(layer.planes).contiguous()
        blocked = known is not None or k_len > LONG
        step = ROWS if blocked else max(strips.MIN_ROWS, strips.STRIP // (len(q) * k_len))
        for first in range(0, q_len, step):
            rows = slice(first, min(first + step, q_len))
            ends = None if known is None else known[block.batch, block.heads, rows]
            shown: list[tuple[Seen, dict[str, Tensor]]] = []
            for cols in _blocks(problem, rows, len(q), blocked):
                strip = scratch.take("strip", (*layer.planes, rows.stop - rows.start, cols.stop - cols.start))
                there = layer.bias(strip, rows, cols)
                strip.flatten(0, 1).baddbmm_(q[:, rows], k[:, cols].mT, beta=int(there), alpha=problem.scale)
                seen = Seen(problem, layer.block, rows, cols)
                room, bad = _show(seen, strip, summaries, None if blocked else sink, ends, len(shown))
                shown.append((seen, room))
                if bad:
                    odd[block.batch, block.heads] |= known is not None or not_finite(room["lse"]).any(-1)
            if blocked and ends is None:
                _join([room for _, room in shown], sink)
            for seen, room in shown:
                for n, (summary, state) in enumerate(zip(summaries, states, strict=True)):
                    _deposit(summary, n, state, seen, room)
            alone = ends if sink is None or ends is not None else sink.unsqueeze(-1)
            if not shown and alone is not None:  # these rows see none of the keys
                for state in (state for s, state in zip(summaries, states, strict=True) if type(s) is LogSumExp):
                    state[0][block.batch, block.heads, rows] = alone
            if progress is not None:
                progress(done + len(q) * rows.stop, batch * heads * q_len)
        done += len(q) * q_len
    scratch.clear()
    if not bool(odd.any()):
        return states
    together = any(isinstance(summary, Mass) for summary in summaries)  # a set of pairs may be the whole batch's
    whole = slice(0, batch), slice(0, heads)
    for at in [whole] if together else [tuple(slice(n, n + 1) for n in pair) for pair in odd.nonzero().tolist()]:
        ends = None if known is None else known[at]
        for state, right in zip(states, tiled.reduce(problem.select(*at), summaries, None, ends), strict=True):
            for total, x in zip(state, right, strict=True):
                total[at][odd[at]] = x[odd[at]]
    return states


def not_finite(lse: Tensor) -> Tensor:
    return lse.isnan() | (lse == torch.inf)


def _blocks(problem: Problem, rows: slice, planes: int, blocked: bool) -> Iterator[slice]:
    """The keys that some rows see: all at once, or as many at a time as make a strip."""
    cols = columns(problem, rows)
    width = max(1, cols.stop - cols.start)
    if blocked:
        width = min(width, max(ROWS, strips.STRIP // (planes * (rows.stop - rows.start))))
    for left in range(cols.start, cols.stop, width):
        yield slice(left, min(left + width, cols.stop))


def _join(rooms: list[dict[str, Tensor]], sink: Tensor | None) -> None:
    """From blocks of keys that each had a softmax of their own to one of the whole rows, the sink among them (eq. 19).

    A block's weights are to be multiplied by its share, exp(its log-sum-exp - that of all).
    """
    if not rooms:
        return
    ends = [room["lse"] for room in rooms]
    total = torch.logsumexp(torch.stack(ends), 0)
    if sink is not None:
        total = torch.logaddexp(total, sink.unsqueeze(-1))
    for room, end in zip(rooms, ends, strict=True):
        share = torch.exp(end - total).masked_fill_(end == -torch.inf, 0.0)
        if "entropy" in room:
            room["entropy"].mul_(share).add_(torch.special.entr(share))
        assert not {"received", "profile"} & set(room), "what adds up rows needs their log-sum-exp before"
        for name, x in room.items():
            if name in ("cell_sum", "cell_max"):
                x.mul_(share.unsqueeze(-1))
            elif name.startswith("mass"):
                x.mul_(share)
        room["lse"] = total


def _show(
    seen: Seen, strip: Tensor, summaries: Sequence[Summary], sink: Tensor | None, ends: Tensor | None, number: int
) -> tuple[dict[str, Tensor], bool]:
    """What the summaries want to know of a strip of logits, which is used up; and whether some row is not finite.

    `ends` is the log-sum-exp of the whole rows, where it is known. Else weights are those of this strip by itself.
    """
    planes, rows, cols = strip.shape[:2], *strip.shape[2:]
    threads, kinds = torch.get_num_threads(), {type(summary) for summary in summaries}

    def take(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch.take((name, number), shape, dtype)

    room: dict[str, Tensor] = {"lse": take("lse", (*planes, rows))}
    if Entropy in kinds:
        room["entropy"] = take("entropy", (*planes, rows))
    if Received in kinds:
        room["received"] = take("received", (threads, *planes, cols), torch.float64).zero_()
    for name in ("profile", "squares"):
        if Toeplitz in kinds or (name == "profile" and Profile in kinds):
            room[name] = take(name, (threads, *planes, rows + cols - 1), torch.float64).zero_()
    told = native.Look(sink=native.pointer(sink), known=ends is not None)
    if ends is not None:
        room["lse"].copy_(ends)
    maps = [s for s in summaries if type(s) is Heatmap]
    tops = [s for s in summaries if type(s) is TopK]
    if maps:
        _, wide = maps[0].cell(seen.problem)
        first = seen.cols.start // wide
        told.cell, told.skip = wide, seen.cols.start - first * wide
        told.cells = -(-seen.cols.stop // wide) - first
        for name in _rooms(maps[0]):
            room[name] = take(name, (*planes, rows, told.cells))
    if tops:
        told.top = min(max(s.k for s in tops), cols)
        room["top_logit"] = take("top_logit", (*planes, rows, told.top))
        room["top_index"] = take("top_index", (*planes, rows, told.top), torch.long)
    for name, x in room.items():
        setattr(told, name, native.pointer(x))
    masses = [(n, s) for n, s in enumerate(summaries) if isinstance(s, Mass)]
    shares = (native.Share * max(len(masses), 1))()
    inside = []  # what look.c is only told the address of
    for told_of, (n, summary) in zip(shares, masses, strict=False):
        inside.append(seen.tell(told_of, summary.pairs))
        room[f"mass{n}"] = take(f"mass{n}", (*planes, rows))
        told_of.mass = native.pointer(room[f"mass{n}"])
    told.shares, told.share_count, told.heads = ctypes.addressof(shares), len(masses), planes[1]
    odd = native.call("regard_look", ctypes.byref(told), planes[0] * planes[1], rows, cols, native.pointer(strip))
    return room, odd > 0


def _rooms(summary: Heatmap) -> tuple[str, str]:
    return ("cell_sum", "cell_max") if summary.of == "weights" else ("logit_sum", "logit_max")


def _deposit(summary: Summary, number: int, state: list[Tensor], seen: Seen, room: dict[str, Tensor]) -> None:
    """From what a pass found to a summary's state."""
    (batch, heads), rows, cols = seen.at, seen.rows, seen.cols
    if isinstance(summary, Entropy):
        state[0][batch, heads, rows] += room["entropy"]
    elif isinstance(summary, LogSumExp):
        state[0][batch, heads, rows] = room["lse"]
    elif isinstance(summary, Received):
        state[0][batch, heads, cols] += room["received"].sum(0)
    elif isinstance(summary, Profile):
        sums = room["profile"].sum(0).flip(-1)
        low = rows.start - cols.stop + seen.problem.k.shape[2]
        state[0][batch, heads, low : low + sums.shape[-1]] += sums
    elif isinstance(summary, Toeplitz):
        mass, squares = (room[name].sum(0).flip(-1) for name in ("profile", "squares"))
        pairs, less = seen.by_displacement().flip(-1), 1 / max(seen.problem.k.shape[2], 1)
        low = rows.start - cols.stop + seen.problem.k.shape[2]
        found = mass - less * pairs, pairs, squares - less * (2 * mass - less * pairs)
        for total, x in zip(state, found, strict=True):
            total[batch, heads, low : low + x.shape[-1]] += x
    elif isinstance(summary, Mass):
        at = batch, heads, rows
        state[0][at] += room[f"mass{number}"]
        state[1][at] = torch.maximum(state[1][at], seen.meets(summary.pairs).to(state[1].dtype))
    elif isinstance(summary, TopK):
        count = min(summary.k, room["top_logit"].shape[-1])
        logits, index = (room[name][..., :count] for name in ("top_logit", "top_index"))
        weights = torch.exp(logits - room["lse"].unsqueeze(-1)).masked_fill(index < 0, 0.0)
        index = torch.where(index < 0, index, index + cols.start)
        at = batch, heads, rows
        parts = [logits, weights, index]
        if cols.stop - cols.start < seen.whole:  # a part of the keys: join what the others gave
            parts = summary.merge([total[at] for total in state], parts)
        for total, part in zip(state, parts, strict=True):
            total[at][..., : part.shape[-1]] = part
    else:
        assert isinstance(summary, Heatmap)
        (high, wide), (sums, maxima) = summary.cell(seen.problem), (room[name] for name in _rooms(summary))
        first, cells = cols.start // wide, sums.shape[-1]
        counts = seen.count(wide, cols.start - first * wide, cells).expand(sums.shape)
        top, bottom = rows.start // high, -(-rows.stop // high)
        # the last cells of a strip may go on in the next
        edges = 0, 0, rows.start - top * high, bottom * high - rows.stop
        lines = [torch.nn.functional.pad(x, edges).unflatten(-2, (-1, high)) for x in (sums, counts)]
        peaks = torch.nn.functional.pad(maxima, edges, value=summary.least).unflatten(-2, (-1, high))
        where = (batch, heads, slice(top, bottom), slice(first, first + cells))
        for total, x in zip(state, lines, strict=False):
            total[where] += x.sum(-2)
        state[2][where] = torch.maximum(state[2][where], peaks.amax(-2))
