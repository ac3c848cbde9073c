"""Kernels that look at A without storing it: by columns and cells, and along diagonals (eq. 27 to 29).

| kernel | one program | gives |
|---|---|---|
| rows.by_rows | a block of queries sweeps its keys | log-sum-exp, entropy, groups of keys |
| strongest.by_groups | a query sees the keys of its best groups | the strongest keys |
| by_columns | a block of keys sweeps its queries | mass received, and cells of a heat map |
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
    levels,
    logits,
    matrix,
    query_span,
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


# by columns


@triton.jit
def weigh(
    q, k, lse, given, b, h, i, j, cols_in, shift, level,
    BLOCK_Q: tl.constexpr, CHECK: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr,
):  # fmt: skip
    """Weights of queries i and keys j; 0 where the log-sum-exp is +inf and, where CHECK, of keys that are not shown."""
    if BARE and CONSTANT and not CHECK:
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        return tl.exp2(dots * given.scale + (level - lse)[:, None])
    else:
        rows = rows_of(given, b, h, i)
        s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
        if CHECK:
            s = tl.where(shown(given, b, h, i, j, shift, False) & cols_in[None, :], s, float("-inf"))
        return tl.exp2(s - lse[:, None])


@triton.jit
def by_pairs(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of two rows each, eight apart: a thread has both, and keeps half as many numbers."""
    return tl.sum(tl.reshape(x, [BLOCK_Q // 16, 2, 8, BLOCK_K]), 1)


@triton.jit
def split(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr):
    """Columns of a tile as COUNT of equal size, one after the other, or TURNED: every COUNT-th is in the same."""
    return tl.reshape(x, [BLOCK_Q, BLOCK_K // COUNT, COUNT] if TURNED else [BLOCK_Q, COUNT, BLOCK_K // COUNT])


@triton.jit
def keys_of(
    n, given, wide, k_parts, BLOCK_K: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, DENSE: tl.constexpr
):  # fmt: skip
    """Keys of the n-th block, and which of them are there. TURNED: neighbours are keys of different cells.

    DENSE: cells fill their room, so keys that are not turned follow one another, and are known to.
    """
    cells: tl.constexpr = BLOCK_K // WIDE
    c = tl.arange(0, BLOCK_K)
    if DENSE and not TURNED:
        j = n * BLOCK_K + c
        return j, j < given.k_len
    else:
        if TURNED:
            cell, inner = c % cells, c // cells
        else:
            cell, inner = c // WIDE, c % WIDE
        inner += n % k_parts * BLOCK_K
        j = (n // k_parts * cells + cell) * wide + inner
        return j, (inner < wide) & (j < given.k_len)


@triton.jit
def sweep(
    received, begin, end, q_ptr, k_ptr, lse_ptr, q_step, k_step, given, b, h, n, shift, level,
    sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, parts, k_parts,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, CHECK: tl.constexpr,
    CONSTANT: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr,
    DENSE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Groups of rows from begin to end, into the mass received and into cells.

    A group is BLOCK_Q / HIGH cells of `high` rows. Its tiles take HIGH rows of each cell at a time and are added up in
    registers, a few columns of them: a cell is summed once. EVEN: every group is whole.
    """
    cells: tl.constexpr = BLOCK_K // WIDE
    kept: tl.constexpr = PARTS if CONSTANT and cells < PARTS else cells
    j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, CONSTANT, DENSE)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, True)
    column = n * cells + tl.arange(0, cells)
    a, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inner = a % HIGH
    i0 = a // HIGH * high + inner
    where = q_ptr + i0[:, None].to(tl.int64) * q_step + d[None, :]
    mine = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if POOL:
        for g in tl.range(begin, end, flatten=FLAT):
            line = g * (BLOCK_Q // HIGH)
            held = tl.zeros([BLOCK_Q, kept], tl.float32)
            peak = tl.zeros([BLOCK_Q, kept], tl.float32)
            seen = tl.zeros([BLOCK_Q, kept], tl.int32)
            for part in range(parts):
                start = line * high + part * HIGH
                i = i0 + start
                rows_in = (part * HIGH + inner < high) & (i < given.q_len)
                if EVEN:
                    q, lse = ahead(where, start, q_step, DIM, BLOCK_D), tl.load(lse_ptr + i)
                else:
                    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
                    lse = tl.load(lse_ptr + i, mask=rows_in, other=float("inf"))
                weights = weigh(
                    q, k, lse, given, b, h, i, j, cols_in, shift, level, BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE
                )
                held += tl.sum(split(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT), 1 if CONSTANT else 2)
                peak = tl.maximum(peak, tl.max(split(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT), 1 if CONSTANT else 2))
                if RECEIVED:
                    if CONSTANT:
                        received += by_pairs(weights, BLOCK_Q, BLOCK_K)
                    else:
                        mine += weights
                if COUNT:
                    both = shown(given, b, h, i, j, shift, False) & rows_in[:, None] & cols_in[None, :]
                    both = split(both.to(tl.int32), BLOCK_Q, BLOCK_K, kept, CONSTANT)
                    seen += tl.sum(both, 1 if CONSTANT else 2)
            lines = line + tl.arange(0, BLOCK_Q // HIGH)
            at = lines[:, None].to(tl.int64) * columns + column[None, :]
            inside = (lines < q_cells)[:, None] & (column < columns)[None, :]
            some = tl.reshape(held, [BLOCK_Q // HIGH, HIGH, kept // cells, cells])
            tl.store(sum_ptr + at, tl.sum(tl.sum(some, 2), 1), mask=inside)
            some = tl.reshape(peak, [BLOCK_Q // HIGH, HIGH, kept // cells, cells])
            tl.store(max_ptr + at, tl.max(tl.max(some, 2), 1), mask=inside)
            if COUNT:
                some = tl.reshape(seen, [BLOCK_Q // HIGH, HIGH, kept // cells, cells])
                tl.store(count_ptr + at, tl.sum(tl.sum(some, 2), 1), mask=inside)
    else:
        coming = tl.zeros([BLOCK_Q], tl.float32)
        if EVEN:  # each tile loads the log-sum-exp of the next
            coming = tl.load(lse_ptr + tl.minimum(begin * BLOCK_Q, given.q_len - BLOCK_Q) + a)
        for g in range(begin, end):
            i = g * BLOCK_Q + a
            if EVEN:
                q, lse = ahead(where, g * BLOCK_Q, q_step, DIM, BLOCK_D), coming
                coming = tl.load(lse_ptr + tl.minimum((g + 1) * BLOCK_Q, given.q_len - BLOCK_Q) + a)
            else:
                q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
                lse = tl.load(lse_ptr + i, mask=i < given.q_len, other=float("inf"))
            weights = weigh(
                q, k, lse, given, b, h, i, j, cols_in, shift, level, BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE
            )
            if CONSTANT:
                received += by_pairs(weights, BLOCK_Q, BLOCK_K)
            else:
                mine += weights
    if RECEIVED and not CONSTANT:  # in the order of the others
        pairs = tl.reshape(by_pairs(mine, BLOCK_Q, BLOCK_K), [BLOCK_Q // 16, 8, cells, WIDE])
        received += tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [BLOCK_Q // 16, 8, BLOCK_K])
    return received


@triton.jit
def by_columns(
    q_ptr, k_ptr, lse_ptr, received_ptr, sum_ptr, count_ptr, max_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group, high, wide, q_cells, columns, q_parts, k_parts, blocks,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, CHECK: tl.constexpr,
    RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr, DENSE: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: some cells wide (WIDE, a power of two, keys of room each), or a part of a cell.

    Keys are TURNED (see `keys_of`) so that a thread has all keys of a cell; but not where a table is read, in whole
    vectors.
    """
    n = tl.program_id(0) % blocks
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    lse_ptr += (b * given.heads + h).to(tl.int64) * given.q_len
    shift = shift_of(given, b)

    cells: tl.constexpr = BLOCK_K // WIDE
    first_cell = (b * given.heads + h).to(tl.int64) * q_cells * columns
    sum_ptr += first_cell
    count_ptr += first_cell
    max_ptr += first_cell
    received = tl.zeros([BLOCK_Q // 16, 8, BLOCK_K], tl.float32)

    group = (BLOCK_Q // HIGH) * high  # rows
    j0 = (n // k_parts) * cells * wide + (n % k_parts) * BLOCK_K
    first, _, _, last = query_span(given, b, j0, shift, BLOCK_Q, BLOCK_K)
    begin, end = first // group, tl.cdiv(last, group)
    near, after = begin, end
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
        near = tl.maximum(j0 - shift - given.table.reach + 1, 0) // group  # rows before look far to the right
        after = tl.cdiv(tl.maximum(j0 + BLOCK_K - 1 - shift + given.table.reach, 0), group)
        near = tl.minimum(tl.maximum(near, begin), end)
        after = tl.minimum(tl.maximum(after, near), end)
        received = sweep(
            received, begin, near, q_ptr, k_ptr, lse_ptr, q_step, k_step, given, b, h, n, shift, far_right,
            sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, DIM, BLOCK_D, BLOCK_Q, BLOCK_K,
            HIGH, WIDE, PRECISION, BARE, CHECK, True, RECEIVED, POOL, COUNT, EVEN, DENSE, FLAT,
        )  # fmt: skip
    received = sweep(
        received, near, after, q_ptr, k_ptr, lse_ptr, q_step, k_step, given, b, h, n, shift, 0.0,
        sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, DIM, BLOCK_D, BLOCK_Q, BLOCK_K,
        HIGH, WIDE, PRECISION, BARE, CHECK, not given.has.table, RECEIVED, POOL, COUNT, EVEN, DENSE, FLAT,
    )  # fmt: skip
    if given.has.clipped:
        received = sweep(
            received, after, end, q_ptr, k_ptr, lse_ptr, q_step, k_step, given, b, h, n, shift, far_left,
            sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, DIM, BLOCK_D, BLOCK_Q, BLOCK_K,
            HIGH, WIDE, PRECISION, BARE, CHECK, True, RECEIVED, POOL, COUNT, EVEN, DENSE, FLAT,
        )  # fmt: skip
    if RECEIVED:
        j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, True, DENSE)
        at = (b * given.heads + h).to(tl.int64) * given.k_len + j
        tl.store(received_ptr + at, tl.sum(tl.sum(received, 1), 0), mask=cols_in)


# along diagonals


@triton.jit
def by_diagonals(
    q_ptr, k_ptr, lse_ptr, out_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    BARE: tl.constexpr, STRAIGHT: tl.constexpr,
):  # fmt: skip
    """Tiles of one head whose corners lie on one diagonal, i0 - j0 = off * BLOCK_K, summed by displacement.

    A table is the same on all of these tiles: it is read once, and is a number where it is constant. STRAIGHT: no mask
    but bounds on the displacement. The sums are BLOCK_Q / BLOCK_K + 1 rows of BLOCK_K, from the displacement
    off * BLOCK_K - BLOCK_K on.
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
    shift = shift_of(given, b)
    a, c, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)

    begin, end = tl.cdiv(tl.maximum(off, 0), tall), tl.minimum(q_blocks, tl.cdiv(k_blocks + off, tall))
    low, high = off * BLOCK_K - (BLOCK_K - 1) + shift, off * BLOCK_K + (BLOCK_Q - 1) + shift  # displacements
    whole = begin
    if STRAIGHT:
        whole = tl.minimum(given.q_len // BLOCK_Q, tl.cdiv(tl.maximum(given.k_len // BLOCK_K + off, 0), tall))
        if given.has.mask:
            if given.mask.lo is not None:
                whole = tl.where(low >= given.mask.lo, whole, begin)
                end = tl.where(high >= given.mask.lo, end, begin)
            if given.mask.hi is not None:
                whole = tl.where(high <= given.mask.hi, whole, begin)
                end = tl.where(low <= given.mask.hi, end, begin)
        whole = tl.maximum(tl.minimum(whole, end), begin)

    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    flat, far = begin, 0.0
    if BARE and not given.has.table:
        flat = whole
    elif BARE and given.has.clipped:  # all of these tiles are where the table is constant, or none
        far_left, far_right = levels(given, b, h)
        far = tl.where(low >= given.table.reach, far_left, far_right)
        flat = tl.where((low >= given.table.reach) | (high <= -given.table.reach), whole, begin)
    if BARE:
        q_where = q_ptr + a[:, None].to(tl.int64) * q_step + d[None, :]
        k_where = k_ptr + (c - off * BLOCK_K)[:, None].to(tl.int64) * k_step + d[None, :]
        coming = tl.load(lse_ptr + begin * BLOCK_Q + a, mask=begin * BLOCK_Q + a < given.q_len, other=0.0)
        for t in range(begin, flat):
            q = ahead(q_where, t * BLOCK_Q, q_step, DIM, BLOCK_D)
            k = ahead(k_where, t * BLOCK_Q, k_step, DIM, BLOCK_D)
            lse = coming
            coming = tl.load(lse_ptr + tl.minimum(t + 1, flat - 1) * BLOCK_Q + a)
            total += weigh(q, k, lse, given, b, h, a, c, c >= 0, shift, far, BLOCK_Q, False, True, PRECISION, True)

    level = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if given.has.table:
        if flat < end:
            level = diagonal_table(given, b, h, off * BLOCK_K, BLOCK_Q, BLOCK_K).to(tl.float32)
    for t in range(flat, whole):
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, False)
        k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, False)
        lse = tl.load(lse_ptr + i)
        total += weigh(q, k, lse, given, b, h, i, j, j >= 0, shift, level, BLOCK_Q, False, True, PRECISION, False)
    for t in range(whole, end):
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
        k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, True)
        lse = tl.load(lse_ptr + i, mask=i < given.q_len, other=float("inf"))
        inside = j < given.k_len
        total += weigh(q, k, lse, given, b, h, i, j, inside, shift, level, BLOCK_Q, True, True, PRECISION, False)

    diagonal_sums(
        total, out_ptr + ((b * given.heads + h).to(tl.int64) * count + line) * ((tall + 1) * BLOCK_K), BLOCK_Q, BLOCK_K
    )  # fmt: skip
