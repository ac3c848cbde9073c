"""M0, where W comes from: cross-attention with learned projections. The loss falls and A sharpens.

Four Chinese characters look at four English words. Q = X1 W_Q comes from the characters, K = X2 W_K from the words; V is a
unit vector a word, so that row i of A V says which word character i fetched.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import regard as rg

from ..views.terminal import table
from .page import Page, Words
from .vectors import embed, head, weight

CHARACTERS = ("猫", "狗", "鱼", "鸟")
MEANING = {"猫": "cat", "狗": "dog", "鱼": "fish", "鸟": "bird"}
ENGLISH = ("fish", "cat", "bird", "dog")
GREETING, REPLY = ("你", "好"), ("Hello", "World")
DIM, HEAD_DIM = 16, 8
REPORT = (0, 10, 30, 100)


class State(NamedTuple):
    """How far the training is."""

    step: int
    loss: float
    entropy: float
    weights: list[list[float]]


def cross(x1: Tensor, x2: Tensor, w_q: Tensor, w_k: Tensor) -> rg.AttentionMatrix:
    """Cross-attention: the queries come from x1, the keys from x2."""
    return rg.attention(head(x1 @ w_q), head(x2 @ w_k))


def greet() -> list[list[float]]:
    """A of "你好" looking at "Hello World", untrained: 2 x 2."""
    w_q, w_k = weight("W_Q", DIM, HEAD_DIM), weight("W_K", DIM, HEAD_DIM)
    return cross(embed(GREETING, DIM), embed(REPLY, DIM), w_q, w_k)[0, 0].dense().tolist()


def train(report: tuple[int, ...] = REPORT, rate: float = 0.01) -> list[State]:
    """Learn W_Q and W_K so that each character fetches its word."""
    x1, x2 = embed(CHARACTERS, DIM), embed(ENGLISH, DIM)
    v = head(torch.eye(len(ENGLISH), dtype=x1.dtype))
    target = torch.tensor([ENGLISH.index(MEANING[c]) for c in CHARACTERS])
    w_q, w_k = (torch.nn.Parameter(weight(name, DIM, HEAD_DIM)) for name in ("W_Q", "W_K"))
    optimizer = torch.optim.Adam([w_q, w_k], lr=rate)
    states = []
    for step in range(max(report) + 1):
        A = cross(x1, x2, w_q, w_k)
        y = (A @ v)[0, 0]
        loss = -y.gather(-1, target[:, None]).log().mean()
        if step in report:
            states.append(State(step, loss.item(), float(A.entropy().mean()), y.tolist()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return states


WORDS: Words = {
    "en": {
        "title": "2  Learned projections",
        "shows": "Where Q, K and V come from, and what training does to A.",
        "kinds": "Self-attention: Q = X W_Q, K = X W_K, V = X W_V, all from one X. Cross-attention: Q from X1, K and V from X2. "
        "Here {characters} asks and {words} answers: A is {q_len} x {k_len}. The vectors and the W are random, so A means nothing yet.",
        "task": "The W are learned. Below, four characters must fetch their English words. The loss is -log of the weight on the "
        "right word; its gradient flows through `A @ v` into W_Q and W_K. The loss falls, and A sharpens: the mean "
        "entropy of its rows falls from {first:.2f} to {last:.2f} (no preference at all would be log {count} = {most:.2f}).",
        "before": "before",
        "after": "after {step} steps",
        "step": "step",
        "loss": "loss",
        "entropy": "mean entropy of a row",
        "honest": "It has learned these {count} pairs by heart and nothing else.",
    },
    "zh": {
        "title": "2  学到的投影",
        "shows": "Q、K、V 从哪里来，训练对 A 做了什么。",
        "kinds": "自注意力：Q = X W_Q，K = X W_K，V = X W_V，都来自同一个 X。交叉注意力：Q 来自 X1，K 和 V 来自 X2。这里 {characters} 提问，{words} "
        "回答：A 是 {q_len} x {k_len}。向量和 W 都是随机的，所以 A 现在还没有意义。",
        "task": "W 是学出来的。下面四个汉字要各自取到自己的英文词。损失是正确的词所得权重的 -log，梯度经过 `A @ v` 流到 W_Q 和 W_K。损失下降，A 变得"
        "尖锐：每行的平均熵从 {first:.2f} 降到 {last:.2f}（毫无偏好时是 log {count} = {most:.2f}）。",
        "before": "训练前",
        "after": "训练 {step} 步后",
        "step": "步",
        "loss": "损失",
        "entropy": "每行的平均熵",
        "honest": "它只是背下了这 {count} 对词，没有学到别的。",
    },
}


def show(console: Console, language: str = "en") -> None:
    page = Page(console, language, WORDS)
    page.open()
    greeting, states = greet(), train()
    page.say(
        "kinds", characters="".join(GREETING), words=" ".join(REPLY), q_len=len(greeting), k_len=len(greeting[0])
    )  # fmt: skip
    page.show(page.map(greeting, rows=GREETING, columns=REPLY, values=".2f", low=0, high=1))
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
