"""Gradients of tables from sums along diagonals of tiles (`diagonal`), each written where it belongs.

A line:   d t[e] = the sums of all tiles whose diagonals meet entry e, and far away, where the table is constant, the
          sums along rows that `reverse` made
A grid:   the same for each line of the table, from whole tiles or from their diagonals
By bins:  d t[bin] = the sum over the entries of a bin, always in the same order

All in float32, summed over batch rows and over heads that share a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .choice import Tiling, interpreted, power
from .given import Known
from .launch import Start, again
from .tiles import shift_of


@triton.jit
def line_kernel(
    sums_ptr, left_ptr, right_ptr, bins_ptr, grad_ptr, given, heads, group, own, rows, count, first, entries, stride,
    PARTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """Some entries of a table on a line. sums: [own, heads, count, PARTS, WIDE]; `own` of its rows are summed.

    SCATTER: no two entries share a bin, so each goes to its own. FAR: entries at or past the reach are known together.
    """
    blocks = tl.cdiv(entries, BLOCK)
    block, shared = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    row, head = shared // (heads // group), shared % (heads // group)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    flat = entry - first
    tile, col = flat // WIDE, flat % WIDE
    total = tl.zeros([BLOCK], tl.float32)
    near = (entry < entries) & (flat >= 0)
    for n in range(0, own * group):
        at = ((row * own + n // group) * heads + head * group + n % group).to(tl.int64) * count
        for part in tl.static_range(PARTS):
            m = tile - part
            inside = near & (m >= 0) & (m < count)
            total += tl.load(sums_ptr + (at + m) * (PARTS * WIDE) + part * WIDE + col, mask=inside, other=0.0)
    if FAR:
        delta = entry - (given.k_len - 1) + shift_of(given, row)
        total = tl.where((delta < given.table.reach) & (delta > -given.table.reach), total, 0.0)
        if block == 0:
            total += tl.where(entry == 0, far_sum(right_ptr, row, head, heads, group, rows, given.q_len, BLOCK), 0.0)
        if block == blocks - 1:
            most = far_sum(left_ptr, row, head, heads, group, rows, given.q_len, BLOCK)
            total += tl.where(entry == entries - 1, most, 0.0)
    inside = entry < entries
    if SCATTER:
        entry = tl.load(bins_ptr + entry, mask=inside, other=0)
    tl.store(grad_ptr + shared.to(tl.int64) * stride + entry, total, mask=inside)


@triton.jit
def far_sum(x_ptr, row, head, heads, group, rows, q_len, BLOCK: tl.constexpr):
    """The sum of x [batch, heads, q_len] over `rows` batch rows from row * rows on, and the heads of a group."""
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(0, rows * group):
        base = x_ptr + ((row * rows + n // group) * heads + head * group + n % group).to(tl.int64) * q_len
        for i0 in range(0, q_len, BLOCK):
            i = i0 + tl.arange(0, BLOCK)
            total += tl.load(base + i, mask=i < q_len, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def grid_kernel(
    sums_ptr, bins_ptr, grad_ptr, heads, group, own, count, first, lines, lines_before, wide, stride, tile_q, tile_k,
    bins,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """One line of a table on a grid of lines `wide` long: displacements from 1 - wide to wide - 1.

    sums: [own, heads, count, tile_q, tile_k] of whole tiles, or of their diagonals; the block diagonal `first` is the
    first of them. `lines_before` lines of the table are those of keys below the query.
    """
    line, shared = tl.program_id(0) % lines, tl.program_id(0) // lines
    row, head = shared // (heads // group), shared % (heads // group)
    at = tl.arange(0, 2 * WIDE)
    dx = at - wide  # the first, which no pair has, is left out
    shown = (at >= 1) & (at < 2 * wide)
    total = tl.zeros([WIDE, 2 * WIDE], tl.float32)
    for n in range(0, own * group):
        base = sums_ptr + ((row * own + n // group) * heads + head * group + n % group).to(tl.int64) * (
            count * tile_q * tile_k
        )
        if WHOLE:
            r = tl.arange(0, WIDE)
            c = r[:, None] - dx[None, :]
            inside = shown[None, :] & (c >= 0) & (c < wide) & (r < wide)[:, None]
            mine, theirs = tile_q // wide, tile_k // wide
            for a in range(0, mine):
                for b in range(0, theirs):  # tile m, lines a and b: displacement (m theirs + a - b) of lines
                    below = line - lines_before - first * theirs - (a - b)
                    m = below // theirs
                    if (below >= 0) & (m * theirs == below) & (m < count):
                        tile = base + m.to(tl.int64) * (tile_q * tile_k)
                        where = (a * wide + r[:, None]) * tile_k + b * wide + c
                        total += tl.load(tile + where, mask=inside, other=0.0)
        else:
            for part in range(0, wide // tile_k):  # tiles as high as a line, and some to a line of keys
                m = at * 0 + (line - lines_before) * (wide // tile_k) - part - first
                local = dx + (part + 1) * tile_k  # from the displacement -tile_k of a tile on
                inside = shown & (m >= 0) & (m < count) & (local >= 0) & (local < tile_q * tile_k)
                values = tl.load(base + m.to(tl.int64) * (tile_q * tile_k) + local, mask=inside, other=0.0)
                total += tl.where(tl.arange(0, WIDE)[:, None] == 0, values[None, :], 0.0)
    entry = line * (2 * wide - 1) + at - 1
    if SCATTER:
        entry = tl.load(bins_ptr + entry, mask=shown, other=0).to(tl.int32)
        shown &= entry < bins
    tl.store(grad_ptr + shared.to(tl.int64) * stride + entry, tl.sum(total, 0), mask=shown)


@triton.jit
def bins_kernel(
    entries_ptr, bins_ptr, grad_ptr, heads, rows, entries, entries_step, bins_batch, bins, dim,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """The sum of entries [rows, heads, entries, dim] over one bin: [heads, bins, dim]."""
    bin, head = tl.program_id(0) % bins, tl.program_id(0) // bins
    f = tl.arange(0, BLOCK_F)
    total = tl.zeros([BLOCK, BLOCK_F], tl.float32)
    for row in range(0, rows):
        base = entries_ptr + (row * heads + head).to(tl.int64) * entries_step * dim
        for e0 in range(0, entries, BLOCK):
            e = e0 + tl.arange(0, BLOCK)
            mine = tl.load(bins_ptr + row * bins_batch + e, mask=e < entries, other=-1) == bin
            total += tl.load(base + e[:, None] * dim + f[None, :], mask=mine[:, None] & (f < dim)[None, :], other=0.0)
    at = grad_ptr + (head.to(tl.int64) * bins + bin) * dim + f
    tl.store(at, tl.sum(total, 0), mask=f < dim)


def by_bins(entries: Tensor, index: Tensor, bins: int) -> Tensor:
    """Sums of entries [rows, heads, n, f] by bin, over rows: [1, heads, bins, f]. index: [rows or 1, m], m <= n."""
    rows, heads, size, dim = entries.shape
    grad = torch.empty(1, heads, bins, dim, dtype=torch.float32, device=entries.device)
    block = 64 if interpreted() else max(16, 1024 // power(dim, 1))
    again(
        (bins_kernel, entries.shape, entries.device, index.shape, index.stride(), bins), (entries, index, grad), (),
        lambda: Start(
            entries.device, bins_kernel, heads * bins, Tiling(block, 1, 4, 1),
            heads, rows, index.shape[-1], size, 0 if len(index) == 1 else index.stride(0), bins, dim,
            BLOCK=block, BLOCK_F=power(dim, 1),
        ),
    )  # fmt: skip
    return grad


def on_line(
    given: Known, sums: Tensor, far: tuple[Tensor, Tensor] | None, begin: int, heads: int, rows: int,
    index: Tensor | None, bins: int,
) -> Tensor:  # fmt: skip
    """A table's gradient on a line, [rows, heads, n]: `rows` of its own, `heads` of its own.

    sums: [own, all heads, count, parts, wide]. index: the bin of each entry, if no two share one: then [1, heads,
    bins].
    """
    own, all_heads, count, parts, wide = sums.shape
    entries = given.q_len + given.k_len - 1
    room = torch.empty if index is None or entries == bins else torch.zeros
    grad = room(rows, heads, entries if index is None else bins, dtype=torch.float32, device=sums.device)
    block = 64 if interpreted() else 512
    left, right = far if far is not None else (None, None)
    batch = 0 if left is None else len(left)
    again(
        (line_kernel, given.seen, sums.shape, sums.device, batch, begin, heads, rows, index is None, bins),
        (sums, left, right, index, grad), (given,),
        lambda: Start(
            sums.device, line_kernel, -(-entries // block) * rows * heads, Tiling(block, 1, 4, 1),
            all_heads, all_heads // heads, own // rows, batch // rows, count,
            (begin - 1) * wide + given.k_len - 1, entries, grad.shape[-1],
            PARTS=parts, WIDE=wide, BLOCK=block, FAR=far is not None, SCATTER=index is not None,
        ),
    )  # fmt: skip
    return grad


def on_grid(
    sums: Tensor, begin: int, shapes: tuple[tuple[int, int], tuple[int, int]], whole: bool, heads: int, rows: int,
    index: Tensor | None, bins: int,
) -> Tensor:  # fmt: skip
    """The same on a grid, with three entries for tokens without a place, which get nothing here."""
    (q_high, wide), (k_high, _) = shapes
    own, all_heads, count, tile_q, tile_k = sums.shape
    lines = q_high + k_high - 1
    full = index is not None and lines * (2 * wide - 1) == bins
    room = torch.empty if full else torch.zeros
    size = lines * (2 * wide - 1) + 3 if index is None else bins
    grad = room(rows, heads, size, dtype=torch.float32, device=sums.device)
    again(
        (grid_kernel, sums.shape, sums.device, begin, shapes, whole, heads, rows, index is None, bins),
        (sums, index, grad), (),
        lambda: Start(
            sums.device, grid_kernel, lines * rows * heads, Tiling(16, 1, 4, 1),
            all_heads, all_heads // heads, own // rows, count,
            begin, lines, k_high - 1, wide, grad.shape[-1], tile_q, tile_k, bins,
            WIDE=power(wide, 1), WHOLE=whole, SCATTER=index is not None,
        ),
    )  # fmt: skip
    return grad
