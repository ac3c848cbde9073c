"""What a reader may put into a lesson's picture, checked: each has its bounds, and an error that names it.

A page sends JSON, so anything may come. What goes back is JSON too: `plain` makes lists of tensors, and None of what is
not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def number(name: str, x: Any, low: float, high: float) -> float:
    """A number from low to high."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not low <= x <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, found {x!r:.60}")
    return float(x)


def whole(name: str, x: Any, low: int, high: int) -> int:
    """A whole number from low to high."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not low <= x <= high or x != int(x):
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {x!r:.60}")
    return int(x)


def numbers(name: str, xs: Any, low: float, high: float, count: tuple[int, int]) -> list[float]:
    """A list of numbers; count is the fewest and the most there may be."""
    if not isinstance(xs, (list, tuple)) or not count[0] <= len(xs) <= count[1]:
        many = str(count[0]) if count[0] == count[1] else f"{count[0]} to {count[1]}"
        raise ValueError(f"{name}: expected a list of {many} numbers, found {_size(xs)}")
    return [number(f"{name}[{n}]", x, low, high) for n, x in enumerate(xs)]


def matrix(name: str, rows: Any, low: float, high: float, shape: tuple[int, int]) -> list[list[float]]:
    """Rows of numbers, of this shape."""
    if not isinstance(rows, (list, tuple)) or len(rows) != shape[0]:
        raise ValueError(f"{name}: expected {shape[0]} rows of {shape[1]} numbers, found {_size(rows)}")
    return [numbers(f"{name}[{n}]", row, low, high, (shape[1], shape[1])) for n, row in enumerate(rows)]


def choice(name: str, x: Any, options: Sequence[Any]) -> Any:
    """One of these."""
    for option in options:
        if type(x) is type(option) and x == option:
            return option
    raise ValueError(f"{name}: expected one of {', '.join(map(str, options))}, found {x!r:.60}")


def truth(name: str, x: Any) -> bool:
    """Yes or no."""
    if not isinstance(x, bool):
        raise ValueError(f"{name}: expected true or false, found {x!r:.60}")
    return x


def text(name: str, x: Any, most: int) -> str:
    """A text that says something, of at most so many characters."""
    if not isinstance(x, str) or not x.strip() or len(x) > most:
        raise ValueError(f"{name}: expected a text of 1 to {most} characters, found {_size(x)}")
    return x


def plain(x: Any) -> Any:
    """Tensors, lists and dictionaries as JSON knows them; None for infinities and NaN."""
    if isinstance(x, Tensor):
        return plain(x.detach().tolist())
    if isinstance(x, dict):
        return {str(name): plain(each) for name, each in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(each) for each in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def _size(x: Any) -> str:
    if isinstance(x, str):
        return f"{len(x)} characters"
    return f"a list of {len(x)}" if isinstance(x, (list, tuple)) else f"{x!r:.60}"
