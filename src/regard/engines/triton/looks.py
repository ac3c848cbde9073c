"""Kernels that look at A without storing it: by rows, by columns and cells, and along diagonals (eq. 26 to 30).

| kernel | one program | gives |
|---|---|---|
| by_rows | a block of queries sweeps its keys | log-sum-exp, entropy, the strongest keys |
| by_columns | a block of keys sweeps its queries | mass received, and cells of a heat map |
| by_diagonals | square tiles along one block diagonal | mass per displacement |

The last two take weights exp2(logit - lse) from the log-sum-exp of the first. They add whole tiles in registers and sum
over a tile once, at the end: no atomics, and the same bits every time. A row that sees nothing, or is past the end, has
the log-sum-exp +inf here, so that its weights are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    across_of,
    cols_of,
    constant_span,
    diagonal_sums,
    diagonal_table,
    key_span,
    levels,
    logits,
    matrix,
    query_span,
    rows_of,
    shift_of,
    shown,
    vector,
)

#: no key: larger than all of them
LATE = tl.constexpr(0x7FFFFF00)
LN2 = tl.constexpr(0.6931471805599453)


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


# by rows


@triton.jit
def stronger(best, keys, s, j, most):
    """The strongest keys of those before and of a tile: each turn takes the best that is left in every row.

    `most` is the largest of each row of s. Tiles come in the order of their keys, so an equal that comes later has the
    higher key and never displaces; among the weakest that are kept, the highest key goes first.
    """
    least = tl.min(best, 1)
    while tl.max((most > least).to(tl.int32), 0) > 0:
        key = tl.min(tl.where(s == most[:, None], j[None, :], LATE), 1)
        last = tl.max(tl.where(best == least[:, None], keys, -1), 1)
        gains = (keys == last[:, None]) & (most > least)[:, None]
        best, keys = tl.where(gains, most[:, None], best), tl.where(gains, key[:, None], keys)
        s = tl.where(j[None, :] == key[:, None], float("-inf"), s)
        least, most = tl.min(best, 1), tl.max(s, 1)
    return best, keys


@triton.jit
def floor_of(crest, TOP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """What the TOP strongest keys of each row have at the least, from the largest logits at each place of a tile.

    These are logits of different keys, so the TOP-th of them is such a bound; a little less of it, for rounding.
    """
    if TOP > BLOCK_K:
        return tl.full([BLOCK_Q], float("-inf"), tl.float32)
    else:
        c = tl.arange(0, BLOCK_K)
        most = tl.max(crest, 1)
        for _ in range(1, TOP):
            at = tl.min(tl.where(crest == most[:, None], c[None, :], BLOCK_K), 1)
            crest = tl.where(c[None, :] == at[:, None], float("-inf"), crest)
            most = tl.max(crest, 1)
        return tl.where(most == float("-inf"), most, most - tl.abs(most) * 1e-6)


@triton.jit
def pick_in(
    best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, edge, rows, shift, level,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile into the strongest keys: the second sweep, in which few are above the floor."""
    j = j0 + tl.arange(0, BLOCK_K)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, MASKED)
    s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
    if MASKED:
        s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
    s = tl.where(s >= floor[:, None], s, float("-inf"))
    return stronger(best, keys, s, j, tl.max(s, 1))


@triton.jit
def look_in(
    top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, edge, rows, shift, level,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One key tile into the running maximum, sum and sum of weight times logit.

    TOP: and into `crest`, the largest logit so far at each place of a tile.
    """
    j = j0 + tl.arange(0, BLOCK_K)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, MASKED)
    if BARE and CONSTANT and not MASKED and not TOP:  # one number is added: it joins the scale in one operation
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        new = tl.maximum(top, tl.max(dots, 1) * given.scale + level)
        safe = new
        away = dots * given.scale + (level - new)[:, None]
    else:
        s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
        if MASKED:
            s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
        most = tl.max(s, 1)
        new = tl.maximum(top, most)
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        away = s - safe[:, None]
        if TOP:
            crest = tl.maximum(crest, s)
    weights = tl.exp2(away)
    fade = tl.exp2(top - safe)
    if ENTROPY:
        gap = tl.where(top == float("-inf"), 0.0, top - safe)
        spread = fade * (spread + gap * total) + tl.sum(tl.where(weights > 0.0, weights * away, 0.0), 1)
    total = total * fade + tl.sum(weights, 1)
    return new, total, spread, crest


@triton.jit
def by_rows(
    q_ptr, k_ptr, lse_ptr, entropy_ptr, logit_ptr, weight_ptr, index_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. BARE: see `scores`.

    TOP keys are kept, in WIDTH (a power of two) places, by a second sweep that knows how strong they must be.
    """
    blocks = tl.cdiv(given.q_len, BLOCK_Q)
    block = blocks - 1 - tl.program_id(0) % blocks  # the last rows of a causal matrix have the most to do
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
    rows, shift = rows_of(given, b, h, i), shift_of(given, b)

    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if given.has.sink:
        top = tl.zeros([BLOCK_Q], tl.float32) + vector(given.sink, b, h, i * 0, 1)
    sink = top
    total = tl.zeros([BLOCK_Q], tl.float32)
    spread = tl.zeros([BLOCK_Q], tl.float32)
    crest = tl.full([BLOCK_Q, BLOCK_K if TOP else 1], float("-inf"), tl.float32)

    first, full, still, last = key_span(given, b, i0, shift, BLOCK_Q, BLOCK_K)
    left, right = constant_span(given, i0, shift, full, still, BLOCK_Q, BLOCK_K, False)
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
    if given.has.mask:
        for j0 in range(first, full, BLOCK_K):
            top, total, spread, crest = look_in(
                top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, True, False, PRECISION, BARE, ENTROPY, TOP,
            )  # fmt: skip
    if given.has.clipped:
        for j0 in range(full, left, BLOCK_K):
            top, total, spread, crest = look_in(
                top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, far_left,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, True, PRECISION, BARE, ENTROPY, TOP,
            )  # fmt: skip
    for j0 in range(left, right, BLOCK_K):
        top, total, spread, crest = look_in(
            top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, not given.has.table, PRECISION, BARE, ENTROPY, TOP,
        )  # fmt: skip
    if given.has.clipped:
        for j0 in range(right, still, BLOCK_K):
            top, total, spread, crest = look_in(
                top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, far_right,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, True, PRECISION, BARE, ENTROPY, TOP,
            )  # fmt: skip
    for j0 in range(still, last, BLOCK_K):
        top, total, spread, crest = look_in(
            top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, True, False, PRECISION, BARE, ENTROPY, TOP,
        )  # fmt: skip

    whole = total
    if given.has.sink:
        whole += tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - top))
    blind = whole == 0.0
    size = tl.log2(tl.where(blind, 1.0, whole))
    inside = i < given.q_len
    at = (b * given.heads + h).to(tl.int64) * given.q_len + i
    tl.store(lse_ptr + at, tl.where(blind, float("inf"), top + size), mask=inside)
    if ENTROPY:
        tl.store(entropy_ptr + at, (size * total - spread) / tl.where(blind, 1.0, whole) * LN2, mask=inside)
    if TOP:
        best = tl.full([BLOCK_Q, WIDTH], float("-inf"), tl.float32)
        keys = tl.zeros([BLOCK_Q, WIDTH], tl.int32) + LATE + tl.arange(0, WIDTH)[None, :]  # all different
        floor = floor_of(crest, TOP, BLOCK_Q, BLOCK_K)
        if given.has.mask:
            for j0 in range(first, full, BLOCK_K):
                best, keys = pick_in(
                    best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
                    DIM, BLOCK_D, BLOCK_Q, BLOCK_K, True, False, PRECISION,
                )  # fmt: skip
        if given.has.clipped:
            for j0 in range(full, left, BLOCK_K):
                best, keys = pick_in(
                    best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, far_left,
                    DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, True, PRECISION,
                )  # fmt: skip
        for j0 in range(left, right, BLOCK_K):
            best, keys = pick_in(
                best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, not given.has.table, PRECISION,
            )  # fmt: skip
        if given.has.clipped:
            for j0 in range(right, still, BLOCK_K):
                best, keys = pick_in(
                    best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, far_right,
                    DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, True, PRECISION,
                )  # fmt: skip
        for j0 in range(still, last, BLOCK_K):
            best, keys = pick_in(
                best, keys, floor, q, k_ptr, k_step, given, b, h, i, j0, last, rows, shift, 0.0,
                DIM, BLOCK_D, BLOCK_Q, BLOCK_K, True, False, PRECISION,
            )  # fmt: skip
        for n in tl.static_range(TOP):
            s = tl.max(best, 1)
            key = tl.min(tl.where(best == s[:, None], keys, 0x7FFFFFFF), 1)
            taken = keys == key[:, None]
            best, keys = tl.where(taken, float("-inf"), best), tl.where(taken, 0x7FFFFFFF, keys)
            found = s > float("-inf")
            tl.store(logit_ptr + at * TOP + n, s * LN2, mask=inside)
            tl.store(weight_ptr + at * TOP + n, tl.where(found, tl.exp2(s - top - size), 0.0), mask=inside)
            tl.store(index_ptr + at * TOP + n, tl.where(found, key, -1).to(tl.int64), mask=inside)


# by columns


@triton.jit
def weigh(
    q_ptr, k, lse_ptr, q_step, given, b, h, i, j, rows_in, cols_in, shift, level,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, CHECK: tl.constexpr, CONSTANT: tl.constexpr,
    PRECISION: tl.constexpr, BARE: tl.constexpr,
):  # fmt: skip
    """Weights of queries i and keys j; 0 outside rows_in and, where CHECK, outside cols_in and where the mask hides."""
    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
    lse = tl.load(lse_ptr + i, mask=rows_in, other=float("inf"))
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
def sweep(
    received, begin, end, q_ptr, k, lse_ptr, q_step, given, b, h, j, cols_in, shift, level,
    sum_ptr, count_ptr, max_ptr, columns, column, high, q_cells, parts,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, CHECK: tl.constexpr,
    CONSTANT: tl.constexpr, RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Groups of rows from begin to end, into the mass received and into cells.

    A group is BLOCK_Q / HIGH cells of `high` rows. Its tiles take HIGH rows of each cell at a time and are added up in
    registers: a cell is summed once.
    """
    a = tl.arange(0, BLOCK_Q)
    for g in tl.range(begin, end, flatten=POOL):
        if POOL:
            line = g * (BLOCK_Q // HIGH)
            held = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            peak = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            seen = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
            for part in range(0, parts):
                inner = part * HIGH + a % HIGH
                i = (line + a // HIGH) * high + inner
                rows_in = (inner < high) & (i < given.q_len)
                weights = weigh(
                    q_ptr, k, lse_ptr, q_step, given, b, h, i, j, rows_in, cols_in, shift, level,
                    DIM, BLOCK_D, BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE,
                )  # fmt: skip
                held += weights
                peak = tl.maximum(peak, weights)
                if COUNT:
                    both = rows_in[:, None] & cols_in[None, :]
                    seen += (shown(given, b, h, i, j, shift, False) & both).to(tl.int32)
            if RECEIVED:
                received += held
            lines = line + tl.arange(0, BLOCK_Q // HIGH)
            at = lines[:, None].to(tl.int64) * columns + column[None, :]
            inside = (lines < q_cells)[:, None] & (column < columns)[None, :]
            cells = tl.reshape(held, [BLOCK_Q // HIGH, HIGH, BLOCK_K // WIDE, WIDE])
            tl.store(sum_ptr + at, tl.sum(tl.sum(cells, 3), 1), mask=inside)
            cells = tl.reshape(peak, [BLOCK_Q // HIGH, HIGH, BLOCK_K // WIDE, WIDE])
            tl.store(max_ptr + at, tl.max(tl.max(cells, 3), 1), mask=inside)
            if COUNT:
                cells = tl.reshape(seen, [BLOCK_Q // HIGH, HIGH, BLOCK_K // WIDE, WIDE])
                tl.store(count_ptr + at, tl.sum(tl.sum(cells, 3), 1), mask=inside)
        else:
            i = g * BLOCK_Q + a
            received += weigh(
                q_ptr, k, lse_ptr, q_step, given, b, h, i, j, i < given.q_len, cols_in, shift, level,
                DIM, BLOCK_D, BLOCK_Q, CHECK, CONSTANT, PRECISION, BARE,
            )  # fmt: skip
    return received


@triton.jit
def by_columns(
    q_ptr, k_ptr, lse_ptr, received_ptr, sum_ptr, count_ptr, max_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group, high, wide, q_cells, columns, q_parts, k_parts, blocks,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, CHECK: tl.constexpr,
    RECEIVED: tl.constexpr, POOL: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: some cells wide (WIDE, a power of two, keys of room each), or a part of a cell."""
    n = tl.program_id(0) % blocks
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    lse_ptr += (b * given.heads + h).to(tl.int64) * given.q_len
    c = tl.arange(0, BLOCK_K)
    inner = (n % k_parts) * BLOCK_K + c % WIDE
    j = ((n // k_parts) * (BLOCK_K // WIDE) + c // WIDE) * wide + inner
    cols_in = (inner < wide) & (j < given.k_len)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, True)
    shift = shift_of(given, b)

    column = n * (BLOCK_K // WIDE) + tl.arange(0, BLOCK_K // WIDE)
    cells = (b * given.heads + h).to(tl.int64) * q_cells * columns
    sum_ptr += cells
    count_ptr += cells
    max_ptr += cells
    received = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    group = (BLOCK_Q // HIGH) * high  # rows
    j0 = (n // k_parts) * (BLOCK_K // WIDE) * wide + (n % k_parts) * BLOCK_K
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
            received, begin, near, q_ptr, k, lse_ptr, q_step, given, b, h, j, cols_in, shift, far_right,
            sum_ptr, count_ptr, max_ptr, columns, column, high, q_cells, q_parts,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, CHECK, True, RECEIVED, POOL, COUNT,
        )  # fmt: skip
    received = sweep(
        received, near, after, q_ptr, k, lse_ptr, q_step, given, b, h, j, cols_in, shift, 0.0,
        sum_ptr, count_ptr, max_ptr, columns, column, high, q_cells, q_parts,
        DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, CHECK, not given.has.table, RECEIVED, POOL, COUNT,
    )  # fmt: skip
    if given.has.clipped:
        received = sweep(
            received, after, end, q_ptr, k, lse_ptr, q_step, given, b, h, j, cols_in, shift, far_left,
            sum_ptr, count_ptr, max_ptr, columns, column, high, q_cells, q_parts,
            DIM, BLOCK_D, BLOCK_Q, BLOCK_K, HIGH, WIDE, PRECISION, BARE, CHECK, True, RECEIVED, POOL, COUNT,
        )  # fmt: skip
    if RECEIVED:
        at = (b * given.heads + h).to(tl.int64) * given.k_len + j
        tl.store(received_ptr + at, tl.sum(received, 0), mask=cols_in)


# along diagonals


@triton.jit
def by_diagonals(
    q_ptr, k_ptr, lse_ptr, out_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    BARE: tl.constexpr, STRAIGHT: tl.constexpr,
):  # fmt: skip
    """Tiles of one head whose corners lie on one diagonal, i0 - j0 = off * BLOCK_K, summed by displacement.

    A table is the same on all of these tiles: it is read once. STRAIGHT: no mask but bounds on the displacement. The
    sums are BLOCK_Q / BLOCK_K + 1 rows of BLOCK_K, from the displacement off * BLOCK_K - BLOCK_K on.
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
    a, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)

    begin, end = tl.cdiv(tl.maximum(off, 0), tall), tl.minimum(q_blocks, tl.cdiv(k_blocks + off, tall))
    whole = begin
    if STRAIGHT:
        whole = tl.minimum(given.q_len // BLOCK_Q, tl.cdiv(tl.maximum(given.k_len // BLOCK_K + off, 0), tall))
        if given.has.mask:
            low, high = off * BLOCK_K - (BLOCK_K - 1) + shift, off * BLOCK_K + (BLOCK_Q - 1) + shift
            if given.mask.lo is not None:
                whole = tl.where(low >= given.mask.lo, whole, begin)
                end = tl.where(high >= given.mask.lo, end, begin)
            if given.mask.hi is not None:
                whole = tl.where(high <= given.mask.hi, whole, begin)
                end = tl.where(low <= given.mask.hi, end, begin)
        whole = tl.maximum(tl.minimum(whole, end), begin)

    level = 0.0
    if given.has.table:
        level = diagonal_table(given, b, h, off * BLOCK_K, BLOCK_Q, BLOCK_K).to(tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for t in range(begin, whole):
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, False)
        total += weigh(
            q_ptr, k, lse_ptr, q_step, given, b, h, i, j, i < given.q_len, j < given.k_len, shift, level,
            DIM, BLOCK_D, BLOCK_Q, False, True, PRECISION, BARE and not given.has.table,
        )  # fmt: skip
    for t in range(whole, end):
        i, j = t * BLOCK_Q + a, t * BLOCK_Q - off * BLOCK_K + c
        k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, True)
        total += weigh(
            q_ptr, k, lse_ptr, q_step, given, b, h, i, j, i < given.q_len, j < given.k_len, shift, level,
            DIM, BLOCK_D, BLOCK_Q, True, True, PRECISION, False,
        )  # fmt: skip

    diagonal_sums(
        total, out_ptr + ((b * given.heads + h).to(tl.int64) * count + line) * ((tall + 1) * BLOCK_K), BLOCK_Q, BLOCK_K
    )  # fmt: skip
