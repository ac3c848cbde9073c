"""The backward kernels (eq. 22 to 24): weights are made again, tile by tile, from the log-sum-exp; nothing is atomic.

`query_kernel` sweeps keys for a block of queries: d_q, and sums of dS along rows. `key_kernel` sweeps queries for a
block of keys, on turned tiles: d_k, d_v, and sums along columns. Gradients of tables are in `diagonal`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    across,
    across_of,
    cols_of,
    constant_span,
    distance,
    down,
    down_of,
    kept,
    key_span,
    levels,
    logits,
    matrix,
    query_constant_span,
    query_span,
    rows_of,
    shift_of,
    shown,
    table_tile,
    vector,
)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


#: what rows have besides their numbers is kept for whole blocks of so many, the largest there are: no load is checked
ROOM = tl.constexpr(128)


@triton.jit
def inner_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, ends_ptr, inner_ptr, heads, q_len,
    out_batch, out_head, out_step, d_batch, d_head, d_step, lse_batch, lse_head, lse_step,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """What the passes need of each row, for whole blocks of rows (see `ends_of`).

    Its log-sum-exp in units of log 2, +inf where it sees nothing, so that its weights are 0. And the mean gradient of
    its weights, less the gradient of its log-sum-exp: what softmax subtracts.
    """
    room = tl.cdiv(q_len, ROOM) * ROOM
    blocks = room // BLOCK_Q
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = bh // heads, bh % heads
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    out_ptr += b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
    d_out_ptr += b.to(tl.int64) * d_batch + h.to(tl.int64) * d_head
    out = matrix(out_ptr, out_step, i, q_len, V_DIM, BLOCK_V, True).to(tl.float32)
    d_out = matrix(d_out_ptr, d_step, i, q_len, V_DIM, BLOCK_V, True).to(tl.float32)
    d_lse_ptr += b.to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head
    d_lse = tl.load(d_lse_ptr + i.to(tl.int64) * lse_step, mask=i < q_len, other=0.0)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * q_len + i, mask=i < q_len, other=float("-inf"))
    at = bh.to(tl.int64) * room + i
    tl.store(ends_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
    tl.store(inner_ptr + at, tl.sum(out * d_out, 1) - d_lse)


@triton.jit
def ends_of(ends_ptr, inner_ptr, given, b, h, i):
    """Log-sum-exp in units of log 2, and the mean gradient, of some queries."""
    at = (b * given.heads + h).to(tl.int64) * (tl.cdiv(given.q_len, ROOM) * ROOM) + i
    return tl.load(ends_ptr + at), tl.load(inner_ptr + at)


@triton.jit
def fix_of(fix_ptr, given, b, h, i):
    """What makes good the rounding of a row's log-sum-exp; 1 where nothing is asked for."""
    if fix_ptr is not None:
        return tl.load(fix_ptr + (b * given.heads + h).to(tl.int64) * given.q_len + i, mask=i < given.q_len, other=0.0)
    else:
        return 1.0


@triton.jit
def weigh(
    dots, lse, rows, cols, given, b, h, i, j, edge, shift, level, across_tile, down_row,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, made again from the log-sum-exp; and its logits, before the mask."""
    s = logits(dots, rows, cols, given, b, h, i, j, shift, level, across_tile, down_row, CONSTANT, TURNED)
    weights = tl.exp2(s - down(lse, TURNED))
    if MASKED:
        weights = tl.where(shown(given, b, h, i, j, shift, TURNED) & across(j < edge, TURNED), weights, 0.0)
    return weights, s


@triton.jit
def pull_back(weights, d_weights, s, inner, given, b, h, i, j, MASKED: tl.constexpr, TURNED: tl.constexpr):
    """dS: the gradient of logits, from that of dropped weights."""
    if given.seeds is not None:
        d_weights = d_weights * kept(given, b, h, i, j, TURNED)
    d_logits = weights * (d_weights - down(inner, TURNED))
    if given.softcap is not None:
        part = s / given.softcap
        d_logits = d_logits * (1.0 - part * part)
    if MASKED:  # a masked pair may have a NaN of its own
        d_logits = tl.where(weights == 0.0, 0.0, d_logits)
    return d_logits


@triton.jit
def d_tile(
    q, k, v, d_out, lse, inner, rows, cols, given, b, h, i, j, edge, shift, level, across_tile, down_row,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS, q·k and the weights of a tile."""
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    weights, s = weigh(
        dots, lse, rows, cols, given, b, h, i, j, edge, shift, level, across_tile, down_row, MASKED, CONSTANT, False
    )
    return pull_back(weights, d_weights, s, inner, given, b, h, i, j, MASKED, False), dots, weights


@triton.jit
def add_rows(
    sums,
    weights,
    d_logits,
    dots,
    rows,
    cols,
    given,
    wanted,
    b,
    h,
    i,
    j,
    shift,
    level,
    CONSTANT: tl.constexpr,
    FAR: tl.constexpr,
):
    """Sums of dS along the rows of a tile. FAR: 1 where all displacements are >= reach, -1 where all are <= -reach."""
    plain, scale, cross, slope, gate, left, right, total = sums
    if wanted.fix is not None:
        total += tl.sum(weights, 1)
    if wanted.plain is not None:
        plain += tl.sum(d_logits, 1)
    if wanted.scale is not None:
        scale += tl.sum(d_logits * dots, 1)
    if wanted.cross is not None:
        cross += tl.sum(d_logits * cols[2][None, :], 1)
    if wanted.slope is not None:
        slope -= tl.sum(d_logits * distance(i, j, shift, False), 1)
    if wanted.gate is not None:
        if CONSTANT:
            gate += tl.sum(d_logits, 1) * level
        else:
            gate += tl.sum(d_logits * table_tile(given, b, h, rows, cols, False), 1)
    if wanted.left is not None:
        if FAR == 1:
            left += tl.sum(d_logits, 1)
        elif FAR == -1:
            right += tl.sum(d_logits, 1)
        else:
            delta = (i + shift)[:, None] - j[None, :]
            left += tl.sum(tl.where(delta >= given.table.reach, d_logits, 0.0), 1)
            right += tl.sum(tl.where(delta <= -given.table.reach, d_logits, 0.0), 1)
    return plain, scale, cross, slope, gate, left, right, total


@triton.jit
def query_tile(
    acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, k_step, v_step, given, wanted, b, h, i, j0, edge, rows, shift, level,
    across_tile, down_row,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile into the gradient of queries, and its dS."""
    j = j0 + tl.arange(0, BLOCK_K)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, MASKED)
    v = matrix(v_ptr, v_step, j, given.k_len, V_DIM, BLOCK_V, MASKED)
    cols = cols_of(given, b, h, j)
    d_logits, dots, weights = d_tile(
        q, k, v, d_out, lse, inner, rows, cols, given, b, h, i, j, edge, shift, level, across_tile, down_row,
        MASKED, CONSTANT, PRECISION,
    )  # fmt: skip
    sums = add_rows(sums, weights, d_logits, dots, rows, cols, given, wanted, b, h, i, j, shift, level, CONSTANT, FAR)
    pulled = d_logits
    if given.has.col_scale:
        pulled = pulled * cols[0][None, :]
    acc = tl.dot(pulled.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, sums, d_logits


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, ends_ptr, inner_ptr, d_q_ptr, given, wanted,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, d_batch, d_head,
    k_group, v_group,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, D_STEP: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, BACKWARDS: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Gradients that sum over keys, for one block of queries of one head."""
    blocks = tl.cdiv(given.q_len, BLOCK_Q)
    block = tl.program_id(0) % blocks
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    if BACKWARDS:
        block = blocks - 1 - block
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    d_out_ptr += b.to(tl.int64) * d_batch + h.to(tl.int64) * d_head
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    v_ptr += b.to(tl.int64) * v_batch + (h // v_group).to(tl.int64) * v_head
    q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
    d_out = matrix(d_out_ptr, D_STEP, i, given.q_len, V_DIM, BLOCK_V, True)
    lse, inner = ends_of(ends_ptr, inner_ptr, given, b, h, i)
    rows, shift = rows_of(given, b, h, i), shift_of(given, b)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    none = tl.zeros([BLOCK_Q], tl.float32)
    sums = none, none, none, none, none, none, none, none
    sink = none
    if given.has.sink:
        sink = none + vector(given.sink, b, h, i * 0, 1)

    if given.has.axes:
        for x0 in range(0, given.axes.wide, BLOCK_K):
            x = x0 + tl.arange(0, BLOCK_K)
            tile = across_of(given, b, h, i, x, False)
            spread = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            down_row = down_of(given, b, h, i, 0)
            for line in range(0, given.axes.high):  # the next line's values come while this one's are used
                coming = down_of(given, b, h, i, tl.minimum(line + 1, given.axes.high - 1))
                acc, sums, d_logits = query_tile(
                    acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i,
                    line * given.axes.wide + x0, (line + 1) * given.axes.wide, rows, shift, 0.0,
                    tile, down_row,
                    DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, RAGGED, False, 0, PRECISION,
                )  # fmt: skip
                down_row = coming
                spread += d_logits
                if wanted.down is not None:
                    part = (x0 // BLOCK_K * (tl.num_programs(0) // blocks) + b * given.heads + h).to(tl.int64)
                    at = (i // given.axes.q_wide * given.axes.high + line) * given.axes.q_wide + i % given.axes.q_wide
                    where = wanted.down + part * given.q_len * given.axes.high + at
                    tl.store(where, tl.sum(d_logits, 1).to(wanted.down.dtype.element_ty), mask=i < given.q_len)
            if wanted.across is not None:
                base = wanted.across + (b * given.heads + h).to(tl.int64) * given.q_len * given.axes.wide
                at = (i % given.axes.q_wide * given.axes.q_high + i // given.axes.q_wide) * given.axes.wide
                inside = (i < given.q_len)[:, None] & (x < given.axes.wide)[None, :]
                tl.store(base + at[:, None] + x[None, :], spread.to(wanted.across.dtype.element_ty), mask=inside)
    else:
        first, full, still, last = key_span(given, b, i0, shift, BLOCK_Q, BLOCK_K)
        left, right = constant_span(given, i0, shift, full, still, BLOCK_Q, BLOCK_K, False)
        far_left, far_right = 0.0, 0.0
        if given.has.clipped:
            far_left, far_right = levels(given, b, h)
        if given.has.mask:
            for j0 in range(first, full, BLOCK_K):
                acc, sums, _ = query_tile(
                    acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i, j0, last,
                    rows, shift, 0.0, 0.0, 0.0,
                    DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, True, False, 0, PRECISION,
                )  # fmt: skip
        if given.has.clipped:
            for j0 in range(full, left, BLOCK_K):
                acc, sums, _ = query_tile(
                    acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i, j0, last,
                    rows, shift, far_left, 0.0, 0.0,
                    DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, False, True, 1, PRECISION,
                )  # fmt: skip
        for j0 in range(left, right, BLOCK_K):
            acc, sums, _ = query_tile(
                acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i, j0, last,
                rows, shift, 0.0, 0.0, 0.0,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, False, False, 0, PRECISION,
            )  # fmt: skip
        if given.has.clipped:
            for j0 in range(right, still, BLOCK_K):
                acc, sums, _ = query_tile(
                    acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i, j0, last,
                    rows, shift, far_right, 0.0, 0.0,
                    DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, False, True, -1, PRECISION,
                )  # fmt: skip
        for j0 in range(still, last, BLOCK_K):
            acc, sums, _ = query_tile(
                acc, sums, q, d_out, lse, inner, k_ptr, v_ptr, K_STEP, V_STEP, given, wanted, b, h, i, j0, last,
                rows, shift, 0.0, 0.0, 0.0,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, True, False, 0, PRECISION,
            )  # fmt: skip

    fix = none + 1.0
    if wanted.fix is not None:  # the rows are whole: their sum tells how far exp(logit - lse) is off
        share = none
        if given.has.sink:
            share = tl.exp2(sink - lse)
        if wanted.outside is not None:
            at = (b * given.heads + h).to(tl.int64) * given.q_len + i
            share += tl.load(wanted.outside + at, mask=i < given.q_len, other=0.0)
        fix = tl.where(sums[7] > 0.0, (1.0 - share) / sums[7], 0.0)
    acc = acc * (given.scale * LN2) * fix[:, None]
    if given.has.row_scale:
        acc = acc * rows[0][:, None]
    d = tl.arange(0, BLOCK_D)
    base = (b * given.heads + h).to(tl.int64) * given.q_len
    inside = i < given.q_len
    where = d_q_ptr + (base + i)[:, None] * DIM + d[None, :]
    tl.store(where, acc.to(d_q_ptr.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])
    if wanted.fix is not None:
        tl.store(wanted.fix + base + i, fix, mask=inside)
    if wanted.plain is not None:
        tl.store(wanted.plain + base + i, sums[0] * fix, mask=inside)
    if wanted.scale is not None:
        tl.store(wanted.scale + base + i, sums[1] * fix * (given.scale * LN2), mask=inside)
    if wanted.cross is not None:
        tl.store(wanted.cross + base + i, sums[2] * fix, mask=inside)
    if wanted.slope is not None:
        tl.store(wanted.slope + base + i, sums[3] * fix, mask=inside)
    if wanted.gate is not None:
        tl.store(wanted.gate + base + i, sums[4] * fix * LN2, mask=inside)
    if wanted.left is not None:
        tl.store(wanted.left + base + i, sums[5] * fix, mask=inside)
        tl.store(wanted.right + base + i, sums[6] * fix, mask=inside)


@triton.jit
def add_dot(a, b, total, one, PRECISION: tl.constexpr):
    """total + a b. In float32 a tile's product is summed by itself first: one chain over all rows rounds too often.

    `one` is 1, which the compiler must not know: it would make one chain of it again.
    """
    if a.dtype == tl.float32:
        return total + tl.dot(a, b, input_precision=PRECISION) * one
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def key_tile(
    d_k, d_v, sums, k, v, q_ptr, d_out_ptr, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j, edge, cols,
    shift, level, x, line, one,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile into the gradients of keys and values."""
    i = i0 + tl.arange(0, BLOCK_Q)
    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, MASKED)
    d_out = matrix(d_out_ptr, d_step, i, given.q_len, V_DIM, BLOCK_V, MASKED)
    lse, inner = ends_of(ends_ptr, inner_ptr, given, b, h, i)
    rows = rows_of(given, b, h, i)
    across_tile, down_row = 0.0, 0.0
    if given.has.axes:
        across_tile, down_row = across_of(given, b, h, i, x, True), down_of(given, b, h, i, line)
    # in this order no matrix product is left open when the next one must wait
    dots = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    weights, s = weigh(
        dots, lse, rows, cols, given, b, h, i, j, edge, shift, level, across_tile, down_row, MASKED, CONSTANT, True
    )
    if wanted.fix is not None:
        weights = weights * fix_of(wanted.fix, given, b, h, i)[None, :]
    product = weights
    if given.seeds is not None:
        product = weights * kept(given, b, h, i, j, True)
    d_v = add_dot(product.to(d_out.dtype), d_out, d_v, one, PRECISION)
    d_weights = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    d_logits = pull_back(weights, d_weights, s, inner, given, b, h, i, j, MASKED, True)
    plain, scale, cross = sums
    if wanted.plain is not None:
        plain += tl.sum(d_logits, 1)
    if wanted.scale is not None:
        scale += tl.sum(d_logits * dots, 1)
    if wanted.cross is not None:
        cross += tl.sum(d_logits * rows[2][None, :], 1)
    pulled = d_logits
    if given.has.row_scale:
        pulled = pulled * rows[0][None, :]
    if given.has.col_scale:
        pulled = pulled * cols[0][:, None]
    d_k = add_dot(pulled.to(q.dtype), q, d_k, one, PRECISION)
    return d_k, d_v, (plain, scale, cross)


@triton.jit
def key_head(
    d_k, d_v, k, v, q_ptr, d_out_ptr, ends_ptr, inner_ptr, q_batch, q_head, q_step, d_batch, d_head, d_step,
    given, wanted, b, h, j, edge, shift, x, line, first, full, low, high, still, last, one,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The queries of one head into the gradients of a block of keys."""
    q_at = q_ptr + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    d_at = d_out_ptr + b.to(tl.int64) * d_batch + h.to(tl.int64) * d_head
    cols = cols_of(given, b, h, j)
    none = tl.zeros([BLOCK_K], tl.float32)
    sums = none, none, none
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
    # Without a mask this loop is empty. It is there all the same: after it the sums are no constants, and ptxas need
    # not set them between matrix products, which would serialise these.
    for i0 in range(first, full, BLOCK_Q):
        d_k, d_v, sums = key_tile(
            d_k, d_v, sums, k, v, q_at, d_at, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j,
            edge, cols, shift, 0.0, x, line, one,
            DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, True, False, PRECISION,
        )  # fmt: skip
    if given.has.clipped:
        for i0 in range(full, low, BLOCK_Q):
            d_k, d_v, sums = key_tile(
                d_k, d_v, sums, k, v, q_at, d_at, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j,
                edge, cols, shift, far_right, x, line, one,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, False, True, PRECISION,
            )  # fmt: skip
    for i0 in range(low, high, BLOCK_Q):
        d_k, d_v, sums = key_tile(
            d_k, d_v, sums, k, v, q_at, d_at, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j,
            edge, cols, shift, 0.0, x, line, one,
            DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, False, False, PRECISION,
        )  # fmt: skip
    if given.has.clipped:
        for i0 in range(high, still, BLOCK_Q):
            d_k, d_v, sums = key_tile(
                d_k, d_v, sums, k, v, q_at, d_at, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j,
                edge, cols, shift, far_left, x, line, one,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, False, True, PRECISION,
            )  # fmt: skip
    for i0 in range(still, last, BLOCK_Q):
        d_k, d_v, sums = key_tile(
            d_k, d_v, sums, k, v, q_at, d_at, ends_ptr, inner_ptr, q_step, d_step, given, wanted, b, h, i0, j,
            edge, cols, shift, 0.0, x, line, one,
            DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, True, False, PRECISION,
        )  # fmt: skip
    base = (b * given.heads + h).to(tl.int64) * given.k_len
    if wanted.plain is not None:
        tl.store(wanted.plain + base + j, sums[0], mask=j < edge)
    if wanted.scale is not None:
        tl.store(wanted.scale + base + j, sums[1] * (given.scale * LN2), mask=j < edge)
    if wanted.cross is not None:
        tl.store(wanted.cross + base + j, sums[2] * LN2, mask=j < edge)
    return d_k, d_v


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, ends_ptr, inner_ptr, d_k_ptr, d_v_ptr, given, wanted,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, d_batch, d_head,
    shared, k_group, v_group, columns, one,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, D_STEP: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, RAGGED: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Gradients that sum over queries, for one block of keys, and the heads that share it.

    `columns` is the number of key tiles in a line of a grid, where terms of its axes are added.
    """
    blocks = tl.cdiv(given.k_len, BLOCK_K)
    if given.has.axes:
        blocks = given.axes.high * columns
    block = tl.program_id(0) % blocks
    b, group = tl.program_id(0) // blocks // shared, tl.program_id(0) // blocks % shared
    j0, edge, line = block * BLOCK_K, given.k_len, 0
    x = tl.arange(0, BLOCK_K)
    if given.has.axes:
        line = block // columns
        x += block % columns * BLOCK_K
        j0 = line * given.axes.wide + block % columns * BLOCK_K
        edge = (line + 1) * given.axes.wide
    j = j0 + tl.arange(0, BLOCK_K)
    shift = shift_of(given, b)
    k_ptr += b.to(tl.int64) * k_batch + (group * GROUP // k_group).to(tl.int64) * k_head
    v_ptr += b.to(tl.int64) * v_batch + (group * GROUP // v_group).to(tl.int64) * v_head
    k = matrix(k_ptr, K_STEP, j, edge, DIM, BLOCK_D, True)
    v = matrix(v_ptr, V_STEP, j, edge, V_DIM, BLOCK_V, True)
    d_k, d_v = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    first, full, still, last = query_span(given, b, j0, shift, BLOCK_Q, BLOCK_K)
    if given.has.axes and RAGGED:
        full = (last + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        still = full
    low, high = query_constant_span(given, j0, shift, full, still, BLOCK_Q, BLOCK_K)

    if GROUP == 1:
        d_k, d_v = key_head(
            d_k, d_v, k, v, q_ptr, d_out_ptr, ends_ptr, inner_ptr, q_batch, q_head, Q_STEP, d_batch, d_head, D_STEP,
            given, wanted, b, group, j, edge, shift, x, line, first, full, low, high, still, last, one,
            DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K, PRECISION, RAGGED,
        )  # fmt: skip
    else:
        for member in range(0, GROUP):
            d_k, d_v = key_head(
                d_k, d_v, k, v, q_ptr, d_out_ptr, ends_ptr, inner_ptr, q_batch, q_head, Q_STEP, d_batch, d_head, D_STEP,
                given, wanted, b, group * GROUP + member, j, edge, shift, x, line, first, full, low, high, still, last,
                one,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K, PRECISION, RAGGED,
            )  # fmt: skip

    d_k = d_k * (given.scale * LN2)
    base = (b * shared + group).to(tl.int64) * given.k_len
    d = tl.arange(0, BLOCK_D)
    where = d_k_ptr + (base + j)[:, None] * DIM + d[None, :]
    tl.store(where, d_k.to(d_k_ptr.dtype.element_ty), mask=(j < edge)[:, None] & (d < DIM)[None, :])
    d = tl.arange(0, BLOCK_V)
    where = d_v_ptr + (base + j)[:, None] * V_DIM + d[None, :]
    tl.store(where, d_v.to(d_v_ptr.dtype.element_ty), mask=(j < edge)[:, None] & (d < V_DIM)[None, :])
