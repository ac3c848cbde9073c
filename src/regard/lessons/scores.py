"""M1, why the dot product: what it says of two vectors, and the other scores on the same data."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from .page import Page, Words
from .vectors import head

Vectors = dict[str, tuple[float, ...]]

KING = (1.0, 2.0, 3.0)
AGAINST_KING: Vectors = {"queen": (1.0, 2.0, 3.0), "car": (-1.0, -2.0, -3.0), "crown": (1.0, 1.0, 1.0)}
INVITE = (0.8, 0.2, 0.7)
AGAINST_INVITE: Vectors = {"小": (0.2, 0.8, 0.3), "沈": (0.3, 0.7, 0.4), "阳": (0.1, 0.9, 0.2)}
SIGMA = 2.0
SCORES = {"dot": rg.Dot(), "cosine": rg.Cosine(), "euclidean": rg.Euclidean(SIGMA), "inverse": rg.InverseDistance()}
#: degrees between two unit vectors
ANGLES = (0, 60, 90, 120, 180)

TRY = """\
import torch, regard as rg
q = torch.tensor([[[[1.0, 2.0, 3.0]]]])
k = torch.tensor([[[[2.0, 4.0, 6.0], [3.0, 0.0, -1.0], [-1.0, -2.0, -3.0]]]])
print(rg.attention(q, k, scale=1.0).logits.dense())
print(rg.attention(q, k, score=rg.Cosine()).logits.dense())"""


class Pair(NamedTuple):
    """A query against one key."""

    name: str
    key: tuple[float, ...]
    dot: float
    cosine: float


def vectors(rows: tuple[tuple[float, ...], ...]) -> Tensor:
    return head(torch.tensor(rows, dtype=torch.float64))


def against(query: tuple[float, ...], keys: Vectors) -> list[Pair]:
    """The dot product and the cosine of a query and each key."""
    q, k = vectors((query,)), vectors(tuple(keys.values()))
    dots = rg.attention(q, k, scale=1.0).logits[0, 0, 0, :].tolist()
    cosines = rg.attention(q, k, score=rg.Cosine()).logits[0, 0, 0, :].tolist()
    return [Pair(name, key, d, c) for (name, key), d, c in zip(keys.items(), dots, cosines, strict=True)]


def cosines(words: Vectors) -> list[list[float]]:
    """The cosine of every pair."""
    x = vectors(tuple(words.values()))
    return rg.attention(x, x, score=rg.Cosine()).logits[0, 0].dense().tolist()


def angles() -> list[float]:
    """The dot product of (1, 0) and a unit vector turned away from it, free of rounding errors that print as -0.00."""
    turned = tuple((math.cos(math.radians(a)), math.sin(math.radians(a))) for a in ANGLES)
    return [
        round(x, 12)
        for x in rg.attention(vectors(((1.0, 0.0),)), vectors(turned), scale=1.0).logits[0, 0, 0, :].tolist()
    ]


def four() -> dict[str, list[float]]:
    """The weights of the same data under each of the four scores."""
    q, k = vectors((KING,)), vectors(tuple(AGAINST_KING.values()))
    return {name: rg.attention(q, k, score=score)[0, 0, 0, :].tolist() for name, score in SCORES.items()}


def rewrite(sigma: float = SIGMA) -> float:
    """Largest difference between the Gaussian weights and those of a dot product plus one bias a key."""
    q, k = vectors((KING, INVITE)), vectors(tuple(AGAINST_KING.values()))
    gauss = rg.attention(q, k, score=rg.Euclidean(sigma))
    squares = k.square().sum(-1, keepdim=True)
    bias = rg.FromKey(rg.Constant(), weight=torch.full((1, 1, 1), -0.5 / sigma**2, dtype=q.dtype)).bind(key=squares)
    dot = rg.attention(q, k, scale=1 / sigma**2, position=bias)
    return float((gauss.dense() - dot.dense()).abs().max())


WORDS: Words = {
    "en": {
        "title": "Why the dot product",
        "shows": "Why the score of a query and a key is their dot product, and what other scores cost.",
        "dot": "q·k = |q| |k| cos θ: large when q and k point the same way, 0 at a right angle, negative when they are opposite. "
        "A negative dot product means opposite, not unrelated.",
        "query": "query",
        "key": "key",
        "cosine": "cosine",
        "four": "Other scores can be had. The same data (king as the query) under each: weights, and what a score costs beyond Q Kᵀ.",
        "score": "score",
        "cost": "cost",
        "cost_dot": "nothing",
        "cost_cosine": "normalise q and k once",
        "cost_euclidean": "one bias a key: -|k|² / 2σ²",
        "cost_inverse": "a logarithm for every pair",
        "rewrite": "A Gaussian of the distance is a dot product plus one bias a key, for |q-k|² = |q|² - 2 q·k + |k|², and |q|² is the same "
        "for the whole row: softmax cancels it. Largest difference between the two: {difference:.1e}.",
        "angles": "Two vectors of length 1, from the same direction to the opposite one: the dot product is the cosine of the angle.",
        "angle": "angle",
        "all": "every pair: cosine",
        "try": "One key twice as long as q, one at a right angle, one opposite. Which dot product is 0? Which cosine is 1? Then change the vectors.",
        "question": "Make queen twice as long. What happens to its dot product with king, and to the cosine?",
        "answer": "The dot product goes from {dot:g} to {double:g}, the cosine stays {cosine:g}: the dot product also counts length, so a long key "
        "is heard more by every query that points its way.",
        "next": "From scores to shares, and why they are divided by √d. `regard lesson softmax`",
    },
    "zh": {
        "title": "为什么用点积",
        "shows": "查询和键的分数为什么用点积，别的分数要付什么代价。",
        "dot": "q·k = |q| |k| cos θ：方向相同时大，垂直时为 0，相反时为负。点积为负表示相反，不表示无关。",
        "query": "查询",
        "key": "键",
        "cosine": "余弦",
        "four": "也可以用别的分数。同样的数据（king 作查询）在四种分数下的权重，以及除 Q Kᵀ 之外的代价：",
        "score": "分数",
        "cost": "代价",
        "cost_dot": "没有",
        "cost_cosine": "q 和 k 各归一化一次",
        "cost_euclidean": "每个键一个偏置：-|k|² / 2σ²",
        "cost_inverse": "每一对要算一个对数",
        "rewrite": "距离的高斯就是点积加上每个键一个偏置：|q-k|² = |q|² - 2 q·k + |k|²，而 |q|² 在整行里都一样，被 softmax 消去。两者最大相差 {difference:.1e}。",
        "angles": "两个长度为 1 的向量，从同向转到反向：点积就是夹角的余弦。",
        "angle": "夹角",
        "all": "每一对的余弦",
        "try": "一个键是 q 的两倍长，一个与它垂直，一个相反。哪个点积是 0？哪个余弦是 1？再改改这些向量。",
        "question": "把 queen 变成两倍长，它与 king 的点积和余弦各会怎样？",
        "answer": "点积从 {dot:g} 变成 {double:g}，余弦仍是 {cosine:g}：点积也算长度，所以长的键会被所有朝它方向的查询听得更多。",
        "next": "从分数到份额，以及为什么要除以 √d。`regard lesson softmax`",
    },
}


def show(page: Page) -> None:
    page.open()
    page.say("dot")
    rows = [
        [query, pair.name, _vector(pair.key), f"{pair.dot:.4g}", f"{pair.cosine:.4f}"]
        for query, pairs in (
            (f"king {_vector(KING)}", against(KING, AGAINST_KING)),
            (f"邀请 {_vector(INVITE)}", against(INVITE, AGAINST_INVITE)),
        )
        for pair in pairs
    ]
    words = {"king": KING, **AGAINST_KING}
    page.show(
        table([page("query"), page("key"), "", "q·k", page("cosine")], rows),
        page.map(cosines(words), rows=words, columns=words, values=".2f", low=-1, high=1, title=page("all")),
    )
    page.say("angles")
    page.show(table([page("angle"), *(f"{a}°" for a in ANGLES)], [["q·k", *(f"{x + 0.0:.2f}" for x in angles())]]))
    page.say("four")
    found = four()
    rows = [[repr(SCORES[s]), *(f"{w:.4f}" for w in weights), page(f"cost_{s}")] for s, weights in found.items()]
    page.show(table([page("score"), *AGAINST_KING, page("cost")], rows))
    page.say("rewrite", difference=rewrite())
    dot, double = against(KING, {"queen": KING, "double": tuple(2 * x for x in KING)})
    page.close(TRY, {"dot": dot.dot, "double": double.dot, "cosine": round(double.cosine, 12)})


def _vector(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{x:g}" for x in numbers) + "]"
