"""Few queries against many keys, as in decoding, by our own kernel (decode.c): keys and values are read where they lie.

Such a step takes as long as memory needs to give the keys and values, so little else may be done: tables are read as
they are (backwards), slopes and intervals of displacements are arithmetic, and nothing as long as the keys is made
here. Other terms come as sources, as in the kernel for many queries. What is not served is None: the engine goes on
to its other ways.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from ...normal import Problem, each_head, product_buffer
from ..tiled.strips import Block
from . import native
from .feeding import Feed, is_tabled, split_mask
from .panels import scratch
from .sources import Layer, sources_of

#: queries that one head of keys may have, and keys of a part: as in decode.c
ROWS, PART = 16, 2048
#: numbers of keys and values below which waking another thread takes longer than the work
SMALL = 1 << 17
FAR = 1 << 60


def is_few(problem: Problem, v: Tensor) -> bool:
    """So few queries of each key that reading the keys is all that takes time, in the kernel's own precision."""
    shared = max(problem.k.shape[1], v.shape[1])
    few = problem.q.shape[1] // shared * problem.q.shape[2] <= ROWS
    return few and problem.q.dtype == v.dtype == torch.float32


def decode(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """A @ v and lse, before the sink, and whether every lse is finite; None where a term or a mask is not served.

    For problems that `is_few`.
    """
    form, (batch, heads, q_len, k_len) = problem.form, problem.sizes
    if form.q_start >= 0 or form.k_start >= 0:
        return None
    on_line = form.q_geometry[0] == "line"
    within, mask = split_mask(form.mask) if on_line else (None, form.mask)
    tabled = [piece for piece in form.pieces if is_tabled(piece)]
    rest = tuple(piece for piece in form.pieces if not is_tabled(piece))
    told: list[native.Source] = []
    alive: list[object] = []  # what the kernel is only told the address of
    if rest or mask is not None:
        laid, sources, left = sources_of(problem, Feed(None, (), rest, mask, None))
        if left or laid.mask is not None or any(source.by == "key" for source in sources):
            return None
        layer = Layer(problem, laid, sources, [], Block(problem, slice(0, batch), slice(0, heads)))
        told, products = layer.told(slice(0, q_len), slice(0, k_len))
        alive += [layer, products]
    slope: Tensor | None = None
    for piece in tabled:
        x = _by_head(problem.operands[piece.slots[0]], heads)
        if piece.kind == "slope":
            slope = x if slope is None else slope + x
            continue
        rows, backwards = _counting(q_len), (ctypes.c_int64 * 3)(0, k_len - 1, -1)  # entry i + k_len - 1 - j
        alive += [x, rows, backwards]
        told.append(native.Source(
            x.data_ptr(), _step(x, 0), _step(x, 1), 0, 0, 0, rows.data_ptr(), ctypes.addressof(backwards), 1, 0, None,
            0,
        ))  # fmt: skip
    shift = problem.starts[0] - problem.starts[1]
    low, high = (None, None) if within is None else within
    low, high = -FAR if low is None else low - shift, FAR if high is None else high - shift
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (problem.q, problem.k, v))
    shared, v_dim = max(k.shape[1], v.shape[1]), v.shape[-1]
    parts = max(1, -(-(min(k_len, q_len - low) - max(0, -high)) // PART))
    members = heads // shared
    out, lse = product_buffer(problem, v), q.new_empty(batch, heads, q_len)
    room = scratch.take("decode", (batch * shared * parts, members * q_len * (v_dim + 2)))
    asked = native.Decode(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *q.stride()[:3], *k.stride()[:3], heads // k.shape[1],
        *v.stride()[:3], heads // v.shape[1], batch, shared, members, q_len, k_len, q.shape[-1], v_dim, low, high,
        *((None, 0, 0) if slope is None else (slope.data_ptr(), _step(slope, 0), _step(slope, 1))), shift,
        out.data_ptr(), lse.data_ptr(), *out.stride()[:3], *lse.stride()[:2], room.data_ptr(), problem.scale,
    )  # fmt: skip
    threads = 1 if (k.numel() + v.numel()) < SMALL else None
    odd = native.call("regard_decode", native.array(told), len(told), ctypes.byref(asked), parts, threads=threads)
    del alive
    scratch.clear()
    return out, lse, not odd


def _by_head(x: Tensor, heads: int) -> Tensor:
    """An operand as the kernel reads it: float32, along its last axis, of one or of all heads."""
    x = each_head(x, heads).to(torch.float32)
    return x if x.stride(-1) == 1 or math.prod(x.shape[2:]) == 1 else x.contiguous()


def _step(x: Tensor, axis: int) -> int:
    return 0 if x.shape[axis] == 1 else x.stride(axis)


@functools.lru_cache(maxsize=ROWS + 1)
def _counting(q_len: int) -> Tensor:
    """0 .. q_len - 1: the same for every step."""
    return torch.arange(q_len)
