"""Attention without a relative term in modules that compute it by themselves: Falcon, GPT-J, CodeGen and GPT-Neo.

    logit[i, j] = rot(q_i)·rot(k_j) / √dim          GPT-Neo: q_i·k_j

Falcon chooses its class from a dictionary and asks no interface. Its ALiBi variant adds the bias into a dense mask that
the model makes, once for its sdpa and twice for its eager attention, and is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..masks import Mask, causal, window
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


class Core(Adapter):
    """GPT-J and CodeGen: only the core is ours, after q and k have been turned and the cache has them."""

    classes: ClassVar[tuple[str, ...]] = ("gptj.GPTJAttention", "codegen.CodeGenAttention")
    training: bool
    attn_dropout: nn.Dropout
    scale_attn: Tensor

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
    ) -> tuple[Tensor, AttentionMatrix]:
        how = seen(attention_mask, query, key, start=key.shape[2] - query.shape[2])
        own = self.own_mask()
        if own is not None:
            how["mask"] = own if how["mask"] is None else how["mask"] & own
        dropped = self.attn_dropout.p if self.training else 0.0
        A = attention(query, key, scale=self.own_scale(), dropout=dropped, **how)
        return self.look(A, value), A

    def own_scale(self) -> float:
        return 1.0 / float(self.scale_attn)

    def own_mask(self) -> Mask | None:
        """What the module hides besides the model's mask."""
        return None


class NeoCore(Core):
    """GPT-Neo: no scale, and every other layer in a window."""

    classes = ("gpt_neo.GPTNeoSelfAttention",)
    config: Any
    attention_type: str

    def own_scale(self) -> float:
        return 1.0

    def own_mask(self) -> Mask:
        return causal & window(self.config.window_size - 1) if self.attention_type == "local" else causal
