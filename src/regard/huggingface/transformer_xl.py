"""Transformer-XL's attention, as the Conformers have it: Wav2Vec2-Conformer, Wav2Vec2-BERT, SeamlessM4T, Parakeet ...

    logit[i, j] = ((q_i + u)·k_j + (q_i + v)·W R_(i - j)) / √dim          R: sinusoids; u, v, W learned

The models multiply every query with every W R, [heads, length, 2 length - 1], and skew that into place; here W R is a
table of displacements, [heads, 2 length - 1, dim], that the engines skew tile by tile. R is taken as the model made it,
with its rounding and its dropout.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..features import Constant, Feature
from ..matrix import AttentionMatrix, attention
from ..position import FromKey, FromQuery, Position, Terms
from .adapter import Adapter
from .relative_key import clipped
from .sequence import joined, seen, split


class Rows(Feature):
    """R as given: for each head a row for each displacement, from `first` down, as the models have them."""

    values: Tensor

    def __init__(self, values: Tensor, first: int | None = None):
        super().__init__()
        self.heads, self.count, self.dim = values.shape
        self.first = self.count // 2 if first is None else first
        self.register_buffer("values", values, persistent=False)

    def forward(self, delta: Tensor) -> Tensor:
        at = self.first - delta[..., 0]
        return self.values.index_select(1, at.reshape(-1)).unflatten(1, at.shape)

    def check(self, lo: Any, hi: Any) -> None:
        least = self.first - self.count + 1
        if lo[0] < least or hi[0] > self.first:
            raise ValueError(
                f"position: the model gives embeddings of displacements {least} to {self.first}, but the sequence "
                f"reaches from {lo[0]} to {hi[0]}"
            )

    def extra_repr(self) -> str:
        return f"{self.count}, dim={self.dim}"


def transformer_xl(places: Tensor, project: nn.Module, u: Tensor, v: Tensor, scale: float) -> Terms:
    """Both terms from a model's embeddings [1 or batch, 2 length - 1, width], which begin with the earliest key."""
    rows = split(project(places[:1]), len(u))[0]  # [heads, 2 length - 1, dim]; the batch only repeats them
    return both(rows, u, v, scale)


def both(rows: Tensor, u: Tensor, v: Tensor, scale: float) -> Terms:
    """(q·W R + u·k + v·W R) from W R as it is."""
    return Terms([FromKey(Constant(), weight=u[..., None], scale=scale), FromQuery(Rows(rows), offset=v, scale=scale)])


def three_tokens(u: Tensor, v: Tensor) -> AttentionMatrix:
    """A small A with both terms."""
    heads, dim = u.shape
    q = u.new_zeros(1, heads, 3, dim)
    return attention(q, q, position=both(u.new_zeros(heads, 5, dim), u, v, 1.0))


class Conformer(Adapter):
    """Wav2Vec2-Conformer and its copies; `position_embeddings_type` says which term. Gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = (
        "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention",
        "wav2vec2_bert.Wav2Vec2BertSelfAttention",
        "seamless_m4t.SeamlessM4TConformerSelfAttention",
        "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
    )
    # of the module itself
    training: bool
    num_heads: int
    scaling: float
    position_embeddings_type: str | None
    linear_q: nn.Linear
    linear_k: nn.Linear
    linear_v: nn.Linear
    linear_out: nn.Linear
    linear_pos: nn.Linear
    pos_bias_u: nn.Parameter
    pos_bias_v: nn.Parameter
    dropout: nn.Dropout
    _apply_rotary_embedding: Any

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix | None:
        if module.position_embeddings_type == "relative":
            return three_tokens(module.pos_bias_u, module.pos_bias_v)
        if module.position_embeddings_type != "relative_key":
            return None
        rows = module.distance_embedding.weight
        q = rows.new_zeros(1, module.num_heads, 3, rows.shape[-1])
        return attention(q, q, position=clipped(module))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        relative_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        kind, places, turned = self.position_embeddings_type, relative_position_embeddings, hidden_states
        if kind in ("rotary", "relative") and places is None:
            raise ValueError(f"relative_position_embeddings: expected a tensor for {kind!r} positions, found None")
        if kind == "rotary":
            turned = self._apply_rotary_embedding(hidden_states, places)  # before the projections, as published
        q, k, v = (
            split(to(x), self.num_heads)
            for to, x in ((self.linear_q, turned), (self.linear_k, turned), (self.linear_v, hidden_states))
        )
        term: Position | None = None
        if kind == "relative":
            assert places is not None
            term = transformer_xl(places, self.linear_pos, self.pos_bias_u, self.pos_bias_v, self.scaling)
        elif kind == "relative_key":
            term = clipped(self)
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout.p if self.training else 0.0,
            **seen(attention_mask, q, k, term),
        )  # fmt: skip
        return self.linear_out(joined(self.look(A, v))), A


class FastConformer(Adapter):
    """Parakeet: the same with grouped heads; gives (output, A)."""

    classes = ("parakeet.ParakeetEncoderAttention",)
    training: bool
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    relative_k_proj: nn.Linear
    bias_u: nn.Parameter
    bias_v: nn.Parameter

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix:
        return three_tokens(module.bias_u, module.bias_v)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, AttentionMatrix]:
        if attention_mask is not None:
            # real queries times real keys, [batch, 1, length, length]: its diagonal says which are real
            attention_mask = attention_mask.diagonal(dim1=-2, dim2=-1).squeeze(1)
        return self.attend(*self.projected(hidden_states), position_embeddings, attention_mask)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            to(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for to in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, mask: Any, start: int | None = None
    ) -> tuple[Tensor, AttentionMatrix]:
        term = transformer_xl(places, self.relative_k_proj, self.bias_u, self.bias_v, self.scaling)
        A = attention(
            q, k, scale=self.scaling, dropout=self.attention_dropout if self.training else 0.0,
            **seen(mask, q, k, term, start=start),
        )  # fmt: skip
        return self.o_proj(joined(self.look(A, v))), A


class StreamingConformer(FastConformer):
    """Nemotron's: Parakeet with a cache; its mask shows whole chunks of keys. Gives (output, A)."""

    classes = ("nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention",)
    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        q, k, v = self.projected(hidden_states)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.attend(q, k, v, position_embeddings, attention_mask, start=k.shape[2] - q.shape[2])


class SpeakingConformer(Adapter):
    """FastSpeech2-Conformer: the same with a mask of its own, [batch, 1, length]. Gives (output, A or None)."""

    classes = ("fastspeech2_conformer.FastSpeech2ConformerAttention",)
    training: bool
    num_heads: int
    head_dim: int
    linear_q: nn.Linear
    linear_k: nn.Linear
    linear_v: nn.Linear
    linear_out: nn.Linear
    linear_pos: nn.Linear
    pos_bias_u: nn.Parameter
    pos_bias_v: nn.Parameter
    dropout: nn.Dropout

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix:
        return three_tokens(module.pos_bias_u, module.pos_bias_v)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        if pos_emb is None:
            raise ValueError("pos_emb: expected the embeddings of positions, found None")
        q, k, v = (split(to(hidden_states), self.num_heads) for to in (self.linear_q, self.linear_k, self.linear_v))
        scale = self.head_dim**-0.5
        term = transformer_xl(pos_emb, self.linear_pos, self.pos_bias_u, self.pos_bias_v, scale)
        real = None if attention_mask is None else attention_mask.squeeze(1)
        A = attention(
            q, k, scale=scale, dropout=self.dropout.p if self.training else 0.0, **seen(real, q, k, term)
        )  # fmt: skip
        return self.linear_out(joined(self.look(A, v))), A if output_attentions else None


class ChunkedEncoder(Adapter):
    """SeamlessM4T v2's encoder: one chunk, as most speech is, needs no N x N mask."""

    classes = ("seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder",)
    config: Any

    def _apply_chunk_attention(self, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
        if hidden_states.shape[1] <= self.config.speech_encoder_chunk_size:
            return attention_mask
        published: Any = super()
        return published._apply_chunk_attention(attention_mask, hidden_states)
