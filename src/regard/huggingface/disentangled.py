"""Disentangled attention: DeBERTa (v1, v2 and v3) and SEW-D. Content meets position on both sides.

    logit[i, j] = (q_i·k_j + q_i·K_r[δ] + k_j·Q_r[δ]) / √(3 dim)       K_r, Q_r: projections of one table of embeddings

δ = i - j falls into logarithmic buckets, or is clipped. The models gather both terms for every pair; here the tables of
a few hundred rows are projected and stay tables. Their encoders also make an N x N table of buckets and an N x N mask,
which here are nothing and the padding of the keys. (A padded query then sees the real keys and not, as in the models,
all of them evenly: what it gives is never looked at.)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from ..features import LogBuckets, Table
from ..matrix import AttentionMatrix, attention
from ..position import FromKey, FromQuery, Term
from .adapter import Adapter
from .sequence import joined, padded, seen, split


class Disentangled(Adapter):
    """DeBERTa v2 and v3: buckets, two projections of the embeddings or those of q and k; gives (output, A or None)."""

    classes: ClassVar[tuple[str, ...]] = ("deberta_v2.DisentangledSelfAttention",)
    # of the module itself
    training: bool
    num_attention_heads: int
    attention_head_size: int
    pos_att_type: list[str]
    relative_attention: bool
    share_att_key: bool
    position_buckets: int
    max_relative_positions: int
    query_proj: nn.Linear
    key_proj: nn.Linear
    value_proj: nn.Linear
    pos_key_proj: nn.Linear
    pos_query_proj: nn.Linear
    pos_dropout: nn.Module
    dropout: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        out, A = self.run(hidden_states, attention_mask, query_states, relative_pos, rel_embeddings)
        return out, A if output_attentions else None

    def run(
        self, x: Tensor, mask: Any, other: Tensor | None, relative_pos: Tensor | None, embeddings: Tensor | None
    ) -> tuple[Tensor, AttentionMatrix]:
        if relative_pos is not None:
            raise ValueError(
                f"relative_pos: {type(self).__name__} on regard counts distances itself, found a tensor "
                f"{list(relative_pos.shape)}; disable regard to give it"
            )
        q, k, v = self.heads(x, x if other is None else other)
        scale = 1 / math.sqrt(self.attention_head_size * self.count())
        A = attention(
            q, k, scale=scale, dropout=_rate(self.dropout) if self.training else 0.0,
            **seen(mask, q, k, *self.terms(embeddings, scale)),
        )  # fmt: skip
        return joined(self.look(A, v)), A

    def count(self) -> int:
        """How many products share the scale."""
        return 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))

    def heads(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            split(to(source), self.num_attention_heads)
            for to, source in ((self.query_proj, other), (self.key_proj, x), (self.value_proj, x))
        )
        return q, k, v

    def terms(self, embeddings: Tensor | None, scale: float) -> list[Term]:
        if not self.relative_attention or embeddings is None:
            return []
        bins = self.bins()
        rows = self.pos_dropout(embeddings)[: bins.dim]
        terms: list[Term] = []
        for kind, term in (("c2p", FromQuery), ("p2c", FromKey)):
            if kind in self.pos_att_type:
                values = split(self.project(kind, rows)[None], self.num_attention_heads)[0]  # [heads, bins, dim]
                table = Table(values.shape[-1], index=bins, heads=len(values), values=values)
                terms.append(term(table, scale=scale))
        return terms

    def bins(self) -> LogBuckets:
        if self.position_buckets > 0:
            return LogBuckets(self.position_buckets, self.max_relative_positions)
        return LogBuckets(self.max_relative_positions, None)

    def project(self, kind: str, rows: Tensor) -> Tensor:
        """The embeddings as keys (for c2p) or as queries (for p2c)."""
        if self.share_att_key:
            return self.key_proj(rows) if kind == "c2p" else self.query_proj(rows)
        return self.pos_key_proj(rows) if kind == "c2p" else self.pos_query_proj(rows)


class SpeechDisentangled(Disentangled):
    """SEW-D: the same, and always gives A."""

    classes = ("sew_d.DisentangledSelfAttention",)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        return self.run(hidden_states, attention_mask, query_states, relative_pos, rel_embeddings)


class FirstDisentangled(Disentangled):
    """DeBERTa v1: one projection for q, k and v, distances clipped and not bucketed."""

    classes = ("deberta.DisentangledSelfAttention",)
    in_proj: nn.Linear
    q_bias: nn.Parameter
    v_bias: nn.Parameter
    pos_proj: nn.Linear
    pos_q_proj: nn.Linear

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        if module.talking_head:
            return "its talking heads mix the logits of all heads before the softmax"
        return None

    def count(self) -> int:
        return 1 + len(self.pos_att_type)

    def heads(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if other is not x:
            raise ValueError("query_states: expected None for DeBERTa v1 on regard, found a tensor")
        q, k, v = split(self.in_proj(x), self.num_attention_heads).chunk(3, dim=-1)
        return q + self.bias(self.q_bias), k, v + self.bias(self.v_bias)

    def bias(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.num_attention_heads, 1, -1))

    def bins(self) -> LogBuckets:
        return LogBuckets(self.max_relative_positions, None)

    def project(self, kind: str, rows: Tensor) -> Tensor:
        return self.pos_proj(rows) if kind == "c2p" else self.pos_q_proj(rows)


class DisentangledEncoder(Adapter):
    """The encoders: no N x N buckets, and of the mask only the padding of the keys."""

    classes = ("deberta.DebertaEncoder", "deberta_v2.DebertaV2Encoder", "sew_d.SEWDTransformerEncoder")

    def get_attention_mask(self, attention_mask: Tensor) -> Any:
        if attention_mask.dim() == 2:
            return padded(attention_mask)
        return (attention_mask.unsqueeze(1) if attention_mask.dim() == 3 else attention_mask).bool()

    def get_rel_pos(
        self, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Tensor | None = None
    ) -> Tensor | None:
        return relative_pos


def _rate(dropout: Any) -> float:
    """nn.Dropout's probability, or that of SEW-D's own dropout."""
    return float(dropout.p if isinstance(dropout, nn.Dropout) else dropout.drop_prob)
