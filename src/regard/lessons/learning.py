"""M0, where W comes from: learned projections, and a learned position. The loss falls and A sharpens.

First, four Chinese characters look at four English words. Q = X1 W_Q comes from the characters, K = X2 W_K from the words; V is a
unit vector a word, so that row i of A V says which word character i fetched.
Then every token of random sequences must say what stands to its left: content cannot tell, so a head must find the place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import bars, table
from . import inputs
from .page import Page, Words
from .vectors import draw, embed, head, weight

CHARACTERS = ("猫", "狗", "鱼", "鸟")
MEANING = {"猫": "cat", "狗": "dog", "鱼": "fish", "鸟": "bird"}
ENGLISH = ("fish", "cat", "bird", "dog")
DIM, HEAD_DIM = 16, 8
REPORT = (0, 10, 30, 100)
#: the second task: tokens there are, their number in a sequence, sequences in a step, displacements told apart
SYMBOLS, LENGTH, BATCH, REACH = "ABCDEFGH", 10, 16, 4
LEFT_REPORT = (0, 10, 30, 100)
#: what a reader may choose: the task, the rate of learning, the steps
RATES, STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), (10, 400)
OWN = {"words": 0.01, "left": 0.1}

TRY = """\
from regard.lessons import learning
for rate in (0.003, 0.01, 0.1):
    for state in learning.train(report=(0, 30, 100), rate=rate):
        print(rate, state.step, state.loss, state.entropy)"""


class State(NamedTuple):
    """How far the training is."""

    step: int
    loss: float
    entropy: float
    weights: list[list[float]]


def cross(x1: Tensor, x2: Tensor, w_q: Tensor, w_k: Tensor) -> rg.AttentionMatrix:
    """Cross-attention: the queries come from x1, the keys from x2."""
    return rg.attention(head(x1 @ w_q), head(x2 @ w_k))


def training(rate: float = OWN["words"]) -> Iterator[State]:
    """Learn W_Q and W_K so that each character fetches its word: how far it is, before every step, for as long as asked."""
    x1, x2 = embed(CHARACTERS, DIM), embed(ENGLISH, DIM)
    v = head(torch.eye(len(ENGLISH), dtype=x1.dtype))
    target = torch.tensor([ENGLISH.index(MEANING[c]) for c in CHARACTERS])
    w_q, w_k = (torch.nn.Parameter(weight(name, DIM, HEAD_DIM)) for name in ("W_Q", "W_K"))
    optimizer = torch.optim.Adam([w_q, w_k], lr=rate)
    for step in itertools.count():
        A = cross(x1, x2, w_q, w_k)
        y = (A @ v)[0, 0]
        loss = -y.gather(-1, target[:, None]).log().mean()
        yield State(step, loss.item(), float(A.entropy().mean()), y.tolist())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(report: tuple[int, ...] = REPORT, rate: float = OWN["words"]) -> list[State]:
    """The states at some steps."""
    return [state for state in itertools.islice(training(rate), max(report) + 1) if state.step in report]


class Left(NamedTuple):
    """How far the second training is."""

    step: int
    loss: float
    previous: float  # the share on the token to the left, where there is one
    entropy: float
    weights: list[list[float]]  # A of a sequence that is never trained on
    readout: list[float]  # the learned number of each displacement, from -REACH to REACH


def sequences(name: str, count: int) -> Tensor:
    """Random tokens [count, LENGTH]."""
    return draw(name, count, LENGTH, len(SYMBOLS)).argmax(-1)


def shown() -> str:
    """The sequence whose A is shown."""
    return "".join(SYMBOLS[token] for token in sequences("shown", 1)[0].tolist())


def training_left(rate: float = OWN["left"]) -> Iterator[Left]:
    """Learn W_Q, W_K, W_V and a number for each displacement, so that token t says what token t - 1 is.

    Row t of A V is read as one logit a symbol.
    """
    size = len(SYMBOLS)
    w_q, w_k = (torch.nn.Parameter(weight(name, size, HEAD_DIM)) for name in ("W_Q left", "W_K left"))
    w_v = torch.nn.Parameter(weight("W_V left", size, size))
    readout = torch.nn.Parameter(torch.zeros(1, 2 * REACH + 1, dtype=w_q.dtype))
    term = rg.Static(rg.Clipped(REACH), readout=readout)
    optimizer = torch.optim.Adam([w_q, w_k, w_v, readout], lr=rate)

    def look(tokens: Tensor) -> tuple[rg.AttentionMatrix, Tensor]:
        x = torch.nn.functional.one_hot(tokens, size).to(w_q.dtype)[:, None]
        A = rg.attention(x @ w_q, x @ w_k, position=term)
        return A, (A @ (x @ w_v))[:, 0]

    for step in itertools.count():
        tokens = sequences(f"step {step}", BATCH)
        y = look(tokens)[1]
        loss = torch.nn.functional.cross_entropy(y[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        with torch.no_grad():
            A = look(sequences("shown", 1))[0][0, 0]
            weights, entropy = A.dense(), float(A.entropy().mean())
        left = float(weights.diagonal(-1).mean())
        yield Left(step, loss.item(), left, entropy, weights.tolist(), readout[0].tolist())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_left(report: tuple[int, ...] = LEFT_REPORT, rate: float = OWN["left"]) -> list[Left]:
    """The states at some steps."""
    return [state for state in itertools.islice(training_left(rate), max(report) + 1) if state.step in report]


def _checked(task: Any, rate: Any, steps: Any) -> tuple[str, float, int]:
    return (
        inputs.choice("task", task, tuple(OWN)), inputs.choice("rate", rate, RATES), inputs.whole("steps", steps, *STEPS)
    )  # fmt: skip


def play(task: Any = "left", rate: Any = OWN["left"], steps: Any = 100) -> dict[str, Any]:
    """The task before it is trained."""
    name, fast, count = _checked(task, rate, steps)
    rows, columns = (CHARACTERS, ENGLISH) if name == "words" else (tuple(shown()), tuple(shown()))
    return {
        "inputs": {"task": name, "rate": fast, "steps": count},
        "bounds": {"task": list(OWN), "rate": list(RATES), "steps": [*STEPS, 10]},
        "own": OWN, "rows": list(rows), "columns": list(columns), "even": math.log(len(columns)),
        "goal": _goal(name),
        "deltas": list(range(-REACH, REACH + 1)), "first": next(_states(name, fast)),
    }  # fmt: skip


def stream(task: Any = "left", rate: Any = OWN["left"], steps: Any = 100) -> Iterator[dict[str, Any]]:
    """The training, a state a step."""
    name, fast, count = _checked(task, rate, steps)
    return _states(name, fast, count)


def _states(task: str, rate: float, steps: int = 0) -> Iterator[dict[str, Any]]:
    going: Iterator[Any] = training(rate) if task == "words" else training_left(rate)
    goal = _goal(task)
    for state in itertools.islice(going, steps + 1):
        reached = [row[key] for row, key in zip(state.weights, goal, strict=True) if key is not None]
        yield inputs.plain({**state._asdict(), "share": sum(reached) / len(reached)})


def _goal(task: str) -> list[int | None]:
    """The key that each query should find; the first token has nothing to its left."""
    if task == "words":
        return [ENGLISH.index(MEANING[c]) for c in CHARACTERS]
    return [None, *range(LENGTH - 1)]


WORDS: Words = {
    "en": {
        "title": "Learning W_Q, W_K and W_V",
        "shows": "Where Q, K and V come from, and what training does to A.",
        "task": "Q = X1 W_Q and K = X2 W_K, and the W are learned. Below, four characters must fetch their English words. The loss is -log of the weight on the "
        "right word; its gradient flows through `A @ v` into W_Q and W_K. The loss falls, and A sharpens: the mean "
        "entropy of its rows falls from {first:.2f} to {last:.2f} (no preference at all would be log {count} = {most:.2f}).",
        "before": "before",
        "after": "after {step} steps",
        "step": "step",
        "loss": "loss",
        "entropy": "mean entropy of a row",
        "honest": "It has learned these {count} pairs by heart and nothing else.",
        "left": "Now something that holds for every sequence, W_V learned too: say what stands to your left. The tokens are random, new ones at every step, so content cannot tell; a learned number "
        "for each displacement can. The “one to the left” head appears: on a sequence it was never trained on ({shown}), the share of the token to the left "
        "goes from {first:.2f} to {last:.2f}. (The first token has nothing to its left: its row is no part of the loss.)",
        "share": "on the left",
        "readout": "learned number of each Δ, after",
        "try": "Train again with other rates: too small and the loss has hardly moved, larger and A sharpens sooner.",
        "question": "Which displacement got the largest number, and what is its sign?",
        "answer": "Δ = {delta:+d}: Δ = q - k, and the key one to the left has k = q - 1. Its number is {value:.2f}, the next largest {second:.2f}. exp of the difference says how much more "
        "weight it gets: {times:.0f} times.",
        "next": "Reading heat maps: a sentence, its summaries, and a very long A. `regard lesson sentence`",
        "play_task": "what is learned",
        "play_task_left": "say what stands to your left",
        "play_task_words": "characters fetch their words",
        "play_rate": "learning rate",
        "play_steps": "steps",
        "play_train": "Train",
        "play_stop": "Stop",
        "play_step": "step",
        "play_loss": "loss",
        "play_entropy": "mean entropy of a row",
        "play_of": "no preference at all: {most}",
        "play_left": "on the left",
        "play_left_note": "share of the token to the left",
        "play_A": "A now, on a sequence it is never trained on",
        "play_A_words": "A now; the goal is framed",
        "play_loss_curve": "loss",
        "play_entropy_curve": "entropy",
        "play_left_curve": "share on the left",
        "play_readout": "learned number of each Δ = q - k",
        "play_delta": "Δ = {delta}",
        "play_before": "Not trained yet. Press Train (or Enter on it) and watch A.",
        "play_says_left": "Step {step}: the token to the left has {share} of the weight. Content cannot tell; the number of Δ = 1 can.",
        "play_says_words": "Step {step}: the rows have entropy {entropy}; the goal cells have {share} of the weight on average.",
    },
    "zh": {
        "title": "学习 W_Q、W_K 和 W_V",
        "shows": "Q、K、V 从哪里来，训练对 A 做了什么。",
        "task": "Q = X1 W_Q，K = X2 W_K，其中的 W 是学出来的。下面四个汉字要各自取到自己的英文词。损失是正确的词所得权重的 -log，梯度经过 `A @ v` 流到 W_Q 和 W_K。损失下降，A 变得"
        "尖锐：每行的平均熵从 {first:.2f} 降到 {last:.2f}（毫无偏好时是 log {count} = {most:.2f}）。",
        "before": "训练前",
        "after": "训练 {step} 步后",
        "step": "步",
        "loss": "损失",
        "entropy": "每行的平均熵",
        "honest": "它只是背下了这 {count} 对词，没有学到别的。",
        "left": "再学一件对每个序列都成立的事，W_V 也一起学：说出你左边是什么。词元是随机的，每步都换新的，所以靠内容看不出来；给每个位移学一个数就可以。“看左边一个”的头出现了：在一个从未训练过的序列（{shown}）上，"
        "左邻所得的份额从 {first:.2f} 升到 {last:.2f}。（第一个词元左边没有东西：它那一行不计入损失。）",
        "share": "在左邻上",
        "readout": "学到的各个 Δ 的数",
        "try": "换别的学习率再训练：太小，损失几乎不动；大些，A 尖锐得更快。",
        "question": "哪个位移得到最大的数？它是正的还是负的？",
        "answer": "Δ = {delta:+d}：Δ = q - k，左边一个的键是 k = q - 1。它的数是 {value:.2f}，第二大的是 {second:.2f}。两者之差取 exp，就是它的权重是后者的多少倍：{times:.0f} 倍。",
        "next": "读热图：一个句子，它的汇总，以及很长的 A。`regard lesson sentence`",
        "play_task": "学什么",
        "play_task_left": "说出你左边是什么",
        "play_task_words": "汉字取到自己的英文词",
        "play_rate": "学习率",
        "play_steps": "步数",
        "play_train": "训练",
        "play_stop": "停止",
        "play_step": "步",
        "play_loss": "损失",
        "play_entropy": "每行的平均熵",
        "play_of": "毫无偏好时：{most}",
        "play_left": "在左邻上",
        "play_left_note": "左邻所得的份额",
        "play_A": "现在的 A，看的是从未训练过的序列",
        "play_A_words": "现在的 A；框起来的是目标",
        "play_loss_curve": "损失",
        "play_entropy_curve": "熵",
        "play_left_curve": "左邻的份额",
        "play_readout": "学到的每个 Δ = q - k 的数",
        "play_delta": "Δ = {delta}",
        "play_before": "还没有训练。按“训练”（或在它上面按回车），看 A 怎样变。",
        "play_says_left": "第 {step} 步：左邻得到 {share} 的权重。靠内容看不出来，Δ = 1 的数可以。",
        "play_says_words": "第 {step} 步：各行的熵是 {entropy}；目标格平均得到 {share} 的权重。",
    },
}


def show(page: Page) -> None:
    page.open()
    states = train()
    count = len(CHARACTERS)
    first, last = states[0], states[-1]
    page.say("task", count=count, most=math.log(count), first=first.entropy, last=last.entropy)
    page.show(
        page.map(
            first.weights, rows=CHARACTERS, columns=ENGLISH, values="percent", title=page("before"), low=0, high=1
        ),
        page.map(
            last.weights,
            rows=CHARACTERS,
            columns=ENGLISH,
            values="percent",
            title=page("after", step=last.step),
            low=0,
            high=1,
        ),
        table(
            [page("step"), page("loss"), page("entropy")],
            [[s.step, f"{s.loss:.4f}", f"{s.entropy:.4f}"] for s in states],
        ),
    )
    page.say("honest", count=count)
    left = train_left()
    before, after = left[0], left[-1]
    page.say("left", shown=shown(), first=before.previous, last=after.previous)
    how: dict[str, Any] = {"rows": shown(), "columns": shown(), "low": 0, "high": 1}
    page.show(
        page.map(before.weights, title=page("before"), **how),
        page.map(after.weights, title=page("after", step=after.step), **how),
        table(
            [page("step"), page("loss"), page("share"), page("entropy")],
            [[s.step, f"{s.loss:.4f}", f"{s.previous:.4f}", f"{s.entropy:.4f}"] for s in left],
        ),
    )
    deltas = range(-REACH, REACH + 1)
    page.show(bars(after.readout, map(str, deltas), title=page("readout"), form=".2f", width=30))
    second, largest = sorted(after.readout)[-2:]
    page.close(
        TRY,
        {
            "delta": deltas[after.readout.index(largest)], "value": largest, "second": second,
            "times": math.exp(largest - second),
        },
    )  # fmt: skip
