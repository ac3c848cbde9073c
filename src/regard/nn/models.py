"""Stacks of blocks: a decoder that writes, an encoder that reads, and both together.

decoder            tokens → embedding (+ absolute place) → blocks, each causal → norm → one logit a token
encoder            tokens or vectors → the same, every token seeing every other → norm → vectors
encoder-decoder    the decoder's blocks also look at what the encoder made of the source
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache import Cache, Step
from ..features import Sinusoid
from ..masks import Mask, causal, window
from ..masks import lengths as first_tokens
from ..matrix import AttentionMatrix
from .layers import Attention, Block, Linear, Remembered, initialise, project
from .recipe import Positions, each_layer, make_positions
from .saving import Saved


class Places(nn.Module):
    """Absolute position embeddings: learned for the first `length` places, or sinusoids for any."""

    def __init__(self, kind: str, dim: int, length: int | None):
        super().__init__()
        if kind not in ("learned", "sinusoidal"):
            raise ValueError(f"absolute: expected 'learned', 'sinusoidal' or None, found {kind!r}")
        if kind == "learned" and length is None:
            raise ValueError("length: learned absolute positions need to know how many there are")
        if kind == "sinusoidal" and dim % 2:
            raise ValueError(f"dim: sinusoids come in pairs, found {dim}")
        self.length = length if kind == "learned" else None
        self.table = nn.Embedding(length, dim) if kind == "learned" and length is not None else None
        self.waves = Sinusoid(Sinusoid.geometric(dim), order="sin_cos") if kind == "sinusoidal" else None

    def forward(self, start: int | Tensor, length: int, device: torch.device, padded: bool = False) -> Tensor:
        """[1 or batch, length, dim]. Padding on the right may stand past the last learned place."""
        index = torch.arange(length, device=device)
        at = start[:, None] + index if isinstance(start, Tensor) else (index + start)[None]
        if self.table is not None:
            return self.table(at.clamp(max=self.table.num_embeddings - 1) if padded else at)
        assert self.waves is not None
        return self.waves(at.unsqueeze(-1))

    def check(self, last: int) -> None:
        """Raise unless there is a place for `last` tokens."""
        if self.length is not None and last > self.length:
            raise ValueError(f"tokens: the model has {self.length} learned absolute positions, found {last} tokens")


class Blocks(nn.ModuleList):
    """A list of blocks, for readers and type checkers."""

    def __iter__(self) -> Iterator[Block]:
        return super().__iter__()  # type: ignore[return-value]


class Stack(Saved):
    """What decoder and encoder share: embedding, places, blocks and the last norm."""

    def __init__(
        self,
        vocabulary: int | None,
        dim: int,
        layers: int,
        heads: int,
        *,
        position: Positions | Sequence[Positions] = None,
        absolute: str | None = None,
        length: int | None = None,
        masks: Sequence[Mask | None],
        cross: bool = False,
        **block: Any,
    ):
        super().__init__()
        self.vocabulary, self.dim = vocabulary, dim
        self.embedding = None if vocabulary is None else nn.Embedding(vocabulary, dim)
        self.places = None if absolute is None else Places(absolute, dim, length)
        self.drop = nn.Dropout(block.get("dropout", 0.0))
        head_dim = block.get("head_dim") or dim // heads
        terms = make_positions(position, layers, heads, head_dim)
        self.blocks = Blocks(
            Block(dim, heads, position=term, mask=mask, cross=cross, **block)
            for term, mask in zip(terms, masks, strict=True)
        )
        pre = block.get("norm", "pre") == "pre"  # after a post-norm block there is nothing left to normalise
        bias, eps = block.get("bias", True), block.get("norm_eps", 1e-5)
        self.norm = nn.LayerNorm(dim, eps=eps, bias=bias) if pre else nn.Identity()
        initialise(self, layers)

    def embed(self, x: Tensor, start: int | Tensor, last: int | None, padded: bool = False) -> Tensor:
        """Tokens [batch, length], or vectors where there is no vocabulary, with their places."""
        if self.embedding is not None:
            if x.dim() != 2 or x.dtype.is_floating_point:
                raise ValueError(f"tokens: expected whole numbers [batch, length], found {x.dtype} {list(x.shape)}")
            x = self.embedding(x)
            if self.places is not None and self.places.waves is not None:
                x = x * self.dim**0.5  # to the size of the waves
        elif x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x: expected vectors [batch, length, {self.dim}], found {list(x.shape)}")
        if self.places is not None:
            if last is not None:
                self.places.check(last)
            x = x + self.places(start, x.shape[1], x.device, padded).to(x.dtype)
        return self.drop(x)

    @property
    def table(self) -> Tensor:
        """A vector for each token of the vocabulary."""
        if self.embedding is None:
            raise ValueError("vocabulary: this model has none; it takes vectors")
        return self.embedding.weight

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def attentions(self) -> list[Attention]:
        """The self-attention of each layer."""
        return [block.attention for block in self.blocks]


class Decoder(Stack):
    """A causal language model: tokens [batch, length] to logits [batch, length, vocabulary].

    vocabulary   how many tokens there are
    position     one term, name or Recipe for all layers, or a list with one for each
    absolute     "learned" (for `length` places) or "sinusoidal" embeddings of the absolute place; None for none
    window       how far back a token sees: a number for all layers or one for each, None for everything
    tied         the output reads the embedding backwards, instead of a matrix of its own
    memory_dim   makes it the second half of an encoder-decoder: each block also looks at a memory of this dim
    Everything else is Block's: hidden, activation, norm, dropout, kv_heads, head_dim, score, softcap, bias, ...
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        layers: int,
        heads: int,
        *,
        position: Positions | Sequence[Positions] = None,
        absolute: str | None = None,
        length: int | None = None,
        window: int | Sequence[int | None] | None = None,
        tied: bool = True,
        memory_dim: int | None = None,
        **block: Any,
    ):
        reach = each_layer(window, layers, "window")
        super().__init__(
            vocabulary, dim, layers, heads, position=position, absolute=absolute, length=length,
            masks=[_backward(left) for left in reach], cross=memory_dim is not None,
            **({} if memory_dim is None else {"memory_dim": memory_dim}), **block,
        )  # fmt: skip
        self.remember_arguments(
            vocabulary=vocabulary, dim=dim, layers=layers, heads=heads, position=position, absolute=absolute,
            length=length, window=window, tied=tied, memory_dim=memory_dim, **block,
        )  # fmt: skip
        self.output = None if tied else Linear(dim, vocabulary, bias=False)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=(3 * dim) ** -0.5)

    def remember(self, memory: Tensor) -> list[Remembered]:
        """A memory's keys and values for every layer, computed once for all steps."""
        made = [block.cross.remember(memory) for block in self.blocks if block.cross is not None]
        if len(made) < len(self.blocks):
            raise ValueError("memory: this decoder was made without memory_dim")
        return made

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor | list[Remembered] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: Cache | None = None,
        start: int | Tensor | None = None,
        last: bool = False,
        look: bool = False,
    ) -> Any:
        """Logits; with `look`, (logits, Looks) with the lazy A of every layer.

        lengths   how many tokens of each row are real, when rows are padded on the right
        mask      in addition to the causal one, such as documents(ids)
        cache     what was read before: the tokens continue it
        start     the place of the first token when there is no cache (0 unless given)
        last      only the logits of each row's last token, [batch, vocabulary]
        """
        if cache is not None and start is not None:
            raise ValueError("start: a cache knows where its sequences stand; leave it out")
        counts = _counts(lengths, tokens)
        opened: AbstractContextManager[Step | None] = nullcontext()
        if cache is not None:
            opened = cache.step(tokens.shape[0], tokens.shape[1], counts)
        with opened as step:
            first = (0 if start is None else start) if step is None else step.start(tokens.device)
            end = _end(first, tokens.shape[1]) if step is None else max(step.ends)
            x = self.embed(tokens, first, end, padded=counts is not None)
            looks = Looks([], [], [])
            for n, block in enumerate(self.blocks):
                given = memory[n] if isinstance(memory, list) else memory
                found = block(
                    x, given, mask=mask, memory_mask=memory_mask, start=first, look=look,
                    cache=None if step is None else step.layer(n),
                )  # fmt: skip
                x = found[0] if look else found
                if look:
                    looks.decoder.append(found[1])
                    looks.cross.extend(A for A in found[2:] if A is not None)
        if last:
            at = -1 if counts is None else torch.tensor(counts, device=x.device).sub(1).clamp(min=0)
            x = x[torch.arange(len(x), device=x.device), at]
        x = self.norm(x)
        logits = self.output(x) if self.output is not None else project(x, self.table)
        return (logits, looks) if look else logits


class Encoder(Stack):
    """A bidirectional stack: tokens [batch, length], or vectors when vocabulary is None, to [batch, length, dim].

    `mask` is every layer's own (or a list, one a layer); `lengths` of the call masks padding. The rest as in Decoder.
    """

    def __init__(
        self,
        vocabulary: int | None,
        dim: int,
        layers: int,
        heads: int,
        *,
        position: Positions | Sequence[Positions] = None,
        absolute: str | None = None,
        length: int | None = None,
        mask: Mask | Sequence[Mask | None] | None = None,
        **block: Any,
    ):
        super().__init__(
            vocabulary, dim, layers, heads, position=position, absolute=absolute, length=length,
            masks=each_layer(mask, layers, "mask"), **block,
        )  # fmt: skip
        self.remember_arguments(
            vocabulary=vocabulary, dim=dim, layers=layers, heads=heads, position=position, absolute=absolute,
            length=length, mask=mask, **block,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Mask | None = None,
        look: bool = False,
    ) -> Any:
        """Vectors [batch, length, dim]; with `look`, (vectors, Looks)."""
        if lengths is not None:
            real = first_tokens(torch.as_tensor(lengths, device=x.device))
            mask = real if mask is None else mask & real
        x = self.embed(x, 0, x.shape[1])
        looks = Looks([], [], [])
        for block in self.blocks:
            found = block(x, mask=mask, look=look)
            x = found[0] if look else found
            if look:
                looks.encoder.append(found[1])
        x = self.norm(x)
        return (x, looks) if look else x


class EncoderDecoder(Saved):
    """An encoder reads the source, a decoder (made with memory_dim) writes the target while looking at it."""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        if decoder.blocks and decoder.blocks[0].cross is None:
            raise ValueError(f"decoder: expected one made with memory_dim={encoder.dim}")
        self.encoder, self.decoder = encoder, decoder
        self.remember_arguments(encoder=encoder, decoder=decoder)

    def encode(self, source: Tensor, lengths: Tensor | Sequence[int] | None = None) -> dict[str, Any]:
        """A source, read once, as the arguments that let the decoder look at it: `decoder(target, **read)`.

        For `generate(model.decoder, prompts, most=20, **model.encode(source))` too.
        """
        memory = self.decoder.remember(self.encoder(source, lengths=lengths))
        real = None if lengths is None else first_tokens(torch.as_tensor(lengths, device=source.device))
        return {"memory": memory, "memory_mask": real}

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | Sequence[int] | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        look: bool = False,
    ) -> Any:
        """Logits [batch, target length, vocabulary]; with `look`, (logits, Looks)."""
        read = self.encoder(source, lengths=source_lengths, look=look)
        memory, seen = (read[0], read[1].encoder) if look else (read, [])
        real = None if source_lengths is None else first_tokens(torch.as_tensor(source_lengths, device=source.device))
        written = self.decoder(target, memory, lengths=lengths, memory_mask=real, look=look)
        if not look:
            return written
        logits, looks = written
        return logits, looks._replace(encoder=seen)


class Looks(NamedTuple):
    """The lazy A of every layer: layer n's are encoder[n], decoder[n] (self-attention) and cross[n]."""

    encoder: list[AttentionMatrix]
    decoder: list[AttentionMatrix]
    cross: list[AttentionMatrix]


def _backward(left: int | None) -> Mask:
    return causal if left is None else window(left)


def _counts(lengths: Tensor | Sequence[int] | None, tokens: Tensor) -> list[int] | None:
    if lengths is None:
        return None
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if len(counts) != len(tokens) or any(not 0 <= n <= tokens.shape[1] for n in counts):
        raise ValueError(f"lengths: expected {len(tokens)} numbers from 0 to {tokens.shape[1]}, found {counts}")
    return counts


def _end(start: int | Tensor, length: int) -> int | None:
    """One past the last place; None when it cannot be known without waiting for a device or inside a graph."""
    if isinstance(start, Tensor):
        known = start.device.type == "cpu" and not torch.compiler.is_compiling()
        return int(start.max()) + length if known else None
    return start + length
