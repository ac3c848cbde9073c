"""M5, looking at A: heat maps of a Chinese sentence, its summaries, one weight explained, and a long A as a picture.

The vectors are random and untrained (see vectors.py), so these maps show what each part of the score does and say nothing
about the words. The T5 table is filled in by hand: every bucket farther away adds FALL to the logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rich.table import Table

import regard as rg

from ..views.terminal import bars, table
from . import inputs
from .matrix import by
from .page import Page, Words
from .vectors import embed, head, weight

SENTENCE = "小沈阳江西演唱会邀请了，"
DIM = 16
FALL = -0.4
COPIES, PICTURE = 500, 48
#: the query that is explained, and the keys a query's row is boiled down to
ASKED, TOP = 8, 3
#: what a reader may choose: characters of a text, how the bias falls
LONGEST, FALLS = 24, (-2.0, 1.0)

TRY = 'regard look "a rose is a rose is a rose"'


class Row(NamedTuple):
    """What one character looks at most, and how spread its look is."""

    query: str
    keys: list[tuple[str, float]]
    entropy: float


class Shares(NamedTuple):
    self: float
    previous: float
    first: float
    toeplitz: float


def position(fall: float = FALL) -> rg.Static:
    """T5's buckets with a bias that falls from bucket to bucket, the same both ways."""
    term = rg.recipes.t5(heads=1)
    one_way = term.features.dim // 2
    bias = fall * torch.arange(one_way, dtype=torch.float64).repeat(2)[None]
    return rg.Static(term.features, readout=bias)


def matrices(
    copies: int = 1, dtype: torch.dtype = torch.float64, text: str = SENTENCE, fall: float = FALL
) -> dict[str, rg.AttentionMatrix]:
    """The sentence's A (of one head): content alone, with the position term, and with the causal mask too."""
    x = embed(text, DIM)
    q, k = (head((x @ weight(name, DIM, DIM)).repeat(copies, 1).to(dtype)) for name in ("W_Q", "W_K"))
    return {
        "content": rg.attention(q, k)[0, 0],
        "position": rg.attention(q, k, position=position(fall))[0, 0],
        "causal": rg.attention(q, k, position=position(fall), mask=rg.causal)[0, 0],
    }


def rows(A: rg.AttentionMatrix, text: str = SENTENCE) -> list[Row]:
    """Top keys and entropy of every query, in one pass."""
    top, entropy = A.summarize(rg.TopK(TOP), rg.Entropy())
    return [
        Row(c, [(text[j], w) for w, j in zip(weights, indices, strict=True) if j >= 0], e)
        for c, weights, indices, e in zip(
            text, top.weights.tolist(), top.indices.tolist(), entropy.tolist(), strict=True
        )
    ]


def shares(A: rg.AttentionMatrix) -> Shares:
    found = A.summarize(rg.SelfShare(), rg.PreviousShare(), rg.FirstKeyShare(), rg.Toeplitz())
    return Shares(*map(float, found))


def profile(A: rg.AttentionMatrix) -> list[float]:
    """Mass per displacement, from 1 - N to N - 1."""
    return A.profile().tolist()


def play(
    text: Any = SENTENCE, part: Any = "causal", fall: Any = FALL, query: Any = None, key: Any = None
) -> dict[str, Any]:  # fmt: skip
    """A text's A: a heat map, what each row looks at, mass per displacement, and one weight explained."""
    given = inputs.text("text", text, LONGEST)
    kind, steep = inputs.choice("part", part, ("content", "position", "causal")), inputs.number("fall", fall, *FALLS)
    A = matrices(text=given, fall=steep)[kind]
    last = len(given) - 1
    i = inputs.whole("query", min(ASKED, last) if query is None else query, 0, last)
    j = inputs.whole("key", int(A.topk(1).indices[i, 0]) if key is None else key, 0, last)
    seen = A.logits.dense() > -torch.inf
    why = A.explain(i, j)
    found = rows(A, given)
    return inputs.plain({
        "inputs": {"text": given, "part": kind, "fall": steep, "query": i, "key": j},
        "bounds": {"part": ["content", "position", "causal"], "fall": [*FALLS, 0.1], "longest": LONGEST},
        "labels": list(given), "weights": A.dense(), "visible": seen.tolist(), "shape": by(tuple(A.shape)),
        "bytes": len(given.encode()), "shares": shares(A)._asdict(), "profile": profile(A),
        "deltas": list(range(-last, last + 1)), "row": {"keys": found[i].keys, "entropy": found[i].entropy},
        "explain": {"parts": why.parts, "logit": why.logit, "lse": why.lse, "weight": why.weight},
    })  # fmt: skip


WORDS: Words = {
    "en": {
        "title": "Looking at a sentence",
        "shows": "Heat maps of A for one sentence, what can be read off them, and a long A as a picture.",
        "setting": "{sentence} has {characters} characters ({bytes} bytes). Each gets a random vector, seeded by its code point; W_Q and W_K are random too. "
        "Nothing here is trained, so no map says anything about the words: it shows what each part of the score does.",
        "content": "content only",
        "position": "+ T5 bias",
        "causal": "+ causal mask",
        "maps": "Left: q·k / √d alone. Middle: a T5 bias is added, {fall:+g} for each bucket farther away, and the mass moves to the diagonal. Right: the "
        "causal mask hides later keys, and each row shares its mass among what is left.",
        "summaries": "Summaries are exact and come from one pass. Of the map on the right: share on itself {self:.2f}, on the key before "
        "{previous:.2f}, on the first key {first:.2f}; displacement alone explains {toeplitz:.2f} of it.",
        "query": "query",
        "top": "looks most at",
        "entropy": "entropy",
        "profile": "mass per displacement q - k: content only",
        "profile_position": "mass per displacement q - k: + T5 bias",
        "explain": "`A[0, 0].explain({i}, {j})` says where the weight of {q}→{k} comes from:",
        "part": "part",
        "value": "value",
        "logit": "logit (the parts added)",
        "lse": "log-sum-exp of the row",
        "weight": "weight = exp(logit - lse)",
        "long": "The same sentence {copies} times: A is {shape}. It is never stored: the picture is one pass (mean weight of each {cell} x {cell} "
        "block), and any part is exact when asked for.",
        "overview": "{n} x {n}, pooled",
        "zoom": "A[{a}:{b}, {a}:{b}], exact",
        "try": "A text of your own before the model that comes with regard: heads, links, and a heat map with its tokens.",
        "question": "The long A has {pairs:,} pairs. How large would it be, stored in float32, and what does the lazy A hold?",
        "answer": "{stored:.0f} MiB for one head, against {held:.2f} MiB of q and k: the first grows with the square of the length, the second with the length. The "
        "picture above came from the second.",
        "next": "Models that were trained: what do their heads look at? `regard lesson real`",
        "play_text": "a text of your own",
        "play_part": "the score is",
        "play_part_content": "content only",
        "play_part_position": "+ T5 bias",
        "play_part_causal": "+ causal mask",
        "play_fall": "bias for each bucket farther away",
        "play_map": "A, {shape}: rows are queries, columns are keys. Point at a cell, or use the arrow keys; click or Enter keeps the pair.",
        "play_size": "{characters} characters, {bytes} bytes",
        "play_pair": "{q} → {k}",
        "play_logit": "logit (the parts added)",
        "play_lse": "log-sum-exp of the row",
        "play_weight": "weight = exp(logit - lse)",
        "play_hidden": "masked: this query may not look there",
        "play_row": "{q} looks most at",
        "play_entropy": "entropy of this row",
        "play_shares": "of all weight",
        "play_share_self": "on itself",
        "play_share_previous": "on the key before",
        "play_share_first": "on the first key",
        "play_share_toeplitz": "explained by Δ alone",
        "play_profile": "mass per displacement q - k",
        "play_random": "The vectors are random: no map here says anything about the words.",
        "play_told": "{q} looks at {k} with weight {weight}.",
    },
    "zh": {
        "title": "看一个句子",
        "shows": "一个句子的 A 的热图，从中能读出什么，以及把很长的 A 画成一张图。",
        "setting": "“{sentence}”有 {characters} 个字符（{bytes} 个字节）。每个字符得到一个随机向量，种子是它的码位；W_Q 和 W_K 也是随机的。这里没有任何东西训练过，所以这些图不说明"
        "词义，只显示分数的每一部分起什么作用。",
        "content": "只有内容",
        "position": "+ T5 偏置",
        "causal": "+ 因果掩码",
        "maps": "左：只有 q·k / √d。中：加上 T5 偏置，每远一个桶 {fall:+g}，质量移向对角线。右：因果掩码遮住后面的键，每行的质量由剩下的键分享。",
        "summaries": "汇总是精确的，一遍算出。右图：在自己身上的份额 {self:.2f}，在前一个键上 {previous:.2f}，在第一个键上 {first:.2f}；只用位移能解释它的 {toeplitz:.2f}。",
        "query": "查询",
        "top": "最看哪些键",
        "entropy": "熵",
        "profile": "每个位移 q - k 的质量：只有内容",
        "profile_position": "每个位移 q - k 的质量：+ T5 偏置",
        "explain": "`A[0, 0].explain({i}, {j})` 说明 {q}→{k} 的权重从哪里来：",
        "part": "部分",
        "value": "数值",
        "logit": "logit（各部分之和）",
        "lse": "这一行的 log-sum-exp",
        "weight": "权重 = exp(logit - lse)",
        "long": "同一个句子重复 {copies} 遍：A 是 {shape}。它从不被存下来：图是一遍算出的（每个 {cell} x {cell} 块的平均权重），任何一部分要看时都是精确的。",
        "overview": "{n} x {n}，合并成块",
        "zoom": "A[{a}:{b}, {a}:{b}]，精确",
        "try": "让 regard 自带的模型读你自己的文字：各个头、联系，以及带词元的热图。",
        "question": "那个长的 A 有 {pairs:,} 对。用 float32 存下来有多大？惰性的 A 又存了多少？",
        "answer": "一个头就要 {stored:.0f} MiB，而 q 和 k 只有 {held:.2f} MiB：前者随长度的平方增长，后者随长度增长。上面的图就是从后者算出来的。",
        "next": "训练过的模型：它们的头在看什么？`regard lesson real`",
        "play_text": "你自己的文字",
        "play_part": "分数里有",
        "play_part_content": "只有内容",
        "play_part_position": "+ T5 偏置",
        "play_part_causal": "+ 因果掩码",
        "play_fall": "每远一个桶的偏置",
        "play_map": "A，{shape}：行是查询，列是键。指向一格，或用方向键；点一下或按回车就选中这一对。",
        "play_size": "{characters} 个字符，{bytes} 个字节",
        "play_pair": "{q} → {k}",
        "play_logit": "logit（各部分之和）",
        "play_lse": "这一行的 log-sum-exp",
        "play_weight": "权重 = exp(logit - lse)",
        "play_hidden": "被遮住：这个查询不能看那里",
        "play_row": "{q} 看得最多的",
        "play_entropy": "这一行的熵",
        "play_shares": "全部权重中",
        "play_share_self": "在自己身上",
        "play_share_previous": "在前一个键上",
        "play_share_first": "在第一个键上",
        "play_share_toeplitz": "只用 Δ 能解释的",
        "play_profile": "每个位移 q - k 的质量",
        "play_random": "向量是随机的：这里的图不说明任何词义。",
        "play_told": "{q} 看 {k}，权重 {weight}。",
    },
}


def show(page: Page) -> None:
    page.open()
    page.say("setting", sentence=SENTENCE, characters=len(SENTENCE), bytes=len(SENTENCE.encode()))
    found = matrices()
    page.show(*(page.map(A, rows=SENTENCE, columns=SENTENCE, title=page(name)) for name, A in found.items()))
    page.say("maps", fall=FALL)
    A = found["causal"]
    page.say("summaries", **shares(A)._asdict())
    page.show(
        table(
            [page("query"), page("top"), page("entropy")],
            [[r.query, "  ".join(f"{k} {w:.0%}" for k, w in r.keys), f"{r.entropy:.2f}"] for r in rows(A)],
        ),
        explained(page, A),
    )
    deltas = [str(d) for d in range(1 - len(SENTENCE), len(SENTENCE))]
    for name in ("content", "position"):
        title = page("profile" if name == "content" else "profile_position")
        page.show(bars(profile(found[name]), deltas, title=title, form=".2f", height=4))
    long = matrices(COPIES, torch.float32)["causal"]
    n = len(SENTENCE) * COPIES
    at = n // 2
    page.say("long", copies=COPIES, shape=by(tuple(long.shape)), cell=-(-n // PICTURE))
    zoom = slice(at, at + len(SENTENCE))
    page.show(
        page.picture(long, PICTURE, title=page("overview", n=n), mark=at),
        page.map(
            long[zoom, zoom], visible=long.logits[zoom, zoom] > -torch.inf, rows=SENTENCE, columns=SENTENCE,
            title=page("zoom", a=zoom.start, b=zoom.stop),
        ),
    )  # fmt: skip
    number = torch.finfo(torch.float32).bits // 8
    page.close(TRY, {"stored": n * n * number / 2**20, "held": 2 * n * DIM * number / 2**20}, pairs=n * n)


def explained(page: Page, A: rg.AttentionMatrix) -> Table:
    """Where the weight of the asked character on its strongest key comes from."""
    i, j = ASKED, int(A.topk(1).indices[ASKED, 0])
    why = A.explain(i, j)
    lines = [[name, f"{value:+.4f}"] for name, value in why.parts.items()]
    lines += [
        [page("logit"), f"{why.logit:+.4f}"],
        [page("lse"), f"{why.lse:+.4f}"],
        [page("weight"), f"{why.weight:.4f}"],
    ]
    title = page("explain", i=i, j=j, q=SENTENCE[i], k=SENTENCE[j]).replace("`", "")
    return table([page("part"), page("value")], lines, title=title)
