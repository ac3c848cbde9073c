"""Plain PyTorch tiles: every description, any device, forward and backward; the engine that always works.

Work goes by strips: some rows of one or more heads against all the keys they can see. A strip is small (STRIP numbers),
so memory is linear in N, and it holds whole rows, so one pass gives exact weights to the product and to every summary.
Along a line, `skew` views turn "one number a displacement" into tiles and back without an index a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..features import one_hot_from
from ..lower import mask_form
from ..masks import Mask
from ..normal import Form, Piece, Problem, index_size, pick_heads
from ..tables import take, take_backward
from .reference import EXACT_MATCH, keep, normalise

#: numbers in a strip
STRIP = 1 << 21

Span = slice | Tensor  # some rows or columns: a slice, or any indices


def refuse(form: Form, device: str, dtype: str) -> str | None:
    """Why this engine cannot run a form: it takes them all."""
    return None


class Block(NamedTuple):
    """Some batch rows and heads of a problem, in the precision it is computed in, bins expanded."""

    problem: Problem
    batch: slice
    heads: slice


# The four functions


def forward(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp (eq. 19, 20): [batch, heads, q_len, v_dim] and [batch, heads, q_len]."""
    batch, heads, q_len, _ = problem.sizes
    out = v.new_empty(batch, heads, q_len, v.shape[-1])
    lse = problem.q.new_empty(batch, heads, q_len, dtype=wide_type(problem))
    for block in blocks(problem):
        values = _values(v, block, heads)
        for rows, cols in strips(block.problem):
            logits = logits_of(block.problem, rows, cols)
            weights, total = softmax(block.problem, logits)
            lse[block.batch, block.heads, rows] = total
            weights = _drop(block.problem, weights, rows, cols)
            out[block.batch, block.heads, rows] = (weights @ values[:, :, cols]).to(out.dtype)
    return out, lse


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of the operands asked for (eq. 22 to 24), from recomputed strips."""
    heads = problem.sizes[1]
    wide = wide_type(problem)
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (problem.q, problem.k, v))
    d_operands = [
        torch.zeros_like(x, dtype=wide) if need else None for x, need in zip(problem.operands, needs, strict=True)
    ]
    for block in blocks(problem):
        p, values = block.problem, _values(v, block, heads)
        grads = _Gradients(p, needs)
        b_v = torch.zeros_like(values)
        for rows, cols in strips(p):
            logits = logits_of(p, rows, cols, masked=False)
            visible = None if p.form.mask is None else see(p, p.form.mask, rows, cols)
            ends = _finite(lse[block.batch, block.heads, rows].to(wide)).unsqueeze(-1)
            shown = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
            weights = torch.exp(shown - ends)
            g = d_out[block.batch, block.heads, rows].to(wide)
            _accumulate(b_v[:, :, cols], _drop(p, weights, rows, cols).mT @ g)
            inner = (g * out[block.batch, block.heads, rows].to(wide)).sum(-1, keepdim=True)
            inner = inner - d_lse[block.batch, block.heads, rows].to(wide).unsqueeze(-1)
            d_weights = _drop(p, g @ values[:, :, cols].mT, rows, cols)
            d_logits = weights * (d_weights - inner)
            if visible is not None:
                d_logits = d_logits.masked_fill(~visible, 0.0)
            if p.form.sink >= 0:
                sink = p.operands[p.form.sink].unsqueeze(-1)
                share = torch.exp(sink - ends.squeeze(-1))
                grads.add(p.form.sink, (-share * inner.squeeze(-1)).sum(-1))
            if p.form.softcap is not None:
                d_logits = d_logits * (1 - (logits / p.form.softcap).square())
            grads.pull(d_logits, rows, cols)
        _deposit(d_q, grads.q, block, heads)
        _deposit(d_k, grads.k, block, heads)
        _deposit(d_v, b_v, block, heads)
        grads.contract(problem.select(block.batch, block.heads))
        for total, part in zip(d_operands, grads.operands, strict=True):
            if total is not None and part is not None:
                _deposit(total, part, block, heads)
    cast = [None if g is None else g.to(x.dtype) for g, x in zip(d_operands, problem.operands, strict=True)]
    return d_q.to(problem.q.dtype), d_k.to(problem.k.dtype), d_v.to(v.dtype), cast


def tile(problem: Problem, rows: Span, cols: Span) -> Tensor:
    """Logits of some rows and columns, -inf where masked: what softmax sees (eq. 18). Differentiable as it stands."""
    return logits_of(ready(problem), rows, cols)


def logits_of(problem: Problem, rows: Span, cols: Span, *, masked: bool = True) -> Tensor:
    """The same for a problem that is ready."""
    total = content(problem, rows, cols)
    for piece in problem.form.pieces:
        total = total + gated(piece, problem, rows, cols)
    if problem.form.softcap is not None:
        total = problem.form.softcap * torch.tanh(total / problem.form.softcap)
    if masked and problem.form.mask is not None:
        total = total.masked_fill(~see(problem, problem.form.mask, rows, cols), -torch.inf)
    return total


def reduce(
    problem: Problem, summaries: Sequence[Any], progress: Callable[[int, int], None] | None = None
) -> list[Any]:
    """One pass over A for several summaries: each one's state after every strip has been shown to it."""
    batch, heads, q_len, _ = problem.sizes
    states = [summary.start(problem) for summary in summaries]
    done, total = 0, batch * heads * q_len
    for block in blocks(problem):
        for rows, cols in strips(block.problem):
            strip = Strip(block, rows, cols)
            for summary, state in zip(summaries, states, strict=True):
                summary.update(state, strip)
            done += strip.logits.shape[0] * strip.logits.shape[1] * strip.logits.shape[2]
            if progress is not None:
                progress(done, total)
    return states


def ready(problem: Problem) -> Problem:
    """The problem as `tile` wants it: floating tensors in the computing precision, bins expanded to displacements."""
    wide = wide_type(problem)
    operands = [x.to(wide) if x.dtype.is_floating_point else x for x in problem.operands]
    pieces = []
    for piece in problem.form.pieces:
        if piece.lookup >= 0:
            rows = operands[piece.slots[1]][0]
            operands[piece.slots[1]] = take(rows, operands[piece.lookup][:, 0], piece.config[0])
        pieces.append(piece._replace(lookup=-1))
    form = problem.form._replace(pieces=tuple(pieces))
    return problem._replace(form=form, q=problem.q.to(wide), k=problem.k.to(wide), operands=operands)


def explain(problem: Problem, row: int, col: int) -> dict[str, Tensor]:
    """What each part gives to the logits of one pair, before softcap and mask: label to [batch, heads]."""
    p = ready(problem)
    rows, cols = slice(row, row + 1), slice(col, col + 1)
    parts = {"content": content(p, rows, cols)[..., 0, 0]}
    for piece in p.form.pieces:
        value = gated(piece, p, rows, cols).expand(*p.q.shape[:2], 1, 1)[..., 0, 0]
        parts[piece.label] = parts[piece.label] + value if piece.label in parts else value
    return parts


class Strip:
    """Whole visible rows of A for some heads, as summaries see them. What several summaries need is computed once."""

    def __init__(self, block: Block, rows: slice, cols: slice):
        self.problem, self.batch, self.heads, self.rows, self.cols = block.problem, block.batch, block.heads, rows, cols
        self.logits = logits_of(block.problem, rows, cols)
        self.weights, self.lse = softmax(block.problem, self.logits)
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
        if form.q_geometry[0] == "line":
            low, sums = diagonal_sums(x, self.rows, self.cols, self.problem.k.shape[2])
            total[self.batch, self.heads, low : low + sums.shape[-1]] += sums
        else:
            space = ("grid", tuple(range(len(form.q_geometry[1]))))
            index = pair_index(space, self.problem, self.rows, self.cols)
            n = index_size(space, form, 0, 0)
            total[self.batch, self.heads] += scatter(x, index, n, _meets(space, form))[..., : n - 3].sum(-2)


# Strips and blocks


def wide_type(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.q.dtype == torch.float64 else torch.float32


def blocks(problem: Problem) -> Iterator[Block]:
    """Batch rows and heads that together fill a strip; one head at a time when a head is larger than that."""
    batch, heads, q_len, k_len = problem.sizes
    per_head = max(q_len * k_len, 1)
    h_step = max(1, min(heads, STRIP // per_head))
    b_step = max(1, min(batch, STRIP // (per_head * heads))) if h_step == heads else 1
    for b in range(0, batch, b_step):
        for h in range(0, heads, h_step):
            part = slice(b, min(b + b_step, batch)), slice(h, min(h + h_step, heads))
            yield Block(ready(problem.select(*part)), *part)


def strips(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Rows that fill a strip, with the columns any of them can see."""
    _, _, q_len, k_len = problem.sizes
    step = max(16, STRIP // max(k_len * problem.q.shape[0] * problem.q.shape[1], 1))
    for first in range(0, q_len, step):
        rows = slice(first, min(first + step, q_len))
        yield rows, _columns(problem, rows)


def _columns(problem: Problem, rows: slice) -> slice:
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
    """Weights and log-sum-exp of whole rows."""
    return normalise(logits, problem.operands[problem.form.sink] if problem.form.sink >= 0 else None)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _drop(p: Problem, x: Tensor, rows: slice, cols: slice) -> Tensor:
    if not p.form.dropout:
        return x
    kept = keep(p.operands[p.form.seeds], indices(rows, x.device), indices(cols, x.device), p.form.dropout)
    return x * kept / (1 - p.form.dropout)


def _values(v: Tensor, block: Block, heads: int) -> Tensor:
    return pick_heads(v[block.batch], block.heads, heads).to(block.problem.q.dtype)


# Positions, indices and masks


def span_length(span: Span) -> int:
    return span.stop - span.start if isinstance(span, slice) else len(span)


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
    _, shape, unplaced = geometry
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


def _meets(space: tuple, form: Form) -> bool:
    """Several pairs of one row may share an entry."""
    if space[0] == "line":
        return False
    return space[0] == "points" or form.q_geometry[2] > 0 or form.k_geometry[2] > 0


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
        return _cut(p.operands[mask[1]], rows, cols)
    assert kind == "chosen", f"unknown mask {mask}"
    chosen, over = p.operands[mask[1]], mask[2]
    mine, other = (cols, rows) if over else (rows, cols)  # over: rows were keys when the keys were chosen
    count = p.q.shape[2] if over else p.k.shape[2]
    picked = chosen[:, :, mine]
    seen = torch.zeros(*picked.shape[:-1], count + 1, dtype=torch.bool, device=picked.device)
    seen = seen.scatter(-1, picked.masked_fill(picked < 0, count), True)[..., :count][..., other]
    return seen.mT if over else seen


def _cut(x: Tensor, rows: Span, cols: Span) -> Tensor:
    """The part of [.., q_len or 1, k_len or 1] that belongs to a tile."""
    x = x if x.shape[-2] == 1 else x[:, :, rows]
    return x if x.shape[-1] == 1 else x[..., cols]


# Content and pieces: their value on a tile


def content(p: Problem, rows: Span, cols: Span) -> Tensor:
    """scale * score(q_i, k_j): [batch, heads, rows, cols]."""
    q, k = p.q[:, :, rows], pick_heads(p.k, slice(0, p.q.shape[1]), p.q.shape[1])[:, :, cols]
    if p.form.content[0] == "dot":
        total = (q @ k.mT) * p.scale
    else:
        power = p.form.content[1]
        k = k.expand(-1, q.shape[1], -1, -1)
        apart = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
        met = apart == 0
        total = -power * torch.log(apart.masked_fill(met, 1.0))
        total = total.masked_fill(met, EXACT_MATCH if power > 0 else -torch.inf) * p.scale
    return total if p.form.scale < 0 else total * _cut(p.operands[p.form.scale], rows, cols)


def gated(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    value = piece_value(piece, p, rows, cols)
    return value if piece.gate < 0 else value * _cut(p.operands[piece.gate], rows, cols)


def piece_value(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
    """A piece on a tile, before its gate; broadcasts to [batch, heads, rows, cols]."""
    x = p.operands[piece.slots[0]]
    straight = piece.space == ("line",) and isinstance(rows, slice) and isinstance(cols, slice)
    if piece.kind == "vector":
        return _cut(x, rows, cols)
    if piece.kind == "dot":
        return x[:, :, rows] @ p.operands[piece.slots[1]][:, :, cols].mT
    if piece.kind == "slope":
        return -x * _distance(piece, p, rows, cols)
    if piece.kind == "network":
        return _network(piece, p, rows, cols)[-1]
    if piece.kind == "table":
        if straight:
            low, width = _line_range(p, rows, cols)
            turned = x[..., low : low + width].flip(-1)
            return turned.unfold(-1, span_length(cols), 1).flip(-2) if width else x[..., None, :0]
        index = pair_index(piece.space, p, rows, cols)
        shape = max(x.shape[0], index.shape[0]), x.shape[1], *index.shape[2:]
        return x.unsqueeze(-2).expand(*shape[:3], -1).gather(-1, index.expand(shape))
    table = p.operands[piece.slots[1]]
    across = piece.kind == "key"
    x = x[:, :, cols if across else rows]
    if straight:
        low, width = _line_range(p, rows, cols)
        part = table[:, :, low : low + width]
        meeting = x @ (part if across else part.flip(-2)).mT
        lines = skew(meeting, span_length(rows if across else cols))
        return lines.mT if across else lines
    meeting = x @ table.mT
    index = pair_index(piece.space, p, rows, cols)
    index = index.mT if across else index
    shape = (max(meeting.shape[0], index.shape[0]), meeting.shape[1], *index.shape[2:])
    value = meeting.expand(shape[0], -1, -1, -1).gather(-1, index.expand(shape))
    return value.mT if across else value


def _line_range(p: Problem, rows: slice, cols: slice) -> tuple[int, int]:
    """First table entry and number of entries a straight tile meets."""
    height, width = span_length(rows), span_length(cols)
    low = rows.start - (cols.stop - 1) + p.k.shape[2] - 1
    return low, (height + width - 1 if height and width else 0)


def skew(x: Tensor, width: int) -> Tensor:
    """x [.., n, n + width - 1] as y [.., n, width] with y[r, c] = x[r, n - 1 - r + c]: a view, no index a pair."""
    x = x.contiguous()
    n, w = x.shape[-2:]
    if not n or not width:
        return x[..., :width]
    return x.as_strided((*x.shape[:-1], width), (*x.stride()[:-2], w - 1, 1), x.storage_offset() + n - 1)


def unskew(y: Tensor) -> Tensor:
    """The adjoint of skew: y [.., n, width] laid into zeros [.., n, n + width - 1]."""
    n, width = y.shape[-2:]
    x = y.new_zeros(*y.shape[:-1], max(n + width - 1, 0))
    if n and width:
        skew(x, width).copy_(y)
    return x


def diagonal_sums(x: Tensor, rows: slice, cols: slice, k_len: int) -> tuple[int, Tensor]:
    """Sums of x [.., rows, cols] along i - j: the first table entry met, and [.., rows + cols - 1] from there."""
    low = rows.start - (cols.stop - 1) + k_len - 1
    return low, unskew(x).sum(-2).flip(-1)


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


def _distance(piece: Piece, p: Problem, rows: Span, cols: Span) -> Tensor:
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


def _network(piece: Piece, p: Problem, rows: Span, cols: Span) -> tuple[Tensor, ...]:
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


# Gradients


class _Gradients:
    """Gradients of one block, and how a gradient of logits flows into them."""

    def __init__(self, p: Problem, needs: Sequence[bool]):
        self.p, self.needs = p, needs
        self.q, self.k = torch.zeros_like(p.q), torch.zeros_like(p.k)
        self.operands = [
            torch.zeros_like(x) if need else None for x, need in zip(p.operands, needs, strict=True)
        ]

    def add(self, slot: int, grad: Tensor, *at: Span) -> None:
        """Add to an operand's gradient, at some places of its trailing axes, summing over axes it broadcasts."""
        total = self.operands[slot]
        if total is None:
            return
        _accumulate(total[(slice(None), slice(None), *at)], grad)

    def add_cut(self, slot: int, grad: Tensor, rows: Span, cols: Span) -> None:
        """The same for an operand [.., q_len or 1, k_len or 1]."""
        x = self.p.operands[slot]
        self.add(slot, grad, slice(None) if x.shape[-2] == 1 else rows, slice(None) if x.shape[-1] == 1 else cols)

    def pull(self, d_logits: Tensor, rows: slice, cols: slice) -> None:
        p = self.p
        self.content(d_logits, rows, cols)
        for piece in p.form.pieces:
            grad = d_logits
            if piece.gate >= 0:
                if self.needs[piece.gate]:
                    self.add_cut(piece.gate, d_logits * piece_value(piece, p, rows, cols), rows, cols)
                grad = d_logits * _cut(p.operands[piece.gate], rows, cols)
            if any(self.needs[slot] for slot in piece.slots):
                getattr(self, piece.kind)(piece, grad, rows, cols)

    def content(self, grad: Tensor, rows: slice, cols: slice) -> None:
        p = self.p
        if p.form.scale >= 0:
            plain = p._replace(form=p.form._replace(scale=-1))
            if self.needs[p.form.scale]:
                self.add_cut(p.form.scale, grad * _zero_nonfinite(content(plain, rows, cols)), rows, cols)
            grad = grad * _cut(p.operands[p.form.scale], rows, cols)
        grad = grad * p.scale
        heads = p.q.shape[1]
        q, k = p.q[:, :, rows], pick_heads(p.k, slice(0, heads), heads)[:, :, cols]
        if p.form.content[0] == "dot":
            self.q[:, :, rows] += grad @ k
            d_k = grad.mT @ q
        else:
            k = k.expand(-1, heads, -1, -1)
            apart = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
            each = -p.form.content[1] * grad / apart.square().masked_fill(apart == 0, torch.inf)
            d_q, d_k = torch.zeros_like(q), torch.zeros_like(k)
            for dim in range(q.shape[-1]):  # one dimension at a time: no [rows, cols, dim], and no cancellation
                pull = each * (q[..., dim, None] - k[..., None, :, dim])
                d_q[..., dim], d_k[..., dim] = pull.sum(-1), -pull.sum(-2)
            self.q[:, :, rows] += d_q
        _accumulate(self.k[:, :, cols], d_k)

    def vector(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        self.add_cut(piece.slots[0], grad, rows, cols)

    def dot(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        a, b = (self.p.operands[slot] for slot in piece.slots)
        self.add(piece.slots[0], grad @ b[:, :, cols], rows)
        self.add(piece.slots[1], grad.mT @ a[:, :, rows], cols)

    def slope(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        total = -(grad * _distance(piece, self.p, rows, cols)).sum((-2, -1), keepdim=True)
        self.add(piece.slots[0], total)

    def table(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        slot = piece.slots[0]
        if piece.space == ("line",):
            low, sums = diagonal_sums(grad, rows, cols, self.p.k.shape[2])
            self.add(slot, sums, slice(low, low + sums.shape[-1]))
        else:
            index = pair_index(piece.space, self.p, rows, cols)
            size = self.p.operands[slot].shape[-1]
            self.add(slot, scatter(grad, index, size, _meets(piece.space, self.p.form)).sum(-2))

    def query(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        self._meeting(piece, grad, rows, cols, across=False)

    def key(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        self._meeting(piece, grad.mT, rows, cols, across=True)

    def _meeting(self, piece: Piece, grad: Tensor, rows: slice, cols: slice, across: bool) -> None:
        """<x, R[index]>: grad has the rows of x first."""
        mine = cols if across else rows
        x, table = (self.p.operands[slot] for slot in piece.slots)
        x = x[:, :, mine]
        if piece.space == ("line",):
            low, width = _line_range(self.p, rows, cols)
            at, spread = slice(low, low + width), unskew(grad)
            if not across:
                spread = spread.flip(-1)
        else:
            index = pair_index(piece.space, self.p, rows, cols)
            at = slice(0, table.shape[2])
            index = index.mT if across else index
            spread = scatter(grad.contiguous(), index, table.shape[2], _meets(piece.space, self.p.form))
        self.add(piece.slots[0], spread @ table[:, :, at], mine)
        self.add(piece.slots[1], spread.mT @ x, at)

    def network(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        weight1, bias1, weight2, readout = piece.slots
        x, hidden, bounded, seen, _ = _network(piece, self.p, rows, cols)
        grad = grad * seen
        self.add(readout, (grad * bounded).sum((-2, -1), keepdim=True))
        grad = grad * self.p.operands[readout]
        bound = piece.config[1]
        if bound is not None:
            grad = grad * bounded * (1 - bounded / bound)
        batch, heads = grad.shape[:2]
        flat = grad.movedim(1, -1)  # [batch, rows, cols, heads]
        deep = hidden.expand(batch, *hidden.shape[1:])
        self.add(weight2, torch.einsum("bijh,bijn->hn", flat, deep)[None].unsqueeze(-1))
        back = (flat @ self.p.operands[weight2][0, :, :, 0]) * (deep > 0)
        self.add(bias1, back.sum((0, 1, 2))[None, None])
        self.add(weight1, torch.einsum("bijn,bija->na", back, x.expand(batch, *x.shape[1:]))[None, None])

    def contract(self, source: Problem) -> None:
        """Gradients of expanded bins, back to the bins."""
        for piece in source.form.pieces:
            if piece.lookup >= 0 and self.operands[piece.slots[1]] is not None:
                bins = source.operands[piece.slots[1]].shape[2]
                grad, index = self.operands[piece.slots[1]], source.operands[piece.lookup][:, 0]
                self.operands[piece.slots[1]] = take_backward(grad, index, bins, piece.config[0])[None]


def _zero_nonfinite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, summed over the axes that total has once."""
    summed = [axis for axis in range(part.dim()) if total.shape[axis] == 1 and part.shape[axis] > 1]
    total += part.sum(summed, keepdim=True) if summed else part


def _deposit(total: Tensor, part: Tensor, block: Block, heads: int) -> None:
    """Add a block's gradient into the whole one, summing over the batch or heads it is shared by."""
    if total.shape[0] == 1:
        part, batch = part.sum(0, keepdim=True) if part.shape[0] > 1 else part, slice(None)
    else:
        batch = block.batch
    shared = total.shape[1]
    if shared in (1, heads):
        if shared == 1 and part.shape[1] > 1:
            part = part.sum(1, keepdim=True)
        total[batch, slice(None) if shared == 1 else block.heads] += part
        return
    first, group = block.heads.start, heads // shared
    for h in range(part.shape[1]):
        total[batch, (first + h) // group] += part[:, h]
