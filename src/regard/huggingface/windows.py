"""Attention inside windows of an image: Swin and its copies (Donut, MaskFormer, CLAP), Swin v2 and Swin2SR.

    Swin      logit[i, j] = q_i·k_j / √dim + b[head, δ]                              a learned table over (δ_row, δ_col)
    Swin v2   logit[i, j] = τ[head] cos(q_i, k_j) + 16 σ(MLP(log-spaced δ))          the table is a small network's

A window is a row of the batch and a grid of its own. The models look the table up for every pair of a window, for every
head and layer; here it stays a table.

**Shifted windows.** A window that wraps around the image holds up to four regions that must not see each other. The
models add -100 between them; here they are told apart by their region, and a weight of exp(d - 100) becomes zero (d: by
how much the other region's logit is the larger). That is below float32's rounding until d is 83. Swin v2 adds its mask
twice, hence -200, and its logits cannot differ by more than 216.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..features import Cells
from ..geometry import Grid
from ..masks import Mask, documents
from ..matrix import AttentionMatrix, attention
from ..position import Static
from ..scores import Cosine
from .adapter import Adapter


def regions(barrier: Tensor | None, rows: int) -> Mask | None:
    """The model's mask [windows, length, length], zero inside a region, as ids for `rows` = images x windows.

    Being in one region is an equivalence, so that a region is named by its first token.
    """
    if barrier is None:
        return None
    ids = (barrier == 0).int().argmax(-1)  # [windows, length]
    return documents(ids.repeat(rows // len(ids), 1))


def split(x: Tensor, heads: int) -> Tensor:
    """[rows, length, heads x dim] -> [rows, heads, length, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of split."""
    return x.transpose(1, 2).flatten(-2)


class Windows(Adapter):
    """Swin: projections to and from heads in one module, which gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = ("swin.SwinAttention",)
    # of the module itself
    training: bool
    num_attention_heads: int
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    scaling: float
    attention_dropout: float
    relative_position_bias: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple:
        heads = self.num_attention_heads
        q, k, v = (split(project(hidden_states), heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        table = self.relative_position_bias
        A = attention(
            q, k, scale=self.scaling, position=by_cell(table.relative_position_bias_table, table.window_size),
            geometry=Grid(*table.window_size), mask=regions(attention_mask, len(q)),
            dropout=self.attention_dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o_proj(joined(self.look(A, v))), A


class BareWindows(Adapter):
    """The older layout: the output's projection is another module's, and A is handed out only when asked for."""

    classes: ClassVar[tuple[str, ...]] = (
        "donut.DonutSwinSelfAttention",
        "maskformer.MaskFormerSwinSelfAttention",
        "clap.ClapAudioSelfAttention",
    )
    # of the module itself
    training: bool
    num_attention_heads: int
    window_size: tuple[int, int]
    query: Any
    key: Any
    value: Any
    dropout: nn.Dropout
    relative_position_bias_table: Tensor

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple:
        heads = self.num_attention_heads
        q, k, v = (split(project(hidden_states), heads) for project in (self.query, self.key, self.value))
        A = self.matrix(
            q, k, geometry=Grid(*self.window_size), mask=regions(attention_mask, len(q)),
            dropout=self.dropout.p if self.training else 0.0,
        )  # fmt: skip
        context = joined(self.look(A, v))
        return (context, A) if output_attentions else (context,)

    def matrix(self, q: Tensor, k: Tensor, **how: Any) -> AttentionMatrix:
        return attention(q, k, position=by_cell(self.relative_position_bias_table, self.window_size), **how)


class CosineWindows(BareWindows):
    """Swin v2: cosines at a temperature a head, and a table that a network makes of the log-spaced displacements."""

    classes = ("swinv2.Swinv2SelfAttention", "swin2sr.Swin2SRSelfAttention")
    # of the module itself
    logit_scale: Tensor
    continuous_position_bias_mlp: Any
    relative_coords_table: Tensor

    def matrix(self, q: Tensor, k: Tensor, **how: Any) -> AttentionMatrix:
        table = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, -2)  # [cells, heads]
        temperature = self.logit_scale.clamp(max=math.log(100.0)).exp()  # [heads, 1, 1]
        position = by_cell(16 * torch.sigmoid(table), self.window_size)
        return attention(q, k, score=Cosine(), scale=temperature, position=position, **how)


def by_cell(table: Tensor, window: tuple[int, int]) -> Static:
    """A model's table [cells, heads] as a term: the models number displacements q - k row by row, as Cells does."""
    return Static(Cells(*window), readout=table.T)
