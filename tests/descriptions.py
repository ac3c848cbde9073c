"""Random descriptions for property tests: any score, terms, mask, geometry and options that go together.

A Case is a list of choices; `build` makes its tensors from a seed, rounded to a dtype, and held in float64 for the
oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import regard as rg

DIM = 4

LINE_TERMS = (
    "t5", "causal t5", "slope", "clipped table", "cells", "sinusoid", "network", "constant", "gated t5",
    "shaw", "query sinusoid", "query buckets", "query offset", "other query", "gated shaw",
    "key table", "key constant", "key sinusoid", "rotary",
)  # fmt: skip
GRID_TERMS = (
    "cells", "class cells", "slope", "network", "one axis", "per axis static", "constant",
    "per axis query", "query cells", "query sinusoid axis", "key cells", "per axis key", "gated cells", "rotary",
)  # fmt: skip
POINT_TERMS = (
    "one axis", "slope", "network", "sinusoid axis", "constant", "per axis static",
    "per axis query", "query sinusoid axis", "key sinusoid axis", "per axis key", "gated one axis", "rotary",
)  # fmt: skip
MASKS = (
    "none", "causal", "window", "offset", "keys", "lengths", "query lengths", "documents", "dense", "dense heads",
    "nearest", "causal & nearest", "causal & lengths", "~window", "documents | keys", "nearest | offset", "~nearest",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    seed: int
    batch: int
    heads: int
    kv_heads: int
    geometry: str  # "line", "grid", "class grid", "video", "points", "places"
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    score: str
    scale: str
    terms: tuple[str, ...]
    mask: str
    starts: str
    softcap: bool
    sink: bool
    v_dim: int
    dropout: float = 0.0

    def build(
        self, dtype: torch.dtype = torch.float32, exact: bool = False, nudge: bool = False, device: str = "cpu"
    ) -> Built:
        return Built(self, dtype, exact, nudge, device)


class Built:
    """The tensors of a case: q, k, v, the arguments of `attention`, and every leaf that wants a gradient."""

    def __init__(self, case: Case, dtype: torch.dtype, exact: bool, nudge: bool, device: str):
        self.case, self.dtype, self.exact, self.nudge, self.device = case, dtype, exact, nudge, device
        self.random = torch.Generator().manual_seed(case.seed)
        self.leaves: dict[str, Tensor] = {}
        axes = len(case.q_shape)
        self.geometry, (q_len, k_len) = self._geometry(axes)
        self.sizes = case.batch, case.heads, q_len, k_len
        self.q = self.leaf("q", case.batch, case.heads, q_len, DIM)
        self.k = self.leaf("k", case.batch, case.kv_heads, k_len, DIM)
        self.v = self.leaf("v", case.batch, case.kv_heads, k_len, case.v_dim)
        self.kwargs: dict[str, Any] = {"geometry": self.geometry, **self._starts(), **self._score()}
        self.kwargs["position"] = [self._term(name, axes) for name in case.terms] or None
        self.kwargs["mask"] = self._mask(case.mask)
        if case.softcap:
            self.kwargs["softcap"] = 3.0
        if case.sink:
            self.kwargs["sink"] = self.leaf("sink", case.heads)
        self.kwargs["dropout"] = case.dropout

    def matrix(self, engine: str | None = None) -> rg.AttentionMatrix:
        torch.manual_seed(self.case.seed)  # the seed of dropout
        return rg.attention(self.q, self.k, engine=engine, **self.kwargs)

    def leaf(self, name: str, *shape: int) -> Tensor:
        made = self.numbers(*shape)
        made.requires_grad_()
        self.leaves[f"{len(self.leaves)} {name}"] = made
        return made

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        drawn = torch.randn(*shape, generator=self.random, dtype=torch.float64).to(dtype)
        if not self.exact:
            return drawn.to(self.device)
        sign = 1 - 2 * (torch.arange(drawn.numel()).reshape(drawn.shape) * 7 // 3 % 2)
        return (drawn.double() * (1 + sign * torch.finfo(dtype).eps * self.nudge)).to(self.device)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random).to(self.device)

    def module(self, made: nn.Module) -> Any:
        """A term with random parameters, rounded to the dtype that parameters have beside q of this dtype."""
        own = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        made.to(self.device)
        for name, p in made.named_parameters():
            p.data = self.numbers(*p.shape, dtype=own)
            self.leaves[f"{len(self.leaves)} {name}"] = p
        return made

    def _geometry(self, axes: int) -> tuple[Any, tuple[int, int]]:
        case = self.case
        q_len, k_len = (int(torch.tensor(shape).prod()) for shape in (case.q_shape, case.k_shape))
        if case.geometry == "line":
            return None, (q_len, k_len)
        if case.geometry in ("points", "places"):
            made = []
            for n in (q_len, k_len):
                lead = (case.batch,) if case.geometry == "places" else ()
                placed = self.whole(0, 4, *lead, n) > 0 if case.geometry == "places" else None
                made.append(rg.Points(self.whole(-6, 6, *lead, n, 2), placed))
            return (made[0], made[1]), (q_len, k_len)
        alone = 1 if case.geometry == "class grid" else 0
        grids = rg.Grid(*case.q_shape, unplaced=alone), rg.Grid(*case.k_shape, unplaced=alone)
        return grids, (q_len + alone, k_len + alone)

    def _starts(self) -> dict[str, Any]:
        if self.case.geometry != "line" or self.case.starts == "zero":
            return {"q_start": 0}
        if self.case.starts == "numbers":
            return {"q_start": 5, "k_start": 2}
        return {"q_start": self.whole(0, 7, self.case.batch), "k_start": self.whole(0, 3, self.case.batch)}

    def _score(self) -> dict[str, Any]:
        kinds = {
            "dot": rg.Dot(),
            "cosine": rg.Cosine(),
            "euclidean": rg.Euclidean(1.5),
            "inverse": rg.InverseDistance(2),
        }
        scale = {"default": None, "number": 0.7}.get(self.case.scale)
        if self.case.scale == "tensor":
            scale = self.leaf("scale", self.case.batch, self.case.heads, self.sizes[2], 1)
        elif self.case.scale == "per head":
            scale = self.leaf("scale", self.case.heads, 1, 1)
        return {"score": kinds[self.case.score], "scale": scale}

    def _mask(self, name: str) -> Any:
        batch, heads, q_len, k_len = self.sizes
        if name == "none":
            return None
        if name.startswith("~"):
            return ~self._mask(name[1:])
        for sign in (" & ", " | "):
            if sign in name:
                left, right = map(self._mask, name.split(sign))
                return left & right if sign == " & " else left | right
        make = {
            "causal": lambda: rg.causal,
            "window": lambda: rg.window(2, 1),
            "offset": lambda: rg.offset(1),
            "keys": lambda: rg.keys(1, 3),
            "lengths": lambda: rg.lengths(self.whole(0, k_len + 2, batch)),
            "query lengths": lambda: rg.lengths(self.whole(0, k_len + 2, batch), self.whole(0, q_len + 2, batch)),
            "documents": lambda: rg.documents(self.whole(-1, 3, batch, q_len), self.whole(-1, 3, batch, k_len)),
            "dense": lambda: rg.dense(self.whole(0, 2, q_len, k_len) > 0),
            "dense heads": lambda: rg.dense(self.whole(0, 2, batch, heads, q_len, k_len) > 0),
            "nearest": lambda: rg.nearest(2),
        }
        return make[name]()

    def _term(self, name: str, axes: int) -> Any:
        heads, module = self.case.heads, self.module
        if name.startswith("gated "):
            batch, _, q_len, _ = self.sizes
            return self._term(name[6:], axes).bind(gate=self.leaf("gate", batch, heads, q_len, 1))
        extents = [max(a, b) for a, b in zip(self.case.q_shape, self.case.k_shape, strict=True)]
        far = 32  # a line's displacements stay below this
        cells = rg.Cells(far) if self.case.geometry == "line" else rg.Cells(*extents)
        table = lambda dim, n: rg.Table(dim, cells=(n,))  # noqa: E731
        if self.case.geometry in ("points", "places"):
            axes = 2
            table = lambda dim, n: rg.Table(dim, clip=3)  # noqa: E731
            extents = [6, 6]
        omega = [1.3, 0.4]
        make = {
            "t5": lambda: rg.recipes.t5(heads, buckets=8, max_distance=6),
            "causal t5": lambda: rg.recipes.t5(1, buckets=8, max_distance=9, bidirectional=False),
            "slope": lambda: rg.Static(rg.Slope(axes), heads),
            "clipped table": lambda: rg.Static(rg.Table(3, clip=2, heads=heads), heads),
            "cells": lambda: rg.Static(cells, heads, scale=0.5),
            "class cells": lambda: rg.Static(rg.Cells(*extents, unplaced=True), heads),
            "sinusoid": lambda: rg.Static(rg.Sinusoid(omega, learn=True), heads),
            "sinusoid axis": lambda: rg.Static(rg.OnAxis(1, rg.Sinusoid(omega)), heads),
            "network": lambda: rg.Static(rg.Network(heads, axes=axes, hidden=5, extent=2.0, bound=2.0)),
            "constant": lambda: rg.Static(rg.Constant(), heads),
            "one axis": lambda: rg.Static(rg.OnAxis(axes - 1, rg.Buckets(8, 6)), heads),
            "per axis static": lambda: rg.Static(rg.PerAxis(*(table(2, n) for n in extents)), heads),
            "shaw": lambda: rg.recipes.shaw(DIM, 3),
            "query sinusoid": lambda: rg.FromQuery.learn(rg.Sinusoid(omega, order="sin|cos"), DIM, heads, offset=True),
            "query sinusoid axis": lambda: rg.FromQuery.learn(
                rg.OnAxis(0, rg.Sinusoid(omega, order="sin_cos")), DIM, heads
            ),
            "query buckets": lambda: rg.FromQuery.learn(rg.Buckets(8, 6), DIM),
            "query offset": lambda: rg.FromQuery.learn(rg.Table(DIM, clip=40), DIM, heads, weight=False, offset=True),
            "query cells": lambda: rg.FromQuery(rg.Table(DIM, index=rg.Cells(*extents, unplaced=True), heads=heads)),
            "per axis query": lambda: rg.FromQuery(rg.PerAxis(*(table(DIM, n) for n in extents))),
            "key table": lambda: rg.FromKey.learn(rg.Table(3, index=rg.LogBuckets(4, 6)), DIM, heads, offset=True),
            "key cells": lambda: rg.FromKey.learn(rg.Table(3, index=cells), DIM, heads),
            "key constant": lambda: rg.FromKey.learn(rg.Constant(), DIM, heads),
            "key sinusoid": lambda: rg.FromKey.learn(rg.Sinusoid([1.1, 0.3, 0.2]), DIM, 1, scale=0.3),
            "key sinusoid axis": lambda: rg.FromKey.learn(rg.OnAxis(1, rg.Sinusoid(omega)), DIM, heads),
            "per axis key": lambda: rg.FromKey(rg.PerAxis(*(table(DIM, n) for n in extents))),
        }
        if name == "rotary":
            return rg.Rotary(DIM if axes < 3 else None)
        if name == "other query":
            batch, _, q_len, _ = self.sizes
            term = module(rg.FromQuery(rg.Table(3, clip=2)))
            return term.bind(query=self.leaf("other", batch, heads, q_len, 3))
        return module(make[name]())


@st.composite
def cases(draw: Any, geometries: tuple[str, ...] = ("line", "grid", "class grid", "video", "points", "places")) -> Case:
    """Any description whose parts go together."""
    geometry = draw(st.sampled_from(geometries))
    pool = {"line": LINE_TERMS, "points": POINT_TERMS, "places": POINT_TERMS}.get(geometry, GRID_TERMS)
    terms = draw(st.lists(st.sampled_from(pool), max_size=3, unique=True))
    if geometry == "video" and "rotary" in terms:
        terms.remove("rotary")
    axes = {"line": 1, "grid": 2, "class grid": 2, "video": 3}.get(geometry, 1)
    most = {1: 9, 2: 4, 3: 2}[axes]
    least = 0 if geometry == "line" else 1
    q_shape = tuple(draw(st.integers(least, most)) for _ in range(axes))
    k_shape = draw(st.one_of(st.just(q_shape), st.tuples(*(st.integers(least, most) for _ in range(axes)))))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    return Case(
        seed=draw(st.integers(0, 2**20)),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        geometry=geometry,
        q_shape=q_shape,
        k_shape=k_shape,
        score=draw(st.sampled_from(["dot", "dot", "cosine", "euclidean", "inverse"])),
        scale=draw(st.sampled_from(["default", "number", "tensor", "per head"])),
        terms=tuple(terms),
        mask=draw(st.sampled_from(MASKS)),
        starts=draw(st.sampled_from(["zero", "numbers", "rows"])),
        softcap=draw(st.booleans()),
        sink=draw(st.booleans()),
        v_dim=draw(st.sampled_from([1, 3, DIM])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
