"""Attention by hand: a few lines of dense PyTorch, by which definitions are judged, and not by our own code."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from support import within_budget
from torch import Tensor, nn


def judge(found: Tensor, formula: Callable[..., Tensor], *inputs: Any, what: str = "result") -> None:
    """`found` is within the error budget of a formula, run on the same inputs in their own dtype and in float64."""
    within_budget(found, formula(*inputs), formula(*map(widen, inputs)), what)


def widen(x: Any) -> Any:
    """The same in float64: a tensor, or a copy of a position term."""
    if isinstance(x, nn.Module):
        return copy.deepcopy(x).double()
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def scaled_dot(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ / sqrt(dim), with shared keys repeated for the heads of their group."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / math.sqrt(q.shape[-1])


def softmax(logits: Tensor) -> Tensor:
    """Softmax of each row; a row that is -inf everywhere gives zeros."""
    return torch.softmax(logits, dim=-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)


def printed(x: Tensor | float, digits: int) -> Any:
    """Numbers as a page prints them: rounded to so many digits."""
    values = torch.as_tensor(x, dtype=torch.float64)
    return (values.mul(10**digits).round() / 10**digits + 0.0).tolist()
