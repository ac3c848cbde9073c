"""The forward pass by our own kernel (attend.c): scores, bias, softmax and product in one pass over the keys.

The bias is read from its sources where the scores are, so that a relative term costs little more than none. Keys and
values are put into panels first; heads that share a key share its panel. Terms of the queries are multiplied inside the
kernel: those of few entries (SAM, Shaw, DeBERTa) for some rows at a time, one with an entry for every displacement
(Transformer-XL) for a tile at a time.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ...normal import Problem
from . import native
from .feeding import Feed
from .panels import PANEL, factors, packed, row_of_entries, scratch
from .sources import Layer, Source, blocks_of_heads, dropped, own_of

#: queries and keys in a tile: as in attend.c
ROWS, KEYS = 64, 512
#: entries of a term that a thread has room for, for all rows of a tile
SHORT = 1024
#: queries below which putting the keys into panels does not pay
FEW = 48
#: numbers of <u_i, R> at a time: few enough to stay in the cache until they are read
ROOM = 1 << 20
FAR = 1 << 60


def attend(problem: Problem, v: Tensor, fed: Feed, sources: list[Source], out: Tensor, lse: Tensor) -> None:
    """A @ v and lse, of a problem whose bias is all sources."""
    k_len = problem.k.shape[2]
    made = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    v_wide = -(-v.shape[-1] // PANEL) * PANEL
    of_keys = sum(row_of_entries(source.parts[1].shape[2]) for source in sources if source.by == "key")
    for block in blocks_of_heads(problem, k_len * (problem.q.shape[-1] + v.shape[-1] + of_keys)):
        own = own_of(problem, block)
        layer = Layer(problem, fed, sources, [], block)
        # one term with an entry for every displacement can be multiplied in the kernel, tile by tile
        long = next((s for s in layer.sources if _is_long(s)), None)
        layer.sources = [s for s in layer.sources if s is not long]
        short = {n: s for n, s in enumerate(layer.sources) if s.by == "query" and s.parts[1].shape[2] <= SHORT}
        wide = KEYS + 16 + v_wide + problem.q.shape[-1] + (0 if long is None else ROWS + KEYS + PANEL)
        wide += sum(row_of_entries(s.parts[1].shape[2]) for s in short.values())
        room = scratch.take("tiles", (torch.get_num_threads(), ROWS * wide))
        q = own(problem.q)
        k = packed("keys", own(problem.k, shared=True))
        values = packed("values", own(v, shared=True), across=True)
        at = made[block.batch, block.heads], lse[block.batch, block.heads]
        told = _told(problem, fed, q, k, values, v.shape[-1], at, room)
        told.drop = dropped(problem, block)
        terms = (native.Factors * max(len(layer.sources), 1))()
        for n, source in short.items():
            terms[n] = _factors(source, ("short", n))
        told.made = ctypes.addressof(terms)
        entries = sum(s.parts[1].shape[2] for n, s in enumerate(layer.sources) if s.by == "query" and n not in short)
        step = max(ROWS, ROOM // (entries * math.prod(layer.planes)) // ROWS * ROWS) if entries else q.shape[2]
        for first in range(0, q.shape[2], step):
            rows = slice(first, min(first + step, q.shape[2]))
            there, alive = layer.told(rows, slice(0, k_len), short)
            for n, source in short.items():  # their factors move on with the rows
                terms[n].u = native.pointer(source.parts[0], first * terms[n].row)
            if long is not None:
                told.term = _factors(long, "long", long.places.rows)
                told.term.u = native.pointer(long.parts[0], first * told.term.row)
            told.q = native.pointer(q, first * q.stride(2))
            told.out = native.pointer(at[0], first * at[0].stride(2))
            told.lse = native.pointer(at[1], first)
            told.q_len, told.first_row = rows.stop - first, first
            planes = native.Block(*layer.planes, rows.stop - first, k_len, first, 0, 0)
            native.call("regard_attend", native.array(there), len(there), ctypes.byref(planes), ctypes.byref(told))
            del alive
    if made is not out:
        out.copy_(made)
    scratch.clear()


def _step(x: Tensor, axis: int) -> int:
    return 0 if x.shape[axis] == 1 else x.stride(axis)


def _factors(source: Source, name: object, rows: Tensor | None = None) -> native.Factors:
    u, features = source.parts
    return factors(u, packed(name, features), features.shape[2], rows)


def _is_long(source: Source) -> bool:
    straight = source.map is None and not source.places.sliding and len(source.places.runs) == 1
    return source.by == "query" and straight and source.parts[1].shape[2] > KEYS and bool(source.places.runs[0, 2] == 1)


def _told(
    problem: Problem, fed: Feed, q: Tensor, k: Tensor, v: Tensor, v_dim: int, at: tuple[Tensor, Tensor], room: Tensor
) -> native.Attend:
    out, lse = at
    heads = q.shape[1]
    low, high = -FAR, FAR
    if fed.within is not None and problem.form.q_start < 0 and problem.form.k_start < 0:
        shift = problem.starts[0] - problem.starts[1]
        low = -FAR if fed.within[0] is None else fed.within[0] - shift
        high = FAR if fed.within[1] is None else fed.within[1] - shift
    return native.Attend(
        k=native.pointer(k), v=native.pointer(v), q_batch=_step(q, 0), q_head=_step(q, 1), q_row=q.stride(2),
        k_batch=_step(k, 0), k_head=_step(k, 1), k_group=heads // k.shape[1],
        v_batch=_step(v, 0), v_head=_step(v, 1), v_group=heads // v.shape[1],
        dim=q.shape[-1], v_dim=v_dim, k_len=problem.k.shape[2], low=low, high=high,
        out_batch=out.stride(0), out_head=out.stride(1), out_row=out.stride(2),
        lse_batch=lse.stride(0), lse_head=lse.stride(1),
        room=native.pointer(room), room_size=room.shape[1], scale=problem.scale,
    )  # fmt: skip
