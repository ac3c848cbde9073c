"""Attention without a relative term in modules that compute it by themselves: Falcon, with rotary positions.

    logit[i, j] = rot(q_i)·rot(k_j) / √dim

Falcon chooses its class from a dictionary and asks no interface. Its ALiBi variant adds the bias into a dense mask that
the model makes, once for its sdpa and twice for its eager attention, and is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..matrix import AttentionMatrix, attention
from .adapter import Adapter
from .sequence import joined, past_length, seen


class Falcon(Adapter):
    """Gives (output, A). As published, nothing is dropped from the weights."""

    classes: ClassVar[tuple[str, ...]] = ("falcon.FalconAttention",)
    # of the module itself
    training: bool
    layer_idx: int | None
    inv_norm_factor: float
    query_key_value: nn.Module
    dense: nn.Module
    _split_heads: Any

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        return "it adds ALiBi into a dense mask that the model makes" if module.config.alibi else None

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        if position_embeddings is None:
            raise ValueError("position_embeddings: expected cosines and sines, found None")
        start = past_length(layer_past, self.layer_idx)
        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        A = attention(q, k, scale=self.inv_norm_factor, **seen(attention_mask, q, k, start=start))
        return self.dense(joined(self.look(A, v))), A
