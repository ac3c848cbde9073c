"""Cells of A that are filled a few rows at a time, in any order: a sample of them at once, all of them in the end.

A pass over some rows gives their exact log-sum-exp and, with it, sums, visible pairs and maxima of the cells they lie
in (`AttentionMatrix.window`). Rows are taken in bit-reversed order, thin ones spread over all of A first, then the gaps
between them, and whatever somebody waits for before either. So at any moment the cells hold a fair sample of the rows
that are done, and when the last row is done, they are exact.

Several threads may work on one Pools: rows are claimed, so that none is computed twice.

On a device (a GPU) the cells stay there, and a step is tens of thousands of rows, whole cells of them: few launches, no
copies. Its kernels are compiled before its first step (`prepare`); until then a sample of some rows in each part of A
is made by plain operations (`preview`), and is overwritten by the cells themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Entropy, Heatmap, LogSumExp, Summary, Top, TopK
from .cells import Cells, Sample, Sampled, is_known, kind_of, learn, plainly
from .order import THIN, bit_reversed, order_of

#: rows that are claimed together at the least
GRAIN = 32
#: pairs that one step looks at, about: a tenth of a second of one CPU core, or less of a GPU
STEP, STEP_DEVICE = 1 << 25, 1 << 36
#: rows that one multiprocessor of a GPU looks at at a time: four blocks of 64
WAVE = 256
#: how many times longer a pair takes where it is not taken in by one compiled pass
SLOWER = 8
#: strips of the sample that make a first picture
FIRST = 48
#: rows of a cell that a preview looks at, and rows that are taken in by plain operations while kernels are not there
SOME, PLAIN = 16, 2048
#: spans of rows that are remembered as looked at
PREFERRED = 8

TO_DO, CLAIMED, DONE = range(3)


class Cancelled(Exception):
    """Nobody waits for it any more."""


def on_device(A: AttentionMatrix) -> bool:
    """It is computed elsewhere than on the CPU: by few large steps, whose results stay there."""
    return A.device.type != "cpu"


def processors(A: AttentionMatrix) -> int:
    """Of the GPU that A is on; 0 elsewhere."""
    return torch.cuda.get_device_properties(A.device).multi_processor_count if A.device.type == "cuda" else 0


class Rows:
    """Rows of A, [q_len, k_len] or [heads, q_len, k_len], that are taken in once each, by whoever claims them."""

    #: there are kernels for what is taken in: on a device, many rows at a time
    fused = True
    #: how many passes over its pairs a step is: on a device, others wait for it
    passes = 1

    def __init__(self, A: AttentionMatrix, per: int = 1):
        self.A, self.per = A, per  # units of rows that belong together
        *lead, self.q_len, self.k_len = A.shape
        self.lead, self.grain = tuple(lead), GRAIN
        self.changed = threading.Condition()
        self.fused = self.fused and (A.plan.fused or not on_device(A))
        self._begin()

    def _begin(self) -> None:
        self.units = -(-self.q_len // self.grain)
        self.state = torch.zeros(self.units, dtype=torch.uint8)
        heads = self.lead[0] if self.lead else 1
        few = not self.fused or not on_device(self.A)
        pairs = STEP // SLOWER if not self.fused else STEP if few else STEP_DEVICE // self.passes
        wanted = pairs // max(1, heads * self.k_len) // self.grain
        if not few:  # as many rows as keep every multiprocessor busy to the end
            wave = processors(self.A) * WAVE // self.grain
            wanted -= wanted % wave if 0 < wave < wanted else 0
        self.step_units = max(1, min(self.units, wanted))
        self.order = order_of(self.units, self.step_units, THIN if few else 0)
        self.at = self.done = 0
        self._preferred: list[range] = []

    def take(self, rows: slice) -> None:
        """Compute and keep what some rows give."""
        raise NotImplementedError

    def lengths(self) -> list[int]:
        """How many rows its steps have, where kernels are compiled for them."""
        if not self.fused or not on_device(self.A):
            return []
        ends = ((run.start * self.grain, min(run.stop * self.grain, self.q_len)) for run in self.order)
        return sorted({last - first for first, last in ends}, reverse=True)

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
             key and without). On a device only lse: the others are in passes of their own, for they take as long
    """

    def __init__(self, A: AttentionMatrix, size: int, *, of: str = "weights", beside: bool = True):
        self.away = on_device(A)
        self.fused = of == "weights" or not self.away  # logits have no kernel there
        super().__init__(A)
        self.size, self.of, self.beside = size, of, beside and of == "weights"
        if size % GRAIN or self.away:
            self.grain = size
            self._begin()
        self.per = size // self.grain
        rows = -(-self.q_len // size)
        self.cells = Cells.empty((*self.lead, rows, -(-self.k_len // size)), of, A.device)
        self.edge = Cells.empty((*self.lead, rows, 1), of, A.device)  # the first column, without the first key
        self.edged = torch.zeros(self.units, dtype=torch.bool)  # whose rows are in it
        self.previewed = torch.zeros(rows, dtype=torch.bool)  # of which there is a sample
        self._previewing = threading.Lock()
        self.largest, self.smallest = 0.0, float("inf")  # the largest of all, and the smallest positive mean of a cell
        self.tops = self.beside and not self.away
        if self.beside:
            self.lse = torch.full((*self.lead, self.q_len), -torch.inf, device=A.device)
        if self.tops:
            self.entropy = torch.zeros(*self.lead, self.q_len)
            self.peaks = torch.zeros(2, *self.lead, self.q_len)

    def begun(self) -> Tensor:
        """Which rows of cells have something to show: booleans."""
        rows = len(self.previewed)
        with self.changed:
            done = torch.nn.functional.pad(self.state == DONE, (0, rows * self.per - self.units))
            return done.view(rows, self.per).any(-1) | self.previewed

    # Before the kernels are there

    @property
    def ready(self) -> bool:
        """Its steps compile nothing."""
        return all(is_known(self._kind(rows)) for rows in self.lengths())

    def _kind(self, rows: int) -> tuple | None:
        return kind_of(self.A, rows, self.k_len, *self._asked())

    def prepare(self) -> bool:
        """Have the kernels of one kind of step compiled, by one that is thrown away; False if all are."""
        for rows in self.lengths():
            kind = self._kind(rows)
            if not is_known(kind):
                self.A.window(slice(0, rows), slice(None), *self._asked())
                learn(kind)
                return True
        return False

    def preview(self, stop: Callable[[], bool] = lambda: False) -> None:
        """A few rows of cells spread over all, by plain operations: something to show while kernels are compiled."""
        with self._previewing:
            rows = len(self.previewed)
            count = min(FIRST, rows)
            at = [n * rows // count for n in range(count)]
            told = []
            for n in (at[m] for m in bit_reversed(count)):
                if self.previewed[n] or self.state[n] == DONE:
                    continue
                if stop():
                    raise Cancelled
                first, last = n * self.size, min((n + 1) * self.size, self.q_len)
                first = max(first, (first + last - SOME) // 2)
                (found,) = self.A.window(
                    slice(first, min(first + SOME, last)), slice(None), Sampled(cell=self.size, of=self.of)
                )
                told.append(self._show(n, found))
            if told:
                self._widen(torch.stack(told))

    def _show(self, n: int, found: Sample) -> Tensor:
        """Put a sample into a row of cells, unless it is there itself by now; its range."""
        fresh, first = Cells(*found[:3]), Cells(*found[3:])
        at = (..., slice(n, n + 1), slice(None))
        with self.changed:
            if self.state[n] != DONE:
                for kept, x in zip((*self.cells, *self.edge), (*fresh, *first), strict=True):
                    kept[at] = x.to(kept.dtype)
                self.previewed[n] = True
        return fresh.range().float()

    # Rows

    def step(self) -> bool:
        if not self.ready:
            self.preview()
            while self.prepare():
                pass
        return super().step()

    def sample(self, stop: Callable[[], bool] = lambda: False) -> None:
        if self.away and not self.done and (self.previewed.any() or not self.fused or not self.ready):
            self.preview(stop)
        else:
            super().sample(stop)

    def _asked(self) -> list[Summary]:
        asked: list[Summary] = [Heatmap(cell=self.size, of=self.of)]
        asked += [LogSumExp()] if self.beside else []
        return asked + ([Entropy(), TopK(2)] if self.tops else [])

    def take(self, rows: slice) -> None:
        asked, count = self._asked(), rows.stop - rows.start
        if count <= (self.size if self.ready else PLAIN) and not is_known(self._kind(count)):
            asked = [plainly(each) for each in asked]
        found = self.A.window(rows, slice(None), *asked)
        self._deposit(rows, found)

    def _deposit(self, rows: slice, found: Sequence[Any]) -> None:
        top = rows.start // self.size
        fresh = Cells(*(x.float() for x in found[0][:3]))
        at = (..., slice(top, top + fresh.sum.shape[-2]), slice(None))
        told = fresh.range()
        with self.changed:
            if self.per == 1:  # whole cells, in place of a sample of them
                for kept, x in zip(self.cells, fresh, strict=True):
                    kept[at] = x
            else:
                self.cells.sum[at] += fresh.sum
                self.cells.count[at] += fresh.count
                self.cells.max[at] = torch.maximum(self.cells.max[at], fresh.max)
            if self.beside:
                self.lse[..., rows] = found[1].float()
            if self.tops:
                self.entropy[..., rows] = found[2].float()
                self.peaks[..., rows] = two_peaks(found[3])
        self._widen(told)

    def _widen(self, told: Tensor) -> None:
        """Take in ranges of some cells. What a device was asked for is there after it."""
        pairs = told.view(-1, 2).tolist()
        with self.changed:
            self.largest = max(self.largest, *(high for high, _ in pairs))
            self.smallest = min(self.smallest, *(low for _, low in pairs))


def two_peaks(strongest: Top) -> Tensor:
    """The largest weight of some rows, with the first key and without, from their two strongest keys: [2, .., rows]."""
    largest, second = strongest.weights.float().cpu().unbind(-1)
    return torch.stack([largest, torch.where(strongest.indices[..., 0].cpu() == 0, second, largest)])
