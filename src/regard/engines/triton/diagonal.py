"""The gradient of a table, by block diagonals (eq. 24): one program adds up whole tiles of dS and skews them once.

All tiles with the same i0 - j0 meet the same entries of a table, on a line and on a grid whose lines divide a tile or
are as long as tiles are high. So a program walks one block diagonal, reads the table once, adds tiles in registers, and
at the end sums along their diagonals (a line, lines as long as tiles) or gives the tile as it is (shorter lines). No
atomics, and the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .reverse import d_tile, ends_of, fix_of
from .tiles import cols_of, diagonal_sums, diagonal_table, key_bounds, query_bounds, rows_of, run_of, shift_of


@triton.jit
def add_tile(
    acc, q_ptr, k_ptr, v_ptr, d_out_ptr, ends_ptr, inner_ptr, fix_ptr, q_step, k_step, v_step, d_step, given, b, h,
    i0, j0, shift, table,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dS, times the gate of the table. `table` is what the table adds to it."""
    i, j = i0 + tl.arange(0, BLOCK_Q), j0 + tl.arange(0, BLOCK_K)
    q = run_of(q_ptr, q_step, i0, given.q_len, DIM, BLOCK_D, BLOCK_Q, MASKED)
    d_out = run_of(d_out_ptr, d_step, i0, given.q_len, V_DIM, BLOCK_V, BLOCK_Q, MASKED)
    k = run_of(k_ptr, k_step, j0, given.k_len, DIM, BLOCK_D, BLOCK_K, MASKED)
    v = run_of(v_ptr, v_step, j0, given.k_len, V_DIM, BLOCK_V, BLOCK_K, MASKED)
    lse, inner = ends_of(ends_ptr, inner_ptr, given, b, h, i)
    rows, cols = rows_of(given, b, h, i), cols_of(given, b, h, j)
    d_logits, _, _ = d_tile(
        q, k, v, d_out, lse, inner, rows, cols, given, b, h, i, j, given.k_len, shift, table.to(tl.float32), 0.0, 0.0,
        MASKED, True, PRECISION,
    )  # fmt: skip
    if fix_ptr is not None:
        d_logits = d_logits * fix_of(fix_ptr, given, b, h, i)[:, None]
    if given.table.gated:
        d_logits = d_logits * rows[5][:, None]
    return acc + d_logits


@triton.jit
def diagonal_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, ends_ptr, inner_ptr, fix_ptr, sums_ptr, given,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, d_batch, d_head,
    k_group, v_group, begin, count, batches,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, D_STEP: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Tiles with i0 - j0 = (begin + n) BLOCK_K of one head, over `batches` batch rows.

    BLOCK_Q is a multiple of BLOCK_K. WHOLE: gives the tile, not the sums of its diagonals.
    """
    tall: tl.constexpr = BLOCK_Q // BLOCK_K
    # the diagonals of one head one after another, the middle ones, which are long, first: what they read stays near
    slot, n = tl.program_id(0) // count, tl.program_id(0) % count
    n = (count - 1) // 2 + tl.where(n % 2 == 1, (n + 1) // 2, -(n // 2))
    m = begin + n
    h, b0 = slot % given.heads, slot // given.heads
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    table = diagonal_table(given, b0, h, m * BLOCK_K, BLOCK_Q, BLOCK_K)
    for step in range(0, batches):
        b = b0 + step
        shift = shift_of(given, b)
        from_key, to_key = key_bounds(given, b)
        from_row, to_row = query_bounds(given, b)
        start = tl.maximum(from_row // BLOCK_Q, tl.cdiv(tl.maximum(from_key // BLOCK_K + m, 0), tall))
        stop = tl.minimum(tl.cdiv(to_row, BLOCK_Q), tl.cdiv(tl.maximum(tl.cdiv(to_key, BLOCK_K) + m, 0), tall))
        full = tl.maximum(tl.cdiv(from_row, BLOCK_Q), tl.cdiv(tl.maximum(tl.cdiv(from_key, BLOCK_K) + m, 0), tall))
        still = tl.minimum(to_row // BLOCK_Q, tl.cdiv(tl.maximum(to_key // BLOCK_K + m, 0), tall))
        least, most = m * BLOCK_K - (BLOCK_K - 1) + shift, m * BLOCK_K + (BLOCK_Q - 1) + shift
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
                    acc, q_at, k_at, v_at, d_at, ends_ptr, inner_ptr, fix_ptr, Q_STEP, K_STEP, V_STEP, D_STEP, given,
                    b, h, t * BLOCK_Q, t * BLOCK_Q - m * BLOCK_K, shift, table,
                    DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K, True, PRECISION,
                )  # fmt: skip
        for t in range(full, still):
            acc = add_tile(
                acc, q_at, k_at, v_at, d_at, ends_ptr, inner_ptr, fix_ptr, Q_STEP, K_STEP, V_STEP, D_STEP, given, b, h,
                t * BLOCK_Q, t * BLOCK_Q - m * BLOCK_K, shift, table,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K, False, PRECISION,
            )  # fmt: skip
        for t in range(still, stop):
            acc = add_tile(
                acc, q_at, k_at, v_at, d_at, ends_ptr, inner_ptr, fix_ptr, Q_STEP, K_STEP, V_STEP, D_STEP, given, b, h,
                t * BLOCK_Q, t * BLOCK_Q - m * BLOCK_K, shift, table,
                DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K, True, PRECISION,
            )  # fmt: skip

    place = (slot * count + n).to(tl.int64)
    if WHOLE:
        r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
        tl.store(sums_ptr + place * BLOCK_Q * BLOCK_K + r[:, None] * BLOCK_K + c[None, :], acc)
    else:
        diagonal_sums(acc, sums_ptr + place * (tall + 1) * BLOCK_K, BLOCK_Q, BLOCK_K)
