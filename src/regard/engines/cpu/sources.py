"""Where the bias of a block comes from: pieces as sources that native.c reads, and adds gradients to.

On a line and on a grid the table entry of a pair is a sum, one number of the query plus one of the key: with places
counted backwards for queries, t(i, j) = a_i + b_j, and b_j grows by one along a run of keys. A class token has no
place; it gets zones of its own beyond the table (`grid_places`). So one loop serves T5, Swin, BEiT, SAM, Shaw,
Transformer-XL and DeBERTa: the bias of a row is read in runs from a table, from <u_i, R>, or across the <w_j, R>.

Pieces without such a structure (gates, points, networks) are laid out by the tiled engine and added as they are.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...normal import Piece, Problem, each_head, pick_heads
from ..tiled.gradients import Gradients, Totals, deposit
from ..tiled.pieces import gated
from ..tiled.places import cells, see
from ..tiled.strips import Block, parts_of, ready, wide_type
from . import native
from .feeding import Feed, table_gradients
from .panels import BEYOND, multiplied, scratch

#: rows of <u_i, R> at a time, so that they are still in the cache when they are read
ROWS = 256
#: entries of <w_j, R> that are kept for a head; a term with more is laid out by parts
ENTRIES = 2048


class Places(NamedTuple):
    """t(i, j) = rows[i] + base + step * (j - begin), in runs (begin, base, step) of keys."""

    rows: Tensor  # [q_len]
    runs: Tensor  # [n, 3]
    order: Tensor  # the table entry that each t means
    sliding: bool = False  # the runs are of t, not of j: begin, entry, step


@functools.lru_cache(maxsize=64)
def line_places(q_len: int, k_len: int) -> Places:
    back = torch.arange(q_len - 1, -1, -1)
    return Places(back, torch.tensor([[0, 0, 1]]), torch.arange(q_len + k_len - 2, -1, -1))


@functools.lru_cache(maxsize=64)
def grid_places(
    shapes: tuple[tuple[int, ...], ...],
    alone: tuple[int, ...],
    spans: tuple[tuple[int, int], ...],
    axes: tuple[int, ...],
) -> Places:
    """Places on some axes of the grids of queries and keys, for spans of positions; the first may have no place."""
    q_shape, k_shape = shapes
    (q_at, q_placed), (k_at, k_placed) = (
        cells(shape, first, torch.arange(*span)[None]) for shape, first, span in zip(shapes, alone, spans, strict=True)
    )
    a, b, size = torch.zeros_like(q_at[0, :, 0]), torch.zeros_like(k_at[0, :, 0]), 1
    for axis in reversed(axes):
        a = a + (q_shape[axis] - 1 - q_at[0, :, axis]) * size
        b = b + k_at[0, :, axis] * size
        size *= q_shape[axis] + k_shape[axis] - 1
    order = torch.arange(size - 1, -1, -1)
    if q_placed is not None or k_placed is not None:
        # zones: pairs of places, a key alone, a query alone, both alone; sums of the numbers below lie in the right one
        key_alone, most = size, int(a.max())
        query_alone = key_alone + most + 1
        if k_placed is not None:
            b = torch.where(k_placed[0], b, key_alone)
        if q_placed is not None:
            a = torch.where(q_placed[0], a, query_alone)
        zones = (most + 1, size + 1), (key_alone, size), (1, size + 2)
        order = torch.cat([order, *(torch.full((length,), entry) for length, entry in zones)])
    order = torch.nn.functional.pad(order, (0, -len(order) % 16))  # never read; products are quicker with whole vectors
    step = int(axes[-1] == len(k_shape) - 1)  # within a line of the grid
    begin = torch.cat([torch.zeros(1, dtype=torch.long), (b.diff() != step).nonzero().flatten() + 1])
    return Places(a, torch.stack([begin, b[begin], torch.full_like(begin, step)], dim=1), order)


class Source(NamedTuple):
    """One piece as native.c knows it: a table [b, h, n], or u [b, h, q_len, f] (w of the keys) and R [b, h, n, f]."""

    piece: Piece | None  # None: the table of the feed
    by: str  # "table", "query" or "key"
    places: Places
    parts: tuple[Tensor, ...]
    map: Tensor | None = None  # [n] int32: the row of R that each t means; None: R is in the order of t
    smooth: bool = False  # t goes by one from query to query, and from t to t the row of R by 0 or by 1, one way
    fixed: bool = False  # a mask: nothing to learn

    def entries(self, rows: slice, cols: slice) -> slice:
        """The rows of R that a block reads."""
        if self.map is not None or self.places.sliding or len(self.places.runs) > 1:
            return slice(0, self.parts[-1].shape[2])
        back, (begin, base, step) = self.places.rows[rows], self.places.runs[0].tolist()
        ends = [base + step * (at - begin) for at in (cols.start, cols.stop - 1)]
        return slice(int(back.min()) + min(ends), int(back.max()) + max(ends) + 1)

    def told(self, x: Tensor, first: int = 0, thread: int = 0) -> native.Source:
        """What native.c is told, to read from x or to add to it; x begins at this entry."""
        first_axis = -3 if self.by == "table" else -4
        batch, head = (0 if x.shape[n] == 1 else x.stride(n) for n in (first_axis, first_axis + 1))
        row, col = (x.stride(-2) if self.by == side else 0 for side in ("query", "key"))
        places = self.places
        return native.Source(
            native.pointer(x, -first), batch, head, row, col, thread,
            native.pointer(places.rows), native.pointer(places.runs), len(places.runs), places.sliding,
            native.pointer(self.map), self.smooth,
        )  # fmt: skip


def sources_of(problem: Problem, fed: Feed) -> tuple[Feed, list[Source], list[Piece]]:
    """The pieces that native.c can lay out, and those it cannot; a mask of keys becomes a bias, and leaves the feed."""
    found, rest = [], []
    line = line_places(problem.q.shape[2], problem.k.shape[2]) if problem.form.q_geometry[0] == "line" else None
    if fed.table is not None:
        assert line is not None
        found.append(Source(None, "table", line, (fed.table,)))
    for piece in fed.pieces:
        source = _source(problem, piece, line)
        if source is None:
            rest.append(piece)
        else:
            found.append(source)
    if fed.mask is not None and _of_keys(fed.mask):
        seen = see(problem, fed.mask, slice(0, 1), slice(0, problem.k.shape[2]))
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        found.append(Source(None, "table", key_places(problem), (bias[:, :, 0],), fixed=True))
        fed = fed._replace(mask=None)
    return fed, found, rest


def _of_keys(mask: tuple) -> bool:
    """A mask that says the same for every query."""
    if mask[0] in ("and", "or", "not"):
        return all(_of_keys(part) for part in mask[1:])
    return mask[0] in ("before", "range") and mask[1] == "k"


def key_places(p: Problem) -> Places:
    """A bias per key is a table over keys."""
    keys = torch.arange(p.k.shape[2])
    return Places(torch.zeros(p.q.shape[2], dtype=torch.long), torch.tensor([[0, 0, 1]]), keys)


def _source(p: Problem, piece: Piece, line: Places | None) -> Source | None:
    if piece.gate >= 0 or (piece.space and piece.space[0] == "points"):
        return None
    parts = tuple(p.operands[slot] for slot in piece.slots)
    if piece.kind == "vector":
        by_key = parts[0].shape[-2] == 1 < parts[0].shape[-1]
        return Source(piece, "table", key_places(p), (parts[0][:, :, 0],)) if by_key else None
    if piece.kind not in ("table", "query", "key"):
        return None
    bins = None if piece.lookup < 0 else p.operands[piece.lookup]
    if bins is not None and len(bins) > 1:  # rows of the batch that start at different places
        return None
    if line is not None:
        if bins is not None:
            return _binned(piece, line, parts, bins[0, 0].flip(-1))
        source = Source(piece, piece.kind, line, (*parts[:-1], parts[-1].flip(2)), smooth=True)
    else:
        if p.form.q_start >= 0 or p.form.k_start >= 0:
            return None
        (_, q_shape, q_alone), (_, k_shape, k_alone) = p.form.q_geometry, p.form.k_geometry
        spans = tuple((start, start + n) for start, n in zip(p.starts, (p.q.shape[2], p.k.shape[2]), strict=True))
        places = grid_places((q_shape, k_shape), (q_alone, k_alone), spans, piece.space[1])
        if bins is not None:
            places = places._replace(order=bins[0, 0][places.order])
        source = Source(piece, piece.kind, places, (*parts[:-1], parts[-1].index_select(2, places.order)))
    many = source.parts[-1].shape[2]
    return None if (piece.kind == "key" and many > ENTRIES) or many > 1 << 17 else source


def _binned(piece: Piece, line: Places, parts: tuple[Tensor, ...], bins: Tensor) -> Source | None:
    """A term by bins of the displacement: in long runs of t where its bins have such, else through a map."""
    many = parts[1].shape[2]
    if piece.kind == "key" and many > ENTRIES:
        return None
    if piece.kind == "query":
        turned = many - 1 - bins  # bins fall as t grows
        runs = runs_of(turned)
        if runs is not None:
            places = Places(line.rows, runs, torch.arange(many - 1, -1, -1), sliding=True)
            return Source(piece, "query", places, (parts[0], parts[1].flip(2)))
    return Source(piece, piece.kind, line, parts, bins.to(torch.int32), is_smooth(bins))


def is_smooth(entries: Tensor) -> bool:
    """They rise by 0 or 1 from one to the next, or all fall so."""
    steps = entries.diff()
    return any(bool(((way * steps >= 0) & (way * steps <= 1)).all()) for way in (1, -1))


def runs_of(entries: Tensor) -> Tensor | None:
    """Entries as runs (begin, entry, step 0 or 1), when they are long enough to be worth it."""
    steps = entries.diff()
    turns = ((steps[1:] != steps[:-1]).nonzero().flatten() + 2).tolist()
    if len(turns) * 16 > len(entries):
        return None
    found, step = [], -1
    for at in (0, 1, *turns):
        if at < len(entries) and (at == 0 or int(steps[at - 1]) != step):
            step = int(steps[at]) if at < len(steps) else 0
            found.append((at, int(entries[at]), step))
    runs = torch.tensor(found)
    which = torch.searchsorted(runs[:, 0].contiguous(), torch.arange(len(entries)), right=True) - 1
    begin, entry, step_of = runs[which].unbind(1)
    same = torch.equal(entry + step_of * (torch.arange(len(entries)) - begin), entries)
    return runs if same and bool((runs[:, 2] * (1 - runs[:, 2]) == 0).all()) else None


def is_compiled(problem: Problem) -> bool:
    """The compiled passes are there, and compute in this problem's precision."""
    return wide_type(problem) == torch.float32 and native.library() is not None


def blocks_of_heads(problem: Problem, per_head: int | None = None) -> Iterator[Block]:
    """Batch rows and heads that together fill a strip; one head at a time when a head is larger than that."""
    for batch, heads in parts_of(problem, per_head):
        yield Block(problem, batch, heads)


def rows_at_once(problem: Problem, planes: int) -> int:
    """Rows of a block for the fused kernel, which is quickest with a thousand; few where a mask hides much of them."""
    most = ROWS if problem.form.mask is not None else 4 * ROWS
    return min(most, max(ROWS, (1 << 22) // (planes * problem.k.shape[2])))


def own_of(problem: Problem, block: Block) -> Callable[..., Tensor]:
    """What takes a block's part of a tensor [batch or 1, heads or 1, ..], in the computing precision.

    What groups of heads share comes once for each head, unless it may stay shared.
    """
    count, dtype = problem.q.shape[1], wide_type(problem)

    def own(x: Tensor, *, shared: bool = False) -> Tensor:
        x = x[block.batch] if x.shape[0] > 1 else x
        x = pick_heads(x, block.heads, count).to(dtype)
        x = x if shared else each_head(x, block.heads.stop - block.heads.start)
        return x if x.stride(-1) == 1 else x.contiguous()  # native.c reads along the last axis

    return own


class Layer:
    """The bias of some batch rows and heads, and the gradients of what it is made of."""

    def __init__(self, problem: Problem, fed: Feed, sources: list[Source], rest: list[Piece], block: Block):
        self.problem, self.fed, self.rest, self.block = problem, fed, rest, block
        own = own_of(problem, block)
        self.planes = block.batch.stop - block.batch.start, block.heads.stop - block.heads.start
        self.sources = [source._replace(parts=tuple(own(x) for x in source.parts)) for source in sources]
        self.kept: dict[int, Tensor] = {}  # <w_j, R> of all keys
        self.ready = ready(problem.select(block.batch, block.heads)) if rest or fed.mask is not None else None

    def bias(self, out: Tensor, rows: slice, cols: slice) -> bool:
        """Lay the bias of a block into out [b, h, rows, cols]; False when there is none."""
        long = any(source.by == "query" and source.parts[1].shape[2] > 4 * ROWS for source in self.sources)
        step = ROWS if long else rows.stop - rows.start
        for first in range(rows.start, rows.stop, step):
            some = slice(first, min(first + step, rows.stop))
            self._lay(out[:, :, first - rows.start : some.stop - rows.start], some, cols)
        p = self.ready
        if p is None:
            return bool(self.sources)
        if not self.sources:
            out.zero_()
        for piece in self.rest:
            out += gated(piece, p, rows, cols)
        if self.fed.mask is not None:
            out.masked_fill_(~see(p, self.fed.mask, rows, cols), -torch.inf)
        return True

    def _lay(self, out: Tensor, rows: slice, cols: slice) -> None:
        if self.sources:
            told, alive = self.told(rows, cols)
            native.call("regard_lay", native.array(told), len(told), block_of(out, rows, cols), native.pointer(out))
            del alive

    def told(self, rows: slice, cols: slice, later: Collection[int] = ()) -> tuple[list[native.Source], list[Tensor]]:
        """The sources of some rows as native.c is told of them, and what must stay alive until it has read them.

        Those that are to be multiplied `later` have no entries yet.
        """
        told, alive = [], []
        for n, source in enumerate(self.sources):
            first = 0
            if n in later:
                x = source.parts[1]
            elif source.by == "table":
                x = source.parts[0]
            elif source.by == "key":
                if n not in self.kept:
                    w, features = source.parts
                    self.kept[n] = multiplied(("of keys", n), w, features, self.planes)
                x = self.kept[n]
            else:
                entries = source.entries(rows, cols)
                first = entries.start
                u, features = source.parts[0][:, :, rows], source.parts[1][:, :, entries]
                planes = [max(u.shape[axis], features.shape[axis]) for axis in (0, 1)]
                shape = *planes, u.shape[2], features.shape[2]
                x = scratch.take(n, (math.prod(shape) + BEYOND,))[:-BEYOND].view(shape)
                if features.shape[0] == features.shape[1] == 1 and u.is_contiguous():  # one product for all heads
                    torch.mm(u.view(-1, u.shape[-1]), features[0, 0].mT, out=x.view(-1, x.shape[-1]))
                else:
                    torch.matmul(u, features.mT, out=x)
            alive.append(x)
            told.append(source.told(x, first))
        return told, alive


def dropped(problem: Problem, block: Block) -> native.Drop:
    """What dropout leaves of a block's weights (eq. 25), as native.c is told of it."""
    form = problem.form
    if form.seeds < 0 or not form.dropout:
        return native.Drop()
    seeds = problem.operands[form.seeds]
    batch, head = (0 if seeds.shape[axis] == 1 else seeds.stride(axis) for axis in (0, 1))
    shift = block.batch.start * batch + block.heads.start * head
    return native.Drop(native.pointer(seeds, shift), batch, head, int(form.dropout * 2**32), 1 / (1 - form.dropout))


class Pull:
    """Gradients of a layer's sources, gathered over its blocks of rows."""

    def __init__(self, layer: Layer, needs: Sequence[bool]):
        self.layer, self.needs = layer, needs
        sources = [source for source in layer.sources if not source.fixed and self._learns(source)]
        self.sources = sources
        shape = layer.planes
        threads = torch.get_num_threads()
        self.into: list[Tensor] = []  # what native.c adds to: tables by thread, <w_j, R> of all keys, R itself
        for source in sources:
            if source.by == "table":
                size = threads, *shape, source.parts[0].shape[-1]
            elif source.by == "key":
                size = *shape, source.parts[0].shape[2], source.parts[1].shape[2]
            else:
                size = *shape, *source.parts[1].shape[2:]
            self.into.append(torch.zeros(size))
        self.of_queries = {
            n: torch.zeros(*shape, *s.parts[0].shape[2:]) for n, s in enumerate(sources) if s.by == "query"
        }
        self.grads: Gradients | None = None
        if layer.rest:
            assert layer.ready is not None
            mine = {slot for piece in layer.rest for slot in (*piece.slots, piece.gate)}
            self.grads = Gradients(layer.ready, [need and slot in mine for slot, need in enumerate(needs)])

    def _learns(self, source: Source) -> bool:
        pieces = self.layer.fed.tabled if source.piece is None else (source.piece,)
        return any(self.needs[slot] for piece in pieces for slot in piece.slots)

    def row_blocks(self) -> Iterator[slice]:
        """About ROWS at a time, as even as can be: a class token must not be a block of its own."""
        q_len = self.layer.problem.q.shape[2]
        step = -(-q_len // max(1, round(q_len / ROWS)))
        return (slice(first, min(first + step, q_len)) for first in range(0, q_len, step))

    def logits(self, q: Tensor, k: Tensor, rows: slice, cols: slice) -> Tensor:
        """scale * q kᵀ + bias, in one matrix product that starts from the bias."""
        shape = *self.layer.planes, rows.stop - rows.start, cols.stop - cols.start
        out = scratch.take("logits", shape)
        there = self.layer.bias(out, rows, cols)
        out.flatten(0, 1).baddbmm_(q, k.mT, beta=int(there), alpha=self.layer.problem.scale)
        return out

    def weigh(
        self, logits: Tensor, grads: Tensor, ends: Tensor, mass: Tensor, d_ends: Tensor, rows: slice, cols: slice
    ) -> Tensor:
        """In place: logits become weights, their gradient that of the logits, which flows on to the sources."""
        spread: dict[int, tuple[Tensor, slice]] = {}
        told = []
        for n, (source, into) in enumerate(zip(self.sources, self.into, strict=True)):
            if source.by == "query":
                entries = source.entries(rows, cols)
                shape = *into.shape[:2], rows.stop - rows.start, entries.stop - entries.start
                room = scratch.take(n, shape).zero_()
                spread[n] = room, entries
                told.append(source.told(room, entries.start))
            else:
                told.append(source.told(into, thread=into.stride(0) if source.by == "table" else 0))
        by_row = [x.contiguous() for x in (ends, mass, d_ends)]
        inner = torch.empty_like(by_row[0])
        drop = dropped(self.layer.problem, self.layer.block)
        native.call(
            "regard_weigh", native.array(told), len(told), block_of(logits, rows, cols),
            *(native.pointer(x) for x in (logits, grads, *by_row, inner)), ctypes.byref(drop),
        )  # fmt: skip
        for n, (room, entries) in spread.items():
            u, features = self.sources[n].parts
            self.of_queries[n][:, :, rows] = room @ features[:, :, entries]
            self.into[n][:, :, entries] += room.mT @ u[:, :, rows]
        if self.grads is not None:
            self.grads.pull_pieces(self.layer.rest, grads, rows, cols)
        return inner

    def finish(self, totals: Totals) -> None:
        """Hand the gradients of the sources to the operands they were made of."""
        block, heads = self.layer.block, self.layer.problem.q.shape[1]

        def give(slot: int, grad: Tensor) -> None:
            total = totals.operands[slot]
            if total is not None:
                deposit(total, grad, block, heads)

        for n, (source, into) in enumerate(zip(self.sources, self.into, strict=True)):
            piece, order = source.piece, source.places.order
            if piece is None:
                for slot, grad in table_gradients(self.layer.problem, self.layer.fed, into.sum(0).flip(-1), block):
                    give(slot, grad)
                continue
            if source.by == "table":
                grad = into.sum(0) if piece.kind == "table" else into.sum(0).unsqueeze(-2)
                give(piece.slots[0], back_in_order(grad, -1, order, totals.operands[piece.slots[0]]))
                continue
            if source.by == "key":
                w, features = source.parts
                give(piece.slots[0], into @ features)
                into = into.mT @ w
            else:
                give(piece.slots[0], self.of_queries[n])
            give(
                piece.slots[1],
                into if source.map is not None else back_in_order(into, 2, order, totals.operands[piece.slots[1]]),
            )
        if self.grads is not None:
            self.grads.contract(self.layer.problem.select(block.batch, block.heads))
            for slot, pulled in enumerate(self.grads.operands):
                if pulled is not None:
                    give(slot, pulled)


def back_in_order(grad: Tensor, dim: int, order: Tensor, like: Tensor | None) -> Tensor:
    """The adjoint of reading entries in an order; entries that were read several times are added up."""
    if like is None:
        return grad
    shape = list(grad.shape)
    shape[dim] = like.shape[dim]
    if dim == -1:  # many times quicker along the last axis
        return grad.new_zeros(shape).scatter_add_(-1, order.expand(grad.shape), grad)
    return grad.new_zeros(shape).index_add_(dim, order, grad)


def block_of(x: Tensor, rows: slice, cols: slice) -> object:
    """A block [b, h, rows, cols], each head contiguous, as native.c knows it."""
    return ctypes.byref(native.Block(*x.shape, rows.start, cols.start, x.stride(1)))
