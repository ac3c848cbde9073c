"""M2, the causal mask and the KV cache: why K and V are kept while decoding, why Q never is, and what is saved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import regard as rg

from ..views.terminal import bars
from .page import Page, Words
from .vectors import draw, head

LENGTH, DIM = 16, 8


class Counts(NamedTuple):
    """Score pairs computed while decoding LENGTH tokens one by one."""

    unmasked: int  # every step recomputes all rows, without a mask
    causal: int  # every step recomputes all rows, with the causal mask
    cached: int  # every step computes its own row only


class Decoding(NamedTuple):
    """Decoding with the cache against one causal pass: largest differences."""

    right: float
    misplaced: float  # when the query's position is taken in the chunk, not in the sequence


class Future(NamedTuple):
    """How much output t changes when a later token changes."""

    unmasked: float
    causal: float


def data(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (head(draw(name, length, DIM)) for name in ("q", "k", "v"))
    return q, k, v


def position() -> rg.Static:
    """A relative term, so that a misplaced query would show: the slope of ALiBi's first head of eight."""
    return rg.Static(rg.Slope(), readout=rg.recipes.alibi(8).readout[:1])


def pairs(A: rg.AttentionMatrix) -> int:
    """Pairs whose score is needed: those the mask leaves visible, as the pooled picture of one cell counts them."""
    return int(A.heatmap(1).count.sum())


def count(length: int = LENGTH) -> Counts:
    q, k, _ = data(length)
    total = Counts(0, 0, 0)
    for n in range(1, length + 1):
        step = Counts(
            pairs(rg.attention(q[:, :, :n], k[:, :, :n])),
            pairs(rg.attention(q[:, :, :n], k[:, :, :n], mask=rg.causal)),
            pairs(rg.attention(q[:, :, n - 1 : n], k[:, :, :n], mask=rg.causal, q_start=n - 1)),
        )
        total = Counts(*(a + b for a, b in zip(total, step, strict=True)))
    return total


def decode(length: int = LENGTH) -> Decoding:
    """Step n has one new query; its keys and values are those of the cache and its own."""
    q, k, v = data(length)
    whole = rg.attention(q, k, mask=rg.causal, position=position()) @ v
    right = misplaced = 0.0
    for t in range(length):
        new, keys, values = q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]
        y = rg.attention(new, keys, mask=rg.causal, position=position(), q_start=t) @ values
        lost = rg.attention(new, keys, position=position()) @ values  # stands at 0 as far as the term knows
        right = max(right, float((y[:, :, 0] - whole[:, :, t]).abs().max()))
        misplaced = max(misplaced, float((lost[:, :, 0] - whole[:, :, t]).abs().max()))
    return Decoding(right, misplaced)


def future(t: int = LENGTH // 2) -> Future:
    """Change the last token's key and value, and see what output t does."""
    q, k, v = data()
    late = torch.zeros_like(k)
    late[:, :, -1] = 1.0

    def change(mask: rg.masks.Mask | None) -> float:
        before, after = (rg.attention(q, k + x, mask=mask) @ (v + x) for x in (0 * late, late))
        return float((after - before)[:, :, t].abs().max())

    return Future(change(None), change(rg.causal))


def causal_map() -> tuple[list[list[float]], list[list[bool]]]:
    q, k, _ = data()
    A = rg.attention(q, k, mask=rg.causal, position=position())[0, 0]
    return A.dense().tolist(), (A.logits.dense() > -torch.inf).tolist()


WORDS: Words = {
    "en": {
        "title": "5  The causal mask and the KV cache",
        "shows": "Why a decoder keeps K and V and never Q, and how much work that saves.",
        "mask": "Without a mask y_t = Σ_j A[t, j] v_j runs over all {length} tokens: while decoding, most of them do not exist yet. With the causal "
        "mask the sum stops at t. Change the last token: y_{t} changes by {unmasked:.3f} without the mask, by {causal:g} with it.",
        "cache": "Position t uses its own q_t, but all of k_1..k_t and v_1..v_t. So k and v are kept (the cache), and q_t is used once and "
        "dropped. A cache of Q would hold {held} numbers at the end, and nothing would ever read them.",
        "step": "Step t asks with one query: `attention(q_t, k[:t+1], q_start=t) @ v[:t+1]`. After {length} steps the largest difference from "
        "one causal pass over everything is {right:.1e}.",
        "start": "`q_start` matters: a relative term needs the query's place in the whole sequence, not in the chunk. Leave it out, and this "
        "decoding is off by up to {misplaced:.2f}.",
        "count": "Score pairs computed to decode {length} tokens:",
        "unmasked": "all again, no mask",
        "causal": "all again, causal",
        "cached": "with the cache",
        "map": "A, causal, nearer keys preferred",
    },
    "zh": {
        "title": "5  因果掩码与 KV 缓存",
        "shows": "解码时为什么保存 K 和 V，从不保存 Q；这样省了多少计算。",
        "mask": "没有掩码时，y_t = Σ_j A[t, j] v_j 要对全部 {length} 个词元求和，而解码时它们大多还不存在。有了因果掩码，求和到 t 为止。改动最后一个词元：没有掩码时 "
        "y_{t} 变化 {unmasked:.3f}，有掩码时变化 {causal:g}。",
        "cache": "位置 t 只用自己的 q_t，却要用全部的 k_1..k_t 和 v_1..v_t。所以 k 和 v 要保存（缓存），q_t 用一次就丢掉。若也缓存 Q，最后会存下 {held} 个数，却永远没有"
        "人去读。",
        "step": "第 t 步只有一个查询：`attention(q_t, k[:t+1], q_start=t) @ v[:t+1]`。{length} 步之后，与一次算完的因果注意力最大相差 {right:.1e}。",
        "start": "`q_start` 很要紧：相对位置项要的是查询在整个序列里的位置，不是在这一小段里的位置。不写它，这里的解码最多会差 {misplaced:.2f}。",
        "count": "解码 {length} 个词元要计算的分数对：",
        "unmasked": "每步重算，无掩码",
        "causal": "每步重算，因果",
        "cached": "用缓存",
        "map": "A：因果，偏好近处的键",
    },
}


def show(console: Console, language: str = "en") -> None:
    page = Page(console, language, WORDS)
    page.open()
    t = LENGTH // 2
    change, decoding, counts = future(t), decode(), count()
    page.say("mask", length=LENGTH, t=t + 1, unmasked=change.unmasked, causal=change.causal)
    page.say("cache", held=data()[0].numel())
    page.say("step", length=LENGTH, right=decoding.right)
    page.say("start", misplaced=decoding.misplaced)
    page.say("count", length=LENGTH)
    weights, visible = causal_map()
    names = [str(n + 1) for n in range(LENGTH)]
    page.show(
        page.map(weights, visible=visible, rows=names, columns=names, title=page("map")),
        bars(counts, [page(name) for name in Counts._fields], form=".0f", width=30),
    )
