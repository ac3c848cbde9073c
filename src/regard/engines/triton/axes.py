"""Terms of a query on the axes of a grid (SAM): what each gives to each place of a key on one axis, and the way back.

    x[p, o, k] = <u[p, o], R[p, k]>        p: the query's place on the axis, o: on the other one, k: the key's place

One small matrix product for each head and place p. As batched products of PyTorch they would copy R for every head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .choice import Tiling, interpreted, power
from .launch import precision, run


@triton.jit
def load_u(u_ptr, u_step, p, o, places, others, BLOCK_F: tl.constexpr, DIM: tl.constexpr, AXIS: tl.constexpr):
    """Contents of the queries at place p of an axis and places o of the other."""
    i = p * others + o if AXIS == 0 else o * places + p
    f = tl.arange(0, BLOCK_F)
    inside = (o < others)[:, None] & (f < DIM)[None, :]
    return tl.load(u_ptr + i.to(tl.int64)[:, None] * u_step + f[None, :], mask=inside, other=0.0)


@triton.jit
def load_grid(x_ptr, p, o, k, others, keys, AXIS: tl.constexpr):
    """x [o, k] of one place: it lies as [p, k, o] for the first axis, and as [p, o, k] for the second."""
    at = o[:, None] + k[None, :] * others if AXIS == 0 else o[:, None] * keys + k[None, :]
    inside = (o < others)[:, None] & (k < keys)[None, :]
    return x_ptr + p * others * keys + at, inside


@triton.jit
def load_rows(rows_ptr, p, k, keys, BLOCK_F: tl.constexpr, DIM: tl.constexpr):
    f = tl.arange(0, BLOCK_F)
    inside = (k < keys)[:, None] & (f < DIM)[None, :]
    return tl.load(rows_ptr + (p * keys + k)[:, None] * DIM + f[None, :], mask=inside, other=0.0)


@triton.jit
def meet_kernel(
    u_ptr, rows_ptr, x_ptr, heads, places, others, keys, u_batch, u_head, u_step, rows_batch, rows_head,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, AXIS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x of one head and one place."""
    p, bh = tl.program_id(0) % places, tl.program_id(0) // places
    b, h = bh // heads, bh % heads
    u_ptr += b.to(tl.int64) * u_batch + h.to(tl.int64) * u_head
    rows_ptr += b.to(tl.int64) * rows_batch + h.to(tl.int64) * rows_head
    x_ptr += bh.to(tl.int64) * places * others * keys
    for k0 in range(0, keys, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        rows = load_rows(rows_ptr, p, k, keys, BLOCK_F, DIM)
        for o0 in range(0, others, BLOCK_O):
            o = o0 + tl.arange(0, BLOCK_O)
            u = load_u(u_ptr, u_step, p, o, places, others, BLOCK_F, DIM, AXIS)
            where, inside = load_grid(x_ptr, p, o, k, others, keys, AXIS)
            if AXIS == 0:  # turned, as it lies: whole lines are stored
                x = tl.dot(rows.to(u.dtype), tl.trans(u), input_precision=PRECISION)
                tl.store(tl.trans(where), x.to(x_ptr.dtype.element_ty), mask=tl.trans(inside))
            else:
                x = tl.dot(u, tl.trans(rows).to(u.dtype), input_precision=PRECISION)
                tl.store(where, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def content_kernel(
    d_x_ptr, rows_ptr, d_u_ptr, heads, places, others, keys, rows_batch, rows_head,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, AXIS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of u of one head and one place, [batch, heads, tokens, f]."""
    p, bh = tl.program_id(0) % places, tl.program_id(0) // places
    b, h = bh // heads, bh % heads
    rows_ptr += b.to(tl.int64) * rows_batch + h.to(tl.int64) * rows_head
    d_x_ptr += bh.to(tl.int64) * places * others * keys
    d_u_ptr += bh.to(tl.int64) * places * others * DIM
    f = tl.arange(0, BLOCK_F)
    for o0 in range(0, others, BLOCK_O):
        o = o0 + tl.arange(0, BLOCK_O)
        acc = tl.zeros([BLOCK_O, BLOCK_F], tl.float32)
        for k0 in range(0, keys, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            where, inside = load_grid(d_x_ptr, p, o, k, others, keys, AXIS)
            d_x = tl.load(where, mask=inside, other=0.0)
            rows = load_rows(rows_ptr, p, k, keys, BLOCK_F, DIM)
            acc = tl.dot(d_x, rows.to(d_x.dtype), acc, input_precision=PRECISION)
        i = p * others + o if AXIS == 0 else o * places + p
        inside = (o < others)[:, None] & (f < DIM)[None, :]
        tl.store(d_u_ptr + i[:, None] * DIM + f[None, :], acc.to(d_u_ptr.dtype.element_ty), mask=inside)


@triton.jit
def feature_kernel(
    d_x_ptr, u_ptr, d_rows_ptr, heads, places, others, keys, u_batch, u_head, u_step, first_step, slot_step, count,
    DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, AXIS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of R of one place, summed over `count` heads: first, first + slot_step, ..; [slots, p, k, f]."""
    p, slot = tl.program_id(0) % places, tl.program_id(0) // places
    f = tl.arange(0, BLOCK_F)
    for k0 in range(0, keys, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_K, BLOCK_F], tl.float32)
        for n in range(0, count):
            bh = slot * first_step + n * slot_step
            b, h = bh // heads, bh % heads
            u_at = u_ptr + b.to(tl.int64) * u_batch + h.to(tl.int64) * u_head
            x_at = d_x_ptr + bh.to(tl.int64) * places * others * keys
            for o0 in range(0, others, BLOCK_O):
                o = o0 + tl.arange(0, BLOCK_O)
                where, inside = load_grid(x_at, p, o, k, others, keys, AXIS)
                d_x = tl.load(where, mask=inside, other=0.0)
                u = load_u(u_at, u_step, p, o, places, others, BLOCK_F, DIM, AXIS)
                acc = tl.dot(tl.trans(d_x), u.to(d_x.dtype), acc, input_precision=PRECISION)
        at = ((slot * places + p).to(tl.int64) * keys + k)[:, None] * DIM + f[None, :]
        tl.store(d_rows_ptr + at, acc, mask=(k < keys)[:, None] & (f < DIM)[None, :])


class Meeting:
    """One axis: u [batch, heads, tokens, f] with R for each place of a query and of a key [.., places, keys, f]."""

    def __init__(self, u: Tensor, rows: Tensor, axis: int, shape: tuple[int, int]):
        self.u, self.rows, self.axis = u, rows.contiguous(), axis
        self.places, self.others, self.keys = shape[axis], shape[1 - axis], rows.shape[-2]
        steps = self.rows.stride()
        self.shared = tuple(0 if n == 1 else step for n, step in zip(rows.shape[:2], steps[:2], strict=True))
        self.u_steps = (*(0 if n == 1 else step for n, step in zip(u.shape, u.stride()[:2], strict=False)), u.stride(2))

    def _run(self, kernel: object, programs: int, *args: object) -> None:
        dim = self.u.shape[-1]
        block = 16 if interpreted() else 64 if self.u.dtype != torch.float32 and dim <= 128 else 32
        flags = {"DIM": dim, "BLOCK_F": power(dim), "BLOCK_O": block, "BLOCK_K": block, "AXIS": self.axis}
        run(kernel, programs, Tiling(block, block, 4, 2), *args, **flags, PRECISION=precision(self.u.dtype))

    def values(self, batch: int, heads: int) -> Tensor:
        """x: [batch, heads, p, k, o] for the first axis, [batch, heads, p, o, k] for the second."""
        shape = (self.keys, self.others) if self.axis == 0 else (self.others, self.keys)
        x = torch.empty(batch, heads, self.places, *shape, dtype=self.u.dtype, device=self.u.device)
        sizes = heads, self.places, self.others, self.keys
        self._run(meet_kernel, batch * heads * self.places, self.u, self.rows, x, *sizes, *self.u_steps, *self.shared)
        return x

    def to_content(self, d_x: Tensor) -> Tensor:
        """The gradient of u, from that of x."""
        batch, heads = d_x.shape[:2]
        d_u = d_x.new_empty(batch, heads, self.places * self.others, self.u.shape[-1])
        sizes = heads, self.places, self.others, self.keys
        self._run(content_kernel, batch * heads * self.places, d_x, self.rows, d_u, *sizes, *self.shared)
        return d_u

    def to_rows(self, d_x: Tensor, own_heads: bool) -> Tensor:
        """The gradient of R, summed over batch rows, and heads unless each has its own: [1, heads or 1, p, k, f]."""
        batch, heads = d_x.shape[:2]
        slots = heads if own_heads else _divisor(batch * heads, 16)
        count = batch * heads // slots
        first, step = (1, heads) if own_heads else (count, 1)
        made = torch.empty(
            slots, self.places, self.keys, self.u.shape[-1], dtype=torch.float32, device=d_x.device
        )  # fmt: skip
        sizes = heads, self.places, self.others, self.keys
        self._run(feature_kernel, slots * self.places, d_x, self.u, made, *sizes, *self.u_steps, first, step, count)
        return made[None] if own_heads else made.sum(0)[None, None]


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return max(size for size in range(1, most + 1) if n % size == 0)
