"""The CPU engine: compiled attention that adds relative terms where the scores are; PyTorch's fused kernel beside it.

Where a C compiler is at hand, the forward pass is our own, for many rows (attending.py, attend.c) and for few
(decoding.py, decode.c), and so are the gradients of what learns (gradients.py) and the summaries (looking.py), by the
passes of native.c. For what is not compiled, and where nothing learns on the way back, PyTorch's kernel is fed with
the bias (feeding.py). Tiles are the tiled engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...normal import Form, Problem, each_head, product_buffer
from .. import tiled
from ..tiled.strips import columns, each_block, values_of, wide_type
from . import native
from .attending import FEW, attend
from .decoding import decode, is_few
from .feeding import Feed, blind_rows, block_bias, blocks_of_rows, feed, fused, own_table, row_blocks, toeplitz
from .gradients import fused_backward, learned_backward
from .looking import reduce as reduce
from .panels import scratch
from .sources import Layer, blocks_of_heads, is_compiled, own_of, rows_at_once, sources_of

tile = tiled.tile


def refuse(form: Form, device: str, dtype: str) -> str | None:
    """Why this engine cannot run a form."""
    if device != "cpu":
        return f"runs on the CPU only, q is on {device}"
    if form.content[0] != "dot":
        return "the fused kernel knows dot products only"
    if form.softcap is not None:
        return "the fused kernel has no softcap"
    if form.dropout and (dtype == "float64" or native.missing() is not None):
        why = "compute in float32" if dtype == "float64" else f"are missing ({native.missing()})"
        return f"only the compiled passes drop the same weights for the same A, and they {why}"
    if form.scale >= 0:
        return "the fused kernel takes one number as its scale"
    return None


def note() -> str | None:
    """What a plan should say of this engine on this machine."""
    reason = native.missing()
    return None if reason is None else f"no compiled passes ({reason}): PyTorch's fused kernel is fed instead, slower"


def forward(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """A @ v and the log-sum-exp."""
    heads, q_len = problem.q.shape[1:3]
    if not problem.q.numel() or not problem.k.shape[2] or not (v.shape[-1] or is_compiled(problem)):
        return tiled.forward(problem, v)
    few = q_len < FEW and not problem.form.dropout and is_compiled(problem) and is_few(problem, v)
    found = decode(problem, v) if few else None
    out, lse, fine = _forward(problem, v) if found is None else found
    odd = [] if fine else _odd_batch_rows(problem, lse)
    if problem.form.sink >= 0:
        with_sink = torch.logaddexp(lse, problem.operands[problem.form.sink].unsqueeze(-1).to(lse.dtype))
        out *= torch.exp(lse - with_sink).unsqueeze(-1).to(out.dtype)
        lse = with_sink
    for row in odd:
        some = slice(row, row + 1)
        out[some], lse[some] = tiled.forward(problem.select(some, slice(0, heads)), v[some])
    return out, lse


def _forward(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The product and lse of many rows, before the sink; and whether NaN and infinity are surely as they should be."""
    batch, heads, q_len, _ = problem.sizes
    drops = problem.form.dropout > 0
    compiled = is_compiled(problem) and (q_len >= FEW or drops)
    if not (v.shape[-1] or compiled):
        return (*_unsunk(problem, v), True)
    fed = feed(problem)
    if q_len == 1 and not drops and fed.within is None and _whole(problem, fed, v):
        return (*_forward_once(problem, v, fed), False)
    out = product_buffer(problem, v)
    lse = problem.q.new_empty(batch, heads, q_len, dtype=wide_type(problem))
    laid, sources, rest = sources_of(problem, fed) if compiled else (fed, [], [])
    ours = compiled and not rest and laid.mask is None
    if ours:
        attend(problem, v, laid, sources, out, lse)
    elif not v.shape[-1] or drops:  # the fused kernel would drop others
        return (*_unsunk(problem, v), True)
    elif _whole(problem, fed, v):
        _forward_whole(problem, v, fed, out, lse)
    else:
        _forward_by_blocks(problem, v, fed, out, lse)
    blind = blind_rows(problem, fed)
    if blind is not None:
        out.masked_fill_(blind.unsqueeze(-1), 0.0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse, ours and math.isfinite(float(lse.sum()))


def _unsunk(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """By tiles, without the sink, which comes after."""
    return tiled.forward(problem._replace(form=problem.form._replace(sink=-1)), v)


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of the operands asked for."""
    finite = all(bool(x.sum().isfinite()) for x in (problem.q, problem.k, v, d_out))
    drops = problem.form.dropout > 0
    if not finite or 0 in problem.sizes or not v.shape[-1] or (drops and not is_compiled(problem)):
        return tiled.backward(problem, v, out, lse, d_out, d_lse, needs)
    fed = feed(problem)
    blind = blind_rows(problem, fed)
    simple = not drops and _whole(problem, fed, v) and (blind is None or not bool(blind.any()))
    if simple and not any(needs) and not bool(d_lse.any()):
        return fused_backward(problem, fed, v, out, lse, d_out)
    return learned_backward(problem, fed, v, lse, d_out, d_lse, needs)


def _odd_batch_rows(problem: Problem, lse: Tensor) -> list[int]:
    """Batch rows with NaN or infinity that a kernel treats otherwise than plain attention.

    A mask is a bias of -inf here, and -inf + NaN is NaN: a masked key must not reach a row that cannot see it. In our
    own kernels it reaches the log-sum-exp too, and a finite one says that all is well. A row of nothing but NaN may
    come back from the fused kernel as zeros, with lse 0.
    """
    odd: set[int] = set()
    if problem.form.mask is not None:
        odd.update((~problem.k.sum((1, 2, 3)).isfinite()).nonzero().flatten().tolist())
    if bool((lse == 0).any()):
        odd.update((~problem.q.sum((1, 2, 3)).isfinite()).nonzero().flatten().tolist())
    return sorted(odd)


def _whole(problem: Problem, fed: Feed, v: Tensor) -> bool:
    """Nothing but a table and a mask that it holds, in a dtype that the fused kernel is quick in."""
    dtype = problem.q.dtype
    return not fed.pieces and fed.mask is None and dtype == v.dtype and dtype != torch.float16


def _forward_once(problem: Problem, v: Tensor, fed: Feed) -> tuple[Tensor, Tensor]:
    """One query that sees every key, as in decoding: a group's heads are rows of one call, and nothing is copied."""
    q, k = problem.q, problem.k
    batch, heads, _, dim = q.shape
    shared = min(k.shape[1], v.shape[1])
    if k.shape[1] != v.shape[1]:  # values for every head, keys for groups, or the other way round
        shared = heads
        k, v = (each_head(x, heads).expand(-1, heads, -1, -1) for x in (k, v))
    rows = q.reshape(batch, shared, heads // shared, dim)
    bias = None
    if fed.table is not None:  # entry j is key j's
        bias = fed.table.expand(batch, heads, -1).unflatten(1, (shared, -1))
    out, lse = fused(rows, k, v, bias, problem.scale)
    made = product_buffer(problem, v)
    if out.shape == made.shape and out.stride() == made.stride():
        return out, lse
    return made.copy_(out.reshape(made.shape)), lse.reshape(batch, heads, 1)


def _forward_whole(problem: Problem, v: Tensor, fed: Feed, out: Tensor, lse: Tensor) -> None:
    """All heads at once, a group's heads one after the other, nothing copied."""
    q, k, heads = problem.q, problem.k, problem.q.shape[1]
    shared = min(k.shape[1], v.shape[1])
    group = heads // shared
    for member in range(group):
        each = slice(member, heads, group)
        keys, values = (x if x.shape[1] == shared else x[:, each] for x in (k, v))
        for rows, cols, causal in row_blocks(problem, fed):
            some = keys[:, :, cols], values[:, :, cols]
            if fed.table is None or causal:
                parts = fused(q[:, each, rows], *some, None, problem.scale, causal=causal)
            else:
                table = fed.table if fed.table.shape[1] == 1 else fed.table[:, each]
                bias = toeplitz(table, q.shape[2], rows, cols).expand(q.shape[0], q[:, each].shape[1], -1, -1)
                turned = fused(q[:, each, rows].flip(2), *some, bias, problem.scale)
                parts = turned[0].flip(2), turned[1].flip(2)
            out[:, each, rows], lse[:, each, rows] = parts


def _forward_by_blocks(problem: Problem, v: Tensor, fed: Feed, out: Tensor, lse: Tensor) -> None:
    """Anything else: a few heads at a time, some rows at a time, the bias laid out for each block."""
    if is_compiled(problem):
        _forward_laid(problem, v, fed, out, lse)
        return
    for block in each_block(problem):
        p, values = block.problem, values_of(v, block, problem.q.shape[1])
        heads = p.q.shape[1]
        k, values = (x.expand(-1, heads, -1, -1) for x in (p.k, values))
        table = own_table(fed.table, block.batch, block.heads)
        for rows in blocks_of_rows(p):
            cols = columns(p, rows)
            bias = block_bias(p, fed, table, rows, cols) if cols.stop > cols.start else None
            at = block.batch, block.heads
            _feed_block(fed, p.q, k, values, bias, p.scale, rows, cols, out[at], lse[at])


def _forward_laid(problem: Problem, v: Tensor, fed: Feed, out: Tensor, lse: Tensor) -> None:
    """The same with compiled layers."""
    laid, sources, rest = sources_of(problem, fed)
    for block in blocks_of_heads(problem):
        layer, own = Layer(problem, laid, sources, rest, block), own_of(problem, block)
        q = own(problem.q)
        k, values = (own(x).expand(*layer.planes, -1, -1) for x in (problem.k, v))
        step = rows_at_once(problem, layer.planes[0] * layer.planes[1])
        for first in range(0, q.shape[2], step):
            rows = slice(first, min(first + step, q.shape[2]))
            cols = columns(problem, rows)
            bias = scratch.take("bias", (*layer.planes, rows.stop - rows.start, cols.stop - cols.start))
            there = cols.stop > cols.start and layer.bias(bias, rows, cols)
            at = block.batch, block.heads
            _feed_block(fed, q, k, values, bias if there else None, problem.scale, rows, cols, out[at], lse[at])


def _feed_block(
    fed: Feed, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, rows: slice, cols: slice,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    if cols.start == cols.stop:
        out[:, :, rows], lse[:, :, rows] = 0.0, -torch.inf
        return
    some, total = fused(q[:, :, rows], k[:, :, cols], v[:, :, cols], bias, scale)
    if fed.mask is not None:
        assert bias is not None
        blind = bias.amax(-1) == -torch.inf
        some, total = some.masked_fill(blind.unsqueeze(-1), 0.0), total.masked_fill(blind, -torch.inf)
    out[:, :, rows], lse[:, :, rows] = some.to(out.dtype), total
