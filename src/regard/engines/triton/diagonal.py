"""The gradient of a table, by block diagonals (eq. 24): one program adds up whole tiles of dS and skews them once.

All tiles with the same i0 - j0 meet the same entries of a table, on a line and on a grid whose lines divide a tile. So
a program walks one block diagonal, adds tiles in registers, and at the end sums along their diagonals (a line) or
gives the tile as it is (a grid). No atomics, and the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .reverse import d_tile, ends_of, fix_of
from .tiles import cols_of, key_bounds, matrix, query_bounds, rows_of, shift_of


@triton.jit
def add_tile(
    acc, q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, inner_ptr, fix_ptr, q_step, k_step, v_step, d_step, given, b, h,
    i0, j0, shift,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dS, times the gate of the table."""
    i, j = i0 + tl.arange(0, BLOCK), j0 + tl.arange(0, BLOCK)
    q = matrix(q_ptr, q_step, i, given.q_len, DIM, BLOCK_D, MASKED)
    d_out = matrix(d_out_ptr, d_step, i, given.q_len, V_DIM, BLOCK_V, MASKED)
    k = matrix(k_ptr, k_step, j, given.k_len, DIM, BLOCK_D, MASKED)
    v = matrix(v_ptr, v_step, j, given.k_len, V_DIM, BLOCK_V, MASKED)
    lse, inner = ends_of(lse_ptr, inner_ptr, given, b, h, i)
    rows, cols = rows_of(given, b, h, i), cols_of(given, b, h, j)
    d_logits, _, _ = d_tile(
        q, k, v, d_out, lse, inner, rows, cols, given, b, h, i, j, given.k_len, shift, 0.0, 0.0, 0.0,
        MASKED, False, PRECISION,
    )  # fmt: skip
    if fix_ptr is not None:
        d_logits = d_logits * fix_of(fix_ptr, given, b, h, i)[:, None]
    if given.table.gated:
        d_logits = d_logits * rows[5][:, None]
    return acc + d_logits


@triton.jit
def diagonal_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, inner_ptr, fix_ptr, sums_ptr, given,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, d_batch, d_head, d_step,
    k_group, v_group, begin, count, batches, slots,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Tiles with i0 - j0 = (begin + n) BLOCK of one head, over `batches` batch rows.

    WHOLE: gives the tile, not the sums of its diagonals.
    """
    slot, n = tl.program_id(0) % slots, tl.program_id(0) // slots
    m = begin + n
    h, b0 = slot % given.heads, slot // given.heads
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(0, batches):
        b = b0 + step
        shift = shift_of(given, b)
        from_key, to_key = key_bounds(given, b)
        from_row, to_row = query_bounds(given, b)
        start = tl.maximum(from_row // BLOCK, m + from_key // BLOCK)
        stop = tl.minimum(tl.cdiv(to_row, BLOCK), m + tl.cdiv(to_key, BLOCK))
        start = tl.maximum(tl.maximum(start, m), 0)
        full = tl.maximum(tl.cdiv(from_row, BLOCK), m + tl.cdiv(from_key, BLOCK))
        still = tl.minimum(to_row // BLOCK, m + to_key // BLOCK)
        least, most = (m - 1) * BLOCK + 1 + shift, (m + 1) * BLOCK - 1 + shift
        if given.has.mask:
            if given.mask.lo is not None:
                stop = tl.where(most < given.mask.lo, 0, stop)
                still = tl.where(least < given.mask.lo, 0, still)
            if given.mask.hi is not None:
                stop = tl.where(least > given.mask.hi, 0, stop)
                still = tl.where(most > given.mask.hi, 0, still)
            if (given.mask.q_ids is not None) or (given.mask.dense is not None):
                still = 0
        if given.has.clipped:
            stop = tl.where((least >= given.table.reach) | (most <= -given.table.reach), 0, stop)
        stop = tl.maximum(stop, start)
        full = tl.minimum(tl.maximum(full, start), stop)
        still = tl.maximum(tl.minimum(still, stop), full)
        q_at = q_ptr + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
        d_at = d_out_ptr + b.to(tl.int64) * d_batch + h.to(tl.int64) * d_head
        k_at = k_ptr + b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
        v_at = v_ptr + b.to(tl.int64) * v_batch + (h // v_group).to(tl.int64) * v_head
        if given.has.mask:
            for t in range(start, full):
                acc = add_tile(
                    acc, q_at, k_at, v_at, d_at, lse_ptr, inner_ptr, fix_ptr, q_step, k_step, v_step, d_step, given,
                    b, h, t * BLOCK, (t - m) * BLOCK, shift, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK, True, PRECISION,
                )  # fmt: skip
        for t in range(full, still):
            acc = add_tile(
                acc, q_at, k_at, v_at, d_at, lse_ptr, inner_ptr, fix_ptr, q_step, k_step, v_step, d_step, given, b, h,
                t * BLOCK, (t - m) * BLOCK, shift, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK, False, PRECISION,
            )  # fmt: skip
        for t in range(still, stop):
            acc = add_tile(
                acc, q_at, k_at, v_at, d_at, lse_ptr, inner_ptr, fix_ptr, q_step, k_step, v_step, d_step, given, b, h,
                t * BLOCK, (t - m) * BLOCK, shift, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK, True, PRECISION,
            )  # fmt: skip

    r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    place = (slot * count + n).to(tl.int64)
    if WHOLE:
        tl.store(sums_ptr + place * BLOCK * BLOCK + r[:, None] * BLOCK + c[None, :], acc)
    else:  # entry e of the diagonals is r - c = e - (BLOCK - 1)
        for half in tl.static_range(2):
            at = r[:, None] + (BLOCK - 1 - half * BLOCK) - c[None, :]
            inside = (at >= 0) & (at < BLOCK)
            turned = tl.gather(acc, tl.minimum(tl.maximum(at, 0), BLOCK - 1), 1)
            tl.store(sums_ptr + (place * 2 + half) * BLOCK + c, tl.sum(tl.where(inside, turned, 0.0), 0))
