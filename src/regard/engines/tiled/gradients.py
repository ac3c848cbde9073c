"""How a gradient of logits flows into q, k and the operands of pieces (eq. 24)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...normal import Piece, Problem
from ...tables import take_backward
from .grids import across_axis_sums, axis_sums, is_whole, window_sums
from .pieces import content, distance, key_parts, line_range, meets, network, piece_value, scatter
from .places import Span, cut, pair_index
from .skews import diagonal_sums, unskew
from .strips import Block


class Gradients:
    """Gradients of one block, and how a gradient of logits flows into them."""

    def __init__(self, p: Problem, needs: Sequence[bool]):
        self.p, self.needs = p, needs
        self.q, self.k = torch.zeros_like(p.q), torch.zeros_like(p.k)
        self.operands = [torch.zeros_like(x) if need else None for x, need in zip(p.operands, needs, strict=True)]

    def add(self, slot: int, grad: Tensor, *at: Span) -> None:
        """Add to an operand's gradient, at some places of its trailing axes, summing over axes it broadcasts."""
        total = self.operands[slot]
        if total is None:
            return
        accumulate(total[(slice(None),) * 2 + at], grad)

    def add_cut(self, slot: int, grad: Tensor, rows: Span, cols: Span) -> None:
        """The same for an operand [.., q_len or 1, k_len or 1]."""
        x = self.p.operands[slot]
        self.add(slot, grad, slice(None) if x.shape[-2] == 1 else rows, slice(None) if x.shape[-1] == 1 else cols)

    def pull(self, d_logits: Tensor, rows: slice, cols: slice) -> None:
        p = self.p
        if not d_logits.numel():
            return
        self.content(d_logits, rows, cols)
        self.pull_pieces(p.form.pieces, d_logits, rows, cols)

    def pull_pieces(self, pieces: Sequence[Piece], d_logits: Tensor, rows: slice, cols: slice) -> None:
        """The same for some pieces only."""
        p = self.p
        for piece in pieces:
            grad = d_logits
            if piece.gate >= 0:
                if self.needs[piece.gate]:
                    self.add_cut(piece.gate, d_logits * piece_value(piece, p, rows, cols), rows, cols)
                grad = d_logits * cut(p.operands[piece.gate], rows, cols)
            if any(self.needs[slot] for slot in piece.slots):
                getattr(self, piece.kind)(piece, grad, rows, cols)

    def content(self, grad: Tensor, rows: slice, cols: slice) -> None:
        p = self.p
        if p.form.scale >= 0:
            plain = p._replace(form=p.form._replace(scale=-1))
            if self.needs[p.form.scale]:
                self.add_cut(p.form.scale, grad * _zero_nonfinite(content(plain, rows, cols)), rows, cols)
            grad = grad * cut(p.operands[p.form.scale], rows, cols)
        grad = grad * p.scale
        heads = p.q.shape[1]
        q, k = p.q[:, :, rows], p.k[:, :, cols]
        if p.form.content[0] == "dot":
            self.q[:, :, rows] += grad @ k
            d_k = grad.mT @ q
        else:
            k = k.expand(-1, heads, -1, -1)
            apart = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
            each = -grad
            if p.form.content[0] == "distance":
                each = each * p.form.content[1] / apart.square().masked_fill(apart == 0, torch.inf)
            d_q, d_k = torch.zeros_like(q), torch.zeros_like(k)
            for dim in range(q.shape[-1]):  # one dimension at a time: no [rows, cols, dim], and no cancellation
                pull = each * (q[..., dim, None] - k[..., None, :, dim])
                d_q[..., dim], d_k[..., dim] = pull.sum(-1), -pull.sum(-2)
            self.q[:, :, rows] += d_q
        accumulate(self.k[:, :, cols], d_k)

    def vector(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        self.add_cut(piece.slots[0], grad, rows, cols)

    def dot(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        a, b = (self.p.operands[slot] for slot in piece.slots)
        self.add(piece.slots[0], grad @ b[:, :, cols], rows)
        self.add(piece.slots[1], grad.mT @ a[:, :, rows], cols)

    def slope(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        total = -(grad * distance(piece, self.p, rows, cols)).sum((-2, -1), keepdim=True)
        self.add(piece.slots[0], total)

    def table(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        slot = piece.slots[0]
        if piece.space == ("line",):
            low, sums = diagonal_sums(grad, rows, cols, self.p.k.shape[2])
            self.add(slot, sums, slice(low, low + sums.shape[-1]))
        elif is_whole(piece.space, self.p, rows, cols) and len(piece.space[1]) == 2:
            at, sums = window_sums(grad, self.p, rows)
            self.add(slot, sums, at)
        else:
            index = pair_index(piece.space, self.p, rows, cols)
            size = self.p.operands[slot].shape[-1]
            self.add(slot, scatter(grad, index, size, meets(piece.space, self.p.form)).sum(-2))

    def query(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        table = self.p.operands[piece.slots[1]]
        if piece.space == ("line",):
            low, width = line_range(self.p, rows, cols)
            self._meeting(piece, unskew(grad).flip(-1), rows, slice(low, low + width))
            return
        if is_whole(piece.space, self.p, rows, cols) and len(piece.space[1]) == 1:
            spread = axis_sums(piece.space[1][0], self.p, grad, rows, table.shape[2])
        else:
            spread = self._scatter(piece, grad, pair_index(piece.space, self.p, rows, cols))
        self._meeting(piece, spread, rows, slice(0, table.shape[2]))

    def key(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        table = self.p.operands[piece.slots[1]]
        if piece.space == ("line",):
            for some in key_parts(rows, cols):
                low, width = line_range(self.p, rows, some)
                part = grad[..., some.start - cols.start : some.stop - cols.start]
                self._meeting(piece, unskew(part.mT), some, slice(low, low + width))
            return
        if is_whole(piece.space, self.p, rows, cols) and len(piece.space[1]) == 1:
            spread = across_axis_sums(piece.space[1][0], self.p, grad.mT, rows, table.shape[2])
        else:
            spread = self._scatter(piece, grad.mT, pair_index(piece.space, self.p, rows, cols).mT)
        self._meeting(piece, spread, cols, slice(0, table.shape[2]))

    def _scatter(self, piece: Piece, grad: Tensor, index: Tensor) -> Tensor:
        size = self.p.operands[piece.slots[1]].shape[2]
        return scatter(grad.contiguous(), index, size, meets(piece.space, self.p.form))

    def _meeting(self, piece: Piece, spread: Tensor, mine: slice, at: slice) -> None:
        """<x, R>: the gradient `spread` of what these rows of x gave to these rows of R."""
        x, table = (self.p.operands[slot] for slot in piece.slots)
        self.add(piece.slots[0], spread @ table[:, :, at], mine)
        self.add(piece.slots[1], spread.mT @ x[:, :, mine], at)

    def network(self, piece: Piece, grad: Tensor, rows: slice, cols: slice) -> None:
        weight1, bias1, weight2, readout = piece.slots
        x, hidden, bounded, seen, _ = network(piece, self.p, rows, cols)
        grad = grad * seen
        self.add(readout, (grad * bounded).sum((-2, -1), keepdim=True))
        grad = grad * self.p.operands[readout]
        if self.p.operands[weight2].shape[1] == 1:  # one network for all heads
            grad = grad.sum(1, keepdim=True)
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


def accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, summed over the axes that total has once."""
    summed = [axis for axis in range(part.dim()) if total.shape[axis] == 1 != part.shape[axis]]
    total += part.sum(summed, keepdim=True) if summed else part


class Totals:
    """Gradients of a whole problem, gathered block by block."""

    def __init__(self, problem: Problem, v: Tensor, needs: Sequence[bool], wide: torch.dtype):
        self.problem, self.v = problem, v
        self.q, self.k, self.values = (torch.zeros_like(x, dtype=wide) for x in (problem.q, problem.k, v))
        self.operands = [
            torch.zeros_like(x, dtype=wide) if need else None for x, need in zip(problem.operands, needs, strict=True)
        ]

    def add(self, block: Block, grads: Gradients, d_values: Tensor) -> None:
        """Take in a block's gradients."""
        heads = self.problem.q.shape[1]
        for total, part in ((self.q, grads.q), (self.k, grads.k), (self.values, d_values)):
            deposit(total, part, block, heads)
        self.add_operands(block, grads)

    def add_operands(self, block: Block, grads: Gradients) -> None:
        """The same for the operands alone."""
        grads.contract(self.problem.select(block.batch, block.heads))
        for total, part in zip(self.operands, grads.operands, strict=True):
            if total is not None and part is not None:
                deposit(total, part, block, self.problem.q.shape[1])

    def finish(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Gradients of q, k, v and the operands, in their own dtypes."""
        cast = [None if g is None else g.to(x.dtype) for g, x in zip(self.operands, self.problem.operands, strict=True)]
        p = self.problem
        return self.q.to(p.q.dtype), self.k.to(p.k.dtype), self.values.to(self.v.dtype), cast


def deposit(total: Tensor, part: Tensor, block: Block, heads: int) -> None:
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
