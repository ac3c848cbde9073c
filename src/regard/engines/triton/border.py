"""Grids with unplaced tokens (BEiT's class token): the grid by kernels, and the border around it densely.

Unplaced tokens come first, so they are the first few rows and columns of A. Without them the table is a `Toeplitz`,
whose tiles load whole vectors; with them no tile would begin where a line of the grid does. The border is few rows
times all keys and all queries times few keys, and joins the rest by the log-sum-exp (eq. 19, 22 to 24):

    logits   corner + rows [u, k_len]        the unplaced queries, whole rows
             column        [q_len - u, u]    the unplaced keys, for the others
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Problem, each_head, product_buffer
from . import gradients
from .choice import Tiling, interpreted, power
from .launch import dense_rows, run
from .product import product


def borders(problem: Problem) -> int:
    """How many tokens without a place there are, where all else is a table on a grid of two axes; 0: another way."""
    form, (_, _, q_len, k_len) = problem.form, problem.sizes
    q, k = form.q_geometry, form.k_geometry
    if q[0] != "grid" or q[2] == 0 or q[2] != k[2] or len(q[1]) != 2 or q[2] > 64:
        return 0
    if problem.starts != (0, 0) or max(form.q_start, form.k_start, form.scale, form.sink) >= 0 or not form.pieces:
        return 0
    if form.mask is not None or form.dropout or form.softcap is not None:
        return 0
    if (q_len, k_len) != tuple(q[2] + shape[0] * shape[1] for shape in (q[1], k[1])):
        return 0
    fits = all(p.kind == "table" and p.gate < 0 and p.space == ("grid", (0, 1)) for p in form.pieces)
    return q[2] if fits else 0


class _Border:
    """The first `count` rows and columns of A, and the problem without them."""

    def __init__(self, problem: Problem, count: int):
        self.problem, self.count = problem, count
        form = problem.form
        form = form._replace(q_geometry=(*form.q_geometry[:2], 0), k_geometry=(*form.k_geometry[:2], 0))
        q, k = problem.q[:, :, count:], problem.k[:, :, count:]
        self.inner = problem._replace(form=form, q=q, k=k)
        self.group = problem.q.shape[1] // problem.k.shape[1]
        heads = problem.q.shape[1]
        tables = [each_head(problem.operands[p.slots[0]], heads)[..., -3:].float() for p in form.pieces]
        self.alone = sum(tables[1:], tables[0])  # [batch or 1, heads or 1, 3]: the query alone, the key alone, both

    def times_keys(self, x: Tensor, y: Tensor) -> Tensor:
        """x [batch, heads, rows, d] with y [batch, shared, d, n] of the same group: [batch, heads, rows, n] float32."""
        batch, heads, rows, dim = x.shape
        joined = x.reshape(batch, y.shape[1], -1, dim) @ y
        return joined.reshape(batch, heads, rows, y.shape[-1]).float()

    def rows(self) -> Tensor:
        """Logits of the unplaced queries: [batch, heads, u, k_len]."""
        dots = self.times_keys(self.problem.q[:, :, : self.count], self.problem.k.mT) * self.problem.scale
        dots[..., : self.count] += self.alone[..., 2, None, None]
        dots[..., self.count :] += self.alone[..., 0, None, None]
        return dots

    def column(self) -> Tensor:
        """Logits of the unplaced keys for the placed queries: [batch, heads, q_len - u, u]."""
        k = each_head(self.problem.k[:, :, : self.count], self.problem.q.shape[1])
        return (self.inner.q @ k.mT).float() * self.problem.scale + self.alone[..., 1, None, None]


@triton.jit
def join_kernel(
    q_ptr, k_ptr, v_ptr, alone_ptr, part_ptr, out_ptr, lse_ptr, heads, q_len, count, scale,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    alone_batch, alone_head, k_group, v_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The unplaced keys into the product of the placed ones, in place, for one block of placed queries of one head."""
    blocks = tl.cdiv(q_len - count, BLOCK_Q)
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = bh // heads, bh % heads
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)  # among the placed
    inside = row < q_len - count
    i, d, e = (row + count).to(tl.int64), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    v_ptr += b.to(tl.int64) * v_batch + (h // v_group).to(tl.int64) * v_head
    where = out_ptr + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head + i[:, None] * out_step + e[None, :]
    both = inside[:, None] & (e < V_DIM)[None, :]
    q = tl.load(q_ptr + i[:, None] * q_step + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    q = q.to(tl.float32) * scale
    acc = tl.load(where, mask=both, other=0.0).to(tl.float32)
    lse = tl.load(part_ptr + bh.to(tl.int64) * (q_len - count) + row, mask=inside, other=0.0)
    alone = tl.load(alone_ptr + b * alone_batch + h * alone_head + 1)
    for n in range(0, count):
        k = tl.load(k_ptr + n * k_step + d, mask=d < DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + n * v_step + e, mask=e < V_DIM, other=0.0).to(tl.float32)
        s = tl.sum(q * k[None, :], 1) + alone
        top = tl.maximum(lse, s)
        new = top + tl.log(tl.exp(lse - top) + tl.exp(s - top))
        acc = acc * tl.exp(lse - new)[:, None] + tl.exp(s - new)[:, None] * v[None, :]
        lse = new
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=both)
    tl.store(lse_ptr + bh.to(tl.int64) * q_len + i, lse, mask=inside)


def forward(problem: Problem, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp."""
    border, (batch, heads, q_len, _) = _Border(problem, count), problem.sizes
    out = product_buffer(problem, v)
    _, part = product(border.inner, v[:, :, count:], out[:, :, count:])
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=v.device)
    row = border.rows()
    torch.logsumexp(row, -1, out=lse[:, :, :count])
    out[:, :, :count] = border.times_keys(torch.exp(row - lse[:, :, :count, None]).to(v.dtype), v).to(v.dtype)
    q, k, v = (dense_rows(x) for x in (problem.q, problem.k, v))
    dim, v_dim, block = q.shape[-1], v.shape[-1], 16 if interpreted() else 64
    alone = border.alone.contiguous()
    steps = [0 if alone.shape[n] == 1 else alone.stride(n) for n in (0, 1)]
    run(
        join_kernel, -(-(q_len - count) // block) * batch * heads, Tiling(block, 1, 4, 1),
        q, k, v, alone, part, out, lse, heads, q_len, count, problem.scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *steps,
        heads // k.shape[1], heads // v.shape[1],
        DIM=dim, V_DIM=v_dim, BLOCK_D=power(dim), BLOCK_V=power(v_dim), BLOCK_Q=block,
    )  # fmt: skip
    return out, lse


@triton.jit
def leave_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, d_out_ptr, alone_ptr, lse_ptr, d_lse_ptr, ours_ptr, d_q_ptr,
    d_k_ptr, d_v_ptr, d_alone_ptr, heads, q_len, count, scale,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    d_batch, d_head, d_step, lse_batch, lse_head, lse_step, d_lse_batch, d_lse_head, d_lse_step,
    alone_batch, alone_head, k_group, v_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Gradients of what `join_kernel` does, for one block of placed queries of one head (eq. 22 to 24).

    d_q is `ours`, which the placed keys gave, and what the unplaced ones give. Sums over the block, for each unplaced
    key: d_k, d_v [blocks, count, dim], d_alone [blocks, count].
    """
    blocks = tl.cdiv(q_len - count, BLOCK_Q)
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)  # among the placed
    inside = row < q_len - count
    i, d, e = (row + count).to(tl.int64), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    both, also = inside[:, None] & (d < DIM)[None, :], inside[:, None] & (e < V_DIM)[None, :]
    k_ptr += b * k_batch + (h // k_group) * k_head
    v_ptr += b * v_batch + (h // v_group) * v_head
    q = tl.load(q_ptr + b * q_batch + h * q_head + i[:, None] * q_step + d[None, :], mask=both, other=0.0)
    out = tl.load(out_ptr + b * out_batch + h * out_head + i[:, None] * out_step + e[None, :], mask=also, other=0.0)
    d_out = tl.load(d_out_ptr + b * d_batch + h * d_head + i[:, None] * d_step + e[None, :], mask=also, other=0.0)
    lse = tl.load(lse_ptr + b * lse_batch + h * lse_head + i * lse_step, mask=inside, other=float("inf"))
    inner = -tl.load(d_lse_ptr + b * d_lse_batch + h * d_lse_head + i * d_lse_step, mask=inside, other=0.0)
    q, d_out = q.to(tl.float32) * scale, d_out.to(tl.float32)
    inner += tl.sum(out.to(tl.float32) * d_out, 1)  # what softmax subtracts
    ours = ours_ptr + (bh.to(tl.int64) * (q_len - count) + row)[:, None] * DIM + d[None, :]
    d_q = tl.load(ours, mask=both, other=0.0).to(tl.float32)
    alone = tl.load(alone_ptr + b * alone_batch + h * alone_head + 1)
    for n in range(0, count):
        k = tl.load(k_ptr + n * k_step + d, mask=d < DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + n * v_step + e, mask=e < V_DIM, other=0.0).to(tl.float32)
        weights = tl.exp(tl.sum(q * k[None, :], 1) + alone - lse)
        d_logits = weights * (tl.sum(d_out * v[None, :], 1) - inner)
        d_q += (d_logits * scale)[:, None] * k[None, :]
        at = (tl.program_id(0) * count + n).to(tl.int64)
        tl.store(d_k_ptr + at * DIM + d, tl.sum(d_logits[:, None] * q, 0), mask=d < DIM)
        tl.store(d_v_ptr + at * V_DIM + e, tl.sum(weights[:, None] * d_out, 0), mask=e < V_DIM)
        tl.store(d_alone_ptr + at, tl.sum(d_logits, 0))
    where = d_q_ptr + (bh.to(tl.int64) * q_len + i)[:, None] * DIM + d[None, :]
    tl.store(where, d_q.to(d_q_ptr.dtype.element_ty), mask=both)


@triton.jit
def spread_kernel(
    x_ptr, weight_ptr, ours_ptr, whole_ptr, heads, k_len, count, factor,
    x_batch, x_head, x_step, weight_batch, weight_head, weight_step,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What unplaced queries give to placed keys: ours + factor * the sum of weight[n, j] x[n]."""
    blocks = tl.cdiv(k_len - count, BLOCK_K)
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    row, d = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    inside = row < k_len - count
    both = inside[:, None] & (d < DIM)[None, :]
    ours = ours_ptr + (bh.to(tl.int64) * (k_len - count) + row)[:, None] * DIM + d[None, :]
    acc = tl.load(ours, mask=both, other=0.0).to(tl.float32)
    for n in range(0, count * GROUP):
        head, token = h * GROUP + n // count, n % count
        x = tl.load(x_ptr + b * x_batch + head * x_head + token * x_step + d, mask=d < DIM, other=0.0)
        at = weight_ptr + b * weight_batch + head * weight_head + token * weight_step + count + row
        acc += tl.load(at, mask=inside, other=0.0)[:, None] * (x.to(tl.float32) * factor)[None, :]
    where = whole_ptr + (bh.to(tl.int64) * k_len + count + row)[:, None] * DIM + d[None, :]
    tl.store(where, acc.to(whole_ptr.dtype.element_ty), mask=both)


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool],
    count: int,
) -> gradients.Gradient:  # fmt: skip
    """Gradients of q, k, v and of the operands asked for."""
    border, scale, (batch, heads, q_len, _) = _Border(problem, count), problem.scale, problem.sizes
    rest, few = slice(count, None), slice(None, count)
    q, k, v, out, d_out = (dense_rows(x) for x in (problem.q, problem.k, v, out, d_out.to(v.dtype)))
    outside = None
    if q.dtype == torch.float32:  # there weights are made good by the sum of their row
        outside = torch.exp(border.column() - lse[:, :, rest, None]).sum(-1)
    within = gradients.backward(
        border.inner, v[:, :, rest], out[:, :, rest], lse[:, :, rest], d_out[:, :, rest], d_lse[:, :, rest], needs,
        outside,
    )  # fmt: skip
    row = torch.softmax(border.rows(), -1)  # whole rows: closer than by the log-sum-exp
    d_row = border.times_keys(d_out[:, :, few], v.mT)
    d_row = row * (d_row - (row * d_row).sum(-1, keepdim=True) + d_lse[:, :, few, None])
    d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    d_q[:, :, few] = border.times_keys(d_row.to(q.dtype), k) * scale

    dim, v_dim, block = q.shape[-1], v.shape[-1], 16 if interpreted() else 64
    blocks, tiling = -(-(q_len - count) // block), Tiling(block, 1, 4, 1)
    room = lambda *shape: torch.empty(batch, heads, blocks, *shape, dtype=torch.float32, device=q.device)  # noqa: E731
    d_k, d_v, d_alone = room(count, dim), room(count, v_dim), room(count)
    alone = border.alone.contiguous()
    steps = [0 if alone.shape[n] == 1 else alone.stride(n) for n in (0, 1)]
    run(
        leave_kernel, blocks * batch * heads, tiling,
        q, k, v, out, d_out, alone, lse, d_lse, within[0].contiguous(), d_q, d_k, d_v, d_alone,
        heads, q_len, count, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *d_out.stride()[:3],
        *lse.stride(), *d_lse.stride(), *steps, heads // k.shape[1], heads // v.shape[1],
        DIM=dim, V_DIM=v_dim, BLOCK_D=power(dim), BLOCK_V=power(v_dim), BLOCK_Q=block,
    )  # fmt: skip
    sides = []
    for ours, weights, from_rest, x, factor, like in (
        (within[1], d_row, d_k, q, scale, k), (within[2], row, d_v, d_out, 1.0, v),
    ):  # fmt: skip
        shared, wide, k_len = like.shape[1], like.shape[-1], like.shape[2]
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        corner = weights[..., few].mT @ x[:, :, few].float() * factor
        whole[:, :, few] = _shared(from_rest.sum(2) + corner, shared)
        run(
            spread_kernel, -(-(k_len - count) // block) * batch * shared, tiling,
            x, weights, ours.contiguous(), whole, shared, k_len, count, factor,
            *x.stride()[:3], *weights.stride()[:3],
            GROUP=heads // shared, DIM=wide, BLOCK_D=power(wide), BLOCK_K=block,
        )  # fmt: skip
        sides.append(whole)
    alone = torch.stack(
        [d_row[..., rest].sum((-2, -1)), d_alone.sum((-2, -1)), d_row[..., few].sum((-2, -1))], dim=-1
    )  # [batch, heads, 3]
    found: list[Tensor | None] = []
    for grad, operand in zip(within[3], problem.operands, strict=True):
        if grad is not None:  # every piece is a table, and all of them get the same
            part = alone if operand.shape[0] > 1 else alone.sum(0, keepdim=True)
            part = _shared(part.unsqueeze(-1), operand.shape[1]).squeeze(-1)
            grad = torch.cat([grad[..., :-3], grad[..., -3:] + part.to(grad.dtype)], dim=-1)
        found.append(grad)
    return d_q, sides[0], sides[1], found


def _shared(x: Tensor, heads: int) -> Tensor:
    """Summed over the heads that share one."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32).to(x.dtype)
