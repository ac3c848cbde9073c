"""Content and pieces of the normal form: their values on a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ...indexing import span_length
from ...normal import Form, Piece, Problem
from ..reference import EXACT_MATCH
from .grids import across_axis, along_axis, is_whole, over_grid, windows
from .places import Span, coordinates, cut, pair_index, see
from .skews import skew


def logits_of(problem: Problem, rows: Span, cols: Span, *, masked: bool = True) -> Tensor:
    """The same for a problem that is ready."""
    shape = *problem.q.shape[:2], span_length(rows), span_length(cols)
    if 0 in shape:
        return problem.q.new_zeros(shape)
    total = content(problem, rows, cols)
    for piece in problem.form.pieces:
        total = total + gated(piece, problem, rows, cols)
    if problem.form.softcap is not None:
        total = problem.form.softcap * torch.tanh(total / problem.form.softcap)
    if masked and problem.form.mask is not None:
        total = total.masked_fill(~see(problem, problem.form.mask, rows, cols), -torch.inf)
    return total


def content(p: Problem, rows: Span, cols: Span) -> Tensor:
    """scale * score(q_i, k_j): [batch, heads, rows, cols]."""
    q, k = p.q[:, :, rows], p.k[:, :, cols]
    if p.form.content[0] == "dot":
        total = (q @ k.mT) * p.scale
    else:
        apart = torch.cdist(q, k.expand(-1, q.shape[1], -1, -1), compute_mode="donot_use_mm_for_euclid_dist")
        if p.form.content[0] == "squared":
            total = -0.5 * p.scale * apart.square()
        else:
            power, met = p.form.content[1], apart == 0
            total = -power * torch.log(apart.masked_fill(met, 1.0))
            total = total.masked_fill(met, EXACT_MATCH if power > 0 else -torch.inf) * p.scale
    return total if p.form.scale < 0 else total * cut(p.operands[p.form.scale], rows, cols)


def axis_value(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor | None:
    """A query term on one axis of a whole grid, before it is spread over the others; None for any other piece."""
    if piece.kind != "query" or piece.gate >= 0 or not isinstance(rows, slice):
        return None
    if not is_whole(piece.space, p, rows, cols) or len(piece.space[1]) != 1:
        return None
    x, table = (p.operands[slot] for slot in piece.slots)
    return along_axis(piece.space[1][0], p, x[:, :, rows] @ table.mT, rows)


def gated(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    value = piece_value(piece, p, rows, cols)
    return value if piece.gate < 0 else value * cut(p.operands[piece.gate], rows, cols)


def piece_value(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    """A piece on a tile, before its gate; broadcasts to [batch, heads, rows, cols]."""
    x = p.operands[piece.slots[0]]
    if piece.kind == "vector":
        return cut(x, rows, cols)
    if piece.kind == "dot":
        return x[:, :, rows] @ p.operands[piece.slots[1]][:, :, cols].mT
    if piece.kind == "slope":
        return -x * distance(piece, p, rows, cols)
    if piece.kind == "network":
        return network(piece, p, rows, cols)[-1]
    if piece.kind == "table":
        if piece.space == ("line",) and isinstance(rows, slice) and isinstance(cols, slice):
            low, width = line_range(p, rows, cols)
            turned = x[..., low : low + width].flip(-1)
            return turned.unfold(-1, span_length(cols), 1).flip(-2) if width else x[..., None, :0]
        if isinstance(rows, slice) and is_whole(piece.space, p, rows, cols) and len(piece.space[1]) == 2:
            return windows(x, p, rows)
        index = pair_index(piece.space, p, rows, cols)
        shape = max(x.shape[0], index.shape[0]), x.shape[1], *index.shape[2:]
        return x.unsqueeze(-2).expand(*shape[:3], -1).gather(-1, index.expand(shape))
    return _meeting_value(piece, p, rows, cols)


def _meeting_value(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    """<x, R[index]> on a tile, for x the query's or the key's."""
    x, table = (p.operands[slot] for slot in piece.slots)
    across = piece.kind == "key"
    if piece.space == ("line",) and isinstance(rows, slice) and isinstance(cols, slice):
        if across:
            return torch.cat([_key_lines(x, table, p, rows, some) for some in key_parts(rows, cols)], dim=-1)
        low, width = line_range(p, rows, cols)
        return skew(x[:, :, rows] @ table[:, :, low : low + width].flip(-2).mT, span_length(cols))
    meeting = x[:, :, cols if across else rows] @ table.mT
    if isinstance(rows, slice) and is_whole(piece.space, p, rows, cols) and len(piece.space[1]) == 1:
        (axis,) = piece.space[1]
        return across_axis(axis, p, meeting, rows).mT if across else over_grid(along_axis(axis, p, meeting, rows), p)
    index = pair_index(piece.space, p, rows, cols)
    index = index.mT if across else index
    shape = (max(meeting.shape[0], index.shape[0]), meeting.shape[1], *index.shape[2:])
    value = meeting.expand(shape[0], -1, -1, -1).gather(-1, index.expand(shape))
    return value.mT if across else value


def _key_lines(x: Tensor, table: Tensor, p: Problem, rows: slice, cols: slice) -> Tensor:
    low, width = line_range(p, rows, cols)
    return skew(x[:, :, cols] @ table[:, :, low : low + width].mT, span_length(rows)).mT


def key_parts(rows: slice, cols: slice) -> list[slice]:
    """Columns a few at a time: a key meets rows + columns - 1 entries of a tile, so square tiles waste least."""
    step = max(64, span_length(rows))
    return [slice(at, min(at + step, cols.stop)) for at in range(cols.start, cols.stop, step)]


def line_range(p: Problem, rows: slice, cols: slice) -> tuple[int, int]:
    """First table entry and number of entries a straight tile meets."""
    height, width = span_length(rows), span_length(cols)
    low = rows.start - (cols.stop - 1) + p.k.shape[2] - 1
    return low, (height + width - 1 if height and width else 0)


def scatter(x: Tensor, index: Tensor, size: int, meets: bool) -> Tensor:
    """x [.., rows, cols] summed into [.., rows, size] by index, with the same bits every time."""
    index = index.expand(x.shape)
    total = x.new_zeros(*x.shape[:-1], size)
    if meets and x.is_cuda:  # sorted, where scatter_add would add in any order
        row = torch.arange(x[..., 0].numel(), device=x.device)[:, None].expand(-1, x.shape[-1])
        flat = total.view(-1, size)
        flat.index_put_((row.reshape(-1), index.reshape(-1)), x.reshape(-1), accumulate=True)
        return total
    return total.scatter_add_(-1, index, x)


def distance(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    """|p_i - p_j| for pairs that have places, else 0: [batch or 1, 1, rows, cols]."""
    (q_place, q_placed), (k_place, k_placed) = coordinates(p, "q", rows), coordinates(p, "k", cols)
    delta = (q_place.unsqueeze(-2) - k_place.unsqueeze(-3)).to(p.q.dtype)
    axis = piece.space[2] if piece.space[0] == "points" else None
    delta = delta if axis is None else delta[..., axis : axis + 1]
    far = delta.abs().squeeze(-1) if delta.shape[-1] == 1 else torch.linalg.vector_norm(delta, dim=-1)
    if q_placed is not None:
        far = far * q_placed.unsqueeze(-1)
    if k_placed is not None:
        far = far * k_placed.unsqueeze(-2)
    return far.unsqueeze(1)


def network(piece: Piece, p: Problem, rows: Span, cols: Span) -> tuple[Tensor, ...]:
    """Every step of bound·sigmoid(W2 relu(W1 x + b1)) read out, on a tile of points (eq. 9)."""
    weight1, bias1, weight2, readout = (p.operands[slot] for slot in piece.slots)
    extent, bound = piece.config
    (q_place, q_placed), (k_place, k_placed) = coordinates(p, "q", rows), coordinates(p, "k", cols)
    axis, sign = piece.space[2:]
    delta = sign * (q_place.unsqueeze(-2) - k_place.unsqueeze(-3)).to(p.q.dtype)
    delta = delta if axis is None else delta[..., axis : axis + 1]
    x = delta * (8 / torch.tensor(extent, dtype=delta.dtype, device=delta.device))
    x = torch.sign(x) * torch.log2(x.abs() + 1) / 3  # [batch or 1, rows, cols, axes]
    hidden = torch.relu(x @ weight1[0, 0].mT + bias1[0, 0])
    raw = (hidden @ weight2[0, :, :, 0].mT).movedim(-1, 1)  # [batch or 1, heads, rows, cols]
    bounded = raw if bound is None else bound * torch.sigmoid(raw)
    seen = torch.ones_like(bounded[:, :1])
    if q_placed is not None:
        seen = seen * q_placed[:, None, :, None]
    if k_placed is not None:
        seen = seen * k_placed[:, None, None, :]
    return x, hidden, bounded, seen, bounded * readout * seen


def meets(space: tuple, form: Form) -> bool:
    """Several pairs of one row may share an entry."""
    if space[0] == "line":
        return False
    return space[0] == "points" or form.q_geometry[2] > 0 or form.k_geometry[2] > 0
