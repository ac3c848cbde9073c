"""Indices into A, checked and put into one form, and how large a slice may be before it must be forced."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

Index = int | slice | EllipsisType | Sequence[int] | Tensor

#: numbers a slice may have before it must be forced
LIMIT = 1 << 26


def kinds(index: tuple) -> list:
    return [x if x is Ellipsis else None for x in index]


def single(value: Any, size: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise IndexError(f"{name}: expected an integer, found {value!r}")
    if not -size <= value < size:
        raise IndexError(f"{name}: expected an index from {-size} to {size - 1}, found {value}")
    return value % size


def plain(part: Any) -> Any:
    """A whole number of any kind (numpy's, a tensor of one) as Python's own."""
    if isinstance(part, Tensor) and part.dim() == 0 and not part.dtype.is_floating_point and part.dtype != torch.bool:
        return int(part)
    return part.__index__() if hasattr(part, "__index__") and not isinstance(part, (int, Tensor)) else part


def numbers(value: Any, size: int, device: torch.device) -> Tensor:
    if not isinstance(value, (Tensor, list, tuple, range)):
        raise IndexError(f"index: expected whole numbers or {size} booleans, found {value!r}")
    numbers = torch.as_tensor(value, device=device)
    if not numbers.numel() and not isinstance(value, Tensor):
        numbers = numbers.long()
    if numbers.dtype == torch.bool:
        numbers = numbers.nonzero().squeeze(-1) if numbers.shape == (size,) else numbers
    if numbers.dim() != 1 or numbers.dtype.is_floating_point or numbers.dtype == torch.bool:
        raise IndexError(
            f"index: expected whole numbers or {size} booleans, found {numbers.dtype} {list(numbers.shape)}"
        )
    if len(numbers) and not (-size <= int(numbers.min()) and int(numbers.max()) < size):
        raise IndexError(f"index: expected from {-size} to {size - 1}, found {numbers.min()} to {numbers.max()}")
    return numbers.long() % size if size else numbers.long()


def span(index: Any, size: int, name: str, device: torch.device) -> tuple[slice | Tensor, bool]:
    """A query or key index as a plain slice or index tensor, and whether its axis goes away."""
    if isinstance(index, slice):
        first, last, step = index.indices(size)
        if step == 1:
            return slice(first, max(first, last)), False
        return torch.tensor(range(first, last, step), dtype=torch.long, device=device), False
    if isinstance(index, int):
        at = single(index, size, name)
        return slice(at, at + 1), True
    return numbers(index, size, device), False


def span_length(span: slice | Tensor) -> int:
    return span.stop - span.start if isinstance(span, slice) else len(span)


def human_size(numbers: int, dtype: torch.dtype) -> str:
    size, units = float(numbers * dtype.itemsize), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def check_size(numbers: int, dtype: torch.dtype, force: bool, how: str) -> None:
    if numbers > LIMIT and not force:
        raise ValueError(
            f"this would be {numbers:,} numbers, {human_size(numbers, dtype)}; take fewer queries or keys, a summary "
            f"(A.heatmap, A.topk), or say {how}"
        )
