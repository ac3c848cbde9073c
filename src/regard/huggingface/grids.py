"""Attention over all patches of an image with a learned table: BEiT and Data2VecVision with a class token; LeViT.

    logit[i, j] = q_i·k_j / √dim + b[head, δ]      with three more entries: from the class token, to it, and to itself

The models look the table up for every pair, in a module of its own: one a layer, or one for all layers. Its adapter
hands on the table instead, resized to the grid as the models resize it; the attention's adapter reads it. A model adds
this bias to its mask where it has one: so it knows how to be added.

The published code reads a table of h x w displacements as one of w x h before it resizes it. On a square that changes
nothing; on another grid we do what it does, so that outputs are those of the model.

LeViT's table knows distances without a sign, b[head, |δ_row|, |δ_col|]; where it makes an image smaller, its queries
are some of the cells of its keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..features import Cells
from ..geometry import Grid, Points
from ..matrix import AttentionMatrix, attention
from ..position import Position, Static
from .adapter import Adapter
from .masks import read


@dataclass(frozen=True, eq=False)
class GridBias:
    """A bias over the displacements of a grid, [heads, cells + 3], and what the model added to it."""

    tables: tuple[Tensor, ...]
    grid: tuple[int, int]
    mask: Any = None

    def __add__(self, other: Any) -> GridBias:
        if other is None:
            return self
        if isinstance(other, GridBias):
            if other.grid != self.grid:
                raise ValueError(f"relative_position_bias: two grids, {self.grid} and {other.grid}")
            mask = other.mask if self.mask is None else self.mask
            if self.mask is not None and other.mask is not None:
                raise ValueError("attention_mask: found two masks, expected one")
            return GridBias(self.tables + other.tables, self.grid, mask)
        if self.mask is not None:
            raise ValueError("attention_mask: found two masks, expected one")
        return GridBias(self.tables, self.grid, other)

    __radd__ = __add__

    def position(self) -> Position:
        """All of it as one term: tables of one grid add up."""
        total = self.tables[0] if len(self.tables) == 1 else torch.stack(self.tables).sum(0)
        return Static(Cells(*self.grid, unplaced=True), readout=total)


class GridTable(Adapter):
    """The module that makes the bias."""

    classes: ClassVar[tuple[str, ...]] = (
        "beit.BeitRelativePositionBias",
        "data2vec.Data2VecVisionRelativePositionBias",
    )
    # of the module itself
    window_size: tuple[int, int]
    relative_position_bias_table: Tensor

    def forward(
        self, window_size: tuple[int, int], interpolate_pos_encoding: bool = False, dim_size: int | None = None
    ) -> GridBias:
        grid = (int(window_size[0]), int(window_size[1]))
        tokens = grid[0] * grid[1] + 1
        if interpolate_pos_encoding and dim_size != tokens:
            raise ValueError(
                f"interpolate_pos_encoding: the bias of a grid of {grid[0]} x {grid[1]} and a class token is for "
                f"{tokens} tokens, found {dim_size}"
            )
        table, own = self.relative_position_bias_table, tuple(2 * n - 1 for n in self.window_size)
        want = tuple(2 * n - 1 for n in grid)
        cells = table[:-3]
        if want != own or own[0] != own[1]:
            image = cells.T.unflatten(-1, (own[1], own[0]))[None]  # as published, see above
            cells = F.interpolate(image, size=want, mode="bilinear")[0].flatten(1).T
        return GridBias((torch.cat([cells, table[-3:]]).T,), grid)


class Patches(Adapter):
    """BEiT: projections to and from heads in one module, the bias in the place of a mask. Gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = ("beit.BeitAttention",)
    # of the module itself
    training: bool
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections)
        bias = attention_mask if isinstance(attention_mask, GridBias) else None
        mask = bias.mask if bias is not None else attention_mask
        A = matrix(q, k, bias, mask, self.scaling, self.attention_dropout if self.training else 0.0)
        return self.o_proj(self.look(A, v).transpose(1, 2).flatten(-2)), A


class BarePatches(Adapter):
    """Data2VecVision: the output's projection is another module's, and A is handed out only when asked for."""

    classes: ClassVar[tuple[str, ...]] = ("data2vec.Data2VecVisionSelfAttention",)
    # of the module itself
    training: bool
    config: Any
    attention_head_size: int
    has_relative_position_bias: bool
    relative_position_bias: Any
    dropout: nn.Dropout
    query: Any
    key: Any
    value: Any

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool | None = False,
        relative_position_bias: GridBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> tuple:
        size = self.attention_head_size
        projections = (self.query, self.key, self.value)
        q, k, v = (project(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for project in projections)
        bias = relative_position_bias
        if self.has_relative_position_bias:
            if resolution is None:
                raise ValueError("resolution: expected the height and width of the image, found None")
            patch = self.config.patch_size
            grid = (resolution[0] // patch, resolution[1] // patch)
            bias = self.relative_position_bias(grid, interpolate_pos_encoding, dim_size=hidden_states.shape[1]) + bias
        A = matrix(q, k, bias, None, size**-0.5, self.dropout.p if self.training else 0.0)
        context = self.look(A, v).transpose(1, 2).flatten(-2)
        return (context, A) if output_attentions else (context,)


class SdpaPatches(BarePatches):
    """Its class for SDPA always gives two things."""

    classes = ("data2vec.Data2VecVisionSdpaSelfAttention",)

    def forward(self, *given: Any, **named: Any) -> tuple:
        found = super().forward(*given, **named)
        return found if len(found) == 2 else (*found, None)


def matrix(q: Tensor, k: Tensor, bias: GridBias | None, mask: Any, scale: float, dropout: float) -> AttentionMatrix:
    """A of all patches and the class token before them."""
    given = read(mask, q.shape[-2], k.shape[-2])
    terms = [term for term in (None if bias is None else bias.position(), given.bias) if term is not None]
    geometry = None if bias is None else Grid(*bias.grid, unplaced=1)
    return attention(q, k, scale=scale, position=terms, geometry=geometry, mask=given.mask, dropout=dropout)


class Unsigned(Adapter):
    """LeViT: a bias by how many rows and columns lie between, whichever way. Gives the output alone."""

    classes: ClassVar[tuple[str, ...]] = ("levit.LevitAttention",)
    # of the module itself
    num_attention_heads: int
    attention_ratio: int
    key_dim: int
    scale: float
    attention_biases: Tensor  # [heads, pairs of distances]
    attention_bias_idxs: Tensor  # [queries, keys]
    queries_keys_values: Any
    projection: Any
    activation: Any

    def forward(self, hidden_state: Tensor) -> Tensor:
        parts = self.queries_keys_values(hidden_state).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
        q, k, v = parts.split([self.key_dim, self.key_dim, self.attention_ratio * self.key_dim], dim=-1)
        side = math.isqrt(k.shape[-2])
        return self.attend(q, k, v, Grid(side, side), side)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, geometry: Any, side: int) -> Tensor:
        A = attention(q, k, scale=self.scale, position=self.by_distance(side), geometry=geometry)
        return self.projection(self.activation(self.look(A, v).transpose(1, 2).flatten(-2)))

    def by_distance(self, side: int) -> Static:
        """The first query is in the corner: its row names the bias of every distance."""
        away = torch.arange(1 - side, side, device=self.attention_biases.device).abs()
        entries = self.attention_bias_idxs[0][(away[:, None] * side + away).flatten()]
        return Static(Cells(side, side), readout=self.attention_biases[:, entries])


class UnsignedSubsample(Unsigned):
    """The same where the queries are every stride-th row and column of the keys."""

    classes = ("levit.LevitAttentionSubsample",)
    resolution_out: int
    keys_values: Any
    queries: Any
    queries_subsample: Any

    def forward(self, hidden_state: Tensor) -> Tensor:
        heads = self.num_attention_heads
        parts = self.keys_values(hidden_state).unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = parts.split([self.key_dim, self.attention_ratio * self.key_dim], dim=-1)
        q = self.queries(self.queries_subsample(hidden_state)).unflatten(-1, (heads, -1)).transpose(1, 2)
        side = math.isqrt(k.shape[-2])
        keys = cells(side, 1, k.device)
        queries = cells(self.resolution_out, self.queries_subsample.stride, k.device)
        return self.attend(q, k, v, (Points(queries), Points(keys)), side)


def cells(side: int, stride: int, device: torch.device) -> Tensor:
    """Rows and columns of a square, [side * side, 2]."""
    at = torch.arange(side, device=device) * stride
    return torch.cartesian_prod(at, at)
