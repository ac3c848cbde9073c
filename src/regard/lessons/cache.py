"""M2, the causal mask and the KV cache: why K and V are kept while decoding, why Q never is, and what is saved."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import bars, table
from . import inputs
from .page import Page, Words
from .vectors import draw, head

LENGTH, DIM = 16, 8
#: what the model that comes with regard continues, and by how many characters
PROMPT, WRITTEN = "attention looks up, attention lo", 6
#: what a reader may choose: characters of the prompt, steps of writing, tokens that are counted, the place that is changed
PROMPTS, STEPS, COUNTED, PLACES = 80, (0, 32), (1, 32), 6
#: the head whose row is shown while the model writes (one that copies), and how many guesses are told
LAYER, HEAD, GUESSES = 2, 0, 4

TRY = """\
import regard as rg
model, tokenizer = rg.models.load("tiny")
prompt = tokenizer.encode("query, key, value; query, key, ")
for (token,) in rg.generate.stream(model, [prompt], most=12):
    print(repr(tokenizer.decode([token])), end=" ")"""


class Counts(NamedTuple):
    """Score pairs computed while decoding LENGTH tokens one by one."""

    unmasked: int  # every step recomputes all rows, without a mask
    causal: int  # every step recomputes all rows, with the causal mask
    cached: int  # every step computes its own row only


class Decoding(NamedTuple):
    """Decoding with the cache against one causal pass: largest differences."""

    right: float
    misplaced: float  # when the query's position is taken in the chunk, not in the sequence


class Written(NamedTuple):
    """One step of writing with a cache."""

    text: str  # the character that was written
    queries: int  # rows asked with in this step
    held: int  # keys in the cache after it


class Future(NamedTuple):
    """How much output t changes when a later token changes."""

    unmasked: float
    causal: float


def data(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (head(draw(name, length, DIM)) for name in ("q", "k", "v"))
    return q, k, v


def position() -> rg.Static:
    """A relative term, so that a misplaced query would show: the slope of ALiBi's first head of eight."""
    return rg.Static(rg.Slope(), readout=rg.recipes.alibi(8).readout[:1])


def pairs(A: rg.AttentionMatrix) -> int:
    """Pairs whose score is needed: those the mask leaves visible, as the pooled picture of one cell counts them."""
    return int(A.heatmap(1).count.sum())


@functools.cache
def count(length: int = LENGTH) -> Counts:
    q, k, _ = data(length)
    total = Counts(0, 0, 0)
    for n in range(1, length + 1):
        step = Counts(
            pairs(rg.attention(q[:, :, :n], k[:, :, :n])),
            pairs(rg.attention(q[:, :, :n], k[:, :, :n], mask=rg.causal)),
            pairs(rg.attention(q[:, :, n - 1 : n], k[:, :, :n], mask=rg.causal, q_start=n - 1)),
        )
        total = Counts(*(a + b for a, b in zip(total, step, strict=True)))
    return total


def decode(length: int = LENGTH) -> Decoding:
    """Step n has one new query; its keys and values are those of the cache and its own."""
    q, k, v = data(length)
    whole = rg.attention(q, k, mask=rg.causal, position=position()) @ v
    right = misplaced = 0.0
    for t in range(length):
        new, keys, values = q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]
        y = rg.attention(new, keys, mask=rg.causal, position=position(), q_start=t) @ values
        lost = rg.attention(new, keys, position=position()) @ values  # stands at 0 as far as the term knows
        right = max(right, float((y[:, :, 0] - whole[:, :, t]).abs().max()))
        misplaced = max(misplaced, float((lost[:, :, 0] - whole[:, :, t]).abs().max()))
    return Decoding(right, misplaced)


def future(t: int = LENGTH // 2) -> Future:
    """Change the last token's key and value, and see what output t does."""
    q, k, v = data()
    late = torch.zeros_like(k)
    late[:, :, -1] = 1.0

    def change(mask: rg.masks.Mask | None) -> float:
        before, after = (rg.attention(q, k + x, mask=mask) @ (v + x) for x in (0 * late, late))
        return float((after - before)[:, :, t].abs().max())

    return Future(change(None), change(rg.causal))


def write() -> list[Written]:
    """The embedded model goes on: the first step reads the prompt, each further one asks with a single query."""
    model, tokenizer = rg.models.load("tiny")
    prompt = tokenizer.encode(PROMPT)
    cache = rg.cache.KVCache(len(model.blocks))
    steps, before = [], 0
    for (token,) in rg.generate.stream(model, [prompt], most=WRITTEN, cache=cache):
        assert token is not None  # no token ends it
        (held,) = cache.lengths
        steps.append(Written(tokenizer.decode([token]), held - before, held))
        before = held
    return steps


class Step(NamedTuple):
    """One step of writing, watched: what is asked with, what is kept, and what the newest query looks at."""

    read: list[str]  # tokens that were read in this step
    text: str  # the character that was written
    guesses: list[tuple[str, float]]  # what it was chosen from, and how probable each was
    queries: int  # rows asked with, and dropped after it
    held: int  # keys, and values, in the cache of every layer after it
    numbers: int  # numbers in all K and V that are kept
    row: list[float]  # the weights of the last query on the keys, in one head


def watch(prompt: str) -> Iterator[Step]:
    """The embedded model writes after a prompt, the likeliest character each time."""
    model, tokenizer = rg.models.load("tiny")
    cache = rg.cache.KVCache(len(model.blocks))
    new, before = tokenizer.encode(prompt), 0
    while True:
        with torch.no_grad():
            logits, looks = model(torch.tensor([new]), cache=cache, last=True, look=True)
        best = logits[0].softmax(-1).topk(GUESSES)
        guesses = list(zip(tokenizer.labels(best.indices.tolist()), best.values.tolist(), strict=True))
        (held,) = cache.lengths
        A = looks.decoder[LAYER][0, HEAD]
        numbers = sum(2 * block.attention.kv_heads * block.attention.head_dim * held for block in model.blocks)
        token = int(best.indices[0])
        yield Step(
            tokenizer.labels(new), tokenizer.labels([token])[0], guesses, held - before, held, numbers,
            A[-1, :].tolist(),
        )  # fmt: skip
        new, before = [token], held


_WRITING = threading.Lock()


@functools.lru_cache(maxsize=1)
def _writing(prompt: str) -> tuple[Iterator[Step], list[Step]]:
    return watch(prompt), []


def written(prompt: str, steps: int) -> list[Step]:
    """The first steps after a prompt. The last prompt's steps are kept: one more costs one more."""
    with _WRITING:
        going, found = _writing(prompt)
        while len(found) < steps:
            found.append(next(going))
        return found[:steps]


def changed(what: str, place: int) -> dict[str, Any]:
    """Change one q, k or v: which scores move, and which rows of y? Causal, PLACES tokens."""
    before = dict(zip("qkv", data(PLACES), strict=True))
    after = dict(before)
    after[what] = before[what].clone()
    after[what][:, :, place] += 1.0

    def computed(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        A = rg.attention(x["q"], x["k"], mask=rg.causal)
        scores = rg.attention(x["q"], x["k"], scale=1.0).logits.dense()
        return scores[0, 0], (A @ x["v"])[0, 0], A.logits.dense()[0, 0] > -torch.inf

    (scores, y, seen), (scores_after, y_after, _) = computed(before), computed(after)
    moved = (y_after - y).abs().amax(-1)
    return {
        "scores": (scores_after - scores).abs().tolist(), "visible": seen.tolist(), "rows": moved.tolist(),
        "moved": int((moved > 0).sum()), "later": int((moved[place + 1 :] > 0).sum()),
    }  # fmt: skip


@functools.cache
def reads() -> dict[str, int]:
    """How many later rows of y, over all places, move when a q, a k or a v is changed: who would read a cache of it."""
    return {what: sum(changed(what, place)["later"] for place in range(PLACES)) for what in "qkv"}


def play(
    prompt: Any = PROMPT, step: Any = 1, length: Any = LENGTH, change: Any = "k", place: Any = 2
) -> dict[str, Any]:
    """A model that writes, step by step; the pairs that are scored to decode `length` tokens; what one changed row does."""
    text = inputs.text("prompt", prompt, PROMPTS)
    steps, n = inputs.whole("step", step, *STEPS), inputs.whole("length", length, *COUNTED)
    what, at = inputs.choice("change", change, ("q", "k", "v")), inputs.whole("place", place, 1, PLACES - 1)
    found, pairs_of, q = written(text, steps), count(n), data(n)[0]
    tokens = [label for each in found for label in each.read]
    return {
        "inputs": {"prompt": text, "step": steps, "length": n, "change": what, "place": at},
        "bounds": {
            "step": [*STEPS, 1], "length": [*COUNTED, 1], "change": ["q", "k", "v"], "place": [1, PLACES - 1, 1],
        },
        "steps": inputs.plain([each._asdict() for each in found]), "tokens": tokens, "prompt_tokens": len(found[0].read) if found else 0,
        "layer": LAYER, "head": HEAD, "pairs": pairs_of._asdict(), "q_cache": q.numel(), "reads": reads(),
        "changed": changed(what, at), "places": [str(m + 1) for m in range(PLACES)],
    }  # fmt: skip


def causal_map() -> tuple[list[list[float]], list[list[bool]]]:
    q, k, _ = data()
    A = rg.attention(q, k, mask=rg.causal, position=position())[0, 0]
    return A.dense().tolist(), (A.logits.dense() > -torch.inf).tolist()


WORDS: Words = {
    "en": {
        "title": "The causal mask and the KV cache",
        "shows": "Why a decoder keeps K and V and never Q, and how much work that saves.",
        "mask": "Without a mask y_t = Σ_j A[t, j] v_j runs over all {length} tokens: while decoding, most of them do not exist yet. With the causal "
        "mask the sum stops at t. Change the last token: y_{t} changes by {unmasked:.3f} without the mask, by {causal:g} with it.",
        "cache": "Position t uses its own q_t, but all of k_1..k_t and v_1..v_t. So k and v are kept (the cache), and q_t is used once and "
        "dropped. A cache of Q would hold {held} numbers at the end, and nothing would ever read them.",
        "step": "Step t asks with one query: `attention(q_t, k[:t+1], q_start=t) @ v[:t+1]`. After {length} steps the largest difference from "
        "one causal pass over everything is {right:.1e}.",
        "start": "`q_start` matters: a relative term needs the query's place in the whole sequence, not in the chunk. Leave it out, and this "
        "decoding is off by up to {misplaced:.2f}.",
        "count": "Score pairs computed to decode {length} tokens:",
        "unmasked": "all again, no mask",
        "causal": "all again, causal",
        "cached": "with the cache",
        "map": "A, causal, nearer keys preferred",
        "watch": "Watch it: the model that comes with regard goes on with “{prompt}”. The first step reads all of the prompt; after that one query a step is "
        "asked and dropped, while K and V grow by a row in every layer.",
        "written": "writes",
        "queries": "queries asked",
        "held": "keys held",
        "try": "Let the model write, one token at a time. Give it a line of your own with something said twice.",
        "question": "Twice as many tokens, {double}: how many score pairs with the cache, and how many recomputing causally?",
        "answer": "{cached} and {causal}, where it was {cached_before} and {causal_before}: about {cached_times:.1f} and {causal_times:.1f} times as many. With the "
        "cache the work grows with the square of the length, without it with the cube.",
        "next": "The score can also know how far apart q and k are. `regard lesson line`",
        "play_watch": "Watch the cache grow",
        "play_prompt": "what the model goes on with",
        "play_step": "Step",
        "play_run": "Play",
        "play_pause": "Pause",
        "play_begin": "From the beginning",
        "play_hint": "The first step reads the prompt. After that every step asks with one query. (Right arrow: a step; space: play or pause.)",
        "play_q": "q",
        "play_k": "K",
        "play_v": "V",
        "play_q_used": "this step's queries: {queries}, dropped after it",
        "play_kv_held": "kept: {held} rows of K and of V in every layer, {numbers} numbers in all",
        "play_nothing": "nothing read yet",
        "play_text": "written so far",
        "play_row": "colour of K: what the newest query looks at (layer {layer}, head {head})",
        "play_guesses": "what comes next, probability",
        "play_pairs": "Score pairs",
        "play_length": "tokens decoded",
        "play_unmasked": "all again, no mask",
        "play_causal": "all again, causal",
        "play_cached": "with the cache",
        "play_no_q": "Over all {places} rows here: a kept q is read by {q} later rows of y, a kept k by {k}, a kept v by {v}. A cache of Q would hold {held} numbers after {length} tokens.",
        "play_alike": "Q and K look alike until V enters",
        "play_change": "change",
        "play_place": "row",
        "play_scores": "how much each score q·k moves",
        "play_outputs": "how much each row of y = A V moves",
        "play_says_q": "Changing q_{n} moves one row of the scores, and one row of y: its own. Once y_{n} is out, nobody asks for q_{n} again: no Q cache.",
        "play_says_k": "Changing k_{n} moves one column of the scores: up to here K is Q's mirror image. But {rows} rows of y move: its own and those after it. So k_{n} must be kept.",
        "play_says_v": "Changing v_{n} moves no score at all, and {rows} rows of y: its own and those after it. So v_{n} must be kept.",
        "play_told": "Step {step}: wrote {text}. {queries} queries used, {held} keys held.",
        "play_told_pairs": "{length} tokens: {unmasked}, {causal} and {cached} pairs.",
    },
    "zh": {
        "title": "因果掩码与 KV 缓存",
        "shows": "解码时为什么保存 K 和 V，从不保存 Q；这样省了多少计算。",
        "mask": "没有掩码时，y_t = Σ_j A[t, j] v_j 要对全部 {length} 个词元求和，而解码时它们大多还不存在。有了因果掩码，求和到 t 为止。改动最后一个词元：没有掩码时 "
        "y_{t} 变化 {unmasked:.3f}，有掩码时变化 {causal:g}。",
        "cache": "位置 t 只用自己的 q_t，却要用全部的 k_1..k_t 和 v_1..v_t。所以 k 和 v 要保存（缓存），q_t 用一次就丢掉。若也缓存 Q，最后会存下 {held} 个数，却永远没有"
        "人去读。",
        "step": "第 t 步只有一个查询：`attention(q_t, k[:t+1], q_start=t) @ v[:t+1]`。{length} 步之后，与一次算完的因果注意力最大相差 {right:.1e}。",
        "start": "`q_start` 很要紧：相对位置项要的是查询在整个序列里的位置，不是在这一小段里的位置。不写它，这里的解码最多会差 {misplaced:.2f}。",
        "count": "解码 {length} 个词元要计算的分数对：",
        "unmasked": "每步重算，无掩码",
        "causal": "每步重算，因果",
        "cached": "用缓存",
        "map": "A：因果，偏好近处的键",
        "watch": "看它怎样写：regard 自带的模型接着“{prompt}”往下写。第一步读完整个提示；之后每步只用一个查询，用完就丢，而每一层的 K 和 V 各长一行。",
        "written": "写出",
        "queries": "用到的查询",
        "held": "保存的键",
        "try": "让模型一个词元一个词元地写。换上你自己的一行，里面有一处说了两遍。",
        "question": "词元数加倍，变成 {double} 个：用缓存要算多少分数对？每步按因果重算呢？",
        "answer": "{cached} 和 {causal}，原来是 {cached_before} 和 {causal_before}：大约是 {cached_times:.1f} 倍和 {causal_times:.1f} 倍。有缓存时工作量随长度的平方增长，没有时随立方增长。",
        "next": "分数还可以知道 q 和 k 相隔多远。`regard lesson line`",
        "play_watch": "看缓存怎样变长",
        "play_prompt": "让模型接着写",
        "play_step": "走一步",
        "play_run": "播放",
        "play_pause": "暂停",
        "play_begin": "从头开始",
        "play_hint": "第一步读完提示，之后每步只用一个查询。（右方向键：走一步；空格：播放或暂停。）",
        "play_q": "q",
        "play_k": "K",
        "play_v": "V",
        "play_q_used": "这一步的查询：{queries} 个，用完就丢",
        "play_kv_held": "保存着：每层 K 和 V 各 {held} 行，总共 {numbers} 个数",
        "play_nothing": "还没有读",
        "play_text": "写到这里",
        "play_row": "K 的颜色：最新的查询在看什么（第 {layer} 层，第 {head} 个头）",
        "play_guesses": "下一个是什么，概率",
        "play_pairs": "分数对",
        "play_length": "解码的词元数",
        "play_unmasked": "每步重算，无掩码",
        "play_causal": "每步重算，因果",
        "play_cached": "用缓存",
        "play_no_q": "这 {places} 行合起来：保存的 q 有 {q} 个后来的 y 去读，k 有 {k} 个，v 有 {v} 个。若缓存 Q，{length} 个词元之后会存下 {held} 个数。",
        "play_alike": "V 出现之前，Q 和 K 看起来一样",
        "play_change": "改动",
        "play_place": "第几行",
        "play_scores": "每个分数 q·k 变了多少",
        "play_outputs": "y = A V 的每一行变了多少",
        "play_says_q": "改动 q_{n}，分数变了一行，y 也只变一行：它自己的。y_{n} 算出之后，再没有人问起 q_{n}：所以没有 Q 缓存。",
        "play_says_k": "改动 k_{n}，分数变了一列：到这里 K 只是 Q 的镜像。可是 y 有 {rows} 行变了：它自己的和它之后的。所以 k_{n} 必须保存。",
        "play_says_v": "改动 v_{n}，分数全都不变，而 y 有 {rows} 行变了：它自己的和它之后的。所以 v_{n} 必须保存。",
        "play_told": "第 {step} 步：写出 {text}。用了 {queries} 个查询，保存 {held} 个键。",
        "play_told_pairs": "{length} 个词元：{unmasked}、{causal} 和 {cached} 对。",
    },
}


def show(page: Page) -> None:
    page.open()
    t = LENGTH // 2
    change, decoding, counts = future(t), decode(), count()
    page.say("mask", length=LENGTH, t=t + 1, unmasked=change.unmasked, causal=change.causal)
    page.say("cache", held=data()[0].numel())
    page.say("step", length=LENGTH, right=decoding.right)
    page.say("start", misplaced=decoding.misplaced)
    page.say("count", length=LENGTH)
    weights, visible = causal_map()
    names = [str(n + 1) for n in range(LENGTH)]
    page.show(
        page.map(weights, visible=visible, rows=names, columns=names, title=page("map")),
        bars(counts, [page(name) for name in Counts._fields], form=".0f", width=30),
    )
    page.say("watch", prompt=PROMPT)
    steps = [[repr(s.text), s.queries, s.held] for s in write()]
    page.show(table([page("written"), page("queries"), page("held")], steps))
    more = count(2 * LENGTH)
    page.close(
        TRY,
        {
            "cached": more.cached, "causal": more.causal, "cached_before": counts.cached,
            "causal_before": counts.causal, "cached_times": more.cached / counts.cached,
            "causal_times": more.causal / counts.causal,
        },
        double=2 * LENGTH,
    )  # fmt: skip
