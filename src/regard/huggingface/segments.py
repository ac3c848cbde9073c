"""Terms that ask whether two tokens are in one segment (a sentence, a prompt): XLNet, Funnel and CPM-Ant.

    logit[i, j] = ((q_i + u)·k_j + (q_i + v)·W R_(i - j) + (q_i + w)·E[are i and j in one segment]) / √dim

What a query adds for a key depends on the key's segment alone, and there are few of them. So it is a dot product of its
own: the query has one number a segment, the key a one for its segment. They are put behind q and k, and the content of
A holds both; the terms of position read q and k without them.

Funnel's first token has no place and no segment (`separate_cls`): it is a token without a place. Its later blocks let
every second token look at all; there the tokens are `Points`. XLNet hands over which pairs are in one segment, and its
mask, for every pair: it has made them before it attends. A row that sees nothing gives 0 here, and the mean of all
values in XLNet.

CPM-Ant has T5's buckets within a segment and a number for both segments across. Its segments are moved so far apart
that across them the buckets are the last ones, a constant, and the segments' numbers are given less it.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..features import Buckets, Clipped, Constant, Table
from ..geometry import Geometry, Grid, Points
from ..matrix import AttentionMatrix, attention
from ..position import FromKey, FromQuery, Position, Static
from .adapter import Adapter
from .masks import of_keys, read
from .sequence import joined, split
from .transformer_xl import Rows, three_tokens


def beside(
    q: Tensor, k: Tensor, numbers: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor]:  # [batch, heads, q_len, segments] and [batch, k_len, segments]
    """q and k with the segments' numbers behind them."""
    ones = segments.to(k.dtype)[:, None].expand(-1, k.shape[1], -1, -1)
    return torch.cat([q, numbers.to(q.dtype)], dim=-1), torch.cat([k, ones], dim=-1)


class Streams:
    """A in the order of axes that XLNet gives weights, [q_len, k_len, batch, heads]; it turns them round at its end."""

    def __init__(self, A: AttentionMatrix):
        self.A = A

    def permute(self, *axes: int) -> Streams:
        if axes != (2, 3, 0, 1):
            raise TypeError(f"permute: A can only be turned back to [batch, heads, q_len, k_len], found {axes}")
        return self

    def contiguous(self) -> AttentionMatrix:
        return self.A


class TwoStreams(Adapter):
    """XLNet: only the core is ours, which both of its streams go through. Axes are [length, batch, heads, dim]."""

    classes: ClassVar[tuple[str, ...]] = ("xlnet.XLNetRelativeAttention",)
    # of the module itself
    training: bool
    scale: float
    dropout: nn.Dropout
    r_w_bias: Tensor
    r_r_bias: Tensor
    r_s_bias: Tensor
    seg_embed: Tensor

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix:
        return three_tokens(module.r_w_bias, module.r_r_bias)

    def rel_attn_core(
        self,
        q_head: Tensor,
        k_head_h: Tensor,
        v_head_h: Tensor,
        k_head_r: Tensor,
        seg_mat: Tensor | None = None,
        attn_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
        q_len, k_len = q.shape[2], k.shape[2]
        rows = k_head_r[:, 0].transpose(0, 1)  # [heads, displacements from k_len down, dim]
        if k_head_r.shape[1] > 1 and not bool((k_head_r == k_head_r[:, :1]).all()):
            raise NotImplementedError("bi_data: half of the batch is read backwards, which regard cannot describe")
        missing = q_len + k_len - rows.shape[1]
        if missing > 0:  # attn_type "uni" has no row for keys that come later: its mask hides them
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        terms: list[Position] = [
            FromKey(Constant(), weight=self.r_w_bias[..., None], scale=self.scale).bind(key=k),
            FromQuery(Rows(rows, first=k_len), offset=self.r_r_bias, scale=self.scale).bind(query=q),
        ]
        both = q, k
        if seg_mat is not None:
            apart = torch.einsum("ibnd,snd->bnis", q_head + self.r_s_bias, self.seg_embed)  # for the same, for another
            own, ones = segments_of(seg_mat)
            numbers = torch.where(own[:, None], apart[..., :1], apart[..., 1:])
            both = beside(q, k, numbers, ones)
        seen = read(None, q_len, k_len)
        if attn_mask is not None:
            hidden = attn_mask.permute(2, 3, 0, 1).bool()
            seen = read(~hidden, q_len, k_len) if bool(hidden.any()) else seen
        A = attention(
            *both, scale=self.scale, position=terms, mask=seen.mask, q_start=k_len - q_len,
            dropout=self.dropout.p if self.training else 0.0,
        )  # fmt: skip
        out = self.look(A, v).permute(2, 0, 1, 3)
        return (out, Streams(A)) if output_attentions else out


def segments_of(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Which segment is the query's own, [batch, q_len, segments], and the key's, [batch, k_len, segments].

    From XLNet's [q_len, k_len, batch, 2], whose last entry is 1 for two segments. All layers get the same tensor, which
    keeps what was found. A segment is named by its first query; the last is that of keys whose segment no query is in.
    """
    known = getattr(pairs, "_regard_segments", None)
    if known is not None:
        return known
    same = pairs[..., 0].permute(2, 0, 1) > 0  # [batch, q_len, k_len]
    q_len, k_len = same.shape[1:]
    first = torch.where(same.any(1), same.int().argmax(1), q_len)  # [batch, k_len]
    names = torch.cat([first.unique(), first.new_full((1,), q_len)]).unique()
    found = first[:, k_len - q_len :, None] == names, first[..., None] == names
    pairs._regard_segments = found  # type: ignore[attr-defined]
    return found


class Types(NamedTuple):
    """Funnel's token types of queries and keys, in the place of a matrix of pairs."""

    queries: Tensor  # [batch, q_len]
    keys: Tensor  # [batch, k_len]


class FunnelTypes(Adapter):
    """Funnel's keeper of what its layers need, which makes it smaller from block to block."""

    classes: ClassVar[tuple[str, ...]] = ("funnel.FunnelAttentionStructure",)
    config: Any
    pooling_mult: int
    seq_len: int
    get_position_embeds: Any

    def init_attention_inputs(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple:
        """As published, without its matrices of pairs; the layers know by themselves that the first token is apart."""
        self.pooling_mult, self.seq_len = 1, inputs_embeds.shape[1]
        places = self.get_position_embeds(self.seq_len, inputs_embeds.dtype, inputs_embeds.device)
        types = None if token_type_ids is None else Types(token_type_ids, token_type_ids)
        return places, types, attention_mask, None

    def stride_pool(self, tensor: Any, axis: Any) -> Any:
        published: Any = super()
        if not isinstance(tensor, Types):
            return published.stride_pool(tensor, axis)
        axes = axis if isinstance(axis, (list, tuple)) else [axis]
        return Types(*(
            published.stride_pool(ids, 1) if at in axes else ids for at, ids in ((1, tensor.queries), (2, tensor.keys))
        ))  # fmt: skip


class Funnel(Adapter):
    """A layer of Funnel. Gives (output, A) or (output,)."""

    classes = ("funnel.FunnelRelMultiheadAttention",)
    training: bool
    config: Any
    block_index: int
    scale: float
    q_head: nn.Linear
    k_head: nn.Linear
    v_head: nn.Linear
    post_proj: nn.Linear
    layer_norm: nn.Module
    hidden_dropout: nn.Dropout
    attention_dropout: nn.Dropout
    r_w_bias: Tensor
    r_r_bias: Tensor
    r_s_bias: Tensor
    r_kernel: Tensor
    seg_embed: Tensor

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        kind = module.config.attention_type
        return None if kind == "relative_shift" else f"its attention_type is {kind!r}, expected 'relative_shift'"

    @classmethod
    def sample(cls, module: Any) -> AttentionMatrix:
        return three_tokens(module.r_w_bias, module.r_r_bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_inputs: tuple, output_attentions: bool = False
    ) -> tuple:
        places, types, real, _ = attention_inputs
        projections = ((self.q_head, query), (self.k_head, key), (self.v_head, value))
        q, k, v = (split(to(x), self.config.n_head) for to, x in projections)
        geometry, along = self.position(places, q, k)
        terms: list[Position] = [
            FromKey(Constant(), weight=self.r_w_bias[..., None], scale=self.scale).bind(key=k), along
        ]  # fmt: skip
        both = q, k
        if types is not None:
            both = beside(q, k, *self.segments(q, types))
        A = attention(
            *both, scale=self.scale, position=terms, geometry=geometry,
            mask=None if real is None else of_keys(real > 0.5, 0),
            dropout=self.attention_dropout.p if self.training else 0.0,
        )  # fmt: skip
        out = self.layer_norm(query + self.hidden_dropout(self.post_proj(joined(self.look(A, v)))))
        return (out, A) if output_attentions else (out,)

    def position(self, places: Any, q: Tensor, k: Tensor) -> tuple[Geometry | tuple[Geometry, Geometry], Position]:
        """Where tokens are, and the term of their distance. A query of a pooled layer is two keys wide."""
        q_len, k_len = q.shape[2], k.shape[2]
        step = 1 if q_len == k_len else 2
        rows = torch.einsum("td,dnh->nth", places[self.block_index][step - 1], self.r_kernel)
        alone = bool(self.config.separate_cls)  # the first token has no place
        first = step * q_len  # the displacement of the first row
        if step == 1:
            along = FromQuery(Rows(rows, first=first), offset=self.r_r_bias, scale=self.scale).bind(query=q)
            return Grid(k_len - alone, unplaced=int(alone)), along
        bins = Clipped(first, rows.shape[1] - 1 - first)
        table = Table(rows.shape[-1], index=bins, heads=len(rows), values=rows.flip(1))
        at = [torch.arange(n, device=q.device)[:, None] * size for n, size in ((q_len, 2), (k_len, 1))]
        points = [Points(x, placed=(x[:, 0] > 0) if alone else None) for x in at]
        return (points[0], points[1]), FromQuery(table, offset=self.r_r_bias, scale=self.scale).bind(query=q)

    def segments(self, q: Tensor, types: Types) -> tuple[Tensor, Tensor]:
        """Numbers of queries and ones of keys; the type of the first token counts as one with all."""
        other, same = torch.einsum("bnid,snd->bnis", q + self.r_s_bias[:, None], self.seg_embed).split(1, dim=-1)
        names = types.keys.unique()
        own, ones = types.queries[..., None] == names, types.keys[..., None] == names
        own = own | (types.queries[..., None] == FIRST) | (names == FIRST)
        numbers = torch.where(own[:, None], same, other)
        if self.config.separate_cls:
            numbers = numbers * (torch.arange(q.shape[2], device=q.device) > 0)[:, None]
            ones = ones & (torch.arange(ones.shape[1], device=q.device) > 0)[:, None]
        return numbers, ones


#: the token type of Funnel's first token
FIRST = 2


class Segmented(NamedTuple):
    """CPM-Ant's bias as its parts: by bucket of the distance within a segment, by both segments across."""

    within: Tensor  # [buckets, heads]
    across: Tensor  # [segments of the query, segments of the key, heads]
    max_distance: int
    queries: Tensor  # their segments, [batch, q_len]
    keys: Tensor  # [batch, k_len]

    def __getitem__(self, index: Any) -> Any:
        """The last queries: what the model cuts off with a cache, [:, :, past:, :]."""
        every = slice(None)
        if not isinstance(index, tuple) or len(index) != 4 or (*index[:2], index[3]) != (every,) * 3:
            raise TypeError(f"position_bias[{index}]: on regard only queries can be taken of it, [:, :, first:, :]")
        return self._replace(queries=self.queries[:, index[2]])

    def description(self, q: Tensor, k: Tensor, scale: float) -> dict[str, Any]:
        """Segments lie so far apart that across them the buckets give their last; their numbers take it off."""
        q_len, k_len, count = q.shape[2], k.shape[2], len(self.within)
        apart = 2 * (self.max_distance + k_len)
        keys = torch.arange(k_len, device=q.device) + apart * self.keys.long()
        queries = torch.arange(k_len - q_len, k_len, device=q.device) + apart * self.queries.long()
        names = torch.arange(len(self.across), device=q.device)
        later, earlier = self.within[count - 1], self.within[count // 2 - 1]  # the last buckets: key after, key before
        far = torch.where((names[:, None] < names)[..., None], later, earlier)
        own = names[:, None] == names
        table = (self.across - far).masked_fill(own[..., None], 0.0) / scale
        numbers = table[self.queries.long()].permute(0, 3, 1, 2)  # [batch, heads, q_len, segments]
        q, k = beside(q, k, numbers, self.keys[..., None] == names)
        term = Static(Buckets(count, self.max_distance), readout=self.within.T)
        return {"q": q, "k": k, "position": term, "geometry": (Points(queries[..., None]), Points(keys[..., None]))}


class SegmentBias(Adapter):
    """CPM-Ant's maker of the bias: hands on its parts."""

    classes = ("cpmant.CpmAntSegmentPositionEmbedding",)
    num_segments: int
    num_buckets: int
    max_distance: int
    relative_attention_bias: Tensor  # [buckets + segments * segments, heads]

    def forward(self, key_pos: Tensor, query_pos: Tensor, key_segment: Tensor, query_segment: Tensor) -> Segmented:
        within, across = self.relative_attention_bias.split([self.num_buckets, self.num_segments**2])
        across = across.unflatten(0, (self.num_segments, self.num_segments))
        return Segmented(within, across, self.max_distance, query_segment, key_segment)


class SegmentedLayer(Adapter):
    """A layer of CPM-Ant. Gives (output, A or None)."""

    classes = ("cpmant.CpmAntAttention",)
    training: bool
    num_heads: int
    dim_head: int
    layer_idx: int | None
    dropout: nn.Dropout | None
    project_q: nn.Linear
    project_k: nn.Linear
    project_v: nn.Linear
    attention_out: nn.Linear

    def forward(
        self,
        hidden_q: Tensor,
        hidden_kv: Tensor,
        attention_mask: Tensor,
        position_bias: Segmented,
        output_attentions: bool | None = False,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        projections = ((self.project_q, hidden_q), (self.project_k, hidden_kv), (self.project_v, hidden_kv))
        q, k, v = (split(to(x), self.num_heads) for to, x in projections)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scale = self.dim_head**-0.5
        seen = read(attention_mask.bool(), q.shape[2], k.shape[2])
        dropped = self.dropout.p if self.training and self.dropout is not None else 0.0
        A = attention(**position_bias.description(q, k, scale), scale=scale, mask=seen.mask, dropout=dropped)
        return self.attention_out(joined(self.look(A, v))), A if output_attentions else None
