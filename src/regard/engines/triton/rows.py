"""The kernel that reads A by rows: log-sum-exp, entropy, and the largest logits of groups of keys (eq. 26 and 30).

A block of queries sweeps its keys. In float32 a maximum follows them, and sums are made good for rounding. In half
precision weights are relative to one number a row, as in `product`: sums have room for 2^100 above and below it, and a
pair costs a multiplication, an exponential and an addition. Should a sum say that this was too far off, the block is
looked at again with a maximum that follows. `strongest` finds the strongest keys from the groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .looks import PARTS, ahead, axes_tile, scores
from .product import FAINT, FEW, HUGE, peek
from .tiles import (
    begin_of,
    constant_span,
    key_span,
    levels,
    matrix,
    query_bounds,
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
def note(crest, held, s, factor, extra, fade, base, sums, best_ptr, j0, slot, fresh, heap, BLOCK_Q: tl.constexpr,
         BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Keep the largest logits s * factor + extra of each group of keys, for `strongest`.

    GROUP: so many keys, some of a tile; if TURNED they lie as many apart as there are groups. Else (-1) a group is
    some tiles, number `slot`, and `crest` is its largest so far, unless the tile is the first of it (`fresh`): tiles
    come in order, each writes what is known, and the last of a group has it all. POOL: the same for sums of weights,
    `held`, which are relative to `base` and are kept as logarithms, `heap` numbers further on, for `cells.pool`.
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
        crest = tl.maximum(tl.where(fresh, float("-inf"), crest), tl.max(s, 1) * factor + extra)
        tl.store(best_ptr + slot, crest)
        if POOL:
            held = tl.where(fresh, 0.0, held * fade) + sums
            tl.store(best_ptr + heap + slot, tl.log2(held) + base)
    return crest, held


@triton.jit
def add(total, lost, x, EXACT: tl.constexpr):
    """total + x; if EXACT, what rounding took from it so far (`lost`) is put back: a row may have a million keys."""
    if EXACT:
        x -= lost
        new = total + x
        return new, (new - total) - x
    else:
        return total + x, lost


@triton.jit
def look_in(
    top, total, spread, lost, crest, held, q, k_ptr, given, b, h, i, j0, edge, rows, shift, level, best_ptr, size, heap,
    K_STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """One key tile into the running maximum, sums and sums of weight times logit; and into groups, if there are any."""
    j = j0 + tl.arange(0, BLOCK_K)
    k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, MASKED)
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
    exact: tl.constexpr = q.dtype == tl.float32
    lost_sums, lost_spread = lost
    if ENTROPY:
        gap = tl.where(top == float("-inf"), 0.0, top - safe)
        more = tl.sum(tl.where(weights > 0.0, weights * away, 0.0), 1)
        spread, lost_spread = add(fade * (spread + gap * total), lost_spread * fade, more, exact)
    sums = tl.sum(weights, 1)
    total, lost_sums = add(total * fade, lost_sums * fade, sums, exact)
    lost = lost_sums, lost_spread
    crest, held = note(
        crest, held, s, factor, extra, fade, safe, sums, best_ptr, j0, j0 // size, j0 % size == 0, heap,
        BLOCK_Q, BLOCK_K, GROUP, False, POOL,
    )  # fmt: skip
    return new, total, spread, lost, crest, held


@triton.jit
def glide(
    total, spread, crest, held, begin, end, top, q, k_ptr, given, b, h, i, edge, rows, shift, level,
    best_ptr, size, heap,
    K_STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Tiles from begin to end, relative to `top`, which stays as it is.

    Where it is dots alone that takes three operations a pair. Sums are in eight parts a row then, which stay in
    threads; and if there are groups in a tile its keys come in another order, so that a thread has all keys of one.
    """
    quick: tl.constexpr = BARE and CONSTANT and not MASKED
    c, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    slot, inner = begin // size, begin % size  # counted on: a division in the loop would be a tenth of it
    if quick:
        if GROUP > 0:
            c = c % (BLOCK_K // GROUP) * GROUP + c // (BLOCK_K // GROUP)
        where = k_ptr + c[:, None].to(tl.int64) * K_STEP + d[None, :]
        low = (level - top)[:, None]
        sums = tl.zeros([BLOCK_Q, PARTS], tl.float32)
        spreads = tl.zeros([BLOCK_Q, PARTS], tl.float32)
        for j0 in range(begin, end, BLOCK_K):
            k = ahead(where, j0, K_STEP, DIM, BLOCK_D)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            away = dots * given.scale + low
            weights = tl.exp2(away)
            some = tl.sum(tl.reshape(weights, [BLOCK_Q, BLOCK_K // PARTS, PARTS]), 1)
            sums += some
            if ENTROPY:
                spreads += tl.sum(tl.reshape(weights * away, [BLOCK_Q, BLOCK_K // PARTS, PARTS]), 1)
            row = top
            if POOL:
                row = tl.sum(some, 1)
            crest, held = note(
                crest, held, dots, given.scale, level, 1.0, top, row, best_ptr, j0, slot, inner == 0, heap,
                BLOCK_Q, BLOCK_K, GROUP, True, POOL,
            )  # fmt: skip
            inner += BLOCK_K
            slot += tl.where(inner >= size, 1, 0)
            inner = tl.where(inner >= size, 0, inner)
        total += tl.sum(sums, 1)
        spread += tl.sum(spreads, 1)
    else:
        # a table on a line is read by pointers that are computed once
        lined: tl.constexpr = (
            BARE and not MASKED and given.has.table and given.table.width is None and not given.table.by_key
        )
        where, entries = k_ptr, k_ptr
        if lined:
            where = k_ptr + c[:, None].to(tl.int64) * K_STEP + d[None, :]
            entries = given.table.ptr + b.to(tl.int64) * given.table.batch + h.to(tl.int64) * given.table.head
            entries += begin_of(given.table, rows[4])[:, None] + c[None, :]
        # with a number of stages a table comes asynchronously too, in the layout of products
        for j0 in tl.range(begin, end, BLOCK_K, num_stages=2 if given.has.table and not MASKED else None):
            if lined:
                k = ahead(where, j0, K_STEP, DIM, BLOCK_D)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * given.scale + tl.load(entries + j0)
            else:
                j = j0 + c
                k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, MASKED)
                s = scores(q, k, given, b, h, i, j, rows, shift, level, BLOCK_Q, CONSTANT, PRECISION)
                if MASKED:
                    s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
            away = s - top[:, None]
            weights = tl.exp2(away)
            row = tl.sum(weights, 1)
            total += row
            if ENTROPY:
                if MASKED:
                    away = tl.where(weights > 0.0, away, 0.0)
                spread += tl.sum(weights * away, 1)
            crest, held = note(
                crest, held, s, 1.0, 0.0, 1.0, top, row, best_ptr, j0, slot, inner == 0, heap,
                BLOCK_Q, BLOCK_K, GROUP, False, POOL,
            )  # fmt: skip
            inner += BLOCK_K
            slot += tl.where(inner >= size, 1, 0)
            inner = tl.where(inner >= size, 0, inner)
    return total, spread, crest, held


@triton.jit
def look_along(
    top, total, spread, lost, crest, held, begin, end, q, k_ptr, given, b, h, i, edge, rows, shift, level,
    best_ptr, size, heap,
    K_STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr, MASKED: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr,
    ENTROPY: tl.constexpr, GROUP: tl.constexpr, STEADY: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Keys from begin to end, multiples of NARROW (but for the last end): NARROW tiles, or wider ones of dots alone.

    STEADY: relative to `top`, see `glide`.
    """
    if STEADY:
        if NARROW < BLOCK_K and BARE and CONSTANT and not MASKED:
            if GROUP < 0:  # no tile in two groups
                odd = tl.minimum(tl.cdiv(begin, BLOCK_K) * BLOCK_K, end)
                total, spread, crest, held = glide(
                    total, spread, crest, held, begin, odd, top, q, k_ptr, given, b, h, i, edge, rows, shift, level,
                    best_ptr, size, heap,
                    K_STEP, DIM, BLOCK_D, BLOCK_Q, NARROW, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP, POOL,
                )  # fmt: skip
                begin = odd
            even = begin + (end - begin) // BLOCK_K * BLOCK_K
            total, spread, crest, held = glide(
                total, spread, crest, held, begin, even, top, q, k_ptr, given, b, h, i, edge, rows, shift, level,
                best_ptr, size, heap,
                K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP, POOL,
            )  # fmt: skip
            begin = even
        total, spread, crest, held = glide(
            total, spread, crest, held, begin, end, top, q, k_ptr, given, b, h, i, edge, rows, shift, level,
            best_ptr, size, heap,
            K_STEP, DIM, BLOCK_D, BLOCK_Q, NARROW, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP, POOL,
        )  # fmt: skip
    else:
        for j0 in range(begin, end, NARROW):
            top, total, spread, lost, crest, held = look_in(
                top, total, spread, lost, crest, held, q, k_ptr, given, b, h, i, j0, edge, rows, shift, level,
                best_ptr, size, heap,
                K_STEP, DIM, BLOCK_D, BLOCK_Q, NARROW, MASKED, CONSTANT, PRECISION, BARE, ENTROPY, GROUP, POOL,
            )  # fmt: skip
    return top, total, spread, lost, crest, held


@triton.jit(do_not_specialize=["begin"])
def by_rows(
    q_ptr, k_ptr, lse_ptr, top_ptr, fix_ptr, entropy_ptr, best_ptr, given,
    q_batch, q_head, k_batch, k_head, k_group, begin, pitch, size,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, BARE: tl.constexpr, FIX: tl.constexpr, ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, STEADY: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head, the first program's being number `begin`. BARE: see `scores`.

    GROUP and POOL, see `note`; 0: no groups. The last two of `pitch` numbers a row are what its weights are relative to
    and its log-sum-exp less that. FIX: both are written for the passes that follow, the second as a factor. A float32
    log-sum-exp of 16 is rounded by as much as an entry of A, and all entries of its row alike.
    """
    b, h, i0 = block_of(begin + tl.program_id(0), given, BLOCK_Q)
    i = i0 + tl.arange(0, BLOCK_Q)
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    best = best_ptr + (tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64) * pitch
    heap = pitch // 2
    q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
    rows, shift = rows_of(given, b, h, i), shift_of(given, b)

    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if given.has.sink:
        top = tl.zeros([BLOCK_Q], tl.float32) + vector(given.sink, b, h, i * 0, 1)
    sink = top
    none = tl.zeros([BLOCK_Q], tl.float32)
    total, spread, held = none, none, none
    lost = none, none  # by rounding, in float32
    crest = tl.full([BLOCK_Q], float("-inf"), tl.float32)

    first, full, still, last = key_span(given, b, i0, shift, BLOCK_Q, NARROW)
    if STEADY:
        top = none
        if not given.has.table:
            near = tl.minimum(tl.maximum(i0 + shift, first), tl.maximum(last - 1, first)) // FEW * FEW
            axes = 0.0
            if given.has.axes:
                axes = axes_tile(given, b, h, i, near + tl.arange(0, FEW))
            one = peek(q, k_ptr, given, b, h, i, near, last, rows, shift, axes, none, K_STEP, DIM, BLOCK_D, PRECISION)
            top = tl.where(one > float("-inf"), one, 0.0)
    left, right = constant_span(given, i0, shift, full, still, BLOCK_Q, NARROW, False)
    far_left, far_right = 0.0, 0.0
    if given.has.clipped:
        far_left, far_right = levels(given, b, h)
    if given.has.mask:
        top, total, spread, lost, crest, held = look_along(
            top, total, spread, lost, crest, held, first, full, q, k_ptr, given, b, h, i, last, rows, shift, 0.0,
            best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, True, False, PRECISION, BARE,
            ENTROPY, GROUP, STEADY, POOL,
        )  # fmt: skip
    if given.has.clipped:
        top, total, spread, lost, crest, held = look_along(
            top, total, spread, lost, crest, held, full, left, q, k_ptr, given, b, h, i, last, rows, shift, far_left,
            best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, True, PRECISION, BARE,
            ENTROPY, GROUP, STEADY, POOL,
        )  # fmt: skip
    top, total, spread, lost, crest, held = look_along(
        top, total, spread, lost, crest, held, left, right, q, k_ptr, given, b, h, i, last, rows, shift, 0.0,
        best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, not given.has.table, PRECISION, BARE,
        ENTROPY, GROUP, STEADY, POOL,
    )  # fmt: skip
    if given.has.clipped:
        top, total, spread, lost, crest, held = look_along(
            top, total, spread, lost, crest, held, right, still, q, k_ptr, given, b, h, i, last, rows, shift, far_right,
            best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, False, True, PRECISION, BARE,
            ENTROPY, GROUP, STEADY, POOL,
        )  # fmt: skip
    top, total, spread, lost, crest, held = look_along(
        top, total, spread, lost, crest, held, still, last, q, k_ptr, given, b, h, i, last, rows, shift, 0.0,
        best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, True, False, PRECISION, BARE,
        ENTROPY, GROUP, STEADY, POOL,
    )  # fmt: skip

    inside = i < given.q_len
    whole = total + tl.exp2(sink - tl.where(top > float("-inf"), top, 0.0))
    if STEADY:
        from_row, to_row = query_bounds(given, b)
        far = inside & (i >= from_row) & (i < to_row) & ~((whole > FAINT) & (whole < HUGE))
        if tl.max(far.to(tl.int32), 0) > 0:
            # some logit is very far from what weights are relative to: once more, with a maximum that follows
            top, total, spread, lost, crest, held = look_along(
                sink, none, none, (none, none), crest, none, first, last, q, k_ptr, given, b, h, i, last, rows, shift,
                0.0, best, size, heap, K_STEP, DIM, BLOCK_D, BLOCK_Q, BLOCK_K, NARROW, True, False, PRECISION, BARE,
                ENTROPY, GROUP, False, POOL,
            )  # fmt: skip
            whole = total + tl.exp2(sink - tl.where(top > float("-inf"), top, 0.0))
    blind = whole == 0.0
    height = tl.log2(tl.where(blind, 1.0, whole))
    at = (b * given.heads + h).to(tl.int64) * given.q_len + i
    tl.store(lse_ptr + at, tl.where(blind, float("inf"), top + height), mask=inside)
    if FIX:
        tl.store(top_ptr + at, tl.where(blind, float("inf"), top), mask=inside)
        tl.store(fix_ptr + at, 1.0 / tl.where(blind, 1.0, whole), mask=inside)
    if GROUP:
        tl.store(best + pitch - 2, top)
        tl.store(best + pitch - 1, height)
    if ENTROPY:
        mean = (height * total - spread) / tl.where(blind, 1.0, whole)
        tl.store(entropy_ptr + at, mean * LN2, mask=inside)
