"""Published position terms by name, each a line or two of features and readouts. Checked against the models' own code.

Each function says where a published model's weights go. Displacements are δ = q - k throughout.

| recipe | what the model computes | give `attention` also |
|---|---|---|
| t5 | q·k + b[head, bucket(δ)] | scale=1; in a decoder mask=causal |
| alibi | q·k / √d - m[head] · distance | mask=causal |
| swin | q·k / √d + b[head, δ] on a window | geometry=Grid(h, w) |
| swin_v2 | τ[head] cos(q, k) + 16 σ(MLP(log δ)) | score=Cosine(), scale=τ, geometry=Grid(h, w) |
| beit | as swin, with three entries for the class token | geometry=Grid(h, w, unplaced=1) |
| shaw | q·(k + R[clip(δ)]) / √d | |
| transformer_xl | ((q + u)·k + (q + v)·W R(δ)) / √d | |
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
    if heads < 1:
        raise ValueError(f"heads: expected a positive number, found {heads}")
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return Static(Slope(), readout=torch.tensor(slopes)[:, None])


def swin(heads: int, window: tuple[int, int]) -> Static:
    """Swin: a learned number for each head and displacement. `readout` [heads, cells] is its table, transposed."""
    return Static(Cells(*window), heads)


def beit(heads: int, window: tuple[int, int]) -> Static:
    """BEiT: Swin's table, then entries for class token to patch, patch to class token, and class token to itself.

    `readout` [heads, cells + 3] is its table, transposed.
    """
    return Static(Cells(*window, unplaced=True), heads)


def swin_v2(
    heads: int, window: tuple[int, int], *, hidden: int = 512, pretrained: tuple[int, int] | None = None
) -> Static:
    """Swin v2: a small network of the log-spaced displacement, bounded by 16.

    `features.weight1`, `bias1` and `weight2` are its continuous_position_bias_mlp; τ is exp(min(logit_scale, log 100)).
    `pretrained` is the window it was first trained on: None, or zeros as in the published configurations, for this one.
    """
    first = window if pretrained is None or max(pretrained) == 0 else pretrained
    return Static(Network(heads, axes=2, hidden=hidden, extent=[max(n - 1, 1) for n in first], bound=16.0))


def shaw(dim: int, clip: int | tuple[int, int], *, scale: float | None = None) -> FromQuery:
    """Shaw et al.: the query meets a learned vector for each clipped displacement (shared by all heads).

    `clip` is one number, or how far to the left and to the right. `features.values` [left + 1 + right, dim] begins at
    δ = -right; models that count k - q (Wav2Vec2-BERT) reverse it.
    """
    return FromQuery(Table(dim, clip=clip), scale=1 / math.sqrt(dim) if scale is None else scale)


def transformer_xl(
    heads: int, dim: int, *, features: int | None = None, order: str = "sin|cos", scale: float | None = None
) -> Terms:
    """Transformer-XL: a bias u per key, and (q + v)·W R(δ) with sinusoids R of `features` (heads * dim) numbers.

    Its parts are two terms: `[0].weight` [heads, dim, 1] is u, `[1].weight` [heads, dim, features] is W, and
    `[1].offset` [heads, dim] is v. Transformer-XL and XLNet have all sines first, the Conformers have pairs
    (order="sin_cos").
    """
    width = heads * dim if features is None else features
    scale = 1 / math.sqrt(dim) if scale is None else scale
    by_key = FromKey(Constant(), weight=nn.Parameter(torch.zeros(heads, dim, 1)), scale=scale)
    by_distance = FromQuery.learn(
        Sinusoid(Sinusoid.geometric(width), order=order), dim, heads, offset=True, scale=scale
    )
    return Terms([by_key, by_distance])


def deberta(
    heads: int,
    dim: int,
    *,
    buckets: int = 256,
    max_position: int | None = 512,
    scale: float | None = None,
    keys: Tensor | None = None,
    queries: Tensor | None = None,
) -> Terms:
    """DeBERTa: content to position (q·Kr) and position to content (k·Qr), both bucketed.

    The tables `keys` (Kr) and `queries` (Qr), [heads, 2 buckets, dim], are learned unless given; the published models
    make them by projecting their position embeddings. Without buckets (v1): buckets = the longest distance and
    max_position=None.
    Its parts are two terms: for a model with only one, take `[0]` or `[1]` and the scale 1 / √(2 dim).
    """
    scale = 1 / math.sqrt(3 * dim) if scale is None else scale
    to_position = FromQuery(Table(dim, index=LogBuckets(buckets, max_position), heads=heads, values=keys), scale=scale)
    to_content = FromKey(Table(dim, index=LogBuckets(buckets, max_position), heads=heads, values=queries), scale=scale)
    return Terms([to_position, to_content])


def sam(dim: int, grid: tuple[int, int]) -> FromQuery:
    """SAM and ViTDet: the query, unscaled, meets a learned vector for the row and one for the column displacement.

    `features.parts[axis].feature.values` [2 n - 1, dim] is rel_pos_h or rel_pos_w, resized to this grid.
    """
    return FromQuery(PerAxis(*(Table(dim, cells=(n,)) for n in grid)))
