"""The kernel that reads A by columns: mass received, and the cells of a heat map (eq. 27 and 29).

A block of keys sweeps its queries, which come in groups of whole cells. What a tile gives is summed in registers, by
what a thread has of it: keys are taken in an order in which a thread has all keys of a cell, and rows in one in which
it has two of each; so a cell is written by the thread that has summed it, or nearly so.

Tiles that are dot products and nothing else, most of A, are one loop with as few operations a pair as can be
(`stream`). The others, those which read a table, or which a mask or an end cuts, are for `sweep`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .looks import PARTS, ahead, weigh
from .tiles import begin_of, levels, matrix, query_span, shift_of, shown


@triton.jit
def by_pairs(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of two rows each, eight apart: a thread has both, and keeps half as many numbers."""
    return tl.sum(tl.reshape(x, [BLOCK_Q // 16, 2, 8, BLOCK_K]), 1)


@triton.jit
def split(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr):
    """Columns of a tile as COUNT of equal size, one after the other, or TURNED: every COUNT-th is in the same."""
    return tl.reshape(x, [BLOCK_Q, BLOCK_K // COUNT, COUNT] if TURNED else [BLOCK_Q, COUNT, BLOCK_K // COUNT])


@triton.jit
def sums_of(
    x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Sums of what a thread has of a tile, [BLOCK_Q / PAIRS, COUNT]. PAIRS (2): of two rows each, see `row_of`.

    SHARED: the same sums of pairs go into the mass received, so they come first.
    """
    axis: tl.constexpr = 1 if TURNED else 2
    if PAIRS == 1:
        return tl.sum(split(x, BLOCK_Q, BLOCK_K, COUNT, TURNED), axis)
    elif SHARED:
        x = tl.reshape(by_pairs(x, BLOCK_Q, BLOCK_K), [BLOCK_Q // 2, BLOCK_K])
        return tl.sum(split(x, BLOCK_Q // 2, BLOCK_K, COUNT, TURNED), axis)
    else:
        x = tl.sum(split(x, BLOCK_Q, BLOCK_K, COUNT, TURNED), axis)
        return tl.reshape(by_pairs(x, BLOCK_Q, COUNT), [BLOCK_Q // 2, COUNT])


@triton.jit
def most_of(
    x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The same for the largest weights, as whole numbers of the same bits.

    Weights are not negative, so these are in the same order, and the machine finds the largest of three in one step.
    """
    x = tl.max(split(x.to(tl.int32, bitcast=True), BLOCK_Q, BLOCK_K, COUNT, TURNED), 1 if TURNED else 2)
    if PAIRS == 2:
        x = tl.reshape(tl.max(tl.reshape(x, [BLOCK_Q // 16, 2, 8, COUNT]), 1), [BLOCK_Q // 2, COUNT])
    return x


@triton.jit
def row_of(BLOCK_Q: tl.constexpr, PAIRS: tl.constexpr):
    """Which row of a group each row of a tile is. PAIRS (2): a thread has two rows, eight apart, of the same cell."""
    a = tl.arange(0, BLOCK_Q)
    if PAIRS == 2:
        return (a // 16 * 8 + a % 8) * 2 + a // 8 % 2
    else:
        return a


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
    received, begin, middle, skipped, end, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, before, behind,
    sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, parts, k_parts,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, FIX: tl.constexpr,
    CHECK: tl.constexpr, CONSTANT: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Groups of rows into the mass received and into cells: begin to middle, and from `skipped` groups later to end.

    Where CONSTANT, a table has the values `before` and `behind` there. A group is BLOCK_Q / HIGH cells of `high` rows.
    Its tiles take HIGH rows of each cell at a time and are added up in registers, a few columns of them: a cell is
    summed once. WHOLE: that divides cells. Without CHECK, all rows and keys of all groups are there and may meet.
    """
    cells: tl.constexpr = BLOCK_K // WIDE
    # sums that are kept of each row are of what a thread has: every so manieth column, or pairs of neighbours
    few: tl.constexpr = PARTS if CONSTANT else BLOCK_K // 2
    kept: tl.constexpr = few if cells < few else cells
    easy: tl.constexpr = WHOLE and not CHECK
    skips: tl.constexpr = CHECK or (CONSTANT and given.has.clipped)
    level = before
    j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, CONSTANT and POOL, DENSE)
    if CHECK:
        j = tl.minimum(j, given.k_len - 1)  # tables end there
    k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, True)  # there may be no group for keys past the end
    column = n * cells + tl.arange(0, cells)
    a, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    pairs: tl.constexpr = 2 if POOL and HIGH > 1 else 1
    inner = row_of(BLOCK_Q, pairs) % HIGH
    i0 = row_of(BLOCK_Q, pairs) // HIGH * high + inner
    where = q_ptr + i0[:, None].to(tl.int64) * Q_STEP + d[None, :]
    fix = tl.zeros([BLOCK_Q], tl.float32)
    if POOL:
        for turn in range(begin, end - skipped):
            g = turn
            if skips:
                g += tl.where(turn < middle, 0, skipped)
                level = tl.where(turn < middle, before, behind)
            line = g * (BLOCK_Q // HIGH)
            held = tl.zeros([BLOCK_Q // pairs, kept], tl.float32)
            peak = tl.zeros([BLOCK_Q // pairs, kept], tl.int32)
            seen = tl.zeros([BLOCK_Q // pairs, kept], tl.int32)
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
                held += sums_of(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT, pairs, RECEIVED)
                peak = tl.maximum(peak, most_of(weights, BLOCK_Q, BLOCK_K, kept, CONSTANT, pairs))
                if RECEIVED:
                    received += by_pairs(weights, BLOCK_Q, BLOCK_K)
                if COUNT and CHECK:
                    both = shown(given, b, h, i, j, shift, False) & rows_in[:, None] & cols_in[None, :]
                    seen += sums_of(both.to(tl.int32), BLOCK_Q, BLOCK_K, kept, CONSTANT, pairs, False)
            lines = line + tl.arange(0, BLOCK_Q // HIGH)
            at = lines[:, None].to(tl.int64) * columns + column[None, :]
            inside = (lines < q_cells)[:, None] & (column < columns)[None, :]
            axis: tl.constexpr = 2 if CONSTANT else 3
            some = parts_of(held, BLOCK_Q // pairs, HIGH // pairs, kept, cells, CONSTANT)
            tl.store(sum_ptr + at, tl.sum(tl.sum(some, axis), 1), mask=inside)
            some = parts_of(peak, BLOCK_Q // pairs, HIGH // pairs, kept, cells, CONSTANT)
            tl.store(max_ptr + at, tl.max(tl.max(some, axis), 1).to(tl.float32, bitcast=True), mask=inside)
            if COUNT and CHECK:
                some = parts_of(seen, BLOCK_Q // pairs, HIGH // pairs, kept, cells, CONSTANT)
                tl.store(count_ptr + at, tl.sum(tl.sum(some, axis), 1), mask=inside)
    else:
        coming = tl.zeros([BLOCK_Q], tl.float32)
        if easy:  # each tile loads the log-sum-exp of the next
            i = (begin + tl.where(begin < middle, 0, skipped)) * BLOCK_Q + a
            coming = tl.load(lse_ptr + i, mask=i < given.q_len, other=0.0)
        # a table on a line is read by pointers that are computed once: groups begin at whole vectors of it
        lined: tl.constexpr = (
            BARE and easy and not CONSTANT and not FIX and given.has.table
            and given.table.width is None and given.table.near is None and not given.table.by_key
        )  # fmt: skip
        entries = lse_ptr
        if lined:
            entries = given.table.ptr + b.to(tl.int64) * given.table.batch + h.to(tl.int64) * given.table.head
            entries += begin_of(given.table, tl.maximum(given.q_len - 1 - a, 0))[:, None] + j[None, :]
        for turn in tl.range(begin, end - skipped, num_stages=None if CONSTANT else 2):
            g, later = turn, turn + 1
            if skips:
                g += tl.where(turn < middle, 0, skipped)
                later += tl.where(turn + 1 < middle, 0, skipped)
                level = tl.where(turn < middle, before, behind)
            i = g * BLOCK_Q + a
            if easy:
                q, lse = ahead(where, g * BLOCK_Q, Q_STEP, DIM, BLOCK_D), coming
                coming = tl.load(lse_ptr + tl.minimum(later, end - 1) * BLOCK_Q + a)
            else:
                q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
                lse = tl.load(lse_ptr + i, mask=i < given.q_len, other=float("inf"))
            if FIX:
                fix = tl.load(fix_ptr + i, mask=i < given.q_len, other=0.0)
            if lined:
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * given.scale + tl.load(entries - g * BLOCK_Q)
                weights = tl.exp2(s - lse[:, None])
            else:
                weights = weigh(
                    q, k, lse, fix, given, b, h, i, j, cols_in, shift, level,
                    BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE, FIX,
                )  # fmt: skip
            received += by_pairs(weights, BLOCK_Q, BLOCK_K)
    return received


@triton.jit
def stream(
    received, begin, middle, skipped, end, q_ptr, k_ptr, lse_ptr, given, n, before, behind,
    sum_ptr, max_ptr, columns, high, wide, parts, k_parts,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """What `sweep` does, where a tile is dot products alone and all of it is there: all tiles are one loop."""
    cells: tl.constexpr = BLOCK_K // WIDE
    kept: tl.constexpr = PARTS if cells < PARTS else cells
    pairs: tl.constexpr = 2 if POOL and HIGH > 1 else 1
    j = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, POOL, True)[0]
    row = row_of(BLOCK_Q, pairs)
    i0 = row // HIGH * high + row % HIGH
    where = q_ptr + i0[:, None].to(tl.int64) * Q_STEP + tl.arange(0, BLOCK_D)[None, :]
    held = tl.zeros([BLOCK_Q // pairs, kept], tl.float32)
    peak = tl.zeros([BLOCK_Q // pairs, kept], tl.int32)
    group = (BLOCK_Q // HIGH) * high  # rows
    if begin < end - skipped:
        k = tl.trans(matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, False))
        start = (begin + tl.where(begin < middle, 0, skipped)) * group
        coming = tl.load(lse_ptr + start + i0)  # each tile loads the log-sum-exp of the next
        if POOL:
            turn, part = begin, parts * 0
            for _ in range(begin * parts, (end - skipped) * parts):
                dots = tl.dot(ahead(where, start, Q_STEP, DIM, BLOCK_D), k, input_precision=PRECISION)
                low = tl.where(turn < middle, before, behind) - coming
                line, last = turn + tl.where(turn < middle, 0, skipped), part + 1 == parts
                turn += tl.where(last, 1, 0)
                part = tl.where(last, 0, part + 1)
                start = tl.minimum(turn + tl.where(turn < middle, 0, skipped), end - 1) * group + part * HIGH
                coming = tl.load(lse_ptr + start + i0)
                weights = tl.exp2(dots * given.scale + low[:, None])
                if RECEIVED:
                    received += by_pairs(weights, BLOCK_Q, BLOCK_K)
                held += sums_of(weights, BLOCK_Q, BLOCK_K, kept, True, pairs, RECEIVED)
                peak = tl.maximum(peak, most_of(weights, BLOCK_Q, BLOCK_K, kept, True, pairs))
                if last:
                    deposit(
                        held, peak, sum_ptr, max_ptr, line, n, columns, BLOCK_Q // pairs, BLOCK_Q // HIGH, kept, cells
                    )
                held = tl.where(last, 0.0, held)
                peak = tl.where(last, 0, peak)
        else:
            for turn in range(begin, end - skipped):
                start = (turn + tl.where(turn < middle, 0, skipped)) * BLOCK_Q
                dots = tl.dot(ahead(where, start, Q_STEP, DIM, BLOCK_D), k, input_precision=PRECISION)
                low = tl.where(turn < middle, before, behind) - coming
                later = turn + 1 + tl.where(turn + 1 < middle, 0, skipped)
                coming = tl.load(lse_ptr + tl.minimum(later, end - 1) * BLOCK_Q + i0)
                received += by_pairs(tl.exp2(dots * given.scale + low[:, None]), BLOCK_Q, BLOCK_K)
    return received


@triton.jit
def deposit(
    held, peak, sum_ptr, max_ptr, g, n, columns,
    ROWS: tl.constexpr, LINES: tl.constexpr, COUNT: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Cells of the g-th group and the n-th block of keys, from what is held of ROWS rows: all of them are there."""
    lines, column = g * LINES + tl.arange(0, LINES), n * CELLS + tl.arange(0, CELLS)
    at = lines[:, None].to(tl.int64) * columns + column[None, :]
    some = parts_of(held, ROWS, ROWS // LINES, COUNT, CELLS, True)
    tl.store(sum_ptr + at, tl.sum(tl.sum(some, 2), 1))
    some = parts_of(peak, ROWS, ROWS // LINES, COUNT, CELLS, True)
    tl.store(max_ptr + at, tl.max(tl.max(some, 2), 1).to(tl.float32, bitcast=True))


@triton.jit
def halves(x, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR: tl.constexpr):
    """The first NEAR keys of what a block has received and the others, as many; or all of it twice, if they are all."""
    if BLOCK_K == NEAR:
        return x, x
    else:
        x = tl.reshape(x, [BLOCK_Q // 16, 8, 2, NEAR])
        return tl.split(tl.permute(x, (0, 1, 3, 2)))


@triton.jit
def leave(
    received, received_ptr, given, b, h, n, wide, k_parts,
    BLOCK_K: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, DENSE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the mass that the n-th block of keys has received, or ADD it to what is there."""
    j, cols_in = keys_of(n, given, wide, k_parts, BLOCK_K, WIDE, TURNED, DENSE)
    at = (b * given.heads + h).to(tl.int64) * given.k_len + j
    mass = tl.sum(tl.sum(received, 1), 0)
    if ADD:
        mass += tl.load(received_ptr + at, mask=cols_in, other=0.0)
    tl.store(received_ptr + at, mass, mask=cols_in)


#: numbers of cells and blocks: what they are multiples of is worth no kernel of its own
SIZES = ["high", "wide", "q_cells", "columns", "q_parts", "k_parts", "blocks"]


@triton.jit(do_not_specialize=SIZES)
def by_columns(
    q_ptr, k_ptr, lse_ptr, fix_ptr, received_ptr, sum_ptr, count_ptr, max_ptr, given,
    q_batch, q_head, k_batch, k_head, k_group, high, wide, q_cells, columns, q_parts, k_parts, blocks,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    NEAR: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr,
    FIX: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr,
    DENSE: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: some cells wide (WIDE, a power of two, keys of room each), or a part of a cell.

    QUICK: groups of rows of which all is seen. Where no table is read, keys are TURNED (see `keys_of`), so that a
    thread has all keys of a cell; near the diagonal of a table that has a reach it is read in whole vectors, for NEAR
    keys at a time. Another launch, also in smaller tiles, does what a mask or an end cuts, which is checked pair by
    pair (COUNT: and counted), and all of a table without a reach. It adds to the mass received. For both, SPAN keys
    have the same groups.
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
        if not given.has.clipped:
            near = still
            after = still
        if BARE and WHOLE and DENSE and not FIX:
            received = stream(
                received, full, near, after - near, still, q_ptr, k_ptr, lse_ptr, given, n, far_right, far_left,
                sum_ptr, max_ptr, columns, high, wide, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, RECEIVED, POOL,
            )  # fmt: skip
        else:
            received = sweep(
                received, full, near, after - near, still, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift,
                far_right, far_left,
                sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, False, True,
                RECEIVED, POOL, COUNT, WHOLE, DENSE,
            )  # fmt: skip
        if RECEIVED and not POOL and given.has.clipped:
            # keys are in order, so near groups add to what far ones gave: of the first NEAR keys, then of the others
            m = n * (BLOCK_K // NEAR)
            some, others = halves(received, BLOCK_Q, BLOCK_K, NEAR)
            some = sweep(
                some, near, after, 0, after, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, m, shift, 0.0, 0.0,
                sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, NEAR, HIGH, WIDE, PRECISION, BARE, FIX, False, False,
                RECEIVED, POOL, COUNT, WHOLE, DENSE,
            )  # fmt: skip
            leave(some, received_ptr, given, b, h, m, wide, k_parts, NEAR, WIDE, False, DENSE, False)
            if NEAR < BLOCK_K:
                others = sweep(
                    others, near, after, 0, after, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, m + 1, shift, 0.0, 0.0,
                    sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                    DIM, BLOCK_D, BLOCK_Q, NEAR, HIGH, WIDE, PRECISION, BARE, FIX, False, False,
                    RECEIVED, POOL, COUNT, WHOLE, DENSE,
                )  # fmt: skip
                leave(others, received_ptr, given, b, h, m + 1, wide, k_parts, NEAR, WIDE, False, DENSE, False)
        else:
            if RECEIVED:
                leave(received, received_ptr, given, b, h, n, wide, k_parts, BLOCK_K, WIDE, POOL, DENSE, False)
            if given.has.clipped and near < after:
                if RECEIVED:
                    tl.debug_barrier()  # other threads add to what was written
                for m in range(n * (BLOCK_K // NEAR), (n + 1) * (BLOCK_K // NEAR)):
                    some = sweep(
                        tl.zeros([BLOCK_Q // 16, 8, NEAR], tl.float32), near, after, 0, after, q_ptr, k_ptr, lse_ptr,
                        fix_ptr, given, b, h, m, shift, 0.0, 0.0,
                        sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                        DIM, BLOCK_D, BLOCK_Q, NEAR, HIGH, WIDE, PRECISION, BARE, FIX, False, False,
                        RECEIVED, POOL, COUNT, WHOLE, DENSE,
                    )  # fmt: skip
                    if RECEIVED:
                        leave(some, received_ptr, given, b, h, m, wide, k_parts, NEAR, WIDE, False, DENSE, True)
    else:
        if given.has.table and not given.has.clipped:
            received = sweep(
                received, near, after, 0, after, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, 0.0, 0.0,
                sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, False, False,
                RECEIVED, POOL, COUNT, WHOLE, DENSE,
            )  # fmt: skip
        received = sweep(
            received, begin, full, still - full, end, q_ptr, k_ptr, lse_ptr, fix_ptr, given, b, h, n, shift, 0.0, 0.0,
            sum_ptr, count_ptr, max_ptr, columns, high, wide, q_cells, q_parts, k_parts, Q_STEP, K_STEP,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, FIX, True, not given.has.table,
            RECEIVED, POOL, COUNT, WHOLE, DENSE,
        )  # fmt: skip
        if RECEIVED:
            turned: tl.constexpr = POOL and not given.has.table  # as its groups are
            leave(received, received_ptr, given, b, h, n, wide, k_parts, BLOCK_K, WIDE, turned, DENSE, True)
