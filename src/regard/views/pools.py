"""Cells of A that are filled a few rows at a time, in any order: a sample of them at once, all of them in the end.

A pass over some rows gives their exact log-sum-exp and, with it, sums, visible pairs and maxima of the cells they lie
in (`AttentionMatrix.window`). Rows are taken in bit-reversed order, thin ones spread over all of A first, then the gaps
between them, and whatever somebody waits for before either. So at any moment the cells hold a fair sample of the rows
that are done, and when the last row is done, they are exact.

Several threads may work on one Pools: rows are claimed, so that none is computed twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Entropy, Heatmap, LogSumExp, Profile, Received, Summary, Top, TopK

#: rows that are claimed together at the least
GRAIN = 32
#: pairs that one step looks at, about: a tenth of a second of one CPU core, or of a GPU
STEP, STEP_DEVICE = 1 << 25, 1 << 34
#: how many times longer a pair takes where it is not taken in by one compiled pass
SLOWER = 8
#: thin strips of the sample, and how many of them make a first picture
THIN, FIRST = 256, 48
#: spans of rows that are remembered as looked at
PREFERRED = 8

TO_DO, CLAIMED, DONE = range(3)


class Cancelled(Exception):
    """Nobody waits for it any more."""


class Cells(NamedTuple):
    """Sums, visible pairs and maxima of some cells, [.., rows, columns] each."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]
    max: Tensor

    def merged(self, times: int) -> Cells:
        """Cells of `times` x `times` of these."""
        if times == 1:
            return self
        rows, cols = self.sum.shape[-2:]
        more = (0, -cols % times, 0, -rows % times)

        def grouped(x: Tensor, fill: float) -> Tensor:
            x = torch.nn.functional.pad(x, more, value=fill) if any(more) else x
            return x.unflatten(-1, (-1, times)).unflatten(-3, (-1, times))

        # along rows first: the memory is read in order
        total, count = (grouped(x, 0.0).sum(-1).sum(-2) for x in (self.sum, self.count))
        return Cells(total, count, grouped(self.max, -torch.inf).amax(-1).amax(-2))

    def part(self, rows: slice, cols: slice) -> Cells:
        return Cells(*(x[..., rows, cols] for x in self))

    def shown(self) -> tuple[Tensor, Tensor]:
        """Mean and maximum of the visible pairs; NaN where there is none."""
        none = self.count == 0
        mean = (self.sum / self.count.clamp(min=1)).masked_fill(none, torch.nan)
        return mean.float(), self.max.masked_fill(none, torch.nan).float()

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self)


class Rows:
    """Rows of A, [q_len, k_len] or [heads, q_len, k_len], that are taken in once each, by whoever claims them."""

    #: there are kernels for what is taken in: on a device, many rows at a time
    fused = True

    def __init__(self, A: AttentionMatrix, per: int = 1):
        self.A, self.per = A, per  # units of rows that belong together
        *lead, self.q_len, self.k_len = A.shape
        self.lead, self.grain = tuple(lead), GRAIN
        self.changed = threading.Condition()
        self._begin()

    def _begin(self) -> None:
        self.units = -(-self.q_len // self.grain)
        self.state = torch.zeros(self.units, dtype=torch.uint8)
        heads = self.lead[0] if self.lead else 1
        few = not self.fused or self.A.device.type == "cpu"
        pairs = (STEP // SLOWER if not self.fused else STEP if few else STEP_DEVICE) // max(1, heads * self.k_len)
        self.step_units = max(1, min(self.units, pairs // self.grain))
        self.order = order_of(self.units, self.step_units, THIN if few else 0)
        self.at = self.done = 0
        self._preferred: list[range] = []

    def take(self, rows: slice) -> None:
        """Compute and keep what some rows give."""
        raise NotImplementedError

    @property
    def progress(self) -> float:
        return self.done / self.units if self.units else 1.0

    @property
    def exact(self) -> bool:
        return self.done == self.units

    def step(self) -> bool:
        """Take in the next rows; False when nothing is left to claim."""
        run = self._claim(None)
        if run is None:
            return False
        self._compute(run)
        return True

    def sample(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Enough rows for a first picture: the first in order, which are spread over all."""
        first = self.order[: min(FIRST, len(self.order) // 4 + 1)]
        for run in first:  # those that nobody else has begun
            mine = self._claim(run)
            while mine is not None:
                if stop():
                    self._mark(mine, TO_DO)
                    raise Cancelled
                self._compute(mine)
                mine = self._claim(run)
        for run in first:  # and wait for the others
            self.ensure(slice(run.start * self.grain, run.stop * self.grain), stop)

    def prefer(self, rows: slice) -> None:
        """Take these rows in before others: somebody looks at them."""
        wanted = range(rows.start // self.grain, -(-rows.stop // self.grain))
        with self.changed:
            self._preferred = [wanted, *(run for run in self._preferred if run != wanted)][:PREFERRED]

    def ensure(self, rows: slice, stop: Callable[[], bool] = lambda: False) -> None:
        """Take in these rows, and wait for those that somebody else is taking in."""
        wanted = range(rows.start // self.grain, -(-rows.stop // self.grain))
        while True:
            if stop():
                raise Cancelled
            run = self._claim(wanted)
            if run is not None:
                self._compute(run)
                continue
            with self.changed:
                if self.known(rows):
                    return
                self.changed.wait(1.0)

    def known(self, rows: slice) -> bool:
        """All of these rows are done."""
        return bool((self.state[rows.start // self.grain : -(-rows.stop // self.grain)] == DONE).all())

    def done_rows(self) -> Tensor:
        """Which rows are done: booleans [q_len]."""
        return (self.state == DONE).repeat_interleave(self.grain)[: self.q_len]

    def runs(self, among: Tensor) -> list[range]:
        """Units that are done and among these, as runs that begin with a cell or lie within one."""
        with self.changed:
            at = ((self.state == DONE) & among).nonzero().flatten().tolist()
        found: list[range] = []
        for n in at:
            joins = bool(found) and n == found[-1].stop and (found[-1].start % self.per == 0 or n % self.per > 0)
            if joins:
                found[-1] = range(found[-1].start, n + 1)
            else:
                found.append(range(n, n + 1))
        return found

    def _claim(self, wanted: range | None) -> range | None:
        """Rows to take in next: of those wanted, or else of those somebody looks at, or else in order."""
        with self.changed:
            if wanted is not None:
                return self._take_from(wanted)
            while self._preferred:
                run = self._take_from(self._preferred[0])
                if run is not None:
                    return run
                self._preferred.pop(0)
            while self.at < len(self.order):
                run = self._take_from(self.order[self.at])
                if run is not None:
                    return run
                self.at += 1
        return None

    def _take_from(self, among: range) -> range | None:
        free = (self.state[among.start : among.stop] == TO_DO).nonzero().flatten()
        if not len(free):
            return None
        run = self._cut(among.start + int(free[0]), min(among.stop, self.units))
        self.state[run.start : run.stop] = CLAIMED
        return run

    def _cut(self, first: int, last: int) -> range:
        """Free units from the first on, one step of them at the most; those that begin within a cell end with it."""
        per = self.per
        last = min(last, first + self.step_units)
        busy = (self.state[first:last] != TO_DO).nonzero().flatten()
        last = first + int(busy[0]) if len(busy) else last
        if first % per or last - first < per:
            return range(first, min(last, (first // per + 1) * per))
        whole = (last - first) // per * per
        return range(first, last if last == self.units else first + whole)

    def _compute(self, run: range) -> None:
        try:
            self.take(slice(run.start * self.grain, min(run.stop * self.grain, self.q_len)))
        except BaseException:
            self._mark(run, TO_DO)
            raise
        self._mark(run, DONE)

    def _mark(self, run: range, state: int) -> None:
        with self.changed:
            self.state[run.start : run.stop] = state
            self.done += len(run) if state == DONE else 0
            self.at = 0 if state == TO_DO else self.at
            self.changed.notify_all()


class Pools(Rows):
    """The cells of A, of `size` x `size` pairs, of "weights" or "logits".

    beside   also keep what each row gives beside its cells: lse, entropy, and peaks (its largest weight, with the first
             key and without; on a device these are a pass of their own, for they take as long as all the rest)
    """

    def __init__(self, A: AttentionMatrix, size: int, *, of: str = "weights", beside: bool = True):
        super().__init__(A)
        self.size, self.of, self.beside = size, of, beside and of == "weights"
        if size % GRAIN:
            self.grain = size
            self._begin()
        self.per = size // self.grain
        shape = *self.lead, -(-self.q_len // size), -(-self.k_len // size)
        largest = torch.zeros(shape) if of == "weights" else torch.full(shape, -torch.inf)
        self.cells = Cells(torch.zeros(shape), torch.zeros(shape), largest)  # zeros take no memory until written
        self.largest, self.smallest = 0.0, float("inf")  # the largest of all, and the smallest positive mean of a cell
        self.tops = self.beside and A.device.type == "cpu"
        if self.beside:
            self.lse = torch.full((*self.lead, self.q_len), -torch.inf)
            self.entropy = torch.zeros(*self.lead, self.q_len)
        if self.tops:
            self.peaks = torch.zeros(2, *self.lead, self.q_len)

    def begun(self) -> Tensor:
        """Which rows of cells have something done: booleans."""
        rows = self.cells.sum.shape[-2]
        with self.changed:
            done = torch.nn.functional.pad(self.state == DONE, (0, rows * self.per - self.units))
        return done.view(rows, self.per).any(-1)

    def take(self, rows: slice) -> None:
        asked: list[Summary] = [Heatmap(cell=self.size, of=self.of)]
        asked += [LogSumExp(), Entropy()] if self.beside else []
        asked += [TopK(2)] if self.tops else []
        found = self.A.window(rows, slice(None), *asked)
        self._deposit(rows, found)

    def _deposit(self, rows: slice, found: Sequence[Any]) -> None:
        top = rows.start // self.size
        fresh = Cells(*(x.float().cpu() for x in found[0][:3]))
        at = (..., slice(top, top + fresh.sum.shape[-2]), slice(None))
        positive = fresh.sum / fresh.count.clamp(min=1)
        positive = positive[positive > 0]
        finite = fresh.max[torch.isfinite(fresh.max)]
        with self.changed:
            self.cells.sum[at] += fresh.sum
            self.cells.count[at] += fresh.count
            self.cells.max[at] = torch.maximum(self.cells.max[at], fresh.max)
            self.largest = max(self.largest, float(finite.max()) if len(finite) else 0.0)
            self.smallest = min(self.smallest, float(positive.min()) if len(positive) else float("inf"))
            if self.beside:
                self.lse[..., rows], self.entropy[..., rows] = found[1].float().cpu(), found[2].float().cpu()
            if self.tops:
                self.peaks[..., rows] = two_peaks(found[3])


def two_peaks(strongest: Top) -> Tensor:
    """The largest weight of some rows, with the first key and without, from their two strongest keys: [2, .., rows]."""
    largest, second = strongest.weights.float().cpu().unbind(-1)
    return torch.stack([largest, torch.where(strongest.indices[..., 0].cpu() == 0, second, largest)])


class Peaks(Rows):
    """The largest weight of each row, with the first key and without: [2, .., q_len]. Begun when first asked for."""

    def __init__(self, A: AttentionMatrix):
        super().__init__(A)
        self.peaks = torch.zeros(2, *self.lead, self.q_len)

    def take(self, rows: slice) -> None:
        (strongest,) = self.A.window(rows, slice(None), TopK(2))
        found = two_peaks(strongest)
        with self.changed:
            self.peaks[..., rows] = found


class Sums(Rows):
    """What adds up over rows: mass received by each key, and mass per displacement (none between points).

    These need the rows' log-sum-exp before they can be added, so they are a pass of their own after the cells'.
    """

    def __init__(self, A: AttentionMatrix, lse: Callable[[slice], Tensor | None]):
        super().__init__(A)
        self.lse, self.kind = lse, A.plan.form.q_geometry[0]
        self.received = torch.zeros(*self.lead, self.k_len, dtype=torch.float64)
        self.profile: Tensor | None = None  # as many axes as the geometry has

    def take(self, rows: slice) -> None:
        asked: list[Summary] = [Received(), *([] if self.kind == "points" else [Profile()])]
        lse = self.lse(rows)
        received, *profiles = self.A.window(rows, slice(None), *asked, lse=lse)
        with self.changed:
            self.received += received.cpu()
            for profile in (x.double().cpu() for x in profiles):
                if self.kind == "line":  # these rows meet the displacements from theirs on
                    if self.profile is None:
                        shape = *profile.shape[:-1], self.q_len + self.k_len - 1
                        self.profile = torch.zeros(shape, dtype=torch.float64)
                    self.profile[..., rows.start : rows.start + profile.shape[-1]] += profile
                else:
                    self.profile = profile if self.profile is None else self.profile + profile


def nearest(there: Tensor) -> Tensor:
    """For each of some places, the nearest at which `there` is true; itself where none is."""
    places, wanted = there.nonzero().flatten(), torch.arange(len(there))
    if not len(places):
        return wanted
    after = torch.searchsorted(places, wanted).clamp(max=len(places) - 1)
    before = (after - 1).clamp(min=0)
    nearer = (wanted - places[before]).abs() < (places[after] - wanted).abs()
    return torch.where(nearer, places[before], places[after])


def order_of(units: int, step: int, thin: int = THIN) -> list[range]:
    """Thin units spread over all, then the gaps between them, both in bit-reversed order.

    Without thin ones, steps: a device that computes thousands of rows at once gains nothing from few.
    """
    if units <= step:
        return [range(units)] if units else []
    if not thin:
        steps = [range(first, min(first + step, units)) for first in range(0, units, step)]
        return [steps[n] for n in bit_reversed(len(steps))]
    count = min(units, thin)
    at = [n * units // count for n in range(count)]
    order = [range(at[n], at[n] + 1) for n in bit_reversed(count)]
    gaps: list[range] = []
    for first, last in zip(at, [*at[1:], units], strict=True):
        gaps += [range(n, min(n + step, last)) for n in range(first + 1, last, step)]
    return order + [gaps[n] for n in bit_reversed(len(gaps))]


def bit_reversed(count: int) -> Iterator[int]:
    """0 .. count - 1, each as far from those before it as halving goes."""
    bits = max(count - 1, 0).bit_length()
    for n in range(1 << bits):
        turned = int(f"{n:0{bits}b}"[::-1], 2) if bits else 0
        if turned < count:
            yield turned
