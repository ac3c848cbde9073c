"""Where tokens are: the place p of each token, and the displacement δ = p_i - p_j of a pair (maths.md, eq. 3).

A geometry turns an absolute index (a token's place in the whole sequence) into coordinates. Queries and keys may have
different geometries with the same number of axes (cross-attention between two images, say). Tokens without a place,
such as a class token, have no displacement to anything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Geometry:
    """Base of Line, Grid and Points."""

    axes: int = 1
    #: displacements are integers from a known, finite range
    enumerable: bool = True

    def coordinates(self, index: Tensor) -> Tensor:
        """Absolute indices [...] to coordinates [..., axes]."""
        raise TypeError(f"{type(self).__name__} defines no coordinates")

    def placed(self, index: Tensor) -> Tensor | None:
        """Which of these tokens have a place; None when all have one."""
        return None

    def size(self) -> int | None:
        """How many tokens have a place here; None for as many as one likes."""
        return None

    def check(self, name: str, length: int, start: int | None) -> None:
        """Raise unless tokens start .. start + length - 1 exist here; with no start given, they must be all of them."""
        size = self.size()
        if size is None or (length == size if start is None else start + length <= size):
            return
        found = f"{name}_len = {length}" + (
            f" (for a part of it give {name}_start)" if start is None else f", {name}_start = {start}"
        )
        raise ValueError(f"geometry: {self} has {size} tokens, found {found}")

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


class Line(Geometry):
    """Tokens in a row: p = index."""

    def coordinates(self, index: Tensor) -> Tensor:
        return index.unsqueeze(-1)

    def __repr__(self) -> str:
        return "Line()"


class Grid(Geometry):
    """A grid of one to three axes, row-major: index 4 of a 2 x 3 grid is (1, 1). `unplaced` tokens come before it."""

    def __init__(self, *shape: int, unplaced: int = 0):
        if not 1 <= len(shape) <= 3 or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ValueError(f"shape: expected one to three positive integers, found {shape}")
        if not isinstance(unplaced, int) or unplaced < 0:
            raise ValueError(f"unplaced: expected a number of tokens >= 0, found {unplaced!r}")
        self.shape, self.unplaced, self.axes = tuple(shape), unplaced, len(shape)

    def size(self) -> int:
        return math.prod(self.shape) + self.unplaced

    def coordinates(self, index: Tensor) -> Tensor:
        cell = (index - self.unplaced).clamp(min=0)
        columns = []
        for size in reversed(self.shape):
            columns.append(cell % size)
            cell = cell // size
        return torch.stack(columns[::-1], dim=-1)

    def placed(self, index: Tensor) -> Tensor | None:
        return index >= self.unplaced if self.unplaced else None

    def __repr__(self) -> str:
        extra = f", unplaced={self.unplaced}" if self.unplaced else ""
        return f"Grid({', '.join(map(str, self.shape))}{extra})"


class Points(Geometry):
    """Arbitrary coordinates, one row a token: [length, axes], or [batch, length, axes] (document layout).

    `placed` (a boolean [length] or [batch, length]) says which tokens have a place; by default all do.
    Coordinates are data, not parameters: no gradient flows into them.
    """

    enumerable = False

    def __init__(self, coords: Tensor, placed: Tensor | None = None):
        if not isinstance(coords, Tensor) or coords.dim() not in (2, 3):
            found = tuple(coords.shape) if isinstance(coords, Tensor) else type(coords).__name__
            raise ValueError(f"coords: expected a tensor [length, axes] or [batch, length, axes], found {found}")
        if placed is not None and not isinstance(placed, Tensor):
            raise ValueError(
                f"placed: expected a boolean of shape {tuple(coords.shape[:-1])}, found {type(placed).__name__}"
            )
        if placed is not None and (placed.dtype != torch.bool or placed.shape != coords.shape[:-1]):
            raise ValueError(
                f"placed: expected a boolean of shape {tuple(coords.shape[:-1])}, "
                f"found {placed.dtype} of shape {tuple(placed.shape)}"
            )
        if coords.is_complex() or coords.dtype == torch.bool:
            raise ValueError(f"coords: expected integers or real numbers, found {coords.dtype}")
        if coords.device.type == "cpu" and coords.is_floating_point() and not torch.compiler.is_compiling():
            bad = int((~torch.isfinite(coords)).sum())
            if bad:
                raise ValueError(
                    f"coords: expected finite numbers, found {bad} that are NaN or infinite of {coords.numel()}"
                )
        self.coords, self.axes = coords.detach(), coords.shape[-1]
        self.has_place = placed

    def size(self) -> int:
        return self.coords.shape[-2]

    def _rows(self, table: Tensor, index: Tensor) -> Tensor:
        """Rows `index` ([length] or [batch, length]) of a table [(batch,) length, ...]."""
        per_row = self.coords.dim() == 3
        if not per_row:
            return table[index]
        index = index.expand(table.shape[0], -1)
        return (
            table.gather(1, index.unsqueeze(-1).expand(-1, -1, table.shape[-1]))
            if table.dim() == 3
            else (table.gather(1, index))
        )

    def coordinates(self, index: Tensor) -> Tensor:
        return self._rows(self.coords, index)

    def placed(self, index: Tensor) -> Tensor | None:
        return None if self.has_place is None else self._rows(self.has_place, index)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.coords,) if self.has_place is None else (self.coords, self.has_place)

    def __repr__(self) -> str:
        return f"Points({list(self.coords.shape)})"


def pair_of(geometry: Geometry | tuple[Geometry, Geometry] | None) -> tuple[Geometry, Geometry]:
    """What the user gave, as (geometry of queries, geometry of keys)."""
    if geometry is None:
        geometry = Line()
    pair = geometry if isinstance(geometry, tuple) else (geometry, geometry)
    if len(pair) != 2 or not all(isinstance(g, Geometry) for g in pair):
        raise TypeError(f"geometry: expected a geometry or (queries', keys'), found {geometry!r}")
    if pair[0].axes != pair[1].axes:
        raise ValueError(f"geometry: queries and keys need the same number of axes, found {pair[0]} and {pair[1]}")
    if type(pair[0]) is not type(pair[1]):
        name = "Points" if not (pair[0].enumerable and pair[1].enumerable) else "a Grid"
        raise ValueError(
            f"geometry: {name} go{'' if name == 'Points' else 'es'} with {name}, found {pair[0]} and {pair[1]}"
        )
    return pair
