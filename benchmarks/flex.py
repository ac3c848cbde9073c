"""The cases in FlexAttention: score_mod for each term, block masks for causal ones, compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from setting import Setting, Way
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

#: FlexAttention's own choice first; smaller tiles where that asks for more shared memory than there is
SMALLER = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
    "num_stages": 1,
}
OPTIONS: tuple[dict | None, ...] = (None, SMALLER)


def way(s: Setting, compiled: bool = True, options: dict | None = None) -> Way | str:
    """FlexAttention for this case: something to call, or the reason why it has none."""
    if s.case.term not in MODS:
        return "no score_mod without an N x N tensor or a product inside it"
    block_mask = None
    if s.case.causal:
        block_mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, s.q.shape[2], s.k.shape[2], device=str(s.device)
        )
    run = flex_attention
    if compiled:
        torch._dynamo.reset()  # nothing that another case compiled stands in the way
        for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
            if hasattr(torch._dynamo.config, limit):
                setattr(torch._dynamo.config, limit, 1000)
        run = torch.compile(flex_attention, dynamic=False)
    make = MODS[s.case.term]
    return lambda: run(
        s.q, s.k, s.v, score_mod=make(s), block_mask=block_mask, scale=s.scale, kernel_options=options
    )  # fmt: skip


def plain(s: Setting) -> None:
    return None


def alibi(s: Setting) -> Callable:
    slopes, start = s.position.readout[:, 0], s.q_start
    return lambda score, b, h, i, j: score - slopes[h] * (i - j + start).abs()


def buckets(s: Setting) -> Callable:
    """One look-up for the bucket, which is fixed, and one in the learned table."""
    from today import displacements

    table, shift = s.position.readout, s.k.shape[2] - 1  # bins begin at the smallest displacement met
    bins = s.position.features.index(displacements(s))
    return lambda score, b, h, i, j: score + table[h, bins[i - j + shift]]


def learned(s: Setting) -> Callable:
    table, shift = s.position.readout, s.k.shape[2] - 1
    return lambda score, b, h, i, j: score + table[h, i - j + shift]


def grid(s: Setting) -> Callable:
    rows, columns = s.case.grid
    table = s.position.readout

    def mod(score, b, h, i, j):
        down, right = i // columns - j // columns + rows - 1, i % columns - j % columns + columns - 1
        return score + table[h, down * (2 * columns - 1) + right]

    return mod


def class_grid(s: Setting) -> Callable:
    rows, columns = s.case.grid
    table, cells = s.position.readout, (2 * rows - 1) * (2 * columns - 1)

    def mod(score, b, h, i, j):
        a, c = (i - 1).clamp(min=0), (j - 1).clamp(min=0)
        down, right = a // columns - c // columns + rows - 1, a % columns - c % columns + columns - 1
        inside = down * (2 * columns - 1) + right
        alone = torch.where(i > 0, cells + 1, torch.where(j > 0, cells, cells + 2))
        return score + table[h, torch.where((i > 0) & (j > 0), inside, alone)]

    return mod


def sam(s: Setting) -> Callable:
    from today import axis_products

    by_row, by_column = axis_products(s)
    columns = s.case.grid[1]
    return lambda score, b, h, i, j: score + by_row[b, h, i, j // columns] + by_column[b, h, i, j % columns]


def shaw(s: Setting) -> Callable:
    clip = s.position.features.bins.left
    by_bin = (s.q * s.position.scale) @ s.position.features.values.to(s.dtype).mT
    return lambda score, b, h, i, j: score + by_bin[b, h, i, (i - j).clamp(-clip, clip) + clip]


MODS = {
    "plain": plain, "t5": buckets, "alibi": alibi, "learned": learned, "swin": grid, "beit": class_grid, "sam": sam,
    "shaw": shaw,
}  # fmt: skip
