"""M3, relative position on a line: a rule over displacements, where it comes from, and R as a table from Δ to features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import regard as rg

from ..views.terminal import bars, table
from . import inputs
from .lookup import as_fraction
from .page import Page, Words
from .vectors import draw, head
from .waves import (
    FREQUENCIES,
    LEARNED_ON,
    PLACES,
    READOUT,
    STEPS,
    content_of,
    features,
    four_parts,
    from_content,
    learn,
    nothing,
    searching,
    spread,
    static,
    static_of,
    waves,
)

TOKENS, RULE = 6, -2
#: a query that listens to the low frequency only
LOW = (0.0, 0.0, 1.0, 0.0)
#: a readout that listens to one sine
SINE = (0.0, 0.0, 0.0, 1.0)
#: contents that differ from place to place
MIXED = (READOUT, READOUT, LOW, LOW)
HEADS, CLIP = 8, 4
#: what a reader may choose: a rule, the periods of the two waves (ω = 2π / period), numbers of v and W, which contents are low
RULES, PERIODS, AMOUNT = (1 - TOKENS, TOKENS - 1), (2, 24), (-2.0, 2.0)
PERIOD = (4, 6)
#: displacements that the curve of f runs over, to either side
FAR = 12

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


def rule(delta: int = RULE) -> Rule:
    q = nothing(TOKENS)
    bins = rg.Clipped(TOKENS - 1)
    readout = torch.zeros(1, bins.dim, dtype=q.dtype)
    readout[0, bins.index(torch.tensor([delta]))] = 1.0
    soft = rg.attention(q, q, position=rg.Static(bins, readout=readout))[0, 0]
    hard = rg.attention(q, q, mask=rg.offset(delta))[0, 0]
    content = rg.attention(head(draw("q", TOKENS, 8)), head(draw("k", TOKENS, 8)))[0, 0]
    explained = {"soft": soft, "hard": hard, "content": content}
    return Rule(
        soft.logits.dense().tolist(), soft.dense().tolist(), hard.dense().tolist(),
        (hard.logits.dense() > -torch.inf).tolist(), hard.profile().tolist(),
        {name: float(A.toeplitz_share()) for name, A in explained.items()},
    )  # fmt: skip


def stream(periods: Any = PERIOD, v: Any = READOUT) -> Iterator[dict[str, Any]]:
    """The search for the reader's v, from its data alone."""
    given, hidden = _waves(periods), inputs.numbers("v", v, *AMOUNT, (len(READOUT), len(READOUT)))
    deltas, _, true = features(waves(given), hidden, FAR)

    def told() -> Iterator[dict[str, Any]]:
        for state in searching(hidden, waves(given)):
            yield {**state._asdict(), "steps": STEPS, "curve": features(waves(given), state.v, FAR)[2], "true": true}

    return told()


def play(
    delta: Any = RULE, periods: Any = PERIOD, v: Any = READOUT, low: Any = (False, False, True, True), side: Any = "query",
    weight: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """A rule as a score, a logit and a mask; the four parts; f and F of chosen waves; F that depends on content."""
    size = len(READOUT)
    chosen = inputs.whole("delta", delta, *RULES)
    given, readout = _waves(periods), inputs.numbers("v", v, *AMOUNT, (size, size))
    if not isinstance(low, (list, tuple)) or len(low) != PLACES:
        raise inputs.Refused("low", f"{PLACES} of true or false", f"{low!r:.60}", f" {PLACES} 个 true 或 false")
    quiet = [inputs.truth(f"low[{n}]", x) for n, x in enumerate(low)]
    of = inputs.choice("side", side, ("query", "key"))
    unit = torch.eye(size, dtype=torch.float64).tolist()
    W = inputs.matrix("weight", unit if weight is None else weight, *AMOUNT, (size, size))
    found, R_of = rule(chosen), waves(given)
    deltas, R, f = features(R_of, readout)
    far, _, curve = features(R_of, readout, FAR)
    F = static_of(R_of, readout).logits.dense()
    content = content_of(
        [LOW if x else readout for x in quiet], of, R_of, torch.tensor(W, dtype=torch.float64)
    ).logits.dense()  # fmt: skip
    return {
        "inputs": {"delta": chosen, "periods": given, "v": readout, "low": quiet, "side": of, "weight": W},
        "bounds": {
            "delta": [*RULES, 1], "periods": [*PERIODS, 1], "v": [*AMOUNT, 0.1], "side": ["query", "key"],
            "weight": [*AMOUNT, 0.5],
        },
        "tokens": [str(n + 1) for n in range(TOKENS)], "rule": inputs.plain(found._asdict()),
        "profile_deltas": [str(d) for d in range(1 - TOKENS, TOKENS)],
        "pairs": [[i + 1, j + 1] for i, row in enumerate(found.score) for j, x in enumerate(row) if x == 1],
        "empty": [i + 1 for i, row in enumerate(found.score) if not any(row)],
        "omegas": [2 * math.pi / n for n in given], "deltas": deltas, "R": _clean(R), "f": _clean([f])[0],
        "far": far, "curve": curve, "places": [str(n) for n in range(PLACES)],
        "F": _clean(F.tolist()), "F_spread": spread(F),
        "parts": {name: _clean(part) for name, part in four_parts(R_of).items()},
        "content": _clean(content.tolist()), "content_spread": spread(content), "learned_on": LEARNED_ON, "steps": STEPS,
    }  # fmt: skip


def _waves(periods: Any) -> list[int]:
    count = len(FREQUENCIES)
    if not isinstance(periods, (list, tuple)) or len(periods) != count:
        raise inputs.Refused("periods", f"{count} whole numbers", f"{periods!r:.60}", f" {count} 个整数")
    return [inputs.whole(f"periods[{n}]", x, *PERIODS) for n, x in enumerate(periods)]


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
        "play_rule": "A rule over displacements",
        "play_delta": "Δ = q - k",
        "play_says": "Every token looks at k = q {sign} {size}. Score 1 at {pairs}; empty rows: {empty}.",
        "play_none": "none",
        "play_score": "score",
        "play_soft": "as a logit: softmax",
        "play_hard": "as a mask",
        "play_profile": "mass per Δ: as a mask",
        "play_toeplitz": "explained by Δ alone (Toeplitz share): as a mask {hard}, as a logit {soft}, random content {content}",
        "play_waves": "Waves: f(Δ) = vᵀ R_Δ",
        "play_period": "period {n} (ω{n} = {omega})",
        "play_v": "v: {name}",
        "play_curve": "f(Δ)",
        "play_R": "R: a table from Δ to a vector",
        "play_F": "F[q, k] = f(q - k)",
        "play_F_note": "Point at a cell: all cells of its Δ are lit, and have the same number.",
        "play_F_pair": "q = {q}, k = {k}: Δ = {delta}, F = {value}",
        "play_parts": "Where it comes from: (x+p)·(x+p)",
        "play_parts_note": "Content x is random, p_t are the waves above. The last part depends on Δ alone: it is F with v = 1 on the cosines.",
        "play_of_content_content": "content·content",
        "play_of_content_position": "content·position",
        "play_of_position_content": "position·content",
        "play_of_position_position": "position·position",
        "play_of_sum": "their sum",
        "play_parts_pair": "q = {q}, k = {k}: {parts} = {sum}",
        "play_content": "Content-dependent: q_vecᵀ W R_Δ",
        "play_side": "whose content",
        "play_side_query": "the query's",
        "play_side_key": "the key's",
        "play_low": "place {n} hears the low wave only",
        "play_weight": "W",
        "play_content_map": "q_vecᵀ W R_Δ",
        "play_content_key_map": "k_vecᵀ W R_Δ",
        "play_content_note": "Largest difference within one Δ: {content} here, {F} in F above. With W = I and all places alike it is F again, Toeplitz; as soon as contents differ, Δ alone no longer decides.",
        "play_learn": "Learn v from data",
        "play_learn_start": "Hide v and find it again",
        "play_stop": "Stop",
        "play_learn_note": "v above is hidden. Only what its A makes of random values on {count} places is kept; Adam starts from a random v.",
        "play_learned": "step {step} of {steps}: loss {loss}",
        "play_true": "hidden v",
        "play_now": "found v",
        "play_told": "f of 0, 1, 2, 3: {f}.",
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
        "play_rule": "一条关于位移的规则",
        "play_delta": "Δ = q - k",
        "play_says": "每个词元看 k = q {sign} {size}。分数 1 在 {pairs}；空行：{empty}。",
        "play_none": "没有",
        "play_score": "分数",
        "play_soft": "当作 logit：softmax",
        "play_hard": "当作掩码",
        "play_profile": "每个 Δ 的质量：当作掩码",
        "play_toeplitz": "只用 Δ 能解释多少（Toeplitz 份额）：当作掩码 {hard}，当作 logit {soft}，随机内容 {content}",
        "play_waves": "波：f(Δ) = vᵀ R_Δ",
        "play_period": "周期 {n}（ω{n} = {omega}）",
        "play_v": "v：{name}",
        "play_curve": "f(Δ)",
        "play_R": "R：从 Δ 到向量的表",
        "play_F": "F[q, k] = f(q - k)",
        "play_F_note": "指向一格：Δ 相同的格子都亮起来，它们的数都一样。",
        "play_F_pair": "q = {q}，k = {k}：Δ = {delta}，F = {value}",
        "play_parts": "它从哪里来：(x+p)·(x+p)",
        "play_parts_note": "内容 x 是随机的，p_t 就是上面的波。最后一部分只取决于 Δ：它就是余弦上 v = 1 的 F。",
        "play_of_content_content": "内容·内容",
        "play_of_content_position": "内容·位置",
        "play_of_position_content": "位置·内容",
        "play_of_position_position": "位置·位置",
        "play_of_sum": "四者之和",
        "play_parts_pair": "q = {q}，k = {k}：{parts} = {sum}",
        "play_content": "与内容有关：q_vecᵀ W R_Δ",
        "play_side": "谁的内容",
        "play_side_query": "查询的",
        "play_side_key": "键的",
        "play_low": "位置 {n} 只听低频",
        "play_weight": "W",
        "play_content_map": "q_vecᵀ W R_Δ",
        "play_content_key_map": "k_vecᵀ W R_Δ",
        "play_content_note": "同一个 Δ 之内最大的差：这里 {content}，上面的 F 里 {F}。W = I 且各处向量相同时又是 F，是 Toeplitz 的；内容一有不同，就不再只由 Δ 决定。",
        "play_learn": "从数据里学 v",
        "play_learn_start": "藏起 v，再找回来",
        "play_stop": "停止",
        "play_learn_note": "把上面的 v 藏起来，只留下它的 A 在 {count} 个位置上对随机的值做出的结果；Adam 从随机的 v 开始。",
        "play_learned": "第 {step} 步，共 {steps} 步：损失 {loss}",
        "play_true": "藏起的 v",
        "play_now": "找到的 v",
        "play_told": "f 在 0、1、2、3 处：{f}。",
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
