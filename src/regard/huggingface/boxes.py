"""Learned biases by bucket of the distance on a page: LayoutLMv2 and LayoutLMv3.

    logit[i, j] = q_i·k_j / √dim + s (b[bucket(t_i - t_j)] + b_x[bucket(x_i - x_j)] + b_y[bucket(y_i - y_j)])

t is the place in the text, x and y a corner of the token's box: coordinates of their own for every token, `Points`
(s = 1 in version 2 and 1 / √dim in version 3). The models look three tables up for every pair and add them up,
[batch, heads, length, length]; here the encoder hands on the coordinates and the tables. They are read without a
gradient, as in the models.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..features import Buckets, OnAxis
from ..geometry import Points
from ..matrix import AttentionMatrix, attention
from ..position import Static
from .adapter import Adapter
from .sequence import joined, seen, split


class Axis(NamedTuple):
    """One coordinate of every token, and the bias by its distance."""

    places: Tensor  # [1 or batch, length], whole numbers
    table: Tensor  # [heads, buckets]
    max_distance: int


class Axes(NamedTuple):
    """What travels from the encoder to its layers instead of a dense bias."""

    axes: tuple[Axis, ...]

    def __add__(self, other: Any) -> Axes:
        return Axes(self.axes + other.axes)

    def description(self, scale: float) -> dict[str, Any]:
        """Arguments of `attention`: where the tokens are, and what that adds."""
        rows = max(len(axis.places) for axis in self.axes)
        coords = torch.stack([axis.places.expand(rows, -1) for axis in self.axes], dim=-1)
        terms = [
            Static(OnAxis(at, Buckets(axis.table.shape[-1], axis.max_distance)), readout=scale * axis.table)
            for at, axis in enumerate(self.axes)
        ]
        return {"geometry": Points(coords.long()), "position": terms}


def along(places: Tensor, weights: nn.Linear, max_distance: int) -> Axis:
    return Axis(places, weights.weight.detach(), max_distance)


class PageEncoder(Adapter):
    """LayoutLMv3's encoder, which makes the biases for its layers."""

    classes: ClassVar[tuple[str, ...]] = ("layoutlmv3.LayoutLMv3Encoder",)
    # of the module itself
    rel_pos_bias: nn.Linear
    rel_pos_x_bias: nn.Linear
    rel_pos_y_bias: nn.Linear
    max_rel_pos: int
    max_rel_2d_pos: int

    def _cal_1d_pos_emb(self, position_ids: Tensor) -> Axes:
        return Axes((along(position_ids, self.rel_pos_bias, self.max_rel_pos),))

    def _cal_2d_pos_emb(self, bbox: Tensor) -> Axes:
        sides = ((bbox[..., 0], self.rel_pos_x_bias), (bbox[..., 3], self.rel_pos_y_bias))
        return Axes(tuple(along(places, weights, self.max_rel_2d_pos) for places, weights in sides))


class PageEncoder2(PageEncoder):
    """LayoutLMv2's, which has other names for the same."""

    classes = ("layoutlmv2.LayoutLMv2Encoder",)
    _calculate_1d_position_embeddings = PageEncoder._cal_1d_pos_emb
    _calculate_2d_position_embeddings = PageEncoder._cal_2d_pos_emb


class Page(Adapter):
    """A layer of LayoutLMv3, given the biases. Gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = ("layoutlmv3.LayoutLMv3SelfAttention",)
    # of the module itself
    training: bool
    num_attention_heads: int
    attention_head_size: int
    has_relative_attention_bias: bool
    has_spatial_attention_bias: bool
    dropout: nn.Dropout
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix | None:
        if not (module.has_relative_attention_bias or module.has_spatial_attention_bias):
            return None
        q = next(module.parameters()).new_zeros(1, module.num_attention_heads, 3, module.attention_head_size)
        axis = Axis(torch.arange(3, device=q.device)[None], q.new_zeros(len(q[0]), 8), 8)
        return attention(q, q, **Axes((axis,)).description(1.0))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rel_pos: Axes | None = None,
        rel_2d_pos: Axes | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        q, k, v = (split(x, self.num_attention_heads) for x in self.projected(hidden_states))
        how = seen(attention_mask, q, k)
        bias = self.bias(rel_pos, rel_2d_pos)
        if bias is not None:
            added = bias.description(self.bias_scale())
            how |= {"geometry": added["geometry"], "position": [*added["position"], *(how["position"] or ())]}
        A = attention(q, k, dropout=self.dropout.p if self.training else 0.0, **how)
        return joined(self.look(A, v)), A

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.query(x), self.key(x), self.value(x)

    def bias_scale(self) -> float:
        return self.attention_head_size**-0.5

    def bias(self, text: Axes | None, page: Axes | None) -> Axes | None:
        """Version 3 has the page's only together with the text's."""
        if not self.has_relative_attention_bias or text is None:
            return None
        return text + page if self.has_spatial_attention_bias and page is not None else text


class Page2(Page):
    """A layer of LayoutLMv2."""

    classes = ("layoutlmv2.LayoutLMv2SelfAttention",)
    compute_qkv: Any

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.compute_qkv(x)

    def bias_scale(self) -> float:
        return 1.0

    def bias(self, text: Axes | None, page: Axes | None) -> Axes | None:
        given = [x for x, has in (
            (text, self.has_relative_attention_bias), (page, self.has_spatial_attention_bias)
        ) if has and x is not None]  # fmt: skip
        return None if not given else given[0] if len(given) == 1 else given[0] + given[1]
