"""How alike two vectors are: the score of a query and a key, before any position term (maths.md, eq. 1 and 2).

    Dot               <q, k> / sqrt(dim)
    Cosine            <q, k> / (|q| |k|)
    Euclidean         -|q - k|^2 / (2 sigma^2)           softmax of it is a Gaussian weight
    InverseDistance   -power * log |q - k|               softmax of it is 1 / |q - k|^power, normalised

A score is a value; `scale` of `attention` multiplies it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Base of the four scores."""

    def default_scale(self, dim: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Dot(Score):
    """Scaled dot product; the scale is 1 / sqrt(dim) unless another is given."""

    def default_scale(self, dim: int) -> float:
        return 1.0 / math.sqrt(dim) if dim else 1.0


@dataclass(frozen=True)
class Cosine(Score):
    """The cosine of the angle between q and k (0 when either is zero). Give `scale` a temperature: 1 is very flat."""


@dataclass(frozen=True)
class Euclidean(Score):
    """Minus the squared distance over 2 sigma^2."""

    sigma: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.sigma, (int, float)) and math.isfinite(self.sigma) and self.sigma > 0):
            raise ValueError(f"sigma: expected a positive number, found {self.sigma!r}")


@dataclass(frozen=True)
class InverseDistance(Score):
    """Minus power times the logarithm of the distance.

    A key at distance zero takes all the weight (several share it); with a negative power it takes none.
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.power, (int, float)) and math.isfinite(self.power) and self.power != 0):
            raise ValueError(f"power: expected a finite number other than zero, found {self.power!r}")
