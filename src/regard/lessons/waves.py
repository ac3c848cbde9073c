"""Waves on a line: R as a table from Δ to cosines and sines, what v and content make of it, and the search for v.

features()         Δ, R_Δ and f(Δ) = vᵀ R_Δ
static_of()        F[q, k] = f(q - k), as the logits of an A without content
content_of(...)    q_vecᵀ W R_(q-k), and its twin of the key
searching()        v found from what its A makes of random values
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import regard as rg

from .vectors import draw, head

PLACES = 4
FREQUENCIES = (math.pi / 2, math.pi / 3)
READOUT = (1.0, 0.0, 1.0, 0.0)
#: places, steps and rate of the search for v
LEARNED_ON, STEPS, RATE = 12, 250, 0.05


def nothing(length: int, dim: int = 1) -> Tensor:
    """Queries or keys without content: what is left is the position term."""
    return torch.zeros(1, 1, length, dim, dtype=torch.float64)


def sinusoid(frequencies: Sequence[float] = FREQUENCIES) -> rg.Sinusoid:
    return rg.Sinusoid(frequencies)


def features(
    R_of: rg.Sinusoid | None = None, v: Sequence[float] = READOUT, far: int = PLACES - 1
) -> tuple[list[int], list[list[float]], list[float]]:
    """Δ, R_Δ and f(Δ) = vᵀ R_Δ: the table from displacement to features, and its readout."""
    delta = torch.arange(-far, far + 1)
    R = (R_of or sinusoid())(delta[:, None])
    return delta.tolist(), R.tolist(), (R @ torch.tensor(v, dtype=R.dtype)).tolist()


def static_of(R_of: rg.Sinusoid | None = None, v: Sequence[float] = READOUT) -> rg.AttentionMatrix:
    """F[q, k] = f(q - k), as the position term of an attention without content: F is its logits."""
    q = nothing(PLACES)
    term = rg.Static(R_of or sinusoid(), readout=torch.tensor([v], dtype=q.dtype))
    return rg.attention(q, q, position=term)[0, 0]


def static() -> list[list[float]]:
    """F itself."""
    return static_of().logits.dense().tolist()


def content_of(
    vectors: Sequence[Sequence[float]], side: str = "query", R_of: rg.Sinusoid | None = None, W: Tensor | None = None
) -> rg.AttentionMatrix:
    """q_vecᵀ W R_(q-k) with a content vector a place, W = I unless given, as logits; `side` "key" is the twin."""
    content = head(torch.tensor(vectors, dtype=torch.float64))
    empty = nothing(PLACES, content.shape[-1])
    wide = None if W is None else W[None]
    if side == "query":
        return rg.attention(content, empty, position=rg.FromQuery(R_of or sinusoid(), weight=wide))[0, 0]
    return rg.attention(empty, content, position=rg.FromKey(R_of or sinusoid(), weight=wide))[0, 0]


def from_content(vectors: Sequence[Sequence[float]], side: str = "query") -> list[list[float]]:
    """The same as numbers, with the lesson's waves and W = I."""
    return content_of(vectors, side).logits.dense().tolist()


def four_parts(R_of: rg.Sinusoid | None = None) -> dict[str, list[list[float]]]:
    """(x + p)·(x + p) in its four parts, with p_t = R_t, and their sum."""
    x = draw("content", PLACES, 2 * len(FREQUENCIES))
    p = (R_of or sinusoid())(torch.arange(PLACES)[:, None])
    parts = {
        "content-content": (x, x),
        "content-position": (x, p),
        "position-content": (p, x),
        "position-position": (p, p),
    }
    parts["sum"] = (x + p, x + p)
    return {
        name: rg.attention(head(a), head(b), scale=1.0).logits[0, 0].dense().tolist() for name, (a, b) in parts.items()
    }


class Learned(NamedTuple):
    """v found from data alone."""

    first: float  # loss before
    last: float  # and after
    before: list[float]
    after: list[float]


class Search(NamedTuple):
    """How far the search for v is."""

    step: int
    loss: float
    v: list[float]


def searching(v: Sequence[float] = READOUT, R_of: rg.Sinusoid | None = None) -> Iterator[Search]:
    """What the true v makes of random values is enough to find v: the gradient flows through A @ values. A state a step."""
    R_of = R_of or sinusoid()
    empty, values = nothing(LEARNED_ON), head(draw("values", LEARNED_ON, LEARNED_ON))
    true = rg.Static(R_of, readout=torch.tensor([v], dtype=empty.dtype))
    target = rg.attention(empty, empty, position=true) @ values
    found = torch.nn.Parameter(0.1 * draw("v", 1, len(v)))
    optimizer = torch.optim.Adam([found], lr=RATE)
    term = rg.Static(R_of, readout=found)
    for step in range(STEPS + 1):
        loss = (rg.attention(empty, empty, position=term) @ values - target).square().mean()
        yield Search(step, loss.item(), found[0].tolist())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learn() -> Learned:
    states = list(searching())
    return Learned(states[0].loss, states[-1].loss, states[0].v, states[-1].v)


def waves(periods: Sequence[int]) -> rg.Sinusoid:
    """Sinusoids of these periods: ω = 2π / period."""
    return rg.Sinusoid([2 * math.pi / n for n in periods])


def spread(logits: Tensor) -> float:
    """The largest difference between two entries of one diagonal: 0 if Δ alone decides."""
    size = logits.shape[-1]
    diagonals = (logits.diagonal(d) for d in range(1 - size, size))
    return float(max(x.max() - x.min() for x in diagonals))
