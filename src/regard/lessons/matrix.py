"""M1, the matrix A: every step from tokens to the output with its shape and numbers, and which way A looks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from . import inputs as given
from .page import Page, Words
from .vectors import draw, embed, head, weight

TOKENS = ("小", "沈", "阳")
MODEL_DIM, HEADS, DIM, V_DIM = 6, 2, 4, 5
#: the query and the head whose numbers are shown
SHOWN, HEAD = 1, 0

#: of the picture: numbers of a token, the largest d_k and d_v, how far a number may go, and ALiBi's slope
WIDTH, DIMS, V_DIMS, REACH, SLOPE = 4, (1, 4), (1, 5), 3.0, (0.0, 2.0)
STEPS = ("x", "qkv", "scores", "scale", "position", "mask", "softmax", "output")
#: where K comes from: W_K of its own, or Q times something
TIES = ("free", "equal", "double", "symmetric")
#: Q S with S symmetric
SYMMETRIC = ((1.0, 0.5, 0.0, 0.0), (0.5, -1.0, 0.5, 0.0), (0.0, 0.5, 1.0, 0.5), (0.0, 0.0, 0.5, -1.0))

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


def direction(seed: str = "") -> tuple[tuple[int, ...], tuple[int, ...], float, dict[str, float]]:
    """Shapes of A and A.reversed(), how far the latter is from Aᵀ, and for which K it equals A. A seed draws others."""
    q, k = head(draw("Q" + seed, 3, DIM)), head(draw("K" + seed, 5, DIM))
    A = rg.attention(q, k)
    back = A.reversed()
    away = float((back.dense() - A.dense().mT).abs().max())
    s = draw("S" + seed, DIM, DIM)
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


def drawn(name: str, rows: int, columns: int) -> list[list[float]]:
    """Numbers with one digit after the point, so that they can be followed by hand."""
    return [[round(x, 1) for x in row] for row in draw(name, rows, columns).tolist()]


def play(
    x: Any = None, w_q: Any = None, w_k: Any = None, w_v: Any = None, dim: Any = DIM, v_dim: Any = V_DIM,
    scaled: Any = True, position: Any = True, slope: Any = 0.5, mask: Any = "causal", tie: Any = "free", step: Any = "x",
    place: Any = False, turned: Any = False,
) -> dict[str, Any]:  # fmt: skip
    """One head, every step with its numbers: X → Q, K, V → Q Kᵀ → ÷ √d_k → + position → mask → softmax → · V."""
    d_k, d_v = given.whole("dim", dim, *DIMS), given.whole("v_dim", v_dim, *V_DIMS)
    count = len(TOKENS)
    shapes = {"x": (count, WIDTH), "w_q": (WIDTH, DIMS[1]), "w_k": (WIDTH, DIMS[1]), "w_v": (WIDTH, V_DIMS[1])}
    asked = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v}
    numbers = {
        name: given.matrix(name, drawn(name, *shapes[name]) if rows is None else rows, -REACH, REACH, shapes[name])
        for name, rows in asked.items()
    }
    flags = {"scaled": given.truth("scaled", scaled), "position": given.truth("position", position)}
    flags["place"] = given.truth("place", place)
    flags["turned"] = given.truth("turned", turned)  # how it is drawn; in the address like the rest
    down = given.number("slope", slope, *SLOPE)
    names = {"mask": given.choice("mask", mask, ("none", "causal")), "tie": given.choice("tie", tie, TIES)}
    at = given.choice("step", step, STEPS)
    t = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in numbers.items()}
    where = rg.Sinusoid(rg.Sinusoid.geometric(WIDTH))(torch.arange(count)[:, None]).to(torch.float64)
    t["x"] = t["x"] + where if flags["place"] else t["x"]
    wq, wv = t["w_q"][:, :d_k], t["w_v"][:, :d_v]
    symmetric = torch.tensor(SYMMETRIC, dtype=torch.float64)[:d_k, :d_k]
    wk = {"free": t["w_k"][:, :d_k], "equal": wq, "double": 2 * wq, "symmetric": wq @ symmetric}[names["tie"]]
    q, k, v = t["x"] @ wq, t["x"] @ wk, t["x"] @ wv
    A = rg.attention(
        head(q), head(k), scale=None if flags["scaled"] else 1.0, mask=rg.causal if names["mask"] == "causal" else None,
        position=rg.Static(rg.Slope(), readout=torch.tensor([[down]], dtype=q.dtype)) if flags["position"] else None,
    )  # fmt: skip
    s = A.steps(head(v))
    term = next(iter(s.terms.values()), torch.zeros_like(s.scores))
    back = rg.attention(head(q), head(k), scale=None if flags["scaled"] else 1.0)
    sides = {"forth": back[0, 0].dense(), "back": back.reversed()[0, 0].dense()}
    return {
        "inputs": {
            **numbers, "dim": d_k, "v_dim": d_v, **flags, "slope": down, "mask": names["mask"], "tie": names["tie"],
            "step": at,
        },
        "bounds": {
            "number": [-REACH, REACH, 0.1], "dim": [*DIMS, 1], "v_dim": [*V_DIMS, 1], "slope": [*SLOPE, 0.1],
            "mask": ["none", "causal"], "tie": list(TIES), "step": list(STEPS),
        },
        "tokens": list(TOKENS), "where": where.tolist(), "made": t["x"].tolist(), "root": d_k**0.5,
        "q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "w_k": wk.tolist(),
        "products": (q[:, None, :] * k[None, :, :]).tolist(),
        "scores": s.scores[0, 0].tolist(), "divided": s.scaled[0, 0].tolist(), "term": term[0, 0].expand(count, count).tolist(),
        "logits": s.logits[0, 0].tolist(), "masked": given.plain(s.masked[0, 0]), "visible": s.visible[0, 0].tolist(),
        "lse": given.plain(A[0, 0].lse), "weights": A[0, 0].dense().tolist(), "y": (A @ head(v))[0, 0].tolist(),
        "sums": {"rows": A[0, 0].dense().sum(1).tolist(), "columns": A[0, 0].received().tolist()},
        "shapes": {name: by(tuple(each.shape)) for name, each in {**t, "q": q, "k": k, "v": v, "w_q": wq, "w_k": wk,
                   "w_v": wv, "a": sides["forth"], "y": (A @ head(v))[0, 0]}.items()},
        **{name: each.tolist() for name, each in sides.items()},
        "apart": float((sides["forth"] - sides["back"]).abs().max()),
        "agree": bool(torch.allclose(sides["forth"], sides["back"])),
        "symmetric": float((s.scores[0, 0] - s.scores[0, 0].T).abs().max()),
    }  # fmt: skip


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
        "play_step": "step",
        "play_step_x": "1 X",
        "play_step_qkv": "2 Q, K, V",
        "play_step_scores": "3 Q Kᵀ",
        "play_step_scale": "4 ÷ √d_k",
        "play_step_position": "5 + position",
        "play_step_mask": "6 mask",
        "play_step_softmax": "7 softmax",
        "play_step_output": "8 · V",
        "play_says_x": "X has a row a token: its embedding E, plus its absolute position P where a model adds one. Change any number, and see A change below.",
        "play_says_qkv": "Three learned matrices turn each row of X into a query (what it looks for), a key (what it says of itself) and a value (what it gives). K and Q need the same width d_k; V may have another, d_v.",
        "play_says_scores": "Every query with every key: row i, column j holds q_i·k_j. k_j is row j of K, and so column j of Kᵀ.",
        "play_says_scale": "Divided by √d_k = {root}, so that the spread does not grow with the width.",
        "play_says_position": "A term that knows only the displacement i - j is added: here ALiBi, minus slope times distance. Each diagonal holds one number.",
        "play_says_mask": "What a query may not look at becomes -∞. With the causal mask, that is every later token.",
        "play_says_softmax": "Each row becomes shares: exp of each logit, over the row's sum. Every row adds up to 1; a column may add up to anything.",
        "play_says_output": "Each row of A mixes the rows of V. {a} times {v} is {y}: as many rows as queries, as wide as the values. V A would not conform.",
        "play_place": "add the absolute position P (sinusoids)",
        "play_before": "Step back",
        "play_after": "Next step",
        "play_dim": "d_k",
        "play_v_dim": "d_v",
        "play_scaled": "divide by √d_k",
        "play_position": "add the position term",
        "play_slope": "slope",
        "play_mask": "mask",
        "play_mask_none": "none",
        "play_mask_causal": "causal",
        "play_pair": "Point at a cell of A, or move over it with the arrow keys.",
        "play_a": "A: rows are queries, columns are keys",
        "play_turned": "transpose the picture",
        "play_a_turned": "A transposed: columns are queries, rows are keys",
        "play_pair_title": "query {q} looks at key {k}",
        "play_products": "q·k = {products} = {score}",
        "play_divided": "÷ √d_k",
        "play_term": "position",
        "play_logit": "logit",
        "play_lse": "log-sum-exp of the row",
        "play_weight": "weight = exp(logit - log-sum-exp)",
        "play_hidden": "masked: this query may not look at this key",
        "play_row": "row {q}: what {q} looks at",
        "play_sum": "the row adds up to {row}; column {k} to {column}",
        "play_direction": "Which way: Q Kᵀ against K Qᵀ (no position, no mask)",
        "play_tie": "K is",
        "play_tie_free": "X W_K",
        "play_tie_equal": "Q",
        "play_tie_double": "2Q",
        "play_tie_symmetric": "Q S, S symmetric",
        "play_forth": "softmax of Q Kᵀ: queries look at keys",
        "play_back": "softmax of K Qᵀ: keys look at queries",
        "play_axes_forth": "rows: queries, columns: keys",
        "play_axes_back": "rows: keys, columns: queries",
        "play_apart": "largest difference",
        "play_agree": "Q Kᵀ is symmetric, so the two agree.",
        "play_differ": "Q Kᵀ is not symmetric (entries differ from their mirror images by up to {symmetric}), so the two are different distributions.",
        "play_told": "Query {q}, key {k}: weight {weight}.",
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
        "play_step": "步骤",
        "play_step_x": "1 X",
        "play_step_qkv": "2 Q、K、V",
        "play_step_scores": "3 Q Kᵀ",
        "play_step_scale": "4 ÷ √d_k",
        "play_step_position": "5 + 位置",
        "play_step_mask": "6 掩码",
        "play_step_softmax": "7 softmax",
        "play_step_output": "8 · V",
        "play_says_x": "X 的每一行是一个词元：它的嵌入 E，有的模型还加上绝对位置 P。改动任何一个数，看下面的 A 怎样变。",
        "play_says_qkv": "三个学到的矩阵把 X 的每一行变成查询（要找什么）、键（怎样介绍自己）和值（给出什么）。K 和 Q 的宽度必须相同，是 d_k；V 可以是另一个宽度 d_v。",
        "play_says_scores": "每个查询乘每个键：第 i 行第 j 列是 q_i·k_j。k_j 是 K 的第 j 行，也就是 Kᵀ 的第 j 列。",
        "play_says_scale": "除以 √d_k = {root}，让分散程度不随宽度增大。",
        "play_says_position": "加上一项，它只知道位移 i - j：这里是 ALiBi，负的斜率乘距离。每条对角线上是同一个数。",
        "play_says_mask": "查询不能看的位置变成 -∞。因果掩码遮住的是后面的所有词元。",
        "play_says_softmax": "每一行变成份额：各个 logit 取 exp，再除以这一行的总和。每行之和为 1；一列之和可以是任何数。",
        "play_says_output": "A 的每一行混合 V 的各行。{a} 乘 {v} 得 {y}：行数等于查询的个数，宽度等于值的宽度。写成 V A 就对不上。",
        "play_place": "加上绝对位置 P（正弦和余弦）",
        "play_before": "上一步",
        "play_after": "下一步",
        "play_dim": "d_k",
        "play_v_dim": "d_v",
        "play_scaled": "除以 √d_k",
        "play_position": "加上位置项",
        "play_slope": "斜率",
        "play_mask": "掩码",
        "play_mask_none": "没有",
        "play_mask_causal": "因果",
        "play_pair": "指向 A 的一格，或用方向键在上面移动。",
        "play_a": "A：行是查询，列是键",
        "play_turned": "把图转置",
        "play_a_turned": "转置后的 A：列是查询，行是键",
        "play_pair_title": "查询“{q}”看键“{k}”",
        "play_products": "q·k = {products} = {score}",
        "play_divided": "÷ √d_k",
        "play_term": "位置",
        "play_logit": "logit",
        "play_lse": "这一行的 log-sum-exp",
        "play_weight": "权重 = exp(logit - log-sum-exp)",
        "play_hidden": "被遮住：这个查询不能看这个键",
        "play_row": "“{q}”这一行：{q} 在看什么",
        "play_sum": "这一行之和是 {row}；“{k}”这一列之和是 {column}",
        "play_direction": "谁看谁：Q Kᵀ 与 K Qᵀ（没有位置，没有掩码）",
        "play_tie": "K 是",
        "play_tie_free": "X W_K",
        "play_tie_equal": "Q",
        "play_tie_double": "2Q",
        "play_tie_symmetric": "Q S，S 对称",
        "play_forth": "Q Kᵀ 的 softmax：查询看键",
        "play_back": "K Qᵀ 的 softmax：键看查询",
        "play_axes_forth": "行：查询，列：键",
        "play_axes_back": "行：键，列：查询",
        "play_apart": "最大的差",
        "play_agree": "Q Kᵀ 是对称的，所以两者一致。",
        "play_differ": "Q Kᵀ 不对称（元素与它的镜像最多相差 {symmetric}），所以两者是不同的分布。",
        "play_told": "查询 {q}，键 {k}：权重 {weight}。",
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
