"""Fixtures of the explorer's tests: one server with one head, and A as the API gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import regard as rg


@pytest.fixture(scope="module")
def asked() -> Iterator[Any]:
    from asking import Asked, matrix

    from regard.views.server import Server
    from regard.views.server.sources import trace_of

    A, v = matrix()
    with Server(trace_of(A, v)) as server:
        yield Asked(server)


@pytest.fixture(scope="module")
def A() -> rg.AttentionMatrix:
    from asking import matrix

    return matrix()[0][0, 1]


@pytest.fixture(scope="module")
def same(A) -> Callable[[Any, Callable[[rg.AttentionMatrix], Any]], None]:
    """Whether an answer is what a method of A gives, by the error budget."""
    from asking import like, matrix

    return like(A, matrix(dtype=torch.float64)[0][0, 1])
