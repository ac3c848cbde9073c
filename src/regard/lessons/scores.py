"""M1, why the dot product: what it says of two vectors, and the other scores on the same data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from . import inputs
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

#: vectors of a plane, to be dragged: the query, and keys in its direction, at a right angle, and opposite
ARROW = (2.0, 1.0)
ARROWS: Vectors = {"k1": (3.0, 1.5), "k2": (-1.0, 2.0), "k3": (-2.0, -1.0)}
#: what a reader may look at: vectors to drag, and the two examples; how far a coordinate may go
DATA: dict[str, tuple[str, tuple[float, ...], Vectors]] = {
    "plane": ("q", ARROW, ARROWS),
    "king": ("king", KING, AGAINST_KING),
    "invite": ("邀请", INVITE, AGAINST_INVITE),
}
REACH = 4.0
#: degrees within which an angle has a name
NEAR = 3.0

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


def play(data: Any = "plane", query: Any = None, keys: Any = None, language: str = "en") -> dict[str, Any]:
    """Some vectors under every score: dot product, cosine, angle, distance, and the weights each score gives."""
    chosen = inputs.choice("data", data, tuple(DATA))
    name, own_query, own_keys = DATA[chosen]
    dim, count = len(own_query), len(own_keys)
    x = inputs.numbers("query", own_query if query is None else query, -REACH, REACH, (dim, dim))
    ys = inputs.matrix("keys", list(own_keys.values()) if keys is None else keys, -REACH, REACH, (count, dim))
    q, k = vectors((tuple(x),)), vectors(tuple(map(tuple, ys)))
    found = {each: rg.attention(q, k, score=score) for each, score in SCORES.items()}
    dots = rg.attention(q, k, scale=1.0).logits[0, 0, 0, :]
    cosine = found["cosine"].logits[0, 0, 0, :].clamp(-1.0, 1.0)
    away = (-2 * SIGMA**2 * found["euclidean"].logits[0, 0, 0, :]).clamp_min(0.0).sqrt()
    words = WORDS[language]
    angles = inputs.plain(cosine.arccos().rad2deg())
    return {
        "inputs": {"data": chosen, "query": x, "keys": ys},
        "bounds": {"data": list(DATA), "number": [-REACH, REACH, 0.1]},
        "sets": {each: [of, *keys_of] for each, (of, _, keys_of) in DATA.items()},
        "name": name, "names": list(own_keys), "dots": dots.tolist(), "cosines": inputs.plain(cosine),
        "angles": angles, "reads": list(map(_read, angles)), "away": away.tolist(),
        "lengths": {"q": float(q.norm()), "k": k[0, 0].norm(dim=-1).tolist()},
        "scores": [
            {"name": repr(SCORES[each]), "weights": inputs.plain(A[0, 0, 0, :]), "cost": words[f"cost_{each}"]}
            for each, A in found.items()
        ],
        "turned": {name: [turned, *ys[1:]] for name, turned in _turned(x).items()} if dim == 2 else {},
    }  # fmt: skip


def _read(angle: float | None) -> str:
    """The word for an angle (in degrees): only those near the three that have a name."""
    names = {"same": 0.0, "right": 90.0, "opposite": 180.0}
    return next((name for name, at in names.items() if angle is not None and abs(angle - at) < NEAR), "some")


def _turned(x: list[float]) -> dict[str, list[float]]:
    """A vector of the plane in its own direction, at a right angle to it, and opposite."""
    a, b = x
    return {"same": [a, b], "right": [0.0 - b, a], "opposite": [0.0 - a, 0.0 - b]}


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
        "play_data": "vectors",
        "play_data_plane": "to drag",
        "play_hint_plane": "Drag the tip of a vector, or choose one and press the arrow keys.",
        "play_hint_space": "Three numbers each: change them in the table. The picture shows each key's angle to the query, and its length.",
        "play_turn": "Put {name}",
        "play_turn_same": "in the same direction",
        "play_turn_right": "at a right angle",
        "play_turn_opposite": "opposite",
        "play_tip": "{name}: {vector}",
        "play_vector": "vector",
        "play_dot": "q·k",
        "play_cosine": "cosine",
        "play_angle": "angle",
        "play_away": "distance",
        "play_scores": "The weights that each score makes of them",
        "play_score": "score",
        "play_cost": "cost beyond Q Kᵀ",
        "play_reads_same": "{name} points almost the same way as {query}: the dot product is large, and grows with the length of {name}.",
        "play_reads_right": "{name} stands at a right angle to {query}: the dot product is 0, they have nothing to do with each other.",
        "play_reads_opposite": "{name} is opposite to {query}: the dot product is negative. That is not the same as unrelated.",
        "play_reads_some": "{name} and {query} are {angle}° apart.",
        "play_told": "{name}: dot product {dot}, cosine {cosine}, distance {away}.",
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
        "play_data": "向量",
        "play_data_plane": "可以拖动的",
        "play_hint_plane": "拖动向量的尖端，或者选中一个再按方向键。",
        "play_hint_space": "每个向量三个数，在表里改。图上画的是每个键与查询的夹角，以及它的长度。",
        "play_turn": "把 {name} 放到",
        "play_turn_same": "相同方向",
        "play_turn_right": "垂直方向",
        "play_turn_opposite": "相反方向",
        "play_tip": "{name}：{vector}",
        "play_vector": "向量",
        "play_dot": "q·k",
        "play_cosine": "余弦",
        "play_angle": "夹角",
        "play_away": "距离",
        "play_scores": "各种分数给出的权重",
        "play_score": "分数",
        "play_cost": "除 Q Kᵀ 之外的代价",
        "play_reads_same": "{name} 与 {query} 的方向几乎相同：点积大，{name} 越长就越大。",
        "play_reads_right": "{name} 与 {query} 垂直：点积为 0，两者互不相干。",
        "play_reads_opposite": "{name} 与 {query} 相反：点积为负。这与“无关”不是一回事。",
        "play_reads_some": "{name} 与 {query} 相隔 {angle}°。",
        "play_told": "{name}：点积 {dot}，余弦 {cosine}，距离 {away}。",
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
