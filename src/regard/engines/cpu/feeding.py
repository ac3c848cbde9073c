"""What PyTorch's fused CPU attention is fed with: a bias for a block of rows, as a view wherever there is one.

A Toeplitz bias b[i - j] needs no N x N: with the rows of q reversed it is a view of the table with strides (1, 1).
Every static term and slope on a line goes into that table, and so do causal and window masks, as -inf. Other terms and
masks are laid out block by block from the tiled engine's values (`piece_value`), whose skewed views need no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...normal import Piece, Problem
from ..tiled.grids import line_of, over_grid
from ..tiled.pieces import axis_value, gated
from ..tiled.places import see
from ..tiled.strips import Block, columns, wide_type

#: rows of a block: enough for the matrix products, few enough for the cache
ROWS = 256


class Feed(NamedTuple):
    """A problem's bias in two parts: what a table holds, and the pieces and mask that are laid out by blocks."""

    table: Tensor | None  # [batch or 1, heads or 1, q_len + k_len - 1], reversed: entry q_len - 1 - i + j
    tabled: tuple[Piece, ...]  # the pieces in it
    pieces: tuple[Piece, ...]
    mask: tuple | None
    within: tuple[int | None, int | None] | None  # the displacements that the table's mask allows


def feed(problem: Problem) -> Feed:
    """Sort a problem's pieces and mask into table and blocks."""
    form = problem.form
    tabled = tuple(p for p in form.pieces if is_tabled(p))
    rest = tuple(p for p in form.pieces if not is_tabled(p))
    within, mask = split_mask(form.mask) if form.q_geometry[0] == "line" else (None, form.mask)
    if not tabled and within is None:
        return Feed(None, (), rest, mask, None)
    dtype = wide_type(problem)
    if within is None and [piece.kind for piece in tabled] == ["table"]:  # nothing to add up: quick, for decoding
        return Feed(problem.operands[tabled[0].slots[0]].to(dtype).flip(-1), tabled, rest, mask, None)
    delta = displacements(problem)
    table = torch.zeros(delta.shape, dtype=dtype, device=delta.device).unsqueeze(1)
    for piece in tabled:
        x = problem.operands[piece.slots[0]].to(dtype)
        table = table + (x if piece.kind == "table" else -x.squeeze(-1) * delta.abs().unsqueeze(1))
    if within is not None:
        lo, hi = within
        hidden = torch.zeros_like(delta, dtype=torch.bool)
        hidden = hidden if lo is None else hidden | (delta < lo)
        hidden = hidden if hi is None else hidden | (delta > hi)
        table = table.masked_fill(hidden.unsqueeze(1), -torch.inf)
    return Feed(table.flip(-1).contiguous(), tabled, rest, mask, within)


def is_tabled(piece: Piece) -> bool:
    """A term that a table over displacements on a line holds."""
    return piece.kind in ("table", "slope") and piece.space == ("line",) and piece.gate < 0


def displacements(problem: Problem) -> Tensor:
    """Absolute displacement of each table entry: [batch or 1, n]."""
    form, (q_start, k_start) = problem.form, problem.starts
    q_len, k_len = problem.q.shape[2], problem.k.shape[2]
    delta = (torch.arange(q_len + k_len - 1, device=problem.q.device) - (k_len - 1) + q_start - k_start)[None]
    for slot, sign in ((form.q_start, 1), (form.k_start, -1)):
        delta = delta if slot < 0 else delta + sign * problem.operands[slot]
    return delta


def table_gradients(problem: Problem, fed: Feed, d_table: Tensor, block: Block) -> Iterator[tuple[int, Tensor]]:
    """From the gradient of a block's table, by displacement, to the tables and slopes it was made of, by slot."""
    for piece in fed.tabled:
        if piece.kind == "table":
            yield piece.slots[0], d_table
        else:
            delta = displacements(problem)
            far = (delta[block.batch] if len(delta) > 1 else delta).abs().unsqueeze(1).to(d_table.dtype)
            yield piece.slots[0], -(d_table * far).sum(-1, keepdim=True).unsqueeze(-1)


def split_mask(mask: tuple | None) -> tuple[tuple[int | None, int | None] | None, tuple | None]:
    """The part of a mask that is an interval of displacements, and what is left."""
    if mask is None:
        return None, None
    parts = mask[1:] if mask[0] == "and" else (mask,)
    bounds = [part[1:] for part in parts if part[0] == "within"]
    rest = tuple(part for part in parts if part[0] != "within")
    if not bounds:
        return None, mask
    lows, highs = [lo for lo, _ in bounds if lo is not None], [hi for _, hi in bounds if hi is not None]
    left = None if not rest else rest[0] if len(rest) == 1 else ("and", *rest)
    return (max(lows, default=None), min(highs, default=None)), left


def own_table(table: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """The part of a table that belongs to some batch rows and heads."""
    if table is None:
        return None
    table = table[batch] if table.shape[0] > 1 else table
    return table[:, heads] if table.shape[1] > 1 else table


def blocks_of_rows(problem: Problem) -> Iterator[slice]:
    """Some rows at a time; on a grid, whole lines of it."""
    q_len, line = problem.q.shape[2], line_of(problem.form)
    step = max(line, ROWS // line * line)
    for first in range(0, q_len, step):
        yield slice(first, min(first + step, q_len))


def row_blocks(problem: Problem, fed: Feed) -> Iterator[tuple[slice, slice, bool]]:
    """All rows at once when the fused kernel can mask them itself; else blocks of rows with the keys they see.

    The last of the three says that the kernel's own causal mask is all there is.
    """
    q_len, k_len = problem.q.shape[2], problem.k.shape[2]
    aligned = problem.form.q_start < 0 and problem.form.k_start < 0 and problem.starts[0] == problem.starts[1]
    causal = not fed.tabled and fed.within == (0, None) and aligned and q_len == k_len
    if fed.within is None or causal:
        yield slice(0, q_len), slice(0, k_len), causal
        return
    for rows in blocks_of_rows(problem):
        cols = columns(problem, rows)
        if cols.stop > cols.start:
            yield rows, cols, False


def blind_rows(problem: Problem, fed: Feed) -> Tensor | None:
    """Rows that see no key because of the table's mask: [batch or 1, 1, q_len]; None when every row sees one."""
    if fed.within is None:
        return None
    delta = displacements(problem)  # of entry n is that of (i, j) with i - j + k_len - 1 = n
    q_len, k_len = problem.q.shape[2], problem.k.shape[2]
    far, near = delta[:, k_len - 1 :], delta[:, :q_len]  # of each row to the first key, and to the last
    lo, hi = fed.within
    blind = torch.zeros_like(far, dtype=torch.bool)
    blind = blind if lo is None else blind | (far < lo)
    blind = blind if hi is None else blind | (near > hi)
    return blind.unsqueeze(1)


def toeplitz(table: Tensor, q_len: int, rows: slice, cols: slice) -> Tensor:
    """The bias of these rows *in reverse order*, as a view of a reversed table [b, h, n]: [b, h, rows, cols]."""
    start = q_len - rows.stop + cols.start
    size = (*table.shape[:2], rows.stop - rows.start, cols.stop - cols.start)
    strides = (*(0 if n == 1 else s for n, s in zip(table.shape[:2], table.stride()[:2], strict=True)), 1, 1)
    return table.as_strided(size, strides, table.storage_offset() + start)


def block_bias(p: Problem, fed: Feed, table: Tensor | None, rows: slice, cols: slice) -> Tensor | None:
    """The whole bias of a block of a ready problem, rows in their own order; None when there is none."""
    total: Tensor | None = None
    if table is not None:
        total = toeplitz(table, p.q.shape[2], rows, cols).flip(-2)
    along = [axis_value(piece, p, rows, cols) for piece in fed.pieces]
    spread = [value for value in along if value is not None]
    if spread:  # rows and columns of a grid are added before they are laid out
        value = over_grid(sum(spread[1:], start=spread[0]), p)
        total = value if total is None else total + value
    for piece, done in zip(fed.pieces, along, strict=True):
        if done is None:
            value = gated(piece, p, rows, cols)
            total = value if total is None else total + value
    if fed.mask is not None:
        seen = see(p, fed.mask, rows, cols)
        shape = torch.broadcast_shapes(seen.shape, total.shape if total is not None else seen.shape)
        total = p.q.new_zeros(shape) if total is None else total.expand(shape)
        total = total.masked_fill(~seen, -torch.inf)
    if total is None:
        return None
    return total.expand(*p.q.shape[:2], rows.stop - rows.start, cols.stop - cols.start)


def pad_to(x: Tensor, width: int) -> Tensor:
    """x as the fused kernel wants it: of this width, its last axis contiguous (it does not look at that stride)."""
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention and its log-sum-exp. It wants values as wide as keys: the narrower are padded."""
    width, v_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (pad_to(x, width) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out[..., :v_dim], lse
