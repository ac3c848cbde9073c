"""Terms of a query on the axes of a grid (SAM): what each gives to each place of a key on one axis, and the way back.

    x[p, o, k] = <u[p, o], R[p - k]>        p: the query's place on the axis, o: on the other one, k: the key's place

One small matrix product for each head and place p; R is read as it is kept, by bins. As batched products of PyTorch
they would copy R for every head. Both axes are done by one launch where neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Piece, Problem, each_head
from .choice import Tiling, interpreted, power
from .launch import Start, again, dense_rows, precision, run


class Side(NamedTuple):
    """One axis: u [batch, heads, tokens, f] and R [batch or 1, heads or 1, count, f], with the bin of an entry."""

    u: Any
    rows: Any
    bins: Any  # int64 [batch or 1, entries], entry = p - k + keys - 1; None: R has a row for each
    places: Any
    others: Any
    keys: Any
    count: Any
    u_batch: Any
    u_head: Any
    u_step: Any
    rows_batch: Any
    rows_head: Any
    rows_step: Any
    bins_batch: Any


class KnownSide(Side):
    """The same, with what the compiler sees of it (`launch.look_at`) found already: its very numbers are in it."""

    _fields = Side._fields  # Triton looks for them in the class itself
    seen: Any = None


@triton.jit
def load_u(side, b, h, p, o, BLOCK_F: tl.constexpr, DIM: tl.constexpr, AXIS: tl.constexpr):
    """Contents of the queries at place p of an axis and places o of the other."""
    i = p * side.others + o if AXIS == 0 else o * side.places + p
    f = tl.arange(0, BLOCK_F)
    inside = (o < side.others)[:, None] & (f < DIM)[None, :]
    base = side.u + b.to(tl.int64) * side.u_batch + h.to(tl.int64) * side.u_head
    return tl.load(base + i.to(tl.int64)[:, None] * side.u_step + f[None, :], mask=inside, other=0.0)


@triton.jit
def load_grid(x_ptr, side, p, o, k, AXIS: tl.constexpr):
    """x [o, k] of one place: it lies as [p, k, o] for the first axis, and as [p, o, k] for the second."""
    at = o[:, None] + k[None, :] * side.others if AXIS == 0 else o[:, None] * side.keys + k[None, :]
    inside = (o < side.others)[:, None] & (k < side.keys)[None, :]
    return x_ptr + p * side.others * side.keys + at, inside


@triton.jit
def load_rows(side, b, h, p, k, factor, BLOCK_F: tl.constexpr, DIM: tl.constexpr):
    """R of the displacements p - k, times a factor; 0 where there is no such bin."""
    f = tl.arange(0, BLOCK_F)
    entry, inside = p - k + side.keys - 1, k < side.keys
    if side.bins is not None:
        entry = tl.load(side.bins + b.to(tl.int64) * side.bins_batch + entry, mask=inside, other=0)
    inside &= entry < side.count
    base = side.rows + b.to(tl.int64) * side.rows_batch + h.to(tl.int64) * side.rows_head
    at = base + entry[:, None] * side.rows_step + f[None, :]
    return tl.load(at, mask=inside[:, None] & (f < DIM)[None, :], other=0.0).to(tl.float32) * factor


@triton.jit
def meet(
    x_ptr, side, program, heads, factor,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x of one head and one place."""
    p, bh = program % side.places, program // side.places
    b, h = bh // heads, bh % heads
    x_ptr += bh.to(tl.int64) * side.places * side.others * side.keys
    for k0 in range(0, side.keys, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        rows = load_rows(side, b, h, p, k, factor, BLOCK_F, DIM)
        for o0 in range(0, side.others, BLOCK):
            o = o0 + tl.arange(0, BLOCK)
            u = load_u(side, b, h, p, o, BLOCK_F, DIM, AXIS).to(x_ptr.dtype.element_ty)
            where, inside = load_grid(x_ptr, side, p, o, k, AXIS)
            if AXIS == 0:  # turned, as it lies: whole lines are stored
                x = tl.dot(rows.to(u.dtype), tl.trans(u), input_precision=PRECISION)
                tl.store(tl.trans(where), x.to(u.dtype), mask=tl.trans(inside))
            else:
                x = tl.dot(u, tl.trans(rows).to(u.dtype), input_precision=PRECISION)
                tl.store(where, x.to(u.dtype), mask=inside)


@triton.jit
def meet_kernel(
    down_ptr, across_ptr, down, across, heads, programs, factor,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both axes: `programs` for the first, then those for the second."""
    program = tl.program_id(0)
    if program < programs:
        meet(down_ptr, down, program, heads, factor, DIM, BLOCK_F, BLOCK, 0, PRECISION)
    else:
        meet(across_ptr, across, program - programs, heads, factor, DIM, BLOCK_F, BLOCK, 1, PRECISION)


@triton.jit
def content_kernel(
    d_x_ptr, d_u_ptr, side, heads,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of u of one head and one place, [batch, heads, tokens, f], added to what is there if ADD."""
    p, bh = tl.program_id(0) % side.places, tl.program_id(0) // side.places
    b, h = bh // heads, bh % heads
    d_x_ptr += bh.to(tl.int64) * side.places * side.others * side.keys
    d_u_ptr += bh.to(tl.int64) * side.places * side.others * DIM
    f = tl.arange(0, BLOCK_F)
    for o0 in range(0, side.others, BLOCK):
        o = o0 + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK, BLOCK_F], tl.float32)
        for k0 in range(0, side.keys, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            where, inside = load_grid(d_x_ptr, side, p, o, k, AXIS)
            d_x = tl.load(where, mask=inside, other=0.0)
            rows = load_rows(side, b, h, p, k, 1.0, BLOCK_F, DIM)
            acc = tl.dot(d_x, rows.to(d_x.dtype), acc, input_precision=PRECISION)
        i = p * side.others + o if AXIS == 0 else o * side.places + p
        inside = (o < side.others)[:, None] & (f < DIM)[None, :]
        at = d_u_ptr + i[:, None] * DIM + f[None, :]
        if ADD:
            acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, acc.to(d_u_ptr.dtype.element_ty), mask=inside)


@triton.jit
def feature(
    d_x_ptr, d_rows_ptr, side, program, heads, first_step, slot_step, count,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    p, slot = program % side.places, program // side.places
    f = tl.arange(0, BLOCK_F)
    for k0 in range(0, side.keys, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK, BLOCK_F], tl.float32)
        for n in range(0, count):
            bh = slot * first_step + n * slot_step
            b, h = bh // heads, bh % heads
            x_at = d_x_ptr + bh.to(tl.int64) * side.places * side.others * side.keys
            for o0 in range(0, side.others, BLOCK):
                o = o0 + tl.arange(0, BLOCK)
                where, inside = load_grid(x_at, side, p, o, k, AXIS)
                d_x = tl.load(where, mask=inside, other=0.0)
                u = load_u(side, b, h, p, o, BLOCK_F, DIM, AXIS)
                acc = tl.dot(tl.trans(d_x), u.to(d_x.dtype), acc, input_precision=PRECISION)
        at = ((slot * side.places + p).to(tl.int64) * side.keys + k)[:, None] * DIM + f[None, :]
        tl.store(d_rows_ptr + at, acc, mask=(k < side.keys)[:, None] & (f < DIM)[None, :])


@triton.jit
def feature_kernel(
    d_down_ptr, d_across_ptr, down_ptr, across_ptr, down, across, heads, programs, first_step, slot_step, count,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of R of one place, summed over `count` heads: first, first + slot_step, ..; [slots, p, k, f]."""
    program = tl.program_id(0)
    if program < programs:
        feature(
            d_down_ptr, down_ptr, down, program, heads, first_step, slot_step, count, DIM, BLOCK_F, BLOCK, 0, PRECISION
        )  # fmt: skip
    else:
        feature(
            d_across_ptr, across_ptr, across, program - programs, heads, first_step, slot_step, count,
            DIM, BLOCK_F, BLOCK, 1, PRECISION,
        )  # fmt: skip


@triton.jit
def by_entry(
    from_ptr, to_ptr, side, program, slots, to_step,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, BY_BIN: tl.constexpr,
):  # fmt: skip
    """Sums of [slots, p, k, f] over slots and over the pairs of one displacement, to its entry or to its bin."""
    entries = side.places + side.keys - 1
    entry, head = program % entries, program // entries
    f, total = tl.arange(0, BLOCK_F), tl.zeros([BLOCK, BLOCK_F], tl.float32)
    first, last = tl.maximum(entry - side.keys + 1, 0), tl.minimum(entry + 1, side.places)
    for slot in range(0, slots):
        base = from_ptr + (head * slots + slot).to(tl.int64) * side.places * side.keys * DIM
        for p0 in range(first, last, BLOCK):
            p = p0 + tl.arange(0, BLOCK)
            at = (p * side.keys + p - entry + side.keys - 1)[:, None] * DIM + f[None, :]
            total += tl.load(base + at, mask=(p < last)[:, None] & (f < DIM)[None, :], other=0.0)
    if BY_BIN:
        entry = tl.load(side.bins + entry).to(tl.int32)
    row = f * 0 + entry
    at = to_ptr + (head * to_step + row).to(tl.int64) * DIM + f
    tl.store(at, tl.sum(total, 0), mask=(f < DIM) & (row < to_step))


@triton.jit
def entry_kernel(
    d_down_ptr, d_across_ptr, down_ptr, across_ptr, down, across, programs, slots, down_step, across_step,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
    DOWN_BY_BIN: tl.constexpr, ACROSS_BY_BIN: tl.constexpr,
):  # fmt: skip
    """Gradients of R for each place of a query and of a key, as gradients of its rows: both axes."""
    program = tl.program_id(0)
    if program < programs:
        by_entry(d_down_ptr, down_ptr, down, program, slots, down_step, DIM, BLOCK_F, BLOCK, DOWN_BY_BIN)
    else:
        by_entry(
            d_across_ptr, across_ptr, across, program - programs, slots, across_step, DIM, BLOCK_F, BLOCK, ACROSS_BY_BIN
        )  # fmt: skip


def side_of(problem: Problem, piece: Piece) -> KnownSide:
    """One axis as kernels read it."""
    (axis,), shape = piece.space[1], problem.form.q_geometry[1]
    heads, bins = problem.q.shape[1], None
    u, rows = (dense_rows(each_head(problem.operands[slot], heads)) for slot in piece.slots)
    if piece.lookup >= 0:
        bins = problem.operands[piece.lookup]
    numbers = (
        shape[axis], shape[1 - axis], problem.form.k_geometry[1][axis], rows.shape[2],
        step(u, 0), step(u, 1), u.stride(2), step(rows, 0), step(rows, 1), rows.stride(2),
        0 if bins is None else step(bins, 0),
    )  # fmt: skip
    side = KnownSide(u, rows, bins, *numbers)
    there = None if bins is None else bins.data_ptr() & 15 == 0
    side.seen = numbers, u.dtype, u.data_ptr() & 15 == 0, rows.dtype, rows.data_ptr() & 15 == 0, there
    return side


def step(x: Tensor, axis: int) -> int:
    """The stride of an axis; 0 where one is for all."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


def _flags(problem: Problem, dim: int) -> tuple[Tiling, dict[str, Any]]:
    dtype = problem.q.dtype
    block = 16 if interpreted() else 64 if dtype != torch.float32 and dim <= 128 else 32
    flags = {"DIM": dim, "BLOCK_F": power(dim), "BLOCK": block, "PRECISION": precision(dtype)}
    return Tiling(block, block, 4, 2), flags


def meeting(problem: Problem, down: KnownSide, across: KnownSide, factor: float) -> tuple[Tensor, Tensor]:
    """x of both axes: [batch, heads, p, k, o] of the first, [batch, heads, p, o, k] of the second."""
    batch, heads = problem.sizes[:2]
    tiling, flags = _flags(problem, down.rows.shape[-1])
    xs = (
        problem.q.new_empty(batch, heads, down.places, down.keys, down.others),
        problem.q.new_empty(batch, heads, across.places, across.others, across.keys),
    )
    first, second = (batch * heads * side.places for side in (down, across))
    again(
        (meet_kernel, down.seen, across.seen, batch, heads, factor, problem.q.dtype, problem.q.device, *flags.values()),
        xs, (down, across),
        lambda: Start(problem.q.device, meet_kernel, first + second, tiling, heads, first, factor, **flags),
    )  # fmt: skip
    return xs


def to_content(problem: Problem, side: Side, axis: int, d_x: Tensor, before: Tensor | None) -> Tensor:
    """The gradient of u, from that of x, added to `before` in place."""
    batch, heads, tokens, _ = problem.sizes
    tiling, flags = _flags(problem, side.rows.shape[-1])
    d_u = d_x.new_empty(batch, heads, tokens, side.rows.shape[-1]) if before is None else before
    programs = batch * heads * side.places
    run(content_kernel, programs, tiling, d_x, d_u, side, heads, **flags, AXIS=axis, ADD=before is not None)
    return d_u


def to_rows(
    problem: Problem, sides: Sequence[Side], d_xs: tuple[Tensor, Tensor], once: tuple[bool, bool]
) -> list[Tensor]:
    """The gradients of R of both axes, summed over batch rows, and heads unless each has its own.

    `once`: no two displacements share a bin, so sums go to bins: [1, heads or 1, count, f]; else to entries.
    """
    batch, heads = problem.sizes[:2]
    own = sides[0].rows.shape[1] > 1
    slots = heads if own else _divisor(batch * heads, 16)
    count = batch * heads // slots
    first, step = (1, heads) if own else (count, 1)
    dim = sides[0].rows.shape[-1]
    tiling, flags = _flags(problem, dim)
    room = lambda *shape: torch.empty(*shape, dim, dtype=torch.float32, device=problem.q.device)  # noqa: E731
    made = [room(slots, side.places, side.keys) for side in sides]
    programs = slots * sides[0].places
    run(
        feature_kernel, programs + slots * sides[1].places, tiling,
        *d_xs, *made, *sides, heads, programs, first, step, count, **flags,
    )  # fmt: skip
    found, kept, each = [], slots if own else 1, [side.places + side.keys - 1 for side in sides]
    for side, entries, alone in zip(sides, each, once, strict=True):
        size = side.count if alone or side.bins is None else entries
        found.append(room(1, kept, size) if size == entries else room(1, kept, size).zero_())
    programs, block = kept * each[0], 16 if interpreted() else 32
    run(
        entry_kernel, programs + kept * each[1], Tiling(block, 1, 4, 1),
        *made, *found, *sides, programs, slots // kept, *(x.shape[2] for x in found),
        DIM=dim, BLOCK_F=power(dim), BLOCK=block,
        DOWN_BY_BIN=once[0] and sides[0].bins is not None, ACROSS_BY_BIN=once[1] and sides[1].bins is not None,
    )  # fmt: skip
    return found


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return max(size for size in range(1, most + 1) if n % size == 0)
