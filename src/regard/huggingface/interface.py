"""The attention function that transformers calls for models that choose their attention by name.

Registered as "regard" with transformers' AttentionInterface, and its mask function (masks.describe) with the
AttentionMaskInterface: without one, padding would be ignored in silence. The function makes a lazy A of what the model
hands over and returns (A @ v, A), so that `output_attentions=True` gives matrices to look into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..masks import causal, documents, window
from ..matrix import AttentionMatrix, attention
from ..position import Position
from ..watching import attended
from .masks import Described, Read, bias_term, read
from .running import notice

#: the name in config._attn_implementation; transformers looks for "flash", "sdpa" and others inside names
NAME = "regard"

#: arguments that change what attention means and that cannot be honoured
REFUSED = {
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks of keys chosen by an indexer",
}


def matrix_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> AttentionMatrix:
    """A, as a model's attention module describes it to the interface."""
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__}: {name} ({what}) is not something regard can describe")
    q_len, k_len = query.shape[2], key.shape[2]
    seen = read(attention_mask, q_len, k_len)
    if attention_mask is None:
        seen = unmasked(module, q_len, is_causal, sliding_window)
    if cu_seq_lens_q is not None and not (isinstance(attention_mask, Described) and attention_mask.packed):
        ids = [
            torch.searchsorted(bounds[1:].contiguous().long(), torch.arange(n, device=query.device), right=True)
            for bounds, n in (
                (cu_seq_lens_q, q_len),
                (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, k_len),
            )
        ]
        seen = seen.also(documents(ids[0], ids[1]))
    terms: list[Position] = [] if seen.bias is None else [seen.bias]
    if position_bias is not None:
        if isinstance(position_bias, Tensor):
            bias = position_bias[..., :k_len] if position_bias.shape[-1] > k_len else position_bias
            terms.append(bias_term(bias, q_len, k_len, seen.q_start, seen.k_start))
        else:  # an adapter made it, and knows its term
            terms.append(position_bias.term())
    return attention(
        query,
        key,
        scale=scaling,
        position=terms or None,
        mask=seen.mask,
        q_start=seen.q_start,
        k_start=seen.k_start,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.reshape(-1),
        dropout=dropout if module.training else 0.0,
    )


def unmasked(module: nn.Module, q_len: int, is_causal: bool | None, sliding_window: int | None) -> Read:
    """What holds when a model hands over no mask: the module itself may be causal."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    if not is_causal or q_len == 1:
        return Read()
    return Read(causal if sliding_window is None else causal & window(sliding_window - 1))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, AttentionMatrix]:
    """What transformers calls: (A @ v as [batch, q_len, heads, v_dim], A)."""
    A = matrix_of(module, query, key, attention_mask, **kwargs)
    attended(module, A, value)
    if is_ready(module, attention_mask, **kwargs):
        out = ready_product(module, query, key, value, attention_mask, **kwargs)
    else:
        notice(module, A, key.shape[2])
        out = A @ value
    return out.transpose(1, 2).contiguous(), A


def is_ready(
    module: nn.Module, attention_mask: Any, position_bias: Any = None, softcap: float | None = None,
    s_aux: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, **kwargs: Any,
) -> bool:  # fmt: skip
    """Whether a bias comes ready for every pair: PyTorch then multiplies, as fast as in the model; A is to look at.

    What a mask would say that is not there, or that is told in other ways, is left to A.
    """
    if not isinstance(position_bias, Tensor) or position_bias.shape[-2] == 1:
        return False
    return attention_mask is not None and softcap is None and s_aux is None and cu_seq_lens_q is None


def ready_product(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, position_bias: Tensor,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """A @ v with the bias as PyTorch's own mask of numbers."""
    k_len = key.shape[2]
    bias = position_bias[..., :k_len]
    mask = attention_mask
    if isinstance(mask, Described):
        mask = None if mask.mask is None else mask.dense()
    if mask is not None:
        mask = mask[..., :k_len]
        hidden = mask.dtype == torch.bool
        bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if hidden else bias + mask
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.to(query.dtype), scale=scaling,
        dropout_p=dropout if module.training else 0.0, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def register() -> None:
    """Make "regard" known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from .masks import describe

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe)
