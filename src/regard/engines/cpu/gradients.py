"""Backward passes of the CPU engine: the fused kernel's own where nothing of the bias learns, else ours by blocks.

Ours recomputes a block of weights, and gives dS (eq. 22) to q, k, v and to every learned operand. The gradient of a
Toeplitz table is the sum of dS along diagonals: dS is written once, straight into a skewed view of a zeroed buffer,
whose columns are then the diagonals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...normal import Problem
from ..tiled.gradients import Gradients, Totals, accumulate
from ..tiled.skews import diagonal_sums
from ..tiled.strips import columns, each_block, values_of, wide_type
from .feeding import Feed, block_bias, blocks_of_rows, displacements, own, pad_to, row_blocks, toeplitz

Gradient = tuple[Tensor, Tensor, Tensor, list[Tensor | None]]


def fused_backward(problem: Problem, fed: Feed, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor) -> Gradient:
    """By the fused kernel, fed as in the forward pass: gradients of q, k and v."""
    q, k, heads = problem.q, problem.k, problem.q.shape[1]
    v_dim, width = v.shape[-1], max(v.shape[-1], q.shape[-1])
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    shared = min(k.shape[1], v.shape[1])
    group = heads // shared
    q, k, v, out, d_out = (pad_to(x, width) for x in (q, k, v, out, d_out))
    for member in range(group):
        each = slice(member, heads, group)
        k_at, v_at = (slice(None) if x.shape[1] == shared else each for x in (k, v))
        for rows, cols, causal in row_blocks(problem, fed):
            bias, turn = None, lambda x: x
            if fed.table is not None and not causal:
                table = fed.table if fed.table.shape[1] == 1 else fed.table[:, each]
                bias = toeplitz(table, q.shape[2], rows, cols).expand(q.shape[0], q[:, each].shape[1], -1, -1)
                turn = lambda x: x.flip(2)  # noqa: E731
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(turn(x[:, each, rows]) for x in (d_out, q)),
                k[:, k_at, cols], v[:, v_at, cols],
                *(turn(x[:, each, rows]) for x in (out, lse)),
                0.0, causal, attn_mask=bias, scale=problem.scale,
            )  # fmt: skip
            d_q[:, each, rows] = turn(parts[0])[..., : d_q.shape[-1]]
            d_k[:, k_at, cols] += parts[1][..., : d_k.shape[-1]]
            d_v[:, v_at, cols] += parts[2][..., :v_dim]
    return d_q, d_k, d_v, [None] * len(problem.operands)


def learned_backward(
    problem: Problem, fed: Feed, v: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> Gradient:
    """By our own blocks: gradients of q, k, v and of the operands asked for."""
    heads, wide = problem.sizes[1], wide_type(problem)
    totals = Totals(problem, v, needs, wide)
    for block in each_block(problem):
        p, grads = block.problem, Gradients(block.problem, needs)
        values = values_of(v, block, heads)
        d_values = torch.zeros_like(values)
        work = _Block(p, fed, own(fed.table, block.batch, block.heads), values, grads, d_values)
        for rows in blocks_of_rows(p):
            at = block.batch, block.heads, rows
            work.rows(rows, lse[at].to(wide), d_out[at].to(wide), d_lse[at].to(wide))
        work.finish()
        totals.add(block, grads, d_values)
    return totals.finish()


class _Block:
    """Some heads of a problem, and where their gradients go."""

    def __init__(self, p: Problem, fed: Feed, table: Tensor | None, values: Tensor, grads: Gradients, d_values: Tensor):
        self.p, self.fed, self.table, self.values, self.grads, self.d_values = p, fed, table, values, grads, d_values
        self.k = p.k.expand(-1, p.q.shape[1], -1, -1)
        self.v = values.expand(-1, p.q.shape[1], -1, -1)
        #: only a table: work on reversed rows, where the bias is a view and so is the skew of its gradient
        self.turned = table is not None and not fed.pieces and fed.mask is None
        learns = any(grads.needs[piece.slots[0]] for piece in fed.tabled)
        self.d_table = p.q.new_zeros(*p.q.shape[:2], p.q.shape[2] + p.k.shape[2] - 1) if learns else None

    def rows(self, rows: slice, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> None:
        p, cols = self.p, columns(self.p, rows)
        if cols.start == cols.stop:
            return
        turn = (lambda x: x.flip(2)) if self.turned else (lambda x: x)
        q, g, k, v = turn(p.q[:, :, rows]), turn(d_out), self.k[:, :, cols], self.v[:, :, cols]
        ends = turn(lse.masked_fill(lse == -torch.inf, torch.inf)).unsqueeze(-1)  # rows that see nothing: weights 0
        weights = self.logits(q, k, rows, cols).sub_(ends).exp_()
        # exp(logit - lse) carries the rounding of lse; the rows are whole, so their sum tells it, and g makes it good
        total = weights.sum(-1, keepdim=True)
        share = None
        if p.form.sink >= 0:
            share = torch.exp(p.operands[p.form.sink].unsqueeze(-1).unsqueeze(-1) - ends)
        fix = torch.where(total > 0, (1.0 if share is None else 1.0 - share) / total, 0.0)
        d_weights = (g * fix) @ v.mT
        inner = torch.linalg.vecdot(weights, d_weights).unsqueeze(-1) - turn(d_lse).unsqueeze(-1)
        accumulate(self.d_values[:, :, cols], weights.mT @ (g * fix))
        if share is not None:
            self.grads.add(p.form.sink, (-share * inner).sum((-2, -1)))
        d_logits = self.d_logits(weights, d_weights.sub_(inner * fix), rows, cols)
        self.grads.q[:, :, rows] += turn((d_logits @ k).mul_(p.scale))
        accumulate(self.grads.k[:, :, cols], (d_logits.mT @ q).mul_(p.scale))
        self.grads.pull_pieces(self.fed.pieces, d_logits, rows, cols)

    def logits(self, q: Tensor, k: Tensor, rows: slice, cols: slice) -> Tensor:
        """scale * q kᵀ + bias, in one matrix product that starts from the bias."""
        bias = block_bias(self.p, self.fed, self.table, rows, cols) if not self.turned else None
        if self.turned and self.table is not None:
            bias = toeplitz(self.table, self.p.q.shape[2], rows, cols).expand(*q.shape[:2], -1, -1)
        if bias is None:
            return (q @ k.mT).mul_(self.p.scale)
        flat = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=self.p.scale)
        return flat.unflatten(0, q.shape[:2])

    def d_logits(self, weights: Tensor, d_weights: Tensor, rows: slice, cols: slice) -> Tensor:
        """weights * d_weights, and its diagonal sums into the table's gradient."""
        if self.d_table is None:
            return d_weights.mul_(weights)
        if not self.turned:
            d_logits = d_weights.mul_(weights)
            low, sums = diagonal_sums(d_logits, rows, cols, self.p.k.shape[2])
        else:
            height, width = weights.shape[-2:]
            room = weights.new_zeros(*weights.shape[:2], height, height + width - 1)
            stride = room.stride()
            d_logits = room.as_strided(weights.shape, (*stride[:2], stride[2] + 1, 1))
            torch.mul(weights, d_weights, out=d_logits)
            low, sums = rows.start - (cols.stop - 1) + self.p.k.shape[2] - 1, room.sum(-2).flip(-1)
        self.d_table[..., low : low + sums.shape[-1]] += sums
        return d_logits

    def finish(self) -> None:
        """From the table's gradient to the tables and slopes it was made of."""
        if self.d_table is None:
            return
        for piece in self.fed.tabled:
            if piece.kind == "table":
                self.grads.add(piece.slots[0], self.d_table)
            else:
                far = displacements(self.p).abs().unsqueeze(1).to(self.d_table.dtype)
                self.grads.add(piece.slots[0], -(self.d_table * far).sum(-1, keepdim=True).unsqueeze(-1))
