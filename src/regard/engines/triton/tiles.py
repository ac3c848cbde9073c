"""What all kernels share: the logits of one tile, what a mask shows of it, and which tiles a block can meet.

Forward, backward and summaries call these, so a logit is computed in one way only (eq. 18, 21). Logits are in units of
log 2 (`exp2` is the machine's own exponential): scale and biases come multiplied by log2(e), see `prepare`.

    at = shift_of(given, b)                            q_start - k_start of a batch row
    rows = rows_of(given, b, h, i)                     what queries i bring: load it once, outside the loop over keys
    cols = cols_of(given, b, h, j)                     what keys j bring
    s = logits(dots, rows, cols, ..., CONSTANT, TURNED)     float32 [queries, keys], or turned [keys, queries]
    s = tl.where(shown(given, b, h, i, j, at, TURNED), s, -inf)
    first, full, still, last = key_span(given, b, i0, ...)

`i` and `j` are vectors of indices into q and k; those past the end are harmless if the caller masks them. A tile
between `full` and `still` is wholly visible, and needs no mask. CONSTANT says that the table is constant on this tile,
and that its value is `level`; its gradient is a sum, see `reverse`. A turned tile has keys as rows: the way of the pass
that gathers gradients of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def down(x, TURNED: tl.constexpr):
    """A vector over queries, laid along a tile."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def across(x, TURNED: tl.constexpr):
    """A vector over keys, laid along a tile."""
    return x[:, None] if TURNED else x[None, :]


@triton.jit
def vector(x, b, h, at, count):
    """Entries `at` of an Operand; 0 past the end."""
    return tl.load(x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + at * x.step, mask=at < count, other=0.0)


@triton.jit
def matrix(ptr, step, at, count, DIM: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """Rows `at` of a matrix [count, DIM] whose last axis is contiguous, padded with zeros to BLOCK columns.

    CHECK: some may be past the end. (`run_of` needs fewer numbers, but in the loops of the backward passes ptxas then
    serialises the matrix products around it: 15 to 20 percent.)
    """
    d = tl.arange(0, BLOCK)
    where = ptr + at[:, None].to(tl.int64) * step + d[None, :]
    if CHECK:
        return tl.load(where, mask=(at[:, None] < count) & (d[None, :] < DIM), other=0.0)
    elif DIM != BLOCK:
        return tl.load(where, mask=d[None, :] < DIM, other=0.0)
    else:
        return tl.load(where)


@triton.jit
def run_of(ptr, step, start, count, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHECK: tl.constexpr):
    """The same for ROWS rows one after another: where they lie in a tile does not change from tile to tile."""
    a, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = ptr + (tl.full((), 0, tl.int64) + start) * step + (a[:, None] * step + d[None, :])
    if CHECK:
        return tl.load(where, mask=(start + a[:, None] < count) & (d[None, :] < DIM), other=0.0)
    elif DIM != BLOCK:
        return tl.load(where, mask=d[None, :] < DIM, other=0.0)
    else:
        return tl.load(where)


@triton.jit
def shift_of(given, b):
    """What the displacement of a pair is besides i - j."""
    at = given.q_start - given.k_start
    if given.q_starts is not None:
        at += tl.load(given.q_starts + b).to(tl.int32)
    if given.k_starts is not None:
        at -= tl.load(given.k_starts + b).to(tl.int32)
    return at


@triton.jit
def entry_of(table, at, count, BEGINS: tl.constexpr):
    """What a token adds to the entry of a pair: a_i of the side at which a row of entries begins, else o_j."""
    if BEGINS:
        if table.near is None:
            return tl.maximum(count - 1 - at, 0)
        else:
            return tl.load(table.near + at, mask=at < count, other=0)
    elif table.width is None:
        return at
    else:
        return (at // table.width) * table.pitch + at % table.width


@triton.jit
def rows_of(given, b, h, i):
    """What queries bring to a tile: scale, bias, cross factor, slope, table entry and gate."""
    scale, bias, cross, slope, near, gate = 1.0, 0.0, 0.0, 0.0, 0, 1.0
    if given.has.row_scale:
        scale = vector(given.row_scale, b, h, i, given.q_len)
    if given.has.row:
        bias = vector(given.row, b, h, i, given.q_len)
    if given.has.cross:
        cross = vector(given.cross_row, b, h, i, given.q_len)
    if given.has.slope:
        slope = vector(given.slope, b, h, i, given.q_len)
    if given.has.table:
        near = entry_of(given.table, i, given.q_len, not given.table.by_key)
        if given.table.gated:
            gate = vector(given.table.gate, b, h, i, given.q_len)
    return scale, bias, cross, slope, near, gate


@triton.jit
def cols_of(given, b, h, j):
    """What keys bring to a tile: scale, bias, cross factor and table entry."""
    scale, bias, cross, far = 1.0, 0.0, 0.0, 0
    if given.has.col_scale:
        scale = vector(given.col_scale, b, h, j, given.k_len)
    if given.has.col:
        bias = vector(given.col, b, h, j, given.k_len)
    if given.has.cross:
        cross = vector(given.cross_col, b, h, j, given.k_len)
    if given.has.table:
        far = entry_of(given.table, j, given.k_len, given.table.by_key)
    return scale, bias, cross, far


@triton.jit
def table_tile(given, b, h, rows, cols, TURNED: tl.constexpr):
    """A table's values on a tile, before its gate: each row from the copy in which it begins at a whole vector."""
    if given.table.by_key:
        at = down(rows[4], TURNED) + across(begin_of(given.table, cols[3]), TURNED)
    else:
        at = down(begin_of(given.table, rows[4]), TURNED) + across(cols[3], TURNED)
    base = given.table.ptr + b.to(tl.int64) * given.table.batch + h.to(tl.int64) * given.table.head
    values = tl.load(base + at)
    if values.dtype == tl.bfloat16 and not TURNED:
        # the upper half of a float32: said in whole numbers, each of the two in a register takes one operation, not
        # two (turned tiles are slower for it: there the order in which a compiler schedules counts for more)
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def begin_of(table, near):
    """Where a row of entries begins: in the copy in which that is a whole vector."""
    whole = near // table.copies
    return (near - whole * table.copies) * table.stride + whole * table.copies


@triton.jit
def levels(given, b, h):
    """The two values of a table that is constant far away: for displacements >= reach, and <= -reach."""
    base = given.table.ptr + b.to(tl.int64) * given.table.batch + h.to(tl.int64) * given.table.head
    first, last = tl.load(base).to(tl.float32), tl.load(base + given.q_len + given.k_len - 2).to(tl.float32)
    if given.table.by_key:
        return last, first
    else:
        return first, last


@triton.jit
def gathered_tile(g, b, h, i, j, q_len, k_len, TURNED: tl.constexpr):
    """A bias read by an entry a pair, before its gate."""
    near = down(tl.load(g.near + i, mask=i < q_len, other=0), TURNED)
    far = across(tl.load(g.far + j, mask=j < k_len, other=0), TURNED)
    inside = down(i < q_len, TURNED) & across(j < k_len, TURNED)
    entry = near - far
    if g.alone is not None:
        entry = tl.where(far < 0, g.alone + 1, entry)
        entry = tl.where(near < 0, tl.where(far < 0, g.alone + 2, g.alone), entry)
    if g.bins is not None:
        entry = tl.load(g.bins + b * g.bins_batch + entry, mask=inside, other=0)
    base = g.ptr + b.to(tl.int64) * g.batch + h.to(tl.int64) * g.head
    at = down(i, TURNED).to(tl.int64) * g.row + across(j, TURNED).to(tl.int64) * g.col + entry
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def logits(
    dots, rows, cols, given, b, h, i, j, shift, level, across_tile, down_row,
    CONSTANT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, from the dot products q·k: scale, every bias, softcap. No mask. In units of log 2.

    `level` is the value of the table where CONSTANT. `across_tile` and `down_row` are the values of the axes of a grid.
    """
    s = dots * given.scale
    if given.has.row_scale:
        s = s * down(rows[0], TURNED)
    if given.has.col_scale:
        s = s * across(cols[0], TURNED)
    if given.has.row:
        s += down(rows[1], TURNED)
    if given.has.col:
        s += across(cols[1], TURNED)
    if given.has.cross:
        s += down(rows[2], TURNED) * across(cols[2], TURNED)
    if given.has.slope:
        s -= down(rows[3], TURNED) * distance(i, j, shift, TURNED)
    if given.has.table:
        if CONSTANT:
            if given.table.gated:
                s += down(rows[5], TURNED) * level
            else:
                s += level
        elif given.table.gated:
            s += down(rows[5], TURNED) * table_tile(given, b, h, rows, cols, TURNED)
        else:
            s += table_tile(given, b, h, rows, cols, TURNED)
    if given.has.axes:
        s += across_tile.to(tl.float32) + down(down_row, TURNED).to(tl.float32)
    for n in tl.static_range(given.has.gathered):
        value = gathered_tile(given.gathered[n], b, h, i, j, given.q_len, given.k_len, TURNED)
        if given.gathered[n].gated:
            value = value * down(vector(given.gathered[n].gate, b, h, i, given.q_len), TURNED)
        s += value
    if given.softcap is not None:
        s = given.softcap * tanh(s / given.softcap)
    return s


@triton.jit
def distance(i, j, shift, TURNED: tl.constexpr):
    """|displacement| on a line. Positions become real before they are subtracted: exact below 2^24, and far quicker."""
    return tl.abs(down((i + shift).to(tl.float32), TURNED) - across(j.to(tl.float32), TURNED))


@triton.jit
def down_of(given, b, h, i, line):
    """What queries give to keys in one line of a grid."""
    a = given.axes
    base = a.down + (b * given.heads + h).to(tl.int64) * given.q_len * a.high
    at = (i // a.q_wide * a.high + line) * a.q_wide + i % a.q_wide
    return tl.load(base + at, mask=i < given.q_len, other=0.0)


@triton.jit
def across_of(given, b, h, i, x, TURNED: tl.constexpr):
    """What queries give to keys in columns x of a grid; turned tiles read [batch, head, y_i, x_j, x_i]."""
    a = given.axes
    base = a.across + (b * given.heads + h).to(tl.int64) * given.q_len * a.wide
    inside = down(i < given.q_len, TURNED) & across(x < a.wide, TURNED)
    if TURNED:
        at = down(i // a.q_wide * a.wide * a.q_wide + i % a.q_wide, TURNED) + across(x * a.q_wide, TURNED)
    else:
        at = down((i % a.q_wide * a.q_high + i // a.q_wide) * a.wide, TURNED) + across(x, TURNED)
    return tl.load(base + at, mask=inside, other=0.0)


@triton.jit
def tanh(x):
    """tanh, accurate near 0 too, where 1 - 2 / (e^2x + 1) would cancel."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


# along diagonals


@triton.jit
def diagonal_table(given, b, h, off, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """A table's values on tiles with i0 - j0 = off, before its gate: all of them have the same. 0 beyond its ends."""
    a, c = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[None, :]
    base = given.table.ptr + b.to(tl.int64) * given.table.batch + h.to(tl.int64) * given.table.head
    if given.table.width is None:
        at = given.q_len - 1 - (off + a - c)
        return tl.load(base + at, mask=(at >= 0) & (at < given.q_len + given.k_len - 1), other=0.0)
    else:
        wide: tl.constexpr = given.table.width
        key = given.q_len + c - off  # counted from a line before all that are there
        line = key // wide - 1 - a // wide
        at = line * given.table.pitch + wide - 1 - a % wide + key % wide
        return tl.load(base + at, mask=(line >= 0) & (line < (given.q_len + given.k_len) // wide - 1), other=0.0)


@triton.jit
def diagonal_sums(total, out_ptr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums along the diagonals of a tile: BLOCK_Q / BLOCK_K + 1 rows of BLOCK_K, from the displacement -BLOCK_K on."""
    a, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    # turned[r, d] is the pair of row r whose displacement is d up to a multiple of BLOCK_K
    turned = tl.gather(total, (a[:, None] - c[None, :]) & (BLOCK_K - 1), axis=1)
    part = a[:, None] // BLOCK_K + tl.where(a[:, None] % BLOCK_K >= c[None, :], 1, 0)
    for row in tl.static_range(BLOCK_Q // BLOCK_K + 1):
        tl.store(out_ptr + row * BLOCK_K + c, tl.sum(tl.where(part == row, turned, 0.0), 0))


# masks


@triton.jit
def key_bounds(given, b):
    """The keys that any query of a batch row may see, by lengths and ranges: first, and one past the last."""
    first, last = 0, given.k_len
    if given.has.mask:
        start = given.k_start
        if given.k_starts is not None:
            start += tl.load(given.k_starts + b).to(tl.int32)
        if given.mask.first is not None:
            first = tl.maximum(first, given.mask.first - start)
            last = tl.minimum(last, given.mask.last + 1 - start)
        if given.mask.before is not None:
            last = tl.minimum(last, tl.load(given.mask.before + b).to(tl.int32) - start)
    return first, tl.maximum(last, 0)


@triton.jit
def query_bounds(given, b):
    """The queries that may see anything: first, and one past the last."""
    first, last = 0, given.q_len
    if given.has.mask:
        start = given.q_start
        if given.q_starts is not None:
            start += tl.load(given.q_starts + b).to(tl.int32)
        if given.mask.q_first is not None:
            first = tl.maximum(first, given.mask.q_first - start)
            last = tl.minimum(last, given.mask.q_last + 1 - start)
        if given.mask.q_before is not None:
            last = tl.minimum(last, tl.load(given.mask.q_before + b).to(tl.int32) - start)
    return first, tl.maximum(last, 0)


@triton.jit
def shown(given, b, h, i, j, shift, TURNED: tl.constexpr):
    """Which pairs of a tile exist and may meet."""
    first, last = key_bounds(given, b)
    from_row, to_row = query_bounds(given, b)
    seen = across((j >= first) & (j < last), TURNED) & down((i >= from_row) & (i < to_row), TURNED)
    if given.has.mask:
        delta = down(i + shift, TURNED) - across(j, TURNED)
        if given.mask.lo is not None:
            seen = seen & (delta >= given.mask.lo)
        if given.mask.hi is not None:
            seen = seen & (delta <= given.mask.hi)
        if given.mask.q_ids is not None:
            mine = tl.load(
                given.mask.q_ids + b.to(tl.int64) * given.mask.q_ids_batch + i, mask=i < given.q_len, other=-1
            )
            theirs = tl.load(
                given.mask.k_ids + b.to(tl.int64) * given.mask.k_ids_batch + j, mask=j < given.k_len, other=-1
            )
            seen = seen & (down(mine, TURNED) == across(theirs, TURNED)) & down(mine >= 0, TURNED)
        if given.mask.dense is not None:
            at = (
                down(i, TURNED).to(tl.int64) * given.mask.dense_row
                + across(j, TURNED).to(tl.int64) * given.mask.dense_col
            )
            base = given.mask.dense + b.to(tl.int64) * given.mask.dense_batch + h.to(tl.int64) * given.mask.dense_head
            seen = seen & (tl.load(base + at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def key_span(given, b, i0, shift, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which key tiles a block of queries meets: it begins at `first`, and tiles of [full, still) are wholly visible.

    All are multiples of BLOCK_K, but for the end `last`.
    """
    first, last = key_bounds(given, b)
    i1 = tl.minimum(i0 + BLOCK_Q, given.q_len) - 1
    full, still = first, last
    if given.has.mask:
        if given.mask.hi is not None:
            first = tl.maximum(first, i0 + shift - given.mask.hi)
            full = tl.maximum(full, i1 + shift - given.mask.hi)
        if given.mask.lo is not None:
            last = tl.minimum(last, i1 + shift - given.mask.lo + 1)
            still = tl.minimum(still, i0 + shift - given.mask.lo + 1)
        from_row, to_row = query_bounds(given, b)
        last = tl.where((i0 >= to_row) | (i1 < from_row), 0, last)
        still = tl.where((i0 < from_row) | (i1 >= to_row), 0, still)
        if given.mask.q_spans is not None:
            block = b * tl.cdiv(given.q_len, BLOCK_Q) + i0 // BLOCK_Q
            first = tl.maximum(first, tl.load(given.mask.q_spans + block * 2))
            last = tl.minimum(last, tl.load(given.mask.q_spans + block * 2 + 1))
        if (given.mask.q_ids is not None) | (given.mask.dense is not None):
            still = 0
    return tile_span(first, full, still, last, BLOCK_K)


@triton.jit
def query_span(given, b, j0, shift, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same for a block of keys: which query tiles it meets, in multiples of BLOCK_Q."""
    first, last = query_bounds(given, b)
    j1 = tl.minimum(j0 + BLOCK_K, given.k_len) - 1
    full, still = first, last
    from_key, to_key = key_bounds(given, b)
    still = tl.where((j0 < from_key) | (j1 >= to_key) | (j0 + BLOCK_K > given.k_len), 0, still)
    if given.has.mask:
        if given.mask.lo is not None:
            first = tl.maximum(first, j0 - shift + given.mask.lo)
            full = tl.maximum(full, j1 - shift + given.mask.lo)
        if given.mask.hi is not None:
            last = tl.minimum(last, j1 - shift + given.mask.hi + 1)
            still = tl.minimum(still, j0 - shift + given.mask.hi + 1)
        last = tl.where((j0 >= to_key) | (j1 < from_key), 0, last)
        if given.mask.k_spans is not None:
            block = b * tl.cdiv(given.k_len, BLOCK_K) + j0 // BLOCK_K
            first = tl.maximum(first, tl.load(given.mask.k_spans + block * 2))
            last = tl.minimum(last, tl.load(given.mask.k_spans + block * 2 + 1))
        if (given.mask.q_ids is not None) | (given.mask.dense is not None):
            still = 0
    return tile_span(first, full, still, last, BLOCK_Q)


@triton.jit
def tile_span(first, full, still, last, BLOCK: tl.constexpr):
    """Bounds as whole tiles."""
    first = tl.maximum(first, 0) // BLOCK * BLOCK
    last = tl.maximum(last, first)
    full = tl.minimum((tl.maximum(full, first) + BLOCK - 1) // BLOCK * BLOCK, (last + BLOCK - 1) // BLOCK * BLOCK)
    still = tl.maximum(tl.minimum(still, last) // BLOCK * BLOCK, full)
    return first, full, still, last


@triton.jit
def constant_span(given, i0, shift, full, still, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RAMP: tl.constexpr):
    """Between `full` and `still`: where the table's far left part ends, and where its far right part begins.

    RAMP: where a slope's way down to the diagonal ends, and its way up again begins.
    """
    if given.has.clipped or RAMP:
        reach = 0
        if given.has.clipped:
            reach = given.table.reach
        left = (tl.maximum(i0 + shift - reach + 1, 0)) // BLOCK_K * BLOCK_K
        right = (tl.maximum(i0 + BLOCK_Q - 1 + shift + reach, 0) + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        left = tl.minimum(tl.maximum(left, full), still)
        return left, tl.minimum(tl.maximum(right, left), still)
    else:
        return full, still


@triton.jit
def query_constant_span(given, j0, shift, full, still, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same for a block of keys: where queries far before it end, and where those far behind it begin."""
    if given.has.clipped:
        low = tl.maximum(j0 - shift - given.table.reach + 1, 0) // BLOCK_Q * BLOCK_Q
        high = (tl.maximum(j0 + BLOCK_K - 1 - shift + given.table.reach, 0) + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        low = tl.minimum(tl.maximum(low, full), still)
        return low, tl.minimum(tl.maximum(high, low), still)
    else:
        return full, still


# dropout


@triton.jit
def spread(x):
    """A bijection of 32-bit integers that spreads every bit (eq. 25), as `engines.reference` has it."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def kept(given, b, h, i, j, TURNED: tl.constexpr):
    """What dropout multiplies weights by: 0, or 1 / (1 - dropout)."""
    seed = spread(tl.load(given.seeds + b * given.heads + h).to(tl.uint32))
    row = spread(seed + i.to(tl.uint32) * 0x9E3779B1)
    cell = spread(down(row, TURNED) + across(j.to(tl.uint32) * 0x85EBCA77, TURNED))
    return tl.where(cell >= given.dropped, given.boost, 0.0)
