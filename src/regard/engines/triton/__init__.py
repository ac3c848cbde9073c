"""The GPU engine: Triton kernels that compute tiles of A where they are used, forward and backward.

`given` and `prepare` turn a problem into the few tensors a kernel reads; `tiles` computes logits and masks of a tile
for every kernel; `product`, `reverse`, `diagonal`, `axes`, `looks`, `rows`, `columns` and `strongest` are kernels;
`choice`, `tune`, `launch`, `gradients` and `summaries` start them; `lay` lays tables out and `collect` gathers their
gradients; `border` puts tokens without a place around a grid, and `leave` is its way back. What the kernels do not take
is refused here with its reason, and the plan goes to the tiled engine.

Nothing here imports Triton until the engine is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Form, Problem
from ...tables import constant, spread
from .. import tiled
from .choice import interpreted, refused_mask, unsuited

log = logging.getLogger("regard")


def refuse(form: Form, device: str, dtype: str) -> str | None:
    """Why this engine cannot run a form."""
    if device != "cuda" and not (device == "cpu" and interpreted()):
        return f"runs on CUDA devices only, q is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"kernels take float32, bfloat16 and float16, q is {dtype}"
    if form.content[0] != "dot":
        return "kernels know dot products only"
    for piece in form.pieces:
        if piece.kind in ("dot", "network"):
            return f"{piece.label}: no kernel for it"
        if piece.space and piece.space[0] == "points":
            return f"{piece.label}: no kernel for displacements between points"
        if piece.kind in ("query", "key") and piece.space == ("line",) and piece.lookup < 0:
            return f"{piece.label}: no kernel for content terms that differ at every displacement"
        if piece.space and piece.space[0] == "grid" and (form.q_start >= 0 or form.k_start >= 0):
            return "grids with a start for each batch row: no kernel for them"
    return refused_mask(form)


def tile(problem: Problem, rows: slice | Tensor, cols: slice | Tensor) -> Tensor:
    """Logits of some rows and columns, as the tiled engine has them."""
    return tiled.tile(spread(problem), rows, cols)


def remark(problem: Problem) -> str | None:
    """What of these tensors, besides their form, sends the work to the tiled engine: for the plan."""
    reason = _fit(problem, problem.k)[0]
    return None if reason is None else f"{reason}: the tiled engine computes it"


#: what `_fit` has found, by form and shapes, and how many of those are remembered
_fits: dict[tuple, tuple[str | None, int]] = {}
FITS = 1024


def _fit(problem: Problem, v: Tensor) -> tuple[str | None, int]:
    """Why these tensors are not for kernels, or None; and how many tokens go around a grid (`border`).

    Shapes alone decide it, and a model comes with the same ones layer after layer.
    """
    shapes = tuple([x.shape for x in problem.operands])
    key = problem.form, problem.q.shape, problem.k.shape, v.shape[-1], problem.starts, shapes
    found = _fits.get(key)
    if found is None:
        reason = unsuited(problem, v)
        found = reason, _part("border").borders(problem) if reason is None else 0
        if len(_fits) >= FITS:
            _fits.clear()
        _fits[key] = found
    return found


@functools.cache
def _part(name: str) -> Any:
    """A module of this engine, and Triton with it, imported when it is first used."""
    return importlib.import_module(f".{name}", __package__)


def forward(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp."""
    reason, around = _fit(problem, v)
    if reason is not None:
        log.info("triton: %s; the tiled engine computes this product", reason)
        return tiled.forward(spread(problem), v)
    if not v.shape[-1]:  # only the log-sum-exp is asked for: kernels want values to multiply
        out, lse = _part("product").product(problem, _ones(v))
        return out[..., :0], lse
    if around:
        return _part("border").forward(problem, v, around)
    return _part("product").product(problem, v)


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of the operands asked for."""
    gradients = _part("gradients")
    reason, around = _fit(problem, v)
    if reason is not None:
        log.info("triton: %s; the tiled engine computes this gradient", reason)
        return gradients.through_spread(
            problem, needs, lambda whole: tiled.backward(whole, v, out, lse, d_out, d_lse, needs)
        )
    if not v.shape[-1]:
        nothing = _ones(out).zero_()
        d_q, d_k, d_v, rest = gradients.backward(problem, _ones(v), nothing, lse, nothing, d_lse, needs)
        return d_q, d_k, d_v[..., :0], rest
    if around:
        return _part("leave").backward(problem, v, out, lse, d_out, d_lse, needs, around)
    return gradients.backward(problem, v, out, lse, d_out, d_lse, needs)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros that nobody will write to: a gradient that is not there. Kernels read them with strides of 0."""
    return _zero(x.dtype, x.device).expand(x.shape)


@constant(16)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def reduce(
    problem: Problem,
    summaries: Sequence[Any],
    progress: Callable[[int, int], None] | None = None,
    lse: Tensor | None = None,
) -> list[Any]:
    """Summaries by kernels, to the same states as everywhere. A log-sum-exp that is known saves the first pass."""
    reason = _fit(problem, problem.k)[0]
    if reason is not None:
        log.info("triton: %s; the tiled engine computes these summaries", reason)
        return tiled.reduce(spread(problem), summaries, progress, lse)
    return _part("summaries").reduce(problem, summaries, progress, lse)


def _ones(x: Tensor) -> Tensor:
    """One column in place of none."""
    return x.new_ones(*x.shape[:-1], 1)
