"""Where the rows and columns of a tile are: positions, displacements as table entries, and what a mask shows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...features import one_hot_from
from ...normal import Problem

Span = slice | Tensor  # some rows or columns: a slice, or any indices


def indices(span: Span, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, device=device) if isinstance(span, slice) else span


def positions(p: Problem, side: str, span: Span) -> Tensor:
    """Absolute positions: [batch or 1, n]."""
    slot = p.form.q_start if side == "q" else p.form.k_start
    at = (indices(span, p.q.device) + p.starts[0 if side == "q" else 1])[None]
    return at if slot < 0 else at + p.operands[slot]


def coordinates(p: Problem, side: str, span: Span) -> tuple[Tensor, Tensor | None]:
    """Places [batch or 1, n, axes], and which tokens have one (None: all)."""
    geometry = p.form.q_geometry if side == "q" else p.form.k_geometry
    if geometry[0] == "points":
        placed = None if geometry[3] < 0 else p.operands[geometry[3]][:, 0, span]
        return p.operands[geometry[2]][:, 0, span], placed
    at = positions(p, side, span)
    if geometry[0] == "line":
        return at.unsqueeze(-1), None
    return cells(geometry[1], geometry[2], at)


def cells(shape: tuple[int, ...], unplaced: int, at: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same on a grid, for positions [batch or 1, n]."""
    cell, places = (at - unplaced).clamp(min=0), []
    for size in reversed(shape):
        places.append(cell % size)
        cell = cell // size
    return torch.stack(places[::-1], dim=-1), (at >= unplaced if unplaced else None)


def pair_index(space: tuple, p: Problem, rows: Span, cols: Span) -> Tensor:
    """The table entry of each pair: [batch or 1, 1, rows, cols]."""
    if space[0] == "line":
        i, j = indices(rows, p.q.device), indices(cols, p.q.device)
        return (i[:, None] - j + p.k.shape[2] - 1)[None, None]
    (q_place, q_placed), (k_place, k_placed) = coordinates(p, "q", rows), coordinates(p, "k", cols)
    if space[0] == "grid":
        index, size = torch.zeros((), dtype=torch.long, device=p.q.device), 1
        for axis in reversed(space[1]):
            span = p.form.k_geometry[1][axis]
            delta = q_place[..., axis, None] - k_place[..., None, :, axis]
            index = index + (delta + span - 1) * size
            size *= p.form.q_geometry[1][axis] + span - 1
    else:
        _, spec, axis, sign = space
        delta = sign * (q_place.unsqueeze(-2) - k_place.unsqueeze(-3))
        bins = one_hot_from(spec)
        index = bins.index(delta if axis is None else delta[..., axis : axis + 1])
        size = bins.dim
    if q_placed is not None or k_placed is not None:
        no_q = False if q_placed is None else ~q_placed.unsqueeze(-1)
        no_k = False if k_placed is None else ~k_placed.unsqueeze(-2)
        both = torch.as_tensor(no_q, device=index.device) & torch.as_tensor(no_k, device=index.device)
        index = torch.where(torch.as_tensor(no_k, device=index.device), size + 1, index)
        index = torch.where(torch.as_tensor(no_q, device=index.device), size, index)
        index = torch.where(both, size + 2, index)
    return index.unsqueeze(1)


def see(p: Problem, mask: tuple, rows: Span, cols: Span) -> Tensor:
    """Which pairs a mask shows: booleans that broadcast to [batch, heads, rows, cols]."""
    kind = mask[0]
    if kind in ("and", "or"):
        seen = see(p, mask[1], rows, cols)
        for part in mask[2:]:
            more = see(p, part, rows, cols)
            seen = seen & more if kind == "and" else seen | more
        return seen
    if kind == "not":
        return ~see(p, mask[1], rows, cols)
    if kind == "within":
        delta = positions(p, "q", rows).unsqueeze(-1) - positions(p, "k", cols).unsqueeze(-2)
        lo, hi = mask[1:]
        seen = torch.ones_like(delta, dtype=torch.bool) if lo is None else delta >= lo
        return (seen if hi is None else seen & (delta <= hi)).unsqueeze(1)
    if kind == "box":
        (q_place, q_placed), (k_place, k_placed) = coordinates(p, "q", rows), coordinates(p, "k", cols)
        delta = q_place.unsqueeze(-2) - k_place.unsqueeze(-3)
        seen = torch.ones_like(delta[..., 0], dtype=torch.bool)
        for axis, (lo, hi) in enumerate(zip(mask[1], mask[2], strict=True)):
            seen = seen & (delta[..., axis] >= lo) & (delta[..., axis] <= hi)
        if q_placed is not None:
            seen = seen & q_placed.unsqueeze(-1)
        if k_placed is not None:
            seen = seen & k_placed.unsqueeze(-2)
        return seen.unsqueeze(1)
    if kind in ("range", "before"):
        at = positions(p, mask[1], cols if mask[1] == "k" else rows)
        seen = (at < p.operands[mask[2]]) if kind == "before" else (at >= mask[2]) & (at <= mask[3])
        return seen[:, None, None, :] if mask[1] == "k" else seen[:, None, :, None]
    if kind == "same":
        q_ids, k_ids = p.operands[mask[1]][..., rows].unsqueeze(-1), p.operands[mask[2]][..., cols].unsqueeze(-2)
        return (q_ids == k_ids) & (q_ids >= 0)
    if kind == "dense":
        return cut(p.operands[mask[1]], rows, cols)
    assert kind == "chosen", f"unknown mask {mask}"
    chosen, over = p.operands[mask[1]], mask[2]
    mine, other = (cols, rows) if over else (rows, cols)  # over: rows were keys when the keys were chosen
    count = p.q.shape[2] if over else p.k.shape[2]
    picked = chosen[:, :, mine]
    seen = torch.zeros(*picked.shape[:-1], count + 1, dtype=torch.bool, device=picked.device)
    seen = seen.scatter(-1, picked.masked_fill(picked < 0, count), True)[..., :count][..., other]
    return seen.mT if over else seen


def cut(x: Tensor, rows: Span, cols: Span) -> Tensor:
    """The part of [.., q_len or 1, k_len or 1] that belongs to a tile."""
    x = x if x.shape[-2] == 1 else x[:, :, rows]
    return x if x.shape[-1] == 1 else x[..., cols]
