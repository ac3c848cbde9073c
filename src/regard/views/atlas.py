"""One head's A as a map: cells of 1, 2, 4 .. pairs a side, cut into tiles, at any length and never stored.

    finest levels    cells of fewer pairs than the base: computed when asked for, from q, k and the stored log-sum-exp
    the base         cells of 32 x 32 pairs, or more so that there are at most about 4096 x 4096 of them: stored
    coarser levels   by merging the base

The base is filled by one pass over the rows (pools.py), a sample of them first: a tile says whether it is exact. Rows
that a fine tile needs are taken in before all others. Logits have a base of their own, made when first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Heatmap, Summary
from .cells import Cells, is_known, kind_of, learn, plainly
from .order import nearest
from .pools import GRAIN, Cancelled, Pools, Rows, on_device
from .sums import Peaks, Sums

#: cells of a tile, a side; cells of the base, a side, at the most
TILE, MOST = 256, 4096
#: pairs that a device looks at by plain operations about as soon as by kernels
FEW = 1 << 26
KINDS = ("weights", "logits")


class Tile(NamedTuple):
    """Means and maxima of the visible pairs of each cell, [rows, columns]; NaN where nothing is visible."""

    mean: Tensor
    max: Tensor
    exact: bool  # else a sample of the rows
    cell: int
    row: int  # of the first cell, in cells
    col: int


class Atlas:
    """The map of A [q_len, k_len]."""

    def __init__(self, A: AttentionMatrix):
        if len(A.shape) != 2:
            raise ValueError(f"Atlas: choose a batch row and a head first, as in A[0, 3]; found {list(A.shape)}")
        self.A, (self.q_len, self.k_len) = A, A.shape
        longest = max(self.q_len, self.k_len, 1)
        self.base = GRAIN
        while longest > self.base * MOST:
            self.base *= 2
        self.levels = [1]
        while longest > self.levels[-1] * TILE:
            self.levels.append(2 * self.levels[-1])
        self._given = A.remembered  # recorded with A, or found by a product before
        self._pools = {"weights": Pools(A, self.base)}
        self._sums, self._summing = Sums(A, self._lse_of), not on_device(A)
        self._peaks: Pools | Peaks | None = self.weights if self.weights.tops else None
        self._merged: dict[tuple[str, int], Cells] = {}
        self.away = on_device(A)
        self._prepared = not self.away
        self._lock = threading.Lock()

    @property
    def weights(self) -> Pools:
        return self._pools["weights"]

    def pools(self, what: str = "weights") -> Pools:
        """The stored base of weights or logits; that of logits begins when it is first asked for."""
        if what not in KINDS:
            raise ValueError(f"what: expected one of {', '.join(KINDS)}, found {what!r}")
        with self._lock:
            if what not in self._pools:
                self._pools[what] = Pools(self.A, self.base, of=what)
            return self._pools[what]

    @property
    def progress(self) -> float:
        return self.weights.progress

    @property
    def exact(self) -> bool:
        return self.weights.exact

    @property
    def begun(self) -> list[str]:
        """What passes there are."""
        return list(self._pools)

    @property
    def finished(self) -> bool:
        """Every pass that was begun is done."""
        return all(each.exact for each in self._passes())

    def _passes(self) -> list[Rows]:
        own = [] if self._peaks is None or self._peaks is self.weights else [self._peaks]
        return [*self._pools.values(), *own, *([self._sums] if self._summing else [])]

    @property
    def sums(self) -> Sums:
        """Mass received and mass per displacement. On a device they are begun when they are first asked for."""
        self._summing = True
        return self._sums

    def step(self) -> bool:
        """One step of the passes that were begun; False when nothing is left to claim."""
        first, *others = self._passes()
        if first.step():
            return True
        if self.away and not first.exact:  # the last steps are another thread's, and come before all else
            with first.changed:
                first.changed.wait(0.05)
            return True
        return self.prepare() or any(each.step() for each in others)

    @property
    def alone(self) -> bool:
        """Its steps take one thread and leave the others to who waits.

        So it is on a device while there are kernels to compile, and when the map is there.
        """
        return self.away and (not self._prepared or self.exact)

    @property
    def prepared(self) -> bool:
        """Nothing is compiled any more for the map and its tiles."""
        return self._prepared

    def prepare(self) -> bool:
        """Have one kernel compiled that the map will need, the most urgent; False if all are."""
        self._prepared = self._prepared or not (self.weights.prepare() or self._prepare_tiles())
        return not self._prepared

    def _prepare_tiles(self) -> bool:
        """For the first column without the first key, and for finer levels; False if all are."""
        edge = slice(0, self.q_len), slice(1, min(self.base, self.k_len))
        sides = [cell * TILE for cell in reversed(self.levels) if cell < self.base]
        for rows, cols, cell in [(*edge, self.base), *((slice(0, n), slice(0, n), n // TILE) for n in sides)]:
            count, wide, asked = rows.stop - rows.start, cols.stop - cols.start, Heatmap(cell=cell)
            kind = kind_of(self.A, count, wide, asked)
            there = rows.stop <= self.q_len and cols.stop <= self.k_len
            if there and count * wide > FEW and not is_known(kind):
                self.A.window(rows, cols, asked, lse=torch.zeros(count, device=self.A.device))
                learn(kind)
                return True
        return False

    def bytes(self) -> int:
        """What is stored of it."""
        stored = [pools.cells for pools in self._pools.values()] + list(self._merged.values())
        beside = [self.weights.lse, self.weights.lse, self._sums.received]  # entropy is as long
        beside += [] if self._peaks is None else [self._peaks.peaks]
        return sum(cells.bytes() for cells in stored) + sum(x.numel() * x.element_size() for x in beside)

    def of_rows(self, rows: slice, stop: Callable[[], bool] = lambda: False) -> AttentionMatrix:
        """A, to be asked about these rows only: their log-sum-exp is known, so that no pass over all of A is made."""
        if self._given is not None:
            return self.A
        self.weights.ensure(rows, stop)
        return self.A.knowing(self.weights.lse)

    def _lse_of(self, rows: slice) -> Tensor | None:
        """The log-sum-exp of some rows, if it is known."""
        if self._given is not None or self.weights.known(rows):
            return self.lse[rows].to(self.A.device)
        return None

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of every query, [q_len]: as it was given with A, or of the rows that are done (-inf else)."""
        return self.weights.lse if self._given is None else self._given

    def entropy(self) -> tuple[Tensor, Tensor]:
        """The entropy of each query, and for which queries it is known: [q_len] both."""
        if self.sums.entropy is not None:
            return self.sums.entropy, self.sums.done_rows()
        return self.weights.entropy, self.weights.done_rows()

    def column(self, j: int) -> tuple[Tensor, Tensor]:
        """The weight of each query on key j, and for which queries it is known: [q_len] both."""
        known = torch.ones(self.q_len, dtype=torch.bool)
        if self._given is None:
            known = self.weights.done_rows()
        return self._computed("weights", 1, slice(0, self.q_len), slice(j, j + 1)).sum[:, 0], known

    def peaks(self, cell: int, stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, Tensor, bool]:
        """The largest weight of each row of cells, with the first key and without; and whether that is exact."""
        if cell not in self.levels:
            raise ValueError(f"cell: expected one of {self.levels}, found {cell!r}")
        with self._lock:
            rows = self._peaks = Peaks(self.A) if self._peaks is None else self._peaks
        rows.sample(stop)
        exact = rows.exact
        found = torch.nn.functional.pad(rows.peaks, (0, -self.q_len % cell)).unflatten(-1, (-1, cell)).amax(-1)
        if not exact:
            done = torch.nn.functional.pad(rows.done_rows(), (0, -self.q_len % cell)).view(-1, cell).any(-1)
            found = found[:, nearest(done)]
        return found[0], found[1], exact

    def tile(
        self, cell: int, row: int, col: int, *, what: str = "weights", first: bool = True,
        stop: Callable[[], bool] = lambda: False,
    ) -> Tile:  # fmt: skip
        """Tile (row, col) of a level. Not `first` leaves the first key out; `stop` says that nobody waits any more."""
        if cell not in self.levels:
            raise ValueError(f"cell: expected one of {self.levels}, found {cell!r}")
        pools = self.pools(what)
        spans = []
        for name, at, length in (("row", row, self.q_len), ("col", col, self.k_len)):
            cells = -(-length // cell)
            if not 0 <= at * TILE < cells:
                raise ValueError(f"{name}: expected a tile from 0 to {(cells - 1) // TILE}, found {at}")
            spans.append(slice(at * TILE, min((at + 1) * TILE, cells)))
        rows, cols = spans
        if cell < self.base:
            found, exact = self._fine(what, cell, rows, cols, first, stop), True
        else:
            queries = slice(rows.start * cell, min(rows.stop * cell, self.q_len))
            if not pools.known(queries):
                pools.sample(stop)
                if 2 * (queries.stop - queries.start) < self.q_len:  # a part in sight comes before the rest
                    pools.prefer(queries)
            exact = pools.known(queries)
            found = self._coarse(what, cell, rows, cols, first, exact)
        return Tile(*found.here().shown(), exact, cell, rows.start, cols.start)

    def first_column(self, tile: Tile, what: str, stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, Tensor]:
        """Mean and maximum of a tile's first column of cells without the first key: [rows] each."""
        rows = slice(tile.row, tile.row + len(tile.mean))
        if tile.cell < self.base:
            found = self._fine(what, tile.cell, rows, slice(0, 1), False, stop)
        else:
            found = self._coarse(what, tile.cell, rows, slice(0, 1), False, tile.exact)
        mean, peak = found.here().shown()
        return mean[:, 0], peak[:, 0]

    def _fine(
        self, what: str, cell: int, rows: slice, cols: slice, first: bool, stop: Callable[[], bool]
    ) -> Cells:  # fmt: skip
        queries = slice(rows.start * cell, min(rows.stop * cell, self.q_len))
        keys = slice(cols.start * cell, min(cols.stop * cell, self.k_len))
        found = self._window(what, cell, queries, keys, stop)
        if not first and cols.start == 0:
            least = 0.0 if what == "weights" else -torch.inf
            for x, fill in zip(found, (0.0, 0.0, least), strict=True):
                x[:, 0] = fill
            if min(cell, self.k_len) > 1:
                rest = self._window(what, cell, queries, slice(1, min(cell, self.k_len)), stop)
                for x, y in zip(found, rest, strict=True):
                    x[:, :1] = y
        return found

    def _window(self, what: str, cell: int, queries: slice, keys: slice, stop: Callable[[], bool]) -> Cells:
        """Cells computed now, for rows that are done first if they are not yet."""
        if stop():
            raise Cancelled
        if what == "weights" and self._given is None:
            self.weights.ensure(queries, stop)
        return self._computed(what, cell, queries, keys)

    def _computed(self, what: str, cell: int, queries: slice, keys: slice) -> Cells:
        # logits need no log-sum-exp
        count, wide = queries.stop - queries.start, keys.stop - keys.start
        lse = self.lse[queries] if what == "weights" else torch.zeros(count)
        asked: Summary = Heatmap(cell=cell, of=what)
        if self.away and (count * wide <= FEW or not is_known(kind_of(self.A, count, wide, asked))):
            asked = plainly(asked)
        (found,) = self.A.window(queries, keys, asked, lse=lse.to(self.A.device))
        return Cells(*(x.float() for x in found[:3])).here()

    def _coarse(self, what: str, cell: int, rows: slice, cols: slice, first: bool, exact: bool) -> Cells:
        pools, times = self.pools(what), cell // self.base
        if pools.exact:
            found = Cells(*(x.clone() for x in self._level(what, cell).part(rows, cols)))
        else:
            found = pools.cells.part(*(slice(x.start * times, x.stop * times) for x in (rows, cols))).merged(times)
        if not first and cols.start == 0:
            edge = self._without_first(what)
            for x, y, stored in zip(found, edge, pools.cells, strict=True):
                below = slice(rows.start * times, rows.stop * times)
                column = torch.cat([y[below], stored[below, 1:times]], dim=-1)
                x[:, :1] = _column(column, times, x is found.max)
        if not exact:
            found = self._filled(pools, found, cell, rows)
        return found

    def _filled(self, pools: Pools, found: Cells, cell: int, rows: slice) -> Cells:
        """Rows of cells of which nothing is done show the nearest of the tile that has something."""
        times = cell // self.base
        done = pools.begun()[rows.start * times : rows.stop * times]
        done = torch.nn.functional.pad(done, (0, -len(done) % times)).view(-1, times).any(-1)
        return Cells(*(x[nearest(done)] for x in found))

    def _level(self, what: str, cell: int) -> Cells:
        """All cells of a level, once they are exact; kept."""
        if cell == self.base:
            return self.pools(what).cells
        with self._lock:
            found = self._merged.get((what, cell))
        if found is None:
            found = self._level(what, cell // 2).merged(2)
            with self._lock:
                found = self._merged.setdefault((what, cell), found)
        return found

    def _without_first(self, what: str) -> Cells:
        """The first column of the base without the first key, of the rows that are done: [rows of the base, 1] each."""
        pools, last = self.pools(what), min(self.base, self.k_len)
        with self._lock:
            for run in pools.runs(~pools.edged) if last > 1 else []:
                rows = slice(run.start * pools.grain, min(run.stop * pools.grain, self.q_len))
                fresh = self._computed(what, self.base, rows, slice(1, last))
                at = slice(rows.start // self.base, rows.start // self.base + len(fresh.sum))
                if pools.per == 1:  # whole cells, in place of a sample of them
                    for kept, x in zip(pools.edge, fresh, strict=True):
                        kept[at] = x.to(kept.device)
                else:
                    pools.edge.sum[at] += fresh.sum
                    pools.edge.count[at] += fresh.count
                    pools.edge.max[at] = torch.maximum(pools.edge.max[at], fresh.max)
                pools.edged[run.start : run.stop] = True
            return pools.edge


def _column(x: Tensor, times: int, maximum: bool) -> Tensor:
    """One column of merged cells, from [rows of the base, times]."""
    more = -len(x) % times
    fill = -torch.inf if maximum else 0.0
    x = torch.nn.functional.pad(x, (0, 0, 0, more), value=fill).view(-1, times * x.shape[1])
    return (x.amax(-1) if maximum else x.sum(-1)).unsqueeze(-1)
