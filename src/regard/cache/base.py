"""What a model asks of every cache: one step at a time, either taken whole or not at all.

    with cache.step(batch, q_len) as step:            # room is made first; without it nothing has changed
        held = step.layer(0).put(k, v)                # the layer's keys and values so far, these included
        ...                                           # the other layers
                                                      # only now do the sequences grow

Lengths are plain numbers on the host, so a step never waits for a device. Rows of a batch may have different lengths:
a row's keys stand at places 0, 1, 2 ... of its own, and padding on the right of a step's tokens is never kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

#: the key of a file's header that says what kind of cache it holds
HEADER = "regard cache"
_KINDS: dict[str, type[Cache]] = {}


class Run(NamedTuple):
    """Keys and values that follow one another, and the place of the first: a number, or one a batch row."""

    k: Tensor  # [batch, kv_heads, length, dim]
    v: Tensor  # [batch, kv_heads, length, v_dim]
    start: int | Tensor


class Held(NamedTuple):
    """What a layer's queries meet: runs of keys, and how many keys each row has when that differs."""

    runs: list[Run]
    lengths: Tensor | None


class Step:
    """Some tokens for every row of a batch, on their way through the layers."""

    def __init__(self, cache: Cache, starts: list[int], counts: list[int], q_len: int):
        self.cache, self.starts, self.counts, self.q_len = cache, starts, counts, q_len
        self.ends = [start + count for start, count in zip(starts, counts, strict=True)]
        #: every row begins at the same place and has the same number of tokens
        self.even = len(set(starts)) <= 1 and all(count == q_len for count in counts)
        self._start: int | Tensor | None = None
        self._ends: Tensor | None = None

    def layer(self, index: int) -> LayerStep:
        if not 0 <= index < self.cache.layers:
            raise IndexError(f"layer: the cache was made for {self.cache.layers} layers, found layer {index}")
        return LayerStep(self, index)

    def start(self, device: torch.device) -> int | Tensor:
        """The place of each row's first new token: a number when it is the same for all."""
        if self._start is None:
            same = len(set(self.starts)) <= 1
            self._start = (self.starts or [0])[0] if same else torch.tensor(self.starts, device=device)
        return self._start

    def lengths(self, device: torch.device) -> Tensor | None:
        """How many keys each row has after this step; None when all have the same."""
        if self._ends is None and not self.even:
            self._ends = torch.tensor(self.ends, device=device)
        return self._ends


class LayerStep(NamedTuple):
    """One layer's part of a step."""

    step: Step
    layer: int

    def put(self, k: Tensor, v: Tensor, *, reach: int | None = None, whole: bool = False) -> Held:
        """Keep k and v, and give what the layer's queries meet.

        reach   how far back the layer's mask lets a query look, None for everything
        whole   in one run, because the mask has to see all keys at once
        """
        batch, q_len = len(self.step.starts), self.step.q_len
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 4 or x.shape[0] != batch or x.shape[2] != q_len:
                raise ValueError(f"{name}: expected [{batch}, kv_heads, {q_len}, dim], found {list(x.shape)}")
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: a cache keeps no gradients; decode under torch.no_grad()")
        return self.step.cache.put(self.step, self.layer, k, v, reach, whole)


class Cache:
    """Base of all caches."""

    def __init__(self, layers: int):
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"layers: expected a positive number, found {layers!r}")
        self.layers = layers

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _KINDS[cls.__name__] = cls

    # what each kind defines

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has read."""
        raise TypeError(f"{type(self).__name__} defines no lengths")

    def prepare(self, batch: int, before: list[int] | None, counts: list[int], q_len: int) -> Step:
        """Make room for a step of rows with these lengths (None: new rows). If it raises, it has changed nothing."""
        raise TypeError(f"{type(self).__name__} defines no prepare")

    def put(self, step: Step, layer: int, k: Tensor, v: Tensor, reach: int | None, whole: bool) -> Held:
        raise TypeError(f"{type(self).__name__} defines no put")

    def commit(self, step: Step) -> None:
        """The step is done: its tokens count."""
        raise TypeError(f"{type(self).__name__} defines no commit")

    def abandon(self, step: Step) -> None:
        """The step failed: its tokens do not count."""

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget the tokens from `length` on, a number for all rows or one for each."""
        raise TypeError(f"{type(self).__name__} defines no crop")

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row n becomes what row rows[n] was. A row may be taken twice (beams), or not at all."""
        raise TypeError(f"{type(self).__name__} defines no reorder")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything it holds, as tensors and plain data."""
        raise TypeError(f"{type(self).__name__} defines no state")

    def restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        raise TypeError(f"{type(self).__name__} defines no restore")

    # what they share

    @contextmanager
    def step(self, batch: int, q_len: int, counts: Sequence[int] | None = None) -> Iterator[Step]:
        """Room for `q_len` more tokens in each row, of which counts[row] are real (all unless given)."""
        real = [q_len] * batch if counts is None else list(counts)
        if len(real) != batch or any(not 0 <= n <= q_len for n in real):
            raise ValueError(f"counts: expected {batch} numbers from 0 to {q_len}, found {real}")
        before = self.lengths
        if before and len(before) != batch:
            raise ValueError(f"batch: the cache holds {len(before)} rows, found {batch}")
        step = self.prepare(batch, before or None, real, q_len)
        try:
            yield step
        except BaseException:
            self.abandon(step)
            raise
        self.commit(step)

    def save(self, path: str | os.PathLike) -> None:
        """Write it to a safetensors file."""
        tensors, plain = self.state()
        header = json.dumps({"kind": type(self).__name__, **plain})
        safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, os.fspath(path), {HEADER: header})

    @classmethod
    def load(cls, path: str | os.PathLike, *, device: str = "cpu") -> Any:
        """The cache of a file: `Cache.load` takes any kind, `KVCache.load` a KVCache."""
        with safe_open(os.fspath(path), framework="pt", device=device) as file:
            header = file.metadata() or {}
            if HEADER not in header:
                raise ValueError(f"path: {os.fspath(path)} holds no cache: its header has no {HEADER!r}")
            plain = json.loads(header[HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        kind = _KINDS.get(plain.pop("kind"))
        if kind is None or not issubclass(kind, cls):
            raise TypeError(
                f"path: expected a {cls.__name__}, found a {kind.__name__ if kind else 'cache unknown here'}"
            )
        made = kind.__new__(kind)
        made.restore(tensors, plain)
        return made

    def _cropped(self, length: int | Sequence[int]) -> list[int]:
        """The new lengths, checked."""
        now = self.lengths
        wanted = [length] * len(now) if isinstance(length, int) else list(length)
        if len(wanted) != len(now) or any(not 0 <= n <= m for n, m in zip(wanted, now, strict=True)):
            raise ValueError(f"length: expected at most the lengths {now}, one a row, found {wanted}")
        return wanted

    def _rows(self, rows: Sequence[int] | Tensor) -> list[int]:
        """Rows to keep, checked."""
        wanted = [int(n) for n in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        count = len(self.lengths)
        if not wanted or any(not 0 <= n < count for n in wanted):
            raise ValueError(f"rows: expected numbers from 0 to {count - 1}, found {wanted}")
        return wanted

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layers} layers, lengths {self.lengths})"
