"""From a description to the normal form: exact algebra only, each rewrite a function of its own.

| rewrite | what it does |
|---|---|
| cosine | normalise q and k |
| euclidean | a dot product, a bias per key and one per query, after moving the mean key to the origin |
| rotary | turn q and k |
| static | vᵀR as a table over displacements, whatever the features; slopes stay arithmetic |
| content terms | u = (x + c) and R, with W folded into the smaller side; one piece an axis; bins kept compact |
| points | index maps evaluated pair by pair; a sinusoid becomes a dot product by the addition theorem |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .description import Description
from .features import Constant, Feature, Network, OnAxis, OneHot, PerAxis, Sinusoid, Slope, Table
from .geometry import Geometry, Grid, Points
from .masks import Mask, _And, _Causal, _Dense, _Keys, _Lengths, _Nearest, _Not, _Or, _Same, _Window
from .normal import BINS, Form, Kept, Piece, Problem, each_head, wide
from .position import Bound, FromKey, FromQuery, Rotary, Static, Term, unbind
from .scores import Cosine, Dot, Euclidean, InverseDistance
from .tables import compact, kept, kept_bins, lookup, rows_at, tabulate, with_zero_row


def lower(d: Description, bins: bool = False) -> Problem:
    """The problem an engine is given. `bins`: tables are kept by bins, for an engine that reads them so.

    Calls like one another have the same form; where every operand was said how to make again, only those are made.
    """
    known: Lowered | None = None if d.call is None else d.call.lowered.get(bins)
    if known is not None:
        return known.problem(d)
    lowering = _Lowering(d, bins)
    problem = lowering.problem()
    if d.call is None or len(lowering.again) != len(problem.operands) or any(isinstance(t, Rotary) for t in d.terms):
        return problem
    if d.q.is_cuda and torch.cuda.is_current_stream_capturing():  # what a graph makes belongs to it
        return problem
    form = Kept(*problem.form)
    d.call.lowered[bins] = Lowered(form, tuple(lowering.again), problem.starts, problem.scale)
    return problem._replace(form=form)


class Lowered(NamedTuple):
    """What became of a description, without its tensors: how each operand is made of those of another like it."""

    form: Form
    operands: tuple[Callable[[Any], Tensor], ...]
    starts: tuple[int, int]
    scale: float

    def problem(self, d: Description) -> Problem:
        return Problem(self.form, d.q, d.k, [make(d) for make in self.operands], self.starts, self.scale, None, d)


class _Lowering:
    """Collects operands and pieces while the description is walked once."""

    def __init__(self, d: Description, bins: bool):
        self.d, self.bins = d, bins
        self.operands: list[Tensor] = []
        self.pieces: list[Piece] = []
        self.rewrites: list[str] = []
        self.names: list[str] = []
        self.wide = wide(d.q.dtype)
        self.again: list[Callable[[Any], Tensor]] = []

    def add(self, x: Tensor, again: Callable[[Any], Tensor] | None = None) -> int:
        """Take in an operand. `again` makes it of another description like this one, and holds none of its tensors."""
        self.operands.append(x)
        self.again += [] if again is None else [again]
        return len(self.operands) - 1

    def add_bins(self, bins: OneHot, axes: tuple[int, ...] | None) -> int:
        """Take in the bin of every displacement: the same numbers for every description like this one, if kept."""
        known = kept_bins(bins, self.d, axes)
        if known is None:
            return self.add(lookup(bins, self.d, axes)[:, None])
        mine = known[:, None]
        return self.add(mine, lambda d: mine)

    def problem(self) -> Problem:
        d = self.d
        q, k, plain = d.q, d.k, None
        for term in d.terms:
            if isinstance(term, Rotary):
                plain = (q, k)
                q, k = rotary(term, d)
                self.rewrites.append(f"{term.describe()}: q and k turned by their places")
        q, k, content, number, scale = self.content(q, k)
        for n, term in enumerate(d.terms):
            if not isinstance(term, Rotary):
                self.term(term, n)
        starts = [self.add(start[:, None]) if isinstance(start, Tensor) else -1 for start in (d.q_start, d.k_start)]
        form = Form(
            content=content,
            pieces=tuple(self.pieces),
            mask=None if d.mask is None else mask_form(d.mask, self.operands, None),
            q_geometry=self.geometry(d.q_geometry, "q"),
            k_geometry=self.geometry(d.k_geometry, "k"),
            scale=scale,
            softcap=d.softcap,
            sink=-1 if d.sink is None else self.add(d.sink[None].expand(1, d.q.shape[1])),
            dropout=d.dropout,
            seeds=-1 if d.seed is None else self.add(self.seeds(d.seed)),
            q_start=starts[0],
            k_start=starts[1],
            rewrites=tuple(self.rewrites),
        )
        ints = [0 if isinstance(start, Tensor) else start for start in (d.q_start, d.k_start)]
        return Problem(form, q, k, self.operands, (ints[0], ints[1]), number, plain, d)

    def seeds(self, seed: Tensor) -> Tensor:
        batch, heads = self.d.q.shape[:2]
        return seed + torch.arange(batch * heads, device=seed.device).reshape(batch, heads)

    def geometry(self, geometry: Geometry, side: str) -> tuple:
        if isinstance(geometry, Grid):
            return ("grid", geometry.shape, geometry.unplaced)
        if isinstance(geometry, Points):
            at = self.d.positions(side)
            coords, placed = geometry.coordinates(at), geometry.placed(at)
            slot = -1 if placed is None else self.add(placed.reshape(-1, 1, placed.shape[-1]))
            return ("points", geometry.axes, self.add(coords.reshape(-1, 1, *coords.shape[-2:])), slot)
        return ("line",)

    # content

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, tuple, float, int]:
        d = self.d
        number = 1.0 if isinstance(d.scale, Tensor) else d.scale
        scale = self.add(d.scale) if isinstance(d.scale, Tensor) else -1
        if isinstance(d.score, Cosine):
            q, k = cosine(q, k)
            self.rewrites.append("Cosine: q and k normalised")
        elif isinstance(d.score, Euclidean):
            number = number / d.score.sigma**2
            if not well_centred(q, k, number):
                return q, k, ("squared",), number, scale
            q, k, row, column = euclidean(q, k)
            self.rewrites.append("Euclidean: a dot product and two biases, from the mean key")
            for bias in (row.unsqueeze(-1), column.unsqueeze(-2)):
                self.pieces.append(Piece("vector", "content", slots=(self.add(number * bias),), gate=scale))
        elif isinstance(d.score, InverseDistance):
            return q, k, ("distance", d.score.power), number, scale
        else:
            assert isinstance(d.score, Dot)
        return q, k, ("dot",), number, scale

    # terms

    def term(self, term: Term | Bound, n: int) -> None:
        inner, bound = unbind(term)
        gate = self.add(bound.gate) if bound and bound.gate is not None else -1
        label = self.label(term.describe())
        if isinstance(inner, Static):
            self.static(inner, label, gate, n)
        else:
            assert isinstance(inner, (FromQuery, FromKey))
            x = None if bound is None else (bound.query if isinstance(inner, FromQuery) else bound.key)
            self.from_content(inner, x, label, gate)

    def label(self, name: str) -> str:
        """The name of a term, with a number when it comes again."""
        self.names.append(name)
        count = self.names.count(name)
        return name if count == 1 else f"{name} #{count}"

    def static(self, term: Static, label: str, gate: int, n: int) -> None:
        d, feature, dtype, wide = self.d, term.features, self.d.q.dtype, self.wide
        if self.bins and isinstance(feature, (OneHot, Table)) and not isinstance(d.q_geometry, Points):
            bias, index = bias_by_bin(term, dtype)
            slots = (self.add(bias[None], lambda d: bias_by_bin(d.terms[n], dtype)[0][None]),)
            bins = self.add_bins(index, None)
            config = index.injective, BINS
            self.pieces.append(Piece("table", label, self.space(None), slots, gate, bins, feature.reach, config))
            return
        readout = scaled_readout(term, self.wide)  # [heads or 1, f]
        if isinstance(feature, Constant):
            self.pieces.append(Piece("vector", label, slots=(self.add(readout[None, :, :, None]),), gate=gate))
        elif isinstance(d.q_geometry, Points):
            for part, axis in _by_axis(feature):
                self.on_points(part, axis, label, gate, "table", readout=readout)
        elif isinstance(feature, Slope) and not isinstance(d.q_geometry, Grid):
            slot = self.add(readout[None, :, :, None], lambda d: scaled_readout(d.terms[n], wide)[None, :, :, None])
            self.pieces.append(Piece("slope", label, ("line",), (slot,), gate))
        else:
            slot = self.add(static_table(term, d, self.wide))
            self.pieces.append(Piece("table", label, self.space(None), (slot,), gate, reach=feature.reach))

    def space(self, axes: tuple[int, ...] | None) -> tuple:
        """How a pair becomes an index, on a line or on these axes of a grid (None: on all)."""
        geometry = self.d.q_geometry
        return ("grid", axes or tuple(range(geometry.axes))) if isinstance(geometry, Grid) else ("line",)

    def from_content(self, term: FromQuery | FromKey, x: Tensor | None, label: str, gate: int) -> None:
        d, side = self.d, "query" if isinstance(term, FromQuery) else "key"
        if x is None:
            x = d.q if side == "query" else d.k
        heads = d.q.shape[1]
        if term.offset is not None:
            x = (x if len(term.offset) == 1 else each_head(x, heads)) + term.offset.to(x.dtype)[:, None]
        if isinstance(term.features, Constant):
            vector = fold(x, term.weight, None, heads, term.scale)[0]  # [b, h, length, 1]
            slot = self.add(vector if side == "query" else vector.mT)
            self.pieces.append(Piece("vector", label, slots=(slot,), gate=gate))
            return
        for part, axis in _by_axis(term.features):
            if isinstance(d.q_geometry, Points):
                self.on_points(part, axis, label, gate, side, x=x, term=term)
                continue
            axes = None if axis is None else (axis,)
            space = self.space(axes)
            bins = -1
            config: tuple = ()
            if isinstance(part, (OneHot, Table)):
                rows, index = compact(part, d)
                bins = self.add_bins(index, axes)
                rows = rows[None] if self.bins else with_zero_row(rows, index, d)[None]
                config = (index.injective, BINS) if self.bins else (index.injective,)
            else:
                rows = tabulate(part, d, axes, self.wide)
                both = mirrored(part, d, term.weight, rows) if space == ("line",) else None
                if both is not None:
                    slots = self.add(x), self.add(both * term.scale)
                    self.pieces.append(Piece(side, label, space, slots, gate, bins, part.reach, config))
                    continue
            u, rows = fold(x, term.weight, rows, heads, term.scale)
            known = [n for n, y in enumerate(self.operands) if y is u] if self.bins else []
            # axes that read the same query share it
            own = {"query": (d.q, _query), "key": (d.k, _key)}[side]
            mine = known[0] if known else self.add(u, own[1] if u is own[0] else None)
            again = None
            if self.bins and isinstance(part, Table) and term.weight is None:
                again = _rows_again(weakref.ref(part), term.scale)
            self.pieces.append(Piece(side, label, space, (mine, self.add(rows, again)), gate, bins, part.reach, config))

    def on_points(
        self,
        part: Feature,
        axis: int | None,
        label: str,
        gate: int,
        kind: str,
        *,
        readout: Tensor | None = None,
        x: Tensor | None = None,
        term: FromQuery | FromKey | None = None,
    ) -> None:
        """One feature between arbitrary coordinates: nothing to tabulate, so it is evaluated pair by pair."""
        d, heads = self.d, self.d.q.shape[1]
        if isinstance(part, (OneHot, Table)):
            index = part.bins if isinstance(part, Table) else part
            if d.q_geometry.coordinates(d.positions("q")).is_floating_point():
                raise ValueError(f"geometry: {index.describe()} needs whole coordinates, found real ones")
            space = ("points", index.spec(), axis, 1)
            rows = part.values if isinstance(part, Table) else torch.eye(part.dim, device=d.q.device)
            rows = rows if rows.dim() == 3 else rows[None]  # [heads or 1, n, f]
            alone = index.unplaced_index()
            ends = rows[:, list(alone)] if alone is not None else torch.zeros_like(rows[:, :1]).expand(-1, 3, -1)
            rows = torch.cat([rows if alone is None else rows[:, : min(alone)], ends], dim=1)
            if readout is not None:
                table = (rows.to(self.wide) * readout[:, None]).sum(-1)
                self.pieces.append(Piece("table", label, space, (self.add(table[None]),), gate))
            else:
                assert x is not None and term is not None
                u, rows = fold(x, term.weight, rows[None], heads, term.scale)
                self.pieces.append(Piece(kind, label, space, (self.add(u), self.add(rows)), gate))
        elif isinstance(part, Sinusoid):
            if readout is not None:
                read, side = readout[None, :, None], "query"
            else:
                assert x is not None and term is not None
                read, side = fold(x, term.weight, None, heads, term.scale)[0], kind
            a, b = addition_theorem(part, read, side, d, axis or 0)
            self.pieces.append(Piece("dot", label, slots=(self.add(a), self.add(b)), gate=gate))
        elif isinstance(part, Slope) and readout is not None:
            space = ("points", (), axis, 1)
            self.pieces.append(Piece("slope", label, space, (self.add(readout[None, :, :, None]),), gate))
        elif isinstance(part, Network) and readout is not None:
            config = (part.extent, part.bound)
            slots = tuple(
                self.add(w)
                for w in (part.weight1[None, None], part.bias1[None, None], part.weight2[None].unsqueeze(-1))
            )
            outer = self.add(readout[None, :, :, None])
            self.pieces.append(Piece("network", label, ("points", (), axis, 1), (*slots, outer), gate, config=config))
        else:
            raise ValueError(
                f"position: {part.describe()} cannot be evaluated between Points; use bins, a sinusoid, a slope or a "
                "Network read by Static, or a Line or Grid"
            )


def _query(d: Description) -> Tensor:
    return d.q


def _key(d: Description) -> Tensor:
    return d.k


def _rows_again(part: weakref.ref[Table], scale: float) -> Callable[[Any], Tensor]:
    """The rows of a table, by bins, for calls like one: terms that are alike hold the very same parts."""

    def make(d: Description) -> Tensor:
        return _times(compact(part(), d)[0][None], scale)  # type: ignore[arg-type]

    return make


def cosine(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised q and k, whose dot product is the cosine."""
    dtype = wide(q.dtype)
    unit = [torch.nn.functional.normalize(x.to(dtype), dim=-1).to(q.dtype) for x in (q, k)]
    return unit[0], unit[1]


def euclidean(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-|q - k|^2 / 2 as q'·k' + row + column, after moving the mean key to the origin (else float32 cancels badly).

    The mean is of finite keys and detached: the score does not depend on the origin, so no gradient is lost.
    """
    dtype = wide(q.dtype)
    group = q.shape[1] // k.shape[1]
    still = k.detach().double()
    centre = torch.where(still.isfinite(), still, 0.0).sum(-2, keepdim=True) / max(k.shape[-2], 1)
    k = (k.double() - centre).to(dtype)
    q = (q.double() - (centre if group == 1 else centre.repeat_interleave(group, dim=1))).to(dtype)
    row, column = (-0.5 * x.double().square().sum(-1) for x in (q, k))  # of the rounded vectors, rounded once
    far = column == -torch.inf  # an infinitely far key: its dot products would be inf - inf
    k = k.masked_fill(far.unsqueeze(-1), 0.0)
    column = column if group == 1 else column.repeat_interleave(group, dim=1)
    return q, k, row.to(dtype), column.to(dtype)


def well_centred(q: Tensor, k: Tensor, number: float) -> bool:
    """The rewrite of `euclidean` loses no more than a hundredth of a logit: keys far apart would cancel badly."""
    if torch.compiler.is_compiling() or not k.numel():
        return True
    dtype = wide(q.dtype)
    with torch.no_grad():
        centre = k.double().mean(-2, keepdim=True)
        most = (k.double() - centre).square().sum(-1)
        lost = abs(number) * torch.finfo(dtype).eps * most[most.isfinite()].amax() if bool(most.isfinite().any()) else 0
    return bool(lost < 0.01)


def rotary(term: Rotary, d: Description) -> tuple[Tensor, Tensor]:
    """q and k turned by their places."""
    turned = []
    for x, side, geometry in ((d.q, "q", d.q_geometry), (d.k, "k", d.k_geometry)):
        at = d.positions(side)
        place, placed = geometry.coordinates(at), geometry.placed(at)
        turned.append(term.rotate(x, place, placed))
    return turned[0], turned[1]


def scaled_readout(term: Static, wide: torch.dtype) -> Tensor:
    """v of a static term, times its scale: [heads or 1, f]."""
    readout = term.readout.to(wide)
    return readout if term.scale == 1.0 else readout * term.scale


def bias_by_bin(term: Static, dtype: torch.dtype) -> tuple[Tensor, OneHot]:
    """vᵀR for every bin, [heads or 1, bins], and the bins. A parameter that is that already is left as it is."""
    feature = term.features
    if isinstance(feature, Table):
        values = feature.values if feature.heads is not None else feature.values[None]
        return (values.to(wide(dtype)) * scaled_readout(term, wide(dtype))[:, None]).sum(-1), feature.bins
    assert isinstance(feature, OneHot)
    return (term.readout if term.scale == 1.0 else scaled_readout(term, wide(dtype))), feature


def static_table(term: Static, d: Description, wide: torch.dtype) -> Tensor:
    """vᵀR for every displacement: [batch or 1, heads or 1, n]. One-hot features never make their one-hots."""
    feature = term.features
    if isinstance(feature, (OneHot, Table)):
        bias, bins = bias_by_bin(term, wide)
        bias = bias.to(wide)
        if isinstance(feature, OneHot):
            known = kept.find(bias, term.readout, bins, d)
            if known is not None:
                return known
        bias = with_zero_row(bias.unsqueeze(-1), bins, d)
        return rows_at(bias, lookup(bins, d, None), bins.injective).squeeze(-1)
    rows, readout = tabulate(feature, d, None, wide), scaled_readout(term, wide)  # rows [b, heads or 1, n, f]
    return (rows * readout[None, :, None]).sum(-1)


def fold(x: Tensor, weight: Tensor | None, rows: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """xᵀ W R as u and rows, W in whichever side comes out smaller. x [b, h, length, d], rows [b, h, n, f]."""
    if weight is None:
        return (_times(x, scale), x) if rows is None else (x, _times(rows, scale))
    d, f = weight.shape[1:]
    if rows is not None and f > d:
        wide = torch.promote_types(rows.dtype, weight.dtype)
        return x, rows.to(wide) @ (weight.to(wide).mT * scale)
    u = (x if len(weight) == 1 else each_head(x, heads)) @ weight.to(x.dtype)
    if rows is None:
        return _times(u, scale), u
    return u, _times(rows, scale)


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def mirrored(feature: Feature, d: Description, weight: Tensor | None, rows: Tensor) -> Tensor | None:
    """R Wᵀ of a sinusoid for displacements on both sides of 0, by half the work: cos is even and sin is odd.

    None where that does not help. rows is R, [1, 1, n, f], from the smallest displacement on.
    """
    start = d.q_start - d.k_start
    if (
        weight is None
        or not isinstance(feature, Sinusoid)
        or not isinstance(start, int)
        or torch.compiler.is_compiling()
    ):
        return None
    below, above = d.k.shape[-2] - 1 - start, d.q.shape[-2] - 1 + start  # how far displacements go on either side
    if weight.shape[2] <= weight.shape[1] or rows.shape[:2] != (1, 1) or min(below, above) < 64:
        return None
    less = min(below, above)
    side = rows[:, :, below:] if above >= below else rows[:, :, : below + 1].flip(2)  # from 0 on, away from it
    on_cos, on_sin = feature.split(weight.to(rows.dtype))
    cos, sin = feature.split(side)
    even, odd = cos @ on_cos.mT, sin @ on_sin.mT  # [1, heads, far + 1, d]
    other = (even - odd)[:, :, 1 : less + 1].flip(2)
    found = torch.cat([other, even + odd], dim=2)
    return found if above >= below else found.flip(2)


def addition_theorem(feature: Sinusoid, read: Tensor, side: str, d: Description, axis: int) -> tuple[Tensor, Tensor]:
    """read · R(p_i - p_j) as <a_i, b_j>: cos(x - y) = cos x cos y + sin x sin y, and so for sin."""
    angles = []
    for name, geometry in (("q", d.q_geometry), ("k", d.k_geometry)):
        at = d.positions(name)
        place = geometry.coordinates(at)[..., axis : axis + 1].to(torch.float64)
        cos, sin = feature.parts(place.unsqueeze(-3))
        placed = geometry.placed(at)
        if placed is not None:
            keep = placed[..., None].unsqueeze(-3)
            cos, sin = cos * keep, sin * keep
        angles.append((cos, sin) if cos.dim() == 4 else (cos[None], sin[None]))
    (q_cos, q_sin), (k_cos, k_sin) = angles
    on_cos, on_sin = feature.split(read)
    if side == "query":
        a = torch.cat([on_cos * q_cos + on_sin * q_sin, on_cos * q_sin - on_sin * q_cos], dim=-1)
        b = torch.cat([k_cos, k_sin], dim=-1)
    else:
        a = torch.cat([q_cos, q_sin], dim=-1)
        b = torch.cat([on_cos * k_cos - on_sin * k_sin, on_cos * k_sin + on_sin * k_cos], dim=-1)
    return a, b


def mask_form(mask: Mask, operands: list[Tensor], allowed: tuple | None) -> tuple:
    """A mask as nested tuples and operands. `allowed` is what the masks combined with & already say, for nearest."""

    def add(x: Tensor) -> int:
        operands.append(x)
        return len(operands) - 1

    if isinstance(mask, _And):
        sure = [mask_form(part, operands, allowed) for part in mask.parts() if not part.scored]
        before = tuple(sure) if allowed is None else (allowed, *sure)
        context = None if not before else before[0] if len(before) == 1 else ("and", *before)
        scored = [mask_form(part, operands, context) for part in mask.parts() if part.scored]
        return ("and", *sure, *scored)
    if isinstance(mask, _Or):
        return ("or", *(mask_form(part, operands, allowed) for part in mask.parts()))
    if isinstance(mask, _Not):
        return ("not", mask_form(mask.part, operands, allowed))
    if isinstance(mask, _Causal):
        return ("within", 0, None)
    if isinstance(mask, _Window):
        return ("box" if isinstance(mask.lo, tuple) else "within", mask.lo, mask.hi)
    if isinstance(mask, _Keys):
        return ("range", "k", mask.first, mask.last)
    if isinstance(mask, _Lengths):
        on_keys = ("before", "k", add(mask.count[:, None]))
        return on_keys if mask.queries is None else ("and", on_keys, ("before", "q", add(mask.queries[:, None])))
    if isinstance(mask, _Same):
        return ("same", add(mask.q_ids[:, None]), add(mask.k_ids[:, None]))
    if isinstance(mask, _Dense):
        return ("dense", add(mask.values))
    if isinstance(mask, _Nearest):
        return ("nearest", mask.count, allowed)
    raise TypeError(
        f"mask: {type(mask).__name__} has no normal form; combine the masks of regard.masks, or use dense()"
    )


def _by_axis(feature: Feature) -> list[tuple[Feature, int | None]]:
    """A feature as one-axis parts where it is a sum of such; else itself, on all axes."""
    if isinstance(feature, PerAxis):
        return [(part.feature, part.axis) for part in feature.each()]
    if isinstance(feature, OnAxis):
        return [(feature.feature, feature.axis)]
    return [(feature, None)]
