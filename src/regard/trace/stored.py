"""Descriptions as plain data: what regard's own objects are made of, as JSON and named tensors, and back again.

    said = plain(description, keep)          {"score": {"is": "Dot"}, "terms": [{"is": "Static", ...}], ...}
    A = rebuild(said, q, k, tensor)          the same A, by way of `describe`, which checks all of it

Reading never looks a class up by a name it was given: it finds the name in the table below or refuses. Each field has
a kind, and a value of another kind is refused. A feature that is not in the table (an adapter's, a user's own) is said
as its values, one for each displacement that A meets. What cannot be (a mask of the user's own) is handed to
`keep_own`, which may hold the object itself while it is in memory; no file can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import features, geometry, masks, position, scores
from ..description import Description, describe
from ..matrix import AttentionMatrix
from ..tables import check_ranges

#: takes a tensor in, and says under which name it is kept
Keep = Callable[[Tensor], str]
#: a kept tensor by its name
Find = Callable[[str], Tensor]

#: how deep a description may be nested, how large its whole numbers and how many cells a grid may have
DEEPEST, LARGEST, CELLS = 32, 1 << 53, 1 << 26


class Kind(NamedTuple):
    """How objects of one class are said: their fields and kinds, how they are read, and how they are made again."""

    cls: type
    fields: dict[str, str]
    read: Callable[[Any], dict[str, Any]]
    make: Callable[..., Any]


def _by_name(cls: type, make: Callable[..., Any] | None = None, **fields: str) -> Kind:
    """A class whose fields are its attributes and the arguments it is made with."""
    return Kind(cls, fields, lambda x: {name: getattr(x, name) for name in fields}, make or cls)


def _table(dim: int, bins: features.OneHot, heads: int | None, values: Tensor) -> features.Table:
    return features.Table(dim, index=bins, heads=heads, values=values)


def _sinusoid(fixed: list[float], order: str, learned: Tensor | None) -> features.Sinusoid:
    made = features.Sinusoid(fixed, order=order)
    if learned is not None:
        if learned.shape != (len(fixed),) or not learned.is_floating_point():
            raise ValueError(f"learned: expected {len(fixed)} frequencies, found {learned.dtype} {list(learned.shape)}")
        made.learned = nn.Parameter(learned, requires_grad=False)
    return made


def _network(extent: list[float], bound: float | None, weight1: Tensor, bias1: Tensor, weight2: Tensor) -> Any:
    if weight1.dim() != 2 or weight2.dim() != 2 or not len(weight2) or bias1.shape != weight1.shape[:1]:
        raise ValueError("Network: its weights do not go together")
    if weight2.shape[1] != len(weight1) or not all(w.is_floating_point() for w in (weight1, bias1, weight2)):
        raise ValueError("Network: its weights do not go together")
    hidden, axes = weight1.shape
    with torch.device("meta"):  # no random numbers are drawn, and no memory is asked for
        made = features.Network(len(weight2), axes=axes, hidden=hidden, extent=extent, bound=bound)
    for name, weight in (("weight1", weight1), ("bias1", bias1), ("weight2", weight2)):
        setattr(made, name, nn.Parameter(weight, requires_grad=False))
    return made


def _rotary(dim: int | None, base: float, frequencies: list[float] | None, interleaved: bool) -> position.Rotary:
    own = None if frequencies is None else torch.tensor(frequencies, dtype=torch.float64)
    return position.Rotary(dim, base=base, frequencies=own, interleaved=interleaved)


def _static(features: features.Feature, readout: Tensor, scale: float) -> position.Static:
    return position.Static(features, readout=readout, scale=scale)


def _grid(shape: list[int], unplaced: int) -> geometry.Grid:
    if math.prod(max(n, 1) for n in shape) > CELLS:
        raise ValueError(f"Grid: expected at most {CELLS} cells, found {shape}")
    return geometry.Grid(*shape, unplaced=unplaced)


def _window(lo: Any, hi: Any, name: str) -> masks.Mask:
    lo, hi = (tuple(x) if isinstance(x, list) else x for x in (lo, hi))
    if isinstance(lo, tuple) != isinstance(hi, tuple) or (isinstance(lo, tuple) and len(lo) != len(hi)):
        raise ValueError(f"window: expected two bounds of one kind, found {lo} and {hi}")
    return masks._Window(lo, hi, name)


def _same(q_ids: Tensor, k_ids: Tensor, name: str) -> masks.Mask:
    return masks._Same(masks._id_rows("ids", q_ids), masks._id_rows("keys", k_ids), name)


def _parts(cls: type) -> Kind:
    def make(parts: list[masks.Mask]) -> masks.Mask:
        if not parts:
            raise ValueError("mask: expected something to combine, found nothing")
        return cls(tuple(parts))

    return Kind(cls, {"parts": "masks"}, lambda x: {"parts": list(x.parts())}, make)


def _bound(term: position.Term, gate: Tensor | None, query: Tensor | None, key: Tensor | None) -> position.Bound:
    return position.Bound(term, gate=gate, query=query, key=key)


_FROM = {"features": "feature", "weight": "heads0?", "offset": "heads0?", "scale": "number"}

#: Every class a description may be made of. "heads0" is a tensor whose axis 0 has one entry a head, or one for all.
KINDS: dict[str, Kind] = {
    kind.cls.__name__: kind
    for kind in (
        _by_name(scores.Dot),
        _by_name(scores.Cosine),
        _by_name(scores.Euclidean, sigma="number"),
        _by_name(scores.InverseDistance, power="number"),
        _by_name(geometry.Line),
        _by_name(geometry.Grid, _grid, shape="wholes", unplaced="whole"),
        Kind(
            geometry.Points,
            {"coords": "tensor", "placed": "tensor?"},
            lambda x: {"coords": x.coords, "placed": x.has_place},
            geometry.Points,
        ),
        _by_name(features.Constant),
        _by_name(features.Clipped, left="whole", right="whole"),
        _by_name(features.Buckets, count="whole", max_distance="whole", bidirectional="flag"),
        _by_name(features.LogBuckets, count="whole", max_position="whole?"),
        Kind(
            features.Cells,
            {"extents": "wholes", "unplaced": "flag"},
            lambda x: {"extents": x.extents, "unplaced": x.has_unplaced},
            lambda extents, unplaced: features.Cells(*extents, unplaced=unplaced),
        ),
        _by_name(features.Table, _table, dim="whole", bins="feature", heads="whole?", values="tensor"),
        _by_name(features.Slope, axes="whole"),
        _by_name(features.Sinusoid, _sinusoid, fixed="numbers", order="text", learned="tensor?"),
        _by_name(
            features.Network, _network,
            extent="numbers", bound="number?", weight1="tensor", bias1="tensor", weight2="heads0",
        ),
        _by_name(features.OnAxis, axis="whole", feature="feature"),
        Kind(
            features.PerAxis,
            {"each": "features"},
            lambda x: {"each": [part.feature for part in x.each()]},
            lambda each: features.PerAxis(*each),
        ),
        _by_name(position.Static, _static, features="feature", readout="heads0", scale="number"),
        _by_name(position.FromQuery, None, **_FROM),
        _by_name(position.FromKey, None, **_FROM),
        _by_name(
            position.Rotary, _rotary, dim="whole?", base="number", frequencies="numbers?", interleaved="flag"
        ),
        _by_name(position.Bound, _bound, term="term", gate="heads1?", query="heads1?", key="heads1?"),
        Kind(type(masks.causal), {}, lambda x: {}, lambda: masks.causal),
        _by_name(masks._Window, _window, lo="bounds", hi="bounds", name="text"),
        _by_name(masks._Keys, masks.keys, first="whole", last="whole"),
        _by_name(masks._Lengths, masks.lengths, count="tensor", queries="tensor?"),
        _by_name(masks._Same, _same, q_ids="tensor", k_ids="tensor", name="text"),
        _by_name(masks._Nearest, masks.nearest, count="whole"),
        _by_name(masks._Dense, masks.dense, values="heads1"),
        _parts(masks._And),
        _parts(masks._Or),
        Kind(masks._Not, {"part": "mask"}, lambda x: {"part": x.part}, lambda part: masks._Not(part)),
    )
}  # fmt: skip

_NAMES = {kind.cls: name for name, kind in KINDS.items()}
_BASES: dict[str, Any] = {
    "score": scores.Score, "geometry": geometry.Geometry, "feature": features.Feature, "mask": masks.Mask,
    "term": (position.Term, position.Bound),
}  # fmt: skip
_SCALARS = ("whole", "number", "flag", "text", "wholes", "numbers", "bounds")


def tabulated(feature: features.Feature, d: Description) -> features.Table:
    """Any feature on a line or a grid as a table with one row for each displacement."""
    alone = None
    if isinstance(d.q_geometry, geometry.Grid) and isinstance(d.k_geometry, geometry.Grid):
        shapes = zip(d.q_geometry.shape, d.k_geometry.shape, strict=True)
        sides = [(1 - k, q - 1) for q, k in shapes][: feature.axes]
        alone = feature.unplaced()
    else:
        base = torch.as_tensor(d.q_start - d.k_start)
        sides = [(int(base.min()) - d.k.shape[-2] + 1, int(base.max()) + d.q.shape[-2] - 1)]
    extents = [max(abs(low), abs(high)) + 1 for low, high in sides]
    steps = [torch.arange(low, high + 1, device=d.q.device) for low, high in sides]
    delta = torch.cartesian_prod(*steps).reshape(-1, len(sides))
    index = features.Cells(*extents, unplaced=isinstance(d.q_geometry, geometry.Grid))
    with torch.no_grad():
        found = feature(delta)
        values = found.new_zeros(*found.shape[:-2], index.dim, feature.dim)
        values[..., index.index(delta), :] = found
        if alone is not None:
            values[..., index.cells :, :] = alone.to(values)
    return features.Table(feature.dim, index=index, heads=feature.heads, values=values)


class Plain:
    """Says objects as plain data. `heads` keeps only these of the `count` heads."""

    def __init__(
        self,
        d: Description,
        keep: Keep,
        keep_own: Callable[[Any], int] | None = None,
        heads: Sequence[int] | None = None,
    ):
        self.d, self.keep, self.keep_own, self.heads, self.count = d, keep, keep_own, heads, d.q.shape[1]

    def tensor(self, x: Tensor, axis: int | None = None) -> dict[str, str]:
        return {"tensor": self.keep(x.detach() if axis is None else self.pick(x.detach(), axis))}

    def pick(self, x: Tensor, axis: int) -> Tensor:
        """The chosen heads on an axis that has one entry for each head, for each group of them, or for all."""
        if self.heads is None or x.shape[axis] == 1:
            return x
        group = self.count // x.shape[axis]
        return x.index_select(axis, torch.tensor([h // group for h in self.heads], device=x.device))

    def object(self, x: Any) -> dict[str, Any]:
        name = _NAMES.get(type(x))
        if name is None and isinstance(x, features.Feature) and not isinstance(self.d.q_geometry, geometry.Points):
            x, name = tabulated(x, self.d), "Table"
        if name is None:
            if self.keep_own is None or (self.heads is not None and getattr(x, "heads", None) is not None):
                raise ValueError(f"description: {type(x).__name__} is not regard's own, so it cannot be stored")
            return {"is": "own", "object": self.keep_own(x)}
        kind = KINDS[name]
        values = kind.read(x)
        if self.heads is not None and isinstance(x, features.Table) and x.heads is not None:
            values |= {"heads": len(self.heads), "values": self.pick(x.values, 0)}
        return {"is": name} | {field: self.value(what, values[field]) for field, what in kind.fields.items()}

    def value(self, what: str, x: Any) -> Any:
        if x is None:
            return None
        what = what.removesuffix("?")
        if what == "tensor":
            return self.tensor(x)
        if what.startswith("heads"):
            return self.tensor(x, int(what[5:]))
        if what in ("features", "masks"):
            return [self.object(each) for each in x]
        if what in _SCALARS:
            return list(x) if isinstance(x, tuple) else x
        return self.object(x)

    def description(self) -> dict[str, Any]:
        """All of a description but q, k, dropout (looking is never dropped) and the engine."""
        d = self.d

        def start(x: int | Tensor) -> Any:
            return self.tensor(x) if isinstance(x, Tensor) else x

        return {
            "score": self.object(d.score),
            "scale": self.tensor(d.scale, 1) if isinstance(d.scale, Tensor) else d.scale,
            "terms": [self.object(term) for term in d.terms],
            "mask": None if d.mask is None else self.object(d.mask),
            "geometry": [self.object(d.q_geometry), self.object(d.k_geometry)],
            "starts": [start(d.q_start), start(d.k_start)],
            "softcap": d.softcap,
            "sink": None if d.sink is None else self.tensor(d.sink, 0),
        }


class Reading:
    """Makes objects of plain data. Whatever is not as `Plain` says it is refused, in a sentence."""

    def __init__(self, find: Find, own: Sequence[Any] = ()):
        self.find, self.own = find, own

    def tensor(self, said: Any, where: str) -> Tensor:
        if not isinstance(said, dict) or set(said) != {"tensor"} or not isinstance(said["tensor"], str):
            raise ValueError(f"{where}: expected the name of a tensor, found {_short(said)}")
        return self.find(said["tensor"])

    def object(self, said: Any, base: str, where: str, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"{where}: nested more than {DEEPEST} deep")
        if not isinstance(said, dict) or not isinstance(said.get("is"), str):
            raise ValueError(f"{where}: expected a {base}, found {_short(said)}")
        if said["is"] == "own" and self.own:
            return self.own[_whole(said.get("object"), where, 0, len(self.own) - 1)]
        kind = KINDS.get(said["is"])
        if kind is None or not issubclass(kind.cls, _BASES[base]):
            raise ValueError(f"{where}: expected a {base} that regard knows, found {_short(said['is'])}")
        if set(said) != {"is", *kind.fields}:
            raise ValueError(
                f"{where}: {said['is']} has the fields {sorted(kind.fields)}, "
                f"found {_short(sorted(set(said) - {'is'}))}"
            )
        values = {
            field: self.value(what, said[field], f"{where}.{said['is']}.{field}", depth + 1)
            for field, what in kind.fields.items()
        }
        return kind.make(**values)

    def value(self, what: str, said: Any, where: str, depth: int) -> Any:
        if what.endswith("?") or what == "bounds":
            if said is None:
                return None
            what = what.removesuffix("?")
        if what == "tensor" or what.startswith("heads"):
            return self.tensor(said, where)
        if what in ("features", "masks", "wholes", "numbers"):
            if not isinstance(said, list) or len(said) > 1 << 20:
                raise ValueError(f"{where}: expected a list, found {_short(said)}")
            return [self.value(what[:-1], each, where, depth) for each in said]
        if what == "bounds":
            return self.value("wholes" if isinstance(said, list) else "whole", said, where, depth)
        if what == "whole":
            return _whole(said, where)
        if what == "number":
            return number(said, where)
        if what == "flag" or what == "text":
            if not isinstance(said, bool if what == "flag" else str):
                raise ValueError(f"{where}: expected {'true or false' if what == 'flag' else 'text'}, found {said!r}")
            return said
        return self.object(said, what, where, depth)


def plain(
    d: Description, keep: Keep, keep_own: Callable[[Any], int] | None = None, heads: Sequence[int] | None = None
) -> dict[str, Any]:
    """A description as JSON can hold it, its tensors given to `keep`. Only these heads, if some are named."""
    return Plain(d, keep, keep_own, heads).description()


def rebuild(said: Any, q: Tensor, k: Tensor, find: Find, own: Sequence[Any] = ()) -> AttentionMatrix:
    """The A that `plain` said."""
    fields = {"score", "scale", "terms", "mask", "geometry", "starts", "softcap", "sink"}
    if not isinstance(said, dict) or set(said) != fields:
        raise ValueError(f"description: expected {sorted(fields)}, found {_short(said)}")
    read = Reading(find, own)
    for name, count in (("terms", None), ("geometry", 2), ("starts", 2)):
        if not isinstance(said[name], list) or (count is not None and len(said[name]) != count):
            raise ValueError(
                f"{name}: expected a list{'' if count is None else f' of {count}'}, found {_short(said[name])}"
            )
    starts = [read.tensor(x, "starts") if isinstance(x, dict) else _whole(x, "starts", 0) for x in said["starts"]]
    scale, sink, softcap = said["scale"], said["sink"], said["softcap"]
    geometries = [read.object(x, "geometry", "geometry") for x in said["geometry"]]
    described = describe(
        q, k,
        score=read.object(said["score"], "score", "score"),
        scale=read.tensor(scale, "scale") if isinstance(scale, dict) else number(scale, "scale"),
        position=[read.object(term, "term", "position") for term in said["terms"]],
        mask=None if said["mask"] is None else read.object(said["mask"], "mask", "mask"),
        geometry=(geometries[0], geometries[1]),
        q_start=starts[0], k_start=starts[1],
        softcap=None if softcap is None else number(softcap, "softcap"),
        sink=None if sink is None else read.tensor(sink, "sink"),
        dropout=0.0, engine=None,
    )  # fmt: skip
    return AttentionMatrix(check_ranges(described))


def number(x: Any, where: str) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        raise ValueError(f"{where}: expected a finite number, found {_short(x)}")
    return float(x)


def _whole(x: Any, where: str, low: int = -LARGEST, high: int = LARGEST) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or not low <= x <= high:
        raise ValueError(f"{where}: expected a whole number from {low} to {high}, found {_short(x)}")
    return x


def _short(x: Any) -> str:
    text = repr(x) if not isinstance(x, (dict, list)) or len(x) < 8 else f"{type(x).__name__} of {len(x)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
