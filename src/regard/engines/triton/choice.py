"""What is decided before a kernel: what there are kernels for, and how large a tile is, by how many warps.

A short table a kernel, by width of heads, dtype and what is added, measured on one H200 (Triton 3.6). It depends on
the structure of a problem, never on its lengths, so a new length compiles nothing and nothing is tried while you wait.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor

from ...normal import Form, Problem

#: entries of R that a content term may have, to be kept for every query
FEW = 1040


class Tiling(NamedTuple):
    block_q: int
    block_k: int
    warps: int
    stages: int
    registers: int | None = None  # at most, so that two programs fit a multiprocessor
    late: bool = False  # forward: sums of weights stay a tile until the end


@functools.cache
def interpreted() -> bool:
    """Kernels run in Triton's interpreter, on the CPU: it must be asked for before the first of them is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def power(n: int, least: int = 16) -> int:
    """The power of two that n fits in."""
    return max(least, 1 << (n - 1).bit_length())


def forward_tiling(dim: int, v_dim: int, dtype: torch.dtype, added: str) -> Tiling:
    """`added`: what tiles have besides keys and values: "nothing", "slope", "table" or "axes"; "cut" by a mask."""
    if interpreted():
        return Tiling(16, 16, 4, 1, late=added == "table")
    wide = max(power(dim), power(v_dim))
    if dtype == torch.float32:
        return Tiling(64, 32, 4, 2) if wide <= 128 else Tiling(32, 32, 4, 2)
    if wide <= 64:
        return Tiling(128, 64, 8, 3, 128)
    if wide <= 128:  # narrow tiles let two programs share a multiprocessor, where no table takes its part
        return Tiling(128, 64, 8, 3, late=True) if added == "table" else Tiling(128, 32, 8, 3, 128)
    return Tiling(128, 32, 8, 2)


def query_tiling(dim: int, v_dim: int, dtype: torch.dtype, added: str) -> Tiling:
    """For gradients of queries: a block of queries sweeps the keys."""
    if interpreted():
        return Tiling(32, 16, 4, 1)
    wide = max(power(dim), power(v_dim))
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 1) if wide <= 128 else Tiling(16, 16, 4, 1)
    if wide <= 64:
        return Tiling(64, 64, 4, 3) if added == "axes" else Tiling(128, 64, 8, 3, 128)
    if wide <= 128:
        return Tiling(64, 32, 4, 3) if added == "axes" else Tiling(128, 64, 8, 3)
    return Tiling(64, 32, 4, 2)


def key_tiling(dim: int, v_dim: int, dtype: torch.dtype, added: str) -> Tiling:
    """For gradients of keys and values: a block of keys sweeps the queries."""
    if interpreted():
        return Tiling(16, 32, 4, 1)
    wide = max(power(dim), power(v_dim))
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 1) if wide <= 128 else Tiling(16, 16, 4, 1)
    if wide <= 64:
        return Tiling(32 if added == "axes" else 64, 64, 4, 3)
    if wide <= 128:
        return Tiling(64, 64, 4, 2)
    return Tiling(32, 64, 4, 2)


def diagonal_tiling(dim: int, v_dim: int, dtype: torch.dtype, width: int | None, clipped: bool) -> Tiling:
    """For gradients of tables: tiles along a diagonal, of whole lines where queries lie on a grid `width` wide.

    `clipped`: there are few diagonals, so small tiles occupy more of the machine.
    """
    if interpreted():
        return Tiling(32 if width == 32 else 16, 16, 4, 1)
    wide = max(power(dim), power(v_dim))
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 1) if wide <= 128 else Tiling(16, 16, 4, 1)
    if wide > 128:
        return Tiling(32, 32, 4, 2)
    if (wide > 64 or width == 128) and not clipped:
        return Tiling(128, 64, 8, 2)
    return Tiling(64, 64, 4, 2, 168 if wide <= 64 else None)


def line_block(width: int, most: int) -> int:
    """Columns of a key tile on a grid, so that whole lines are covered with little waste."""
    fits = [size for size in (16, 32, 64) if size <= max(most, 16)]
    return min(fits, key=lambda size: (-(-width // size) * size, -size))


def mask_parts(mask: tuple | None) -> list[tuple]:
    """The masks that are joined by `and`."""
    if mask is None:
        return []
    return [part for each in mask[1:] for part in mask_parts(each)] if mask[0] == "and" else [mask]


def refused_mask(form: Form) -> str | None:
    """Why kernels do not know a mask."""
    parts = mask_parts(form.mask)
    names = {"or": "masks joined by |", "not": "a mask turned by ~", "box": "windows on a grid"}
    names |= {"chosen": "keys chosen by their scores", "nearest": "keys chosen by their scores"}
    for part in parts:
        if part[0] in names:
            return f"{names[part[0]]}: no kernel for them"
    for kind, words in (("same", "several sets of ids"), ("dense", "several dense masks")):
        if sum(part[0] == kind for part in parts) > 1:
            return f"{words}: kernels take one"
    if sum(part[:2] == ("before", "k") for part in parts) > 1 or sum(part[:2] == ("before", "q") for part in parts) > 1:
        return "several lengths: kernels take one"
    return None


def unsuited(problem: Problem, v: Tensor) -> str | None:
    """Why these tensors are not for the kernels, though the form is."""
    form, (batch, heads, q_len, k_len) = problem.form, problem.sizes
    most = max(problem.q.shape[-1], v.shape[-1])
    if most > 256:
        return f"heads of {most} numbers, at most 256"
    if not (batch and heads and q_len and k_len and problem.q.shape[-1]):
        return "an empty A"
    if form.scale >= 0 and 1 not in problem.operands[form.scale].shape[-2:]:
        return "a scale of its own for each pair"
    crossed = set()
    for piece in form.pieces:
        if piece.gate >= 0 and problem.operands[piece.gate].shape[-1] != 1:
            return "a gate for each key"
        x = problem.operands[piece.slots[0]]
        if piece.kind == "vector":
            if 1 not in x.shape[-2:]:
                return "a bias of its own for each pair"
            if piece.gate >= 0 and x.shape[-1] != 1:
                crossed.add(piece.gate)
        if piece.kind in ("query", "key"):
            rows = problem.operands[piece.slots[1]].shape[2]
            if piece.space[0] == "grid" and piece.lookup >= 0:
                rows = problem.operands[piece.lookup].shape[-1]
            if rows > FEW:
                return f"{piece.label}: {rows} displacements to keep for every token, at most {FEW}"
    if len(crossed) > 1:
        return "several gates over biases of keys"
    return None
