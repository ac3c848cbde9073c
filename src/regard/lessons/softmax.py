"""M1, softmax and √d: how scores become shares, and why they are divided by the square root of d first."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

import regard as rg

from ..views.terminal import bars, table
from . import inputs
from .page import Page, Words
from .scores import vectors
from .vectors import draw

LOGITS = (3.5, -2.1, 8.7, 0.3)
#: what some texts print for the three largest of their weights
MISPRINT = (0.05, 0.94, 0.01)
#: what the logits are multiplied by, to see softmax sharpen
FACTORS = (0.01, 0.1, 0.5, 1.0, 2.0)
SHIFT = 100.0
DIMS = (8, 32, 128, 512)
SAMPLE = 64
#: what a reader may choose: a logit, how many there are, the factor; and the dimensions that the curves run over
LOGIT, COUNT, FACTOR = (-10.0, 10.0), (2, 8), (0.0, 5.0)
CURVE = (2, 8, 32, 128, 512, 1024)

TRY = """\
import torch, regard as rg
q, k = torch.ones(1, 1, 1, 1), torch.tensor([3.5, -2.1, 8.7, 0.3])[None, None, :, None]
for scale in (0.1, 0.5, 1.0):
    A = rg.attention(q, k, scale=scale)
    print(scale, A.dense().flatten().tolist(), "entropy", float(A.entropy()))"""


class Scaling(NamedTuple):
    """Random unit-variance vectors of one dimension count: what softmax makes of their dot products."""

    dim: int
    spread: float  # standard deviation of the raw dots
    entropy: dict[str, float]  # "raw" and "scaled": mean entropy of a row
    gradient: dict[str, float]  # norm of the gradient that reaches a row's logits: the median over rows


def softmax(logits: tuple[float, ...] = LOGITS, factor: float = 1.0) -> list[float]:
    """Softmax as A does it: one query of 1, a key for each logit, and the scale as the factor."""
    return rg.attention(vectors(((1.0,),)), vectors(tuple((x,) for x in logits)), scale=factor)[0, 0, 0, :].tolist()


def shifted() -> float:
    """Largest change of a weight when SHIFT is added to every logit."""
    moved = softmax(tuple(x + SHIFT for x in LOGITS))
    return max(abs(a - b) for a, b in zip(softmax(), moved, strict=True))


def slopes(logits: list[float]) -> list[list[float]]:
    """How each share changes with each logit: row i is the gradient of share i."""
    k = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    weights = rg.attention(vectors(((1.0,),)), k[None, None, :, None], scale=1.0)[0, 0, 0, :]
    return [torch.autograd.grad(w, k, retain_graph=True)[0].tolist() for w in weights]


@functools.cache
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


def play(logits: Any = LOGITS, factor: Any = 1.0, dim: Any = DIMS[-1]) -> dict[str, Any]:
    """Shares, entropy and slopes of logits times a factor; and random vectors of `dim`, raw and divided by √dim."""
    row = inputs.numbers("logits", logits, *LOGIT, COUNT)
    by = inputs.number("factor", factor, *FACTOR)
    size = inputs.choice("dim", dim, CURVE)
    A = rg.attention(vectors(((1.0,),)), vectors(tuple((x,) for x in row)), scale=by)
    gradient = torch.tensor(slopes([by * x for x in row]))
    return {
        "inputs": {"logits": row, "factor": by, "dim": size},
        "bounds": {"logits": [*LOGIT, 0.1], "factor": [*FACTOR, 0.05], "dim": list(CURVE), "count": list(COUNT)},
        "scaled": A.logits[0, 0, 0, :].tolist(), "weights": A[0, 0, 0, :].tolist(),
        "entropy": float(A.entropy()), "most": math.log(len(row)), "slope": float(gradient.norm()),
        "chosen": _told(size), "curve": [_told(d) for d in CURVE], "sample": SAMPLE, "sample_most": math.log(SAMPLE),
    }  # fmt: skip


def _told(dim: int) -> dict[str, Any]:
    return {**scaling(dim)._asdict(), "root": math.sqrt(dim)}


WORDS: Words = {
    "en": {
        "title": "Softmax and √d",
        "shows": "What softmax does to a row of scores, and why they are divided by √d before it.",
        "softmax": "Softmax makes shares of scores: exp of each, over their sum. {logits} → {weights}. Some texts print "
        "{misprint} for it: that is wrong, the largest takes more than that.",
        "sharpen": "Multiply the scores before softmax. Near 0 all shares are equal; the larger the factor, the nearer to all or nothing. "
        "Dividing by √d is such a factor.",
        "factor": "factor",
        "picture": "shares of {logits}",
        "sqrt": "Why ÷ √d: the dot product of two random vectors of unit variance has standard deviation √d. For d = {dim} that is "
        "{root:.1f}. Softmax of numbers that far apart is nearly all or nothing, and then almost no gradient comes through.",
        "spread": "measured",
        "entropy_raw": "entropy",
        "gradient_raw": "gradient",
        "entropy_scaled": "entropy, ÷√d",
        "gradient_scaled": "gradient, ÷√d",
        "read": "({sample} random queries and keys. Entropy: mean of a row, at most log {sample} = {most:.2f}. Gradient: norm of what "
        "reaches a row of logits, the median of the rows.)",
        "bars_raw": "gradient against d, raw",
        "bars_scaled": "gradient against d, ÷ √d",
        "try": "Let a scale run over the logits, and watch the shares and their entropy. Then put in logits of your own.",
        "question": "Add {shift:g} to every score of a row. How do the shares change?",
        "answer": "Not at all: the largest change is {change:.1e}. exp(x + c) = exp(c) exp(x), and exp(c) cancels in the fraction. Only "
        "differences between scores count, so a term that is the same for a whole row does nothing.",
        "next": "Now all queries at once, step by step: the matrix A. `regard lesson matrix`",
        "play_logits": "Scores",
        "play_logits_hint": "Drag a bar, or choose one and press the arrow keys.",
        "play_logit": "score {n}",
        "play_factor": "times the factor",
        "play_more": "one more score",
        "play_fewer": "one fewer",
        "play_shares": "Shares",
        "play_share": "share {n}",
        "play_entropy": "entropy",
        "play_entropy_of": "of at most {most}",
        "play_slope": "gradient",
        "play_slope_note": "how much the shares move when the scores do: near 0 when softmax takes all or nothing",
        "play_told": "Shares {shares}. Entropy {entropy}.",
        "play_roots": "Random vectors of d dimensions",
        "play_dim": "d",
        "play_spread": "spread of q·k",
        "play_root": "√d",
        "play_raw": "raw",
        "play_scaled": "÷ √d",
        "play_entropy_curve": "mean entropy of a row against d",
        "play_gradient_curve": "gradient that reaches the scores against d",
        "play_roots_note": "{sample} random queries and keys. Raw, the entropy falls and the gradient dies as d grows; divided by √d, both stay.",
    },
    "zh": {
        "title": "softmax 与 √d",
        "shows": "softmax 对一行分数做了什么，为什么之前要除以 √d。",
        "softmax": "softmax 把分数变成份额：各自取 exp，再除以总和。{logits} → {weights}。有的文章印成 {misprint}：那是错的，最大的一个占得更多。",
        "sharpen": "在 softmax 之前把分数乘一个数。乘的数接近 0，份额就几乎相等；乘得越大，越接近非全即无。除以 √d 就是这样的一个数。",
        "factor": "乘数",
        "picture": "{logits} 的份额",
        "sqrt": "为什么 ÷ √d：两个单位方差的随机向量，点积的标准差是 √d。d = {dim} 时是 {root:.1f}。相差这么远的数，softmax 之后几乎非全即无，梯度也就几乎传不过来。",
        "spread": "实测",
        "entropy_raw": "熵",
        "gradient_raw": "梯度",
        "entropy_scaled": "熵（÷√d）",
        "gradient_scaled": "梯度（÷√d）",
        "read": "（随机的 {sample} 个查询和键。熵：每行的平均，最大是 log {sample} = {most:.2f}。梯度：传到一行 logit 上的梯度的范数，取各行的中位数。）",
        "bars_raw": "梯度随 d 的变化，不缩放",
        "bars_scaled": "梯度随 d 的变化，÷ √d",
        "try": "给 logit 乘上不同的数，看份额和熵怎样变。再换成你自己的 logit。",
        "question": "给一行里的每个分数都加上 {shift:g}，份额会怎样变？",
        "answer": "完全不变：最大的变化是 {change:.1e}。exp(x + c) = exp(c) exp(x)，exp(c) 在分数里约掉了。要紧的只是分数之差，所以整行都一样的项不起作用。",
        "next": "所有的查询一起，一步一步来：矩阵 A。`regard lesson matrix`",
        "play_logits": "分数",
        "play_logits_hint": "拖动一根柱子，或者选中一根再按方向键。",
        "play_logit": "第 {n} 个分数",
        "play_factor": "乘以",
        "play_more": "多一个分数",
        "play_fewer": "少一个",
        "play_shares": "份额",
        "play_share": "第 {n} 个份额",
        "play_entropy": "熵",
        "play_entropy_of": "最大 {most}",
        "play_slope": "梯度",
        "play_slope_note": "分数动一动，份额动多少：softmax 非全即无时接近 0",
        "play_told": "份额 {shares}。熵 {entropy}。",
        "play_roots": "d 维的随机向量",
        "play_dim": "d",
        "play_spread": "q·k 的分散程度",
        "play_root": "√d",
        "play_raw": "不缩放",
        "play_scaled": "÷ √d",
        "play_entropy_curve": "每行的平均熵随 d 的变化",
        "play_gradient_curve": "传到分数上的梯度随 d 的变化",
        "play_roots_note": "随机的 {sample} 个查询和键。不缩放时，d 越大，熵越小，梯度越接近消失；除以 √d，两者都保持不变。",
    },
}


def show(page: Page) -> None:
    page.open()
    logits = "[" + ", ".join(f"{x:g}" for x in LOGITS) + "]"
    weights = softmax()
    page.say(
        "softmax", logits=logits, weights="[" + ", ".join(f"{w:.4f}" for w in weights) + "]",
        misprint=" / ".join(map(str, MISPRINT)),
    )  # fmt: skip
    page.say("sharpen")
    names = [f"{x:g}" for x in LOGITS]
    rows = [[f"{f:g}", *(f"{w:.4f}" for w in softmax(factor=f))] for f in FACTORS]
    page.show(
        table([page("factor"), *names], rows),
        bars(weights, names, form=".4f", width=24, title=page("picture", logits=logits)),
    )
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
    dims = [str(s.dim) for s in sizes]
    page.show(
        *(
            bars([s.gradient[how] for s in sizes], dims, form=".3f", width=24, title=page(f"bars_{how}"))
            for how in ("raw", "scaled")
        )
    )
    page.say("read", sample=SAMPLE, most=math.log(SAMPLE))
    page.close(TRY, {"change": shifted()}, shift=SHIFT)
