"""From a function of indices to a mask.

transformers describes a mask by a function, `f(batch, head, query, key) -> bool`. `found` calls it once, with symbols
for the indices, and reads off what it says: comparisons of query and key are causal masks and windows, equal numbers
looked up for both are documents, and what depends on one side alone is a row of booleans. Nothing is asked of pairs, so
nothing is N x N; what says something else raises `Undescribed`. All of it runs inside a compiled graph too, where a
function cannot be looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..masks import Mask, causal, dense, documents, window


class Undescribed(Exception):
    """A mask function says something that no mask but a dense one can hold."""


class Side:
    """A number or a truth for each query, each key or each batch row: known, and small.

    `values` broadcasts to [batch, 1, q_len, k_len] with q_len or k_len (or both) being 1. `place` marks an index
    itself: it is the position plus this number.
    """

    def __init__(self, values: Tensor, of: str, place: int | None = None):
        self.values, self.of, self.place = values, of, place  # of: "q", "k" or "" (neither)
        self.device, self.dtype = values.device, values.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """A division that is cut off, of numbers that are not negative, is one that is rounded down."""
        whole = (kwargs or {}).get("rounding_mode") in ("trunc", "floor")
        if func is torch.div and whole and isinstance(args[0], Side):
            return args[0] // args[1]
        raise Undescribed(f"torch.{getattr(func, '__name__', func)} of an index")

    def to(self, *args: Any, **kwargs: Any) -> Side:
        return self

    def new_ones(self, *size: Any, **kwargs: Any) -> Pairs:
        return Pairs(True)

    def new_zeros(self, *size: Any, **kwargs: Any) -> Pairs:
        return Pairs(False)

    def _with(self, other: Any, operation: Callable[[Any, Any], Tensor]) -> Side:
        if isinstance(other, Side):
            return Side(operation(self.values, other.values), self.of or other.of)
        if isinstance(other, (Pairs, Distance)):
            raise Undescribed("arithmetic on pairs")
        return Side(operation(self.values, other), self.of)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int) and self.place is not None:
            return Side(self.values + other, self.of, self.place + other)
        if across(self, other):
            raise Undescribed("a sum of a query's and a key's number")
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, int) and self.place is not None:
            return Side(self.values - other, self.of, self.place - other)
        if across(self, other):
            return distance(self, other)
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Side:
        return self._apart(other)._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: Any) -> Side:
        return self._apart(other)._with(other, lambda a, b: a // b)

    def __mod__(self, other: Any) -> Side:
        return self._apart(other)._with(other, lambda a, b: a % b)

    def _apart(self, other: Any) -> Side:
        if across(self, other):
            raise Undescribed("a product of a query's and a key's number")
        return self

    def __eq__(self, other: Any) -> Any:
        if across(self, other):
            if self.place is not None and other.place is not None:
                return distance(self, other) == 0
            return Pairs(same(self, other))
        return self._with(other, lambda a, b: a == b)

    def __ne__(self, other: Any) -> Any:
        return ~(self == other)

    def __ge__(self, other: Any) -> Any:
        if isinstance(other, int) and self.place is not None and other <= self.place:
            return Pairs(True)  # positions start at 0
        return distance(self, other) >= 0 if across(self, other) else self._with(other, lambda a, b: a >= b)

    def __gt__(self, other: Any) -> Any:
        return distance(self, other) >= 1 if across(self, other) else self._with(other, lambda a, b: a > b)

    def __le__(self, other: Any) -> Any:
        return distance(self, other) <= 0 if across(self, other) else self._with(other, lambda a, b: a <= b)

    def __lt__(self, other: Any) -> Any:
        return distance(self, other) <= -1 if across(self, other) else self._with(other, lambda a, b: a < b)

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Pairs) or across(self, other):
            return Pairs.of(self) & other
        return self._with(other, lambda a, b: a & b)

    def __or__(self, other: Any) -> Any:
        if isinstance(other, Pairs) or across(self, other):
            return Pairs.of(self) | other
        return self._with(other, lambda a, b: a | b)

    def __invert__(self) -> Side:
        return Side(~self.values, self.of)

    def __getitem__(self, index: Any) -> Any:
        raise Undescribed("an index into what was looked up")

    def __bool__(self) -> bool:
        raise Undescribed("a branch on an index")

    __radd__, __rand__, __ror__, __rmul__, __hash__ = __add__, __and__, __or__, __mul__, None  # type: ignore[assignment]


def across(a: Side, b: Any) -> bool:
    """One is a query's and the other a key's."""
    return isinstance(b, Side) and bool(a.of) and bool(b.of) and a.of != b.of


class Distance:
    """sign * (query - key) + shift, or its size."""

    def __init__(self, sign: int, shift: int, size: bool = False):
        self.sign, self.shift, self.size = sign, shift, size

    def __abs__(self) -> Distance:
        return Distance(self.sign, self.shift, True)

    def abs(self) -> Distance:
        return abs(self)

    def __add__(self, other: int) -> Distance:
        if self.size or not isinstance(other, int):
            raise Undescribed("arithmetic on distances")
        return Distance(self.sign, self.shift + other)

    def __sub__(self, other: int) -> Distance:
        return self + -other

    def __neg__(self) -> Distance:
        return Distance(-self.sign, -self.shift)

    def _between(self, lo: int | None, hi: int | None) -> Pairs:
        """lo <= this <= hi."""
        lo, hi = (None if x is None else x - self.shift for x in (lo, hi))
        if self.sign < 0:
            lo, hi = None if hi is None else -hi, None if lo is None else -lo
        if lo == 0 and hi is None:
            return Pairs(causal)
        return Pairs(window(hi, None if lo is None else -lo))

    def __le__(self, other: int) -> Pairs:
        number(other)
        return self._between(-other, other) if self.size and not self.shift else self._signed()._between(None, other)

    def __ge__(self, other: int) -> Pairs:
        number(other)
        return ~(self <= other - 1) if self.size else self._between(other, None)

    def __lt__(self, other: int) -> Pairs:
        return self <= number(other) - 1

    def __gt__(self, other: int) -> Pairs:
        return self >= number(other) + 1

    def __eq__(self, other: Any) -> Any:
        number(other)
        return self._signed()._between(other, other)

    def _signed(self) -> Distance:
        if self.size:
            raise Undescribed("a distance from a shifted place")
        return self

    __radd__, __hash__ = __add__, None  # type: ignore[assignment]


def number(x: Any) -> int:
    if not isinstance(x, int):
        raise Undescribed(f"a distance compared with {type(x).__name__}")
    return x


def distance(a: Side, b: Side) -> Distance:
    if a.place is None or b.place is None:
        raise Undescribed("an order of numbers that are no positions")
    return Distance(1 if a.of == "q" else -1, a.place - b.place)


def same(a: Side, b: Side) -> Mask:
    """Pairs for which a query's number equals a key's."""
    q_side, k_side = (a, b) if a.of == "q" else (b, a)
    least = torch.minimum(q_side.values.amin(), k_side.values.amin())  # ids count from 0
    return documents(_rows(q_side.values) - least, _rows(k_side.values) - least)


def _rows(values: Tensor) -> Tensor:
    """[batch or 1, 1, q_len or 1, k_len or 1] as [batch or 1, length]."""
    return values.expand(-1, 1, -1, -1).flatten(1).long()


class Pairs:
    """A truth about pairs: always, never, or as a mask says."""

    def __init__(self, mask: Mask | bool):
        self.mask = mask
        self.device = None

    @staticmethod
    def of(x: Any) -> Pairs:
        if isinstance(x, Pairs):
            return x
        if isinstance(x, bool):
            return Pairs(x)
        if isinstance(x, Side):
            return Pairs(dense(x.values.bool()))
        raise Undescribed(f"a {type(x).__name__}")

    def to(self, *args: Any, **kwargs: Any) -> Pairs:
        return self

    def __and__(self, other: Any) -> Pairs:
        other = Pairs.of(other)
        for one, two in ((self, other), (other, self)):
            if isinstance(one.mask, bool):
                return two if one.mask else one
        return Pairs(self.mask & other.mask)

    def __or__(self, other: Any) -> Pairs:
        other = Pairs.of(other)
        for one, two in ((self, other), (other, self)):
            if isinstance(one.mask, bool):
                return one if one.mask else two
        return Pairs(self.mask | other.mask)

    def __invert__(self) -> Pairs:
        return Pairs(not self.mask if isinstance(self.mask, bool) else ~self.mask)

    def __bool__(self) -> bool:
        raise Undescribed("a branch on what pairs see")

    __rand__, __ror__ = __and__, __or__


class _Lookups(TorchFunctionMode):
    """Lets a tensor be indexed by symbols: table[batch, query] is a Side."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            symbols = [part for part in index if isinstance(part, Side)]
            if symbols:
                of = "".join(sorted({part.of for part in symbols}))
                if len(of) > 1 or len(index) != table.dim():
                    raise Undescribed("a table looked up by query and key, or by a part of its axes")
                at = tuple(part.values if isinstance(part, Side) else part for part in index)
                return Side(table[at], of)
        return func(*args, **(kwargs or {}))


def found(
    function: Callable, batch: int, q_len: int, k_len: int, q_start: Any, k_start: Any, device: Any
) -> Mask | None:
    """The mask that a function of indices describes; None when every pair is allowed."""
    rows = torch.arange(q_len, device=device) + q_start
    cols = torch.arange(k_len, device=device) + k_start
    symbols = (
        Side(torch.arange(batch, device=device)[:, None, None, None], ""),
        Side(torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device), ""),
        Side(rows[None, None, :, None], "q", 0),
        Side(cols[None, None, None, :], "k", 0),
    )
    with _Lookups():
        result = function(*symbols)
    mask = Pairs.of(result).mask
    if isinstance(mask, bool):
        return None if mask else dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device))
    return mask
