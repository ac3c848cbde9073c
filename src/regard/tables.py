"""Features as tables: R or vᵀR for every displacement a problem meets (the plan's rewrite of enumerable geometries)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .description import Description
from .features import (
    Buckets,
    Clipped,
    Feature,
    LogBuckets,
    OnAxis,
    OneHot,
    PerAxis,
    Sinusoid,
    Table,
    one_hot_from,
)
from .geometry import Grid, Points
from .position import Bound, Rotary

#: rows of one-hot products at a time
CHUNK = 8192
#: numbers of a table of sinusoids that is kept, and of a table of bins
WAVES, BINS = 1 << 23, 1 << 20


@torch.library.custom_op("regard::take", mutates_args=())
def take(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    """values [heads or 1, n, f] at index [b, m]: [b, heads or 1, m, f]. Its gradient has the same bits every time."""
    return values[:, index].movedim(1, 0).contiguous()


def rows_at(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    """The same, without an operator where no gradient is asked for: an operator costs more than a short table."""
    if torch.compiler.is_compiling() or (values.requires_grad and torch.is_grad_enabled()):
        return take(values, index, injective)
    if len(index) == 1:
        return values.index_select(1, index[0])[None]
    return values[:, index].movedim(1, 0)


@take.register_fake
def _(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    return values.new_empty(index.shape[0], values.shape[0], index.shape[1], values.shape[2])


@torch.library.custom_op("regard::take_backward", mutates_args=())
def take_backward(grad: Tensor, index: Tensor, rows: int, injective: bool) -> Tensor:
    """Sums of grad [b, h, m, f] by index: scattered where no two entries of a row meet, else by one-hot products."""
    b, h, m, f = grad.shape
    total = grad.new_zeros(h, rows, f)
    if injective:
        for row in range(b):
            part = grad.new_zeros(h, rows, f)
            part[:, index[row]] = grad[row]
            total += part
        return total
    for row in range(b):
        for at in range(0, m, CHUNK):
            hot = torch.nn.functional.one_hot(index[row, at : at + CHUNK], rows).to(grad.dtype)
            total += hot.mT @ grad[row, :, at : at + CHUNK]
    return total


@take_backward.register_fake
def _(grad: Tensor, index: Tensor, rows: int, injective: bool) -> Tensor:
    return grad.new_empty(grad.shape[1], rows, grad.shape[3])


def _take_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    values, index, injective = inputs
    ctx.save_for_backward(index)
    ctx.rows, ctx.injective = values.shape[1], injective


def _take_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return take_backward(grad, index, ctx.rows, ctx.injective), None, None


take.register_autograd(_take_grad, setup_context=_take_setup)


def _refuse_twice(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("regard: the gradient of a gradient of a table is not available; use engine='reference' for it")


take_backward.register_autograd(_refuse_twice, setup_context=lambda ctx, inputs, output: None)


def displacements(d: Description, axes: tuple[int, ...] | None) -> Tensor:
    """All displacements in table order: [batch or 1, n, axes] on a line or a grid (of these axes; None for all)."""
    q_len, k_len = d.q.shape[-2], d.k.shape[-2]
    if not isinstance(d.q_geometry, Grid):
        steps = torch.arange(max(q_len + k_len - 1, 0), device=d.q.device)
        base = d.q_start - d.k_start - (k_len - 1)
        rows = base[:, None] + steps if isinstance(base, Tensor) else (steps + base)[None]
        return rows.unsqueeze(-1)
    assert isinstance(d.k_geometry, Grid)
    q_shape, k_shape = d.q_geometry.shape, d.k_geometry.shape
    chosen = range(len(q_shape)) if axes is None else axes
    ranges = [torch.arange(1 - k_shape[a], q_shape[a], device=d.q.device) for a in chosen]
    return torch.cartesian_prod(*ranges).reshape(1, -1, len(ranges))


def check_ranges(d: Description) -> Description:
    """Raise unless every feature has a row for every displacement of the problem."""
    for term in d.terms:
        inner = term.term if isinstance(term, Bound) else term
        if not isinstance(inner, Rotary) and d.q.shape[-2] and d.k.shape[-2]:
            check_range(inner.features, d)
    return d


def check_range(feature: Feature, d: Description) -> None:
    """Raise unless the feature has a row for every displacement of the problem."""
    if isinstance(d.q_geometry, Points):
        if torch.compiler.is_compiling() or d.q.device.type != "cpu":
            return
        ends = []
        for side, geometry in (("q", d.q_geometry), ("k", d.k_geometry)):
            at = d.positions(side)
            places, placed = geometry.coordinates(at), geometry.placed(at)
            places = places.reshape(-1, places.shape[-1]) if placed is None else places[placed]
            if places.is_floating_point():
                parts = [p.feature for p in feature.parts] if isinstance(feature, PerAxis) else [feature]
                parts = [p.feature if isinstance(p, OnAxis) else p for p in parts]
                if binned := [p for p in parts if isinstance(p, (OneHot, Table))]:
                    index = binned[0].bins if isinstance(binned[0], Table) else binned[0]
                    raise ValueError(f"geometry: {index.describe()} needs whole coordinates, found real ones")
                return
            if not len(places):
                return
            ends.append((places.amin(0), places.amax(0)))
        (q_low, q_high), (k_low, k_high) = ends
        lo, hi = (q_low - k_high).tolist(), (q_high - k_low).tolist()
    elif isinstance(d.q_geometry, Grid):
        assert isinstance(d.k_geometry, Grid)
        lo = [1 - n for n in d.k_geometry.shape]
        hi = [n - 1 for n in d.q_geometry.shape]
    else:
        base = d.q_start - d.k_start
        if isinstance(base, Tensor):
            if torch.compiler.is_compiling():
                return
            low, high = int(base.min()), int(base.max())
        else:
            low = high = base
        lo, hi = [low - d.k.shape[-2] + 1], [high + d.q.shape[-2] - 1]
    feature.check(lo, hi)


@functools.lru_cache(maxsize=16)
def line_bins(spec: tuple, reach: int, device: str) -> Tensor:
    """The bins of the displacements -reach .. reach on a line: computed once for all steps of a decoder."""
    with torch.inference_mode(False):
        return one_hot_from(spec).index(torch.arange(-reach, reach + 1, device=device)[None, :, None])


def lookup(bins: OneHot, d: Description, axes: tuple[int, ...] | None) -> Tensor:
    """The bin of every displacement, and on grids of the three unplaced cases: [batch or 1, n]."""
    base, (q_len, k_len) = d.q_start - d.k_start, (d.q.shape[-2], d.k.shape[-2])
    known = type(bins) in (Clipped, Buckets, LogBuckets) and q_len and k_len and not torch.compiler.is_compiling()
    if known and not isinstance(d.q_geometry, (Grid, Points)) and isinstance(base, int):
        low, high = base - k_len + 1, base + q_len - 1
        reach = 1 << max(abs(low), abs(high), 1023).bit_length()
        if reach <= BINS:
            return line_bins(bins.spec(), reach, str(d.q.device))[:, low + reach : high + reach + 1]
    index = bins.index(displacements(d, axes))
    if isinstance(d.q_geometry, Grid):
        own = bins.unplaced_index()
        # without bins of their own, unplaced pairs read row bins.dim, which the caller appends as zeros
        cases = own if own is not None else (bins.dim,) * 3
        index = torch.cat([index, torch.tensor(cases, device=index.device)[None]], dim=-1)
    return index


def compact(feature: OneHot | Table, d: Description) -> tuple[Tensor, OneHot]:
    """R by bin, [heads or 1, n, f], with a row of zeros where `lookup` wants one."""
    bins = feature.bins if isinstance(feature, Table) else feature
    if isinstance(feature, Table):
        rows = feature.values if feature.heads is not None else feature.values[None]
    else:
        rows = torch.eye(bins.dim, device=d.q.device, dtype=torch.get_default_dtype())[None]
    return with_zero_row(rows, bins, d), bins


def with_zero_row(rows: Tensor, bins: OneHot, d: Description) -> Tensor:
    if isinstance(d.q_geometry, Grid) and bins.unplaced_index() is None:
        rows = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
    return rows


@functools.lru_cache(maxsize=4)
def waves(
    frequencies: tuple[float, ...], order: str, first: int, count: int, device: str, dtype: torch.dtype
) -> Tensor:
    """Fixed sinusoids of consecutive displacements, [1, count, f]: the same for every layer and every step."""
    return Sinusoid(frequencies, order=order)(torch.arange(first, first + count, device=device)[None, :, None]).to(
        dtype
    )


def tabulate(feature: Feature, d: Description, axes: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """R for every displacement: [batch or 1, heads or 1, n, f]."""
    rows: Tensor | None = None
    if isinstance(feature, Sinusoid) and feature.learned is None and not torch.compiler.is_compiling():
        base = d.q_start - d.k_start
        count = d.q.shape[-2] + d.k.shape[-2] - 1
        if not isinstance(d.q_geometry, Grid) and isinstance(base, int) and 0 < count * feature.dim <= WAVES:
            first = base - d.k.shape[-2] + 1
            rows = waves(feature.fixed, feature.order, first, count, str(d.q.device), dtype)
    if rows is None:
        rows = feature(displacements(d, axes)).to(dtype)  # [b, n, f] or [heads, b, n, f]; sinusoids come in float64
    rows = rows.unsqueeze(1) if feature.heads is None else rows.movedim(0, 1)
    if isinstance(d.q_geometry, Grid):
        alone = feature.unplaced()
        alone = rows.new_zeros(3, feature.dim) if alone is None else alone.to(rows)
        alone = alone.reshape(1, -1, 3, feature.dim).expand(rows.shape[0], rows.shape[1], -1, -1)
        rows = torch.cat([rows, alone], dim=2)
    return rows
