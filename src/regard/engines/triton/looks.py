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
    key_bounds,
    levels,
    logits,
    matrix,
    query_bounds,
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


@triton.jit
def by_pairs(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of two rows each, eight apart: a thread has both, and keeps half as many numbers."""
    return tl.sum(tl.reshape(x, [BLOCK_Q // 16, 2, 8, BLOCK_K]), 1)


@triton.jit
def split(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr):
    """Columns of a tile as COUNT of equal size, one after the other, or TURNED: every COUNT-th is in the same."""
    return tl.reshape(x, [BLOCK_Q, BLOCK_K // COUNT, COUNT] if TURNED else [BLOCK_Q, COUNT, BLOCK_K // COUNT])


@triton.jit
def parts_of(
    x, BLOCK_Q: tl.constexpr, HIGH: tl.constexpr, COUNT: tl.constexpr, CELLS: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """What `split` has left of a tile, by cells: [cells down, HIGH, cells, parts], or TURNED: parts before cells."""
    if TURNED:
        return tl.reshape(x, [BLOCK_Q // HIGH, HIGH, COUNT // CELLS, CELLS])
    else:
        return tl.reshape(x, [BLOCK_Q // HIGH, HIGH, CELLS, COUNT // CELLS])


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
    received, begin, middle, skipped, end, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, level,
    sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, parts, k_parts,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, FIX: tl.constexpr,
    CHECK: tl.constexpr, CONSTANT: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, DENSE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Groups of rows into the mass received and into cells: begin to middle, and those as many as `skipped` later.

    A group is BLOCK_Q / HIGH cells of `high` rows. Its tiles take HIGH rows of each cell at a time and are added up in
    registers, a few columns of them: a cell is summed once. WHOLE: that divides cells. Without CHECK, all rows and keys
    of all groups are there and may meet.
    """
    cells: tl.constexpr = BLOCK_K // WIDE
    # sums that are kept of each row are of what a thread has: every so manieth column, or pairs of neighbours
    few: tl.constexpr = PARTS if CONSTANT else BLOCK_K // 2
    kept: tl.constexpr = few if cells < few else cells
    easy: tl.constexpr = WHOLE and not CHECK
    j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, CONSTANT, DENSE)
    if CHECK:
        j = tl.minimum(j, given.k_len - 1)  # tables end there
    k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, True)  # there may be no group for keys past the end
    column = n * cells + tl.arange(0, cells)
    a, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inner = a % HIGH
    i0 = a // HIGH * high + inner
    where = q_ptr + i0[:, None].to(tl.int64) * Q_STEP + d[None, :]
    mine = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    fix = tl.zeros([BLOCK_Q], tl.float32)
    if POOL:
        for turn in tl.range(begin, end - skipped, flatten=FLAT and CONSTANT):
            g = turn
            if CHECK:
                g += tl.where(turn < middle, 0, skipped)
            line = g * (BLOCK_Q // HIGH)
            held = tl.zeros([BLOCK_Q, kept], tl.float32)
            peak = tl.zeros([BLOCK_Q, kept], tl.float32)
            seen = tl.zeros([BLOCK_Q, kept], tl.int32)
            # (with a number of stages, what a table gives comes asynchronously too, in the layout of products)
            for part in tl.range(0, parts, num_stages=None if CONSTANT else 2):
                start = line * high + part * HIGH
                i = i0 + start
                rows_in = (part * HIGH + inner < high) & (i < given.q_len)
                if easy:
                    q, lse = ahead(where, start, Q_STEP, DIM, BLOCK_D), tl.load(lse_ptr + i)
                else:
                    q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
                    lse = tl.load(lse_ptr + i, mask=rows_in, other=float("inf"))
                if FIX:
                    fix = tl.load(fix_ptr + i, mask=rows_in, other=0.0)
                weights = weigh(
                    q, k, lse, fix, given, b, h, i, j, cols_in, shift, level,
                    BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE, FIX,
                )  # fmt: skip
                if not DENSE and not CHECK:  # a cell does not fill its room
                    weights = tl.where(cols_in[None, :], weights, 0.0)
                held += tl.sum(split(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT), 1 if CONSTANT else 2)
                peak = tl.maximum(peak, tl.max(split(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT), 1 if CONSTANT else 2))
                if RECEIVED:
                    if CONSTANT:
                        received += by_pairs(weights, BLOCK_Q, BLOCK_K)
                    else:
                        mine += weights
                if COUNT and CHECK:
                    both = shown(given, b, h, i, j, shift, False) & rows_in[:, None] & cols_in[None, :]
                    both = split(both.to(tl.int32), BLOCK_Q, BLOCK_K, kept, CONSTANT)
                    seen += tl.sum(both, 1 if CONSTANT else 2)
            lines = line + tl.arange(0, BLOCK_Q // HIGH)
            at = lines[:, None].to(tl.int64) * columns + column[None, :]
            inside = (lines < q_cells)[:, None] & (column < columns)[None, :]
            axis: tl.constexpr = 2 if CONSTANT else 3
            some = parts_of(held, BLOCK_Q, HIGH, kept, cells, CONSTANT)
            tl.store(sum_ptr + at, tl.sum(tl.sum(some, axis), 1), mask=inside)
            some = parts_of(peak, BLOCK_Q, HIGH, kept, cells, CONSTANT)
            tl.store(max_ptr + at, tl.max(tl.max(some, axis), 1), mask=inside)
            if COUNT and CHECK:
                some = parts_of(seen, BLOCK_Q, HIGH, kept, cells, CONSTANT)
                tl.store(count_ptr + at, tl.sum(tl.sum(some, axis), 1), mask=inside)
    else:
        coming = tl.zeros([BLOCK_Q], tl.float32)
        if easy:  # each tile loads the log-sum-exp of the next
            coming = tl.load(lse_ptr + begin * BLOCK_Q + a, mask=begin * BLOCK_Q + a < given.q_len, other=0.0)
        for turn in tl.range(begin, end - skipped, num_stages=None if CONSTANT else 2):
            g = turn
            if CHECK:
                g += tl.where(turn < middle, 0, skipped)
            i = g * BLOCK_Q + a
            if easy:
                q, lse = ahead(where, g * BLOCK_Q, Q_STEP, DIM, BLOCK_D), coming
                coming = tl.load(lse_ptr + tl.minimum(g + 1, end - 1) * BLOCK_Q + a)
            else:
                q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
                lse = tl.load(lse_ptr + i, mask=i < given.q_len, other=float("inf"))
            if FIX:
                fix = tl.load(fix_ptr + i, mask=i < given.q_len, other=0.0)
            weights = weigh(
                q, k, lse, fix, given, b, h, i, j, cols_in, shift, level,
                BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE, FIX,
            )  # fmt: skip
            if CONSTANT:
                received += by_pairs(weights, BLOCK_Q, BLOCK_K)
            else:
                mine += weights
    if RECEIVED and not CONSTANT:  # in the order of the others
        pairs = tl.reshape(by_pairs(mine, BLOCK_Q, BLOCK_K), [BLOCK_Q // 16, 8, cells, WIDE])
        received += tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [BLOCK_Q // 16, 8, BLOCK_K])
    return received


#: numbers of cells and blocks: what they are multiples of is worth no kernel of its own
SIZES = ["high", "wide", "q_cells", "columns", "q_parts", "k_parts", "blocks"]


@triton.jit(do_not_specialize=SIZES)
def by_columns(
    q_ptr, k_ptr, lse_ptr, fix_ptr, received_ptr, sum_ptr, count_ptr, max_ptr, given,
    q_batch, q_head, k_batch, k_head, k_group, high, wide, q_cells, columns, q_parts, k_parts, blocks,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, FIX: tl.constexpr,
    RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr, DENSE: tl.constexpr,
    FLAT: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: some cells wide (WIDE, a power of two, keys of room each), or a part of a cell.

    QUICK: groups of rows of which all is seen, where no table is read. Keys are TURNED then (see `keys_of`), so that a
    thread has all keys of a cell. Another launch does the others, in smaller tiles: those that read a table, in whole
    vectors, and those that a mask or an end cuts, which are checked pair by pair (COUNT: and counted). It adds to the
    mass received. For both, SPAN keys have the same groups.
    """
    n = tl.program_id(0) % blocks
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    first_row = (b * given.heads + h).to(tl.int64) * given.q_len
    lse_ptr += first_row
    fix_ptr += first_row
    shift = shift_of(given, b)

    first_cell = (b * given.heads + h).to(tl.int64) * q_cells * columns
    sum_ptr += first_cell
    count_ptr += first_cell
    max_ptr += first_cell
    received = tl.zeros([BLOCK_Q // 16, 8, BLOCK_K], tl.float32)

    group = (BLOCK_Q // HIGH) * high  # rows
    m = n // (SPAN // BLOCK_K)
    j0 = (m // k_parts) * (SPAN // WIDE) * wide + (m % k_parts) * SPAN
    first, full, still, last = query_span(given, b, tl.minimum(j0, given.k_len - 1), shift, BLOCK_Q, SPAN)
    end = tl.cdiv(tl.minimum(last, given.q_len), group)
    begin = tl.minimum(first // group, end)  # keys that no query sees: nothing
    end = tl.where(j0 < given.k_len, end, begin)  # nor keys past the end, the last parts of a cell
    full = tl.minimum(tl.maximum(tl.cdiv(full, group), begin), end)
    still = tl.minimum(tl.maximum(tl.minimum(still, given.q_len) // group, full), end)
    near, after = full, still
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
        near = tl.maximum(j0 - shift - given.table.reach + 1, 0) // group  # rows before look far to the right
        after = tl.cdiv(tl.maximum(j0 + SPAN - 1 - shift + given.table.reach, 0), group)
        near = tl.minimum(tl.maximum(near, full), still)
        after = tl.minimum(tl.maximum(after, near), still)
    if QUICK:
        if given.has.clipped:
            received = sweep(
                received, full, near, 0, near, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, far_right,
                sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, False, True,
                RECEIVED, POOL, COUNT, WHOLE, DENSE, FLAT,
            )  # fmt: skip
        else:
            after = full
        received = sweep(
            received, after, still, 0, still, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, far_left,
            sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, False, True,
            RECEIVED, POOL, COUNT, WHOLE, DENSE, FLAT,
        )  # fmt: skip
    else:
        if given.has.table:
            received = sweep(
                received, near, after, 0, after, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, 0.0,
                sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, False, False,
                RECEIVED, POOL, COUNT, WHOLE, DENSE, FLAT,
            )  # fmt: skip
        received = sweep(
            received, begin, full, still - full, end, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, 0.0,
            sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, True, not given.has.table,
            RECEIVED, POOL, COUNT, WHOLE, DENSE, FLAT,
        )  # fmt: skip
    if RECEIVED:
        j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, True, DENSE)
        at = (b * given.heads + h).to(tl.int64) * given.k_len + j
        mass = tl.sum(tl.sum(received, 1), 0)
        if not QUICK:
            mass += tl.load(received_ptr + at, mask=cols_in, other=0.0)
        tl.store(received_ptr + at, mass, mask=cols_in)


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
