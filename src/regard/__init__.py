"""Regard: attention you can look into.

    A = regard.attention(q, k, position=regard.recipes.t5(heads=16), mask=regard.causal)
    y = A @ v            # a fused product with gradients
    A[0, 3, 100:110]     # exact weights of ten rows
    A.heatmap(512)       # a picture of any length

A is a lazy value: it is multiplied, sliced, summarised and explained, and never stored.
"""

from . import recipes
from .features import (
    Buckets,
    Cells,
    Clipped,
    Constant,
    Feature,
    LogBuckets,
    Network,
    OnAxis,
    PerAxis,
    Sinusoid,
    Slope,
    Table,
)
from .geometry import Grid, Line, Points
from .masks import causal, dense, documents, induction, keys, lengths, nearest, offset, window
from .matrix import AttentionMatrix, attention
from .plan import Plan
from .position import FromKey, FromQuery, Rotary, Static, Terms
from .scores import Cosine, Dot, Euclidean, InverseDistance
from .summaries import (
    Entropy,
    FirstKeyShare,
    Heatmap,
    Mass,
    PreviousShare,
    Profile,
    Received,
    SelfShare,
    Share,
    SinkShare,
    Summary,
    Toeplitz,
    TopK,
)

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
    "window",
]
