"""The closing quiz: eight questions that a reader can answer by now, each answered with numbers computed on the spot."""

from __future__ import annotations

import functools
import math
from typing import Any

from . import cache, grid, heads, inputs, line, lookup, matrix, scores, softmax
from .page import Page, Words

#: in the order of the lessons they come from
QUESTIONS = ("rnn", "dot", "heatmap", "root", "cross", "cached", "feature", "delta")

#: of the options of each question, the one that is right; 0 is no answer yet, THOUGHT an answer looked up after thinking
RIGHT = {"rnn": 2, "dot": 1, "heatmap": 3, "root": 2, "cross": 1, "cached": 3, "feature": 2, "delta": 1}
OPTIONS, THOUGHT = 3, -1

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


_numbers = functools.cache(numbers)


def play(answers: Any = None, language: str = "en") -> dict[str, Any]:
    """The questions, and for those that were answered (by choosing, or by looking it up) what is right and why."""
    count = (len(QUESTIONS), len(QUESTIONS))
    given = [
        inputs.whole(f"answers[{n}]", x, THOUGHT, OPTIONS)
        for n, x in enumerate(
            inputs.numbers("answers", [0] * len(QUESTIONS) if answers is None else answers, THOUGHT, OPTIONS, count)
        )
    ]
    words = WORDS[language]
    told = []
    for name, x in zip(QUESTIONS, given, strict=True):
        shown = {"name": name, "question": words[f"q_{name}"], "chosen": x}
        if x:
            shown |= {"right": RIGHT[name], "answer": words[f"a_{name}"].format(**_numbers()[name])}
        told.append(shown)
    return {
        "inputs": {"answers": given}, "bounds": {"options": OPTIONS, "thought": THOUGHT}, "questions": told,
        "score": sum(x == RIGHT[name] for name, x in zip(QUESTIONS, given, strict=True)), "of": len(QUESTIONS),
        "chosen": sum(x > 0 for x in given),
    }  # fmt: skip


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
        "play_intro": "Choose an answer, or think of one and reveal it.",
        "play_reveal": "Reveal the answer",
        "play_correct": "Right.",
        "play_incorrect": "Not quite.",
        "play_score": "right",
        "play_score_of": "of {chosen} chosen; {of} questions",
        "play_told": "{verdict} {answer}",
        "play_option_rnn_1": "It has fewer parameters, so it learns from less data.",
        "play_option_rnn_2": "Any two tokens are one step apart, and all rows can be computed at once.",
        "play_option_rnn_3": "It reads the tokens in order, one after the other.",
        "play_option_dot_1": "How far they point the same way, times their lengths.",
        "play_option_dot_2": "How far apart they are: the smaller, the more alike.",
        "play_option_dot_3": "Whether they are related: negative means unrelated.",
        "play_option_heatmap_1": "A column is what one query looks at, and adds up to 1.",
        "play_option_heatmap_2": "All cells together add up to 1; the brightest is the answer.",
        "play_option_heatmap_3": "First its axes: here a row is what one query looks at, and adds up to 1.",
        "play_option_root_1": "To make the weights add up to 1.",
        "play_option_root_2": "Raw dot products spread by √d; softmax would take all or nothing, and pass hardly any gradient.",
        "play_option_root_3": "To make the multiplication cheaper.",
        "play_option_cross_1": "Only in where K and V come from.",
        "play_option_cross_2": "Cross-attention has no softmax.",
        "play_option_cross_3": "In self-attention Q, K and V are the same numbers.",
        "play_option_cached_1": "Because K and V are smaller than Q.",
        "play_option_cached_2": "Because Q changes with every layer, and K and V do not.",
        "play_option_cached_3": "A new row needs its own q alone, but all earlier k and v.",
        "play_option_feature_1": "Both are matrices over pairs of tokens.",
        "play_option_feature_2": "R is a table from a displacement to a feature vector; F = vᵀ R is a matrix over pairs.",
        "play_option_feature_3": "R holds the embeddings of the tokens, F their attention.",
        "play_option_delta_1": "The displacement q - k by rows and by columns: two numbers.",
        "play_option_delta_2": "How many cells lie between two tokens when the grid is read line by line.",
        "play_option_delta_3": "The size of a step in training.",
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
        "play_intro": "选一个答案，或者先自己想，再看答案。",
        "play_reveal": "看答案",
        "play_correct": "对。",
        "play_incorrect": "不完全对。",
        "play_score": "答对",
        "play_score_of": "选了 {chosen} 题；共 {of} 题",
        "play_told": "{verdict}{answer}",
        "play_option_rnn_1": "它的参数更少，所以用更少的数据就能学会。",
        "play_option_rnn_2": "任意两个词元只隔一步，而且所有的行可以同时算。",
        "play_option_rnn_3": "它按顺序一个接一个地读词元。",
        "play_option_dot_1": "它们方向有多一致，再乘上各自的长度。",
        "play_option_dot_2": "它们相距多远：越小越相似。",
        "play_option_dot_3": "它们有没有关系：为负表示无关。",
        "play_option_heatmap_1": "一列是一个查询在看什么，和为 1。",
        "play_option_heatmap_2": "所有的格子加起来是 1，最亮的就是答案。",
        "play_option_heatmap_3": "先看坐标轴：这里一行是一个查询在看什么，和为 1。",
        "play_option_root_1": "为了让权重之和为 1。",
        "play_option_root_2": "原始点积的分散程度是 √d；softmax 会非全即无，几乎不传梯度。",
        "play_option_root_3": "为了让乘法更省。",
        "play_option_cross_1": "只在于 K 和 V 从哪里来。",
        "play_option_cross_2": "交叉注意力没有 softmax。",
        "play_option_cross_3": "自注意力里 Q、K、V 是同样的数。",
        "play_option_cached_1": "因为 K 和 V 比 Q 小。",
        "play_option_cached_2": "因为 Q 每层都变，K 和 V 不变。",
        "play_option_cached_3": "新的一行只要自己的 q，却要前面所有的 k 和 v。",
        "play_option_feature_1": "两个都是成对的矩阵。",
        "play_option_feature_2": "R 是从位移到特征向量的表；F = vᵀ R 是成对的矩阵。",
        "play_option_feature_3": "R 是词元的嵌入，F 是它们的注意力。",
        "play_option_delta_1": "位移 q - k 的行分量和列分量：两个数。",
        "play_option_delta_2": "把网格一行一行读下来时，两个词元之间隔了几格。",
        "play_option_delta_3": "训练时每一步的大小。",
    },
}


def show(page: Page) -> None:
    page.open()
    found = numbers()
    for name in QUESTIONS:
        page.ask(page(f"q_{name}"), page(f"a_{name}", **found[name]))
    even, near = mean()
    page.close(TRY, {"even": even, "near": near})
