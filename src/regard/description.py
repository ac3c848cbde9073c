"""One description of A: what `attention(...)` was given, checked when it is made.

logit[i, j] = scale * score(q_i, k_j) + sum of terms(i, j, δ)      then softcap, then the mask,
A[i, j]     = softmax_j of it, with an optional sink               (maths.md, eq. 18 to 20)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .calls import Call, Parts, known_calls, like, parts_of, remember
from .features import Constant, Feature, OnAxis, check_finite
from .geometry import Geometry, Points, pair_of
from .masks import Mask
from .position import Bound, FromKey, FromQuery, Position, Rotary, Static, Term, terms_of, unbind
from .scores import Dot, Score


@dataclass(frozen=True, eq=False)
class Description:
    """Everything that defines A, checked. Made by `describe`."""

    q: Tensor  # [batch, heads, q_len, dim]
    k: Tensor  # [batch, kv_heads, k_len, dim]
    score: Score
    scale: float | Tensor
    terms: tuple[Term | Bound, ...]
    mask: Mask | None
    q_geometry: Geometry
    k_geometry: Geometry
    q_start: int | Tensor
    k_start: int | Tensor
    softcap: float | None
    sink: Tensor | None  # [heads]
    dropout: float
    seed: Tensor | None  # one number, when dropout acts
    engine: str | None
    parts: InitVar[Sequence[Parts] | None] = None  # of its terms, where they were just found
    held: list[tuple[str, Tensor]] = field(init=False, repr=False)  # `tensors()` when it was made
    call: Call | None = field(init=False, repr=False, default=None)  # where there are others like it
    inside: Sequence[Parts] = field(init=False, repr=False, default=())  # of its terms then

    def __post_init__(self, parts: Sequence[Parts] | None) -> None:
        object.__setattr__(self, "held", self.tensors(parts))

    def __getstate__(self) -> dict[str, Any]:
        """Another process, or another copy of the terms, finds out for itself what it has in common with whom."""
        return {name: x for name, x in self.__dict__.items() if name not in ("call", "inside")}

    def surely_holds(self, seen: Sequence[tuple[str, Tensor, int]]) -> bool:
        """Nothing was replaced, and the versions of tensors are those seen; False too where telling takes longer."""
        if self.call is None:
            return False
        for inside in self.inside:
            if not inside.holds():
                return False
        for _, tensor, version in seen:
            if tensor._version != version:
                return False
        return True

    def positions(self, side: str) -> Tensor:
        """Absolute positions of "q" or "k": [batch or 1, length]."""
        x, start = (self.q, self.q_start) if side == "q" else (self.k, self.k_start)
        index = torch.arange(x.shape[-2], device=x.device)
        return (start[:, None] + index) if isinstance(start, Tensor) else (index + start)[None]

    def tensors(self, parts: Sequence[Parts] | None = None) -> list[tuple[str, Tensor]]:
        """Every tensor A depends on, with the argument it came in: for noticing changes made in place, and devices."""
        found = [("q", self.q), ("k", self.k)]
        for name, x in (
            ("scale", self.scale), ("q_start", self.q_start), ("k_start", self.k_start), ("sink", self.sink),
        ):  # fmt: skip
            if isinstance(x, Tensor):
                found.append((name, x))
        for n, term in enumerate(self.terms):
            if isinstance(term, Bound):
                found += [("position", t) for t in (term.gate, term.query, term.key) if t is not None]
                term = term.term
            found += [("position", t) for _, t in (parts_of(term) if parts is None else parts[n]).tensors]
        if self.mask is not None:
            found += [("mask", t) for t in self.mask.tensors()]
        for geometry in (self.q_geometry, self.k_geometry):
            found += [("geometry", t) for t in geometry.tensors()]
        return found


def describe(
    q: Tensor,
    k: Tensor,
    *,
    score: Score | None,
    scale: float | Tensor | None,
    position: Position | list | tuple | None,
    mask: Mask | None,
    geometry: Geometry | tuple[Geometry, Geometry] | None,
    q_start: int | Tensor | None,
    k_start: int | Tensor | None,
    softcap: float | None,
    sink: Tensor | float | None,
    dropout: float,
    engine: str | None,
) -> Description:
    """Check what the user gave, and name what is wrong with it."""
    terms = terms_of(position)
    parts = [parts_of(unbind(term)[0]) for term in terms]
    key = None
    if sink is None and not torch.compiler.is_compiling() and type(dropout) in (float, int) and dropout == 0:
        key = like(q, k, score, scale, terms, parts, mask, geometry, q_start, k_start, softcap, engine)
        call = None if key is None else known_calls.get(key)
        if call is not None:
            return _again(call, q, k, terms, parts, mask, geometry, q_start, k_start, softcap, engine)
    _check_vectors(q, k)
    batch, heads, q_len, dim = q.shape
    k_len = k.shape[-2]
    score = Dot() if score is None else score
    if not isinstance(score, Score):
        raise TypeError(f"score: expected Dot, Cosine, Euclidean or InverseDistance, found {score!r}")
    scale = _check_scale(scale, score, q)
    q_geometry, k_geometry = pair_of(geometry)
    _check_starts(q, k, mask, q_geometry, k_geometry, q_start, k_start)
    for term, inside in zip(terms, parts, strict=True):
        _check_once(term, inside, q, k, q_geometry.axes)
    if sum(isinstance(term, Rotary) for term in terms) > 1:
        raise ValueError("position: at most one Rotary term, found several")
    if mask is not None:
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask: expected a mask such as causal or lengths(n), found {type(mask).__name__} "
                "(wrap a boolean tensor in dense())"
            )
        mask.check(batch, heads, q_len, k_len, q_geometry.axes)
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise ValueError(f"softcap: expected a positive number, found {softcap!r}")
    if isinstance(sink, (int, float)):
        sink = torch.full((1,), float(sink), device=q.device)
    if sink is not None and not isinstance(sink, Tensor):
        raise TypeError(f"sink: expected a number or a tensor, found {type(sink).__name__}")
    if sink is not None and (sink.dim() != 1 or len(sink) not in (1, heads)):
        raise ValueError(f"sink: expected one logit a head ([{heads}]) or one for all, found {list(sink.shape)}")
    if sink is not None and sink.device.type == "cpu":
        check_finite("sink", sink)
    if not isinstance(dropout, (int, float)):
        raise TypeError(f"dropout: expected a probability from 0 to less than 1, found {dropout!r}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected a probability from 0 to less than 1, found {dropout!r}")
    result = Description(
        q, k, score, scale, terms, mask, q_geometry, k_geometry,
        0 if q_start is None else q_start, 0 if k_start is None else k_start,
        None if softcap is None else float(softcap), sink, float(dropout),
        torch.randint(2**31 - 1, (1,), device=q.device) if dropout else None, engine, parts,
    )  # fmt: skip
    device = q.device
    for name, tensor in result.held:
        if tensor.device != device:
            raise ValueError(f"{name}: expected the device of q ({device}), found {tensor.device}")
    if key is not None:
        object.__setattr__(result, "call", remember(key, Call(score, scale, (q_geometry, k_geometry))))
        object.__setattr__(result, "inside", parts)
    return result


def _again(
    call: Call, q: Tensor, k: Tensor, terms: tuple[Term | Bound, ...], parts: list[Parts], mask: Mask | None,
    geometry: Any, q_start: Any, k_start: Any, softcap: float | None, engine: str | None,
) -> Description:  # fmt: skip
    """A description like one that was checked: only numbers are looked at."""
    held = [("q", q), ("k", k)]
    cpu = q.device.type == "cpu"
    for term, inside in zip(terms, parts, strict=True):
        held += [("position", t) for _, t in inside.tensors]
        if cpu:
            _check_numbers(term, inside)  # type: ignore[arg-type]
    q_geometry, k_geometry = call.geometry if geometry is None else pair_of(geometry)
    made = object.__new__(Description)
    made.__dict__.update(
        q=q, k=k, score=call.score, scale=call.scale, terms=terms, mask=mask, q_geometry=q_geometry,
        k_geometry=k_geometry, q_start=q_start or 0, k_start=k_start or 0, softcap=softcap, sink=None, dropout=0.0,
        seed=None, engine=engine, held=held, call=call, inside=parts,
    )  # fmt: skip
    return made


def _check_vectors(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor [batch, heads, length, dim], found {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected four axes [batch, heads, length, dim], found shape {list(x.shape)}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected floating-point numbers, found {x.dtype}")
    if q.dtype != k.dtype:
        raise TypeError(f"k: expected the dtype of q ({q.dtype}), found {k.dtype}")
    if q.device != k.device:
        raise ValueError(f"k: expected the device of q ({q.device}), found {k.device}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k: expected the batch size of q ({q.shape[0]}), found {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: expected the dim of q ({q.shape[-1]}), found {k.shape[-1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: its heads must divide those of q ({q.shape[1]}), found {k.shape[1]}")


def check_values(v: Tensor, k: Tensor, dtype: torch.dtype, heads: int, gone: tuple[bool, bool]) -> Tensor:
    """v with all four axes. It must go with k: [batch, kv_heads, k_len, v_dim], or with values for every head;
    the axes that were indexed away (`gone`) are left out."""
    if not isinstance(v, Tensor):
        raise TypeError(f"v: expected a tensor, found {type(v).__name__}")
    batch, shared, k_len, _ = k.shape
    given = v.shape
    if True in gone:
        for axis in range(2):
            v = v.unsqueeze(axis) if gone[axis] and v.dim() >= axis else v
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] not in (shared, heads) or v.shape[2] != k_len:
        want = [n for n, left in zip((batch, shared), gone, strict=True) if not left]
        raise ValueError(f"v: expected shape {[*want, k_len, 'v_dim']}, found {list(given)}")
    if v.dtype != dtype:
        raise TypeError(f"v: expected the dtype of q and k ({dtype}), found {v.dtype}")
    if v.device != k.device:
        raise ValueError(f"v: expected the device of q and k ({k.device}), found {v.device}")
    return v


def _check_scale(scale: float | Tensor | None, score: Score, q: Tensor) -> float | Tensor:
    if scale is None:
        return score.default_scale(q.shape[-1])
    if isinstance(scale, Tensor):
        if not scale.dtype.is_floating_point:
            raise TypeError(f"scale: expected floating-point numbers, found {scale.dtype}")
        want = (q.shape[0], q.shape[1], q.shape[2], 1)
        if scale.dim() > 4 or any(n not in (1, m) for n, m in zip(scale.shape[::-1], want[::-1], strict=False)):
            raise ValueError(f"scale: expected a tensor that broadcasts to {list(want)}, found {list(scale.shape)}")
        return scale.reshape((1,) * (4 - scale.dim()) + scale.shape)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale == 0:
        raise ValueError(f"scale: expected a finite number other than zero, or a tensor, found {scale!r}")
    return float(scale)


def _check_starts(
    q: Tensor,
    k: Tensor,
    mask: Mask | None,
    q_geometry: Geometry,
    k_geometry: Geometry,
    q_start: int | Tensor | None,
    k_start: int | Tensor | None,
) -> None:
    for name, start, x, geometry in (("q", q_start, q, q_geometry), ("k", k_start, k, k_geometry)):
        if isinstance(start, Tensor):
            if start.dim() != 1 or len(start) not in (1, len(q)) or not _whole(start.dtype):
                raise ValueError(
                    f"{name}_start: expected a whole number or one a batch row ([{len(q)}]), "
                    f"found {start.dtype} {list(start.shape)}"
                )
            if start.device.type == "cpu" and not torch.compiler.is_compiling() and start.numel():
                low, high = int(start.min()), int(start.max())
                if low < 0:
                    raise ValueError(f"{name}_start: positions start at 0, found {low}")
                geometry.check(name, x.shape[-2], high)
        else:
            if start is not None and not isinstance(start, int):
                raise TypeError(
                    f"{name}_start: expected a whole number, or one a batch row in a tensor, found {start!r}"
                )
            if start is not None and (isinstance(start, bool) or start < 0):
                raise ValueError(f"{name}_start: expected a position >= 0, found {start}")
            geometry.check(name, x.shape[-2], start)
        if isinstance(geometry, Points) and geometry.coords.dim() == 3 and geometry.coords.shape[0] != len(q):
            raise ValueError(
                f"geometry: Points has {geometry.coords.shape[0]} batch rows, expected {len(q)} as in {name}"
            )
    if q.shape[-2] != k.shape[-2] and q_start is None and mask is not None and mask.ordered:
        end = k.shape[-2] - q.shape[-2]
        raise ValueError(
            f"q_start: q_len = {q.shape[-2]} and k_len = {k.shape[-2]} differ, so say where the queries stand: "
            + (f"q_start={end} puts them at the end of the keys, " if end > 0 else "")
            + "q_start=0 at their beginning"
        )


def _whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _check_once(given: Term | Bound, parts: Parts, q: Tensor, k: Tensor, axes: int) -> None:
    """Check a term. What shapes alone decide is looked at once: a model calls with the same ones step after step."""
    if isinstance(given, Bound) or torch.compiler.is_compiling():
        _check_term(given, q, k, axes)
        return
    key = q.shape, k.shape, axes, tuple([t.shape for _, t in parts.tensors])
    if key not in parts.checked:
        _check_term(given, q, k, axes)
        parts.remember(parts.checked, key)
    elif q.device.type == "cpu":
        _check_numbers(given, parts)


def _check_term(given: Term | Bound, q: Tensor, k: Tensor, axes: int) -> None:
    term, bound = unbind(given)
    batch, heads, q_len, dim = q.shape
    if isinstance(term, Rotary):
        term.check(axes, dim)
        return
    features: Feature = term.features
    partial = isinstance(features, (Constant, OnAxis))
    if features.axes > axes or (features.axes < axes and not partial):
        raise ValueError(f"position: {features.describe()} looks at {features.axes} axes, the geometry has {axes}")
    _one_or("position: features", features.heads, heads)
    if isinstance(term, Static):
        _one_or("readout", term.readout.shape[0], heads)
    elif isinstance(term, (FromQuery, FromKey)):
        x = q if isinstance(term, FromQuery) else k
        other = None if bound is None else (bound.query if isinstance(term, FromQuery) else bound.key)
        if other is not None:
            if other.dim() != 4 or other.shape[0] not in (1, batch) or other.shape[2] != x.shape[2]:
                raise ValueError(f"bind: expected [{batch}, heads, {x.shape[2]}, dim], found {list(other.shape)}")
            if not other.dtype.is_floating_point:
                raise TypeError(f"bind: query or key: expected floating-point numbers, found {other.dtype}")
            if (
                other.shape[1] == 0
                or heads % other.shape[1]
                or (isinstance(term, FromQuery) and other.shape[1] not in (1, heads))
            ):
                _one_or("bind: a query or key", other.shape[1], heads)
            x = other
        width = x.shape[-1]
        if term.weight is not None:
            _one_or("weight", term.weight.shape[0], heads)
            if term.weight.shape[1] != width:
                raise ValueError(f"weight: expected [heads or 1, {width}, ...], found {list(term.weight.shape)}")
        elif features.dim != width:
            raise ValueError(
                f"position: without a weight the features must have the dim of what reads them ({width}), "
                f"found {features.describe()}"
            )
        if term.offset is not None:
            _one_or("offset", term.offset.shape[0], heads)
            if term.offset.shape[1] != width:
                raise ValueError(f"offset: expected [heads or 1, {width}], found {list(term.offset.shape)}")
    else:
        raise TypeError(f"position: expected Static, FromQuery, FromKey or Rotary, found {type(term).__name__}")
    if bound is not None and bound.gate is not None:
        want, gate = (batch, heads, q_len, 1), bound.gate
        if gate.dim() != 4 or any(n not in (1, m) for n, m in zip(gate.shape, want, strict=True)):
            raise ValueError(f"gate: expected a tensor that broadcasts to {list(want)}, found {list(gate.shape)}")
    if not torch.compiler.is_compiling():
        _check_numbers(term, parts_of(term))


def _check_numbers(term: Term, parts: Parts) -> None:
    if isinstance(term, Rotary):
        return
    for name, tensor in parts.tensors:
        if tensor.device.type == "cpu" and _has_nan(tensor):
            raise ValueError(f"position: NaN in {name} of {term.describe()}")


def _has_nan(x: Tensor) -> bool:
    """Looked for at every call: parameters change. A sum is one pass, and finite where all is well."""
    with torch.no_grad():
        return not math.isfinite(float(x.sum())) and bool(torch.isnan(x).any())


def _one_or(name: str, found: int | None, heads: int) -> None:
    if found not in (None, 1, heads):
        raise ValueError(f"{name}: expected one set for each of the {heads} heads, or one for all, found {found}")
