"""M1, from two vectors to a weight: why the dot product, why softmax, why the square root of d."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import regard as rg

from ..views.terminal import table
from .page import Page, Words
from .vectors import draw, head

Vectors = dict[str, tuple[float, ...]]

KING = (1.0, 2.0, 3.0)
AGAINST_KING: Vectors = {"queen": (1.0, 2.0, 3.0), "car": (-1.0, -2.0, -3.0), "crown": (1.0, 1.0, 1.0)}
INVITE = (0.8, 0.2, 0.7)
AGAINST_INVITE: Vectors = {"小": (0.2, 0.8, 0.3), "沈": (0.3, 0.7, 0.4), "阳": (0.1, 0.9, 0.2)}
LOGITS = (3.5, -2.1, 8.7, 0.3)
#: what some texts print for the three largest of their weights
MISPRINT = (0.05, 0.94, 0.01)
SIGMA = 2.0
SCORES = {"dot": rg.Dot(), "cosine": rg.Cosine(), "euclidean": rg.Euclidean(SIGMA), "inverse": rg.InverseDistance()}
DIMS = (8, 32, 128, 512)
SAMPLE = 64


class Pair(NamedTuple):
    """A query against one key."""

    name: str
    key: tuple[float, ...]
    dot: float
    cosine: float


class Scaling(NamedTuple):
    """Random unit-variance vectors of one dimension count: what softmax makes of their dot products."""

    dim: int
    spread: float  # standard deviation of the raw dots
    entropy: dict[str, float]  # "raw" and "scaled": mean entropy of a row
    gradient: dict[str, float]  # norm of the gradient that reaches a row's logits: the median over rows


def vectors(rows: tuple[tuple[float, ...], ...]) -> Tensor:
    return head(torch.tensor(rows, dtype=torch.float64))


def against(query: tuple[float, ...], keys: Vectors) -> list[Pair]:
    """The dot product and the cosine of a query and each key."""
    q, k = vectors((query,)), vectors(tuple(keys.values()))
    dots = rg.attention(q, k, scale=1.0).logits[0, 0, 0, :].tolist()
    cosines = rg.attention(q, k, score=rg.Cosine()).logits[0, 0, 0, :].tolist()
    return [Pair(name, key, d, c) for (name, key), d, c in zip(keys.items(), dots, cosines, strict=True)]


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


def softmax(logits: tuple[float, ...] = LOGITS) -> list[float]:
    """Softmax as A does it: one query of 1, and a key for each logit."""
    return rg.attention(vectors(((1.0,),)), vectors(tuple((x,) for x in logits)), scale=1.0)[0, 0, 0, :].tolist()


def scaling(dim: int) -> Scaling:
    """SAMPLE queries against SAMPLE keys, raw and divided by the square root of dim.

    Each query is a head here, so that a static term of zeros, which is one number a head and key, receives
    the gradient of the logits.
    """
    q = draw(f"queries {dim}", 1, SAMPLE, 1, dim)
    k, v = draw(f"keys {dim}", 1, 1, SAMPLE, dim), draw("values", 1, 1, SAMPLE, 1)
    entropy, gradient = {}, {}
    spread = 0.0
    for name, scale in (("raw", 1.0), ("scaled", None)):
        nothing = torch.nn.Parameter(torch.zeros(SAMPLE, 2 * SAMPLE - 1, dtype=q.dtype))
        A = rg.attention(q, k, scale=scale, position=rg.Static(rg.Clipped(SAMPLE - 1), readout=nothing))
        (A @ v).sum().backward()
        assert nothing.grad is not None
        entropy[name] = float(A.entropy().mean())
        gradient[name] = float(nothing.grad.norm(dim=-1).median())
        if name == "raw":
            spread = float(A.logits.dense().detach().std())
    return Scaling(dim, spread, entropy, gradient)


WORDS: Words = {
    "en": {
        "title": "3  From two vectors to a weight",
        "shows": "Why the score is a dot product, why it is divided by √d, and what softmax does to it.",
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
        "softmax": "Softmax makes shares of scores: exp of each, over their sum. {logits} → {weights}. Some texts print "
        "{misprint} for it: that is wrong, the largest takes more than that.",
        "sqrt": "Why ÷ √d: the dot product of two random vectors of unit variance has standard deviation √d. For d = {dim} that is "
        "{root:.1f}. Softmax of numbers that far apart is nearly all or nothing, and then almost no gradient comes through.",
        "spread": "measured",
        "entropy_raw": "entropy",
        "gradient_raw": "gradient",
        "entropy_scaled": "entropy, ÷√d",
        "gradient_scaled": "gradient, ÷√d",
        "read": "({sample} random queries and keys. Entropy: mean of a row, at most log {sample} = {most:.2f}. Gradient: norm of what "
        "reaches a row of logits, the median of the rows.)",
    },
    "zh": {
        "title": "3  从两个向量到一个权重",
        "shows": "分数为什么用点积，为什么除以 √d，softmax 又做了什么。",
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
        "softmax": "softmax 把分数变成份额：各自取 exp，再除以总和。{logits} → {weights}。有的文章印成 {misprint}：那是错的，最大的一个占得更多。",
        "sqrt": "为什么 ÷ √d：两个单位方差的随机向量，点积的标准差是 √d。d = {dim} 时是 {root:.1f}。相差这么远的数，softmax 之后几乎非全即无，梯度也就几乎传不过来。",
        "spread": "实测",
        "entropy_raw": "熵",
        "gradient_raw": "梯度",
        "entropy_scaled": "熵（÷√d）",
        "gradient_scaled": "梯度（÷√d）",
        "read": "（随机的 {sample} 个查询和键。熵：每行的平均，最大是 log {sample} = {most:.2f}。梯度：传到一行 logit 上的梯度的范数，取各行的中位数。）",
    },
}


def show(console: Console, language: str = "en") -> None:
    page = Page(console, language, WORDS)
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
    page.show(table([page("query"), page("key"), "", "q·k", page("cosine")], rows))
    page.say("four")
    found = four()
    rows = [[repr(SCORES[s]), *(f"{w:.4f}" for w in weights), page(f"cost_{s}")] for s, weights in found.items()]
    page.show(table([page("score"), *AGAINST_KING, page("cost")], rows))
    page.say("rewrite", difference=rewrite())
    page.say(
        "softmax", logits=_vector(LOGITS), weights="[" + ", ".join(f"{w:.4f}" for w in softmax()) + "]",
        misprint=" / ".join(map(str, MISPRINT)),
    )  # fmt: skip
    sizes = [scaling(dim) for dim in DIMS]
    page.say("sqrt", dim=DIMS[-1], root=math.sqrt(DIMS[-1]))
    header = ["d", "√d", page("spread")]
    header += [page(f"{what}_{how}") for how in ("raw", "scaled") for what in ("entropy", "gradient")]
    rows = [
        [f"{s.dim}", f"{math.sqrt(s.dim):.1f}", f"{s.spread:.1f}"]
        + [f"{part[how]:.3f}" for how in ("raw", "scaled") for part in (s.entropy, s.gradient)]
        for s in sizes
    ]
    page.show(table(header, rows))
    page.say("read", sample=SAMPLE, most=math.log(SAMPLE))


def _vector(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{x:g}" for x in numbers) + "]"
