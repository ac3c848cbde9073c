"""What the adapters for sequences share: heads split and joined, cached keys and values, the model's mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from ..position import Position
from .masks import Described, of_keys, read


def split(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * dim] to [batch, heads, length, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of split."""
    return x.transpose(1, 2).flatten(-2)


def past_length(past: Any, layer: int | None) -> int | Tensor:
    """How many keys of this layer a cache holds: the place of the first query. Ask before the cache takes in more."""
    if past is None:
        return 0
    count = past.get_seq_length(layer)
    if not isinstance(count, Tensor):
        return count
    if count.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(count)
    return count.clone().reshape(1)  # the cache counts on in the same tensor


def keys_and_values(
    module: Any,
    x: Tensor,
    context: Tensor | None,
    past: Any,
    to_k: Callable[[Tensor], Tensor],
    to_v: Callable[[Tensor], Tensor],
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values of x, or of a context, joined with what a cache holds; a context is projected only once."""
    cache, layer = past, module.layer_idx
    paired = isinstance(past, EncoderDecoderCache)
    if paired:
        cache = past.self_attention_cache if context is None else past.cross_attention_cache
        if context is not None and past.is_updated.get(layer):
            return cache.layers[layer].keys, cache.layers[layer].values
    source = x if context is None else context
    k, v = split(to_k(source), heads), split(to_v(source), heads)
    if cache is not None:
        k, v = cache.update(k, v, layer)
        if paired and context is not None:
            past.is_updated[layer] = True
    return k, v


def seen(mask: Any, q: Tensor, k: Tensor, *terms: Position | None, start: int | Tensor | None = None) -> dict[str, Any]:
    """Arguments of `attention`: what the model's mask says, where the queries stand, and the terms.

    `start` is the place of the first query among the keys; a description of the mask knows it too, and only it knows
    where the first key stands in a cache that has dropped keys.
    """
    found = read(mask, q.shape[2], k.shape[2])
    position = [term for term in (*terms, found.bias) if term is not None]
    how: dict[str, Any] = {"mask": found.mask, "position": position or None}
    if isinstance(mask, Described):
        how.update(q_start=found.q_start, k_start=found.k_start)
    elif start is not None:
        how["q_start"] = start
    return how


def padded(real: Tensor) -> Described:
    """A 2-D attention_mask [batch, length] of tokens that look at each other, read once for all layers."""
    size = (real.shape[0], real.shape[1], real.shape[1])
    return Described(of_keys(real.bool(), 0), 0, 0, size, real.device)
