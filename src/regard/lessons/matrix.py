"""M1, the matrix A: every step from tokens to the output with its shape and numbers, and which way A looks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from .page import Page, Words
from .vectors import draw, embed, head, weight

TOKENS = ("小", "沈", "阳")
MODEL_DIM, HEADS, DIM, V_DIM = 6, 2, 4, 5
#: the query and the head whose numbers are shown
SHOWN, HEAD = 1, 0

TRY = """\
import torch, regard as rg
q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 5)
A = rg.attention(q, k, mask=rg.causal)
print(A.steps(v).masked)
print(A.dense(), A.dense().sum(-1), (A @ v).shape)"""


class Step(NamedTuple):
    """One line of the pipeline: a symbol, its shape, and the numbers of the query that is followed."""

    symbol: str
    shape: tuple[int, ...]
    row: list[float]


class Pipeline(NamedTuple):
    steps: list[Step]
    weights: list[list[list[float]]]  # A of each head
    visible: list[list[bool]]
    sums: list[float]  # of the rows of A


def project(x: Tensor, name: str, dim: int, heads: int = HEADS) -> Tensor:
    """X W as heads: [1, heads, length, dim]."""
    return (x @ weight(name, x.shape[-1], heads * dim)).unflatten(-1, (heads, dim)).movedim(1, 0)[None]


def inputs(tokens: tuple[str, ...] = TOKENS) -> tuple[Tensor, Tensor]:
    """The embedding E and the sinusoids P of the absolute positions, each [length, MODEL_DIM]."""
    place = torch.arange(len(tokens))[:, None]
    return embed(tokens, MODEL_DIM), rg.Sinusoid(rg.Sinusoid.geometric(MODEL_DIM))(place)


def pipeline() -> Pipeline:
    """tokens → E + P = X → Q, K, V → Q Kᵀ → ÷ √d → + position → mask → softmax → · V → concat → W_O."""
    e, p = inputs()
    x = e + p
    q, k, v = project(x, "W_Q", DIM), project(x, "W_K", DIM), project(x, "W_V", V_DIM)
    A = rg.attention(q, k, position=rg.recipes.alibi(HEADS), mask=rg.causal)
    s = A.steps(v)
    (position,) = s.terms.values()
    joined = (A @ v)[0].movedim(0, 1).flatten(1)
    y = joined @ weight("W_O", HEADS * V_DIM, MODEL_DIM)
    steps = [Step(name, tuple(t.shape), t[SHOWN].tolist()) for name, t in (("E", e), ("P", p), ("X", x))]
    per_head = {
        "Q": q, "K": k, "V": v, "Q Kᵀ": s.scores, "÷ √d_k": s.scaled, "position": position,
        "logits": s.logits, "mask": s.masked, "A": s.weights, "A V": s.out,
    }  # fmt: skip
    steps += [Step(name, tuple(t.shape[1:]), t[0, HEAD, SHOWN].tolist()) for name, t in per_head.items()]
    steps += [Step(name, tuple(t.shape), t[SHOWN].tolist()) for name, t in (("concat", joined), ("Y", y))]
    return Pipeline(steps, A[0].dense().tolist(), s.visible[0, 0].tolist(), A.dense().sum(-1).flatten().tolist())


def direction() -> tuple[tuple[int, ...], tuple[int, ...], float, dict[str, float]]:
    """Shapes of A and A.reversed(), how far the latter is from Aᵀ, and for which K it equals A."""
    q, k = head(draw("Q", 3, DIM)), head(draw("K", 5, DIM))
    A = rg.attention(q, k)
    back = A.reversed()
    away = float((back.dense() - A.dense().mT).abs().max())
    s = draw("S", DIM, DIM)
    cases = {"K = Q": q, "K = 2Q": 2 * q, "K = QS": q @ (s + s.mT), "K = X W": q @ s}
    differences = {}
    for name, keys in cases.items():
        A = rg.attention(q, keys)
        differences[name] = float((A.reversed().dense() - A.dense()).abs().max())
    return tuple(rg.attention(q, k)[0, 0].shape), tuple(back[0, 0].shape), away, differences


def dependence() -> tuple[float, float]:
    """How much row 2 of A V changes when another query changes, and when another key changes."""
    q, k, v = (head(draw(name, 3, n)) for name, n in (("q", DIM), ("k", DIM), ("v", V_DIM)))
    other = torch.zeros(1, 1, 3, 1, dtype=q.dtype)
    other[..., 0, :] = 1.0
    before = (rg.attention(q, k) @ v)[..., SHOWN, :]
    by_query = (rg.attention(q + other, k) @ v)[..., SHOWN, :]
    by_key = (rg.attention(q, k + other) @ v)[..., SHOWN, :]
    return float((by_query - before).abs().max()), float((by_key - before).abs().max())


def sums() -> tuple[list[float], list[float]]:
    """The sums of the rows of A (the first head's), and of its columns."""
    x = torch.stack(inputs()).sum(0)
    A = rg.attention(project(x, "W_Q", DIM), project(x, "W_K", DIM))[0, HEAD].dense()
    return A.sum(1).tolist(), A.sum(0).tolist()


WORDS: Words = {
    "en": {
        "title": "The matrix A",
        "shows": "Every step from tokens to the output, with shapes and numbers, and which way A looks.",
        "setting": "{count} tokens, {heads} heads, d_k = {dim}, d_v = {v_dim}. The vectors are random and untrained. The numbers are those of {token} "
        "(query {query}) in head {head}.",
        "symbol": "symbol",
        "what": "what it is",
        "shape": "shape",
        "numbers": "numbers of {token}",
        "E": "embedding, a vector a token",
        "P": "absolute position (sinusoids)",
        "X": "E + P",
        "Q": "X W_Q: what each token looks for",
        "K": "X W_K: what each says of itself",
        "V": "X W_V: what each gives",
        "Q Kᵀ": "every query with every key",
        "÷ √d_k": "keeps the spread near 1",
        "position": "relative: ALiBi, -slope·distance",
        "logits": "the two added",
        "mask": "causal: later keys become -inf",
        "A": "softmax of each row",
        "A V": "each row's mixture of the values",
        "concat": "the heads side by side",
        "Y": "concat · W_O",
        "rows": "`A[q, k]` is one pair; `A[q, :]` is a row: what q looks at. Every row adds up to 1 ({sums}). Rows are queries and columns are keys: a "
        "bright column means that many queries look at that key. (Some texts put the query on the x axis and read columns as keys all the same.)",
        "head": "head {head}",
        "order": "k_j is row j of K, not a column. And the order is A V: {a} times {v}. V A would be {v} times {a}, which does not conform.",
        "direction": "Q Kᵀ is queries looking at keys. K Qᵀ is its transpose, but softmax then runs over the queries: another distribution. For {q_len} "
        "queries and {k_len} keys A is {shape}, `A.reversed()` is {back}, and it differs from Aᵀ by up to {away:.2f}.",
        "equal": "The two agree only when Q Kᵀ is symmetric. Self-attention alone does not make it so, and K = Q is not the only way:",
        "case": "case",
        "difference": "largest |A.reversed() - A|",
        "K = Q": "K = Q",
        "K = 2Q": "K = 2Q",
        "K = QS": "K = Q S, S symmetric",
        "K = X W": "K = Q S, S any",
        "depends": "Q and K look interchangeable until V enters. Row t of A V needs one query but all keys and values: change another "
        "query and row {row} changes by {by_query:g}; change another key and it changes by {by_key:.2f}. That is why a KV cache works.",
        "try": "Every step of an A of your own: what the mask leaves, the weights, and the shape of A V. Take out the mask, or change the sizes.",
        "question": "What adds up to 1 in A: the rows or the columns?",
        "answer": "The rows: {rows}. Each query shares out one whole look. The columns of the same A (here without a mask) add up to {columns}: how "
        "much each key is looked at, which may be anything from 0 to the number of queries.",
        "next": "Several A at once, the block made of them, and who looks at whom. `regard lesson heads`",
    },
    "zh": {
        "title": "矩阵 A",
        "shows": "从词元到输出的每一步，形状和数都列出来；以及 A 是谁看谁。",
        "setting": "{count} 个词元，{heads} 个头，d_k = {dim}，d_v = {v_dim}。向量是随机的，没有训练过。列出的数属于“{token}”（第 {query} 个查询）的第 {head} 个头。",
        "symbol": "符号",
        "what": "含义",
        "shape": "形状",
        "numbers": "“{token}”的数",
        "E": "嵌入：每个词元一个向量",
        "P": "绝对位置（正弦和余弦）",
        "X": "E + P",
        "Q": "X W_Q：每个词元要找什么",
        "K": "X W_K：每个怎样介绍自己",
        "V": "X W_V：每个给出什么",
        "Q Kᵀ": "每个查询乘每个键",
        "÷ √d_k": "让分散程度保持在 1 左右",
        "position": "相对位置：ALiBi，-斜率·距离",
        "logits": "两者相加",
        "mask": "因果：后面的键变成 -inf",
        "A": "每行做 softmax",
        "A V": "每行是各个值的混合",
        "concat": "各头并排",
        "Y": "concat · W_O",
        "rows": "`A[q, k]` 是一对；`A[q, :]` 是一行：q 在看什么。每行之和为 1（{sums}）。行是查询，列是键：一列很亮，表示许多查询都看这个键。（有的文章把查询放"
        "在 x 轴，却仍把列当作键来读。）",
        "head": "第 {head} 个头",
        "order": "k_j 是 K 的第 j 行，不是列。顺序是 A V：{a} 乘 {v}。写成 V A 就是 {v} 乘 {a}，形状对不上。",
        "direction": "Q Kᵀ 是查询看键。K Qᵀ 是它的转置，但 softmax 就沿着查询做了，得到另一个分布。{q_len} 个查询、{k_len} 个键时，A 是 {shape}，`A.reversed()` 是 {back}，"
        "与 Aᵀ 最多相差 {away:.2f}。",
        "equal": "只有 Q Kᵀ 对称时两者才一样。自注意力本身并不保证对称，K = Q 也不是唯一的情形：",
        "case": "情形",
        "difference": "|A.reversed() - A| 的最大值",
        "K = Q": "K = Q",
        "K = 2Q": "K = 2Q",
        "K = QS": "K = Q S，S 对称",
        "K = X W": "K = Q S，S 任意",
        "depends": "V 出现之前，Q 和 K 看起来可以互换。A V 的第 t 行只要一个查询，却要所有的键和值：改动另一个查询，第 {row} 行变化 {by_query:g}；改动另一个键，"
        "它变化 {by_key:.2f}。KV 缓存因此可行。",
        "try": "看你自己的 A 的每一步：掩码留下什么，权重是多少，A V 的形状。去掉掩码，或者改改大小。",
        "question": "A 里什么之和为 1：行还是列？",
        "answer": "行：{rows}。每个查询把完整的一次注视分出去。同一个 A（这里没有掩码）的列之和是 {columns}：每个键被看了多少，可以是 0 到查询个数之间的任何数。",
        "next": "同时有几个 A，由它们组成的块，以及谁看谁。`regard lesson heads`",
    },
}


def show(page: Page) -> None:
    page.open()
    found = pipeline()
    page.say(
        "setting", count=len(TOKENS), heads=HEADS, dim=DIM, v_dim=V_DIM, token=TOKENS[SHOWN], query=SHOWN + 1,
        head=HEAD + 1,
    )  # fmt: skip
    rows = [
        [s.symbol, page(s.symbol), by(s.shape), " ".join(f"{x + 0.0:5.2f}" for x in s.row[:6])] for s in found.steps
    ]
    page.show(table([page("symbol"), page("what"), page("shape"), page("numbers", token=TOKENS[SHOWN])], rows))
    how: dict[str, Any] = {
        "rows": TOKENS,
        "columns": TOKENS,
        "visible": found.visible,
        "values": "percent",
        "low": 0,
        "high": 1,
    }
    page.show(*(page.map(weights, title=page("head", head=h + 1), **how) for h, weights in enumerate(found.weights)))
    page.say("rows", sums=page.listed(f"{x:.4f}" for x in found.sums[: len(TOKENS)]))
    shapes = {s.symbol: by(s.shape[-2:]) for s in found.steps}
    page.say("order", a=shapes["A"], v=shapes["V"])
    shape, back, away, differences = direction()
    page.say("direction", q_len=shape[0], k_len=shape[1], shape=by(shape), back=by(back), away=away)
    page.say("equal")
    page.show(table([page("case"), page("difference")], [[page(c), f"{d:.4f}"] for c, d in differences.items()]))
    by_query, by_key = dependence()
    page.say("depends", row=SHOWN + 1, by_query=by_query, by_key=by_key)
    rows_add, columns_add = sums()
    page.close(
        TRY,
        {
            "rows": page.listed(f"{x:.4f}" for x in rows_add),
            "columns": page.listed(f"{x:.4f}" for x in columns_add),
        },
    )


def by(shape: tuple[int, ...]) -> str:
    """3 x 4."""
    return " x ".join(map(str, shape))
