"""Caches with a row of a buffer for each sequence: all keys (KVCache), or the last ones in a ring (WindowCache).

A ring of C places holds place p at p mod C. The last keys then lie in at most two runs, and attention over both is
merged by their log-sum-exp, so that a decoding step copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Cache, Held, Run, Step

#: places a buffer begins with
CAPACITY = 64


class Line:
    """One layer's keys and values, place p at p. The buffer doubles when it is full."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def put(self, step: Step, k: Tensor, v: Tensor, reach: int | None, whole: bool) -> Held:
        end = max(start + step.q_len for start in step.starts) if step.starts else 0
        self.k, self.v = (_grown(x, new, end) for x, new in ((self.k, k), (self.v, v)))
        same = len(set(step.starts)) <= 1
        for buffer, new in ((self.k, k), (self.v, v)):
            if same:
                at = step.starts[0] if step.starts else 0
                buffer[:, :, at : at + step.q_len] = new
            else:
                rows, slots = _each(step.starts, step.q_len, k.device)
                buffer[rows, :, slots] = new.transpose(1, 2)
        first = 0
        if reach is not None and same and not whole:  # the keys that no query of this step can see are left out
            first = max(0, step.starts[0] - reach) if step.starts else 0
        run = Run(self.k[:, :, first:end], self.v[:, :, first:end], first)
        return Held([run], step.lengths(k.device))

    def reorder(self, rows: Tensor) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = (x.index_select(0, rows.to(x.device)) for x in (self.k, self.v))

    def state(self, longest: int) -> dict[str, Tensor]:
        return {} if self.k is None or self.v is None else {"k": self.k[:, :, :longest], "v": self.v[:, :, :longest]}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.k, self.v = tensors.get("k"), tensors.get("v")


def _grown(buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
    """A buffer with room for `end` places. What is not written yet is zero: a weight of 0 must give 0."""
    room = CAPACITY if buffer is None else buffer.shape[2]
    if buffer is not None:
        _check_like(buffer, new)
        if room >= end:
            return buffer
    while room < end:
        room = max(2 * room, 1)
    grown = new.new_zeros(new.shape[0], new.shape[1], room, new.shape[3])
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown


def _check_like(buffer: Tensor, new: Tensor) -> None:
    if buffer.dtype != new.dtype or buffer.device != new.device:
        raise ValueError(f"cache: it holds {buffer.dtype} on {buffer.device}, found {new.dtype} on {new.device}")
    if (buffer.shape[0], buffer.shape[1], buffer.shape[3]) != (new.shape[0], new.shape[1], new.shape[3]):
        want = [buffer.shape[0], buffer.shape[1], new.shape[2], buffer.shape[3]]
        raise ValueError(f"cache: expected keys and values of shape {want}, found {list(new.shape)}")


def _each(starts: Sequence[int], count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices [batch, 1] and [batch, count] of `count` places in each row, from its start on."""
    rows = torch.arange(len(starts), device=device)[:, None]
    return rows, torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)


class Ring:
    """One layer's last keys and values, place p at p mod capacity.

    A query sees its own key and `window` before it, so that many places are enough. With `slack` more places,
    tokens can be cropped away after older ones were forgotten, and pieces of that many tokens written without a copy.
    """

    def __init__(self, window: int, slack: int):
        self.window, self.capacity = window, window + 1 + slack
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.first: list[int] = []  # the oldest place each row still holds

    def check(self, row: int, start: int) -> None:
        """Raise unless the keys that a query at `start` sees are still here."""
        if self.first and self.first[row] > max(0, start - self.window):
            raise ValueError(
                f"cache: a query at {start} sees keys from {max(0, start - self.window)} on, but row {row} has kept "
                f"those from {self.first[row]} on; give WindowCache more slack to crop it so far"
            )

    def put(self, step: Step, k: Tensor, v: Tensor, reach: int | None, whole: bool) -> Held:
        if reach is None or reach > self.window:
            far = "all keys before it" if reach is None else f"{reach} keys before it"
            raise ValueError(
                f"cache: WindowCache keeps {self.window} keys before a query, but the layer's mask lets it see {far}; "
                "give the layer mask=window(...), or use a KVCache"
            )
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_zeros(x.shape[0], x.shape[1], self.capacity, x.shape[3]) for x in (k, v))
            self.first = [0] * k.shape[0]
        for buffer, new in ((self.k, k), (self.v, v)):
            _check_like(buffer, new)
        for row, start in enumerate(step.starts):
            self.check(row, start)
        if step.even:
            runs = self._even(step.starts[0] if step.starts else 0, step.q_len, k, v, whole)
            return Held(runs, None)
        return self._uneven(step, k, v)

    def _even(self, start: int, count: int, k: Tensor, v: Tensor, whole: bool) -> list[Run]:
        """All rows alike."""
        low, end = max(0, start - self.window), start + count
        if count <= self.capacity - self.window:  # nothing that these queries see is overwritten
            self._write(start, k, v)
            runs = self._runs(low, end)
        else:
            runs = [*self._runs(low, start), Run(k, v, start)]
            whole = True
        if len(runs) > 1 and whole:
            runs = [Run(torch.cat([r.k for r in runs], 2), torch.cat([r.v for r in runs], 2), runs[0].start)]
        if count > self.capacity - self.window:
            self._write(start, k, v)
        return runs

    def _runs(self, low: int, end: int) -> list[Run]:
        """Places low .. end - 1 as views: one run, or two when the ring closes between them."""
        assert self.k is not None and self.v is not None
        runs = []
        while low < end:
            at = low % self.capacity
            size = min(end - low, self.capacity - at)
            runs.append(Run(self.k[:, :, at : at + size], self.v[:, :, at : at + size], low))
            low += size
        return runs

    def _write(self, start: int, k: Tensor, v: Tensor) -> None:
        assert self.k is not None and self.v is not None
        end = start + k.shape[2]
        place = max(start, end - self.capacity)  # earlier ones would be overwritten at once
        while place < end:
            at = place % self.capacity
            size = min(end - place, self.capacity - at)
            for buffer, new in ((self.k, k), (self.v, v)):
                buffer[:, :, at : at + size] = new[:, :, place - start : place - start + size]
            place += size
        self.first = [max(first, end - self.capacity) for first in self.first]

    def _uneven(self, step: Step, k: Tensor, v: Tensor) -> Held:
        """Rows of different lengths: what each needs is gathered into one run, its new tokens after its old ones."""
        assert self.k is not None and self.v is not None
        lows = [max(0, start - self.window) for start in step.starts]
        olds = [start - low for start, low in zip(step.starts, lows, strict=True)]
        rows, places = _each(lows, max(olds), k.device)
        _, fresh = _each(olds, step.q_len, k.device)
        runs = []
        for buffer, new in ((self.k, k), (self.v, v)):
            run = new.new_zeros(new.shape[0], new.shape[1], max(olds) + step.q_len, new.shape[3])
            run[:, :, : max(olds)] = buffer[rows, :, places % self.capacity].transpose(1, 2)
            run[rows, :, fresh] = new.transpose(1, 2)
            runs.append(run)
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            kept = min(count, self.capacity)
            if not kept:
                continue
            slots = torch.arange(start + count - kept, start + count, device=k.device) % self.capacity
            for buffer, new in ((self.k, k), (self.v, v)):
                buffer[row, :, slots] = new[row, :, count - kept : count]
            self.first[row] = max(self.first[row], start + count - self.capacity)
        return Held([Run(runs[0], runs[1], torch.tensor(lows, device=k.device))], step.lengths(k.device))

    def reorder(self, rows: Tensor) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = (x.index_select(0, rows.to(x.device)) for x in (self.k, self.v))
            self.first = [self.first[row] for row in rows.tolist()]

    def state(self, longest: int) -> dict[str, Tensor]:
        if self.k is None or self.v is None:
            return {}
        return {"k": self.k, "v": self.v, "first": torch.tensor(self.first)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.k, self.v = tensors.get("k"), tensors.get("v")
        self.first = tensors["first"].tolist() if "first" in tensors else []


class RowCache(Cache):
    """A store for each layer, and the lengths that they share."""

    stores: Sequence[Any]

    def __init__(self, layers: int):
        super().__init__(layers)
        self._lengths: list[int] = []

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def prepare(self, batch: int, before: list[int] | None, counts: list[int], q_len: int) -> Step:
        return Step(self, before or [0] * batch, counts, q_len)

    def put(self, step: Step, layer: int, k: Tensor, v: Tensor, reach: int | None, whole: bool) -> Held:
        return self.stores[layer].put(step, k, v, reach, whole)

    def commit(self, step: Step) -> None:
        self._lengths = list(step.ends)

    def crop(self, length: int | Sequence[int]) -> None:
        wanted = self._cropped(length)
        for store in self.stores:
            if isinstance(store, Ring):
                for row, start in enumerate(wanted):
                    store.check(row, start)
        self._lengths = wanted

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        wanted = self._rows(rows)
        for store in self.stores:
            store.reorder(torch.tensor(wanted, dtype=torch.long))
        self._lengths = [self._lengths[row] for row in wanted]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        longest = max(self._lengths, default=0)
        tensors = {f"{layer}.{name}": x for layer, s in enumerate(self.stores) for name, x in s.state(longest).items()}
        return tensors, {"layers": self.layers, "lengths": self._lengths}

    def restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        self._lengths = list(plain["lengths"])
        for layer, store in enumerate(self.stores):
            own = {n.split(".")[1]: x for n, x in tensors.items() if n.split(".")[0] == str(layer)}
            store.restore(own)


class KVCache(RowCache):
    """All keys and values, in buffers that double when they are full."""

    def __init__(self, layers: int = 1):
        super().__init__(layers)
        self.stores = [Line() for _ in range(layers)]

    def restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        KVCache.__init__(self, plain["layers"])
        super().restore(tensors, plain)


class WindowCache(RowCache):
    """The keys and values that a sliding window still sees.

    window   how many keys before a query are kept: a number, or one a layer (None: that layer keeps all)
    slack    once old keys are forgotten, one token may be cropped away again, and this many more
    """

    def __init__(self, layers: int = 1, *, window: int | Sequence[int | None], slack: int = 0):
        super().__init__(layers)
        windows: Sequence[int | None] = [window] * layers if isinstance(window, int) else list(window)
        if len(windows) != layers or any(w is not None and (not isinstance(w, int) or w < 0) for w in windows):
            raise ValueError(
                f"window: expected a number >= 0, or one (or None) for each of {layers} layers, found {window!r}"
            )
        if not isinstance(slack, int) or slack < 0:
            raise ValueError(f"slack: expected a number >= 0, found {slack!r}")
        self.windows, self.slack = list(windows), slack
        self.stores = [Line() if w is None else Ring(w, slack) for w in windows]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, plain = super().state()
        return tensors, {**plain, "window": self.windows, "slack": self.slack}

    def restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        WindowCache.__init__(self, plain["layers"], window=plain["window"], slack=plain["slack"])
        super().restore(tensors, plain)
