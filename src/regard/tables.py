"""Features as tables: R or vᵀR for every displacement a problem meets (the plan's rewrite of enumerable geometries)."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calls import PLAIN, parts_of
from .description import Description
from .features import (
    Buckets,
    Cells,
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
from .normal import BINS, Problem, wide
from .position import Bound, Rotary

#: rows of one-hot products at a time
CHUNK = 8192
#: bins that are told by their `spec`
FIXED = (Clipped, Buckets, LogBuckets, Cells)
#: numbers of a table of sinusoids that is kept, and of a table of bins, on a line and on a grid
WAVES, BINNED, CELLS = 1 << 23, 1 << 20, 1 << 18


@torch.library.custom_op("regard::take", mutates_args=())
def take(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    """values [heads or 1, n, f] at index [b, m]: [b, heads or 1, m, f]. Its gradient has the same bits every time."""
    return values[:, index].movedim(1, 0).contiguous()


def rows_at(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    """The same, without an operator where nobody would see it: an operator costs more than a short table."""
    if torch.compiler.is_compiling():
        return take(values, index, injective)
    if values.requires_grad and torch.is_grad_enabled():
        watched = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack()
        if watched or torch._C._functorch.peek_interpreter_stack() is not None or type(values) not in PLAIN:
            return take(values, index, injective)
        return _Take.apply(values, index, injective)
    if len(index) == 1:
        return values.index_select(1, index[0])[None]
    return values[:, index].movedim(1, 0)


@take.register_fake
def _(values: Tensor, index: Tensor, injective: bool) -> Tensor:
    return values.new_empty(index.shape[0], values.shape[0], index.shape[1], values.shape[2])


class _Take(torch.autograd.Function):
    """`take` for eager training, which takes a third of an operator's time in Python."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, injective: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.injective = values.shape[1], injective
        return values[:, index].movedim(1, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        summed = take_backward if torch.is_grad_enabled() else sums_at  # the operator refuses a gradient of its own
        return summed(grad, index, ctx.rows, ctx.injective), None, None


@torch.library.custom_op("regard::take_backward", mutates_args=())
def take_backward(grad: Tensor, index: Tensor, rows: int, injective: bool) -> Tensor:
    """`sums_at` as an operator."""
    return sums_at(grad, index, rows, injective)


def sums_at(grad: Tensor, index: Tensor, rows: int, injective: bool) -> Tensor:
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
    return grid_displacements(q_shape, k_shape, tuple(range(len(q_shape))) if axes is None else axes, d.q.device)


def grid_displacements(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], axes: tuple[int, ...], device: torch.device | str
) -> Tensor:
    """All displacements on these axes of two grids, row-major: [1, n, axes]."""
    ranges = [torch.arange(1 - k_shape[a], q_shape[a], device=device) for a in axes]
    return torch.cartesian_prod(*ranges).reshape(1, -1, len(ranges))


def check_ranges(d: Description) -> Description:
    """Raise unless every feature has a row for every displacement of the problem."""
    if d.call is not None and d.call.in_range:
        return d
    for term in d.terms:
        inner = term.term if isinstance(term, Bound) else term
        if not isinstance(inner, Rotary) and d.q.shape[-2] and d.k.shape[-2]:
            base, known = d.q_start - d.k_start, None
            if not (torch.compiler.is_compiling() or isinstance(base, Tensor) or isinstance(d.q_geometry, Points)):
                grids = [g.shape if isinstance(g, Grid) else None for g in (d.q_geometry, d.k_geometry)]
                known, key = parts_of(inner), (*grids, d.q.shape[-2], d.k.shape[-2], base)
                if key in known.ranges:
                    continue
            check_range(inner.features, d)
            if known is not None:
                known.remember(known.ranges, key)
    if d.call is not None:
        d.call.in_range = True
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


def constant(maxsize: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Keep what a function of plain arguments makes, the newest `maxsize` of them, for every call and every stream.

    It is finished when it is kept, so that another stream may read it. What is made while a CUDA graph is captured
    belongs to that graph, and is not kept.
    """

    def decorate(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        known: dict[tuple, Tensor] = {}
        lock = threading.Lock()

        @functools.wraps(make)
        def find(*key: Any) -> Tensor:
            found = known.get(key)
            if found is not None:
                return found
            with torch.inference_mode(False), torch.no_grad():
                made = make(*key)
            if made.is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    return made
                torch.cuda.current_stream(made.device).synchronize()
            with lock:
                while len(known) >= maxsize:
                    known.pop(next(iter(known)))
                known[key] = made
            return made

        find.cache_clear = known.clear  # type: ignore[attr-defined]
        return find

    return decorate


@constant(16)
def line_bins(spec: tuple, reach: int, device: torch.device) -> Tensor:
    """The bins of the displacements -reach .. reach on a line: computed once for all steps of a decoder."""
    return one_hot_from(spec).index(torch.arange(-reach, reach + 1, device=device)[None, :, None])


@constant(64)
def line_slice(spec: tuple, first: int, last: int, reach: int, device: torch.device) -> Tensor:
    """Those of the displacements first .. last: [1, n]."""
    return line_bins(spec, reach, device)[:, first + reach : last + reach + 1]


@constant(32)
def grid_bins(
    spec: tuple,
    alone: tuple[int, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    axes: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """The bins of all displacements on some axes of two grids, and of the unplaced cases: the same for every call."""
    index = one_hot_from(spec).index(grid_displacements(*shapes, axes, device))
    # filled, not copied from here: that could not be captured in a graph
    return torch.cat([index, *[index.new_full((1, 1), bin) for bin in alone]], dim=-1)


def line_span(bins: OneHot, d: Description) -> tuple[int, int] | None:
    """The smallest and the largest displacement of d, where its bins may be kept for the next call; else None."""
    base, (q_len, k_len) = d.q_start - d.k_start, (d.q.shape[-2], d.k.shape[-2])
    known = type(bins) in FIXED and q_len and k_len
    if (
        not known
        or torch.compiler.is_compiling()
        or isinstance(d.q_geometry, (Grid, Points))
        or not isinstance(base, int)
    ):
        return None
    return base - k_len + 1, base + q_len - 1


class Kept:
    """Static tables over displacements on a line, kept for the next call: a step of a decoder then makes none.

    What is kept is a copy of the values by bin, and the table made of them for displacements from one power of two to
    another, of which a call takes a slice. A table serves again only if the values are still the same numbers, compared
    one by one: so it is never stale, however and by whom they were changed. Where that costs more than it saves (many
    bins, or a GPU that would have to be waited for), where gradients flow to the values, and in a compiled graph,
    nothing is kept. The least recently used go first.
    """

    #: values that are compared, numbers of one table, numbers of all tables
    values, table, most = 1 << 13, 1 << 20, 1 << 23

    def __init__(self) -> None:
        self.tables: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.numbers = 0
        self.lock = threading.Lock()

    def find(self, values: Tensor, given: Tensor, bins: OneHot, d: Description) -> Tensor | None:
        """The table [1, heads or 1, n] of values [heads or 1, bins]; None where it is not to be kept.

        Where they came from (`given`) only tells tables apart that are used in turn, as those of layers are.
        """
        if values.device.type != "cpu" or values.numel() > self.values or type(bins) is Cells:
            return None
        span = line_span(bins, d)
        if span is None:
            return None
        if (values.requires_grad and torch.is_grad_enabled()) or type(values) not in (Tensor, torch.nn.Parameter):
            return None
        first, last = -_power(-span[0]), _power(span[1])
        if len(values) * (last - first + 1) > self.table:
            return None
        key = given.data_ptr(), bins.spec(), values.shape, values.dtype, first, last
        with self.lock:
            known = self.tables.pop(key, None)
            if known is None or not torch.equal(known[0], values):
                self.numbers -= 0 if known is None else known[1].numel()
                known = self._make(values, bins, first, last)
                self.numbers += known[1].numel()
            self.tables[key] = known
            while self.numbers > self.most:
                self.numbers -= self.tables.pop(next(iter(self.tables)))[1].numel()
        return known[1][:, :, span[0] - first : span[1] - first + 1]

    def _make(self, values: Tensor, bins: OneHot, first: int, last: int) -> tuple[Tensor, Tensor]:
        reach = max(-first, last)
        with torch.inference_mode(False), torch.no_grad():
            index = line_bins(bins.spec(), reach, values.device)[0, first + reach : last + reach + 1]
            return values.detach().clone(), values.detach().index_select(1, index)[None]


kept = Kept()


def _power(x: int) -> int:
    """The power of two above x, at least 1024; 0 for what is below 0."""
    return 0 if x <= 0 else 1 << max(x, 1023).bit_length()


def lookup(bins: OneHot, d: Description, axes: tuple[int, ...] | None) -> Tensor:
    """The bin of every displacement, and on grids of the three unplaced cases: [batch or 1, n]."""
    known = kept_bins(bins, d, axes)
    if known is not None:
        return known
    index = bins.index(displacements(d, axes))
    if not isinstance(d.q_geometry, Grid):
        return index
    return torch.cat([index, torch.tensor(_alone(bins), device=index.device)[None]], dim=-1)


def kept_bins(bins: OneHot, d: Description, axes: tuple[int, ...] | None) -> Tensor | None:
    """The same, where it is kept for all calls; else None."""
    span = line_span(bins, d)
    if span is not None:
        reach = 1 << max(abs(span[0]), abs(span[1]), 1023).bit_length()
        return line_slice(bins.spec(), *span, reach, d.q.device) if reach <= BINNED else None
    if type(bins) in FIXED and isinstance(d.q_geometry, Grid) and not torch.compiler.is_compiling():
        shapes = d.q_geometry.shape, d.k_geometry.shape  # type: ignore[attr-defined]
        chosen = tuple(range(len(shapes[0]))) if axes is None else axes
        if math.prod(shapes[0][a] + shapes[1][a] - 1 for a in chosen) <= CELLS:
            return grid_bins(bins.spec(), _alone(bins), shapes, chosen, d.q.device)
    return None


def _alone(bins: OneHot) -> tuple[int, ...]:
    """The bins of unplaced cases. Where there are none, they read row bins.dim, which the caller appends as zeros."""
    return bins.unplaced_index() or (bins.dim,) * 3


def compact(feature: OneHot | Table, d: Description) -> tuple[Tensor, OneHot]:
    """R by bin, [heads or 1, n, f]. On a grid `lookup` may want a row of zeros after it."""
    bins = feature.bins if isinstance(feature, Table) else feature
    if isinstance(feature, Table):
        rows = feature.values if feature.heads is not None else feature.values[None]
    else:
        rows = torch.eye(bins.dim, device=d.q.device, dtype=torch.get_default_dtype())[None]
    return rows, bins


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


def spread(problem: Problem) -> Problem:
    """The same problem with every table by displacement, for engines that do not read bins; differentiable."""
    operands, pieces = list(problem.operands), []
    for piece in problem.form.pieces:
        if BINS in piece.config:
            slot, index = piece.slots[-1], operands[piece.lookup][:, 0]
            rows = operands[slot].unsqueeze(-1) if piece.kind == "table" else operands[slot]
            rows = rows if piece.space == ("line",) else torch.nn.functional.pad(rows, (0, 0, 0, 1))
            piece = piece._replace(config=piece.config[:1])
            if piece.kind == "table":
                rows = rows_at(rows[0].to(wide(problem.q.dtype)), index, piece.config[0]).squeeze(-1)
                piece = piece._replace(lookup=-1, config=())
            operands[slot] = rows
        pieces.append(piece)
    return problem._replace(form=problem.form._replace(pieces=tuple(pieces)), operands=operands)
