"""M3, relative position on a line: a rule over displacements, where it comes from, and R as a table from Δ to features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import bars, table
from .lookup import as_fraction
from .page import Page, Words
from .vectors import draw, head

TOKENS, RULE = 6, -2
PLACES = 4
FREQUENCIES = (math.pi / 2, math.pi / 3)
READOUT = (1.0, 0.0, 1.0, 0.0)
#: a query that listens to the low frequency only
LOW = (0.0, 0.0, 1.0, 0.0)
#: a readout that listens to one sine
SINE = (0.0, 0.0, 0.0, 1.0)
#: contents that differ from place to place
MIXED = (READOUT, READOUT, LOW, LOW)
HEADS, CLIP = 8, 4
#: places, steps and rate of the search for v
LEARNED_ON, STEPS, RATE = 12, 250, 0.05

TRY = """\
import math, torch, regard as rg
nothing = torch.zeros(1, 1, 4, 1)
for v in ([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]):
    term = rg.Static(rg.Sinusoid((math.pi / 2, math.pi / 3)), readout=torch.tensor([v]))
    print(rg.attention(nothing, nothing, position=term).logits.dense()[0, 0])"""


class Rule(NamedTuple):
    """ "Look two to the right", as scores, as a logit and as a mask."""

    score: list[list[float]]
    soft: list[list[float]]
    hard: list[list[float]]
    visible: list[list[bool]]
    profile: list[float]  # mass per displacement of the mask's A, the smallest first
    toeplitz: dict[str, float]  # how much of A the displacement explains: of "soft", "hard" and random "content"


def nothing(length: int, dim: int = 1) -> Tensor:
    """Queries or keys without content: what is left is the position term."""
    return torch.zeros(1, 1, length, dim, dtype=torch.float64)


def rule() -> Rule:
    q = nothing(TOKENS)
    bins = rg.Clipped(TOKENS - 1)
    readout = torch.zeros(1, bins.dim, dtype=q.dtype)
    readout[0, bins.index(torch.tensor([RULE]))] = 1.0
    soft = rg.attention(q, q, position=rg.Static(bins, readout=readout))[0, 0]
    hard = rg.attention(q, q, mask=rg.offset(RULE))[0, 0]
    content = rg.attention(head(draw("q", TOKENS, 8)), head(draw("k", TOKENS, 8)))[0, 0]
    explained = {"soft": soft, "hard": hard, "content": content}
    return Rule(
        soft.logits.dense().tolist(), soft.dense().tolist(), hard.dense().tolist(),
        (hard.logits.dense() > -torch.inf).tolist(), hard.profile().tolist(),
        {name: float(A.toeplitz_share()) for name, A in explained.items()},
    )  # fmt: skip


def sinusoid() -> rg.Sinusoid:
    return rg.Sinusoid(FREQUENCIES)


def features() -> tuple[list[int], list[list[float]], list[float]]:
    """Δ, R_Δ and f(Δ) = vᵀ R_Δ: the table from displacement to features, and its readout."""
    delta = torch.arange(1 - PLACES, PLACES)
    R = sinusoid()(delta[:, None])
    return delta.tolist(), R.tolist(), (R @ torch.tensor(READOUT, dtype=R.dtype)).tolist()


def static() -> list[list[float]]:
    """F[q, k] = f(q - k), as the position term of an attention without content."""
    q = nothing(PLACES)
    term = rg.Static(sinusoid(), readout=torch.tensor([READOUT], dtype=q.dtype))
    return rg.attention(q, q, position=term).logits[0, 0].dense().tolist()


def from_content(vectors: Sequence[tuple[float, ...]], side: str = "query") -> list[list[float]]:
    """q_vecᵀ W R_(q-k) with W = I and a content vector a place; `side` "key" is the twin."""
    content = head(torch.tensor(vectors, dtype=torch.float64))
    empty = nothing(PLACES, content.shape[-1])
    if side == "query":
        return rg.attention(content, empty, position=rg.FromQuery(sinusoid())).logits[0, 0].dense().tolist()
    return rg.attention(empty, content, position=rg.FromKey(sinusoid())).logits[0, 0].dense().tolist()


def four_parts() -> dict[str, list[list[float]]]:
    """(x + p)·(x + p) in its four parts, with p_t = R_t, and their sum."""
    x = draw("content", PLACES, 2 * len(FREQUENCIES))
    p = sinusoid()(torch.arange(PLACES)[:, None])
    parts = {
        "content-content": (x, x),
        "content-position": (x, p),
        "position-content": (p, x),
        "position-position": (p, p),
    }
    parts["sum"] = (x + p, x + p)
    return {
        name: rg.attention(head(a), head(b), scale=1.0).logits[0, 0].dense().tolist() for name, (a, b) in parts.items()
    }


class Learned(NamedTuple):
    """v found from data alone."""

    first: float  # loss before
    last: float  # and after
    before: list[float]
    after: list[float]


def learn() -> Learned:
    """What the true v makes of random values is enough to find v: the gradient flows through A @ values."""
    empty, values = nothing(LEARNED_ON), head(draw("values", LEARNED_ON, LEARNED_ON))
    true = rg.Static(sinusoid(), readout=torch.tensor([READOUT], dtype=empty.dtype))
    target = rg.attention(empty, empty, position=true) @ values
    v = torch.nn.Parameter(0.1 * draw("v", 1, len(READOUT)))
    before, losses = v[0].tolist(), []
    optimizer = torch.optim.Adam([v], lr=RATE)
    term = rg.Static(sinusoid(), readout=v)
    for _ in range(STEPS):
        loss = (rg.attention(empty, empty, position=term) @ values - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Learned(losses[0], losses[-1], before, v[0].tolist())


def odd() -> list[float]:
    """f(Δ) of a readout that listens to one sine."""
    _, R, _ = features()
    return (torch.tensor(R, dtype=torch.float64) @ torch.tensor(SINE, dtype=torch.float64)).tolist()


def tables() -> tuple[list[int], dict[str, list[float]]]:
    """Features of a few displacements under other tables: T5's bucket, ALiBi's slope, a clipped table's bin."""
    deltas = [-128, -16, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128]
    delta = torch.tensor(deltas)[:, None]
    slope = rg.recipes.alibi(HEADS)
    return deltas, {
        "buckets": rg.Buckets().index(delta).tolist(),
        "slope": (slope.features(delta) * slope.readout[0]).flatten().tolist(),
        "clipped": rg.Clipped(CLIP).index(delta).tolist(),
    }


WORDS: Words = {
    "en": {
        "title": "Relative position on a line",
        "shows": "A score that depends on q - k alone: a rule, where such a term comes from, and how R and v make it.",
        "rule": "“Every token looks at the one two to its right”: k = q + 2, so Δ = q - k = {rule}. On {count} tokens the score is 1 at {pairs} and 0 "
        "elsewhere; rows {empty} are all 0. The same Δ gives the same score, all along a diagonal: a Toeplitz matrix.",
        "uses": "Used as a logit, softmax spreads it: a row with one 1 among {count} has {top:.4f} there and {rest:.4f} elsewhere; an all-0 row has "
        "{even} everywhere. Used as a mask, A is 1 there, and rows {empty} are empty: they see nothing.",
        "score": "score",
        "soft": "as a logit: softmax",
        "hard": "as a mask",
        "profile": "mass per Δ, as a mask",
        "toeplitz": "Toeplitz share, how much of A is explained by Δ alone: as a mask {hard:.2f}, as a logit {soft:.2f} (its flat rows are the rest), "
        "A of random content {content:.2f}.",
        "origin": "Where a position term comes from: give place t the vector p_t = [cos ω0t, sin ω0t, cos ω1t, sin ω1t] and add it to the content x_t. "
        "Then (x+p)·(x+p) has four parts, and the last, P Pᵀ, depends on q - k alone.",
        "content-content": "content·content",
        "content-position": "content·position",
        "position-content": "position·content",
        "position-position": "position·position",
        "sum": "their sum",
        "features": "That last part is F[q, k] = f(q - k) = vᵀ R_(q-k). R is not a matrix like F but a table from Δ to a feature vector, here "
        "{rows} x {columns}; v = {v} reads it out. ω = (π/2, π/3): a high and a low frequency.",
        "static": "F: vᵀ R",
        "same": "every q = v",
        "by_query": "q = v, v, low, low",
        "by_key": "k = v, v, low, low",
        "content": "Content-dependent: q_vecᵀ W R_(q-k). The distance features stay; the query decides which of them matter. With W = I and q_vec = v it "
        "is F again. A query low = {low} hears the low frequency only, so its row is another one, and A is no longer Toeplitz. The key side has its "
        "twin, with columns for rows. v, W and R can all be learned.",
        "tables": "Other tables from Δ, as `rg.recipes` uses them: T5's logarithmic buckets ({buckets} of them: far distances share one), ALiBi's slopes "
        "(head 1 of {heads}), a learned table clipped at {clip}.",
        "buckets": "T5 bucket",
        "slope": "ALiBi bias",
        "clipped": "clipped bin",
        "learn": "v can be learned from data. Hide v = {v}, keep only what its A makes of random values on {count} places, and start from a random v: after {steps} "
        "steps of Adam the loss has gone from {first:.2e} to {last:.2e}, and v is found again.",
        "before": "v before",
        "after": "v after",
        "true": "v hidden",
        "try": "The readout [1, 0, 1, 0] gives F. The second one listens to a sine: look at the signs above and below the diagonal. Then try ω and v of your own.",
        "question": "With v = {v}, only cosines are heard, and F is symmetric: left and right look the same. Which v can tell left from right?",
        "answer": "One that listens to a sine. With v = {sine}: f(-1) = {left:+.3f} and f(1) = {right:+.3f}, for sin is odd. In “R_Δ” Δ has a sign.",
        "next": "When tokens stand on a grid, a displacement has two parts. `regard lesson grid`",
    },
    "zh": {
        "title": "一维的相对位置",
        "shows": "只取决于 q - k 的分数：一条规则，这种项从哪里来，R 和 v 怎样造出它。",
        "rule": "“每个词元看它右边第二个”：k = q + 2，即 Δ = q - k = {rule}。{count} 个词元时，分数在 {pairs} 处为 1，其余为 0；第 {empty} 行全为 0。Δ 相同则分数相同，沿"
        "整条对角线都一样：这是 Toeplitz 矩阵。",
        "uses": "当作 logit 用，softmax 会把它摊开：{count} 个数里有一个 1 的行，该处是 {top:.4f}，其余各 {rest:.4f}；全 0 的行处处是 {even}。当作掩码用，A 在该处为 "
        "1，第 {empty} 行是空的：什么也看不见。",
        "score": "分数",
        "soft": "当作 logit：softmax",
        "hard": "当作掩码",
        "profile": "每个 Δ 的质量（当作掩码）",
        "toeplitz": "Toeplitz 份额，即 A 有多少能只用 Δ 解释：当作掩码 {hard:.2f}，当作 logit {soft:.2f}（其余来自那两个平坦的行），随机内容的 A {content:.2f}。",
        "origin": "位置项从哪里来：给位置 t 一个向量 p_t = [cos ω0t, sin ω0t, cos ω1t, sin ω1t]，加到内容 x_t 上。于是 (x+p)·(x+p) 有四部分，最后一部分 P Pᵀ 只取决于 q - k。",
        "content-content": "内容·内容",
        "content-position": "内容·位置",
        "position-content": "位置·内容",
        "position-position": "位置·位置",
        "sum": "四者之和",
        "features": "最后这部分就是 F[q, k] = f(q - k) = vᵀ R_(q-k)。R 不是像 F 那样的矩阵，而是一张从 Δ 到特征向量的表，这里是 {rows} x {columns}；v = {v} 把它读出来。ω = "
        "(π/2, π/3)：一个高频，一个低频。",
        "static": "F：vᵀ R",
        "same": "每个 q = v",
        "by_query": "q = v, v, low, low",
        "by_key": "k = v, v, low, low",
        "content": "与内容有关：q_vecᵀ W R_(q-k)。距离的特征不变，由查询决定哪些要紧。W = I、q_vec = v 时又是 F。查询 low = {low} 只听低频，它那一行就不同，A 不再是 "
        "Toeplitz。键的一侧也有同样的一项，只是行换成列。v、W 和 R 都可以学。",
        "tables": "从 Δ 出发的其他表，`rg.recipes` 都有：T5 的对数桶（共 {buckets} 个：远的距离共用一个），ALiBi 的斜率（{heads} 个头中的第 1 个），截断到 {clip} 的可学表。",
        "buckets": "T5 的桶",
        "slope": "ALiBi 偏置",
        "clipped": "截断后的格",
        "learn": "v 可以从数据里学。把 v = {v} 藏起来，只留下它的 A 在 {count} 个位置上对随机的值做出的结果，从随机的 v 开始：Adam 走 {steps} 步，损失从 {first:.2e} 降到 {last:.2e}，v 又找"
        "回来了。",
        "before": "学之前的 v",
        "after": "学之后的 v",
        "true": "藏起的 v",
        "try": "读出 [1, 0, 1, 0] 给出 F。第二个听的是正弦：看对角线上下的正负号。再试试你自己的 ω 和 v。",
        "question": "v = {v} 时只听余弦，F 是对称的：左和右看起来一样。怎样的 v 能分清左右？",
        "answer": "听正弦的 v。v = {sine} 时，f(-1) = {left:+.3f}，f(1) = {right:+.3f}，因为正弦是奇函数。“R_Δ”里的 Δ 是有正负的。",
        "next": "词元排在网格上时，位移有两个分量。`regard lesson grid`",
    },
}


def show(page: Page) -> None:
    page.open()
    found = rule()
    names = [str(n + 1) for n in range(TOKENS)]
    ones = [(i + 1, j + 1) for i, row in enumerate(found.score) for j, x in enumerate(row) if x == 1]
    empty = [i + 1 for i, row in enumerate(found.score) if not any(row)]
    page.say("rule", rule=RULE, count=TOKENS, pairs=" ".join(f"({i},{j})" for i, j in ones), empty=page.listed(empty))
    page.say(
        "uses",
        count=TOKENS,
        top=max(found.soft[0]),
        rest=min(found.soft[0]),
        even=as_fraction(found.soft[-1][0]),
        empty=page.listed(empty),
    )
    how: dict[str, Any] = {"rows": names, "columns": names, "low": 0, "high": 1}
    page.show(
        page.map(found.score, values="g", title=page("score"), **how),
        page.map(found.soft, values=".4f", title=page("soft"), **how),
        page.map(found.hard, visible=found.visible, values="g", title=page("hard"), **how),
    )
    page.show(
        bars(found.profile, [f"{d}" for d in range(1 - TOKENS, TOKENS)], title=page("profile"), form="g", height=3)
    )
    page.say("toeplitz", **found.toeplitz)
    page.say("origin")
    places = [str(n) for n in range(PLACES)]
    square: dict[str, Any] = {"rows": places, "columns": places, "values": ".1f"}
    page.show(*(page.map(part, title=page(name), **square) for name, part in four_parts().items()))
    deltas, R, f = features()
    page.say("features", rows=len(R), columns=len(R[0]), v=_vector(READOUT))
    header = ["Δ", "cos ω0Δ", "sin ω0Δ", "cos ω1Δ", "sin ω1Δ", "f(Δ)"]
    rows = [[f"{d}", *(f"{x + 0.0:.3f}" for x in (*r, y))] for d, r, y in zip(deltas, _clean(R), f, strict=True)]
    page.show(table(header, rows), page.map(static(), title=page("static"), **square))
    page.say("content", low=_vector(LOW))
    page.show(
        page.map(from_content([READOUT] * PLACES), title=page("same"), **square),
        page.map(from_content(MIXED), title=page("by_query"), **square),
        page.map(from_content(MIXED, "key"), title=page("by_key"), **square),
    )
    deltas, kinds = tables()
    page.say("tables", buckets=rg.Buckets().dim, heads=HEADS, clip=CLIP)
    page.show(
        table(["Δ", *map(str, deltas)], [[page(name), *(f"{x + 0.0:g}" for x in row)] for name, row in kinds.items()])
    )
    learned = learn()
    page.say("learn", v=_vector(READOUT), count=LEARNED_ON, steps=STEPS, first=learned.first, last=learned.last)
    found_v = (("before", learned.before), ("after", learned.after), ("true", list(READOUT)))
    page.show(
        table(["", *header[1:-1]], [[page(name), *(f"{round(x, 3) + 0.0:.3f}" for x in v)] for name, v in found_v])
    )
    f = odd()
    page.close(
        TRY, {"sine": _vector(SINE), "left": f[PLACES - 2], "right": f[PLACES]}, v=_vector(READOUT)
    )  # fmt: skip


def _clean(rows: list[list[float]]) -> list[list[float]]:
    """Without the rounding errors that would print as -0.000."""
    return [[0.0 if abs(x) < 1e-12 else x for x in row] for row in rows]


def _vector(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{x:g}" for x in numbers) + "]"
