"""Attention rollout (Abnar and Zuidema 2020): what flows from the tokens to a query through all layers.

    R = (A_L + I)/2 ... (A_2 + I)/2 (A_1 + I)/2            A_l: the mean over the heads of layer l

For some queries these are rows times matrices: from the last layer to the first, r becomes (r + r A_l)/2. Each A_l is
read by strips of rows and never stored, and rows that r does not touch are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..indexing import numbers
from ..matrix import AttentionMatrix
from ..progress import Callback, reporting

if TYPE_CHECKING:
    from .looks import Trace

#: numbers of a rollout of all queries before it must be asked for by rows; weights held at a time
LIMIT, STRIP = 1 << 24, 1 << 22


def rollout(trace: Trace, queries: Sequence[int] | Tensor | None, progress: Callback | bool | None) -> Tensor:
    """Rows of R for some queries, or for all: [batch, queries, k_len]."""
    order = _layers(trace)
    look = trace._look(order[0])
    batch, length = look.batch, look.k_len
    if queries is None:
        if batch * length * length > LIMIT:
            raise ValueError(
                f"rollout: of all {length} queries it would be {batch * length * length:,} numbers; name some, as in "
                "trace.rollout([0, 5, 7])"
            )
        at = torch.arange(length)
    else:
        at = numbers(queries, length, torch.device("cpu"))
    r = torch.zeros(batch, len(at), length)
    r[:, torch.arange(len(at)), at] = 1.0
    with reporting(progress, "rollout") as report:
        for n, place in enumerate(reversed(order)):
            r = (r + _through(r, trace._matrix(place))) / 2
            if report is not None:
                report(n + 1, len(order))
    return r


def _through(r: Tensor, A: AttentionMatrix) -> Tensor:
    """r times the mean over heads of A, whose rows are made to add up to one (a sink takes a share)."""
    batch, heads, q_len, k_len = A.shape
    found = torch.zeros_like(r)
    step = max(1, STRIP // max(1, batch * heads * k_len))
    touched = r.abs().amax((0, 1)) > 0
    for first in range(0, q_len, step):
        rows = slice(first, min(first + step, q_len))
        if not bool(touched[rows].any()):
            continue
        mean = A.block(rows, slice(None), force=True).float().mean(1)  # [batch, rows, k_len]
        total = mean.sum(-1, keepdim=True)
        found += (r[:, :, rows] * (total > 0).mT) @ (mean / total.masked_fill(total == 0, 1.0))
        blind = r[:, :, rows] * (total == 0).mT  # a query that sees nothing keeps what it has
        found[:, :, rows] += blind
    return found


def _layers(trace: Trace) -> list[int]:
    """The self-attention of one stack, layer by layer."""
    places = {}
    for at, look in zip(trace._at, trace.looks, strict=True):
        if look.kind == "self":
            if look.layer in places:
                raise ValueError(
                    f"rollout: layer {look.layer} has several looks; "
                    "choose with trace.encoder, .decoder or .only(run=...)"
                )
            places[look.layer] = (at, look)
    order = [places[layer] for layer in sorted(places)]
    if sorted(places) != list(range(len(places))) or not places:
        raise ValueError(f"rollout: expected every layer from 0 on, found {sorted(places)}")
    sizes = {(look.batch, look.q_len, look.k_len) for _, look in order}
    if len(sizes) > 1 or any(q_len != k_len for _, q_len, k_len in sizes):
        raise ValueError(f"rollout: expected layers of one length, each looking at itself, found {sorted(sizes)}")
    return [at for at, _ in order]
