"""Attention as BERT's was written before there was an interface: query, key and value, no term, and eager only.

    logit[i, j] = q_i·k_j / √dim

MegatronBERT, RemBERT, RoFormer (with rotated q and k), TAPAS, VisualBERT, ViLT, FLAVA, LXMERT, CANINE, MobileViT, BLIP,
GIT, TimeSformer, TrOCR, XGLM and MVP differ in what they are given and in whether they hand out the weights unasked.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..matrix import AttentionMatrix, attention
from .adapter import Adapter
from .sequence import joined, keys_and_values, past_length, seen, split


class Classic(Adapter):
    """Self-attention, or attention to what an encoder has read, with or without a cache. Gives (context, A)."""

    classes: ClassVar[tuple[str, ...]] = (
        "megatron_bert.MegatronBertSelfAttention",
        "rembert.RemBertSelfAttention",
    )
    # of the module itself
    training: bool
    num_attention_heads: int
    layer_idx: int | None
    dropout: nn.Dropout
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple:
        start = None
        if encoder_hidden_states is None:
            start = past_length(past_key_values, self.layer_idx)
        q = split(self.query(hidden_states), self.num_attention_heads)
        k, v = keys_and_values(
            self, hidden_states, encoder_hidden_states, past_key_values, self.key, self.value, self.num_attention_heads
        )
        return self.attend(q, k, v, attention_mask, start)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, start: int | Tensor | None = None
    ) -> tuple[Tensor, AttentionMatrix]:
        dropped = self.dropout.p if self.training else 0.0
        A = attention(q, k, dropout=dropped, **seen(mask, q, k, start=start))
        return joined(self.look(A, v)), A


class Rotated(Classic):
    """RoFormer: q and k, and if it says so v, are turned by their places before the cache takes them."""

    classes = ("roformer.RoFormerSelfAttention",)
    rotary_value: bool
    apply_rotary_position_embeddings: Any

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        sinusoidal_pos: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple:
        if encoder_hidden_states is not None or sinusoidal_pos is None:
            return super().forward(hidden_states, attention_mask, encoder_hidden_states, past_key_values)
        start = past_length(past_key_values, self.layer_idx)
        q, k, v = (split(to(hidden_states), self.num_attention_heads) for to in (self.query, self.key, self.value))
        turned = self.apply_rotary_position_embeddings(sinusoidal_pos, q, k, *([v] if self.rotary_value else []))
        q, k, v = turned if self.rotary_value else (*turned, v)
        if past_key_values is not None:
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            k, v = cache.update(k, v, self.layer_idx)
        return self.attend(q, k, v, attention_mask, start)


class Tapas(Classic):
    """TAPAS hands out A only when it is asked for: (context, A) or (context,)."""

    classes = ("tapas.TapasSelfAttention",)

    @classmethod
    def refuses(cls, module: Any) -> str | None:
        return "as a decoder it hands on its cache too" if module.is_decoder else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple:
        out = super().forward(hidden_states, attention_mask, encoder_hidden_states, past_key_values)
        return out if output_attentions else out[:1]


class IfAsked(Classic):
    """Models of images and words: no cache, and A only when it is asked for."""

    classes: ClassVar[tuple[str, ...]] = (
        "visual_bert.VisualBertSelfAttention",
        "vilt.ViltSelfAttention",
        "flava.FlavaSelfAttention",
    )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Any = None, output_attentions: bool | None = False
    ) -> tuple:
        return self.between(hidden_states, hidden_states, attention_mask, output_attentions)

    def between(self, x: Tensor, looked_at: Tensor, mask: Any, asked: bool | None) -> tuple:
        inputs = ((self.query, x), (self.key, looked_at), (self.value, looked_at))
        q, k, v = (split(to(given), self.num_attention_heads) for to, given in inputs)
        out = self.attend(q, k, v, mask)
        return out if asked else out[:1]


class Across(IfAsked):
    """LXMERT and CANINE: what is looked at comes second."""

    classes: ClassVar[tuple[str, ...]] = ("lxmert.LxmertAttention", "canine.CanineSelfAttention")

    def forward(  # type: ignore[override]
        self, from_tensor: Tensor, to_tensor: Tensor, attention_mask: Any = None, output_attentions: bool = False
    ) -> tuple:
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 3:  # CANINE's: 1 where a query may look
            attention_mask = attention_mask.bool()
        return self.between(from_tensor, to_tensor, attention_mask, output_attentions)


class Alone(Classic):
    """MobileViT: the context alone."""

    classes = ("mobilevit.MobileViTSelfAttention",)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (split(to(hidden_states), self.num_attention_heads) for to in (self.query, self.key, self.value))
        return self.attend(q, k, v, None)[0]


class Captions(Classic):
    """BLIP's and GIT's words: a mask of its own for what an encoder has seen, and a cache."""

    classes: ClassVar[tuple[str, ...]] = ("blip.BlipTextSelfAttention", "git.GitSelfAttention")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple:
        mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
        return super().forward(hidden_states, mask, encoder_hidden_states, past_key_values)


class Joined(Adapter):
    """BLIP's images: q, k and v from one projection, and one behind them. Gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = ("blip.BlipAttention",)
    training: bool
    num_heads: int
    scale: float
    qkv: nn.Linear
    projection: nn.Module
    dropout: nn.Dropout

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, AttentionMatrix]:
        context, A = self.mixed(hidden_states, self.dropout.p)
        return self.projection(context), A

    def mixed(self, x: Tensor, dropped: float) -> tuple[Tensor, AttentionMatrix]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        A = attention(q, k, scale=self.scale, dropout=dropped if self.training else 0.0)
        return joined(self.look(A, v)), A


class Frames(Joined):
    """TimeSformer: the same without the last projection, and A if it is asked for."""

    classes = ("timesformer.TimesformerSelfAttention",)
    attn_drop: nn.Dropout

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple:  # type: ignore[override]
        out = self.mixed(hidden_states, self.attn_drop.p)
        return out if output_attentions else out[:1]


class Projected(Adapter):
    """BART's, as TrOCR, XGLM and MVP still have it: with a projection behind. Gives (output, A or None)."""

    classes: ClassVar[tuple[str, ...]] = ("trocr.TrOCRAttention", "mvp.MvpAttention")
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
        attn_prompt: Any = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        if attn_prompt is not None:
            raise NotImplementedError("attn_prompt: MVP's prompts are keys that no token has; set use_prompt to False")
        start = None if key_value_states is not None else past_length(past_key_values, self.layer_idx)
        q = split(self.q_proj(hidden_states), self.num_heads)
        k, v = keys_and_values(
            self, hidden_states, key_value_states, past_key_values, self.k_proj, self.v_proj, self.num_heads
        )
        A = attention(
            q, k, scale=self.scaling, dropout=self.dropout if self.training else 0.0,
            **seen(attention_mask, q, k, start=start),
        )  # fmt: skip
        return self.out_proj(joined(self.look(A, v))), A if output_attentions else None


class Unasked(Projected):
    """XGLM gives A unasked."""

    classes = ("xglm.XGLMAttention",)

    def forward(self, *given: Any, **how: Any) -> tuple[Tensor, AttentionMatrix | None]:
        return super().forward(*given, **{**how, "output_attentions": True})
