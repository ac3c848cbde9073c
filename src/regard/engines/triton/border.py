"""Grids with unplaced tokens (BEiT's class token): the grid by the usual kernels, and the border around it by others.

Unplaced tokens come first, so they are the first few rows and columns of A. Without them the table is a `Toeplitz`,
whose tiles load whole vectors; with them no tile would begin where a line of the grid does. The border is few rows
times all keys and all queries times few keys, and joins the rest by the log-sum-exp (eq. 19, 22 to 24):

    logits   corner + rows [u, k_len]        the unplaced queries, whole rows: `rows_kernel`
             column        [q_len - u, u]    the unplaced keys, for the others: `join_kernel`

The way back is in `leave`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Form, Problem, each_head, product_buffer
from .choice import Tiling, interpreted, power
from .launch import Start, again, dense_rows, precision
from .lay import full_table
from .product import product
from .tiles import matrix


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


class Alone(NamedTuple):
    """What a table says of pairs without a place: the query has none, the key has none, neither has one."""

    ptr: Any
    bins: Any  # where they lie; None: at `first`, one after another
    batch: Any
    head: Any
    first: Any
    count: Any  # bins from here on are 0


@triton.jit
def alone_of(alone, b, h, which: tl.constexpr):
    at = alone.first + which
    if alone.bins is not None:
        at = tl.load(alone.bins + at).to(tl.int32)
    base = alone.ptr + b.to(tl.int64) * alone.batch + h.to(tl.int64) * alone.head
    return tl.load(base + at, mask=at < alone.count, other=0.0).to(tl.float32)


class Border:
    """The first `count` rows and columns of A, and the problem without them."""

    def __init__(self, problem: Problem, count: int):
        self.problem, self.count = problem, count
        form = _without(problem.form)
        q, k = problem.q[:, :, count:], problem.k[:, :, count:]
        self.inner = problem._replace(form=form, q=q, k=k)
        (piece, *others), bins, first = form.pieces, None, 0
        table = dense_rows(each_head(problem.operands[piece.slots[0]], problem.q.shape[1]))
        if others:
            table = self.table()
        elif piece.lookup >= 0:
            bins = problem.operands[piece.lookup]
            first = bins.shape[-1] - 3
        if bins is None and not others:
            first = table.shape[-1] - 3
        self.alone = Alone(
            table, bins, 0 if len(table) == 1 else table.stride(0), 0 if table.shape[1] == 1 else table.stride(1),
            first, table.shape[-1],
        )  # fmt: skip
        at = 0 if bins is None else bins.data_ptr()
        #: all that launches follow from, besides shapes and strides of what they are given
        self.alike = (
            count, problem.scale, *self.alone[2:], table.dtype, table.data_ptr() & 15 == 0, bins is None, at & 15 == 0,
            q.device, q.dtype, precision(q.dtype),
        )  # fmt: skip

    def table(self) -> Tensor:
        """The three numbers of all tables together: [batch or 1, heads or 1, 3]."""
        tables = [full_table(self.problem, piece)[..., -3:] for piece in self.problem.form.pieces]
        return sum(tables[1:], tables[0]).contiguous()

    def column(self) -> Tensor:
        """Logits of the unplaced keys for the placed queries: [batch, heads, q_len - u, u]."""
        k = each_head(self.problem.k[:, :, : self.count], self.problem.q.shape[1])
        return (self.inner.q @ k.mT).float() * self.problem.scale + self.table()[..., 1, None, None]

    def look(self, q: Tensor, k: Tensor, v: Tensor, values: bool) -> Looked:
        """The unplaced queries over spans of keys, to be joined."""
        (batch, heads, _, k_len), count = self.problem.sizes, self.count
        dim, v_dim, rows, chunk = q.shape[-1], v.shape[-1], power(count), 32 if interpreted() else 256
        block = 16 if interpreted() else 64 if max(dim, v_dim) <= 128 else 32
        spans = -(-k_len // chunk)
        room = lambda *shape: torch.empty(batch, heads, spans, rows, *shape, dtype=torch.float32, device=q.device)  # noqa: E731
        found = Looked(room(), room(), room(v_dim) if values else None, spans)
        again(
            (rows_kernel, values, *self.alike, *_laid(q, k, v)), (q, k, v, *found[:3]), (self.alone,),
            lambda: Start(
                q.device, rows_kernel, batch * heads * spans, Tiling(block, block, 4, 1),
                heads, k_len, count, spans, self.problem.scale,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads // k.shape[1], heads // v.shape[1],
                **widths_of(q, v), BLOCK_U=rows, BLOCK_K=block, CHUNK=chunk, PRECISION=precision(q.dtype),
            ),
        )  # fmt: skip
        return found


def _laid(*tensors: Tensor) -> list:
    """How some tensors lie."""
    return [y for x in tensors for y in (x.shape, x.stride())]


class Looked(NamedTuple):
    """Of each span of keys: the largest logit of a row, the sum of its weights relative to that, and their product."""

    top: Tensor
    total: Tensor
    acc: Tensor | None
    spans: int


@functools.lru_cache(maxsize=64)
def _without(form: Form) -> Form:
    """The form of the grid alone."""
    return form._replace(q_geometry=(*form.q_geometry[:2], 0), k_geometry=(*form.k_geometry[:2], 0))


def widths_of(q: Tensor, v: Tensor) -> dict[str, int]:
    dim, v_dim = q.shape[-1], v.shape[-1]
    return {"DIM": dim, "V_DIM": v_dim, "BLOCK_D": power(dim), "BLOCK_V": power(v_dim)}


@triton.jit
def few_logits(q, k, alone, b, h, j, k_len, count, scale, PRECISION: tl.constexpr):
    """Logits of unplaced queries and keys j; -inf past the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    s += tl.where(j < count, alone_of(alone, b, h, 2), alone_of(alone, b, h, 0))[None, :]
    return tl.where((j < k_len)[None, :], s, float("-inf"))


@triton.jit
def rows_kernel(
    q_ptr, k_ptr, v_ptr, top_ptr, total_ptr, acc_ptr, alone, heads, k_len, count, spans, scale,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, k_group, v_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The unplaced queries of one head over one span of keys."""
    bh = tl.program_id(0) // spans
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    begin = tl.program_id(0) % spans * CHUNK
    u, e = tl.arange(0, BLOCK_U), tl.arange(0, BLOCK_V)
    q = matrix(q_ptr + b * q_batch + h * q_head, q_step, u, count, DIM, BLOCK_D, True)
    k_ptr += b * k_batch + (h // k_group) * k_head
    v_ptr += b * v_batch + (h // v_group) * v_head
    top = tl.full([BLOCK_U], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_U], tl.float32)
    acc = tl.zeros([BLOCK_U, BLOCK_V], tl.float32)
    for j0 in range(begin, tl.minimum(begin + CHUNK, k_len), BLOCK_K):
        j = j0 + tl.arange(0, BLOCK_K)
        k = matrix(k_ptr, k_step, j, k_len, DIM, BLOCK_D, True)
        s = few_logits(q, k, alone, b, h, j, k_len, count, scale, PRECISION)
        new = tl.maximum(top, tl.max(s, 1))
        weights, fade = tl.exp(s - new[:, None]), tl.exp(top - new)
        top, total = new, total * fade + tl.sum(weights, 1)
        if acc_ptr is not None:
            v = matrix(v_ptr, v_step, j, k_len, V_DIM, BLOCK_V, True)
            acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    at = tl.program_id(0).to(tl.int64) * BLOCK_U + u
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, total)
    if acc_ptr is not None:
        tl.store(acc_ptr + at[:, None] * V_DIM + e[None, :], acc, mask=(e < V_DIM)[None, :])


@triton.jit
def ends_of(top_ptr, total_ptr, bh, spans, BLOCK_U: tl.constexpr):
    """The largest logit of each unplaced query over all spans, and the sum of its weights relative to that."""
    u = tl.arange(0, BLOCK_U)
    top = tl.full([BLOCK_U], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_U], tl.float32)
    for n in range(0, spans):
        at = (bh * spans + n).to(tl.int64) * BLOCK_U + u
        part = tl.load(top_ptr + at)
        new = tl.maximum(top, part)
        total = total * tl.exp(top - new) + tl.load(total_ptr + at) * tl.exp(part - new)
        top = new
    return top, total


@triton.jit
def join_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, top_ptr, total_ptr, acc_ptr, out_ptr, lse_ptr, alone, heads, q_len, count, spans,
    scale, q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    k_group, v_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_U: tl.constexpr,
):  # fmt: skip
    """The unplaced keys into the product of the placed ones, in place, for one block of placed queries of one head.

    The first block of a head joins the spans of its unplaced queries too.
    """
    blocks = tl.cdiv(q_len - count, BLOCK_Q)
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = bh // heads, bh % heads
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)  # among the placed
    inside = row < q_len - count
    i, d, e = (row + count).to(tl.int64), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    v_ptr += b.to(tl.int64) * v_batch + (h // v_group).to(tl.int64) * v_head
    out_ptr += b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
    where = out_ptr + i[:, None] * out_step + e[None, :]
    both = inside[:, None] & (e < V_DIM)[None, :]
    q = tl.load(q_ptr + i[:, None] * q_step + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    q = q.to(tl.float32) * scale
    acc = tl.load(where, mask=both, other=0.0).to(tl.float32)
    lse = tl.load(part_ptr + bh.to(tl.int64) * (q_len - count) + row, mask=inside, other=0.0)
    bias = alone_of(alone, b, h, 1)
    top, total = lse, tl.full([BLOCK_Q], 1.0, tl.float32)
    for n in range(0, count):
        k = tl.load(k_ptr + n * k_step + d, mask=d < DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + n * v_step + e, mask=e < V_DIM, other=0.0).to(tl.float32)
        s = tl.sum(q * k[None, :], 1) + bias
        new = tl.maximum(top, s)
        fade, weight = tl.exp(top - new), tl.exp(s - new)
        total = total * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * v[None, :]
        top = new
    tl.store(where, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=both)
    tl.store(lse_ptr + bh.to(tl.int64) * q_len + i, top + tl.log(total), mask=inside)
    if block == 0:
        join_rows(
            top_ptr, total_ptr, acc_ptr, out_ptr, lse_ptr, bh, q_len, count, spans, out_step, V_DIM, BLOCK_V, BLOCK_U
        )


@triton.jit
def join_rows(
    top_ptr, total_ptr, acc_ptr, out_ptr, lse_ptr, bh, q_len, count, spans, out_step,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """The spans of one head's unplaced queries, joined."""
    u, e = tl.arange(0, BLOCK_U), tl.arange(0, BLOCK_V)
    top, total = ends_of(top_ptr, total_ptr, bh, spans, BLOCK_U)
    rows = tl.zeros([BLOCK_U, BLOCK_V], tl.float32)
    for n in range(0, spans):
        at = (bh * spans + n).to(tl.int64) * BLOCK_U + u
        share = tl.exp(tl.load(top_ptr + at) - top) / total
        part = tl.load(acc_ptr + at[:, None] * V_DIM + e[None, :], mask=(e < V_DIM)[None, :], other=0.0)
        rows += share[:, None] * part
    where = out_ptr + u[:, None].to(tl.int64) * out_step + e[None, :]
    tl.store(where, rows.to(out_ptr.dtype.element_ty), mask=(u < count)[:, None] & (e < V_DIM)[None, :])
    tl.store(lse_ptr + bh.to(tl.int64) * q_len + u, top + tl.log(total), mask=u < count)


def forward(problem: Problem, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp."""
    border, (batch, heads, q_len, _) = Border(problem, count), problem.sizes
    out = product_buffer(problem, v)
    _, part = product(border.inner, v[:, :, count:], out[:, :, count:])
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=v.device)
    q, k, v = (dense_rows(x) for x in (problem.q, problem.k, v))
    looked, block = border.look(q, k, v, True), 16 if interpreted() else 64
    again(
        (join_kernel, *border.alike, *_laid(q, k, v, out)), (q, k, v, part, *looked[:3], out, lse), (border.alone,),
        lambda: Start(
            q.device, join_kernel, -(-(q_len - count) // block) * batch * heads, Tiling(block, 1, 4, 1),
            heads, q_len, count, looked.spans, problem.scale,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads // k.shape[1], heads // v.shape[1],
            **widths_of(q, v), BLOCK_Q=block, BLOCK_U=power(count),
        ),
    )  # fmt: skip
    return out, lse
