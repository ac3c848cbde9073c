"""The kernel that reads A by rows: log-sum-exp, entropy, and the largest logits of groups of keys (eq. 26 and 30).

A block of queries sweeps its keys with a running maximum and sum. In half precision the maximum of the first tile is
kept for those that follow: sums then have room for logits 127 above it, in units of log 2, and a pair costs a
multiplication, an exponential and an addition. Should a sum overflow, the tiles are looked at again with a maximum that
follows them. `strongest` finds the strongest keys from the groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .looks import PARTS, ahead, scores
from .tiles import (
    constant_span,
    key_span,
    levels,
    matrix,
    rows_of,
    shift_of,
    shown,
    vector,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_of(n, given, BLOCK_Q: tl.constexpr):
    """The n-th block of queries: batch row, head and first query.

    The last rows come first: of a causal matrix they have the most to do.
    """
    blocks = tl.cdiv(given.q_len, BLOCK_Q)
    block = blocks - 1 - n % blocks
    return n // blocks // given.heads, n // blocks % given.heads, block * BLOCK_Q


@triton.jit
def note(crest, s, factor, extra, best_ptr, j0, size, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
         GROUP: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Keep the largest logits s * factor + extra of each group of keys, for `strongest`.

    GROUP: so many keys, some of a tile; if TURNED they lie as many apart as there are groups. Else (-1) a group is
    `size` keys, of several tiles, and `crest` is its largest so far: tiles come in order, each writes what is known,
    and the last of a group has it all.
    """
    if GROUP > 0:
        count: tl.constexpr = BLOCK_K // GROUP
        if TURNED:
            most = tl.max(tl.reshape(s, [BLOCK_Q, GROUP, count]), 1)
        else:
            most = tl.max(tl.reshape(s, [BLOCK_Q, count, GROUP]), 2)
        at = tl.multiple_of(j0 // GROUP, 4)
        tl.store(best_ptr[:, None] + (at + tl.arange(0, count))[None, :], most * factor + extra)
    elif GROUP < 0:
        crest = tl.maximum(tl.where(j0 % size == 0, float("-inf"), crest), tl.max(s, 1) * factor + extra)
        tl.store(best_ptr + j0 // size, crest)
    return crest


@triton.jit
def look_in(
    top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, edge, rows, shift, level, best_ptr, size,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One key tile into the running maximum, sums and sums of weight times logit; and into groups, if there are any."""
    j = j0 + tl.arange(0, BLOCK_K)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, MASKED)
    if BARE and CONSTANT and not MASKED:  # one number is added: it joins the scale in one operation
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor, extra = given.scale, level
    else:
        s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
        if MASKED:
            s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
        factor, extra = 1.0, 0.0
    new = tl.maximum(top, tl.max(s, 1) * factor + extra)
    safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
    away = s * factor + (extra - safe)[:, None]
    weights = tl.exp2(away)
    fade = tl.exp2(top - safe)
    if ENTROPY:
        gap = tl.where(top == float("-inf"), 0.0, top - safe)
        spread = fade * (spread + gap * total) + tl.sum(tl.where(weights > 0.0, weights * away, 0.0), 1)
    total = total * fade + tl.sum(weights, 1)
    crest = note(crest, s, factor, extra, best_ptr, j0, size, BLOCK_Q, BLOCK_K, GROUP, False)
    return new, total, spread, crest


@triton.jit
def glide(
    total, spread, crest, begin, end, top, q, k_ptr, k_step, given, b, h, i, rows, shift, level, best_ptr, size,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, QUICK: tl.constexpr,
    CONSTANT: tl.constexpr, PRECISION: tl.constexpr, ENTROPY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles that no mask cuts, under a maximum that stays as it is; QUICK: three operations a pair, it is dots alone.

    A logit far above that maximum makes a sum infinite, and the caller looks again. Sums of QUICK tiles are in eight
    parts a row, which stay in threads; and if there are groups in a tile its keys come in another order, so that a
    thread has all keys of one.
    """
    c, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    if QUICK:
        if GROUP > 0:
            c = c % (BLOCK_K // GROUP) * GROUP + c // (BLOCK_K // GROUP)
        where = k_ptr + c[:, None].to(tl.int64) * k_step + d[None, :]
        low = (level - top)[:, None]
        sums = tl.zeros([BLOCK_Q, PARTS], tl.float32)
        spreads = tl.zeros([BLOCK_Q, PARTS], tl.float32)
        for j0 in range(begin, end, BLOCK_K):
            k = ahead(where, j0, k_step, DIM, BLOCK_D)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            away = dots * given.scale + low
            weights = tl.exp2(away)
            sums += tl.sum(tl.reshape(weights, [BLOCK_Q, BLOCK_K // PARTS, PARTS]), 1)
            if ENTROPY:
                spreads += tl.sum(tl.reshape(weights * away, [BLOCK_Q, BLOCK_K // PARTS, PARTS]), 1)
            crest = note(crest, dots, given.scale, level, best_ptr, j0, size, BLOCK_Q, BLOCK_K, GROUP, True)
        total += tl.sum(sums, 1)
        spread += tl.sum(spreads, 1)
    else:
        for j0 in range(begin, end, BLOCK_K):
            k = matrix(k_ptr, k_step, j0 + c, given.k_len, DIM, BLOCK_D, False)
            s = scores(q, k, given, b, h, i, j0 + c, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
            away = s - top[:, None]
            weights = tl.exp2(away)
            total += tl.sum(weights, 1)
            if ENTROPY:
                spread += tl.sum(weights * away, 1)
            crest = note(crest, s, 1.0, 0.0, best_ptr, j0, size, BLOCK_Q, BLOCK_K, GROUP, False)
    return total, spread, crest


@triton.jit
def look_along(
    top, total, spread, crest, begin, end, q, k_ptr, k_step, given, b, h, i, edge, rows, shift, level, best_ptr, size,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NARROW: tl.constexpr,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, STEADY: tl.constexpr,
):  # fmt: skip
    """Keys from begin to end, multiples of NARROW (but for the last end): NARROW tiles, or wider ones of dots alone.

    STEADY: after the first tiles the maximum may stay as it is, see `glide`.
    """
    if STEADY and not MASKED:
        quick: tl.constexpr = BARE and CONSTANT
        wide: tl.constexpr = BLOCK_K if quick else NARROW
        rest = tl.minimum(begin + NARROW if GROUP >= 0 else (begin // wide + 1) * wide, end)  # no tile in two groups
        for j0 in range(begin, rest, NARROW):
            top, total, spread, crest = look_in(
                top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, edge, rows, shift, level, best_ptr,
                size, DIM, BLOCK_D, BLOCK_Q, NARROW, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP,
            )  # fmt: skip
        begin = rest + (end - rest) // wide * wide
        total_, spread_, crest_ = glide(
            total, spread, crest, rest, begin, top, q, k_ptr, k_step, given, b, h, i, rows, shift, level, best_ptr,
            size, DIM, BLOCK_D, BLOCK_Q, wide, quick, CONSTANT, PRECISION, ENTROPY, GROUP,
        )  # fmt: skip
        if tl.max(total_, 0) < float("inf"):
            total, spread, crest = total_, spread_, crest_
        else:
            begin = rest
    for j0 in range(begin, end, NARROW):
        top, total, spread, crest = look_in(
            top, total, spread, crest, q, k_ptr, k_step, given, b, h, i, j0, edge, rows, shift, level, best_ptr,
            size, DIM, BLOCK_D, BLOCK_Q, NARROW, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP,
        )  # fmt: skip
    return top, total, spread, crest


@triton.jit
def by_rows(
    q_ptr, k_ptr, lse_ptr, entropy_ptr, best_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, k_group, begin, pitch, size,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr, GROUP: tl.constexpr,
    STEADY: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head, the first program's being number `begin`. BARE: see `scores`.

    GROUP, see `note`; 0: none. The last two of `pitch` numbers a row are its maximum and log-sum-exp less that.
    """
    b, h, i0 = block_of(begin + tl.program_id(0), given, BLOCK_Q)
    i = i0 + tl.arange(0, BLOCK_Q)
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    best = best_ptr + (tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64) * pitch
    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, True)
    rows, shift = rows_of(given, b, h, i), shift_of(given, b)

    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if given.has.sink:
        top = tl.zeros([BLOCK_Q], tl.float32) + vector(given.sink, b, h, i * 0, 1)
    sink = top
    total = tl.zeros([BLOCK_Q], tl.float32)
    spread = tl.zeros([BLOCK_Q], tl.float32)
    crest = tl.full([BLOCK_Q], float("-inf"), tl.float32)

    first, full, still, last = key_span(given, b, i0, shift, BLOCK_Q, NARROW)
    left, right = constant_span(given, i0, shift, full, still, BLOCK_Q, NARROW, False)
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
    if given.has.mask:
        top, total, spread, crest = look_along(
            top, total, spread, crest, first, full, q, k_ptr, k_step, given, b, h, i, last, rows, shift, 0.0, best,
            size, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, True, False, PRECISION, BARE, ENTROPY, GROUP, STEADY,
        )  # fmt: skip
    if given.has.clipped:
        top, total, spread, crest = look_along(
            top, total, spread, crest, full, left, q, k_ptr, k_step, given, b, h, i, last, rows, shift, far_left, best,
            size, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, True, PRECISION, BARE, ENTROPY, GROUP, STEADY,
        )  # fmt: skip
    top, total, spread, crest = look_along(
        top, total, spread, crest, left, right, q, k_ptr, k_step, given, b, h, i, last, rows, shift, 0.0, best,
        size, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, not given.has.table, PRECISION, BARE, ENTROPY, GROUP,
        STEADY,
    )  # fmt: skip
    if given.has.clipped:
        top, total, spread, crest = look_along(
            top, total, spread, crest, right, still, q, k_ptr, k_step, given, b, h, i, last, rows, shift, far_right,
            best, size, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, True, PRECISION, BARE, ENTROPY, GROUP, STEADY,
        )  # fmt: skip
    top, total, spread, crest = look_along(
        top, total, spread, crest, still, last, q, k_ptr, k_step, given, b, h, i, last, rows, shift, 0.0, best,
        size, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, True, False, PRECISION, BARE, ENTROPY, GROUP, STEADY,
    )  # fmt: skip

    whole = total
    if given.has.sink:
        whole += tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - top))
    blind = whole == 0.0
    height = tl.log2(tl.where(blind, 1.0, whole))
    inside = i < given.q_len
    at = (b * given.heads + h).to(tl.int64) * given.q_len + i
    tl.store(lse_ptr + at, tl.where(blind, float("inf"), top + height), mask=inside)
    if GROUP:
        tl.store(best + pitch - 2, top)
        tl.store(best + pitch - 1, height)
    if ENTROPY:
        mean = (height * total - spread) / tl.where(blind, 1.0, whole)
        tl.store(entropy_ptr + at, mean * LN2, mask=inside)
