"""The closing quiz: eight questions that a reader can answer by now, each answered with numbers computed on the spot."""

from __future__ import annotations

import math
from typing import Any

from . import cache, grid, heads, line, lookup, matrix, scores, softmax
from .page import Page, Words

#: in the order of the lessons they come from
QUESTIONS = ("rnn", "dot", "heatmap", "root", "cross", "cached", "feature", "delta")

TRY = 'regard look "is attention all you need, or is attention all you get"'


def numbers() -> dict[str, dict[str, Any]]:
    """The numbers of each answer, by question."""
    far = heads.reach()
    king = {pair.name: pair for pair in scores.against(scores.KING, scores.AGAINST_KING)}
    rows, columns = matrix.sums()
    size = softmax.scaling(softmax.DIMS[-1])
    both = heads.looks()
    counts = cache.count()
    deltas, table, f = line.features()
    rule = grid.neighbour()
    return {
        "rnn": {
            "far": far[-1].distance, "steps": far[-1].rnn_steps, "one": far[-1].attention_steps,
            "rnn": far[-1].rnn / far[0].rnn, "attention": far[-1].attention / far[0].attention,
        },
        "dot": {name: king[name].dot for name in ("queen", "car")} | {"right": scores.angles()[scores.ANGLES.index(90)] + 0.0},
        "heatmap": {"row": rows[0], "least": min(columns), "most": max(columns)},
        "root": {
            "dim": size.dim, "spread": size.spread, "raw": size.entropy["raw"], "scaled": size.entropy["scaled"],
            "most": math.log(softmax.SAMPLE), "less": size.gradient["scaled"] / size.gradient["raw"],
        },
        "cross": {
            "characters": "".join(heads.GREETING), "words": " ".join(heads.REPLY),
            "first": float(both["self"][0, 1]), "second": float(both["cross"][0, 1]),
            "key_self": heads.GREETING[1], "key_cross": heads.REPLY[1], "query": heads.GREETING[0],
        },
        "cached": {"length": cache.LENGTH, "cached": counts.cached, "causal": counts.causal, "held": cache.data()[0].numel()},
        "feature": {
            "rows": len(table), "columns": len(table[0]), "places": line.PLACES, "zero": f[deltas.index(0)],
            "one": f[deltas.index(1)],
        },
        "delta": {
            "rule": "({},{})".format(*grid.RIGHT), "flat": grid.FLAT, "h": grid.SHAPE[0], "w": grid.SHAPE[1],
            "wrong": " ".join(f"({q},{k})" for q, k in rule.flat if (q, k) not in rule.grid),
            "pairs": " ".join(f"({q},{k})" for q, k in rule.grid),
        },
    }  # fmt: skip


def mean() -> tuple[float, float]:
    """The first lesson's answer with equal weights, and with 1 / distance."""
    return lookup.even(), lookup.look("inverse").result


WORDS: Words = {
    "en": {
        "title": "Closing quiz",
        "shows": "Eight questions. Answer each before you read on; the answers explain themselves with numbers computed now.",
        "q_rnn": "Why does attention suit sequences better than an RNN?",
        "a_rnn": "Every token is one step from every other: {one} against {steps} for a token {far} places back, and all rows can be computed at once. And the signal does not fade on the way: "
        "from the nearest to the farthest place it changes by a factor {attention:.2f}, in the small RNN of `heads` by {rnn:.0e}.",
        "q_dot": "What does the dot product of a query and a key say?",
        "a_dot": "How far they point the same way, times their lengths: king with queen {queen:g}, at a right angle {right:g}, with car {car:g}. Negative is opposite, not unrelated; a "
        "long key counts more.",
        "q_heatmap": "How do you read a heat map of A?",
        "a_heatmap": "Look at its axes first. Here rows are queries: a row is what one query looks at, and adds up to {row:.2f}. Columns are keys: a bright column is a key that many look at, "
        "and may add up to anything ({least:.2f} to {most:.2f} in the matrix lesson).",
        "q_root": "Why divide by √d?",
        "a_root": "Because raw dot products spread by √d: {spread:.1f} for d = {dim}. Softmax then takes nearly all or nothing: mean entropy {raw:.2f} instead of {scaled:.2f} (of at most {most:.2f}), and "
        "{less:.0f} times less gradient comes through.",
        "q_cross": "How does self-attention differ from cross-attention?",
        "a_cross": "Only in where K and V come from. When {characters} looks at itself, {query} puts {first:.2f} on {key_self}; when it looks at {words}, {query} puts {second:.2f} on {key_cross}. The queries are the "
        "same; rows stay, columns change.",
        "q_cached": "Why are K and V cached, and Q never?",
        "a_cached": "Row t needs its own q_t and all of k_1..k_t, v_1..v_t. Keeping K and V costs {cached} score pairs for {length} tokens; recomputing costs {causal}. A cache of Q would hold {held} "
        "numbers that nobody reads.",
        "q_feature": "What is R_Δ, and what is F?",
        "a_feature": "R is a table from a displacement Δ to a feature vector, here {rows} x {columns}. F is a matrix over pairs, {places} x {places}: F[q, k] = vᵀ R_(q-k), so it is Toeplitz: {zero:g} all along the "
        "diagonal, {one:g} beside it.",
        "q_delta": "What does δ mean on a grid?",
        "a_delta": "q - k by rows and by columns, two numbers. On {h} x {w}, δ = {rule} (one to the right) lights {pairs}. The flat Δ = {flat} also lights {wrong}: the end of one line is not beside the start of the next.",
        "try": "A sentence of your own, with something said twice. Say before you look: which head will find the repetition?",
        "question": "One more: what is attention, in a sentence?",
        "answer": "A soft look-up: a query asks every key how alike they are, turns the answers into shares that add up to one, and takes that mixture of the values. Equal shares gave {even:.4f} in "
        "the first lesson, nearness gave {near:.4f}.",
        "next": "Your own texts: `regard look`. In Python: `A = rg.attention(q, k); y = A @ v; A.heatmap(512)`. The first lesson again: `regard lesson lookup`",
    },
    "zh": {
        "title": "结业小测",
        "shows": "八个问题。先自己回答，再往下看；答案里的数都是现在算出来的。",
        "q_rnn": "为什么注意力比 RNN 更适合序列？",
        "a_rnn": "每个词元离别的词元都只有一步：相隔 {far} 个位置时是 {one} 步对 {steps} 步，而且所有的行可以同时算。信号也不会在路上变淡：从最近到最远，它变为 {attention:.2f} 倍，而 `heads` 一课的小 RNN 里变为 {rnn:.0e} 倍。",
        "q_dot": "查询和键的点积说明什么？",
        "a_dot": "它们方向有多一致，再乘上各自的长度：king 与 queen 是 {queen:g}，垂直时是 {right:g}，与 car 是 {car:g}。负的是相反，不是无关；长的键算得更多。",
        "q_heatmap": "怎样读 A 的热图？",
        "a_heatmap": "先看坐标轴。这里行是查询：一行是一个查询在看什么，和为 {row:.2f}。列是键：一列很亮，表示许多查询看这个键，列之和可以是任何数（矩阵一课里是 {least:.2f} 到 {most:.2f}）。",
        "q_root": "为什么除以 √d？",
        "a_root": "因为原始点积的分散程度是 √d：d = {dim} 时是 {spread:.1f}。于是 softmax 几乎非全即无：平均熵是 {raw:.2f}，而不是 {scaled:.2f}（最大 {most:.2f}），传过来的梯度只有 {less:.0f} 分之一。",
        "q_cross": "自注意力和交叉注意力有什么不同？",
        "a_cross": "只在于 K 和 V 从哪里来。{characters} 看自己时，{query} 把 {first:.2f} 放在 {key_self} 上；看 {words} 时，{query} 把 {second:.2f} 放在 {key_cross} 上。查询是一样的；行不变，列变了。",
        "q_cached": "为什么缓存 K 和 V，从不缓存 Q？",
        "a_cached": "第 t 行要用自己的 q_t 和全部的 k_1..k_t、v_1..v_t。保存 K 和 V，{length} 个词元要算 {cached} 个分数对；每步重算要 {causal} 个。缓存 Q 会存下 {held} 个没有人读的数。",
        "q_feature": "R_Δ 是什么？F 是什么？",
        "a_feature": "R 是一张从位移 Δ 到特征向量的表，这里是 {rows} x {columns}。F 是成对的矩阵，{places} x {places}：F[q, k] = vᵀ R_(q-k)，所以是 Toeplitz：对角线上全是 {zero:g}，旁边一条全是 {one:g}。",
        "q_delta": "网格上的 δ 是什么？",
        "a_delta": "q - k 的行分量和列分量，两个数。在 {h} x {w} 上，δ = {rule}（右边一格）点亮 {pairs}。展平的 Δ = {flat} 还会点亮 {wrong}：一行的末尾并不挨着下一行的开头。",
        "try": "你自己的一句话，里面有一处说了两遍。先猜：哪个头会找到重复的地方？",
        "question": "再问一个：用一句话说，注意力是什么？",
        "answer": "软查找：查询问每个键有多相似，把回答变成和为一的份额，再按份额混合各个值。第一课里，份额相等给出 {even:.4f}，按远近给出 {near:.4f}。",
        "next": "你自己的文字：`regard look`。在 Python 里：`A = rg.attention(q, k); y = A @ v; A.heatmap(512)`。再看第一课：`regard lesson lookup`",
    },
}


def show(page: Page) -> None:
    page.open()
    found = numbers()
    for name in QUESTIONS:
        page.ask(page(f"q_{name}"), page(f"a_{name}", **found[name]))
    even, near = mean()
    page.close(TRY, {"even": even, "near": near})
