"""Plain PyTorch tiles: every description, any device, forward and backward; the engine that always works.

Work goes by strips (strips.py): some rows of one or more heads against all the keys they can see. A strip is small, so
memory is linear in N, and it holds whole rows, so one pass gives exact weights to the product and to every summary.
Values of pieces are in pieces.py, places and masks in places.py, gradients in gradients.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Form, Problem, product_buffer
from .gradients import Gradients, Totals, accumulate
from .pieces import content, gated, logits_of
from .places import Span, see
from .strips import Strip, drop, each_block, each_strip, ready, softmax, values_of, wide_type


def refuse(form: Form, device: str, dtype: str) -> str | None:
    """Why this engine cannot run a form: it takes them all."""
    return None


def forward(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp (eq. 19, 20): [batch, heads, q_len, v_dim] and [batch, heads, q_len]."""
    batch, heads, q_len, _ = problem.sizes
    out = product_buffer(problem, v)
    lse = problem.q.new_empty(batch, heads, q_len, dtype=wide_type(problem))
    for block in each_block(problem):
        values = values_of(v, block, heads)
        for rows, cols in each_strip(block.problem):
            logits = logits_of(block.problem, rows, cols)
            weights, total = softmax(block.problem, logits)
            lse[block.batch, block.heads, rows] = total
            weights = drop(block.problem, weights, rows, cols)
            out[block.batch, block.heads, rows] = (weights @ values[:, :, cols]).to(out.dtype)
    return out, lse


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of the operands asked for (eq. 22 to 24), from recomputed strips."""
    heads = problem.sizes[1]
    wide = wide_type(problem)
    totals = Totals(problem, v, needs, wide)
    for block in each_block(problem):
        p, values = block.problem, values_of(v, block, heads)
        grads = Gradients(p, needs)
        b_v = torch.zeros_like(values)
        for rows, cols in each_strip(p):
            logits = logits_of(p, rows, cols, masked=False)
            visible = None if p.form.mask is None else see(p, p.form.mask, rows, cols)
            shown = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
            weights, ends = softmax(p, shown)  # the rows are whole: closer than exp(logit - lse)
            ends = ends.masked_fill(ends == -torch.inf, 0.0).unsqueeze(-1)
            g = d_out[block.batch, block.heads, rows].to(wide)
            accumulate(b_v[:, :, cols], drop(p, weights, rows, cols).mT @ g)
            d_weights = drop(p, g @ values[:, :, cols].mT, rows, cols)
            # the rows are whole, so their mean gradient is summed as softmax's is, closer than through `out`
            inner = (weights * d_weights).sum(-1, keepdim=True)
            inner = inner - d_lse[block.batch, block.heads, rows].to(wide).unsqueeze(-1)
            d_logits = weights * (d_weights - inner)
            if visible is not None:
                d_logits = d_logits.masked_fill(~visible, 0.0)
            if p.form.sink >= 0:
                sink = p.operands[p.form.sink].unsqueeze(-1)
                share = torch.exp(sink - ends.squeeze(-1))
                grads.add(p.form.sink, (-share * inner.squeeze(-1)).sum(-1))
            if p.form.softcap is not None:
                d_logits = d_logits * (1 - (logits / p.form.softcap).square())
            grads.pull(d_logits, rows, cols)
        totals.add(block, grads, b_v)
    return totals.finish()


def tile(problem: Problem, rows: Span, cols: Span) -> Tensor:
    """Logits of some rows and columns, -inf where masked: what softmax sees (eq. 18). Differentiable as it stands."""
    return logits_of(ready(problem), rows, cols)


def reduce(
    problem: Problem,
    summaries: Sequence[Any],
    progress: Callable[[int, int], None] | None = None,
    lse: Tensor | None = None,
) -> list[Any]:
    """One pass over A for several summaries: each one's state after every strip has been shown to it.

    `lse` is that of the rows, where it is known; then the keys may be a part of them (`Problem.part`).
    """
    batch, heads, q_len, _ = problem.sizes
    states = [summary.start(problem) for summary in summaries]
    done, total = 0, batch * heads * q_len
    for block in each_block(problem):
        for rows, cols in each_strip(block.problem):
            strip = Strip(block, rows, cols, None if lse is None else lse[block.batch, block.heads, rows])
            for summary, state in zip(summaries, states, strict=True):
                summary.update(state, strip)
            done += strip.logits.shape[0] * strip.logits.shape[1] * strip.logits.shape[2]
            if progress is not None:
                progress(done, total)
    return states


def explain(problem: Problem, row: int, col: int) -> dict[str, Tensor]:
    """What each part gives to the logits of one pair, before softcap and mask: label to [batch, heads]."""
    p = ready(problem)
    rows, cols = slice(row, row + 1), slice(col, col + 1)
    parts = {"content": content(p, rows, cols)[..., 0, 0]}
    for piece in p.form.pieces:
        value = gated(piece, p, rows, cols).expand(*p.q.shape[:2], 1, 1)[..., 0, 0]
        parts[piece.label] = parts[piece.label] + value if piece.label in parts else value
    return parts
