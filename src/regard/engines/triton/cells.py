"""Kernels for the cells of a heat map that look at no pair: visible pairs counted, and rows put together (eq. 27).

Under bounds on the displacement, lengths and ranges, the visible pairs of a cell follow from its corners. And where
`rows.by_rows` has left what each row gives to each cell of keys, a cell is the sum and the maximum of few numbers, so
one pass over all pairs is enough for log-sum-exp and map.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import key_bounds, key_span, query_bounds, shift_of


@triton.jit
def corner(y):
    """Pairs of whole numbers from 0 on that sum to y at the most."""
    y = tl.maximum(y, -1)
    return (y + 1) * (y + 2) // 2


@triton.jit
def below(delta, high, wide):
    """Pairs of `high` queries and `wide` keys whose displacement is at most delta more than that of the first two."""
    y = delta + wide - 1
    return corner(y) - corner(y - high) - corner(y - wide) + corner(y - high - wide)


@triton.jit(do_not_specialize=["high", "wide", "q_cells", "k_cells"])
def count_cells(count_ptr, given, high, wide, q_cells, k_cells, BLOCK: tl.constexpr):
    """Visible pairs of some cells of a batch row, for masks that have bounds: no ids, and nothing dense."""
    blocks = tl.cdiv(q_cells.to(tl.int64) * k_cells, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int32)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    y, x = n // k_cells, n % k_cells
    first, last = key_bounds(given, b)
    from_row, to_row = query_bounds(given, b)
    i0, j0 = tl.maximum(y * high, from_row), tl.maximum(x * wide, first)
    tall = tl.maximum(tl.minimum((y + 1) * high, to_row) - i0, 0)
    broad = tl.maximum(tl.minimum((x + 1) * wide, last) - j0, 0)
    seen = tall * broad
    if given.has.mask:
        delta = i0 - j0 + shift_of(given, b)
        if given.mask.hi is not None:
            seen = below(given.mask.hi - delta, tall, broad)
        if given.mask.lo is not None:
            seen -= below(given.mask.lo - 1 - delta, tall, broad)
    seen = tl.where((tall > 0) & (broad > 0), tl.maximum(seen, 0), 0)
    tl.store(count_ptr + b.to(tl.int64) * q_cells * k_cells + n, seen.to(tl.float64), mask=y < q_cells)


@triton.jit(do_not_specialize=["begin", "count", "high", "q_cells", "k_cells", "head", "line", "lines"])
def pool(
    best_ptr, lse_ptr, sum_ptr, max_ptr, given, begin, count, pitch, size, high, q_cells, k_cells, head, line, lines,
    BLOCK_Q: tl.constexpr, NARROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some cells of one line of cells, from the rows that `count` programs of `rows.by_rows` had, the first `begin`.

    What other programs' rows give is added by other launches, one after the other. The first line of the launch is
    `line`, of head number `head`; `lines` are taken of each head.
    """
    across = tl.cdiv(k_cells, COLUMNS)
    n = tl.program_id(0)
    c = n % across * COLUMNS + tl.arange(0, COLUMNS)
    y = line + n // across % lines
    bh = head + n // across // lines
    b = bh // given.heads
    shift = shift_of(given, b)
    blocks = tl.cdiv(given.q_len, BLOCK_Q)
    top, bottom = y * high, tl.minimum((y + 1) * high, given.q_len)
    total = tl.zeros([COLUMNS], tl.float32)
    peak = tl.zeros([COLUMNS], tl.float32)
    for i0 in range(top // BLOCK_Q * BLOCK_Q, bottom, BLOCK_Q):
        i = i0 + tl.arange(0, BLOCK_Q)
        place = bh * blocks + blocks - 1 - i0 // BLOCK_Q - begin  # see `rows.block_of`
        edge = tl.where((place >= 0) & (place < count), bottom, top)
        rows_in = (i >= top) & (i < edge)
        first, _, _, last = key_span(given, b, i0, shift, BLOCK_Q, NARROW)
        cols_in = (c >= first // size) & (c < tl.cdiv(last, size))  # cells that were written
        inside = rows_in[:, None] & cols_in[None, :]
        at = (place.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None] * pitch + c[None, :]
        lse = tl.load(lse_ptr + bh.to(tl.int64) * given.q_len + i, mask=rows_in, other=float("inf"))
        most = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
        sums = tl.load(best_ptr + at + pitch // 2, mask=inside, other=float("-inf"))
        total += tl.sum(tl.exp2(sums - lse[:, None]), 0)
        peak = tl.maximum(peak, tl.max(tl.exp2(most - lse[:, None]), 0))
    at = (bh.to(tl.int64) * q_cells + y) * k_cells + c
    inside = c < k_cells
    tl.store(sum_ptr + at, tl.load(sum_ptr + at, mask=inside, other=0.0) + total, mask=inside)
    tl.store(max_ptr + at, tl.maximum(tl.load(max_ptr + at, mask=inside, other=0.0), peak), mask=inside)
