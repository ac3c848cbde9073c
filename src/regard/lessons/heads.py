"""M1, heads and blocks: several A side by side, the block made of them, who asks whom, and why not an RNN.

The RNN is h_t = tanh(h_(t-1) W + x_t U) with random W of spectral radius RADIUS. What is measured on both: how much the last
output changes with an input so many places back (the norm of that Jacobian), and how many steps lie between.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import bars, table
from . import inputs as checked
from .matrix import DIM, HEADS, MODEL_DIM, TOKENS, V_DIM, by, inputs, project
from .page import Page, Words
from .vectors import draw, embed, head, weight

GREETING, REPLY = ("你", "好"), ("Hello", "World")
TEXTS = ("".join(GREETING), " ".join(REPLY))
CROSS_DIM, HEAD_DIM = 16, 8
LENGTH, DISTANCES = 64, (1, 2, 4, 8, 16, 32, 63)
WIDTH, RADIUS, SEQUENCES = 8, 0.9, 16
#: what a reader may choose: how many heads, how far back, the spectral radius of W, the characters of a text
MANY, BACK, RADII, MOST = (1, 4), (1, LENGTH - 1), (0.5, 3.0), 40
#: tokens of a reader's text: what does not fit into a heat map is refused
TOKENS_MOST = 12

TRY = """\
import torch, regard as rg
layer = rg.nn.Attention(8, 2)
x, memory = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
for source in (None, memory):
    y, A = layer(x, source, look=True)
    print("A", list(A.shape), "y", list(y.shape))"""


class Joined(NamedTuple):
    """What the heads give, and how it is put together again."""

    weights: list[list[list[float]]]  # A of each head
    differ: float  # largest difference between the A of the first two heads
    shapes: dict[str, tuple[int, ...]]  # of A, A V, concat, W_O and Y


class Reach(NamedTuple):
    """How much of an input so many places back is in the last output, and how many steps it takes to get there."""

    distance: int
    rnn: float
    attention: float
    rnn_steps: int
    attention_steps: int


def joined() -> Joined:
    """Each head attends by itself; the outputs are laid side by side and mixed by W_O."""
    x = torch.stack(inputs()).sum(0)
    A = rg.attention(project(x, "W_Q", DIM), project(x, "W_K", DIM))
    out = A @ project(x, "W_V", V_DIM)
    side_by_side = out[0].movedim(0, 1).flatten(1)
    w_o = weight("W_O", HEADS * V_DIM, MODEL_DIM)
    tensors = {"A": A.dense()[0], "A V": out[0], "concat": side_by_side, "W_O": w_o, "Y": side_by_side @ w_o}
    weights = A.dense()[0]
    return Joined(
        weights.tolist(), float((weights[0] - weights[1]).abs().max()), {k: tuple(t.shape) for k, t in tensors.items()}
    )


def shared_keys() -> dict[int, tuple[tuple[int, ...], int]]:
    """kv_heads → the shape of A for four query heads, and the numbers in K."""
    x = torch.stack(inputs()).sum(0)
    q = project(x, "W_Q", DIM, 4)
    found = {}
    for kv_heads in (4, 2, 1):
        k = project(x, "W_K", DIM, kv_heads)
        found[kv_heads] = tuple(rg.attention(q, k).shape[1:]), k.numel()
    return found


def stages(x: Tensor) -> dict[str, Tensor]:
    """A transformer block, stage by stage (no dropout: nothing trains here)."""
    norm = torch.nn.functional.layer_norm
    found = {"x": x, "norm_1": norm(x, x.shape[-1:])}
    h = found["norm_1"]
    A = rg.attention(project(h, "W_Q", DIM), project(h, "W_K", DIM), mask=rg.causal)
    out = (A @ project(h, "W_V", V_DIM))[0].movedim(0, 1).flatten(1)
    found["attention"] = out @ weight("W_O", HEADS * V_DIM, MODEL_DIM)
    found["residual_1"] = x + found["attention"]
    found["norm_2"] = norm(found["residual_1"], x.shape[-1:])
    hidden = torch.nn.functional.gelu(found["norm_2"] @ weight("W_1", MODEL_DIM, 4 * MODEL_DIM))
    found["feed_forward"] = hidden @ weight("W_2", 4 * MODEL_DIM, MODEL_DIM)
    found["residual_2"] = found["residual_1"] + found["feed_forward"]
    return found


def block(x: Tensor) -> Tensor:
    """What comes out of it."""
    return stages(x)["residual_2"]


def looks(asking: tuple[str, ...] = GREETING, asked: tuple[str, ...] = REPLY) -> dict[str, rg.AttentionMatrix]:
    """Self-attention: the greeting looks at itself. Cross-attention: it looks at the reply. The same W, untrained."""
    w_q, w_k = weight("W_Q", CROSS_DIM, HEAD_DIM), weight("W_K", CROSS_DIM, HEAD_DIM)
    x1, x2 = embed(asking, CROSS_DIM), embed(asked, CROSS_DIM)
    return {
        "self": rg.attention(head(x1 @ w_q), head(x1 @ w_k))[0, 0],
        "cross": rg.attention(head(x1 @ w_q), head(x2 @ w_k))[0, 0],
    }


def rnn(x: Tensor, radius: float = RADIUS) -> Tensor:
    """h_T of x [.., length, WIDTH]: one step after the other."""
    w = draw("recurrent", WIDTH, WIDTH)
    w = w * radius / torch.linalg.eigvals(w).abs().max()
    u = weight("input", WIDTH, WIDTH)
    h = torch.zeros_like(x[..., 0, :])
    for row in x.unbind(-2):
        h = torch.tanh(h @ w + row @ u)
    return h


def attend(x: Tensor) -> Tensor:
    """The last row of causal self-attention over x [batch, length, WIDTH]: one look at everything."""
    q, k, v = ((x @ weight(name, WIDTH, WIDTH))[:, None] for name in ("W_Q", "W_K", "W_V"))
    return (rg.attention(q, k, mask=rg.causal) @ v)[:, 0, -1]


def signal(model: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm of the Jacobian of the last output in the input of each place; the mean over random sequences: [length]."""
    x = torch.stack([draw(f"sequence {n}", LENGTH, WIDTH) for n in range(SEQUENCES)]).requires_grad_()
    outputs = model(x).sum(0)  # sequences do not meet: each keeps its own gradient
    rows = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in outputs]
    return torch.stack(rows).square().sum((0, -1)).sqrt().mean(0)


@functools.lru_cache(maxsize=64)
def signals(radius: float = RADIUS) -> tuple[list[float], list[float]]:
    """The RNN's signal and attention's, from inputs 1, 2, ... places back."""
    found = signal(lambda x: rnn(x, radius)), signal(attend)
    by_rnn, by_attention = (x.flip(0)[1:].tolist() for x in found)
    return by_rnn, by_attention


def reach() -> list[Reach]:
    """Both signals at some distances."""
    by_rnn, by_attention = signals()
    return [Reach(d, by_rnn[d - 1], by_attention[d - 1], d, 1) for d in DISTANCES]


def tokens_of(name: str, text: str) -> tuple[str, ...]:
    """Words, where a text has blanks between them; characters otherwise."""
    found = tuple(text.split()) if len(text.split()) > 1 else tuple(text.strip())
    if len(found) > TOKENS_MOST:
        raise checked.Refused(name, f"at most {TOKENS_MOST} tokens", str(len(found)), f"至多 {TOKENS_MOST} 个 token")
    return found


def play(
    heads: Any = HEADS,
    asking: Any = TEXTS[0],
    asked: Any = TEXTS[1],
    distance: Any = DISTANCES[-2],
    radius: Any = RADIUS,
) -> dict[str, Any]:
    """Some heads of one sentence, put together; who looks at whom; how much of a token arrives so many places on."""
    count = checked.whole("heads", heads, *MANY)
    texts = {
        name: checked.text(name, given, MOST) for name, given in (("asking", asking), ("asked", asked))
    }  # fmt: skip
    back, size = checked.whole("distance", distance, *BACK), checked.number("radius", radius, *RADII)
    x = torch.stack(inputs()).sum(0)
    A = rg.attention(project(x, "W_Q", DIM, count), project(x, "W_K", DIM, count))
    out = (A @ project(x, "W_V", V_DIM, count))[0]
    side_by_side = out.movedim(0, 1).flatten(1)
    w_o = weight("W_O", count * V_DIM, MODEL_DIM)
    from_left, to_right = (tokens_of(name, texts[name]) for name in ("asking", "asked"))
    kinds = {}
    for name, look in looks(from_left, to_right).items():
        columns = from_left if name == "self" else to_right
        values = head(embed(columns, CROSS_DIM) @ weight("W_V", CROSS_DIM, HEAD_DIM))
        kinds[name] = {
            "columns": list(columns), "weights": look.dense().tolist(), "logits": look.logits.dense().tolist(),
            "shape": by(tuple(look.shape)), "output": by(tuple((look @ values[0, 0]).shape)),
            "entropy": look.entropy().tolist(),
        }  # fmt: skip
    by_rnn, by_attention = signals(size)
    return {
        "inputs": {"heads": count, **texts, "distance": back, "radius": size},
        "bounds": {"heads": list(range(MANY[0], MANY[1] + 1)), "distance": [*BACK, 1], "radius": [*RADII, 0.1]},
        "tokens": list(TOKENS), "weights": A.dense()[0].tolist(), "outputs": out.tolist(),
        "concat": side_by_side.tolist(), "mixed": (side_by_side @ w_o).tolist(),
        "shapes": {
            name: by(tuple(t.shape))
            for name, t in {"A": A.dense()[0], "A V": out, "concat": side_by_side, "W_O": w_o, "Y": side_by_side @ w_o}.items()
        },
        "block": [
            {"name": name, "shape": by(tuple(stage.shape)), "rows": stage.tolist()} for name, stage in stages(x).items()
        ],
        "v_dim": V_DIM, "rows": list(from_left), "kinds": kinds,
        "rnn": _logs(by_rnn), "attention": _logs(by_attention), "length": LENGTH,
        "far": {
            "rnn": by_rnn[back - 1], "attention": by_attention[back - 1], "rnn_steps": back, "attention_steps": 1,
            "rnn_share": by_rnn[back - 1] / by_rnn[0], "attention_share": by_attention[back - 1] / by_attention[0],
            "verdict": "once" if back == 1 else "fades" if by_rnn[back - 1] < by_rnn[0] else "grows",
        },
        "code": {"rnn": inspect.getsource(rnn), "attention": inspect.getsource(attend)},
    }  # fmt: skip


def _logs(signals: list[float]) -> list[float | None]:
    """Powers of ten, for a curve that shows how fast something fades."""
    return [math.log10(x) if x > 0 else None for x in signals]


WORDS: Words = {
    "en": {
        "title": "Heads and blocks",
        "shows": "Several A side by side, the block that is stacked, who looks at whom, and why not an RNN.",
        "heads": "Each head has W_Q, W_K and W_V of its own, so its own A. Here the two A of the same {count} tokens differ by up to {differ:.2f}. "
        "Their outputs are laid side by side (concat) and mixed by W_O:",
        "head": "head {head}",
        "symbol": "symbol",
        "shape": "shape",
        "shared": "Heads may share keys: with {kv} key heads A stays {shapes}, while K shrinks to {sizes} numbers.",
        "block": "A transformer block is LayerNorm → masked attention → residual + dropout → LayerNorm → feed-forward → residual + dropout. It keeps the "
        "shape: {before} in, {after} out, so blocks can be stacked. A decoder-only model stacks these; an encoder-decoder model adds "
        "cross-attention.",
        "kinds": "Self-attention: Q = X W_Q, K = X W_K, V = X W_V, all from one X: {characters} looks at itself, A is {self}. Cross-attention: Q from "
        "X1, K and V from X2: {characters} looks at {words}, A is {cross}. The vectors and the W are random, so these A mean nothing yet.",
        "self": "self-attention",
        "cross": "cross-attention",
        "rnn": "Why not an RNN? It passes h_t = tanh(h_(t-1) W + x_t U) down the row: what a token said {far} places back has been through {steps} steps "
        "when it arrives, and none of them can start before the one before it has ended. Attention looks at every token at once. Measured on both, random "
        "and untrained, {length} tokens: how much the last output changes with an input so many places back (norm of the Jacobian).",
        "distance": "places back",
        "of_rnn": "RNN",
        "of_attention": "attention",
        "steps_rnn": "steps, RNN",
        "steps_attention": "steps, attention",
        "fades": "{last} places back the RNN's signal is {rnn:.1e} of what it is {first} back; attention's is {attention:.2f} times as large: without a position term "
        "it does not know how far away a key is. (The spectral radius of W is {radius:g}. Trained and gated RNNs fade more slowly; the steps in a row remain.)",
        "bars_rnn": "RNN: signal against distance",
        "bars_attention": "attention: the same",
        "try": "One layer, asked twice: about x itself, and about a memory of another length. See which side of A changes.",
        "question": "What is the shape of A when {q_len} tokens look at {k_len} others? And of the output?",
        "answer": "A is {shape}: a row for each query, a column for each key. A V has {rows} rows, one for each query, whatever the number of keys.",
        "next": "Why a decoder must not look ahead, and what it keeps. `regard lesson cache`",
        "play_heads": "heads",
        "play_head": "head {n}",
        "play_each": "Each head has its own A. Point at a row: what that token takes from each head, and where it goes.",
        "play_concat": "concat: the heads' outputs side by side, {token}",
        "play_mixed": "Y = concat · W_O, {token}",
        "play_part": "head {n}",
        "play_shapes": "shapes",
        "play_block": "Through a block, {token}: twice something is computed and added to what was there (residual); the shape stays {shape}",
        "play_stage_x": "x",
        "play_stage_norm_1": "LayerNorm",
        "play_stage_attention": "masked attention",
        "play_stage_residual_1": "x + attention",
        "play_stage_norm_2": "LayerNorm",
        "play_stage_feed_forward": "feed-forward",
        "play_stage_residual_2": "+ feed-forward",
        "play_kinds": "Who looks at whom",
        "play_asking": "who asks (queries)",
        "play_asked": "who is asked (keys and values)",
        "play_self": "self-attention: {text} looks at itself",
        "play_cross": "cross-attention: {text} looks at {other}",
        "play_pair": "{q} → {k}: q·k / √d = {logit}, weight {weight}. A is {shape}, A V is {output}.",
        "play_point": "Point at a cell, or move over the table with the arrow keys.",
        "play_why": "Why not an RNN?",
        "play_distance": "places back",
        "play_radius": "spectral radius of W",
        "play_of_rnn": "RNN",
        "play_of_attention": "attention",
        "play_curve": "how much of a token arrives so many places on (norm of the Jacobian, in powers of ten)",
        "play_steps": "steps in a row",
        "play_share": "{share} of what it is one place back",
        "play_says_fades": "The RNN's signal has been through {steps} steps in a row and is {share} of what it was after one: it fades.",
        "play_says_grows": "Here the RNN's signal, after {steps} steps in a row, is {share} of what it was after one: with a large W it grows or wanders instead of fading. Such a chain is no easier to train.",
        "play_says_once": "One step: nothing has faded yet. Move the slider.",
        "play_code": "the code that is measured",
        "play_told": "{distance} places back: RNN {rnn}, attention {attention}.",
    },
    "zh": {
        "title": "头与块",
        "shows": "并排的几个 A，可以层层叠起的块，谁看谁，以及为什么不用 RNN。",
        "heads": "每个头有自己的 W_Q、W_K 和 W_V，因而有自己的 A。这里同样 {count} 个词元的两个 A 最多相差 {differ:.2f}。它们的输出并排放好（concat），再由 W_O 混合：",
        "head": "第 {head} 个头",
        "symbol": "符号",
        "shape": "形状",
        "shared": "头可以共用键：键头数为 {kv} 时，A 仍是 {shapes}，而 K 只有 {sizes} 个数。",
        "block": "一个 Transformer 块：LayerNorm → 带掩码的注意力 → 残差 + dropout → LayerNorm → 前馈 → 残差 + dropout。形状不变：输入 {before}，输出 {after}，"
        "所以可以一层层叠起来。只有解码器的模型就是把它叠起来；编码器-解码器模型再加上交叉注意力。",
        "kinds": "自注意力：Q = X W_Q，K = X W_K，V = X W_V，都来自同一个 X：{characters} 看自己，A 是 {self}。交叉注意力：Q 来自 X1，K 和 V 来自 X2：{characters} 看 {words}，"
        "A 是 {cross}。向量和 W 都是随机的，所以这些 A 还没有意义。",
        "self": "自注意力",
        "cross": "交叉注意力",
        "rnn": "为什么不用 RNN？它把 h_t = tanh(h_(t-1) W + x_t U) 沿着序列往下传：{far} 个位置之前的词元说的话，要经过 {steps} 步才到，而且前一步没完，后一步不能开始。注意力一次看到"
        "所有词元。在两者上实测（随机，未训练，{length} 个词元）：最后的输出随多远之前的输入变化多少（雅可比矩阵的范数）。",
        "distance": "相隔",
        "of_rnn": "RNN",
        "of_attention": "注意力",
        "steps_rnn": "RNN 的步数",
        "steps_attention": "注意力的步数",
        "fades": "相隔 {last} 时，RNN 的信号只有相隔 {first} 时的 {rnn:.1e} 倍，注意力的是 {attention:.2f} 倍：没有位置项时，它并不知道键有多远。（W 的谱半径是 {radius:g}。训练过的、带门的 "
        "RNN 消退得慢些，但一步接一步免不了。）",
        "bars_rnn": "RNN：信号与距离",
        "bars_attention": "注意力：同上",
        "try": "同一层问两次：一次问 x 自己，一次问另一段长度不同的内容。看 A 的哪一边变了。",
        "question": "{q_len} 个词元看另外 {k_len} 个，A 的形状是什么？输出呢？",
        "answer": "A 是 {shape}：每个查询一行，每个键一列。A V 有 {rows} 行，每个查询一行，与键的个数无关。",
        "next": "解码器为什么不能往后看，它又保存什么。`regard lesson cache`",
        "play_heads": "头数",
        "play_head": "第 {n} 个头",
        "play_each": "每个头有自己的 A。指向一行：那个词元从每个头拿到什么，又送到哪里。",
        "play_concat": "concat：各个头的输出并排，{token}",
        "play_mixed": "Y = concat · W_O，{token}",
        "play_part": "头 {n}",
        "play_shapes": "形状",
        "play_block": "穿过一个块，{token}：两次算出一些东西，加到原来的上面（残差）；形状仍是 {shape}",
        "play_stage_x": "x",
        "play_stage_norm_1": "LayerNorm",
        "play_stage_attention": "带掩码的注意力",
        "play_stage_residual_1": "x + 注意力",
        "play_stage_norm_2": "LayerNorm",
        "play_stage_feed_forward": "前馈",
        "play_stage_residual_2": "+ 前馈",
        "play_kinds": "谁看谁",
        "play_asking": "谁在问（查询）",
        "play_asked": "问的是谁（键和值）",
        "play_self": "自注意力：{text} 看自己",
        "play_cross": "交叉注意力：{text} 看 {other}",
        "play_pair": "{q} → {k}：q·k / √d = {logit}，权重 {weight}。A 是 {shape}，A V 是 {output}。",
        "play_point": "指向一格，或用方向键在表上移动。",
        "play_why": "为什么不用 RNN？",
        "play_distance": "相隔",
        "play_radius": "W 的谱半径",
        "play_of_rnn": "RNN",
        "play_of_attention": "注意力",
        "play_curve": "隔这么远，一个词元还剩下多少（雅可比矩阵的范数，以 10 的幂表示）",
        "play_steps": "一步接一步的步数",
        "play_share": "是相隔 1 时的 {share} 倍",
        "play_says_fades": "RNN 的信号一步接一步走了 {steps} 步，是走一步时的 {share} 倍：它消退了。",
        "play_says_grows": "这里 RNN 的信号一步接一步走了 {steps} 步，是走一步时的 {share} 倍：W 大时它不消退，而是增长或游荡。这样的链条同样不好训练。",
        "play_says_once": "才走一步，还没有消退。移动滑块看看。",
        "play_code": "被测量的代码",
        "play_told": "相隔 {distance}：RNN {rnn}，注意力 {attention}。",
    },
}

#: sizes of the question
ASKING, ASKED = 3, 5


def shapes() -> tuple[tuple[int, ...], int]:
    """The shape of A for ASKING queries and ASKED keys, and the rows of A V."""
    A = rg.attention(head(draw("q", ASKING, DIM)), head(draw("k", ASKED, DIM)))
    return tuple(A.shape[2:]), (A @ head(draw("v", ASKED, V_DIM))).shape[2]


def show(page: Page) -> None:
    page.open()
    found = joined()
    page.say("heads", count=len(TOKENS), differ=found.differ)
    page.show(
        *(
            page.map(
                w, rows=TOKENS, columns=TOKENS, values="percent", low=0, high=1, title=page("head", head=h + 1)
            )
            for h, w in enumerate(found.weights)
        ),
        table([page("symbol"), page("shape")], [[name, by(shape)] for name, shape in found.shapes.items()]),
    )  # fmt: skip
    shared = shared_keys()
    page.say(
        "shared", kv=page.listed(shared), shapes=page.listed(sorted({by(s) for s, _ in shared.values()})),
        sizes=page.listed(size for _, size in shared.values()),
    )  # fmt: skip
    x = torch.stack(inputs()).sum(0)
    page.say("block", before=by(tuple(x.shape)), after=by(tuple(block(x).shape)))
    both = looks()
    page.say(
        "kinds", characters="".join(GREETING), words=" ".join(REPLY),
        **{name: by(tuple(A.shape)) for name, A in both.items()},
    )  # fmt: skip
    page.show(
        *(
            page.map(A, rows=GREETING, columns=columns, values=".2f", low=0, high=1, title=page(name))
            for (name, A), columns in zip(both.items(), (GREETING, REPLY), strict=True)
        )
    )
    far = reach()
    page.say("rnn", far=far[-1].distance, steps=far[-1].rnn_steps, length=LENGTH)
    header = [page("distance"), page("of_rnn"), page("of_attention"), page("steps_rnn"), page("steps_attention")]
    page.show(
        table(
            header, [[r.distance, f"{r.rnn:.1e}", f"{r.attention:.3f}", r.rnn_steps, r.attention_steps] for r in far]
        )
    )  # fmt: skip
    names = [str(r.distance) for r in far]
    page.show(
        bars([r.rnn for r in far], names, form=".1e", width=22, title=page("bars_rnn")),
        bars([r.attention for r in far], names, form=".3f", width=22, title=page("bars_attention")),
    )
    page.say(
        "fades", first=far[0].distance, last=far[-1].distance, rnn=far[-1].rnn / far[0].rnn,
        attention=far[-1].attention / far[0].attention, radius=RADIUS,
    )  # fmt: skip
    shape, rows = shapes()
    page.close(TRY, {"shape": by(shape), "rows": rows}, q_len=ASKING, k_len=ASKED)
