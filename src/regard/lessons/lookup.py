"""M0, the soft look-up: one query, three keys, and what each way of weighing gives.

All of it is `rg.attention(q, k, score=...) @ v` with vectors of one number.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from . import inputs
from .page import Page, Words

KEYS = (51.0, 56.0, 58.0)
VALUES = (40.0, 43.0, 48.0)
QUERY = 57.0
SIGMAS = (2.0, 4.0)
#: several queries at once: one of them is a key
QUERIES = (52.0, 55.0, 56.0, 57.0)
#: what a reader may choose: the query, a value, the width of the Gaussian, how many keys are nearest
RANGE, AMOUNT, SIGMA, NEAREST = (45.0, 65.0), (0.0, 100.0), (0.2, 20.0), (1, 3)
#: places that the curve of answers runs over
CURVE = 81
#: a Gaussian so wide that all keys look equally near
WIDE = 1e6

TRY = """\
import torch, regard as rg
column = lambda *x: torch.tensor(x)[None, None, :, None]
q, k, v = column(57.0), column(51.0, 56.0, 58.0), column(40.0, 43.0, 48.0)
for sigma in (0.5, 1.0, 2.0, 4.0, 8.0, 100.0):
    print(sigma, float(rg.attention(q, k, score=rg.Euclidean(sigma)) @ v))"""


class Look(NamedTuple):
    """One way to weigh the keys, and what comes out."""

    name: str
    code: str
    weights: list[float]
    result: float


def numbers(values: tuple[float, ...]) -> Tensor:
    """Numbers as vectors of one dimension: [batch, heads, length, dim]."""
    return torch.tensor(values, dtype=torch.float64)[None, None, :, None]


def distances() -> list[float]:
    return [abs(QUERY - key) for key in KEYS]


def ways() -> dict[str, dict]:
    """Each way of weighing, as the arguments `attention` takes."""
    return {
        "nearest": {"score": rg.InverseDistance(), "mask": rg.nearest(2)},
        "inverse": {"score": rg.InverseDistance()},
        "gauss_narrow": {"score": rg.Euclidean(SIGMAS[0])},
        "gauss_wide": {"score": rg.Euclidean(SIGMAS[1])},
        "dot": {"score": rg.Dot(), "scale": 1.0},
        "upside_down": {"score": rg.InverseDistance(power=-1.0)},
    }


def weighing(name: str, sigma: float, count: int) -> dict[str, Any]:
    """A way of weighing that a reader chose, as the arguments `attention` takes."""
    chosen: dict[str, dict[str, Any]] = {
        "nearest": {"score": rg.InverseDistance(), "mask": rg.nearest(count)},
        "gauss": {"score": rg.Euclidean(sigma)},
    }
    return chosen.get(name) or ways()[name]


#: the ways a reader may choose from
CHOICES = ("nearest", "inverse", "gauss", "dot", "upside_down")


def play(
    query: Any = QUERY, way: Any = "inverse", sigma: Any = SIGMAS[0], nearest: Any = 2, values: Any = VALUES
) -> dict[str, Any]:
    """The store asked for a query, under one way of weighing; the answer of every way; and the answer against the query."""
    asked = inputs.number("query", query, *RANGE)
    wide = inputs.number("sigma", sigma, *SIGMA)
    count = inputs.whole("nearest", nearest, *NEAREST)
    name = inputs.choice("way", way, CHOICES)
    given = inputs.numbers("values", values, *AMOUNT, (len(KEYS), len(KEYS)))
    k, v = numbers(KEYS), numbers(tuple(given))
    how = weighing(name, wide, count)
    A = rg.attention(numbers((asked,)), k, **how)
    weights = A[0, 0, 0, :].tolist()
    step = (RANGE[1] - RANGE[0]) / (CURVE - 1)
    places = tuple(RANGE[0] + n * step for n in range(CURVE))
    answers = {each: rg.attention(numbers((asked,)), k, **weighing(each, wide, count)) @ v for each in CHOICES}
    return {
        "inputs": {"query": asked, "way": name, "sigma": wide, "nearest": count, "values": given},
        "bounds": {
            "query": [*RANGE, 0.25], "sigma": [*SIGMA, 0.2], "nearest": [*NEAREST, 1], "values": [*AMOUNT, 1.0],
            "way": list(CHOICES),
        },
        "keys": list(KEYS), "values": given, "distances": [abs(asked - key) for key in KEYS],
        "scores": inputs.plain(A.logits[0, 0, 0, :]), "weights": weights, "parts": [w * y for w, y in zip(weights, given, strict=True)], "fractions": list(map(as_fraction, weights)),
        "result": float(A @ v), "results": {each: float(y) for each, y in answers.items()},
        "code": "rg.attention(q, k, " + ", ".join(f"{key}={value}" for key, value in how.items()) + ") @ v",
        "places": list(places), "curve": (rg.attention(numbers(places), k, **how) @ v).flatten().tolist(),
        "farthest": max(range(len(KEYS)), key=lambda n: abs(asked - KEYS[n])),
    }  # fmt: skip


def look(name: str, query: float = QUERY) -> Look:
    """Ask one query under one way of weighing."""
    how = ways()[name]
    A = rg.attention(numbers((query,)), numbers(KEYS), **how)
    code = ", ".join(f"{key}={value}" for key, value in how.items())
    return Look(name, code, A[0, 0, 0, :].tolist(), float(A @ numbers(VALUES)))


def looks() -> dict[str, Look]:
    return {name: look(name) for name in ways()}


def products() -> list[float]:
    """The raw dot products q·k."""
    return rg.attention(numbers((QUERY,)), numbers(KEYS), **ways()["dot"]).logits[0, 0, 0, :].tolist()


def many() -> tuple[list[list[float]], list[float]]:
    """F(Q) = α(Q, K) V for several queries: the weights [n_q, n_k] and the answers [n_q]."""
    A = rg.attention(numbers(QUERIES), numbers(KEYS), score=rg.InverseDistance())
    return A[0, 0].dense().tolist(), (A @ numbers(VALUES)).flatten().tolist()


def even() -> float:
    """The answer of a Gaussian that prefers no key."""
    return float(rg.attention(numbers((QUERY,)), numbers(KEYS), score=rg.Euclidean(WIDE)) @ numbers(VALUES))


def as_fraction(weight: float) -> str:
    """A weight as the simple fraction it is."""
    return str(Fraction(weight).limit_denominator(1000))


WORDS: Words = {
    "en": {
        "title": "The soft look-up",
        "shows": "What attention was before transformers: looking a number up in a table that does not hold it.",
        "store": "A store has keys with values: {store}. Ask it for {query:g}. No key is {query:g}. The keys are {distances} away.",
        "roles": "The query is what I look for. A key is what an item says about itself. The value is what it gives me. "
        "In a library: my need, the label on the spine, the contents of the book. In an image search: the words I type, "
        "the caption, the picture.",
        "all": "Look at the two nearest keys and take their mean: {nearest:g}. Or look at all keys, each with a weight that is "
        "larger the nearer it is, the weights adding up to 1. That is attention. The table shows what each weight gives.",
        "way": "weight",
        "code": "attention(q, k, ...)",
        "on": "on {key:g}→{value:g}",
        "gives": "answer",
        "nearest": "two nearest keys",
        "inverse": "1 / distance",
        "gauss_narrow": "Gaussian, σ = {sigma:g}",
        "gauss_wide": "Gaussian, σ = {sigma:g}",
        "dot": "raw dot product",
        "upside_down": "upside down",
        "exact": "With 1 / distance the weights are {fractions}. A key that is met exactly takes all the weight: ask for "
        "{key:g} and the answer is {result:g}.",
        "saturate": "The raw dot product gives {result:.1f}, the value of the largest key: {products} are far apart, and softmax "
        "turns that into all or nothing. So the product is scaled, and q and k come from learned projections.",
        "beware": "Beware: tutorials print the weight as |q-k| / Σ|q-k|. That gives the farthest key the most weight "
        "({fractions}) and the answer {result:g}. It is inverse distance with power -1: the fraction is upside down.",
        "many": "Many queries at once: F(Q) = α(Q, K) V. Here α is {n_q} x {n_k}, V is {n_k} x 1, so F(Q) is {n_q} x 1. "
        "Every row is a query of its own.",
        "query": "query",
        "round": "All queries are answered at once, each from all keys, like a round table where everyone hears everyone. "
        "A recurrent network whispers a message down a row instead: step by step, and it fades.",
        "try": "Slide the width of the Gaussian from narrow to wide, and watch the answer move.",
        "question": "What does a Gaussian give that is so wide that all keys look equally near to {query:g}?",
        "answer": "The mean of the values, {even:.4f}: equal scores make equal weights, each 1/{count}. Narrow, it listens to the "
        "nearest keys only; wide, to all alike.",
        "next": "Keys that are vectors, not numbers: why the dot product measures likeness. `regard lesson scores`",
        "play_query": "query: what I look for",
        "play_way": "weight",
        "play_way_nearest": "nearest keys",
        "play_way_inverse": "1 / distance",
        "play_way_gauss": "Gaussian",
        "play_way_dot": "raw dot product",
        "play_way_upside_down": "|q-k| / Σ|q-k|",
        "play_sigma": "width σ",
        "play_nearest": "how many",
        "play_key": "key",
        "play_value": "value",
        "play_value_of": "value of key {key}",
        "play_distance": "distance",
        "play_weight": "weight",
        "play_part": "weight · value",
        "play_answer": "answer",
        "play_line": "Keys as places; the query can be dragged, or moved with the arrow keys",
        "play_curve": "the answer for every query",
        "play_all": "the same query under every weight",
        "play_told": "Query {query}: answer {answer}. Weights {weights}.",
        "play_says_nearest": "Only the {count} nearest keys count: as the query passes from one to the next, the answer jumps.",
        "play_says_inverse": "Every key counts, the nearer the more. Put the query exactly on a key: that key takes all the weight.",
        "play_says_gauss": "Narrow, only the nearest key is heard; wide, all keys are heard alike, and the answer becomes the mean of the values.",
        "play_says_dot": "q·k is larger for the larger key, whatever the query: key {key} takes the weight {weight} even when another is nearer. So scores are scaled, and q and k come from learned projections.",
        "play_says_upside_down": "Upside down: the farthest key, {key}, gets the most weight, {weight}. Move the query away from a key and watch its weight grow.",
    },
    "zh": {
        "title": "软查找",
        "shows": "Transformer 之前的注意力：在一张表里查一个表中没有的数。",
        "store": "一个存储有若干键和值：{store}。用 {query:g} 去查。没有哪个键是 {query:g}，各键与它的距离是 {distances}。",
        "roles": "查询（query）是我要找什么。键（key）是每一项怎样介绍自己。值（value）是它能给我什么。在图书馆里：我的需要、书脊上的标签、书的内容。"
        "搜图片时：我输入的词、图片的说明、图片本身。",
        "all": "只看最近的两个键，取平均：{nearest:g}。也可以看所有的键，越近的权重越大，权重之和为 1。这就是注意力。下表列出每种权重的结果。",
        "way": "权重",
        "code": "attention(q, k, ...)",
        "on": "{key:g}→{value:g}",
        "gives": "结果",
        "nearest": "最近的两个键",
        "inverse": "距离的倒数",
        "gauss_narrow": "高斯，σ = {sigma:g}",
        "gauss_wide": "高斯，σ = {sigma:g}",
        "dot": "原始点积",
        "upside_down": "颠倒的权重",
        "exact": "用距离的倒数时，权重是 {fractions}。恰好相等的键得到全部权重：查 {key:g}，结果就是 {result:g}。",
        "saturate": "原始点积给出 {result:.1f}，即最大的键的值：{products} 相差太远，softmax 把它变成非全即无。所以点积要缩放，q 和 k 要来自学到的投影。",
        "beware": "当心：有的教程把权重写成 |q-k| / Σ|q-k|。这样最远的键权重最大（{fractions}），结果是 {result:g}。它是幂为 -1 的距离倒数：分数写颠倒了。",
        "many": "多个查询一起算：F(Q) = α(Q, K) V。这里 α 是 {n_q} x {n_k}，V 是 {n_k} x 1，所以 F(Q) 是 {n_q} x 1。每一行是一个独立的查询。",
        "query": "查询",
        "round": "所有查询同时得到回答，每个都看所有的键，好比圆桌会议，人人都听得到人人。循环网络则像一句悄悄话沿着一排人往下传：一步一步，越传越淡。",
        "try": "把高斯的宽度从窄调到宽，看结果怎样移动。",
        "question": "如果高斯宽得让所有的键看起来离 {query:g} 一样近，结果是多少？",
        "answer": "是各个值的平均，{even:.4f}：分数相等，权重就相等，各 1/{count}。窄的高斯只听最近的键，宽的则一视同仁。",
        "next": "键不再是数，而是向量：为什么用点积衡量相似。`regard lesson scores`",
        "play_query": "查询：我要找什么",
        "play_way": "权重",
        "play_way_nearest": "最近的键",
        "play_way_inverse": "距离的倒数",
        "play_way_gauss": "高斯",
        "play_way_dot": "原始点积",
        "play_way_upside_down": "|q-k| / Σ|q-k|",
        "play_sigma": "宽度 σ",
        "play_nearest": "几个",
        "play_key": "键",
        "play_value": "值",
        "play_value_of": "键 {key} 的值",
        "play_distance": "距离",
        "play_weight": "权重",
        "play_part": "权重 · 值",
        "play_answer": "结果",
        "play_line": "键的位置；查询可以拖动，也可以用方向键移动",
        "play_curve": "每个查询的结果",
        "play_all": "同一个查询，各种权重",
        "play_told": "查询 {query}：结果 {answer}。权重 {weights}。",
        "play_says_nearest": "只算最近的 {count} 个键：查询从一个键移到下一个时，结果会跳变。",
        "play_says_inverse": "每个键都算，越近算得越多。把查询正好放在一个键上：那个键得到全部权重。",
        "play_says_gauss": "窄的高斯只听最近的键；宽的对所有的键一视同仁，结果成为各个值的平均。",
        "play_says_dot": "无论查询是什么，大的键 q·k 总是大：即使别的键更近，键 {key} 也占了 {weight}。所以分数要缩放，q 和 k 要来自学到的投影。",
        "play_says_upside_down": "写颠倒了：最远的键 {key} 得到最大的权重 {weight}。把查询移开一个键，看它的权重怎样变大。",
    },
}


def show(page: Page) -> None:
    found = looks()
    page.open()
    store = page.listed(f"{key:g}→{value:g}" for key, value in zip(KEYS, VALUES, strict=True))
    page.say("store", store=store, query=QUERY, distances=page.listed(f"{d:g}" for d in distances()))
    page.say("roles")
    page.say("all", nearest=found["nearest"].result)
    sigma = dict(zip(("gauss_narrow", "gauss_wide"), SIGMAS, strict=True))
    header = [page("way"), page("code"), *(page("on", key=k, value=v) for k, v in zip(KEYS, VALUES, strict=True))]
    rows = [
        [page(name, sigma=sigma.get(name)), a.code, *(f"{w:.4f}" for w in a.weights), f"{a.result:.4f}"]
        for name, a in found.items()
    ]
    page.show(table([*header, page("gives")], rows))
    exact = look("inverse", KEYS[1])
    page.say(
        "exact", fractions=page.listed(map(as_fraction, found["inverse"].weights)), key=KEYS[1], result=exact.result
    )
    page.say("saturate", result=found["dot"].result, products=page.listed(f"{x:g}" for x in products()))
    page.say(
        "beware",
        fractions=page.listed(map(as_fraction, found["upside_down"].weights)),
        result=found["upside_down"].result,
    )
    weights, answers = many()
    page.say("many", n_q=len(weights), n_k=len(weights[0]))
    rows = [
        [f"{q:g}", *(f"{w:.4f}" for w in row), f"{y:.4f}"] for q, row, y in zip(QUERIES, weights, answers, strict=True)
    ]
    names = [f"{k:g}" for k in KEYS]
    page.show(
        table([page("query"), *header[2:], page("gives")], rows),
        page.map(weights, rows=[f"{q:g}" for q in QUERIES], columns=names, values="percent", title="α(Q, K)"),
    )
    page.say("round")
    page.close(TRY, {"even": even(), "count": len(KEYS)}, query=QUERY)
