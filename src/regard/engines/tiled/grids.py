"""Tiles of a whole grid, without an index a pair: all keys of the grid, and queries that are whole lines of it.

A table over displacements on a grid is block-Toeplitz: the bias of a query is a window of the reversed table. A term on
one axis takes as many values a query as that axis has places, and is repeated along the others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...normal import Form, Problem
from .places import Span, coordinates, indices
from .skews import unskew


def line_of(form: Form) -> int:
    """Queries in one line of the grid (all axes but the first); 1 where lines mean nothing."""
    kind, *rest = form.q_geometry
    return math.prod(rest[0][1:]) if kind == "grid" and not rest[1] else 1


def is_whole(space: tuple, p: Problem, rows: Span, cols: Span) -> bool:
    """This tile holds every key of a grid, tokens all have places, and a table over both axes meets whole lines."""
    form = p.form
    if space[0] != "grid" or form.q_geometry[2] or form.k_geometry[2] or form.q_start >= 0 or form.k_start >= 0:
        return False
    if p.starts != (0, 0) or not isinstance(rows, slice) or cols != slice(0, math.prod(form.k_geometry[1])):
        return False
    return len(space[1]) == 1 or (len(space[1]) == 2 == len(form.q_geometry[1]) and _lines(p, rows) is not None)


def _lines(p: Problem, rows: slice) -> tuple[int, int] | None:
    width = p.form.q_geometry[1][1]
    return None if rows.start % width or rows.stop % width else (rows.start // width, rows.stop // width)


def windows(table: Tensor, p: Problem, rows: slice) -> Tensor:
    """A table [.., n + 3] over two axes on a tile of whole lines: [.., rows, all keys]. One copy, of whole windows."""
    (q_high, q_wide), (k_high, k_wide) = p.form.q_geometry[1], p.form.k_geometry[1]
    line = q_wide + k_wide - 1
    body = table[..., :-3].flip(-1).contiguous()
    every = body.as_strided(  # the window that begins at each entry
        (*body.shape[:-1], (q_high - 1) * line + q_wide, k_high, k_wide), (*body.stride()[:-1], 1, line, 1)
    )
    query = indices(rows, table.device)
    begin = (q_high - 1 - query // q_wide) * line + q_wide - 1 - query % q_wide
    return every.index_select(-3, begin).flatten(-2)


def window_sums(x: Tensor, p: Problem, rows: slice) -> tuple[slice, Tensor]:
    """The adjoint of windows: which entries of the table it meets, and the sums of x [.., rows, keys] there."""
    q_wide, (k_high, k_wide) = p.form.q_geometry[1][1], p.form.k_geometry[1]
    first, last = _lines(p, rows) or (0, 0)
    lines = x.unflatten(-1, (k_high, k_wide)).unflatten(-3, (last - first, q_wide)).transpose(-3, -2)
    across = unskew(lines).sum(-2).flip(-1)  # [.., lines, k_high, displacements on the second axis]
    along = unskew(across.movedim(-1, -3)).sum(-2).flip(-1).mT  # [.., displacements on the first, on the second]
    wide = q_wide + k_wide - 1
    return slice(first * wide, first * wide + along.shape[-2] * wide), along.flatten(-2)


def axis_index(axis: int, p: Problem, rows: Span) -> Tensor:
    """The entry of each query and each place of a key on one axis: [rows, places of a key]."""
    size = p.form.k_geometry[1][axis]
    mine = coordinates(p, "q", rows)[0][0, :, axis]
    return mine[:, None] - torch.arange(size, device=p.q.device) + size - 1


def along_axis(axis: int, p: Problem, meeting: Tensor, rows: slice) -> Tensor:
    """<u_i, R> [.., rows, n] of one axis, for each place on it: [.., rows, 1, .., places, .., 1]."""
    index, axes = axis_index(axis, p, rows), len(p.form.k_geometry[1])
    each = meeting.gather(-1, index.expand(*meeting.shape[:-1], -1))
    at = (..., *[None] * axis, slice(None), *[None] * (axes - axis - 1))
    return each[at]


def over_grid(each: Tensor, p: Problem) -> Tensor:
    """Values along axes, for every key of the grid: [.., rows, all keys]."""
    shape = p.form.k_geometry[1]
    return each.expand(*each.shape[: -len(shape)], *shape).flatten(-len(shape))


def axis_sums(axis: int, p: Problem, x: Tensor, rows: slice, size: int) -> Tensor:
    """The adjoint of along_axis: [.., rows, size]."""
    shape = p.form.k_geometry[1]
    others = [a - len(shape) for a in range(len(shape)) if a != axis]
    each = x.unflatten(-1, shape)
    each = each.sum(others) if others else each
    index = axis_index(axis, p, rows).expand(each.shape)
    return each.new_zeros(*each.shape[:-1], size).scatter_add_(-1, index, each)


def key_places(axis: int, p: Problem) -> tuple[Tensor, Tensor]:
    """For one axis: the entry of each key and each place of a query, and the place of each query."""
    size = p.form.q_geometry[1][axis]
    theirs = coordinates(p, "k", slice(0, p.k.shape[2]))[0][0, :, axis]
    entry = torch.arange(size, device=p.q.device) - theirs[:, None] + p.form.k_geometry[1][axis] - 1
    return entry, coordinates(p, "q", slice(0, p.q.shape[2]))[0][0, :, axis]


def across_axis(axis: int, p: Problem, meeting: Tensor, rows: Span) -> Tensor:
    """<w_j, R> [.., keys, n] of one axis, for these queries: [.., keys, rows]."""
    entry, place = key_places(axis, p)
    each = meeting.gather(-1, entry.expand(*meeting.shape[:-1], -1))
    return each.index_select(-1, place[indices(rows, p.q.device)])


def across_axis_sums(axis: int, p: Problem, x: Tensor, rows: Span, size: int) -> Tensor:
    """The adjoint of across_axis: x [.., keys, rows] to [.., keys, size]."""
    entry, place = key_places(axis, p)
    hot = torch.nn.functional.one_hot(place[indices(rows, p.q.device)], entry.shape[-1]).to(x.dtype)
    each = x @ hot
    return each.new_zeros(*each.shape[:-1], size).scatter_add_(-1, entry.expand(each.shape), each)
