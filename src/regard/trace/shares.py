"""Shares of the mass on few pairs, from those pairs alone: no pass over A is needed where log-sum-exp is known.

    self, previous    tiles along the diagonal
    first             one column
    induction         for each token that comes again: its places as queries, the places after them as keys
    sink              exp(sink - lse)

They are what `Share` and `SinkShare` of `regard.summaries` say: the mean over those queries that see such a pair (or,
of the sink, over all). `real` [batch, q_len] leaves out queries that do not count, such as padding. For tokens in a
row; on grids and between points the summaries are asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import Line
from ..matrix import AttentionMatrix
from .passes import _seen

#: rows of a tile on the diagonal, logits held at a time, and queries of rare tokens that share a tile
ROWS, BLOCK, TOGETHER = 256, 1 << 22, 128


def applies(A: AttentionMatrix) -> bool:
    """Whether A's queries and keys stand in a row, and its mask is one of places."""
    d = A._description
    return isinstance(d.q_geometry, Line) and (d.mask is None or not d.mask.scored)


class Shares:
    """The shares of one A [batch, heads, q_len, k_len], each [batch, heads].

    `row` says that A is that row of a larger batch: its description is still the whole batch's.
    """

    def __init__(self, A: AttentionMatrix, real: Tensor | None = None, row: int | None = None):
        self.A, self.lse, self.row = A, A.lse, row
        self.batch, self.heads, self.q_len, self.k_len = A.shape
        self.real = torch.ones(1, 1, self.q_len, dtype=torch.bool) if real is None else real[:, None]

    def _logits(self, rows: slice | Tensor, cols: slice | Tensor, batch: int | None = None) -> Tensor:
        A = self.A if batch is None else self.A[batch : batch + 1]
        return A._block(rows, cols, force=True, logits=True)

    def _share(self, mass: Tensor, sees: Tensor) -> Tensor:
        """Mass and whether a pair is seen, of each query, as a share."""
        counted = (sees & self.real).to(mass.dtype)
        return (mass * counted).sum(-1) / counted.sum(-1).clamp(min=1)

    def near(self, *back: int) -> list[Tensor]:
        """The key at the query's own place, less each of these."""
        found = [[self.lse.new_zeros(self.batch, self.heads, self.q_len) for _ in range(2)] for _ in back]
        base = torch.as_tensor(self.A._description.q_start - self.A._description.k_start).reshape(-1).tolist()
        base = base if self.row is None or len(base) == 1 else [base[self.row]]
        for n, ahead in enumerate(base):  # one for all rows, or one for each
            whole = slice(None) if len(base) == 1 else slice(n, n + 1)
            for first in range(0, self.q_len, ROWS):
                rows = slice(first, min(first + ROWS, self.q_len))
                left, right = max(first + ahead - max(back), 0), min(rows.stop + ahead - min(back), self.k_len)
                if right <= left:
                    continue
                logits = self._logits(rows, slice(left, right), None if len(base) == 1 else n)
                for (mass, sees), less in zip(found, back, strict=True):
                    key = torch.arange(first, rows.stop) + ahead - less
                    inside = (key >= left) & (key < right)
                    at = (key - left).clamp(0, right - left - 1)[:, None].expand(*logits.shape[:3], 1)
                    here = logits.gather(-1, at).squeeze(-1).masked_fill(~inside, -torch.inf)
                    mass[whole, :, rows] = _weights(here, self.lse[whole, :, rows])
                    sees[whole, :, rows] = (here > -torch.inf).to(mass)
        return [self._share(mass, sees > 0) for mass, sees in found]

    def first(self) -> Tensor:
        """The first key there is."""
        if not self.k_len:
            return self.lse.new_zeros(self.batch, self.heads)
        logits = self._logits(slice(0, self.q_len), slice(0, 1)).squeeze(-1)
        return self._share(_weights(logits, self.lse), logits > -torch.inf)

    def sink(self) -> Tensor:
        """What the sink takes."""
        sink = self.A._description.sink
        if sink is None:
            return self.lse.new_zeros(self.batch, self.heads)
        counted = self.real.expand(self.batch, self.heads, -1).to(self.lse.dtype)
        return (torch.exp(sink[None, :, None] - self.lse) * counted).sum(-1) / counted.sum(-1).clamp(min=1)

    def induction(self, ids: Tensor) -> Tensor:
        """Keys that follow an earlier copy of the query's token."""
        mass, sees = (self.lse.new_zeros(self.batch, self.heads, self.q_len) for _ in range(2))
        for n, row in enumerate(ids.cpu()):
            for places in _again(row):
                step = max(1, BLOCK // max(1, self.heads * len(places)))
                after = places[places + 1 < self.k_len] + 1
                for rows in places.split(step):
                    logits = self._logits(rows, after, n)[0]  # [heads, rows, after]
                    pairs = (row[after - 1] == row[rows][:, None]) & (after <= rows[:, None])
                    logits = logits.masked_fill(~pairs, -torch.inf)
                    mass[n, :, rows] = _weights(logits, self.lse[n, :, rows].unsqueeze(-1)).sum(-1)
                    sees[n, :, rows] = (logits > -torch.inf).any(-1).to(mass)
        return self._share(mass, sees > 0)

    def room(self) -> Tensor:
        """The largest entropy each query could have, log of the keys it sees: [batch or 1, heads or 1, q_len]."""
        d = self.A._description
        if d.mask is None:
            return torch.full((1, 1, self.q_len), float(max(self.k_len, 1)), dtype=torch.float64).log()
        step = max(1, BLOCK // max(1, self.k_len))
        parts = []
        for first in range(0, self.q_len, step):
            rows = slice(first, min(first + step, self.q_len))
            seen = _seen(d.mask, d.q_start, d.k_start, self.q_len, self.k_len, rows)
            parts.append(seen.sum(-1, dtype=torch.float64).clamp(min=1).log())
        room = torch.cat(parts, dim=-1) if parts else torch.zeros(1, 1, 0, dtype=torch.float64)
        return room if self.row is None or len(room) == 1 else room[self.row : self.row + 1]


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0))


def _again(row: Tensor) -> Iterator[Tensor]:
    """The places of tokens that come again: of one common token, or of several rare ones together."""
    order = row.argsort(stable=True)
    _, counts = row[order].unique_consecutive(return_counts=True)
    held: list[Tensor] = []
    for places in order.split(counts.tolist()):
        if len(places) < 2:
            continue
        if len(places) >= TOGETHER:
            yield places
            continue
        held.append(places)
        if sum(map(len, held)) >= TOGETHER:
            yield torch.cat(held).sort().values
            held = []
    if held:
        yield torch.cat(held).sort().values
