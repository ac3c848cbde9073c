"""Backward passes of the CPU engine: the fused kernel's own where nothing of the bias learns, else ours by blocks.

Ours recomputes a block of weights, and gives dS (eq. 22) to q, k, v and to every learned operand. The matrix products
are PyTorch's; what lies between them is compiled (sources.py, native.c), or PyTorch's too where nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Problem
from ..tiled.gradients import Gradients, Totals, deposit
from ..tiled.skews import diagonal_sums
from ..tiled.strips import Block, columns, each_block, wide_type
from .feeding import Feed, block_bias, blocks_of_rows, own_table, pad_to, row_blocks, table_gradients, toeplitz
from .panels import scratch
from .sources import Layer, Pull, blocks_of_heads, is_compiled, own_of, sources_of

Gradient = tuple[Tensor, Tensor, Tensor, list[Tensor | None]]


def fused_backward(problem: Problem, fed: Feed, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor) -> Gradient:
    """By the fused kernel, fed as in the forward pass: gradients of q, k and v."""
    q, k, heads = problem.q, problem.k, problem.q.shape[1]
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    shared = min(k.shape[1], v.shape[1])
    group = heads // shared
    inputs = q, k, v
    q, k, v, out, d_out = (pad_to(x, max(widths)) for x in (q, k, v, out, d_out))
    blocks = list(row_blocks(problem, fed))
    found: list[Tensor] = []
    for member in range(group):
        each = slice(member, heads, group)
        k_at, v_at = (slice(None) if x.shape[1] == shared else each for x in (k, v))
        for rows, cols, causal in blocks:
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
            parts = [part[..., :width] for part, width in zip((turn(parts[0]), *parts[1:]), widths, strict=True)]
            if group == 1 and len(blocks) == 1:  # all there is: nothing to add up
                found = parts
                continue
            found = found or [torch.zeros_like(x) for x in inputs]
            found[0][:, each, rows] = parts[0]
            found[1][:, k_at, cols] += parts[1]
            found[2][:, v_at, cols] += parts[2]
    return found[0], found[1], found[2], [None] * len(problem.operands)


def learned_backward(
    problem: Problem, fed: Feed, v: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> Gradient:
    """By our own blocks: gradients of q, k, v and of the operands asked for."""
    heads, wide = problem.sizes[1], wide_type(problem)
    totals = Totals(problem, v, needs, wide)
    for block, hand in hands(problem, fed, needs):
        own = own_of(problem, block)
        q, k, values = own(problem.q), own(problem.k), own(v)
        planes = q.shape[:2]
        d_k, d_v = (x.new_zeros(*planes, *x.shape[2:]) for x in (k, values))
        k, values = (x.expand(*planes, -1, -1).flatten(0, 1) for x in (k, values))
        sink = None if problem.form.sink < 0 else own(problem.operands[problem.form.sink])
        d_sink = q.new_zeros(planes)
        for rows in hand.row_blocks():
            cols = columns(problem, rows)
            if cols.start == cols.stop:
                continue
            at = block.batch, block.heads, rows
            some, g = q[:, :, rows].flatten(0, 1), d_out[at].to(wide).flatten(0, 1)
            ends = lse[at].to(wide)
            ends = ends.masked_fill(ends == -torch.inf, torch.inf)  # rows that see nothing: weights 0
            share = torch.zeros_like(ends) if sink is None else torch.exp(sink.unsqueeze(-1) - ends)
            weights = hand.logits(some, k[:, cols], rows, cols)
            d_logits = scratch.take(("gradients", wide), weights.shape, wide)
            torch.bmm(g, values[:, cols].mT, out=d_logits.flatten(0, 1))
            inner = hand.weigh(weights, d_logits, ends, 1.0 - share, d_lse[at].to(wide), rows, cols)
            d_sink -= (share * inner).sum(-1)
            flat, d_flat = weights.flatten(0, 1), d_logits.flatten(0, 1)
            d_v.flatten(0, 1)[:, cols].baddbmm_(flat.mT, g)
            d_k.flatten(0, 1)[:, cols].baddbmm_(d_flat.mT, some, alpha=problem.scale)
            totals.q[at] = torch.bmm(d_flat, k[:, cols]).mul_(problem.scale).unflatten(0, planes)
        for total, part in ((totals.k, d_k), (totals.values, d_v)):
            deposit(total, part, block, heads)
        of_sink = None if sink is None else totals.operands[problem.form.sink]
        if of_sink is not None:
            deposit(of_sink, d_sink, block, heads)
        hand.finish(totals)
    scratch.clear()
    return totals.finish()


def hands(problem: Problem, fed: Feed, needs: Sequence[bool]) -> Iterator[tuple[Block, Any]]:
    """Blocks of heads, each with what lays out its bias and takes its gradient: compiled where it can be."""
    if is_compiled(problem):
        fed, sources, rest = sources_of(problem, fed)
        pairs = problem.q.shape[2] * problem.k.shape[2]
        for block in blocks_of_heads(problem, pairs * 15 // 16):  # 1025 tokens are as many heads at a time as 1024
            yield block, Pull(Layer(problem, fed, sources, rest, block), needs)
    else:
        for block in each_block(problem):
            yield block, Hand(fed, block, needs)


class Hand:
    """The bias and its gradients in plain PyTorch."""

    def __init__(self, fed: Feed, block: Block, needs: Sequence[bool]):
        self.p, self.fed, self.block = block.problem, fed, block
        self.table = own_table(fed.table, block.batch, block.heads)
        self.grads = Gradients(self.p, needs)
        learns = any(needs[piece.slots[0]] for piece in fed.tabled)
        p = self.p
        self.d_table = p.q.new_zeros(*p.q.shape[:2], p.q.shape[2] + p.k.shape[2] - 1) if learns else None

    def row_blocks(self) -> Iterator[slice]:
        return blocks_of_rows(self.p)

    def logits(self, q: Tensor, k: Tensor, rows: slice, cols: slice) -> Tensor:
        """scale * q kᵀ + bias, in one matrix product that starts from the bias."""
        bias = block_bias(self.p, self.fed, self.table, rows, cols)
        if bias is None:
            return torch.bmm(q, k.mT).mul_(self.p.scale).unflatten(0, self.p.q.shape[:2])
        flat = torch.baddbmm(bias.flatten(0, 1), q, k.mT, alpha=self.p.scale)
        return flat.unflatten(0, self.p.q.shape[:2])

    def weigh(
        self, logits: Tensor, grads: Tensor, ends: Tensor, mass: Tensor, d_ends: Tensor, rows: slice, cols: slice
    ) -> Tensor:
        """In place: logits become weights, their gradient that of the logits, which flows on to the pieces."""
        weights = logits.sub_(ends.unsqueeze(-1)).exp_()
        # exp(logit - lse) carries the rounding of lse; the rows are whole, so their sum tells it
        total = weights.sum(-1)
        weights.mul_((mass / total).masked_fill_(total == 0, 0.0).unsqueeze(-1))
        inner = torch.linalg.vecdot(weights, grads) - d_ends
        grads.sub_(inner.unsqueeze(-1)).mul_(weights)
        if self.d_table is not None:
            low, sums = diagonal_sums(grads, rows, cols, self.p.k.shape[2])
            self.d_table[..., low : low + sums.shape[-1]] += sums
        self.grads.pull_pieces(self.fed.pieces, grads, rows, cols)
        return inner

    def finish(self, totals: Totals) -> None:
        if self.d_table is not None:
            for slot, grad in table_gradients(self.p, self.fed, self.d_table, self.block._replace(batch=slice(None))):
                self.grads.add(slot, grad)
        totals.add_operands(self.block, self.grads)
