"""The way back from `border`: gradients of few rows and few columns of A, joined to those of the grid (eq. 22 to 24).

`leave_kernel` takes placed queries back from unplaced keys, `few_kernel` unplaced queries from all keys, and
`finish_kernel` adds up what blocks of them gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Problem
from . import gradients
from .border import Border, Looked, alone_of, ends_of, few_logits, widths_of
from .choice import Tiling, interpreted, power
from .launch import Start, again, dense_rows, precision, run
from .tiles import matrix


@triton.jit
def leave_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, ours_ptr, d_q_ptr,
    d_k_ptr, d_v_ptr, d_alone_ptr, alone, heads, q_len, count, scale,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    d_batch, d_head, d_step, lse_batch, lse_head, lse_step, d_lse_batch, d_lse_head, d_lse_step, k_group, v_group,
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
    bias = alone_of(alone, b, h, 1)
    for n in range(0, count):
        k = tl.load(k_ptr + n * k_step + d, mask=d < DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + n * v_step + e, mask=e < V_DIM, other=0.0).to(tl.float32)
        weights = tl.exp(tl.sum(q * k[None, :], 1) + bias - lse)
        d_logits = weights * (tl.sum(d_out * v[None, :], 1) - inner)
        d_q += (d_logits * scale)[:, None] * k[None, :]
        at = (tl.program_id(0) * count + n).to(tl.int64)
        tl.store(d_k_ptr + at * DIM + d, tl.sum(d_logits[:, None] * q, 0), mask=d < DIM)
        tl.store(d_v_ptr + at * V_DIM + e, tl.sum(weights[:, None] * d_out, 0), mask=e < V_DIM)
        tl.store(d_alone_ptr + at, tl.sum(d_logits, 0))
    where = d_q_ptr + (bh.to(tl.int64) * q_len + i)[:, None] * DIM + d[None, :]
    tl.store(where, d_q.to(d_q_ptr.dtype.element_ty), mask=both)


@triton.jit
def few_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, top_ptr, total_ptr, ours_k_ptr, ours_v_ptr,
    from_k_ptr, from_v_ptr, d_k_ptr, d_v_ptr, d_q_ptr, d_alone_ptr, alone, heads, shared, k_len, count, spans,
    row_blocks, scale,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    d_batch, d_head, d_step, lse_batch, lse_head, lse_step, d_lse_batch, d_lse_head, d_lse_step, k_group, v_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of what `rows_kernel` does, for one block of keys of one shared head, into those of all keys.

    d_k and d_v are `ours`, which placed queries gave to placed keys; what placed queries gave to unplaced keys, `from`,
    [heads, row_blocks, count, dim]; and what unplaced queries give. Sums over the block, of each head: d_q [blocks, u,
    dim], and d_alone [blocks, 2] for placed and unplaced keys. Where a sum of weights is given it is used, for it is
    closer than the log-sum-exp. d_k_ptr or d_v_ptr may be None: keys and values are shared by other numbers of heads.
    """
    blocks = tl.cdiv(k_len, BLOCK_K)
    block, bs = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b = (bs // shared).to(tl.int64)
    u, d = tl.arange(0, BLOCK_U), tl.arange(0, BLOCK_D)
    j = block * BLOCK_K + tl.arange(0, BLOCK_K)
    both = (u < count)[:, None] & (j < k_len)[None, :]
    acc_k = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for g in range(0, GROUP):
        h = (bs % shared * GROUP + g).to(tl.int64)
        bh = b * heads + h
        q = matrix(q_ptr + b * q_batch + h * q_head, q_step, u, count, DIM, BLOCK_D, True)
        k = matrix(k_ptr + b * k_batch + (h // k_group) * k_head, k_step, j, k_len, DIM, BLOCK_D, True)
        d_out = matrix(d_out_ptr + b * d_batch + h * d_head, d_step, u, count, V_DIM, BLOCK_V, True)
        s = few_logits(q, k, alone, b, h, j, k_len, count, scale, PRECISION)
        if top_ptr is None:
            lse = tl.load(lse_ptr + b * lse_batch + h * lse_head + u * lse_step, mask=u < count, other=0.0)
            weights = tl.where(both, tl.exp(s - lse[:, None]), 0.0)
        else:
            top, total = ends_of(top_ptr, total_ptr, bh, spans, BLOCK_U)
            weights = tl.where(both, tl.exp(s - top[:, None]) / total[:, None], 0.0)
        if d_v_ptr is not None:
            acc_v += tl.dot(tl.trans(weights.to(d_out.dtype)), d_out, input_precision=PRECISION)
        if d_k_ptr is not None:
            v = matrix(v_ptr + b * v_batch + (h // v_group) * v_head, v_step, j, k_len, V_DIM, BLOCK_V, True)
            out = matrix(out_ptr + b * out_batch + h * out_head, out_step, u, count, V_DIM, BLOCK_V, True)
            at = d_lse_ptr + b * d_lse_batch + h * d_lse_head + u * d_lse_step
            inner = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1) - tl.load(at, mask=u < count, other=0.0)
            d_logits = weights * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - inner[:, None])
            acc_k += tl.dot(tl.trans(d_logits.to(q.dtype)), q, input_precision=PRECISION) * scale
            d_q = tl.dot(d_logits.to(k.dtype), k, input_precision=PRECISION) * scale
            part = bh * blocks + block
            where = d_q_ptr + (part * count + u)[:, None] * DIM + d[None, :]
            tl.store(where, d_q, mask=(u < count)[:, None] & (d < DIM)[None, :])
            sums = tl.sum(d_logits, 0)
            tl.store(d_alone_ptr + part * 2, tl.sum(tl.where(j < count, 0.0, sums), 0))
            tl.store(d_alone_ptr + part * 2 + 1, tl.sum(tl.where(j < count, sums, 0.0), 0))
    first = (b * heads + bs % shared * GROUP) * row_blocks
    if d_k_ptr is not None:
        put(acc_k, d_k_ptr, ours_k_ptr, from_k_ptr, bs, first, j, k_len, count, GROUP * row_blocks, DIM, BLOCK_D)
    if d_v_ptr is not None:
        put(acc_v, d_v_ptr, ours_v_ptr, from_v_ptr, bs, first, j, k_len, count, GROUP * row_blocks, V_DIM, BLOCK_V)


@triton.jit
def put(acc, to_ptr, ours_ptr, from_ptr, bs, first, j, k_len, count, parts, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of keys j: what was found, `ours` of placed keys, and the sum of `from` for the others."""
    d = tl.arange(0, BLOCK)
    inside = (d < DIM)[None, :]
    ours = ours_ptr + (bs.to(tl.int64) * (k_len - count) + j - count)[:, None] * DIM + d[None, :]
    acc += tl.load(ours, mask=((j >= count) & (j < k_len))[:, None] & inside, other=0.0).to(tl.float32)
    if tl.min(j, 0) < count:
        for n in range(0, parts):
            given = from_ptr + ((first + n) * count + j)[:, None] * DIM + d[None, :]
            acc += tl.load(given, mask=(j < count)[:, None] & inside, other=0.0)
    where = to_ptr + (bs.to(tl.int64) * k_len + j)[:, None] * DIM + d[None, :]
    tl.store(where, acc.to(to_ptr.dtype.element_ty), mask=(j < k_len)[:, None] & inside)


@triton.jit
def finish_kernel(
    parts_ptr, d_q_ptr, rows_ptr, few_ptr, grad_ptr, bins_ptr, heads, q_len, count, key_blocks, row_blocks, programs,
    group, rows, first, bins, stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of blocks: d_q of one unplaced query, and after `programs` of those the three numbers of one table."""
    program = tl.program_id(0)
    if program < programs:
        finish_row(parts_ptr, d_q_ptr, program, q_len, count, key_blocks, DIM, BLOCK_D, BLOCK)
    elif grad_ptr is not None:
        finish_table(
            rows_ptr, few_ptr, grad_ptr, bins_ptr, program - programs, heads, key_blocks, row_blocks * count,
            group, rows, first, bins, stride, BLOCK,
        )  # fmt: skip


@triton.jit
def finish_row(
    parts_ptr, d_q_ptr, program, q_len, count, blocks, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    u, bh = program % count, (program // count).to(tl.int64)
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for n0 in range(0, blocks, BLOCK):
        at = ((bh * blocks + n0 + n) * count + u)[:, None] * DIM + d[None, :]
        total += tl.load(parts_ptr + at, mask=(n0 + n < blocks)[:, None] & (d < DIM)[None, :], other=0.0)
    tl.store(d_q_ptr + (bh * q_len + u) * DIM + d, tl.sum(total, 0).to(d_q_ptr.dtype.element_ty), mask=d < DIM)


@triton.jit
def finish_table(
    rows_ptr, few_ptr, grad_ptr, bins_ptr, table, heads, few_parts, row_parts, group, rows, first, bins, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Into the gradient of a table that `rows` batch rows and `group` heads share.

    rows [heads, row_parts] are the unplaced keys' from placed queries, few [heads, few_parts, 2] the unplaced queries'
    with placed and unplaced keys.
    """
    own, tables = tl.arange(0, BLOCK), heads // group
    query, key = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    neither = tl.zeros([BLOCK], tl.float32)
    for n in range(0, rows * group):
        bh = ((table // tables * rows + n // group) * heads + table % tables * group + n % group).to(tl.int64)
        for n0 in range(0, few_parts, BLOCK):
            few = few_ptr + (bh * few_parts + n0 + own) * 2
            query += tl.load(few, mask=n0 + own < few_parts, other=0.0)
            neither += tl.load(few + 1, mask=n0 + own < few_parts, other=0.0)
        for n0 in range(0, row_parts, BLOCK):
            key += tl.load(rows_ptr + bh * row_parts + n0 + own, mask=n0 + own < row_parts, other=0.0)
    which = tl.arange(0, 4)
    sums = tl.where(which == 0, tl.sum(query, 0), tl.where(which == 1, tl.sum(key, 0), tl.sum(neither, 0)))
    entry = first + which
    if bins_ptr is not None:
        entry = tl.load(bins_ptr + entry, mask=which < 3, other=0).to(tl.int32)
    inside = (which < 3) & (entry < bins)
    # entries that share a bin each store all of what it gets
    same = (entry[:, None] == entry[None, :]) & inside[None, :]
    sums = tl.sum(tl.where(same, sums[None, :], 0.0), 1)
    at = grad_ptr + table.to(tl.int64) * stride + entry
    tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool],
    count: int,
) -> gradients.Gradient:  # fmt: skip
    """Gradients of q, k, v and of the operands asked for."""
    border, scale, (batch, heads, q_len, k_len) = Border(problem, count), problem.scale, problem.sizes
    rest = slice(count, None)
    q, k, v, out, d_out = (dense_rows(x) for x in (problem.q, problem.k, v, out, d_out))
    d_out = d_out if d_out.dtype == v.dtype else d_out.to(v.dtype)
    outside = None
    if q.dtype == torch.float32:  # there weights are made good by the sum of their row
        outside = torch.exp(border.column() - lse[:, :, rest, None]).sum(-1)
    within = gradients.backward(
        border.inner, v[:, :, rest], out[:, :, rest], lse[:, :, rest], d_out[:, :, rest], d_lse[:, :, rest], needs,
        outside,
    )  # fmt: skip
    looked = border.look(q, k, v, False) if q.dtype == torch.float32 else Looked(*(None,) * 3, 0)  # type: ignore[arg-type]
    ours = [x.contiguous() for x in within[:3]]

    dim, v_dim, block = q.shape[-1], v.shape[-1], 16 if interpreted() else 64
    blocks, tiling, widths = -(-(q_len - count) // block), Tiling(block, 1, 4, 1), widths_of(q, v)
    room = lambda *shape: torch.empty(batch, heads, *shape, dtype=torch.float32, device=q.device)  # noqa: E731
    like = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
    from_k, from_v, d_column, d_q = room(blocks, count, dim), room(blocks, count, v_dim), room(blocks, count), like(q)
    steps = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *d_out.stride()[:3]
    steps = *steps, *lse.stride(), *d_lse.stride(), heads // k.shape[1], heads // v.shape[1]
    alike = *border.alike, q.shape, k.shape, v.shape, steps, out.dtype, d_lse.dtype
    again(
        (leave_kernel, *alike),
        (q, k, v, out, d_out, lse, d_lse, ours[0], d_q, from_k, from_v, d_column), (border.alone,),
        lambda: Start(
            q.device, leave_kernel, blocks * batch * heads, tiling,
            heads, q_len, count, scale, *steps, **widths, BLOCK_Q=block,
        ),
    )  # fmt: skip
    wide = 16 if interpreted() else 64 if max(dim, v_dim) <= 64 else 32
    key_blocks = -(-k_len // wide)
    d_k, d_v, d_row, few = like(k), like(v), room(key_blocks, count, dim), room(key_blocks, 2)
    sides = [(d_k, d_v)] if k.shape[1] == v.shape[1] else [(d_k, None), (None, d_v)]
    for to_k, to_v in sides:
        shared = k.shape[1] if to_k is not None else v.shape[1]
        again(
            (few_kernel, shared, to_k is None, to_v is None, *alike),
            (
                q, k, v, out, d_out, lse, d_lse, looked.top, looked.total, ours[1], ours[2], from_k, from_v, to_k, to_v,
                d_row, few,
            ),
            (border.alone,),
            lambda: Start(
                q.device, few_kernel, key_blocks * batch * shared, tiling,  # noqa: B023
                heads, shared, k_len, count, looked.spans, blocks, scale, *steps,  # noqa: B023
                **widths, BLOCK_U=power(count), BLOCK_K=wide, GROUP=heads // shared,  # noqa: B023
                PRECISION=precision(q.dtype),
            ),
        )  # fmt: skip
    programs, found, some = batch * heads * count, list(within[3]), 16 if interpreted() else 64
    pieces = [piece for piece in problem.form.pieces if needs[piece.slots[0]]]
    for piece in pieces or problem.form.pieces[:1]:
        slot, index = piece.slots[0], problem.operands[piece.lookup] if piece.lookup >= 0 else None
        operand, grad = problem.operands[slot], found[slot]
        total = None if grad is None else grad.float()
        tables = 0 if grad is None else operand.shape[0] * operand.shape[1]
        run(
            finish_kernel, programs + tables, Tiling(some, 1, 4, 1),
            d_row, d_q, d_column, few, total, index, heads, q_len, count, key_blocks, blocks, programs,
            heads // operand.shape[1], batch // operand.shape[0],
            (operand if index is None else index).shape[-1] - 3, operand.shape[-1], operand.shape[-1],
            DIM=dim, BLOCK_D=power(dim), BLOCK=some,
        )  # fmt: skip
        found[slot] = total if total is None else total.to(operand.dtype)
    return d_q, d_k, d_v, found
