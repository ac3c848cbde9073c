"""The maps that are open, and the small pictures of every head: who has them, and when they are let go.

A map's stored cells may take a hundred megabytes, so only those that were asked for last are kept. The pictures of all
heads come from one pass a look, over all of its heads at once, in cells large enough that there are at most 48 a side.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..atlas import Atlas
from ..cells import Cells
from ..order import nearest
from ..pools import GRAIN, Cancelled, Pools
from . import answers
from .doing import Doing
from .sources import Seen, Source, Sources
from .work import Stop, Work

#: cells of a small picture, a side; bytes of all maps that are kept; seconds after which pictures are told as they are
SMALL, KEPT, SOON = 48, 600 << 20, 1.0


class Maps:
    """Atlases by (source, look, head)."""

    def __init__(self, sources: Sources, work: Work, kept: int = KEPT):
        self.sources, self.work, self.kept = sources, work, kept
        self._open: OrderedDict[tuple[str, int, int], Atlas] = OrderedDict()
        self._lock = threading.Lock()
        self._overviews: dict[str, Overview] = {}
        self._shares: dict[Hashable, dict[str, float | None]] = {}
        self._openings: dict[str, Opening] = {}

    def begin(self, number: str) -> None:
        """A source is there: if a device computes it, have it ready before it is asked for."""
        source = self.sources[number]
        if elsewhere(self.sources.device) and source.seen:
            self._openings[number] = Opening(self, number)
            self.work.follow(self._openings[number])

    def prepared(self, number: str) -> bool:
        """Whether nothing is moved or compiled any more when the first map of a source is asked for."""
        opening = self._openings.get(number)
        return opening is None or opening.failed or (opening.atlas is not None and opening.atlas.prepared)

    def seen(self, number: str, look: int) -> Seen:
        source = self.sources[number]
        if source.state != "ready":
            raise ValueError(f"source: {number} is {source.state}, expected ready")
        if not 0 <= look < len(source.seen):
            raise KeyError(f"look: expected a number from 0 to {len(source.seen) - 1}, found {look}")
        return source.seen[look]

    def open(self, number: str, look: int, head: int) -> Atlas:
        """The map of a head; its exact pass begins when it is first asked for."""
        atlas = self.atlas(number, look, head)
        if not atlas.finished:
            self.work.follow(atlas)
        return atlas

    def atlas(self, number: str, look: int, head: int) -> Atlas:
        """The map of a head, as far as it is."""
        key = (number, look, head)
        seen = self.seen(number, look)
        if head not in seen.look.heads:
            raise KeyError(f"head: expected one of {list(seen.look.heads)}, found {head}")
        with self._lock:
            atlas = self._open.get(key)
            if atlas is None:
                atlas = self._open[key] = Atlas(seen.matrix(head))
            self._open.move_to_end(key)
            total = sum(each.bytes() for each in self._open.values())
            while total > self.kept and len(self._open) > 1:
                _, old = self._open.popitem(last=False)
                total -= old.bytes()
                self.work.unfollow(old)
        return atlas

    def listed(self) -> list[tuple[tuple[str, int, int], Atlas]]:
        with self._lock:
            return list(self._open.items())

    def shares(self, at: tuple[str, int, int], atlas: Atlas, stop: Stop) -> dict[str, float | None]:
        """The shares of a head: all where it is short, those that need no pass of their own where it is long."""
        number, look, head = at
        if at in self._shares:
            return self._shares[at]
        seen = self.seen(number, look)
        rows = self.overview(number).statistics(look)
        if rows is not None:
            found = {name: rows[seen.look.heads.index(head)].get(name) for name in answers.SHARES}
        elif atlas.exact or atlas._given is not None:
            found = answers.shares(atlas, stop)
        else:
            return {}
        self._shares[at] = found
        return found

    def overview(self, number: str) -> Overview:
        with self._lock:
            if number not in self._overviews:
                self._overviews[number] = Overview(
                    self.sources[number], lambda look, head: self._open.get((number, look, head))
                )
            return self._overviews[number]

    def small(self, number: str, stop: Stop) -> dict[str, Any]:
        """Every head of a source, small; the passes go on behind the open map."""
        found = self.overview(number)
        told = found.told(stop)
        if told["progress"] < 1:
            self.work.follow(found)
            with self._lock:
                last = next(reversed(self._open.values()), None)
            if last is not None and not last.finished:  # what is enlarged comes before what is small
                self.work.follow(last)
        return told


class Opening:
    """What is done when a source is opened on a device: q and k are moved there, and kernels are compiled or loaded.

    They are those of its first map, of which there is a sample before: compiling keeps Python busy, and who asks for
    the map meanwhile would wait for it at every operation. No more of it is computed before somebody asks.
    """

    def __init__(self, maps: Maps, number: str):
        self.maps, self.number, self.alone, self.failed = maps, number, True, False
        self.atlas: Atlas | None = None

    def step(self) -> bool:
        try:
            if self.atlas is None:
                self.atlas = self.maps.atlas(self.number, 0, self.maps.seen(self.number, 0).look.heads[0])
            if not self.atlas.weights.ready:
                self.atlas.weights.preview()
            return self.atlas.prepare()
        except BaseException:
            self.failed = True
            raise


class Overview:
    """Small pictures of all heads of a source. `opened` gives the map of a head if it is open: it has them as well."""

    def __init__(self, source: Source, opened: Callable[[int, int], Atlas | None]):
        self.seen, self.opened = source.seen, opened
        self.alone = any(elsewhere(seen.device) for seen in self.seen)
        self.pools = [
            Pools(seen.matrix(), cell_of(seen.look.q_len, seen.look.k_len), beside=False) for seen in self.seen
        ]
        self._statistics: dict[int, list[dict[str, Any]] | None] = {}
        self._doing: dict[int, Doing] = {}  # of those that are too long to be looked at whole at once
        self._claimed: set[int] = set()
        self._lock = threading.Lock()

    def step(self, waiting: bool = False) -> bool:
        """Something of every look first, then what their heads do, then those of which least is done.

        Passes over looks whose heads are all open are their maps' own. While somebody is `waiting`, what takes long is
        left for later: it is done behind the open map.
        """
        left = [pools for n, pools in enumerate(self.pools) if not all(self._maps(n))]
        for pools in left:  # on a device whose kernels are not there, a sample is something
            if not pools.ready and not pools.previewed.any():
                pools.preview()
                return True
        left = [pools for pools in left if pools.ready or not waiting]
        if any(pools.step() for pools in left if not pools.done):
            return True
        with self._lock:
            unsaid = [n for n in range(len(self.seen)) if n not in self._claimed]
            self._claimed.update(unsaid[:1])
        if unsaid:
            self._say(unsaid[0])
            return True
        doing = list(self._doing.values())
        begin, last = ([each for each in doing if each.sampled == done] for done in (False, True))
        left = [pools for pools in left if not waiting or pools.A.numel() <= answers.FEW]
        last = [] if waiting else [each for each in last if each.few]
        return any(each.step() for each in (*begin, *sorted(left, key=lambda pools: pools.progress), *last))

    def _say(self, look: int) -> None:
        found = None
        try:
            found = answers.statistics(self.seen[look])
            if found is None:
                doing = Doing(self.seen[look])
                with self._lock:
                    self._doing.setdefault(look, doing)
        finally:  # a failure is told once, by who asked or in the log, and its numbers are missing from then on
            with self._lock:
                self._statistics[look] = found

    def statistics(self, look: int) -> list[dict[str, Any]] | None:
        """Numbers of each head of a look; None where there are too many pairs to know them at once."""
        with self._lock:
            known = look in self._statistics
            self._claimed.add(look)
        if not known:
            self._say(look)
        return self._statistics[look]

    def _maps(self, look: int) -> list[Pools | None]:
        """For each head, the cells of its open map, if these small cells can be made of them."""
        found = [self.opened(look, head) for head in self.seen[look].look.heads]
        size = self.pools[look].size
        return [None if each is None or size % each.base else each.weights for each in found]

    def _cells(self, look: int, at: int) -> tuple[Cells, float]:
        """The small cells of a head, and how much of them is done: of its open map, or of the pass over all heads."""
        pools, own = self.pools[look], self._maps(look)[at]
        if own is not None and own.progress > pools.progress:
            times = pools.size // own.size
            cells = own.cells.merged(times)
            done = torch.nn.functional.pad(own.begun(), (0, -len(own.begun()) % times)).view(-1, times).any(-1)
            return Cells(*(x[nearest(done)] for x in cells)), own.progress
        rows = nearest(pools.begun())
        return Cells(*(x[..., at, rows, :] if x.dim() == 3 else x[rows] for x in pools.cells)), pools.progress

    def told(self, stop: Stop) -> dict[str, Any]:
        """What there is after a second: all of it where heads are short, else what was done of a sample."""
        end = time.monotonic() + SOON
        while time.monotonic() < end and self.step(waiting=True):
            if stop():
                raise Cancelled
        heads, done = [], 0.0
        for n, seen in enumerate(self.seen):
            with self._lock:
                said, rows, doing = n in self._statistics, self._statistics.get(n), self._doing.get(n)
            rows = doing.told() if doing is not None else rows
            for at, head in enumerate(seen.look.heads):
                numbers = None if rows is None else rows[at]
                cells, progress = self._cells(n, at)
                mean, peak = cells.here().shown()
                done += (progress if said else min(progress, 0.99)) / len(seen.look.heads)
                heads.append({
                    "look": n, "head": head, "cells": max(mean.shape), "mean": _square(mean), "max": _square(peak),
                    "exact": progress == 1 and said, "what": None if numbers is None else numbers["does"],
                    "stats": None if numbers is None else {name: numbers.get(name) for name in answers.STATISTICS},
                    "of_rows": None if numbers is None else numbers.get("of_rows", 1.0),
                })  # fmt: skip
        whole = all(head["exact"] for head in heads)  # the sum of shares may be a rounding less
        with self._lock:
            waits = any(not (each.exact if each.few else each.sampled) for each in self._doing.values())
        progress = 1.0 if whole else min(done / max(1, len(self.seen)), 0.999)
        return {"heads": heads, "progress": progress, "more": waits or not whole}


def elsewhere(device: torch.device | None) -> bool:
    """Somewhere that q and k must be moved to, and kernels be compiled for."""
    return device is not None and device.type != "cpu"


def cell_of(q_len: int, k_len: int) -> int:
    """The side of the cells of a small picture: a multiple of the rows that are taken together where they are many."""
    size = -(-max(q_len, k_len, 1) // SMALL)
    return size if size < GRAIN else -(-size // GRAIN) * GRAIN


def _square(x: torch.Tensor) -> str:
    """Numbers as text, as many rows as columns: what is missing is NaN."""
    side = max(x.shape)
    x = torch.nn.functional.pad(x, (0, side - x.shape[1], 0, side - x.shape[0]), value=torch.nan)
    return base64.b64encode(x.contiguous().numpy().astype("<f4").tobytes()).decode()
