"""Two traces, head by head: how far apart their A's are.

    distance    total variation, half the sum over keys of |A - B|: 0 to 1, the mean over queries
    largest     the same, at the query where it is largest (`at`)
    divergence  Jensen-Shannon, in nats: 0 to log 2, the mean over queries

Both A's are read by strips of rows: memory is linear in length. A sink's share counts as that of one more key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..progress import Callback, reporting
from .tables import Table

if TYPE_CHECKING:
    from .looks import Look, Trace

#: weights held at a time
STRIP = 1 << 21


def compare(ours: Trace, theirs: Trace, progress: Callback | bool | None) -> Table:
    """A row for each layer and head."""
    pairs = _pairs(ours, theirs)
    rows: list[dict[str, Any]] = []
    total = sum(max(1, look.q_len) for look, _, _ in pairs)
    done = 0
    several = any(look.run for look, _, _ in pairs)
    with reporting(progress, "comparing") as report:
        for look, a, b in pairs:
            apart, js = [], []
            A, B = ours._matrix(a), theirs._matrix(b)
            step = max(1, STRIP // max(1, A.shape[0] * A.shape[1] * look.k_len))
            for first in range(0, look.q_len, step):
                part = slice(first, min(first + step, look.q_len))
                one, other = _rows(A, part), _rows(B, part)
                apart.append((one - other).abs().sum(-1) / 2)
                entropy = [torch.special.entr(x).sum(-1) for x in ((one + other) / 2, one, other)]
                js.append((entropy[0] - (entropy[1] + entropy[2]) / 2).clamp(min=0))
                if report is not None:
                    report(done + part.stop, total)
            done += max(1, look.q_len)
            rows += _found(look, torch.cat(apart, -1), torch.cat(js, -1), several)
    return Table(rows)


def _rows(A: AttentionMatrix, rows: slice) -> Tensor:
    """Weights of some rows, with what the sink takes as a last column."""
    weights = A.block(rows, slice(None), force=True).double()
    if A._description.sink is None:
        return weights
    seen = A._whole_lse()[:, :, rows] > -torch.inf
    return torch.cat([weights, ((1 - weights.sum(-1)).clamp(min=0) * seen).unsqueeze(-1)], dim=-1)


def _found(look: Look, apart: Tensor, js: Tensor, several: bool) -> list[dict[str, Any]]:
    rows = []
    for n, head in enumerate(look.heads):
        mine = apart[:, n]
        worst = mine.amax(0)  # over the batch
        rows.append({
            "layer": look.layer, "head": head, "stack": look.stack, "kind": look.kind,
            "run": look.run if several else None,
            "distance": float(mine.mean()), "largest": float(worst.max()), "at": int(worst.argmax()),
            "divergence": float(js[:, n].mean()),
        })  # fmt: skip
    return rows


def _pairs(ours: Trace, theirs: Trace) -> list[tuple[Look, int, int]]:
    """Looks of the same place and the same shape."""
    found = [{look[1:5]: (at, look) for at, look in zip(t._at, t.looks, strict=True)} for t in (ours, theirs)]
    for here, there, whose in ((found[0], found[1], "the other trace"), (found[1], found[0], "this trace")):
        if missing := [look for key, (_, look) in here.items() if key not in there]:
            raise ValueError(f"compare: {_name(missing[0])} is not in {whose}")
    pairs = []
    for key, (at, look) in found[0].items():
        other_at, other = found[1][key]
        if look[5:] != other[5:]:
            raise ValueError(
                f"compare: {_name(look)} has {_shape(look)}, in the other trace {_shape(other)}; "
                "only A's of one shape can be compared"
            )
        pairs.append((look, at, other_at))
    return pairs


def _name(look: Look) -> str:
    run = f", run {look.run}" if look.run else ""
    return f"layer {look.layer} ({look.stack}, {look.kind}{run})"


def _shape(look: Look) -> str:
    return f"{look.batch} rows, heads {list(look.heads)}, {look.q_len} x {look.k_len}"
