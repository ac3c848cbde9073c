"""Weights of some pairs, from their logits and the log-sum-exp of their rows: exp(logits - lse)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .normal import Problem


def weights_of(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse); a row that sees nothing has weights 0."""
    return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def band(tile: Callable[..., Tensor], problem: Problem, lse: Tensor, width: int) -> Tensor:
    """The diagonal band from straight tiles along it (positions, so that starts count)."""
    batch, heads, q_len, k_len = problem.sizes
    starts = [
        problem.starts[side] if slot < 0 else problem.operands[slot] + problem.starts[side]
        for side, slot in enumerate((problem.form.q_start, problem.form.k_start))
    ]
    base = torch.as_tensor(starts[0] - starts[1], device=problem.q.device).reshape(-1, 1, 1, 1)  # key - query index
    low, high = int(base.min()), int(base.max())
    offsets = torch.arange(-width, width + 1, device=problem.q.device)
    bands = []
    for first in range(0, q_len, 256):
        last = min(first + 256, q_len)
        left, right = max(first + low - width, 0), min(last + high + width, k_len)
        rows = torch.arange(first, last, device=problem.q.device)[:, None]
        key = rows + base + offsets  # [batch or 1, 1, rows, 2 width + 1]
        if right <= left:
            bands.append(lse.new_zeros(batch, heads, last - first, 2 * width + 1))
            continue
        weights = weights_of(tile(problem, slice(first, last), slice(left, right)), lse[:, :, first:last])
        inside = (key >= left) & (key < right)
        near = (key - left).clamp(0, right - left - 1).expand(batch, heads, -1, -1)
        bands.append(weights.gather(-1, near) * inside)
    return torch.cat(bands, dim=2) if bands else lse.new_zeros(batch, heads, 0, 2 * width + 1)
