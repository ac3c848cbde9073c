"""A learned bias by bucket of the distance, one table for a whole stack: T5 and its kin, and MPNet.

    logit[i, j] = q_i·k_j + b[bucket(i - j), head]          (MPNet: q_i·k_j / √dim)

The models look the table up for every pair, [1, heads, q_len, k_len], in the first layer and hand that on to the
others. Here the first layer hands on the table itself, and how it is read; each layer makes its term of it, so that the
table's gradient is the sum over all layers, as in the model. UMT5 has a table in every layer. Cross-attention has no
bias: there the models add zeros of full size, and here there is nothing to add.

LongT5's local attention is the same within a window. The model cuts it into blocks, each looking at three; here it is
one A, whose mask is a window, so that its weights are [batch, heads, length, length] and not in blocks.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..features import Buckets
from ..masks import Mask, window
from ..matrix import AttentionMatrix, attention
from ..position import Static
from .adapter import Adapter
from .masks import of_keys
from .sequence import joined, keys_and_values, past_length, seen, split


class Bias(NamedTuple):
    """What travels from layer to layer instead of a dense bias. Plain data: hooks that move tensors move its table."""

    table: Tensor  # [buckets, heads]
    max_distance: int
    bidirectional: bool = True

    def term(self) -> Static:
        """Made where it is used: a layer that is computed again in the backward pass must find the parameter itself."""
        return Static(Buckets(len(self.table), self.max_distance, self.bidirectional), readout=self.table.T)


class SharedBias(Adapter):
    """T5: gives (output, what it was given or made as bias, A)."""

    classes: ClassVar[tuple[str, ...]] = (
        "t5.T5Attention",
        "mt5.MT5Attention",
        "pop2piano.Pop2PianoAttention",
        "switch_transformers.SwitchTransformersAttention",
        "longt5.LongT5Attention",
    )
    #: what the projections are called
    names: ClassVar[tuple[str, str, str, str]] = ("q", "k", "v", "o")
    # of the module itself
    training: bool
    is_decoder: bool
    has_relative_attention_bias: bool
    relative_attention_bias: nn.Embedding
    relative_attention_max_distance: int
    n_heads: int
    layer_idx: int | None
    dropout: float
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        mask: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Bias | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Bias | None, AttentionMatrix]:
        if isinstance(position_bias, Tensor):
            raise TypeError(
                f"position_bias: {type(self).__name__} on regard takes what the layer before it made, found a tensor "
                f"{list(position_bias.shape)}; run it with regard disabled to give a dense bias"
            )
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.own_bias()
        out, A = self.run(hidden_states, key_value_states, past_key_values, mask, position_bias)
        return out, position_bias, A

    def own_bias(self) -> Bias:
        return Bias(self.relative_attention_bias.weight, self.relative_attention_max_distance, not self.is_decoder)

    def run(
        self, x: Tensor, context: Tensor | None, past: Any, mask: Any, bias: Bias | None
    ) -> tuple[Tensor, AttentionMatrix]:
        """Attention of x to itself, or to a context; `past` is a cache or None."""
        term = None if bias is None else bias.term()
        to_q, to_k, to_v, to_out = (getattr(self, name) for name in self.names)
        start = past_length(past, self.layer_idx)  # before the cache takes in this step
        q = split(to_q(x), self.n_heads)
        k, v = keys_and_values(self, x, context, past, to_k, to_v, self.n_heads)
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout if self.training else 0.0,
            **seen(mask, q, k, term, start=start if context is None else None),
        )  # fmt: skip
        return to_out(joined(self.look(A, v))), A


class TextBias(SharedBias):
    """Pix2Struct's text decoder: T5 with other names."""

    classes = ("pix2struct.Pix2StructTextAttention",)
    names = ("query", "key", "value", "output")

    def own_bias(self) -> Bias:
        return Bias(self.relative_attention_bias.weight, self.relative_attention_max_distance, False)


class OwnBias(SharedBias):
    """UMT5: every layer has a table of its own; gives (output, A)."""

    classes = ("umt5.UMT5Attention",)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix]:
        bias = self.own_bias() if self.has_relative_attention_bias else None
        return self.run(hidden_states, encoder_hidden_states, past_key_values, attention_mask, bias)


class Local(NamedTuple):
    """What travels from layer to layer of LongT5's encoder: the bias, and which keys a query may look at."""

    bias: Bias | None
    mask: Mask


class LocalBias(Adapter):
    """LongT5's local attention; gives (output, what the layers hand on) and A, when asked for."""

    classes = ("longt5.LongT5LocalAttention",)
    training: bool
    is_decoder: bool
    has_relative_attention_bias: bool
    relative_attention_bias: nn.Embedding
    relative_attention_max_distance: int
    local_radius: int
    block_len: int
    n_heads: int
    dropout: float
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: Local | None = None,
        output_attentions: bool = False,
    ) -> tuple:
        if position_bias is None:
            position_bias = Local(self.own_bias(), self.near(mask, hidden_states.shape[1]))
        q, k, v = (split(to(hidden_states), self.n_heads) for to in (self.q, self.k, self.v))
        A = attention(
            q, k, scale=1.0, dropout=self.dropout if self.training else 0.0, mask=position_bias.mask,
            position=None if position_bias.bias is None else position_bias.bias.term(),
        )  # fmt: skip
        out = self.o(joined(self.look(A, v)))
        return (out, position_bias, A) if output_attentions else (out, position_bias)

    def own_bias(self) -> Bias | None:
        if not self.has_relative_attention_bias:
            return None
        return Bias(self.relative_attention_bias.weight, self.relative_attention_max_distance, not self.is_decoder)

    def near(self, mask: Tensor | None, length: int) -> Mask:
        """A window of the radius on either side, and no padding."""
        near = window(self.local_radius, self.local_radius)
        if mask is None:
            return near
        # [batch, 1, blocks, block, 3 blocks]: a token is real where it may look at itself, in the middle block
        own = mask[:, 0, :, :, self.block_len : 2 * self.block_len].diagonal(dim1=-2, dim2=-1)
        keys = of_keys(own.flatten(1)[:, :length] > 0, 0)
        return near if keys is None else near & keys


class SideTokens(Adapter):
    """LongT5's other attention, which is refused."""

    classes = ("longt5.LongT5TransientGlobalAttention",)

    @classmethod
    def refuses(cls, module: nn.Module) -> str | None:
        return "beside a window it has side tokens, made of blocks, with a bias of their own that no term describes"


class EncoderBias(Adapter):
    """MPNet's encoder, which owns the table and makes the bias for its layers."""

    classes = ("mpnet.MPNetEncoder",)
    relative_attention_bias: nn.Embedding

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        rows = module.relative_attention_bias.num_embeddings
        return None if rows >= 32 else f"its table has {rows} rows and MPNet always reads 32 buckets"

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Bias:
        if position_ids is not None:
            raise ValueError("position_ids: expected None (tokens in a row), found a tensor; disable regard to give it")
        # the model counts with its default of 32 buckets up to 128, whatever its configuration says
        return Bias(self.relative_attention_bias.weight[:num_buckets], 128)


class EncoderBiasLayer(Adapter):
    """A layer of MPNet, given the bias; gives (output, A) or (output,)."""

    classes = ("mpnet.MPNetSelfAttention",)
    training: bool
    num_attention_heads: int
    dropout: nn.Dropout
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: Bias | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple:
        q, k, v = (split(to(hidden_states), self.num_attention_heads) for to in (self.q, self.k, self.v))
        bias = None if position_bias is None else position_bias.term()
        A = attention(
            q, k, dropout=self.dropout.p if self.training else 0.0, **seen(attention_mask, q, k, bias)
        )  # fmt: skip
        out = self.o(joined(self.look(A, v)))
        return (out, A) if output_attentions else (out,)
