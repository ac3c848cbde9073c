"""The forward kernel: A @ v and the log-sum-exp by one pass over key tiles (eq. 19, 20).

Weights are relative to some logit of their row, else they would overflow. That need not be the largest: float32 and
bfloat16 have room for 2^100 above and below. So it is the largest of a few keys, found before the pass, and the loop
over tiles has no maximum to follow and nothing to rescale: a third of its work. With a table weights are relative to 0,
for then one addition a pair is saved; else the subtraction comes with the scale for nothing. Where the sum of a row
tells that this was too far off, the block is done once more with a running maximum. float16 has no such room, and
always follows it.

A block of queries sweeps its key tiles in up to five loops without a branch inside: tiles that a mask cuts at the left,
wholly visible ones (far left, where a clipped table is constant; near; far right), and tiles cut at the right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Problem, product_buffer
from .choice import Tiling, forward_tiling, power
from .given import Known
from .launch import Start, added, again, dense_rows, is_easy, is_ragged, on_lines, precision
from .prepare import prepare, spans
from .tiles import (
    across_of,
    cols_of,
    constant_span,
    down_of,
    kept,
    key_span,
    levels,
    logits,
    matrix,
    query_bounds,
    rows_of,
    run_of,
    shift_of,
    shown,
    vector,
)
from .tune import tuned

#: keys that are looked at before the pass
FEW = tl.constexpr(16)
#: a sum of weights between these has lost nothing
FAINT, HUGE = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)


@triton.jit
def take_in(
    acc, top, total, q, k_ptr, v_ptr, given, b, h, i, j0, edge, rows, shift, level, across_tile, down_row,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EASY: tl.constexpr,
    MASKED: tl.constexpr, FAR: tl.constexpr, FIXED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One key tile into the running product. Keys at or past `edge` are not of this tile, where MASKED.

    FAR: 1 where all displacements are >= the table's reach, -1 where all are <= -reach (and 0 is the reach of a slope).
    EASY: only tables, slopes, terms of axes and numbers a row are added to scale * q·k.
    FIXED: `top` stays what it is. LATE: `total` is a tile, summed at the end.
    """
    CONSTANT: tl.constexpr = FAR != 0
    j = j0 + tl.arange(0, BLOCK_K)
    k = run_of(k_ptr, K_STEP, j0, given.k_len, DIM, BLOCK_D, BLOCK_K, MASKED)
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if EASY and given.has.ramp and CONSTANT and not MASKED:
        # on this side of the diagonal a slope is a number a row and one a column, `level`
        added = rows[1] - FAR * rows[3] * (i + shift - j0).to(tl.float32)
        weights, new = weigh(dots * given.scale + FAR * level[None, :], 1.0, added, top, FIXED)
    elif EASY and not given.has.slope and not MASKED and (CONSTANT or not given.has.table):
        # what is added is the same for a whole row: the scale and it join the subtraction in one operation
        added = rows[1] + down_row
        if given.has.table:
            added += level * rows[5]
        if given.has.axes:
            weights, new = weigh(dots * given.scale + across_tile.to(tl.float32), 1.0, added, top, FIXED)
        else:
            weights, new = weigh(dots, given.scale, added, top, FIXED)
    else:
        cols = cols_of(given, b, h, j)
        s = logits(dots, rows, cols, given, b, h, i, j, shift, level, across_tile, down_row, CONSTANT, False)
        if MASKED:
            s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
        weights, new = weigh(s, 1.0, 0.0, top, FIXED)
    v = run_of(v_ptr, V_STEP, j0, given.k_len, V_DIM, BLOCK_V, BLOCK_K, MASKED)
    if not FIXED:
        fade = tl.where(top == float("-inf"), 0.0, tl.exp2(top - new))
        total = total * fade
        acc = acc * fade[:, None]
    total += weights if LATE else tl.sum(weights, 1)
    if given.seeds is not None:
        weights = weights * kept(given, b, h, i, j, False)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new, total


@triton.jit
def weigh(s, factor, added, top, FIXED: tl.constexpr):
    """Weights of the logits s * factor + added, and what they are relative to: `top`, or the largest logit so far."""
    if FIXED:
        return tl.exp2(s * factor - (top - added)[:, None]), top
    else:
        new = tl.maximum(top, tl.max(s, 1) * factor + added)
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        return tl.exp2(s * factor - (safe - added)[:, None]), new


@triton.jit
def peek(
    q, k_ptr, given, b, h, i, j0, edge, rows, shift, across_tile, down_row,
    K_STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest logit of each row among a few keys; -inf where none of them is visible, or finite."""
    j = j0 + tl.arange(0, FEW)
    k = matrix(k_ptr, K_STEP, j, given.k_len, DIM, BLOCK_D, True)
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s = logits(
        dots, rows, cols_of(given, b, h, j), given, b, h, i, j, shift, 0.0, across_tile, down_row, False, False
    )  # fmt: skip
    s = tl.where(shown(given, b, h, i, j, shift, False) & (j < edge)[None, :], s, float("-inf"))
    most = tl.max(s, 1)
    return tl.where(tl.abs(most) < float("inf"), most, float("-inf"))


@triton.jit
def sweep(
    acc, top, total, begin, end, q, k_ptr, v_ptr, given, b, h, i, edge, rows, shift, level,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EASY: tl.constexpr,
    MASKED: tl.constexpr, FAR: tl.constexpr, FIXED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Key tiles from `begin` to `end`, all of one kind."""
    for j0 in range(begin, end, BLOCK_K):
        acc, top, total = take_in(
            acc, top, total, q, k_ptr, v_ptr, given, b, h, i, j0, edge, rows, shift, level, 0.0, 0.0,
            K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, MASKED, FAR, FIXED, LATE,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def line_by_line(
    acc, top, total, q, k_ptr, v_ptr, given, b, h, i, rows, shift,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EASY: tl.constexpr,
    RAGGED: tl.constexpr, FIXED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """All keys of a grid, column of tiles by column: what a query gives to columns is read once for all lines."""
    for x0 in range(0, given.axes.wide, BLOCK_K):
        tile = across_of(given, b, h, i, x0 + tl.arange(0, BLOCK_K), False)
        down_row = down_of(given, b, h, i, 0)
        for line in range(0, given.axes.high):  # the next line's values come while this one's are used
            coming = down_of(given, b, h, i, tl.minimum(line + 1, given.axes.high - 1))
            acc, top, total = take_in(
                acc, top, total, q, k_ptr, v_ptr, given, b, h, i, line * given.axes.wide + x0,
                (line + 1) * given.axes.wide, rows, shift, 0.0, tile, down_row,
                K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, RAGGED, 0, FIXED, LATE,
            )  # fmt: skip
            down_row = coming
    return acc, top, total


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, given,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, k_group, v_group,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, OUT_STEP: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EASY: tl.constexpr, BACKWARDS: tl.constexpr,
    RAGGED: tl.constexpr, FIXED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. RAGGED: tiles on lines of a grid are cut, by a mask or by the end of a line.

    FIXED: weights are relative to one number a row, not to the largest logit so far. LATE: see `take_in`.
    """
    blocks = tl.cdiv(given.q_len, BLOCK_Q)
    block = tl.program_id(0) % blocks
    b, h = tl.program_id(0) // blocks // given.heads, tl.program_id(0) // blocks % given.heads
    if BACKWARDS:  # the last rows of a causal matrix have the most to do: they start first
        block = blocks - 1 - block
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    k_ptr += b.to(tl.int64) * k_batch + (h // k_group).to(tl.int64) * k_head
    v_ptr += b.to(tl.int64) * v_batch + (h // v_group).to(tl.int64) * v_head
    q_ptr += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    q = matrix(q_ptr, Q_STEP, i, given.q_len, DIM, BLOCK_D, True)
    rows, shift = rows_of(given, b, h, i), shift_of(given, b)
    first, full, still, last = key_span(given, b, i0, shift, BLOCK_Q, BLOCK_K)

    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    start = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # what the sum has before any key
    if given.has.sink:
        start = tl.zeros([BLOCK_Q], tl.float32) + vector(given.sink, b, h, i * 0, 1)
    top, total = start, tl.where(start > float("-inf"), 1.0, 0.0)
    one = start  # a logit that the row has, or less
    if FIXED:
        if given.has.axes:
            line = tl.minimum(i0 // given.axes.q_wide, given.axes.high - 1)
            one = peek(
                q, k_ptr, given, b, h, i, line * given.axes.wide, (line + 1) * given.axes.wide, rows, shift,
                across_of(given, b, h, i, tl.arange(0, FEW), False), down_of(given, b, h, i, line),
                K_STEP, DIM, BLOCK_D, PRECISION,
            )  # fmt: skip
        else:  # keys on the diagonal, which most masks let all rows see
            near = tl.minimum(tl.maximum(i0 + shift, first), tl.maximum(last - 1, first)) // FEW * FEW
            one = peek(
                q, k_ptr, given, b, h, i, near, last, rows, shift, 0.0, 0.0, K_STEP, DIM, BLOCK_D, PRECISION
            )  # fmt: skip
        if given.has.table:
            top = tl.zeros([BLOCK_Q], tl.float32)
        else:
            top = tl.where(one > float("-inf"), one, 0.0)
        total = tl.exp2(start - top)
        if LATE:
            total = tl.where(tl.arange(0, BLOCK_K)[None, :] == 0, total[:, None], 0.0)

    if given.has.axes:
        acc, top, total = line_by_line(
            acc, top, total, q, k_ptr, v_ptr, given, b, h, i, rows, shift,
            K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, RAGGED, FIXED, LATE,
        )  # fmt: skip
    else:
        ramp: tl.constexpr = given.has.ramp and EASY
        parted: tl.constexpr = given.has.clipped or ramp
        left, right = constant_span(given, i0, shift, full, still, BLOCK_Q, BLOCK_K, ramp)
        far_left, far_right = 0.0, 0.0
        if given.has.clipped:
            far_left, far_right = levels(given, b, h)
        elif ramp:
            slope = tl.load(given.slope.ptr + b.to(tl.int64) * given.slope.batch + h.to(tl.int64) * given.slope.head)
            far_left = slope * tl.arange(0, BLOCK_K).to(tl.float32)
            far_right = far_left
        if given.has.mask:
            acc, top, total = sweep(
                acc, top, total, first, full, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, 0.0,
                K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, True, 0, FIXED, LATE,
            )  # fmt: skip
        if parted:
            acc, top, total = sweep(
                acc, top, total, full, left, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, far_left,
                K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, False, 1, FIXED, LATE,
            )  # fmt: skip
        acc, top, total = sweep(
            acc, top, total, left, right, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, 0.0,
            K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, False, 0, FIXED, LATE,
        )  # fmt: skip
        if parted:
            acc, top, total = sweep(
                acc, top, total, right, still, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, far_right,
                K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, False, -1, FIXED, LATE,
            )  # fmt: skip
        acc, top, total = sweep(
            acc, top, total, still, last, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, 0.0,
            K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, True, 0, FIXED, LATE,
        )  # fmt: skip

    inside = i < given.q_len
    if FIXED:
        if LATE:
            total = tl.sum(total, 1)
        from_row, to_row = query_bounds(given, b)
        lost = inside & (i >= from_row) & (i < to_row) & ~((total > FAINT) & (total < HUGE))
        if tl.max(lost.to(tl.int32), 0) > 0:
            # some logit is very far from what weights are relative to: once more, with a running maximum
            acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
            top = tl.maximum(start, one)
            total = tl.where(start > float("-inf"), tl.exp2(start - top), 0.0)
            if given.has.axes:
                acc, top, total = line_by_line(
                    acc, top, total, q, k_ptr, v_ptr, given, b, h, i, rows, shift,
                    K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, RAGGED, False, False,
                )  # fmt: skip
            else:
                acc, top, total = sweep(
                    acc, top, total, first, last, q, k_ptr, v_ptr, given, b, h, i, last, rows, shift, 0.0,
                    K_STEP, V_STEP, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_K, PRECISION, EASY, True, 0, False, False,
                )  # fmt: skip
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    d = tl.arange(0, BLOCK_V)
    out_ptr += b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
    where = out_ptr + i[:, None].to(tl.int64) * OUT_STEP + d[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (d < V_DIM)[None, :])
    tl.store(lse_ptr + (b * given.heads + h).to(tl.int64) * given.q_len + i, lse, mask=inside)


def product(problem: Problem, v: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A @ v, written to `out` if that is given, and the log-sum-exp."""
    q, k, v = dense_rows(problem.q), dense_rows(problem.k), dense_rows(v)
    given = prepare(problem).given
    out = product_buffer(problem, v) if out is None else out
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    kind = q.shape[-1], v.shape[-1], k.dtype, added(given)
    tiling = tuned("forward", kind, forward_tiling(*kind), lambda tiling: _start(tiling, given, q, k, v, out, lse))
    _start(tiling, given, q, k, v, out, lse)
    return out, lse


def _start(tiling: Tiling, given: Known, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    (batch, heads, q_len, dim), v_dim = q.shape, v.shape[-1]
    tiling, rounding, fixed = on_lines(tiling, given), precision(k.dtype), k.dtype != torch.float16
    again(
        (
            forward_kernel, given.seen, tiling, rounding, q.device, k.dtype, out.dtype, q.shape, k.shape, v.shape,
            q.stride(), k.stride(), v.stride(), out.stride(),
        ),
        (q, k, v, out, lse), (spans(given, tiling.block_q, tiling.block_k, batch, q.device),),
        lambda: Start(
            q.device, forward_kernel, -(-q_len // tiling.block_q) * batch * heads, tiling,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            heads // k.shape[1], heads // v.shape[1],
            Q_STEP=q.stride(2), K_STEP=k.stride(2), V_STEP=v.stride(2), OUT_STEP=out.stride(2),
            DIM=dim, V_DIM=v_dim, BLOCK_D=power(dim), BLOCK_V=power(v_dim),
            BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, PRECISION=rounding,
            EASY=is_easy(given), BACKWARDS=bool(given.mask) and given.mask.lo is not None,
            RAGGED=is_ragged(given, tiling), FIXED=fixed, LATE=fixed and tiling.late and not given.mask,
        ),
    )  # fmt: skip
