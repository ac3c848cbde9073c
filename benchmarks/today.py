"""What a user has today for the same term, each in its best form.

bias    SDPA with the term as an N x N bias, made at each call: static tables and q·R(i - j) by reshape-skew
        (no gather forward, no scatter backward)
ready   the same with a static bias made once and kept: forward only
eager   softmax(q kᵀ + bias) v in plain PyTorch, A stored; summaries from the stored A
flex    FlexAttention, compiled (GPU)

All read the parameters of the case's own term, so that they can be compared number by number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from setting import Setting, Way
from torch import Tensor
from torch.nn import functional as F

#: tokens from which FlexAttention is not measured
FAR = 65536


def ways(s: Setting) -> dict[str, Way | str]:
    """Every peer of a case: something to call, or the reason why there is nothing."""
    found: dict[str, Way | str] = {}
    if s.case.asks:
        found["eager"] = lambda: summarized(s)
    else:
        if s.position is not None:
            found["bias"] = lambda: fed(s, whole_bias(s))
            found["ready"] = ready(s) if s.term.static else "the term depends on q or k"
        found["eager"] = lambda: weights(s).to(s.dtype) @ s.v
        if s.device.type == "cuda":
            from flex import way

            found["flex"] = way(s) if s.case.length < FAR else "left out at this length: its backward takes minutes"
    return {name: room(s, name) or peer for name, peer in found.items()}


def room(s: Setting, name: str) -> str:
    """Why a peer that stores N x N does not fit the device, or nothing."""
    if name == "flex":
        return ""
    batch, heads, q_len, k_len = s.case.sizes
    shared = name in ("bias", "ready") and s.term.static
    stored = (1 if shared else batch) * heads * q_len * k_len * s.q.element_size()
    if s.device.type == "cuda":
        memory = torch.cuda.get_device_properties(s.device).total_memory
    else:
        import os

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    copies = 2 if name in ("bias", "ready") else 4  # of an N x N matrix that live at once, at the least
    return f"{stored / 2**30:.0f} GiB for each N x N matrix" if copies * stored > memory else ""


def fed(s: Setting, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(s_query(s), s.k, s.v, attn_mask=bias, scale=s.scale)


def ready(s: Setting) -> Way:
    kept: list[Tensor | None] = []

    def run() -> Tensor:
        if not kept:
            with torch.no_grad():
                bias = whole_bias(s)
                kept.append(None if bias is None else bias.contiguous())
        return fed(s, kept[0])

    return run


def weights(s: Setting) -> Tensor:
    """A, stored."""
    logits = (s_query(s) * s.scale) @ s.k.mT
    bias = whole_bias(s)
    return (logits if bias is None else logits + bias).softmax(-1, dtype=torch.float32)


def whole_bias(s: Setting) -> Tensor | None:
    """The term, and the mask where there is one, as an additive [batch or 1, heads, q_len, k_len] of q's dtype."""
    bias = None if s.position is None else BIASES[s.case.term](s)
    if not s.case.causal:
        return bias
    q_len, k_len = s.q.shape[2], s.k.shape[2]
    future = torch.ones(q_len, k_len, dtype=torch.bool, device=s.device).triu(1 + k_len - q_len)
    bias = s.q.new_zeros(q_len, k_len) if bias is None else bias
    return bias.masked_fill(future, -torch.inf)


def s_query(s: Setting) -> Tensor:
    """The query that meets the key: Transformer-XL's first bias joins it."""
    if s.case.term != "xl":
        return s.q
    return s.q + s.position[0].weight.squeeze(-1).to(s.dtype)[:, None]


# N x N from tables, by reshape


def skew(table: Tensor, q_len: int, k_len: int) -> Tensor:
    """table [.., i - j + k_len - 1] as [.., q_len, k_len]: a periodic row, laid out one short of its period.

    The rows are padded to a multiple of 8, which fused kernels ask of a mask's stride.
    """
    row = table.flip(-1)
    spare = -(row.shape[-1] - 1) % 8
    row = torch.cat([row[..., q_len - 1 :], row.new_zeros(*row.shape[:-1], spare), row[..., : q_len - 1]], dim=-1)
    period = row.shape[-1]
    flat = row.unsqueeze(-2).expand(*row.shape[:-1], q_len, period).reshape(*row.shape[:-1], q_len * period)
    return flat[..., : q_len * (period - 1)].unflatten(-1, (q_len, period - 1))[..., :k_len]


def by_query(x: Tensor, rows: Tensor, q_len: int, k_len: int) -> Tensor:
    """<x_i, rows[i - j + k_len - 1]> for all pairs: one product, then the relative shift."""
    front = -(q_len - 1) % 8
    back = -(front + rows.shape[-2] - 1) % 8
    rows = F.pad(rows.flip(-2), (0, 0, front, back))
    product = x @ rows.mT  # [.., q_len, n]
    n = rows.shape[-2]
    flat = product.flatten(-2)[..., front + q_len - 1 :]
    flat = F.pad(flat, (0, max(0, q_len * (n - 1) - flat.shape[-1])))
    return flat[..., : q_len * (n - 1)].unflatten(-1, (q_len, n - 1))[..., :k_len]


def displacements(s: Setting) -> Tensor:
    """Every i - j, the smallest first: [n, 1]."""
    q_len, k_len = s.q.shape[2], s.k.shape[2]
    return torch.arange(1 - k_len, q_len, device=s.device)[:, None] + s.q_start


def line_table(s: Setting) -> Tensor:
    """A static term for every displacement: [heads, n]."""
    term = s.position
    if s.case.term == "alibi":
        return -displacements(s)[:, 0].abs() * term.readout
    return term.readout[:, term.features.index(displacements(s))]


def on_line(s: Setting) -> Tensor:
    return skew(line_table(s).to(s.dtype), s.q.shape[2], s.k.shape[2])[None]


def grid_tables(s: Setting) -> tuple[Tensor, Tensor | None]:
    """The table as [heads, 2 rows - 1, 2 columns - 1], and the class token's three entries if any."""
    rows, columns = s.case.grid
    cells = (2 * rows - 1) * (2 * columns - 1)
    table = s.position.readout.to(s.dtype)
    alone = table[:, cells:] if table.shape[-1] > cells else None
    return table[:, :cells].unflatten(-1, (2 * rows - 1, 2 * columns - 1)), alone


def on_grid(s: Setting) -> Tensor:
    rows, columns = s.case.grid
    table, alone = grid_tables(s)
    bias = skew(table, columns, columns)  # [heads, 2 rows - 1, columns, columns]
    bias = skew(bias.movedim(1, -1), rows, rows)  # [heads, columns, columns, rows, rows]
    bias = bias.permute(0, 3, 1, 4, 2).reshape(len(table), rows * columns, rows * columns)
    if alone is not None:
        n = rows * columns
        q_alone, k_alone, both = alone.split(1, dim=-1)
        top = torch.cat([both, q_alone.expand(-1, n)], dim=-1)[:, None]
        bias = torch.cat([top, torch.cat([k_alone[:, None].expand(-1, n, 1), bias], dim=-1)], dim=1)
    return bias[None]


def axis_products(s: Setting) -> tuple[Tensor, Tensor]:
    """SAM's q·R_row and q·R_col: [batch, heads, q_len, rows] and [.., columns]."""
    x = s.q.unflatten(2, s.case.grid)
    found = []
    for axis, part in enumerate(s.position.features.parts):
        n = s.case.grid[axis]
        at = torch.arange(n, device=s.device)
        rows = part.feature.values.to(s.dtype)[at[:, None] - at + n - 1]  # [n, n, dim]
        found.append(torch.einsum("bhrcd,rkd->bhrck" if axis == 0 else "bhrcd,ckd->bhrck", x, rows).flatten(2, 3))
    return found[0], found[1]


def sam(s: Setting) -> Tensor:
    by_row, by_column = axis_products(s)
    return (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(-2)


def shaw(s: Setting) -> Tensor:
    bins, values = s.position.features.bins, s.position.features.values.to(s.dtype)
    rows = values[bins.index(displacements(s))]
    return by_query(s.q * s.position.scale, rows, s.q.shape[2], s.k.shape[2])


def transformer_xl(s: Setting) -> Tensor:
    term = s.position[1]
    rows = term.features(displacements(s)).to(s.dtype)  # [n, f]
    x = (s.q + term.offset.to(s.dtype)[:, None]) * term.scale
    return by_query(x, rows @ term.weight.to(s.dtype).mT, s.q.shape[2], s.k.shape[2])


def deberta(s: Setting) -> Tensor:
    q_len, k_len = s.q.shape[2], s.k.shape[2]
    to_position, to_content = (
        (part.features.values.to(s.dtype)[:, part.features.bins.index(displacements(s))], part.scale)
        for part in (s.position[0], s.position[1])
    )
    by_position = by_query(s.q * to_position[1], to_position[0], q_len, k_len)
    by_content = by_query(s.k * to_content[1], to_content[0].flip(-2), k_len, q_len).mT
    return by_position + by_content


BIASES: dict[str, Any] = {
    "t5": on_line, "alibi": on_line, "learned": on_line, "swin": on_grid, "beit": on_grid,
    "sam": sam, "shaw": shaw, "xl": transformer_xl, "deberta": deberta,
}  # fmt: skip


# summaries of a stored A


def summarized(s: Setting) -> tuple:
    stored = weights(s)
    return tuple(STORED[name](stored) for name in s.case.asks)


def pooled(stored: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Mean and largest weight of cells x cells."""
    high, wide = (math.ceil(n / cells) for n in stored.shape[-2:])
    below, after = -stored.shape[-2] % high, -stored.shape[-1] % wide
    cut = F.pad(stored, (0, after, 0, below)) if below or after else stored
    cut = cut.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))
    return cut.sum((-3, -1)), cut.amax((-3, -1))


def profiled(stored: Tensor) -> Tensor:
    """Mass per i - j, by reshape: reversed keys, rows laid out one short of their width."""
    q_len, k_len = stored.shape[-2:]
    wide = F.pad(stored.flip(-1), (0, q_len)).flatten(-2)[..., :-q_len]
    return wide.unflatten(-1, (q_len, q_len + k_len - 1)).sum(-2)


STORED: dict[str, Any] = {
    "profile": profiled,
    "heatmap": lambda a: pooled(a, 512),
    "heatmap1024": lambda a: pooled(a, 1024),
    "received": lambda a: a.sum(-2),
    "entropy": lambda a: torch.special.entr(a).sum(-1),
    "topk": lambda a: a.topk(min(8, a.shape[-1])),
}
