"""Skewed views: "one number a displacement" as tiles and back, without an index a pair."""

from __future__ import annotations

from torch import Tensor


def skew(x: Tensor, width: int) -> Tensor:
    """x [.., n, n + width - 1] as y [.., n, width] with y[r, c] = x[r, n - 1 - r + c]: a view, no index a pair."""
    x = x.contiguous()
    n, w = x.shape[-2:]
    if not n or not width:
        return x[..., :width]
    return x.as_strided((*x.shape[:-1], width), (*x.stride()[:-2], w - 1, 1), x.storage_offset() + n - 1)


def unskew(y: Tensor) -> Tensor:
    """The adjoint of skew: y [.., n, width] laid into zeros [.., n, n + width - 1]."""
    n, width = y.shape[-2:]
    x = y.new_zeros(*y.shape[:-1], max(n + width - 1, 0))
    if n and width:
        skew(x, width).copy_(y)
    return x


def diagonal_sums(x: Tensor, rows: slice, cols: slice, k_len: int) -> tuple[int, Tensor]:
    """Sums of x [.., rows, cols] along i - j: the first table entry met, and [.., rows + cols - 1] from there."""
    low = rows.start - (cols.stop - 1) + k_len - 1
    return low, unskew(x).sum(-2).flip(-1)
