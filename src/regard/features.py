"""R: from a displacement to a feature vector (maths.md, eq. 4 to 9).

R is not a matrix like A but a *table from δ to a vector*. A feature is a small module that maps displacements
[..., axes] to vectors [..., dim], or to [heads, ..., dim] when each head has its own. Position terms read it out.
To add one, subclass Feature and write `forward`; on lines and grids every engine takes it, for the plan tabulates it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def learned(values: Tensor | None, *shape: int, std: float = 0.02) -> Tensor:
    """Given values (kept as they are, with their graph), or a fresh parameter of this shape."""
    if values is None:
        return nn.Parameter(torch.randn(*shape) * std)
    return values


class Feature(nn.Module):
    """Base of all features."""

    dim: int
    axes: int = 1
    #: heads of a per-head R, None for an R that all heads share
    heads: int | None = None
    #: R is constant for δ >= reach and for δ <= -reach; None when it never settles
    reach: int | None = None

    def forward(self, delta: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no forward(delta)")

    def unplaced(self) -> Tensor | None:
        """[(heads,) 3, dim]: R when the query, the key, or both have no place; None for zeros."""
        return None

    def check(self, lo: Sequence[int], hi: Sequence[int]) -> None:
        """Raise unless every displacement from lo to hi (inclusive, per axis) has a row."""

    def keep(self, name: str, values: Tensor | None, *shape: int) -> None:
        """Store a learned tensor: a parameter when new or given as one, else a buffer."""
        values = learned(values, *shape)
        if isinstance(values, nn.Parameter):
            self.register_parameter(name, values)
        else:
            self.register_buffer(name, values)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"

    def describe(self) -> str:
        """One line for the plan."""
        return f"{type(self).__name__}({self.extra_repr()})"


class Constant(Feature):
    """R = 1 whatever the displacement: what is left is a bias per query or per key (Transformer-XL's first)."""

    dim = 1
    axes = 0
    reach = 0

    def forward(self, delta: Tensor) -> Tensor:
        return torch.ones((*delta.shape[:-1], 1), dtype=torch.get_default_dtype(), device=delta.device)

    def unplaced(self) -> Tensor | None:
        return torch.ones(3, 1)

    def extra_repr(self) -> str:
        return ""


class OneHot(Feature):
    """Features that are an index: δ falls into one of `dim` bins, R is the unit vector of that bin (eq. 5)."""

    #: no two displacements share a bin
    injective = False

    def index(self, delta: Tensor) -> Tensor:
        """Displacements [..., axes] to bins [...]."""
        raise TypeError(f"{type(self).__name__} defines no index(delta)")

    def unplaced_index(self) -> tuple[int, int, int] | None:
        """Bins for: query without a place, key without, both."""
        return None

    def forward(self, delta: Tensor) -> Tensor:
        return nn.functional.one_hot(self.index(delta), self.dim).to(torch.get_default_dtype())

    def unplaced(self) -> Tensor | None:
        index = self.unplaced_index()
        return None if index is None else torch.eye(self.dim)[list(index)]

    def spec(self) -> tuple:
        """Plain data from which `one_hot_from` makes the same index map again."""
        raise TypeError(f"{type(self).__name__} has no spec: it works on lines and grids only")


class Clipped(OneHot):
    """Each displacement from -right to left is a bin of its own; what lies beyond falls into the last (Shaw).

    `Clipped(8)` keeps 8 on either side; `Clipped(64, 8)` 64 keys before the query and 8 after it.
    """

    def __init__(self, left: int, right: int | None = None):
        super().__init__()
        right = left if right is None else right
        if any(not isinstance(n, int) or n < 0 for n in (left, right)):
            raise ValueError(f"clip: expected integers >= 0, found {left!r} and {right!r}")
        self.left, self.right = left, right
        self.dim, self.reach = left + right + 1, max(left, right)

    def index(self, delta: Tensor) -> Tensor:
        return delta[..., 0].long().clamp(-self.right, self.left) + self.right

    def spec(self) -> tuple:
        return ("Clipped", self.left, self.right)

    def extra_repr(self) -> str:
        return str(self.left) if self.left == self.right else f"{self.left}, {self.right}"


class Buckets(OneHot):
    """T5's logarithmic buckets: exact for small distances, wider and wider up to max_distance (eq. 6)."""

    def __init__(self, count: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__()
        exact = count // 2 // (2 if bidirectional else 1)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"count, max_distance: expected count >= {4 if bidirectional else 2} and max_distance > {exact} "
                f"(its exact buckets), found {count} and {max_distance}"
            )
        self.count, self.max_distance, self.bidirectional = count, max_distance, bidirectional
        self.dim, self.reach = count, max_distance

    def index(self, delta: Tensor) -> Tensor:
        away = -delta[..., 0].long()  # the published formula counts key minus query
        count, base = self.count, torch.zeros_like(away)
        if self.bidirectional:
            count //= 2
            base, distance = (away > 0).long() * count, away.abs()
        else:
            distance = (-away).clamp(min=0)
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return base + torch.where(distance < exact, distance, far)

    def spec(self) -> tuple:
        return ("Buckets", self.count, self.max_distance, self.bidirectional)

    def extra_repr(self) -> str:
        return f"{self.count}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class LogBuckets(OneHot):
    """DeBERTa's buckets: signed, exact up to count / 2, then logarithmic up to max_position; 2 * count bins (eq. 7).

    Without max_position every displacement from -count to count - 1 is a bin of its own (DeBERTa v1).
    """

    def __init__(self, count: int = 256, max_position: int | None = 512):
        super().__init__()
        if count < 1 or (max_position is not None and (count < 4 or count % 2 or max_position <= count // 2 + 1)):
            raise ValueError(
                f"count, max_position: expected an even count >= 4 and max_position > count / 2 + 1 "
                f"(or count >= 1 and no max_position), found {count} and {max_position}"
            )
        self.count, self.max_position, self.dim = count, max_position, 2 * count
        self.reach = count if max_position is None else max_position

    def index(self, delta: Tensor) -> Tensor:
        delta, mid = delta[..., 0].long(), self.count // 2
        bucket = delta
        if self.max_position is not None:
            # in float32 throughout, as published: ceil makes one rounding a whole bucket
            size = delta.abs().clamp(min=mid).float()
            span = torch.log(torch.tensor((self.max_position - 1) / mid, dtype=torch.float32, device=delta.device))
            far = torch.ceil(torch.log(size / mid) / span * (mid - 1)) + mid
            bucket = torch.where(delta.abs() <= mid, delta, (far * torch.sign(delta)).long())
        return (bucket + self.count).clamp(0, 2 * self.count - 1)

    def spec(self) -> tuple:
        return ("LogBuckets", self.count, self.max_position)

    def extra_repr(self) -> str:
        return f"{self.count}, max_position={self.max_position}"


class Cells(OneHot):
    """Every displacement on a grid of these extents is a bin of its own, row-major: prod(2 extent - 1) bins (Swin).

    With `unplaced`, three more bins follow for pairs in which the query, the key, or both have no place (BEiT).
    """

    injective = True

    def __init__(self, *extents: int, unplaced: bool = False):
        super().__init__()
        if not extents or any(not isinstance(n, int) or n < 1 for n in extents):
            raise ValueError(f"extents: expected positive integers, one an axis, found {extents}")
        self.extents, self.axes, self.has_unplaced = tuple(extents), len(extents), bool(unplaced)
        self.cells = math.prod(2 * n - 1 for n in extents)
        self.dim = self.cells + (3 if unplaced else 0)

    def index(self, delta: Tensor) -> Tensor:
        flat = torch.zeros_like(delta[..., 0].long())
        for axis, extent in enumerate(self.extents):
            flat = flat * (2 * extent - 1) + delta[..., axis].long() + extent - 1
        return flat

    def unplaced_index(self) -> tuple[int, int, int] | None:
        return (self.cells, self.cells + 1, self.cells + 2) if self.has_unplaced else None

    def check(self, lo: Sequence[int], hi: Sequence[int]) -> None:
        for axis, extent in enumerate(self.extents):
            if lo[axis] <= -extent or hi[axis] >= extent:
                raise ValueError(
                    f"position: {self.describe()} holds displacements {1 - extent} to {extent - 1} on axis {axis}, "
                    f"but the geometry reaches from {lo[axis]} to {hi[axis]}"
                )

    def spec(self) -> tuple:
        return ("Cells", *self.extents)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.extents)) + (", unplaced=True" if self.has_unplaced else "")


def one_hot_from(spec: tuple) -> OneHot:
    """The index map a spec names."""
    kinds = {"Clipped": Clipped, "Buckets": Buckets, "LogBuckets": LogBuckets, "Cells": Cells}
    return kinds[spec[0]](*spec[1:])


class Table(Feature):
    """A learned vector per bin: R = values[bin(δ)] (eq. 8). Bins come from `clip`, from `cells` or from an `index`."""

    values: Tensor

    def __init__(
        self,
        dim: int,
        *,
        clip: int | tuple[int, int] | None = None,
        cells: tuple[int, ...] | None = None,
        index: OneHot | None = None,
        heads: int | None = None,
        values: Tensor | None = None,
    ):
        super().__init__()
        given = [clip is not None, cells is not None, index is not None]
        if sum(given) != 1:
            raise ValueError("Table: give exactly one of clip, cells and index")
        if clip is not None:
            index = Clipped(*clip) if isinstance(clip, tuple) else Clipped(clip)
        elif cells is not None:
            index = Cells(*cells)
        assert index is not None
        self.bins, self.dim, self.heads = index, dim, heads
        self.axes, self.reach = index.axes, index.reach
        shape = (index.dim, dim) if heads is None else (heads, index.dim, dim)
        if values is not None and tuple(values.shape) != shape:
            raise ValueError(f"values: expected shape {shape}, found {tuple(values.shape)}")
        check_finite("values", values)
        self.keep("values", values, *shape)

    def forward(self, delta: Tensor) -> Tensor:
        return self.values[..., self.bins.index(delta), :]

    def unplaced(self) -> Tensor | None:
        index = self.bins.unplaced_index()
        return None if index is None else self.values[..., list(index), :]

    def check(self, lo: Sequence[int], hi: Sequence[int]) -> None:
        self.bins.check(lo, hi)

    def extra_repr(self) -> str:
        return f"{self.bins.describe()}, dim={self.dim}"


class Slope(Feature):
    """R = -|δ|: the farther, the less (ALiBi). On several axes |δ| is the Euclidean distance."""

    dim = 1

    def __init__(self, axes: int = 1):
        super().__init__()
        self.axes = axes

    def forward(self, delta: Tensor) -> Tensor:
        delta = delta.to(torch.promote_types(delta.dtype, torch.get_default_dtype()))
        distance = delta.abs() if self.axes == 1 else torch.linalg.vector_norm(delta, dim=-1, keepdim=True)
        return -distance

    def extra_repr(self) -> str:
        return f"axes={self.axes}" if self.axes > 1 else ""


class Sinusoid(Feature):
    """R = [cos ω0 δ, sin ω0 δ, cos ω1 δ, sin ω1 δ, ...] for any frequencies ω, learned if asked (eq. 4).

    `order` says how the parts lie: "cos_sin" (pairs, as written), "sin_cos" (pairs) or "sin|cos" (all sines first).
    """

    def __init__(self, frequencies: Sequence[float] | Tensor, *, order: str = "cos_sin", learn: bool = False):
        super().__init__()
        if order not in ("cos_sin", "sin_cos", "sin|cos"):
            raise ValueError(f"order: expected 'cos_sin', 'sin_cos' or 'sin|cos', found {order!r}")
        omega = torch.as_tensor(frequencies, dtype=torch.float64)
        if omega.dim() != 1 or not len(omega):
            raise ValueError(f"frequencies: expected a row of numbers, found shape {tuple(omega.shape)}")
        check_finite("frequencies", omega)
        # fixed frequencies are numbers, not a buffer: a model cast to bfloat16 must not round them into other waves
        self.fixed = tuple(omega.tolist())
        self.learned = nn.Parameter(omega.to(torch.get_default_dtype())) if learn else None
        self.order, self.dim = order, 2 * len(omega)

    def forward(self, delta: Tensor) -> Tensor:
        return self.combine(*self.parts(delta))

    @property
    def frequencies(self) -> Tensor:
        return torch.tensor(self.fixed, dtype=torch.float64) if self.learned is None else self.learned

    def parts(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of ω times a place or displacement [..., 1], each [..., frequencies]."""
        angle = place.double() * self.frequencies.to(place.device).double()
        return angle.cos(), angle.sin()

    def combine(self, cos: Tensor, sin: Tensor) -> Tensor:
        """The two parts in this feature's order."""
        if self.order == "sin|cos":
            return torch.cat([sin, cos], dim=-1)
        return torch.stack([cos, sin] if self.order == "cos_sin" else [sin, cos], dim=-1).flatten(-2)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of combine."""
        if self.order == "sin|cos":
            sin, cos = vector.chunk(2, dim=-1)
            return cos, sin
        first, second = vector.unflatten(-1, (-1, 2)).unbind(-1)
        return (first, second) if self.order == "cos_sin" else (second, first)

    @staticmethod
    def geometric(dim: int, base: float = 10000.0) -> Tensor:
        """The transformer's frequencies: base^(-2i/dim), i < dim / 2."""
        return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


class Network(Feature):
    """A small network of δ with one output a head (Swin-v2): bound·sigmoid(W2 relu(W1 x + b1)) (eq. 9).

    x is δ over `extent`, spaced logarithmically: sign(δ) log2(1 + 8 |δ| / extent) / 3. Without `bound`, no sigmoid.
    """

    dim = 1

    def __init__(
        self,
        heads: int,
        *,
        axes: int = 1,
        hidden: int = 512,
        extent: Sequence[float] | float = 1.0,
        bound: float | None = None,
    ):
        super().__init__()
        self.heads, self.axes, self.hidden, self.bound = heads, axes, hidden, bound
        spread = [float(extent)] * axes if isinstance(extent, (int, float)) else [float(e) for e in extent]
        if len(spread) != axes or min(spread) <= 0:
            raise ValueError(f"extent: expected {axes} positive numbers, found {extent}")
        self.extent = tuple(spread)
        self.weight1 = nn.Parameter(torch.randn(hidden, axes) / math.sqrt(axes))
        self.bias1 = nn.Parameter(torch.zeros(hidden))
        self.weight2 = nn.Parameter(torch.randn(heads, hidden) / math.sqrt(hidden))

    def spaced(self, delta: Tensor) -> Tensor:
        """δ [..., axes] as the network sees it."""
        x = delta.to(self.weight1.dtype) * (
            8 / torch.tensor(self.extent, dtype=self.weight1.dtype, device=delta.device)
        )
        return torch.sign(x) * torch.log2(x.abs() + 1) / 3

    def forward(self, delta: Tensor) -> Tensor:
        hidden = torch.relu(self.spaced(delta) @ self.weight1.mT + self.bias1)
        out = hidden @ self.weight2.mT
        if self.bound is not None:
            out = self.bound * torch.sigmoid(out)
        return out.movedim(-1, 0).unsqueeze(-1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, axes={self.axes}, hidden={self.hidden}"


class OnAxis(Feature):
    """A one-axis feature that looks at one axis of δ only."""

    feature: Feature

    def __init__(self, axis: int, feature: Feature):
        super().__init__()
        if feature.axes != 1:
            raise ValueError(f"feature: expected a feature of one axis, found {feature.describe()}")
        if not isinstance(axis, int) or axis < 0:
            raise ValueError(f"axis: expected an axis from 0 on, found {axis!r}")
        self.axis, self.feature = axis, feature
        self.dim, self.heads, self.axes, self.reach = feature.dim, feature.heads, axis + 1, feature.reach

    def forward(self, delta: Tensor) -> Tensor:
        return self.feature(delta[..., self.axis : self.axis + 1])

    def unplaced(self) -> Tensor | None:
        return self.feature.unplaced()

    def check(self, lo: Sequence[int], hi: Sequence[int]) -> None:
        self.feature.check(lo[self.axis : self.axis + 1], hi[self.axis : self.axis + 1])

    def extra_repr(self) -> str:
        return f"{self.axis}, {self.feature.describe()}"


class PerAxis(Feature):
    """The sum of one feature an axis: R(δ) = R_1(δ_1) + R_2(δ_2) + ... (SAM's rows and columns)."""

    def __init__(self, *features: Feature):
        super().__init__()
        if not features or len({(f.dim, f.heads) for f in features}) != 1:
            raise ValueError(
                f"features: expected one an axis, all of one dim, found {[f.describe() for f in features]}"
            )
        self.parts = nn.ModuleList(OnAxis(axis, f) for axis, f in enumerate(features))
        self.dim, self.heads, self.axes = features[0].dim, features[0].heads, len(features)

    def each(self) -> list[OnAxis]:
        """The parts, one an axis."""
        return [part for part in self.parts if isinstance(part, OnAxis)]

    def forward(self, delta: Tensor) -> Tensor:
        return torch.stack([part(delta) for part in self.each()]).sum(0)

    def unplaced(self) -> Tensor | None:
        rows = [row for row in (part.unplaced() for part in self.each()) if row is not None]
        return torch.stack(rows).sum(0) if rows else None

    def check(self, lo: Sequence[int], hi: Sequence[int]) -> None:
        for part in self.each():
            part.check(lo, hi)

    def extra_repr(self) -> str:
        return ", ".join(part.feature.describe() for part in self.each())


def check_finite(name: str, values: Tensor | None) -> None:
    """Refuse NaN and infinity in what a description is made from."""
    if values is not None and not torch.compiler.is_compiling() and not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{name}: expected finite numbers, found {bad} that are NaN or infinite of {values.numel()}")
