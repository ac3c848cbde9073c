"""Tables laid out for tiles: from values by bin or by displacement to a `Toeplitz`, in one launch.

A row of a tile reads ascending entries, so the table lies reversed, in shifted copies, in the dtype of q: its rounding
is that of a logit's parts. (Summaries want float32: what a table is rounded by does not average out along diagonals.)
Turned tiles read it the other way round; a backward pass wants both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Form, Piece, Problem, each_head
from ...tables import constant
from .choice import Tiling, interpreted
from .given import Operand, Toeplitz
from .launch import Start

LOG2E = 1.4426950408889634
#: room after a table for tiles that reach past the end
ROOM = 272


@triton.jit
def lay_kernel(
    table_ptr, bins_ptr, laid_ptr, blocks, copies, heads, entries, table_batch, table_head, bins_batch, rows, stride,
    size, line, pitch, factor, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy s of a table, from entry s on: lines of `line` entries, `pitch` apart, the last one first if REVERSED.

    Where there are bins, an entry reads that of its bin, and 0 where there is no such bin. After `rows` copies of all
    tables come as many of them turned the other way.
    """
    block, copied = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    copy, bh = copied % copies, copied // copies % rows
    b, h = bh // heads, bh % heads
    at = block * BLOCK + tl.arange(0, BLOCK)
    entry = at + copy
    y, x = entry // pitch, entry % pitch
    entry = y * line + x
    inside = (x < line) & (entry < size)
    if REVERSED:
        if copied < rows * copies:
            entry = size - 1 - entry
    if bins_ptr is not None:
        entry = tl.load(bins_ptr + b.to(tl.int64) * bins_batch + entry, mask=inside, other=0)
        inside &= entry < entries
    base = table_ptr + b.to(tl.int64) * table_batch + h.to(tl.int64) * table_head
    value = tl.load(base + entry, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(laid_ptr + copied.to(tl.int64) * stride + at, value.to(laid_ptr.dtype.element_ty), mask=at < stride)


def full_table(problem: Problem, piece: Piece) -> Tensor:
    """A table by displacement, in float32, with one set for all heads or one for each."""
    x = each_head(problem.operands[piece.slots[0]], problem.q.shape[1]).float()
    if piece.lookup < 0:
        return x
    index = problem.operands[piece.lookup]
    if piece.space != ("line",):
        x = torch.nn.functional.pad(x, (0, 1))
    shape = max(len(x), len(index)), x.shape[1], index.shape[-1]
    return x.expand(shape[0], -1, -1).gather(-1, index.expand(shape))


class Laying(NamedTuple):
    """What of a layout depends on shapes alone."""

    copies: int
    pitch: int
    line: int
    size: int
    stride: int
    pitch_of_line: int


@functools.lru_cache(maxsize=256)
def _laying(space: tuple, q_geometry: tuple, k_geometry: tuple, entries: int, itemsize: int) -> Laying:
    copies = 16 // itemsize
    if space[0] == "line":
        pitch, line, size, pitch_of_line = 0, entries, entries, entries
    else:
        (q_high, q_wide), (k_high, k_wide) = q_geometry[1], k_geometry[1]
        line = q_wide + k_wide - 1
        pitch = pitch_of_line = -(-line // copies) * copies
        size = (q_high + k_high - 1) * line
    stride = -(-(size // line * pitch_of_line + ROOM + pitch) // 16) * 16
    return Laying(copies, pitch, line, size, stride, pitch_of_line)


class Layout(NamedTuple):
    """All of a layout but its tensors: the launch, the room it fills, and what kernels are told of each side."""

    number: int  # no two have the same
    start: Start
    room: tuple[int, ...]
    sides: tuple[tuple[Any, ...], ...]  # of `Toeplitz`, after the pointer and before the gate
    reach: int | None


_numbers = itertools.count()
#: layouts that are remembered for one form and its shapes
LAYOUTS = 16


def toeplitz(
    problem: Problem, pieces: Sequence[Piece], both: bool, gate: Operand | tuple[()], dtype: torch.dtype,
    known: dict[tuple, Layout],
) -> tuple[int, tuple[Toeplitz, ...]]:  # fmt: skip
    """The sum of tables for tiles; if `both`, for turned ones too. And the number of their layout, which is `known`."""
    piece, bins = pieces[0], None
    if len(pieces) == 1:
        table = each_head(problem.operands[piece.slots[0]], problem.q.shape[1])
        if piece.lookup >= 0:
            bins = problem.operands[piece.lookup]
    else:
        tables = [full_table(problem, each) for each in pieces]
        table = sum(tables[1:], tables[0])
    strides = table.stride()
    if strides[-1] != 1:
        table = table.contiguous()
        strides = table.stride()
    key = strides, table.dtype, table.device, None if bins is None else bins.stride(), both, dtype
    plan = known.get(key)
    if plan is None:
        plan = _layout(problem.form, pieces, table, bins, both, dtype)
        if not table.is_cuda or not torch.cuda.is_current_stream_capturing():  # what a graph makes belongs to it
            if len(known) >= LAYOUTS:
                known.clear()
            known[key] = plan
    laid = torch.empty(plan.room, dtype=dtype, device=table.device)
    plan.start((table, bins, laid))
    gated = _constant(bool(gate))
    if not both:
        return plan.number, (Toeplitz._make((laid, *plan.sides[0], gate, gated, plan.reach)),)
    sides = [Toeplitz._make((laid[n], *side, gate, gated, plan.reach)) for n, side in enumerate(plan.sides)]
    return plan.number, tuple(sides)


def _layout(
    form: Form, pieces: Sequence[Piece], table: Tensor, bins: Tensor | None, both: bool, dtype: torch.dtype
) -> Layout:  # fmt: skip
    (batch, heads, count), device, space = table.shape, table.device, pieces[0].space
    shared = 1 if bins is None else len(bins)
    batch = max(batch, shared)
    plan = _laying(
        space, form.q_geometry, form.k_geometry, count if bins is None else bins.shape[-1], dtype.itemsize
    )  # fmt: skip
    sides, rows = 2 if both else 1, batch * heads
    block = 16 if interpreted() else 1024
    blocks = -(-plan.stride // block)
    start = Start(
        device, lay_kernel, blocks * sides * rows * plan.copies, Tiling(block, 1, 4, 1),
        blocks, plan.copies, heads, count,
        0 if len(table) == 1 else table.stride(0), 0 if heads == 1 else table.stride(1),
        0 if bins is None or shared == 1 else bins.stride(0),
        rows, plan.stride, plan.size, plan.line, plan.pitch_of_line, LOG2E, REVERSED=True, BLOCK=block,
    )  # fmt: skip
    size = plan.copies * plan.stride
    steps = 0 if batch == 1 else heads * size, 0 if heads == 1 else size
    told = []
    for by_key in range(sides):
        near, width = None, None
        if space[0] != "line":
            (q_high, q_wide), (k_high, k_wide) = form.q_geometry[1], form.k_geometry[1]
            near = _near(*((k_high, k_wide) if by_key else (q_high, q_wide)), plan.pitch, device)
            width = _constant(q_wide if by_key else k_wide)
        told.append((*steps, plan.stride, _constant(plan.copies), _constant(bool(by_key)), near, width, plan.pitch))
    reaches = [piece.reach for piece in pieces]
    reach = None if space[0] != "line" or None in reaches else max(r for r in reaches if r is not None)
    room = (sides, batch, heads, plan.copies, plan.stride)
    return Layout(next(_numbers), start, room, tuple(told), reach)


@functools.lru_cache(maxsize=256, typed=True)
def _constant(x: int) -> tl.constexpr:
    return tl.constexpr(x)


@constant(32)
def _near(high: int, wide: int, pitch: int, device: torch.device) -> Tensor:
    """a_i of a grid: the same for every call."""
    at = torch.arange(high * wide, device=device, dtype=torch.int32)
    return (high - 1 - at // wide) * pitch + wide - 1 - at % wide
