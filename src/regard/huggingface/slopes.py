"""ALiBi, the farther the less: Bloom and MPT.

    logit[i, j] = q_i·k_j / √dim - m[head] (i - j)

The models add m times the key's place, which differs by a constant a row and so gives the same weights; here it is the
distance, which stays small where the weights are large. Bloom counts places by its 2-D attention mask. Padding at the
ends moves all places of a row alike, so that distances stay what they are; holes between real tokens do not, and then
each key is told its place.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..features import Constant, Slope
from ..matrix import AttentionMatrix, attention
from ..position import FromKey, Position, Static
from .adapter import Adapter
from .sequence import joined, past_length, seen


class Slopes(NamedTuple):
    """What a model hands to its layers instead of a bias."""

    values: Tensor  # [heads]
    places: Tensor | None = None  # of the keys, [batch, k_len], where distances in the sequence are not what counts

    def term(self) -> Position:
        if self.places is None:
            return Static(Slope(), readout=self.values[:, None])
        return FromKey(Constant(), weight=self.values[:, None, None]).bind(key=self.places[:, None, :, None])


class BloomSlopes(Adapter):
    """Bloom's model, which makes the bias for its layers."""

    classes: ClassVar[tuple[str, ...]] = ("bloom.BloomModel",)

    def build_alibi_tensor(self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Slopes:
        pair = torch.ones(1, 2, device=attention_mask.device)
        published: Any = super()
        slopes = published.build_alibi_tensor(pair, num_heads, torch.float32)[:, 0, 1]  # at place 1: the slope itself
        real = attention_mask.bool()
        if not torch.compiler.is_compiling():
            runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(-1)
            if bool((runs <= 1).all()):
                return Slopes(slopes)
        return Slopes(slopes, (real.cumsum(-1) - 1).clamp(min=0).to(torch.promote_types(dtype, torch.float32)))


class BloomLayer(Adapter):
    """A layer of Bloom, given the bias; gives (output with the residual, A)."""

    classes = ("bloom.BloomAttention",)
    training: bool
    layer_idx: int | None
    hidden_dropout: float
    attention_dropout: nn.Dropout
    inv_norm_factor: float
    query_key_value: nn.Linear
    dense: nn.Linear
    _reshape: Any

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Slopes,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        if isinstance(alibi, Tensor):
            raise TypeError(
                f"alibi: {type(self).__name__} on regard takes what BloomModel made, found a tensor {list(alibi.shape)}"
            )
        start = past_length(layer_past, self.layer_idx)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        A = attention(
            q, k, scale=self.inv_norm_factor, dropout=self.attention_dropout.p if self.training else 0.0,
            **seen(attention_mask, q, k, alibi.term(), start=start),
        )  # fmt: skip
        out = self.dense(joined(self.look(A, v)))
        return residual + nn.functional.dropout(out, self.hidden_dropout, self.training), A


class MptSlopes(Adapter):
    """MPT's model, which makes the bias for its layers."""

    classes = ("mpt.MptModel",)

    def build_mpt_alibi_tensor(
        self, num_heads: int, sequence_length: int, alibi_bias_max: int = 8, device: Any = None
    ) -> Slopes:
        published: Any = super()
        pair = published.build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max, device)  # places -1 and 0
        return Slopes(-pair[:, 0, 0])


class MptLayer(Adapter):
    """A layer of MPT, given the bias; gives (output, A)."""

    classes = ("mpt.MptAttention",)
    training: bool
    layer_idx: int | None
    n_heads: int
    softmax_scale: float
    attn_dropout_p: float
    clip_qkv: float | None
    Wqkv: nn.Linear
    out_proj: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Slopes,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        start = past_length(past_key_values, self.layer_idx)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = mixed.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        A = attention(
            q, k, scale=self.softmax_scale, dropout=self.attn_dropout_p if self.training else 0.0,
            **seen(attention_mask, q, k, position_bias.term(), start=start),
        )  # fmt: skip
        return self.out_proj(joined(self.look(A, v))), A
