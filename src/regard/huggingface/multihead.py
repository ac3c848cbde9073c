"""torch.nn.MultiheadAttention, as some models of transformers use it (the pooling heads of SigLIP, for one).

A stands where the weights would be, one matrix a head; torch gives their mean over heads unless told otherwise.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..masks import dense
from ..matrix import AttentionMatrix, attention
from .adapter import Adapter
from .masks import Read, additive, of_keys


class MultiHead(Adapter):
    """One projection for queries, keys and values together, or three."""

    classes: ClassVar[tuple[str, ...]] = ("torch.nn.modules.activation.MultiheadAttention",)

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds a key of its own (add_bias_kv or add_zero_attn)"
        return None

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        single = query.dim() == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        seen = pairs(attn_mask, q, k)
        if key_padding_mask is not None:
            seen = seen.also(hidden_keys(key_padding_mask, len(q)))
        A = attention(
            q, k, mask=seen.mask, position=seen.bias, q_start=0, dropout=self.dropout if self.training else 0.0
        )
        out = self.out_proj(self.look(A, v).transpose(1, 2).flatten(2))
        out = out.squeeze(0) if single else out if self.batch_first else out.transpose(0, 1)
        return out, A if need_weights else None


def pairs(mask: Tensor | None, q: Tensor, k: Tensor) -> Read:
    """torch's attn_mask, [q_len, k_len] or [batch * heads, q_len, k_len]: True hides, numbers are added."""
    if mask is None:
        return Read()
    mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (len(q), -1))
    return Read(dense(~mask)) if mask.dtype == torch.bool else additive(mask, q.shape[2], k.shape[2])


def hidden_keys(mask: Tensor, batch: int) -> Any:
    """torch's key_padding_mask, [batch, k_len]: True hides."""
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask: expected booleans (True hides a key), found {mask.dtype}")
    return of_keys(~mask.reshape(batch, -1), 0)
