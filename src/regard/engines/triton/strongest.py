"""The strongest keys of each query, from the largest logits of groups of keys (eq. 26).

`rows.by_rows` leaves the largest logit of each group of consecutive keys. The k strongest keys of a row lie in the k
groups whose largest logits are largest, the earlier group first among equals: in every group before another there is a
key that comes before all keys of that other. So a program takes a row, finds its k groups, and computes the logits of
their keys again, a few instead of all. With many groups it finds eights of them first, by the same rule.

Logits are ranked as whole numbers in the same order: the machine finds the largest of a warp's in one step. All tensors
have rows: one on a GPU, several in Triton's interpreter, to which a program costs more than what it does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .looks import axes_tile
from .rows import LN2, block_of
from .tiles import cols_of, key_span, logits, matrix, rows_of, shift_of, shown

#: no key or group: larger than all of them
LATE = tl.constexpr(0x7FFFFF00)
#: less than every ranked logit, and the rank of -inf
LEAST = tl.constexpr(-0x80000000)
NOTHING = tl.constexpr(-0x7F800001)
#: groups that are first looked at together
SOME = tl.constexpr(8)


@triton.jit
def ranked(x):
    """Real numbers as whole ones in the same order; 0 and -0 are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def strongest(ranks, names, TOP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The TOP largest of each row, the lower name first among equals: ranks and names, in WIDTH places.

    Names are all different; where there are fewer than TOP, places keep LEAST, and names of nothing.
    """
    u = tl.arange(0, WIDTH)[None, :]
    best = tl.full([ROWS, WIDTH], LEAST, tl.int32)
    found = tl.zeros([ROWS, WIDTH], tl.int32) + (LATE + u)
    for n in range(TOP):
        most = tl.max(ranks, 1)[:, None]
        name = tl.min(tl.where(ranks == most, names, LATE), 1)[:, None]
        ranks = tl.where(names == name, LEAST, ranks)
        now = (u == n) & (most > LEAST)
        best, found = tl.where(now, most, best), tl.where(now, name, found)
    return best, found


@triton.jit
def joined(best, keys, ranks, j):
    """The strongest keys of those before and of some later ones: an equal that comes later never displaces."""
    least, most = tl.min(best, 1), tl.max(ranks, 1)
    while tl.max((most > least).to(tl.int32), 0) > 0:
        key = tl.min(tl.where(ranks == most[:, None], j, LATE), 1)
        last = tl.max(tl.where(best == least[:, None], keys, -1), 1)  # among the weakest the highest key goes
        gains = (keys == last[:, None]) & (most > least)[:, None]
        best, keys = tl.where(gains, most[:, None], best), tl.where(gains, key[:, None], keys)
        ranks = tl.where(j == key[:, None], LEAST, ranks)
        least, most = tl.min(best, 1), tl.max(ranks, 1)
    return best, keys


@triton.jit
def spread(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The same numbers [ROWS, COUNT], each in one thread: sums and maxima over an axis lie in many."""
    return tl.gather(x, tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, COUNT)[None, :], 1)


@triton.jit
def assess(
    q, k_ptr, given, b, h, i, j, shift,
    K_STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Ranks of the logits of queries i, each for its own keys j [ROWS, COUNT]; q has LINES rows."""
    there = tl.reshape(j < given.k_len, [ROWS * COUNT])
    at = tl.reshape(tl.where(j < given.k_len, j, 0), [ROWS * COUNT])
    k = matrix(k_ptr, K_STEP, at, given.k_len, DIM, BLOCK_D, False)  # (of no key, the first: it is not shown)
    # as `by_rows` does it, so that roundings are the same; a product has sixteen queries at the least, and wants few
    mine = (tl.arange(0, ROWS * COUNT) // COUNT)[:, None] == tl.arange(0, LINES)[None, :]
    if BLOCK_D <= 64:
        dots = tl.sum(tl.where(mine, tl.dot(k, tl.trans(q), input_precision=PRECISION), 0.0), 1)
    else:  # fewer programs would share a multiprocessor if so many numbers lay in its memory
        dots = tl.sum(tl.where(tl.trans(mine), tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0), 0)
    dots = spread(dots[None, :], 1, ROWS * COUNT)
    added = 0.0
    if given.has.axes:
        added = axes_tile(given, b, h, i, at)
    none = tl.zeros([ROWS], tl.float32)
    rows, cols = rows_of(given, b, h, i), cols_of(given, b, h, at)
    s = logits(dots, rows, cols, given, b, h, i, at, shift, 0.0, added, none, False, False)
    own = (tl.arange(0, ROWS * COUNT) // COUNT)[None, :] == tl.arange(0, ROWS)[:, None]
    s = tl.where(shown(given, b, h, i, at, shift, False) & there[None, :] & own, s, float("-inf"))
    return tl.reshape(tl.max(ranked(s), 0), [ROWS, COUNT])


@triton.jit(do_not_specialize=["begin"])
def by_groups(
    q_ptr, k_ptr, best_ptr, logit_ptr, weight_ptr, index_ptr, given,
    q_batch, q_head, k_batch, k_head, k_group, begin, pitch, size, Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """ROWS queries, of those that programs of `rows.by_rows` from number `begin` on had.

    GROUPS and WIDTH are powers of two that a row's groups and TOP fit in. SMALL: groups have so many keys, and all
    those of a tile of NARROW keys were written or none; else (0) they have `size`. CHUNK keys are looked at together:
    ONCE, it is all of them.
    """
    if SMALL:
        size = SMALL
    n = tl.program_id(0) * ROWS
    b, h, i0 = block_of(begin + n // BLOCK_Q, given, BLOCK_Q)
    place = i0 + n % BLOCK_Q + tl.arange(0, ROWS)
    i = tl.minimum(place, given.q_len - 1)  # a block may have rows past the end: they write nothing
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    best_ptr += (n + tl.arange(0, ROWS)).to(tl.int64) * pitch
    shift = shift_of(given, b)
    first, _, _, last = key_span(given, b, i0, shift, BLOCK_Q, NARROW)
    first, last = first // size, tl.cdiv(last, size)  # groups that were written

    g = tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, GROUPS)[None, :]
    there = g
    if SMALL:
        there = g // (NARROW // SMALL) * (NARROW // SMALL)  # whole vectors
    values = tl.load(best_ptr[:, None] + g, mask=(there >= first) & (there < last), other=float("-inf"))
    if GROUPS > WIDTH * SOME:
        most = spread(tl.max(tl.reshape(values, [ROWS, GROUPS // SOME, SOME]), 2), ROWS, GROUPS // SOME)
        names = tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, GROUPS // SOME)[None, :]
        _, names = strongest(ranked(most), names, TOP, ROWS, WIDTH)
        u = tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, WIDTH * SOME)[None, :]
        g = tl.gather(names, u // SOME, 1)
        g = tl.where(g < LATE, g * SOME + u % SOME, LATE + u)
        values = tl.load(best_ptr[:, None] + g, mask=(g >= first) & (g < last), other=float("-inf"))
    _, names = strongest(ranked(values), g, TOP, ROWS, WIDTH)

    lines = i0 + n % BLOCK_Q + tl.arange(0, LINES)
    q = matrix(q_ptr, Q_STEP, lines, tl.minimum(given.q_len, i0 + n % BLOCK_Q + ROWS), DIM, BLOCK_D, True)
    u = tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, CHUNK)[None, :]
    if ONCE:
        g = tl.gather(names, u // size, 1)
        keys = tl.where(g < LATE, g * size + u % size, LATE + u)
        best = assess(q, k_ptr, given, b, h, i, keys, shift, K_STEP, DIM, BLOCK_D, PRECISION, ROWS, LINES, CHUNK)
    else:
        best = tl.full([ROWS, WIDTH], LEAST, tl.int32)
        keys = tl.zeros([ROWS, WIDTH], tl.int32) + (LATE + tl.arange(0, WIDTH)[None, :])
        group = tl.full([ROWS], -1, tl.int32)
        for _ in range(TOP):  # groups in the order of their keys
            group = tl.min(tl.where(names > group[:, None], names, LATE), 1)
            for c in range(0, size, CHUNK):
                j = tl.where(group[:, None] < LATE, group[:, None] * size + c, LATE) + u
                some = assess(q, k_ptr, given, b, h, i, j, shift, K_STEP, DIM, BLOCK_D, PRECISION, ROWS, LINES, CHUNK)
                best, keys = joined(best, keys, some, j)
    best, keys = strongest(best, keys, TOP, ROWS, WIDTH)

    best = tl.maximum(best, NOTHING)
    s = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    top, height = tl.load(best_ptr + pitch - 2)[:, None], tl.load(best_ptr + pitch - 1)[:, None]
    found = s > float("-inf")
    u = tl.arange(0, WIDTH)[None, :]
    inside = (place < given.q_len)[:, None] & (u < TOP)
    at = ((b * given.heads + h).to(tl.int64) * given.q_len + i)[:, None] * TOP + u
    tl.store(logit_ptr + at, s * LN2, mask=inside)
    tl.store(weight_ptr + at, tl.where(found, tl.exp2(s - top - height), 0.0), mask=inside)
    tl.store(index_ptr + at, tl.where(found, keys, -1).to(tl.int64), mask=inside)
