"""Published position terms by name, each a line or two of features and readouts. Checked against the models' own code.

| recipe | what the model computes | give `attention` also |
|---|---|---|
| t5 | q·k + b[head, bucket(k - q)] | scale=1 |
| alibi | q·k / √d - m[head] · distance | mask=causal |
| swin | q·k / √d + b[head, δ] on a window | geometry=Grid(h, w) |
| swin_v2 | τ cos(q, k) + 16 σ(MLP(log δ)) | score=Cosine(), scale=τ, geometry=Grid(h, w) |
| beit | as swin, with three entries for the class token | geometry=Grid(h, w, unplaced=1) |
| shaw | q·(k + R[clip(k - q)]) / √d | |
| transformer_xl | ((q + u)·k + (q + v)·W R(q - k)) / √d | |
| deberta | (q·k + q·Kr[δ] + k·Qr[δ]) / √(3d) | scale=1 / √(3d) |
| sam | q·k / √d + q·R_row + q·R_column | geometry=Grid(h, w) |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .features import Buckets, Cells, Constant, LogBuckets, Network, PerAxis, Sinusoid, Slope, Table
from .position import FromKey, FromQuery, Static, Terms


def t5(heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Static:
    """T5's learned bias by logarithmic bucket. `readout` [heads, buckets] is its embedding, transposed."""
    return Static(Buckets(buckets, max_distance, bidirectional), heads)


def alibi(heads: int) -> Static:
    """ALiBi: a fixed slope a head, 2^(-8 i / heads), with the published rule when heads is not a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return Static(Slope(), readout=torch.tensor(slopes)[:, None])


def swin(heads: int, window: tuple[int, int]) -> Static:
    """Swin: one learned number a head and displacement on the window. `readout` [heads, cells] is its table, transposed."""
    return Static(Cells(*window), heads)


def beit(heads: int, window: tuple[int, int]) -> Static:
    """BEiT: Swin's table with entries for class token to patch, patch to class token, and class token to itself."""
    return Static(Cells(*window, unplaced=True), heads)


def swin_v2(heads: int, window: tuple[int, int], *, hidden: int = 512, pretrained: tuple[int, int] | None = None) -> Static:
    """Swin v2: a small network of the log-spaced displacement, bounded by 16."""
    extent = [max(n - 1, 1) for n in (pretrained or window)]
    return Static(Network(heads, axes=2, hidden=hidden, extent=extent, bound=16.0))


def shaw(dim: int, clip: int, *, scale: float | None = None) -> FromQuery:
    """Shaw et al.: the query meets a learned vector for each clipped displacement (shared by all heads)."""
    return FromQuery(Table(dim, clip=clip), scale=1 / math.sqrt(dim) if scale is None else scale)


def transformer_xl(
    heads: int, dim: int, *, features: int | None = None, order: str = "sin|cos", scale: float | None = None
) -> Terms:
    """Transformer-XL: a bias u per key, and (q + v)·W R(q - k) with sinusoids R of `features` numbers."""
    width = heads * dim if features is None else features
    scale = 1 / math.sqrt(dim) if scale is None else scale
    by_key = FromKey(Constant(), weight=nn.Parameter(torch.zeros(heads, dim, 1)), scale=scale)
    by_distance = FromQuery.learn(
        Sinusoid(Sinusoid.geometric(width), order=order), dim, heads, offset=True, scale=scale
    )
    return Terms([by_key, by_distance])


def deberta(
    heads: int, dim: int, *, buckets: int = 256, max_position: int | None = 512, scale: float | None = None,
    keys: Tensor | None = None, queries: Tensor | None = None
) -> Terms:
    """DeBERTa: content to position (q·Kr) and position to content (k·Qr), both bucketed. Tables [heads, 2 buckets, dim]."""
    scale = 1 / math.sqrt(3 * dim) if scale is None else scale
    to_position = FromQuery(Table(dim, index=LogBuckets(buckets, max_position), heads=heads, values=keys), scale=scale)
    to_content = FromKey(Table(dim, index=LogBuckets(buckets, max_position), heads=heads, values=queries), scale=scale)
    return Terms([to_position, to_content])


def sam(dim: int, grid: tuple[int, int]) -> FromQuery:
    """SAM and ViTDet: the query meets a learned vector for the row and one for the column displacement."""
    return FromQuery(PerAxis(*(Table(dim, cells=(n,)) for n in grid)))
