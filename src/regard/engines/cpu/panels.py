"""Room for blocks, and what is put into it: keys, values and features in panels, as attend.c reads them; products."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from . import native

#: columns of a panel, and numbers that may be read beyond a row of entries: as in attend.c and bins.c
PANEL, BEYOND = 32, 16


class Scratch(threading.local):
    """Room for blocks, used again and again: fresh memory costs more than what is written to it. One a thread."""

    #: numbers of a room that is kept for the next call
    most = 1 << 20

    def __init__(self) -> None:
        self.rooms: dict[object, Tensor] = {}

    def clear(self) -> None:
        """Give back the rooms that are too large to be kept."""
        self.rooms = {name: room for name, room in self.rooms.items() if room.numel() <= self.most}

    def take(self, name: object, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised room of this name; what it held before is gone."""
        size = math.prod(shape)
        room = self.rooms.get(name)
        if room is None or room.numel() < size:
            self.rooms[name] = room = torch.empty(size, dtype=dtype)
        return room[:size].view(shape)


scratch = Scratch()


def packed(name: object, x: Tensor, across: bool = False) -> Tensor:
    """x [b, h, rows, dim] in panels, [b, h, panels * PANEL * (dim, or rows if across)], in the room of this name."""
    b, h, rows, dim = x.shape
    inner, outer = (rows, dim) if across else (dim, rows)
    into = scratch.take(name, (b, h, -(-outer // PANEL) * PANEL * inner))
    native.call(
        "regard_pack", native.pointer(x), b, h, x.stride(0), x.stride(1), rows, x.stride(2), dim, across,
        native.pointer(into),
    )  # fmt: skip
    return into


def factors(u: Tensor, features: Tensor, entries: int, rows: Tensor | None = None) -> native.Factors:
    """<u_i, R[t]> as attend.c is told of it, R packed."""
    steps = [0 if x.shape[axis] == 1 else x.stride(axis) for x in (u, features) for axis in (0, 1)]
    return native.Factors(
        native.pointer(u), *steps[:2], u.stride(2), native.pointer(features), *steps[2:], u.shape[-1], entries,
        native.pointer(rows),
    )  # fmt: skip


def row_of_entries(entries: int) -> int:
    """Numbers from one row of <u_i, R> to the next, as attend.c lays them out."""
    return -(-entries // PANEL) * PANEL + BEYOND


def multiplied(name: object, w: Tensor, features: Tensor, planes: tuple[int, int]) -> Tensor:
    """<w_j, R> of all keys, [*planes, k_len, entries], with room between the rows, in the room of this name."""
    entries = features.shape[2]
    out = scratch.take(name, (*planes, w.shape[2], row_of_entries(entries)))
    of = factors(w, packed("entries", features), entries)
    native.call("regard_multiply", ctypes.byref(of), *planes, w.shape[2], native.pointer(out))
    return out[..., :entries]
