"""The lessons' vectors: random, untrained, and the same every time.

A token's vector comes from a generator seeded by its code points, a matrix W from one seeded by its name. So a character
has the same vector wherever it stands, nothing is downloaded, and what a heat map shows has no meaning but its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def draw(seed: str, *shape: int) -> Tensor:
    """Standard normal numbers, float64, that depend on the seed alone."""
    number = 0
    for character in seed:
        number = (number * 1_114_112 + ord(character)) % (2**63 - 1)
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def embed(tokens: Iterable[str], dim: int) -> Tensor:
    """One vector a token: [tokens, dim]."""
    return torch.stack([draw(token, dim) for token in tokens])


def weight(name: str, rows: int, columns: int) -> Tensor:
    """A matrix that keeps the size of what it multiplies: entries of variance 1 / rows."""
    return draw(name, rows, columns) / rows**0.5


def head(x: Tensor) -> Tensor:
    """[length, dim] as one batch row and one head: [1, 1, length, dim]."""
    return x[None, None]
