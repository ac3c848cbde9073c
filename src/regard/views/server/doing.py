"""What heads do, in numbers and in a word, where they are too long to be looked at whole at once.

The columns are those of `trace.statistics`. Here they are gathered a few rows at a time, like the cells of a map: from
a sample of the rows at first, which is said with them, and exact once every row has been taken in.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ...masks import Mask, causal, documents, keys, offset
from ...summaries import Entropy, Mass, SinkShare, Summary, Toeplitz
from ...trace.statistics import Room, word
from ..pools import FIRST, GRAIN, SLOWER, STEP, Rows
from .sources import Seen

#: pairs of a look up to which all rows are taken in, in time; of longer ones the sample stays one
ALL = 1 << 34


class Met(Mass):
    """Mass on a set of pairs and how many queries have such a pair, each summed over queries that count: [.., 2]."""

    def __init__(self, pairs: Mask, counted: Tensor | None = None):
        super().__init__(pairs)
        self.counted = counted

    def finish(self, state: list[Tensor], problem: Any) -> Tensor:
        sees = state[1] if self.counted is None else state[1] * self.counted
        return torch.stack([(state[0] * sees).sum(-1), sees.sum(-1)], dim=-1)


class Spread(Toeplitz):
    """What Toeplitz adds up over rows, not yet made into a share: [.., 3, displacements]."""

    def finish(self, state: list[Tensor], problem: Any) -> Tensor:
        return torch.stack(state, dim=-2)

    def share(self, sums: Tensor) -> Tensor:
        """The share, of the sums over all rows that were taken in."""
        return super().finish([*sums.unbind(-2)], None)  # type: ignore[arg-type]


class Doing(Rows):
    """The statistics of all heads of a look, from the rows that have been taken in."""

    fused = False

    def __init__(self, seen: Seen):
        super().__init__(seen.matrix())
        self.grain = max(1, min(GRAIN, STEP // SLOWER // max(1, self.lead[0] * self.k_len)))  # few rows of many heads
        self._begin()
        self.seen, self._lock = seen, threading.Lock()
        self.kind = self.A.plan.form.q_geometry[0]
        self.own = seen.look.kind == "self"
        self.sinks = self.A.plan.form.sink >= 0
        ids = seen.ids() if self.own and self.kind == "line" else None
        self.ids = None if ids is None or len(ids.unique()) == len(ids) else ids.to(self.A.device)
        real, heads = seen.real(), self.lead[0]
        self.real = None if real is None else real.to(self.A.device, torch.float64)  # others are padding
        self.sums = {name: torch.zeros(heads, 2, dtype=torch.float64) for name in ("entropy", "spread", *self._pairs())}
        self.spread: Tensor | None = None
        self.rows = 0

    @property
    def sampled(self) -> bool:
        """Whether enough rows have been taken in to tell something of all of them."""
        return self.at >= min(FIRST, len(self.order)) or self.exact

    @property
    def few(self) -> bool:
        """Whether all rows will be taken in."""
        return self.lead[0] * self.q_len * self.k_len <= ALL

    def _pairs(self) -> dict[str, Mask | None]:
        """The sets of pairs that shares are of. That of induction is another for each span of rows."""
        found: dict[str, Mask | None] = {"first": keys(self.A.starts[1][0])}
        if self.own:
            found |= {"self": offset(0), "previous": offset(1)}
        return found if self.ids is None else found | {"induction": None}

    def _copies(self, rows: slice) -> Mask:
        """Keys that follow an earlier copy of the query's token."""
        assert self.ids is not None
        before = torch.cat([torch.full_like(self.ids[:1], -1), self.ids[:-1]])
        return documents(self.ids[rows], before) & causal

    def take(self, rows: slice) -> None:
        asked: dict[str, Summary] = {"entropy": Entropy(), "room": Room()}
        counted = None if self.real is None else self.real[rows]
        for name, mask in self._pairs().items():
            asked[name] = Met(self._copies(rows) if mask is None else mask, counted)
        if self.own and self.kind != "points":
            asked["toeplitz"] = Spread()
        if self.sinks:
            asked["sink"] = SinkShare()
        found = dict(zip(asked, self.A.window(rows, slice(None), *asked.values()), strict=True))
        found = {name: x.double().cpu() for name, x in found.items()}
        entropy, room, spread = found.pop("entropy"), found.pop("room"), found.pop("toeplitz", None)
        count = rows.stop - rows.start
        counts = torch.ones(count, dtype=torch.float64) if counted is None else counted.cpu()
        counts, sees = counts.expand_as(entropy), counts * (room > 0)
        found["entropy"] = torch.stack([(entropy * counts).sum(-1), counts.sum(-1)], -1)
        found["spread"] = torch.stack([(entropy / room.clamp(min=1e-9) * sees).sum(-1), sees.sum(-1)], -1)
        if self.sinks:
            found["sink"] = torch.stack([found["sink"] * count, torch.full_like(found["sink"], count)], -1)
        with self._lock:
            self.rows += count
            for name, x in found.items():
                self.sums[name] = self.sums.get(name, 0.0) + x
            if spread is not None:
                self._spread(rows, spread)

    def _spread(self, rows: slice, x: Tensor) -> None:
        if self.spread is None:
            width = self.q_len + self.k_len - 1 if self.kind == "line" else x.shape[-1]
            self.spread = torch.zeros(*x.shape[:-1], width, dtype=torch.float64)
        first = rows.start if self.kind == "line" else 0  # on a line, rows meet the displacements from theirs on
        self.spread[..., first : first + x.shape[-1]] += x

    def told(self) -> list[dict[str, Any]] | None:
        """A row of numbers a head, with the share of rows that they come from; None before the first."""
        with self._lock:
            if not self.rows or not self.sampled:
                return None
            sums = {name: (x[:, 0] / x[:, 1].clamp(min=1)).tolist() for name, x in self.sums.items()}
            if self.spread is not None:
                sums["toeplitz"] = Spread().share(self.spread).tolist()
            rows = self.rows
        found = []
        for n in range(self.lead[0]):
            numbers = {name: values[n] for name, values in sums.items()}
            found.append({"does": word(numbers), **numbers, "of_rows": rows / self.q_len})
        return found
