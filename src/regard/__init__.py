"""Regard: attention you can look into.

    A = regard.attention(q, k, position=regard.recipes.t5(heads=16), mask=regard.causal)
    y = A @ v            # a fused product with gradients
    A[0, 3, 100:110]     # exact weights of ten rows
    A.heatmap(512)       # a picture of any length

A is a lazy value: it is multiplied, sliced, summarised and explained, and never stored.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *
    from .trace import Trace, record

__version__ = "0.1.0"

__all__ = [
    "AttentionMatrix",
    "Buckets",
    "Cells",
    "Clipped",
    "Constant",
    "Cosine",
    "Dot",
    "Entropy",
    "Euclidean",
    "Feature",
    "FirstKeyShare",
    "FromKey",
    "FromQuery",
    "Grid",
    "Heatmap",
    "InverseDistance",
    "Line",
    "LogBuckets",
    "Mass",
    "Network",
    "OnAxis",
    "PerAxis",
    "Plan",
    "Points",
    "PreviousShare",
    "Profile",
    "Received",
    "Rotary",
    "SelfShare",
    "Share",
    "SinkShare",
    "Sinusoid",
    "Slope",
    "Static",
    "Summary",
    "Table",
    "Terms",
    "Toeplitz",
    "TopK",
    "Trace",
    "attention",
    "causal",
    "dense",
    "documents",
    "induction",
    "keys",
    "lengths",
    "nearest",
    "offset",
    "recipes",
    "record",
    "window",
]

#: modules that are reached by name: what docstrings point to, and models made of A
PARTS = ("features", "masks", "position", "summaries", "cache", "generate", "models", "nn", "huggingface", "trace")
#: public names that stand above the models: not imported with the others
ABOVE = {"Trace": "trace", "record": "trace"}


def __getattr__(name: str) -> Any:
    """The public names, when the first is asked for: the command line answers `--help` before torch is imported."""
    if name in PARTS:
        return importlib.import_module(f".{name}", __package__)
    if name in ABOVE:
        return getattr(importlib.import_module(f".{ABOVE[name]}", __package__), name)
    if name not in __all__:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    from . import public

    globals().update((each, getattr(public, each)) for each in __all__ if each not in ABOVE)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
