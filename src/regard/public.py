"""The public names, gathered. `regard/__init__.py` imports this when the first of them is asked for."""

# ruff: noqa: F401
import regard.recipes as recipes

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
