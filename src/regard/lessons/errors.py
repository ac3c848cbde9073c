"""M6, what common explanations get wrong: each claim beside the check that shows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import regard as rg

from . import inputs, lookup, matrix, scores, softmax
from .page import Page, Words
from .vectors import draw, head

QUERIES, KEYS, DIM, V_DIM = 3, 4, 4, 5
#: other random vectors that a reader may put a claim to
DRAWS = (0, 99)

TRY = """\
from regard.lessons import errors
for name, check in errors.checks().items():
    print(name, check.holds, check.numbers)"""


class Check(NamedTuple):
    """A claim put to the test: whether it holds, and the numbers that say so, by the names its sentences use."""

    holds: bool
    numbers: dict[str, Any]


def printed_softmax() -> Check:
    """The shares some texts print for [3.5, -2.1, 8.7, 0.3], against softmax to as many decimals."""
    right = softmax.softmax()
    largest = sorted(right, reverse=True)[:3]
    claimed = sorted(softmax.MISPRINT, reverse=True)
    return Check(
        [round(x, 2) for x in largest] == claimed,
        {
            "claimed": _listed(softmax.MISPRINT),
            "found": _listed(f"{x:.4f}" for x in right),
            "logits": _listed(softmax.LOGITS),
        },
    )


def upside_down() -> Check:
    """Weight |q-k| / Σ|q-k|: does the nearest key get the most?"""
    look = lookup.look("upside_down")
    away = lookup.distances()
    farthest = look.weights[away.index(max(away))]
    nearest = look.weights[away.index(min(away))]
    return Check(
        nearest > farthest,
        {"farthest": lookup.as_fraction(farthest), "nearest": lookup.as_fraction(nearest), "answer": look.result},
    )


def column_of_k(seed: str = "") -> Check:
    """ "k_j is column j of K": is q_i·(that) the logit of the pair?"""
    q, k = (
        draw("q" + seed, QUERIES, DIM),
        draw("k" + seed, DIM, DIM),
    )  # as many keys as dimensions: else a column does not even fit
    logit = float(rg.attention(head(q), head(k), scale=1.0).logits[0, 0, 0, 1])
    row, column = float(q[0] @ k[1]), float(q[0] @ k[:, 1])
    return Check(abs(column - logit) < 1e-9, {"logit": logit, "row": row, "column": column})


def order_of_v() -> Check:
    """V·α instead of α·V: does the product conform?"""
    A = pairs()
    v = draw("v", KEYS, V_DIM)
    shapes = {"a": matrix.by(tuple(A.shape[2:])), "v": matrix.by(tuple(v.shape))}
    try:
        v @ A[0, 0].dense()
    except RuntimeError:
        return Check(False, {**shapes, "y": matrix.by(tuple((A @ head(v)).shape[2:]))})
    return Check(True, {**shapes, "y": ""})


def only_when_equal(seed: str = "") -> Check:
    """ "Q Kᵀ and K Qᵀ give the same weights only when Q = K": is there no other case?"""
    *_, differences = matrix.direction(seed)
    others = {name: d for name, d in differences.items() if name != "K = Q"}
    same = [name for name, d in others.items() if d < 1e-9]
    return Check(not same, {"same": _listed(same), "largest": max(others[name] for name in same) if same else 0.0})


def query_across(seed: str = "") -> Check:
    """Queries on the x axis while columns are read as keys: does a column then hold what a query looks at (shares of 1)?"""
    A = pairs(seed)[0, 0].dense()
    columns, rows = A.sum(0), A.sum(1)
    return Check(
        bool((columns - 1).abs().max() < 1e-9),
        {"rows": _listed(f"{x:.2f}" for x in rows.tolist()), "columns": _listed(f"{x:.2f}" for x in columns.tolist())},
    )


def unrelated() -> Check:
    """ "A negative dot product means unrelated": does the key whose dot product is negative have a cosine near 0?"""
    car = next(pair for pair in scores.against(scores.KING, scores.AGAINST_KING) if pair.dot < 0)
    return Check(abs(car.cosine) < 0.5, {"name": car.name, "dot": car.dot, "cosine": round(car.cosine, 12)})


def pairs(seed: str = "") -> rg.AttentionMatrix:
    """Some queries and keys."""
    return rg.attention(head(draw("q" + seed, QUERIES, DIM)), head(draw("k" + seed, KEYS, DIM)))


def checks(seed: str = "") -> dict[str, Check]:
    return {
        "softmax": printed_softmax(),
        "weight": upside_down(),
        "column": column_of_k(seed),
        "order": order_of_v(),
        "equal": only_when_equal(seed),
        "axes": query_across(seed),
        "negative": unrelated(),
    }


#: the claims that can be put to other vectors
DRAWN = ("column", "equal", "axes")


def transposed() -> tuple[float, float]:
    """Softmax along the wrong axis: the largest sum of a row and of a column, where rows should add up to 1."""
    wrong = pairs().logits[0, 0].dense().softmax(0)
    return float(wrong.sum(1).max()), float(wrong.sum(0).max())


def play(claim: Any = "none", draws: Any = DRAWS[0], language: str = "en") -> dict[str, Any]:
    """The claims, and for the one that is put to the test: its numbers, and whether it holds."""
    seed = inputs.whole("draws", draws, *DRAWS)
    found = checks(f" {seed}" if seed else "")
    chosen = inputs.choice("claim", claim, ("none", *found))
    words = WORDS[language]
    told: dict[str, Any] = {
        "inputs": {"claim": chosen, "draws": seed},
        "bounds": {"claim": ["none", *found], "draws": [*DRAWS, 1]},
        "claims": {name: words[f"claim_{name}"].format(**check.numbers) for name, check in found.items()},
        "drawn": list(DRAWN),
    }
    if chosen != "none":
        check = found[chosen]
        told["holds"] = check.holds
        told["verdict"] = words["yes" if check.holds else "no"] + words[f"check_{chosen}"].format(**check.numbers)
        told["evidence"] = inputs.plain(evidence(chosen, check, f" {seed}" if seed else ""))
    return told


def evidence(name: str, check: Check, seed: str = "") -> dict[str, Any]:
    """What a check looked at, as a table: columns by name, and rows of names and numbers."""
    if name == "softmax":
        shown = sorted(softmax.LOGITS, reverse=True)[: len(softmax.MISPRINT)]
        right = dict(zip(softmax.LOGITS, softmax.softmax(), strict=True))
        printed = dict(zip((x for x in softmax.LOGITS if x in shown), softmax.MISPRINT, strict=True))
        return {
            "header": ["logit", "printed", "found"],
            "rows": [[x, printed.get(x), right[x]] for x in softmax.LOGITS],
        }
    if name == "weight":
        wrong, near = (lookup.look(way).weights for way in ("upside_down", "inverse"))
        keys = zip(lookup.KEYS, lookup.distances(), wrong, near, strict=True)
        return {"header": ["key", "distance", "claimed", "inverse"], "rows": [list(row) for row in keys]}
    if name == "column":
        return {
            "header": ["with", "product"],
            "rows": [[part, check.numbers[part]] for part in ("logit", "row", "column")],
        }
    if name == "order":
        parts = {"V": check.numbers["v"], "α": check.numbers["a"], "V·α": "refused", "α·V": check.numbers["y"]}
        return {"header": ["product", "shape"], "rows": [list(row) for row in parts.items()]}
    if name == "equal":
        *_, differences = matrix.direction(seed)
        return {"header": ["case", "difference"], "rows": [[case, apart] for case, apart in differences.items()]}
    if name == "axes":
        A = pairs(seed)[0, 0].dense()
        header = ["query", *(f"k{n + 1}" for n in range(KEYS)), "sum"]
        rows = [[f"q{n + 1}", *row, sum(row)] for n, row in enumerate(A.tolist())]
        return {"header": header, "rows": [*rows, ["sum", *A.sum(0).tolist(), None]]}
    found = scores.against(scores.KING, scores.AGAINST_KING)
    return {"header": ["key", "dot", "cosine"], "rows": [[pair.name, pair.dot, pair.cosine] for pair in found]}


def _listed(items: Any) -> str:
    return ", ".join(map(str, items))


WORDS: Words = {
    "en": {
        "title": "Errors in common explanations",
        "shows": "What is often written about attention and is wrong, each with the check that shows it.",
        "claim": "“{claim}” ",
        "yes": "It holds: ",
        "no": "Not so: ",
        "claim_softmax": "softmax of [{logits}] is {claimed}",
        "check_softmax": "it is {found}.",
        "claim_weight": "weight = |q-k| / Σ|q-k|",
        "check_weight": "the farthest key gets {farthest}, the nearest {nearest}; the answer is {answer:g}.",
        "claim_column": "k_j is column j of K",
        "check_column": "logit {logit:.4f}; with row j {row:.4f}, with column j {column:.4f}.",
        "claim_order": "the output is V·α",
        "check_order": "V is {v}, α is {a}: no product. α V is {y}.",
        "claim_equal": "Q Kᵀ and K Qᵀ agree only when Q = K",
        "check_equal": "they also agree for {same}: largest difference {largest:.0e}.",
        "claim_axes": "queries on the x axis, columns are keys",
        "check_axes": "rows add up to {rows}; columns to {columns}. What adds up to 1 is a query's look: here a row.",
        "claim_negative": "a negative dot product means unrelated",
        "check_negative": "{name}: dot {dot:g}, cosine {cosine:g}: opposite. Unrelated would be near 0.",
        "map": "A: which way do the shares run?",
        "why": "Why do such errors last? Because the result still looks like attention: shares that add up to 1, a heat map with bright cells. So check: which axis adds up "
        "to 1, do the shapes conform, does the nearest key get the most.",
        "try": "Run the checks yourself. Each is a function of a few lines in `regard.lessons.errors`.",
        "question": "Someone takes softmax over the queries instead of the keys. Which sums give it away?",
        "answer": "The rows: the largest now adds up to {row:.2f}, while every column adds up to {column:.2f}. A query would give out more, or less, than one whole look.",
        "next": "What have you kept? `regard lesson quiz`",
        "play_intro": "All of these are in print. Decide for yourself, then run the check.",
        "play_run": "Run the check",
        "play_run_of": "Run the check: {claim}",
        "play_others": "With other random vectors",
        "play_col_logit": "score",
        "play_col_printed": "printed",
        "play_col_found": "softmax",
        "play_col_key": "key",
        "play_col_distance": "distance",
        "play_col_claimed": "|q-k| / Σ|q-k|",
        "play_col_inverse": "1 / distance",
        "play_col_with": "q_i with",
        "play_col_product": "product",
        "play_col_shape": "shape",
        "play_col_case": "case",
        "play_col_difference": "largest difference",
        "play_col_query": "query",
        "play_col_sum": "sum",
        "play_col_dot": "q·k",
        "play_col_cosine": "cosine",
        "play_cell_logit": "A.logits[i, j]",
        "play_cell_row": "row j of K",
        "play_cell_column": "column j of K",
        "play_cell_sum": "sum",
        "play_cell_refused": "cannot be multiplied",
    },
    "zh": {
        "title": "常见讲解里的错误",
        "shows": "关于注意力常常写错的地方，每条都有检验。",
        "claim": "“{claim}”",
        "yes": "成立：",
        "no": "不对：",
        "claim_softmax": "[{logits}] 的 softmax 是 {claimed}",
        "check_softmax": "其实是 {found}。",
        "claim_weight": "权重 = |q-k| / Σ|q-k|",
        "check_weight": "最远的键得到 {farthest}，最近的得到 {nearest}；结果是 {answer:g}。",
        "claim_column": "k_j 是 K 的第 j 列",
        "check_column": "logit 是 {logit:.4f}；用第 j 行得 {row:.4f}，用第 j 列得 {column:.4f}。",
        "claim_order": "输出是 V·α",
        "check_order": "V 是 {v}，α 是 {a}：乘不了。α V 是 {y}。",
        "claim_equal": "只有 Q = K 时 Q Kᵀ 和 K Qᵀ 才一致",
        "check_equal": "{same} 时也一致：最大相差 {largest:.0e}。",
        "claim_axes": "查询在 x 轴，列是键",
        "check_axes": "行之和是 {rows}，列之和是 {columns}。和为 1 的是一个查询的注视：这里是行。",
        "claim_negative": "点积为负表示无关",
        "check_negative": "{name}：点积 {dot:g}，余弦 {cosine:g}：是相反。无关应当接近 0。",
        "map": "A：份额沿哪个方向？",
        "why": "这样的错误为什么一直有人写？因为结果看起来还是注意力：份额之和为 1，热图上有亮格。所以要检查：沿哪个轴之和为 1，形状对不对得上，最近的键是不是得到最多。",
        "try": "自己运行这些检验。每一个都是 `regard.lessons.errors` 里短短几行的函数。",
        "question": "有人沿查询而不是沿键做 softmax。看哪些和就能发现？",
        "answer": "看行：最大的一行之和成了 {row:.2f}，而每列之和是 {column:.2f}。一个查询给出的注视会比完整的一次多，或者少。",
        "next": "你记住了多少？`regard lesson quiz`",
        "play_intro": "这些话都有人印出来过。先自己判断，再运行检验。",
        "play_run": "运行检验",
        "play_run_of": "运行检验：{claim}",
        "play_others": "换别的随机向量",
        "play_col_logit": "分数",
        "play_col_printed": "印出来的",
        "play_col_found": "softmax",
        "play_col_key": "键",
        "play_col_distance": "距离",
        "play_col_claimed": "|q-k| / Σ|q-k|",
        "play_col_inverse": "距离的倒数",
        "play_col_with": "q_i 乘",
        "play_col_product": "乘积",
        "play_col_shape": "形状",
        "play_col_case": "情形",
        "play_col_difference": "最大的差",
        "play_col_query": "查询",
        "play_col_sum": "和",
        "play_col_dot": "q·k",
        "play_col_cosine": "余弦",
        "play_cell_logit": "A.logits[i, j]",
        "play_cell_row": "K 的第 j 行",
        "play_cell_column": "K 的第 j 列",
        "play_cell_sum": "和",
        "play_cell_refused": "乘不了",
    },
}


def show(page: Page) -> None:
    page.open()
    for name, check in checks().items():
        verdict = page("yes" if check.holds else "no") + page(f"check_{name}", **check.numbers)
        page.paragraph(verdict, page("claim", claim=page(f"claim_{name}", **check.numbers)))
    A = pairs()[0, 0]
    names = [f"q{n + 1}" for n in range(QUERIES)], [f"k{n + 1}" for n in range(KEYS)]
    page.show(page.map(A, rows=names[0], columns=names[1], values="percent", low=0, high=1, title=page("map")))
    page.say("why")
    row, column = transposed()
    page.close(TRY, {"row": row, "column": column})
