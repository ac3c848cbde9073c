"""What is asked of one head, computed: a pair, a row, a column, profiles, a grid. Plain data that JSON can hold.

Everything comes from A's own methods or from the map's passes, so it is what the API gives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...masks import keys, offset
from ...matrix import AttentionMatrix
from ...summaries import Entropy, Share, TopK
from ..atlas import Atlas
from ..order import nearest
from ..pools import Cancelled
from .doing import Met
from .sources import Seen
from .work import Stop

#: bins of a profile, entropies and received mass; keys of a row at the most; cells of a grid, a side
BINS, TOP, SIDE = 2048, 1000, 128
#: pairs up to which every share of a head is computed at once, by a pass of the plain kind
FEW = 1 << 23
#: shares of a head, and all that is told with its small picture
SHARES = ("self", "previous", "first", "induction", "sink", "toeplitz")
STATISTICS = (*SHARES, "entropy", "spread")


def number(x: float) -> float | None:
    """A number as JSON knows it; none for infinities and NaN."""
    return x if math.isfinite(x) else None


def single(name: str, x: int, length: int) -> int:
    if not 0 <= x < length:
        raise ValueError(f"{name}: expected a number from 0 to {length - 1}, found {x}")
    return x


def cell(atlas: Atlas, seen: Seen, head: int, i: int, j: int, stop: Stop) -> dict[str, Any]:
    """One pair: weight, logit with its parts, rank in its row, and |A v_j| as a share of what all keys gave."""
    single("i", i, atlas.q_len), single("j", j, atlas.k_len)
    A = atlas.of_rows(slice(i, i + 1), stop)
    told = A.explain(i, j)
    with torch.no_grad():
        logits = A.logits[i, :]
        before = (logits > logits[j]) | ((logits == logits[j]) & (torch.arange(len(logits), device=logits.device) < j))
        share = None
        v = seen.values()
        if v is not None and v.shape[-1]:
            value = v[seen.look.heads.index(head) * len(v) // len(seen.look.heads)]
            gave = A.block(i, slice(None), force=True).double() * value.double().norm(dim=-1)
            share = float(gave[j] / gave.sum()) if bool(gave.any()) else None
    return {
        "weight": number(told.weight), "logit": number(told.logit), "lse": number(told.lse), "visible": told.visible,
        "parts": [{"name": name, "value": number(x)} for name, x in told.parts.items()],
        "rank": int(before.sum()) + 1, "share_of_output": None if share is None else number(share),
    }  # fmt: skip


def row(atlas: Atlas, i: int, top: int) -> dict[str, Any]:
    """The strongest keys of a query."""
    single("i", i, atlas.q_len)
    if not 1 <= top <= TOP:
        raise ValueError(f"top: expected a number from 1 to {TOP}, found {top}")
    found, entropy = atlas.A.window(slice(i, i + 1), slice(None), TopK(top), Entropy())
    pairs = [(int(j), float(w)) for j, w in zip(found.indices[0], found.weights[0], strict=True) if int(j) >= 0]
    return {
        "keys": [{"j": j, "weight": w} for j, w in pairs],
        "entropy": number(float(entropy[0])),
        "sum_shown": sum(w for _, w in pairs),
    }


def column(atlas: Atlas, j: int, top: int) -> dict[str, Any]:
    """The queries that look most at a key, of those whose rows are done."""
    single("j", j, atlas.k_len)
    if not 1 <= top <= TOP:
        raise ValueError(f"top: expected a number from 1 to {TOP}, found {top}")
    weights, known = atlas.column(j)
    weights = weights.masked_fill(~known, -1.0)
    order = weights.argsort(descending=True, stable=True)[:top]
    pairs = [(int(i), float(weights[i])) for i in order if float(weights[i]) > 0]
    return {
        "queries": [{"i": i, "weight": w} for i, w in pairs],
        "received": float(weights.clamp(min=0).sum(dtype=torch.float64)),
        "sum_shown": sum(w for _, w in pairs),
        "exact": bool(known.all()),
    }


def weights(atlas: Atlas, i: int, first: int, count: int | None, cells: int | None, stop: Stop) -> Tensor:
    """Weights of a query on some keys, or pooled to a number of cells (sums)."""
    single("i", i, atlas.q_len), single("from", first, atlas.k_len)
    last = atlas.k_len if count is None else min(first + max(0, count), atlas.k_len)
    with torch.no_grad():
        found = atlas.of_rows(slice(i, i + 1), stop).block(i, slice(first, last), force=True).float().cpu()
    if cells is not None and 0 < cells < len(found):
        found = pooled(found, cells)
    return found


def pooled(x: Tensor, bins: int, *, mean: bool = False) -> Tensor:
    """Sums (or means) of as many neighbours as it takes to have at most so many."""
    size = -(-x.shape[-1] // bins)
    if size <= 1:
        return x
    sums = torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)
    if not mean:
        return sums
    counts = torch.full((sums.shape[-1],), float(size), dtype=x.dtype)
    counts[-1] = x.shape[-1] - size * (sums.shape[-1] - 1)
    return sums / counts


def profile(atlas: Atlas, shares: dict[str, float | None]) -> dict[str, Any]:
    """Mass per displacement, entropy per query, received mass per key; estimates from a sample until they are exact."""
    sums = atlas.sums
    with sums.changed:
        progress, exact = sums.progress, sums.exact
        most = max(progress, 1e-9)  # a sample stands for all rows
        mass, received = None if sums.profile is None else sums.profile / most, sums.received / most
    entropy, done = atlas.entropy()
    if not bool(done.all()):
        entropy = entropy[nearest(done)]
    grid, line, size = None, None, None
    if mass is not None and mass.dim() == 1:
        line, size = pooled(mass, BINS).tolist(), max(1, -(-len(mass) // BINS))
    elif mass is not None:
        pool, cells = squares(mass)
        grid = {"shape": list(cells.shape), "mass": cells.flatten().tolist(), "pool": pool}
    return {
        "first": first_displacement(atlas.A), "mass": line, "bin": size, "grid": grid,
        "entropy": [number(x) for x in pooled(entropy, BINS, mean=True).tolist()],
        "received": [number(x) for x in pooled(received, BINS).tolist()],
        "shares": shares, "exact": exact, "progress": progress,
    }  # fmt: skip


def first_displacement(A: AttentionMatrix) -> int:
    """The smallest displacement there is: that of the first query to the last key."""
    (query,), (key,) = A.starts
    return query - (key + A.shape[-1] - 1)


def grid(atlas: Atlas, seen: Seen, i: int, stop: Stop) -> dict[str, Any]:
    """The weights of a query where its keys are, and its own cell. Of a large grid, sums of `pool` x `pool` cells."""
    geometry = seen.geometry()
    if geometry is None:
        raise ValueError("grid: these tokens are not on a grid of two axes")
    found = weights(atlas, i, 0, None, None, stop)
    (high, wide), first = geometry["k"], geometry["unplaced"] - geometry["k_start"]
    board = torch.zeros(high * wide)
    there = range(max(first, 0), min(first + high * wide, len(found)))  # keys may be some of the grid's tokens
    board[there.start - first : there.stop - first] = found[there.start : there.stop]
    at = i + geometry["q_start"] - geometry["q_unplaced"]
    pool, cells = squares(board.view(high, wide))
    return {
        "weights": cells.flatten().tolist(), "pool": pool, "alone": found[: max(first, 0)].tolist(),
        "cell": None if at < 0 else [at // geometry["q"][1], at % geometry["q"][1]], **geometry,
    }  # fmt: skip


def squares(x: Tensor) -> tuple[int, Tensor]:
    """Sums of as many neighbours, p x p, as it takes to have at most SIDE a side; and that p."""
    pool = max(1, -(-max(x.shape) // SIDE))
    if pool == 1:
        return 1, x
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % pool, 0, -x.shape[0] % pool))
    return pool, x.unflatten(1, (-1, pool)).unflatten(0, (-1, pool)).sum((1, 3))


def shares(atlas: Atlas, stop: Stop) -> dict[str, float | None]:
    """Shares of a long head: of those pairs that lie along the diagonal, or in one column. Others would be a pass."""
    A, found = atlas.A, dict[str, float | None]()
    lse = atlas.lse.to(A.device)
    (first,) = A.window(slice(None), slice(0, 1), Share(keys(A.starts[1][0])), lse=lse)
    found["first"] = number(float(first))
    base = first_displacement(A) + A.shape[1] - 1  # key index less query index of a pair at one position
    for name, away in (("self", 0), ("previous", 1)):
        total = torch.zeros(2, dtype=torch.float64)
        step = 512 if A.device.type == "cpu" else 4096  # pairs beside the diagonal are cheaper than another launch
        for top in range(0, atlas.q_len, step):
            rows = slice(top, min(top + step, atlas.q_len))
            cols = slice(max(rows.start + base - away, 0), min(rows.stop + base - away, atlas.k_len))
            if stop():
                raise Cancelled
            if cols.stop > cols.start:
                total += A.window(rows, cols, Met(offset(away)), lse=lse[rows])[0].double().cpu()
        found[name] = number(float(total[0] / total[1].clamp(min=1)))
    return found


def statistics(seen: Seen) -> list[dict[str, Any]] | None:
    """What each head of a look does, where that is quick to say: a row of numbers a head."""
    look = seen.look
    if look.q_len * look.k_len * len(look.heads) > FEW:
        return None
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in each.items()}
        for each in seen.trace.statistics(progress=False).rows
    ]
