"""M1, heads and blocks: several A side by side, the block made of them, who asks whom, and why not an RNN.

The RNN is h_t = tanh(h_(t-1) W + x_t U) with random W of spectral radius RADIUS. What is measured on both: how much the last
output changes with an input so many places back (the norm of that Jacobian), and how many steps lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import bars, table
from .matrix import DIM, HEADS, MODEL_DIM, TOKENS, V_DIM, by, inputs, project
from .page import Page, Words
from .vectors import draw, embed, head, weight

GREETING, REPLY = ("你", "好"), ("Hello", "World")
CROSS_DIM, HEAD_DIM = 16, 8
LENGTH, DISTANCES = 64, (1, 2, 4, 8, 16, 32, 63)
WIDTH, RADIUS, SEQUENCES = 8, 0.9, 16

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


def block(x: Tensor) -> Tensor:
    """A transformer block (no dropout: nothing trains here)."""
    norm = torch.nn.functional.layer_norm
    h = norm(x, x.shape[-1:])
    A = rg.attention(project(h, "W_Q", DIM), project(h, "W_K", DIM), mask=rg.causal)
    out = (A @ project(h, "W_V", V_DIM))[0].movedim(0, 1).flatten(1)
    x = x + out @ weight("W_O", HEADS * V_DIM, MODEL_DIM)
    h = norm(x, x.shape[-1:]) @ weight("W_1", MODEL_DIM, 4 * MODEL_DIM)
    return x + torch.nn.functional.gelu(h) @ weight("W_2", 4 * MODEL_DIM, MODEL_DIM)


def looks() -> dict[str, rg.AttentionMatrix]:
    """Self-attention: the greeting looks at itself. Cross-attention: it looks at the reply. The same W, untrained."""
    w_q, w_k = weight("W_Q", CROSS_DIM, HEAD_DIM), weight("W_K", CROSS_DIM, HEAD_DIM)
    x1, x2 = embed(GREETING, CROSS_DIM), embed(REPLY, CROSS_DIM)
    return {
        "self": rg.attention(head(x1 @ w_q), head(x1 @ w_k))[0, 0],
        "cross": rg.attention(head(x1 @ w_q), head(x2 @ w_k))[0, 0],
    }


def rnn(x: Tensor) -> Tensor:
    """h_T of x [length, WIDTH]: one step after the other."""
    w = draw("recurrent", WIDTH, WIDTH)
    w = w * RADIUS / torch.linalg.eigvals(w).abs().max()
    u = weight("input", WIDTH, WIDTH)
    h = torch.zeros(WIDTH, dtype=x.dtype)
    for row in x:
        h = torch.tanh(h @ w + row @ u)
    return h


def attend(x: Tensor) -> Tensor:
    """The last row of causal self-attention over x: one look at everything."""
    q, k, v = (head(x @ weight(name, WIDTH, WIDTH)) for name in ("W_Q", "W_K", "W_V"))
    return (rg.attention(q, k, mask=rg.causal) @ v)[0, 0, -1]


def reach() -> list[Reach]:
    """The norm of the Jacobian of the last output in the input of each place; the mean over random sequences."""

    def norms(model: Callable[[Tensor], Tensor]) -> Tensor:
        found = []
        for n in range(SEQUENCES):
            x = draw(f"sequence {n}", LENGTH, WIDTH)
            found.append(torch.autograd.functional.jacobian(model, x).movedim(1, 0).flatten(1).norm(dim=-1))
        return torch.stack(found).mean(0)

    by_rnn, by_attention = norms(rnn), norms(attend)
    return [Reach(d, float(by_rnn[-1 - d]), float(by_attention[-1 - d]), d, 1) for d in DISTANCES]


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
