"""Pictures beside q and k: arrays that become bytes of colour, checked and bounded, and the grid their patches make."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ...geometry import Grid

#: pixels of a picture
PIXELS = 1 << 24


def picture(x: Tensor) -> Tensor:
    """A picture as bytes, [rows, columns, 1 or 3], from bytes or numbers from 0 to 1; [rows, columns] is grey."""
    found = f"found {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    if x.dim() == 2:
        x = x.unsqueeze(-1)
    if x.dim() != 3 or x.shape[-1] not in (1, 3, 4) or not x.numel():
        raise ValueError(f"image: expected [rows, columns] or [rows, columns, 1, 3 or 4], {found}")
    if x.shape[0] * x.shape[1] > PIXELS:
        raise ValueError(f"image: expected at most {PIXELS:,} pixels, {found}")
    x = x[..., :3]  # how far it lets light through is not shown
    if x.is_floating_point():
        if not bool(torch.isfinite(x).all()) or float(x.min()) < 0 or float(x.max()) > 1:
            raise ValueError(f"image: expected numbers from 0 to 1, {found} with others")
        x = (x * 255).round().to(torch.uint8)
    if x.dtype != torch.uint8:
        raise ValueError(f"image: expected bytes, or numbers from 0 to 1, {found}")
    return x.contiguous()


def packed(x: Tensor) -> bytes:
    """A picture as the page reads it: rows, columns and channels as little-endian uint32, then its bytes."""
    return struct.pack("<3I", *x.shape) + x.numpy().tobytes()


def placed(k_len: int, grid: Tensor | None, unplaced: Tensor | None, image: Tensor | None) -> Grid | None:
    """Where tokens are: on the grid that is given, or on one of the picture's shape that has as many cells as tokens.

    A token more than cells is a class token, before them.
    """
    alone = None if unplaced is None else _whole("unplaced", unplaced, 1)[0]
    if grid is not None:
        rows, columns = _whole("grid", grid, 2)
    elif image is not None:
        rows, columns = _shaped(k_len, alone, image)
    elif alone is None:
        return None
    else:
        raise ValueError("unplaced: expected a grid, [rows, columns], with it; found none")
    alone = k_len - rows * columns if alone is None else alone
    if rows < 1 or columns < 1 or alone < 0 or rows * columns + alone != k_len:
        raise ValueError(
            f"grid: expected rows x columns + unplaced = {k_len} keys, found {rows} x {columns} + {max(alone, 0)}"
        )
    return Grid(rows, columns, unplaced=alone)


def _shaped(k_len: int, alone: int | None, image: Tensor) -> tuple[int, int]:
    high, wide = image.shape[:2]
    step = math.gcd(high, wide)
    high, wide = high // step, wide // step
    for more in (0, 1) if alone is None else (alone,):
        times = math.isqrt(max(k_len - more, 0) // (high * wide))
        if times and times * times * high * wide == k_len - more:
            return times * high, times * wide
    raise ValueError(
        f"grid: expected [rows, columns] with the image, for {k_len} keys make no grid of the shape of an image of "
        f"{image.shape[0]} x {image.shape[1]}"
    )


def _whole(name: str, x: Tensor, count: int) -> list[int]:
    numbers = x.reshape(-1).tolist()
    if len(numbers) != count or any(n != int(n) or not 0 <= n <= 1 << 24 for n in numbers):
        raise ValueError(f"{name}: expected {count} whole number{'s' if count > 1 else ''}, found {numbers!s:.60}")
    return [int(n) for n in numbers]
