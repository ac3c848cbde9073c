"""Position terms: what is added to the score because of where two tokens are (maths.md, eq. 10 to 14).

A term is features R(δ) and a readout:

    Static      vᵀ R(δ)                      the same for every content: Toeplitz (T5, ALiBi, Swin, BEiT)
    FromQuery   (q_i + c)ᵀ W R(δ)            the query decides which distances matter (Shaw, Transformer-XL, SAM)
    FromKey     (k_j + c)ᵀ W R(δ)            the key does (DeBERTa's second term)
    Rotary      <rot(q_i), rot(k_j)> - <q_i, k_j>

Terms are modules: they train, move between devices and save with `state_dict`. `a + b` adds terms. `term.bind(...)`
gives a term something that exists only for one call: a gate for each query, or another query than the attention's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .features import Feature, Sinusoid, check_finite, learned
from .normal import wide


class Position:
    """What `attention(position=...)` takes: a term, a bound term, or a sum of them."""

    def terms(self) -> Iterator[Term | Bound]:
        raise TypeError(f"{type(self).__name__} lists no terms")

    def __add__(self, other: Position) -> Terms:
        return Terms([self, other])

    def __radd__(self, other: int) -> Position:
        return self if other == 0 else NotImplemented  # sum([a, b]) begins with 0


class Term(Position, nn.Module):
    """Base of the four terms."""

    features: Feature
    scale: float = 1.0

    def terms(self) -> Iterator[Term | Bound]:
        yield self

    def bind(self, *, gate: Tensor | None = None, query: Tensor | None = None, key: Tensor | None = None) -> Bound:
        """This term for one call: times a gate [batch, heads, q_len, 1], or reading another query or key."""
        return Bound(self, gate=gate, query=query, key=key)

    def describe(self) -> str:
        return f"{type(self).__name__}({self.features.describe()})"


def _count_heads(heads: int | None, features: Feature) -> int:
    if not isinstance(features, Feature):
        raise TypeError(f"features: expected a feature such as Table or Sinusoid, found {type(features).__name__}")
    if heads is not None and features.heads is not None and heads != features.heads:
        raise ValueError(f"heads: the features have {features.heads}, found {heads}")
    return heads if heads is not None else (features.heads or 1)


class Static(Term):
    """vᵀ R(δ), with v one vector a head ([heads, dim]) or one for all ([1, dim])."""

    readout: Tensor

    def __init__(
        self, features: Feature, heads: int | None = None, *, readout: Tensor | None = None, scale: float = 1.0
    ):
        super().__init__()
        self.features, self.scale = features, float(scale)
        count = _count_heads(heads, features)
        if readout is None and features.heads is not None and features.dim == 1:
            readout = torch.ones(1, 1)  # per-head features of one number are the bias themselves
        if readout is not None and (readout.dim() != 2 or readout.shape[-1] != features.dim):
            raise ValueError(
                f"readout: expected [heads, {features.dim}] (one row a head, or one for all), "
                f"found {list(readout.shape)}"
            )
        check_finite("readout", readout)
        values = learned(readout, count, features.dim)
        if isinstance(values, nn.Parameter):
            self.readout = values
        else:
            self.register_buffer("readout", values)


class _FromContent(Term):
    """(x + c)ᵀ W R(δ) for x the query or the key."""

    weight: Tensor | None
    offset: Tensor | None

    def __init__(
        self,
        features: Feature,
        *,
        weight: Tensor | None = None,
        offset: Tensor | None = None,
        scale: float = 1.0,
    ):
        super().__init__()
        self.features, self.scale = features, float(scale)
        if weight is not None and (weight.dim() != 3 or weight.shape[-1] != features.dim):
            raise ValueError(f"weight: expected [heads or 1, dim, {features.dim}], found {list(weight.shape)}")
        if offset is not None and offset.dim() != 2:
            raise ValueError(f"offset: expected [heads or 1, dim], found {list(offset.shape)}")
        for name, values in (("weight", weight), ("offset", offset)):
            check_finite(name, values)
            if isinstance(values, nn.Parameter) or values is None:
                self.register_parameter(name, values)
            else:
                self.register_buffer(name, values)

    @classmethod
    def learn(
        cls,
        features: Feature,
        dim: int,
        heads: int = 1,
        *,
        weight: bool = True,
        offset: bool = False,
        scale: float = 1.0,
    ) -> _FromContent:
        """A fresh term for vectors of this dim: W (identity when `weight` is false) and c (none unless asked)."""
        return cls(
            features,
            weight=nn.Parameter(torch.randn(heads, dim, features.dim) / dim**0.5) if weight else None,
            offset=nn.Parameter(torch.zeros(heads, dim)) if offset else None,
            scale=scale,
        )


class FromQuery(_FromContent):
    """(q_i + c)ᵀ W R(δ). W: [heads or 1, dim, features.dim], identity when None; c: [heads or 1, dim]."""


class FromKey(_FromContent):
    """(k_j + c)ᵀ W R(δ). With grouped heads it reads the shared key."""


class Rotary(Term):
    """Rotate pairs of q and k by their place times a frequency (RoPE): the dot product then sees δ only.

    On a grid or on points the dimensions are divided among the axes. `dim` rotates only the first of them;
    `interleaved` pairs neighbours (x0, x1) instead of halves (x0, x_{dim/2}). Tokens without a place are not rotated.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        base: float = 10000.0,
        frequencies: Tensor | None = None,
        interleaved: bool = False,
    ):
        super().__init__()
        if dim is not None and (dim < 2 or dim % 2):
            raise ValueError(f"dim: expected an even number of dimensions to rotate, found {dim}")
        if frequencies is not None and frequencies.dim() != 1:
            raise ValueError(f"frequencies: expected a row of numbers, found shape {list(frequencies.shape)}")
        check_finite("frequencies", frequencies)
        if not (isinstance(base, (int, float)) and 0 < base < float("inf")):
            raise ValueError(f"base: expected a positive number, found {base!r}")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        # numbers, not a buffer: a model cast to bfloat16 must not round them
        self.frequencies = None if frequencies is None else tuple(frequencies.tolist())

    def describe(self) -> str:
        return f"Rotary(base={self.base:g})"

    def check(self, axes: int, dim: int) -> None:
        """Raise unless vectors of `dim` can be divided among the axes."""
        rotated = self.dim or dim
        if rotated > dim or rotated % (2 * axes):
            raise ValueError(
                f"position: Rotary needs a multiple of {2 * axes} dimensions (two an axis), at most {dim}, "
                f"found {rotated}"
            )
        if self.frequencies is not None and 2 * axes * len(self.frequencies) != rotated:
            raise ValueError(
                f"frequencies: expected {rotated // (2 * axes)} (for {rotated} dimensions on {axes} axes), "
                f"found {len(self.frequencies)}"
            )

    def rotate(self, x: Tensor, place: Tensor, placed: Tensor | None) -> Tensor:
        """x [batch, heads, length, dim] turned by its places [(batch,) length, axes]."""
        axes = place.shape[-1]
        rotated = self.dim or x.shape[-1]
        per_axis = rotated // axes
        dtype = wide(x.dtype)
        omega = Sinusoid.geometric(per_axis, self.base)
        if self.frequencies is not None:
            omega = torch.tensor(self.frequencies, dtype=torch.float64)
        omega = omega.to(x.device)
        angle = place.to(torch.float64).unsqueeze(-1) * omega  # [(batch,) length, axes, pairs]
        if placed is not None:
            angle = angle * placed[..., None, None]
        if angle.dim() == 4:
            angle = angle.unsqueeze(1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        turn = x[..., :rotated].to(dtype).unflatten(-1, (axes, per_axis))
        if self.interleaved:
            a, b = turn[..., 0::2], turn[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turn.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        turned = turned.flatten(-2).to(x.dtype)
        return torch.cat([turned, x[..., rotated:]], dim=-1) if rotated < x.shape[-1] else turned


def unbind(term: Term | Bound) -> tuple[Term, Bound | None]:
    """A term, and what one call gives it."""
    return (term.term, term) if isinstance(term, Bound) else (term, None)


class Bound(Position):
    """A term with what one call gives it. Made by `term.bind`."""

    def __init__(self, term: Term, *, gate: Tensor | None, query: Tensor | None, key: Tensor | None):
        if gate is None and query is None and key is None:
            raise ValueError("bind: give a gate, a query or a key")
        if isinstance(term, Rotary):
            raise ValueError("bind: a Rotary term takes neither gate nor query nor key")
        if query is not None and not isinstance(term, FromQuery):
            raise ValueError(f"query: only a FromQuery term reads a query, found {type(term).__name__}")
        if key is not None and not isinstance(term, FromKey):
            raise ValueError(f"key: only a FromKey term reads a key, found {type(term).__name__}")
        self.term, self.gate, self.query, self.key = term, gate, query, key

    def terms(self) -> Iterator[Term | Bound]:
        yield self

    def describe(self) -> str:
        what = [name for name in ("gate", "query", "key") if getattr(self, name) is not None]
        return f"{self.term.describe()} bound to its {' and '.join(what)}"


class Terms(Position, nn.Module):
    """A sum of terms."""

    def __init__(self, parts: Iterable[Position]):
        super().__init__()
        self._order: list[Term | Bound] = []
        for part in parts:
            if not isinstance(part, Position):
                raise TypeError(f"position: expected terms, found {type(part).__name__}")
            self._order.extend(part.terms())
        self.parts = nn.ModuleList(p.term if isinstance(p, Bound) else p for p in self._order)

    def terms(self) -> Iterator[Term | Bound]:
        yield from self._order

    def __getitem__(self, index: int) -> Term | Bound:
        return self._order[index]

    def __len__(self) -> int:
        return len(self._order)


def terms_of(position: Position | Iterable[Position] | None) -> tuple[Term | Bound, ...]:
    """What the user gave, as a flat tuple of terms."""
    if position is None:
        return ()
    if isinstance(position, Position):
        return tuple(position.terms())
    if isinstance(position, (list, tuple)):
        return tuple(term for part in position for term in terms_of(part))
    raise TypeError(f"position: expected a term or a sum of terms, found {type(position).__name__}")
