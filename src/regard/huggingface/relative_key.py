"""Shaw's relative keys: Wav2Vec2-BERT, SeamlessM4T v2, SpeechT5, VITS, which has relative values too, and Inkling.

    logit[i, j] = q_i·(k_j + R[clip(j - i)]) / √dim          VITS: y_i = Σ_j A[i, j] (v_j + S[j - i]), nothing beyond

The models gather R for every pair, a tensor of length x length x dim; here it stays a table. VITS skews dense matrices
there and back; here its values take the weights near the diagonal (`A.band`). Inkling's term reads a query of its own,
for keys that are less than so many places back: r_i·P[i - j].
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..features import Clipped, Table
from ..matrix import AttentionMatrix, attention
from ..position import FromQuery, Position
from .adapter import Adapter
from .sequence import joined, keys_and_values, past_length, seen, split


def clipped(module: Any) -> FromQuery:
    """The table of a Conformer. It counts key minus query and ours query minus key, hence the flip."""
    rows = module.distance_embedding.weight  # [left + 1 + right, dim]
    reach = (module.left_max_position_embeddings, module.right_max_position_embeddings)
    return FromQuery(Table(rows.shape[-1], clip=reach, values=rows.flip(0)), scale=module.scaling)


class Keys(NamedTuple):
    """What SpeechT5's encoder hands to its layers instead of a vector for every pair."""

    table: Tensor  # [2 reach, dim], from query minus key = -reach on

    def term(self, scale: float) -> FromQuery:
        reach = len(self.table) // 2
        bins = Clipped(reach - 1, reach)
        return FromQuery(Table(self.table.shape[-1], index=bins, values=self.table), scale=scale)


class SharedKeys(Adapter):
    """SpeechT5's positions: the table itself."""

    classes: ClassVar[tuple[str, ...]] = ("speecht5.SpeechT5RelativePositionalEncoding",)
    pe_k: nn.Embedding

    def forward(self, hidden_states: Tensor) -> Keys:
        return Keys(self.pe_k.weight)


class RelativeKeys(Adapter):
    """SpeechT5: encoder, decoder and cross-attention; only the encoder has relative keys. Gives (output, A or None)."""

    classes = ("speecht5.SpeechT5Attention",)
    # of the module itself
    training: bool
    num_heads: int
    scaling: float
    dropout: float
    layer_idx: int | None
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        position_bias: Keys | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        start = past_length(past_key_values, self.layer_idx) if key_value_states is None else None
        q = split(self.q_proj(hidden_states), self.num_heads)
        k, v = keys_and_values(
            self, hidden_states, key_value_states, past_key_values, self.k_proj, self.v_proj, self.num_heads
        )
        term = None if position_bias is None else position_bias.term(self.scaling)
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout if self.training else 0.0,
            **seen(attention_mask, q, k, term, start=start),
        )  # fmt: skip
        return self.out_proj(joined(self.look(A, v))), A if output_attentions else None


class Profile(NamedTuple):
    """Inkling's bias, by query and distance to earlier keys, instead of by pair. The model scales it first."""

    rows: Tensor  # [batch, heads, q_len, extent], for key 0, 1, .. places before the query; beyond there is nothing

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    def float(self) -> Profile:
        return Profile(self.rows.float())

    def to(self, dtype: Any) -> Profile:
        return Profile(self.rows.to(dtype))

    def __mul__(self, factor: Tensor) -> Profile:  # type: ignore[override]
        return Profile(self.rows * factor)

    def term(self) -> Position:
        """A number of 0 at either end, where the bins are clipped to."""
        reach = self.rows.shape[-1]
        return FromQuery(Clipped(reach, 1)).bind(query=nn.functional.pad(self.rows, (1, 1)))


class Profiles(Adapter):
    """Inkling's r_q·P; its attention goes through the interface, which takes what this hands on."""

    classes = ("inkling.InklingRelativeLogits",)
    proj: nn.Parameter

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Profile:
        return Profile((relative_states @ self.proj).transpose(1, 2))


class RelativeValues(Adapter):
    """VITS: keys and values within a window. Gives (output, A or None)."""

    classes = ("vits.VitsAttention",)
    training: bool
    num_heads: int
    scaling: float
    dropout: float
    window_size: int | None
    emb_rel_k: nn.Parameter
    emb_rel_v: nn.Parameter
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Any = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        if self.training and self.dropout and self.window_size:
            raise NotImplementedError(
                "training: VITS drops the same weights for its values and its relative values, which regard cannot; "
                "set attention_dropout to 0 or disable regard"
            )
        q, k, v = (split(to(hidden_states), self.num_heads) for to in (self.q_proj, self.k_proj, self.v_proj))
        term = None
        if self.window_size:
            # beyond the window there is nothing: a row of zeros at either end, where the bins are clipped to
            rows = nn.functional.pad(self.emb_rel_k[0].flip(0), (0, 0, 1, 1))
            term = FromQuery(Table(rows.shape[-1], clip=self.window_size + 1, values=rows), scale=self.scaling)
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout if self.training else 0.0,
            **seen(attention_mask, q, k, term),
        )  # fmt: skip
        out = self.look(A, v)
        if self.window_size:
            out = out + A.band(self.window_size).to(out.dtype) @ self.emb_rel_v[0]
        return self.out_proj(joined(out)), A if output_attentions else None
