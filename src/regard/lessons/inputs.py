"""What a reader may put into a lesson's picture, checked: each has its bounds, and an error that names it.

A page sends JSON, so anything may come. What goes back is JSON too: `plain` makes lists of tensors, and None of what is
not finite. Readers make mistakes in their own language, so a refusal has its words in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Refused(ValueError):
    """What a reader put in cannot be taken: why, in words of each language."""

    def __init__(self, name: str, expected: str, found: str, expected_zh: str, found_zh: str = ""):
        super().__init__(f"{name}: expected {expected}, found {found}")
        self.words = {"en": str(self), "zh": f"{name}：应为{expected_zh}，得到的是 {found_zh or found}"}


def number(name: str, x: Any, low: float, high: float) -> float:
    """A number from low to high."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not low <= x <= high:
        raise Refused(name, f"a number from {low:g} to {high:g}", f"{x!r:.60}", f" {low:g} 到 {high:g} 之间的数")
    return float(x)


def whole(name: str, x: Any, low: int, high: int) -> int:
    """A whole number from low to high."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not low <= x <= high or x != int(x):
        raise Refused(name, f"a whole number from {low} to {high}", f"{x!r:.60}", f" {low} 到 {high} 之间的整数")
    return int(x)


def numbers(name: str, xs: Any, low: float, high: float, count: tuple[int, int]) -> list[float]:
    """A list of numbers; count is the fewest and the most there may be."""
    if not isinstance(xs, (list, tuple)) or not count[0] <= len(xs) <= count[1]:
        many = str(count[0]) if count[0] == count[1] else f"{count[0]} to {count[1]}"
        many_zh = many.replace(" to ", " 到 ")
        raise Refused(name, f"a list of {many} numbers", _size(xs), f" {many_zh} 个数的列表", _size(xs, "zh"))
    return [number(f"{name}[{n}]", x, low, high) for n, x in enumerate(xs)]


def matrix(name: str, rows: Any, low: float, high: float, shape: tuple[int, int]) -> list[list[float]]:
    """Rows of numbers, of this shape."""
    if not isinstance(rows, (list, tuple)) or len(rows) != shape[0]:
        high, wide = shape
        words = f"{high} rows of {wide} numbers", _size(rows), f" {high} 行、每行 {wide} 个数", _size(rows, "zh")
        raise Refused(name, *words)
    return [numbers(f"{name}[{n}]", row, low, high, (shape[1], shape[1])) for n, row in enumerate(rows)]


def choice(name: str, x: Any, options: Sequence[Any]) -> Any:
    """One of these."""
    for option in options:
        if type(x) is type(option) and x == option:
            return option
    known = ", ".join(map(str, options))
    raise Refused(name, f"one of {known}", f"{x!r:.60}", f"其中之一：{known}")


def truth(name: str, x: Any) -> bool:
    """Yes or no."""
    if not isinstance(x, bool):
        raise Refused(name, "true or false", f"{x!r:.60}", " true 或 false")
    return x


def text(name: str, x: Any, most: int) -> str:
    """A text that says something, of at most so many characters."""
    if not isinstance(x, str) or not x.strip() or len(x) > most:
        raise Refused(name, f"a text of 1 to {most} characters", _size(x), f" 1 到 {most} 个字符的文本", _size(x, "zh"))
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


def _size(x: Any, language: str = "en") -> str:
    if isinstance(x, str):
        return f"{len(x)} characters" if language == "en" else f"{len(x)} 个字符"
    if isinstance(x, (list, tuple)):
        return f"a list of {len(x)}" if language == "en" else f"{len(x)} 项的列表"
    return f"{x!r:.60}"
