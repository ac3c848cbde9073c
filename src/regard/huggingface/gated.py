"""WavLM: T5's bias by bucket of the distance, and for each query a gate that says how much of it counts.

    logit[i, j] = q_i·k_j / √dim + g(x_i, head) b[bucket(i - j), head]

The first layer owns the table; each layer has its own gate, made of the hidden states before they are projected. The
model hands a dense [batch x heads, length, length] on from layer to layer; here that is the table. (It also gives the
*mean* of its heads as attention weights, repeated for each; A has every head's own.)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..matrix import AttentionMatrix, attention
from .adapter import Adapter
from .position_bias import Bias
from .sequence import joined, seen, split


class GatedBias(Adapter):
    """Gives (output, A, the bias for the layers that follow)."""

    classes: ClassVar[tuple[str, ...]] = ("wavlm.WavLMAttention",)
    # of the module itself
    training: bool
    num_heads: int
    max_distance: int
    scaling: float
    dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    rel_attn_embed: nn.Embedding
    gru_rel_pos_linear: nn.Linear
    gru_rel_pos_const: nn.Parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Bias | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix, Bias]:
        if position_bias is None:
            position_bias = Bias(self.rel_attn_embed.weight, self.max_distance)
        q, k, v = (split(to(hidden_states), self.num_heads) for to in (self.q_proj, self.k_proj, self.v_proj))
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout if self.training else 0.0,
            **seen(attention_mask, q, k, position_bias.term().bind(gate=self.gate(hidden_states))),
        )  # fmt: skip
        return self.out_proj(joined(self.look(A, v))), A, position_bias

    def gate(self, x: Tensor) -> Tensor:
        """How much of the bias each query takes: [batch, heads, length, 1]."""
        halves = self.gru_rel_pos_linear(split(x, self.num_heads)).unflatten(-1, (2, 4)).sum(-1)
        a, b = torch.sigmoid(halves).chunk(2, dim=-1)
        return a * (b * self.gru_rel_pos_const - 1.0) + 2.0
