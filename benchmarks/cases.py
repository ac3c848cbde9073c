"""What is measured: terms, cases and their targets, a line or two each.

A case is a description at a shape: one of TERMS, with or without the causal mask, and either the product A @ v
(`asks` is empty) or summaries of A. `forward` and `training` are targets: the time over plain SDPA's of the same
shape, dtype and mask, measured in the same run. `memory` is (factor, MiB): the peak may be factor times plain's, plus
so many MiB. What a user has today for the same term is in today.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import regard as rg

Target = float | None


@dataclass(frozen=True)
class Case:
    name: str
    term: str
    length: int  # keys; queries too unless q_len says otherwise. A class token comes on top
    batch: int = 1
    heads: int = 8
    dim: int = 64
    v_dim: int = 64
    q_len: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = False
    asks: tuple[str, ...] = ()  # summaries; none: the product
    forward: Target = None
    training: Target = None
    memory: tuple[float, float] | None = None
    passes: tuple[str, ...] = ("forward", "training")

    @property
    def key(self) -> str:
        """The name it has in the results."""
        return f"{self.name}/{self.length}"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns, as near to a square as the length allows."""
        rows = next(n for n in range(int(self.length**0.5), 0, -1) if self.length % n == 0)
        return rows, self.length // rows

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """[batch, heads, q_len, k_len], the class token counted."""
        extra = TERMS[self.term].unplaced
        return self.batch, self.heads, (self.q_len or self.length) + extra, self.length + extra

    @property
    def shape(self) -> str:
        """In words, for tables."""
        batch, heads, q_len, k_len = self.sizes
        pairs = f"{q_len} x {k_len}" if q_len != k_len else f"N{k_len}"
        values = f" V{self.v_dim}" if self.v_dim != self.dim else ""
        return f"B{batch} H{heads} {pairs} D{self.dim}{values} {self.dtype}"

    def small(self, length: int, heads: int = 2, dim: int = 0) -> Case:
        """The same description on a small shape: few heads, one batch row, few tokens."""
        v_dim = self.v_dim if not dim else dim + (self.v_dim > self.dim) * 4 - (self.v_dim < self.dim) * 4
        return replace(
            self, length=length, batch=1, heads=heads, dim=dim or self.dim, v_dim=v_dim, q_len=min(self.q_len, 3)
        )


@dataclass(frozen=True)
class Term:
    """How a case's position term is made: `make(case)` gives the term (or None), `place` the geometry."""

    make: Callable[[Case], Any] = lambda c: None
    place: str = "line"  # or "grid", or "class grid"
    static: bool = False  # depends on nothing but places: can be kept ready between calls
    scale: Callable[[Case], float] = lambda c: c.dim**-0.5

    @property
    def unplaced(self) -> int:
        return int(self.place == "class grid")

    def geometry(self, case: Case) -> Any:
        return None if self.place == "line" else rg.Grid(*case.grid, unplaced=self.unplaced)


TERMS = {
    "plain": Term(),
    "t5": Term(lambda c: rg.recipes.t5(c.heads), static=True),
    "alibi": Term(lambda c: rg.recipes.alibi(c.heads), static=True),
    "learned": Term(lambda c: rg.Static(rg.Cells(c.length), c.heads), static=True),
    "swin": Term(lambda c: rg.recipes.swin(c.heads, c.grid), "grid", static=True),
    "beit": Term(lambda c: rg.recipes.beit(c.heads, c.grid), "class grid", static=True),
    "sam": Term(lambda c: rg.recipes.sam(c.dim, c.grid), "grid"),
    "shaw": Term(lambda c: rg.recipes.shaw(c.dim, 128)),
    "xl": Term(lambda c: rg.recipes.transformer_xl(c.heads, c.dim)),
    "deberta": Term(lambda c: rg.recipes.deberta(c.heads, c.dim), scale=lambda c: (3 * c.dim) ** -0.5),
}

WORDS = {
    "plain": "plain",
    "t5": "T5 bias, 32 buckets, learned",
    "alibi": "ALiBi",
    "learned": "learned b[h, i - j]",
    "swin": "Swin table on a grid",
    "beit": "BEiT table, class token",
    "sam": "SAM q·R_row + q·R_col",
    "shaw": "Shaw q·R, clip 128",
    "xl": "Transformer-XL",
    "deberta": "DeBERTa, both sides",
}

SUMMARIES: dict[str, Callable[[], rg.Summary]] = {
    "profile": rg.Profile,
    "heatmap": lambda: rg.Heatmap(512),
    "heatmap1024": lambda: rg.Heatmap(1024),
    "received": rg.Received,
    "entropy": rg.Entropy,
    "topk": lambda: rg.TopK(8),
}
FIVE = ("topk", "heatmap", "profile", "received", "entropy")


def _cpu(name: str, term: str, forward: Target, training: Target, **more: Any) -> list[Case]:
    """At 1024 and 4096 tokens: B1 H8 D64."""
    return [Case(name, term, n, forward=forward, training=training, **more) for n in (1024, 4096)]


def _look(name: str, asks: tuple[str, ...], target: Target, **shape: Any) -> Case:
    """Summaries of A with a T5 bias, over the plain product's time."""
    return Case(name, "t5", asks=asks, forward=target, passes=("forward",), **shape)


HEAD = {"length": 16384, "heads": 1, "memory": (0, 300)}

CPU = [
    *_cpu("plain", "plain", 1.03, 1.05),
    *_cpu("causal", "plain", 1.03, 1.05, causal=True),
    *_cpu("t5", "t5", 1.08, 1.55),
    *_cpu("alibi", "alibi", 1.08, 1.55),
    *_cpu("learned", "learned", 1.08, 1.55),
    *_cpu("t5-causal", "t5", 1.12, 1.65, causal=True),
    *_cpu("alibi-causal", "alibi", 1.12, 1.65, causal=True),
    *_cpu("learned-causal", "learned", 1.12, 1.65, causal=True),
    *_cpu("swin", "swin", 1.30, 1.9),
    *_cpu("beit", "beit", 1.30, 1.9),
    *_cpu("sam", "sam", 1.25, 2.1),
    *_cpu("shaw", "shaw", 1.35, 2.5),
    *_cpu("xl", "xl", 1.95, 3.3),
    *_cpu("deberta", "deberta", 2.8, 4.5),
    *_cpu("t5-bfloat16", "t5", 1.10, 1.6, dtype="bfloat16"),
    Case("values-32", "plain", 4096, v_dim=32, forward=1.03, training=1.05),  # over SDPA on padded vectors
    Case("values-96", "plain", 4096, v_dim=96, forward=1.03, training=1.05),
    Case("decode", "t5", 8192, q_len=1, forward=1.3, passes=("forward",)),
    Case("t5-memory", "t5", 8192, memory=(1.5, 0), passes=("training",)),
    _look("look-profile", ("profile",), 1.4, **HEAD),
    _look("look-heatmap", ("heatmap",), 1.4, **HEAD),
    _look("look-received", ("received",), None, **HEAD),
    _look("look-entropy", ("entropy",), None, **HEAD),
    _look("look-top8", ("topk",), None, **HEAD),
    _look("look-all", FIVE, 2.2, **HEAD),
]

HALF = {"dtype": "bfloat16", "device": "cuda", "memory": (2, 256)}
SHORT = {"batch": 4, "heads": 16, "length": 4096, **HALF}
WIDE = {"batch": 2, "heads": 16, "length": 8192, "dim": 128, "v_dim": 128, **HALF}


def _gpu(name: str, term: str, short: tuple[float, float], wide: tuple[float, float], **more: Any) -> list[Case]:
    """At the two shapes of the targets, B4 H16 N4096 D64 and B2 H16 N8192 D128."""
    return [
        Case(name, term, forward=f, training=t, **{**shape, **more}) for shape, (f, t) in ((SHORT, short), (WIDE, wide))
    ]


GPU = [
    *_gpu("plain", "plain", (1.10, 1.50), (1.35, 1.6)),
    *_gpu("causal", "plain", (1.10, 1.50), (1.35, 1.6), causal=True),
    *_gpu("alibi", "alibi", (1.25, 1.9), (1.45, 2.0)),
    *_gpu("t5", "t5", (1.25, 1.9), (1.45, 2.0)),
    *_gpu("t5-causal", "t5", (1.25, 1.9), (1.45, 2.0), causal=True),
    *_gpu("learned", "learned", (1.45, 2.2), (1.65, 2.3)),
    *_gpu("swin", "swin", (1.45, 2.2), (1.65, 2.3)),
    *_gpu("beit", "beit", (1.45, 2.2), (1.65, 2.3)),
    *_gpu("sam", "sam", (1.4, 2.4), (1.6, 2.4)),
    _look("look-profile", ("profile",), 1.5, **SHORT),
    _look("look-heatmap", ("heatmap",), 1.5, **SHORT),
    _look("look-received", ("received",), 1.5, **SHORT),
    _look("look-entropy", ("entropy",), 1.5, **SHORT),
    _look("look-top8", ("topk",), 4.0, **SHORT),
    _look("look-all", FIVE, 4.0, **SHORT),
    Case("long", "t5", 131072, heads=16, causal=True, **HALF),
    Case("million", "t5", 1 << 20, heads=1, passes=("forward",), **HALF),
    _look("million-profile", ("profile",), None, length=1 << 20, heads=1, **HALF),
    _look("million-heatmap", ("heatmap1024",), None, length=1 << 20, heads=1, **HALF),
]

SUITES = {"cpu": CPU, "gpu": GPU}
