"""Who is told when a model attends: layers and adapters speak here, `record` listens.

A layer that has made its A calls `attended(layer, A, v)` before it multiplies. Nobody listening, that is one test of an
empty list. Inside a compiled graph nothing is told: `record` runs models eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .matrix import AttentionMatrix

#: called with the layer, its lazy A and its values
Listener = Callable[[nn.Module, AttentionMatrix, Tensor], None]

_listeners: list[Listener] = []


def watched() -> bool:
    """Whether somebody listens: a layer may then have to make one A of what it would compute in parts."""
    return bool(_listeners) and not torch.compiler.is_compiling()


def attended(layer: nn.Module, A: AttentionMatrix, v: Tensor) -> None:
    """Tell who listens that `layer` is about to take A @ v."""
    if watched():
        for listener in tuple(_listeners):
            listener(layer, A, v)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have `listener` told, for the length of a `with`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
