"""What kernels share that look at A without storing it, and the one that looks along diagonals (eq. 28).

| kernel | one program | gives |
|---|---|---|
| rows.by_rows | a block of queries sweeps its keys | log-sum-exp, entropy, groups of keys |
| strongest.by_groups | a query sees the keys of its best groups | the strongest keys |
| columns.by_columns | a block of keys sweeps its queries | mass received, and cells of a heat map |
| by_diagonals | square tiles along one block diagonal | mass per displacement |

The last two take weights exp2(logit - lse) from the log-sum-exp of the first. They add tiles in registers and sum over
a tile once, at the end: no atomics, and the same bits every time. A row that sees nothing, or is past the end, has the
log-sum-exp +inf here, so that its weights are 0.

Where there is nothing but dot products, few operations a pair are left, and every one of them counts: pointers are
computed once and moved on, what a thread has of a tile is summed in the thread, and few registers let more programs
share a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    across_of,
    cols_of,
    diagonal_sums,
    diagonal_table,
    key_bounds,
    levels,
    logits,
    matrix,
    query_bounds,
    rows_of,
    shift_of,
    shown,
)

#: sums that are kept of each row: what eight columns of a tile have side by side stays in a thread
PARTS = tl.constexpr(8)


@triton.jit
def ahead(where, start, step, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a matrix, `start` rows after `where`: pointers are computed once, and all rows are there."""
    where += (tl.full([], 0, tl.int64) + start) * step
    if DIM != BLOCK:
        return tl.load(where, mask=(tl.arange(0, BLOCK) < DIM)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def axes_tile(given, b, h, i, j):
    """What both axes of a grid add, for keys in any order."""
    a = given.axes
    x, y = j % a.wide, j // a.wide
    base = a.down + (b * given.heads + h).to(tl.int64) * given.q_len * a.high
    at = ((i // a.q_wide * a.high)[:, None] + y[None, :]) * a.q_wide + (i % a.q_wide)[:, None]
    inside = (i < given.q_len)[:, None] & (j < given.k_len)[None, :]
    down = tl.load(base + at, mask=inside, other=0.0)
    return across_of(given, b, h, i, x, False).to(tl.float32) + down.to(tl.float32)


@triton.jit
def scores(
    q, k, given, b, h, i, j, rows, shift, level,
    BLOCK_Q: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of queries i and keys j, in units of log 2, without a mask. `level` stands for the table if CONSTANT.

    Callers do this themselves where BARE (nothing is added but a table) and CONSTANT: one operation a pair less.
    """
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    added = 0.0
    if given.has.axes:
        added = axes_tile(given, b, h, i, j)
    none = tl.zeros([BLOCK_Q], tl.float32)
    return logits(
        dots, rows, cols_of(given, b, h, j), given, b, h, i, j, shift, level, added, none, CONSTANT, False
    )  # fmt: skip


@triton.jit
def weigh(
    q, k, lse, fix, given, b, h, i, j, cols_in, shift, level,
    BLOCK_Q: tl.constexpr, CHECK: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr,
    FIX: tl.constexpr,
):  # fmt: skip
    """Weights of queries i and keys j; 0 where the log-sum-exp is +inf and, where CHECK, of keys that are not shown.

    FIX: `lse` is the row's largest logit, and `fix` one over what weights relative to it sum to: see `rows.by_rows`.
    """
    if BARE and CONSTANT and not CHECK:
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights = tl.exp2(dots * given.scale + (level - lse)[:, None])
    else:
        rows = rows_of(given, b, h, i)
        s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
        if CHECK:
            s = tl.where(shown(given, b, h, i, j, shift, False) & cols_in[None, :], s, float("-inf"))
        weights = tl.exp2(s - lse[:, None])
    if FIX:
        weights *= fix[:, None]
    return weights


# along diagonals


@triton.jit
def by_diagonals(
    q_ptr, k_ptr, lse_ptr, fix_ptr, out_ptr, given, q_batch, q_head, k_batch, k_head, k_group,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    BARE: tl.constexpr, FIX: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Tiles of one head whose corners lie on one diagonal, i0 - j0 = off * BLOCK_K, summed by displacement.

    A table is the same on all of these tiles: it is read once, and is a number where it is constant. COUNT: a mask has
    no bounds, so that every tile is checked. The sums are BLOCK_Q / BLOCK_K + 1 rows of BLOCK_K, from the displacement
    off * BLOCK_K - BLOCK_K on: see `collect.on_line`. (Two diagonals a program, which share their queries, read less
    but hold more: no quicker.)
    """
    tall: tl.constexpr = BLOCK_Q // BLOCK_K
    q_blocks, k_blocks = tl.cdiv(given.q_len, BLOCK_Q), tl.cdiv(given.k_len, BLOCK_K)
    count = (q_blocks - 1) * tall + k_blocks
    n = tl.program_id(0) % count
    b, h = tl.program_id(0) // count // given.heads, tl.program_id(0) // count % given.heads
    line = (count - 1) // 2 + tl.where(n % 2 == 1, (n + 1) // 2, -(n // 2))  # from the middle: the longest first
    off = line - (k_blocks - 1)
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    lse_ptr += (b * given.heads + h).to(tl.int64) * given.q_len
    fix_ptr += (b * given.heads + h).to(tl.int64) * given.q_len
    shift = shift_of(given, b)
    a, c, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)

    # tile t has rows from t * BLOCK_Q and keys from t * BLOCK_Q - off * BLOCK_K: those that anything is seen of
    first, last = key_bounds(given, b)
    from_row, to_row = query_bounds(given, b)
    begin = tl.maximum(tl.maximum(off, 0) * BLOCK_K, first + (off - 1) * BLOCK_K + 1)
    begin = tl.maximum(tl.cdiv(begin, BLOCK_Q), from_row // BLOCK_Q)
    end = tl.cdiv(tl.maximum(tl.minimum(to_row, last + off * BLOCK_K), 0), BLOCK_Q)
    # and those that are wholly visible
    full = tl.cdiv(tl.maximum(tl.maximum(from_row, first + off * BLOCK_K), 0), BLOCK_Q)
    still = tl.minimum(to_row // BLOCK_Q, (last + (off - 1) * BLOCK_K + BLOCK_Q) // BLOCK_Q)
    low, high = off * BLOCK_K - (BLOCK_K - 1) + shift, off * BLOCK_K + (BLOCK_Q - 1) + shift  # displacements
    if given.has.mask:
        if given.mask.lo is not None:
            still = tl.where(low >= given.mask.lo, still, 0)
            end = tl.where(high >= given.mask.lo, end, 0)
        if given.mask.hi is not None:
            still = tl.where(high <= given.mask.hi, still, 0)
            end = tl.where(low <= given.mask.hi, end, 0)
    if COUNT:
        still = 0
    end = tl.maximum(end, begin)
    full = tl.minimum(tl.maximum(full, begin), end)
    still = tl.minimum(tl.maximum(still, full), end)

    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    fix = tl.zeros([BLOCK_Q], tl.float32)
    flat, far = full, 0.0
    if BARE and not given.has.table:
        flat = still
    elif BARE and given.has.clipped:  # all of these tiles are where the table is constant, or none
        far_left, far_right = levels(given, b, h)
        far = tl.where(low >= given.table.reach, far_left, far_right)
        flat = tl.where((low >= given.table.reach) | (high <= -given.table.reach), still, full)
    if BARE:
        q_where = q_ptr + a[:, None].to(tl.int64) * Q_STEP + d[None, :]
        k_where = k_ptr + (c - off * BLOCK_K)[:, None].to(tl.int64) * K_STEP + d[None, :]
        coming = tl.load(lse_ptr + full * BLOCK_Q + a, mask=full * BLOCK_Q + a < given.q_len, other=0.0)
        for t in range(full, flat):
            q = ahead(q_where, t * BLOCK_Q, Q_STEP, DIM, BLOCK_D)
            k = ahead(k_where, t * BLOCK_Q, K_STEP, DIM, BLOCK_D)
            lse = coming
            coming = tl.load(lse_ptr + tl.minimum(t + 1, flat - 1) * BLOCK_Q + a)
            if FIX:
                fix = tl.load(fix_ptr + t * BLOCK_Q + a)
            total += weigh(
                q, k, lse, fix, given, b, h, a, c, c >= 0, shift, far, BLOCK_Q, False, True, PRECISION, True, FIX
            )  # fmt: skip

    level = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if given.has.table:
        if begin + (flat - full) < end:
            level = diagonal_table(given, b, h, off * BLOCK_K, BLOCK_Q, BLOCK_K).to(tl.float32)
    for t in range(flat, still):
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, False)
        k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, False)
        lse = tl.load(lse_ptr + i)
        if FIX:
            fix = tl.load(fix_ptr + i)
        total += weigh(
            q, k, lse, fix, given, b, h, i, j, j >= 0, shift, level, BLOCK_Q, False, True, PRECISION, False, FIX
        )  # fmt: skip
    skipped = still - full
    for turn in range(begin, end - skipped):
        t = turn + tl.where(turn < full, 0, skipped)
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        there = j < given.k_len
        q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
        k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, True)
        lse = tl.load(lse_ptr + i, mask=i < given.q_len, other=float("inf"))
        if FIX:
            fix = tl.load(fix_ptr + i, mask=i < given.q_len, other=0.0)
        total += weigh(
            q, k, lse, fix, given, b, h, i, j, there, shift, level, BLOCK_Q, True, True, PRECISION, False, FIX
        )  # fmt: skip

    diagonal_sums(
        total, out_ptr + ((b * given.heads + h).to(tl.int64) * count + line) * ((tall + 1) * BLOCK_K), BLOCK_Q, BLOCK_K
    )  # fmt: skip
