"""PagedCache: keys and values of many sequences in pages of one pool.

Each sequence lists its pages. `fork` makes another sequence that shares them, and a shared page is copied only when one
of its sequences writes to it: beams and common prompts are kept once. Pages are counted by their sequences, so that a
page is free exactly when nobody lists it. When the pool is full a step raises `PoolFull` before anything has changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Cache, Held, Run, Step


class PoolFull(RuntimeError):
    """There are not enough free pages for a step; nothing has changed."""


class Listed:
    """A sequence: its pages in order, and how many tokens it has."""

    def __init__(self, pages: list[int], length: int):
        self.pages, self.length = pages, length


class PagedStep(Step):
    """A step, with where its tokens go and where its keys are: the same in every layer."""

    def __init__(self, cache: Paged, ids: list[int], counts: list[int], q_len: int, fresh: bool):
        super().__init__(cache, [cache.pool.sequence(i).length for i in ids], counts, q_len)
        self.pool, self.ids, self.fresh = cache.pool, ids, fresh
        self._targets: tuple[Tensor, Tensor | None] | None = None
        self._sources: dict[int | None, tuple[list[int], Tensor | slice]] = {}

    def targets(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Slots of the new tokens, and which tokens of the flattened [batch * q_len] they are (None: all)."""
        if self._targets is None:
            slots: list[int] = []
            chosen: list[int] = []
            for row, (seq, start, count) in enumerate(zip(self.ids, self.starts, self.counts, strict=True)):
                slots += self.pool.slots(seq, start, start + count)
                chosen += range(row * self.q_len, row * self.q_len + count)
            all_of_it = len(chosen) == len(self.ids) * self.q_len
            self._targets = (
                torch.tensor(slots, dtype=torch.long, device=device),
                None if all_of_it else torch.tensor(chosen, dtype=torch.long, device=device),
            )
        return self._targets

    def sources(self, reach: int | None, device: torch.device) -> tuple[list[int], Tensor | slice]:
        """The place of each row's first key, and the slots of its keys: [batch, longest], or a slice of the pool."""
        if reach not in self._sources:
            lows = [0 if reach is None else max(0, start - reach) for start in self.starts]
            rows = [self.pool.slots(seq, low, end) for seq, low, end in zip(self.ids, lows, self.ends, strict=True)]
            longest = max(map(len, rows), default=0)
            found: Tensor | slice
            if len(rows) == 1 and longest and rows[0][-1] - rows[0][0] == longest - 1 and self.pool.straight(rows[0]):
                found = slice(rows[0][0], rows[0][0] + longest)  # pages in a row: nothing needs to be copied
            else:
                rows = [row + [self.pool.nowhere] * (longest - len(row)) for row in rows]
                found = torch.tensor(rows, dtype=torch.long, device=device).reshape(len(rows), longest)
            self._sources[reach] = (lows, found)
        return self._sources[reach]


class Paged(Cache):
    """Some sequences of a pool as the rows of a batch."""

    pool: PagedCache

    @property
    def ids(self) -> list[int]:
        """The sequences that are the rows, in order."""
        raise TypeError(f"{type(self).__name__} defines no ids")

    def _take(self, ids: list[int]) -> None:
        """The rows are these sequences from now on."""
        raise TypeError(f"{type(self).__name__} defines no _take")

    @property
    def lengths(self) -> list[int]:
        return [self.pool.sequence(i).length for i in self.ids]

    def prepare(self, batch: int, before: list[int] | None, counts: list[int], q_len: int) -> Step:
        pool, fresh = self.pool, not self.ids
        wanted = pool.wanted(self.ids, counts) if not fresh else sum(-(-n // pool.page_size) for n in counts)
        if wanted > len(pool.spare):
            raise PoolFull(
                f"pool: this step needs {wanted} more pages of {pool.page_size} tokens, {len(pool.spare)} of "
                f"{pool.pages} are free; free a sequence, crop one, or make a larger PagedCache"
            )
        if fresh:
            self._take([pool.add() for _ in range(batch)])
        for seq, count in zip(self.ids, counts, strict=True):
            pool.make_room(seq, count)
        return PagedStep(self, list(self.ids), counts, q_len, fresh)

    def put(self, step: Step, layer: int, k: Tensor, v: Tensor, reach: int | None, whole: bool) -> Held:
        assert isinstance(step, PagedStep)
        slots, chosen = step.targets(k.device)
        lows, source = step.sources(reach if not whole else None, k.device)
        parts = []
        for store, new in ((self.pool.k, k), (self.pool.v, v)):
            pool = self.pool.room(store, layer, new)
            flat = new.transpose(0, 1).flatten(1, 2)  # [kv_heads, batch * q_len, dim]
            pool[:, slots] = flat if chosen is None else flat[:, chosen]
            if isinstance(source, slice):
                parts.append(pool[None, :, source])
            else:
                found = pool.index_select(1, source.flatten())
                parts.append(found.unflatten(1, source.shape).transpose(0, 1))
        same = len(set(lows)) <= 1
        start = (lows or [0])[0] if same else torch.tensor(lows, device=k.device)
        return Held([Run(parts[0], parts[1], start)], step.lengths(k.device))

    def commit(self, step: Step) -> None:
        assert isinstance(step, PagedStep)
        for seq, end in zip(step.ids, step.ends, strict=True):
            self.pool.sequence(seq).length = end

    def abandon(self, step: Step) -> None:
        assert isinstance(step, PagedStep)
        for seq in step.ids:
            self.pool.trim(seq)
        if step.fresh:
            for seq in step.ids:
                self.pool.free(seq)
            self._take([])

    def crop(self, length: int | Sequence[int]) -> None:
        for seq, wanted in zip(self.ids, self._cropped(length), strict=True):
            self.pool.sequence(seq).length = wanted
            self.pool.trim(seq)

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """A row taken again is forked, one not taken is freed."""
        before, used, after = list(self.ids), set(), []
        for row in self._rows(rows):
            after.append(self.pool.fork(before[row]) if row in used else before[row])
            used.add(row)
        for row, seq in enumerate(before):
            if row not in used:
                self.pool.free(seq)
        self._take(after)


class PagedBatch(Paged):
    """Chosen sequences of a PagedCache as a batch. Made by `PagedCache.batch`."""

    def __init__(self, pool: PagedCache, ids: Sequence[int]):
        super().__init__(pool.layers)
        self.pool = pool
        for seq in ids:
            pool.sequence(seq)
        if len(set(ids)) != len(ids):
            raise ValueError(f"ids: a sequence can be in a batch once, found {list(ids)} (fork it)")
        self._ids = list(ids)

    @property
    def ids(self) -> list[int]:
        return self._ids

    def _take(self, ids: list[int]) -> None:
        self._ids = ids

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise ValueError("save: a batch is a view of its PagedCache; save that")


class PagedCache(Paged):
    """All keys and values of many sequences, in `pages` pages of `page_size` tokens.

    Used as a cache itself, its rows are all its sequences, the oldest first; `batch(ids)` makes some of them the rows.
    """

    def __init__(self, layers: int = 1, *, pages: int, page_size: int = 16):
        super().__init__(layers)
        for name, n in (("pages", pages), ("page_size", page_size)):
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"{name}: expected a positive number, found {n!r}")
        self.pages, self.page_size, self.pool = pages, page_size, self
        self.k: list[Tensor | None] = [None] * layers  # [kv_heads, pages * page_size + 1, dim]
        self.v: list[Tensor | None] = [None] * layers
        self.users = [0] * pages  # how many sequences list each page
        self.spare = list(range(pages))  # a heap: low pages first, so that a sequence's pages often lie in a row
        self.sequences: dict[int, Listed] = {}
        self._next = 0
        self._order: list[int] = []

    # sequences

    @property
    def ids(self) -> list[int]:
        return self._order

    def _take(self, ids: list[int]) -> None:
        self._order = ids

    def add(self) -> int:
        """A new, empty sequence."""
        return self._new(Listed([], 0))

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens; they share pages until one of them writes."""
        listed = self.sequence(seq)
        for page in listed.pages:
            self.users[page] += 1
        return self._new(Listed(list(listed.pages), listed.length))

    def free(self, seq: int) -> None:
        """Forget a sequence. Its pages are free once no other sequence lists them."""
        self._release(self.sequence(seq).pages)
        del self.sequences[seq]
        self._order = [i for i in self._order if i != seq]

    def batch(self, ids: Sequence[int]) -> PagedBatch:
        """Some sequences as the rows of a batch: `model(tokens, cache=pool.batch([a, b]))`."""
        return PagedBatch(self, ids)

    def sequence(self, seq: int) -> Listed:
        """Pages and length of a sequence."""
        if seq not in self.sequences:
            raise KeyError(f"sequence {seq} is not in the cache: it was freed, or never added")
        return self.sequences[seq]

    def _new(self, listed: Listed) -> int:
        seq, self._next = self._next, self._next + 1
        self.sequences[seq] = listed
        self._order = [*self._order, seq]
        return seq

    # pages

    @property
    def nowhere(self) -> int:
        """A slot past the last page that stays zero: what the padding of short rows reads."""
        return self.pages * self.page_size

    def slots(self, seq: int, low: int, end: int) -> list[int]:
        """Where the tokens low .. end - 1 of a sequence lie."""
        pages, size = self.sequence(seq).pages, self.page_size
        found: list[int] = []
        while low < end:
            page, at = divmod(low, size)
            count = min(size - at, end - low)
            first = pages[page] * size + at
            found += range(first, first + count)
            low += count
        return found

    def straight(self, slots: list[int]) -> bool:
        """Whether slots follow one another."""
        return slots == list(range(slots[0], slots[0] + len(slots)))

    def _copies(self, listed: Listed, users: list[int]) -> bool:
        """Whether writing at the end of a sequence means copying its last page."""
        return listed.length % self.page_size > 0 and users[listed.pages[-1]] > 1

    def wanted(self, ids: list[int], counts: list[int]) -> int:
        """How many free pages these sequences need for so many more tokens each."""
        users, total = list(self.users), 0
        for seq, count in zip(ids, counts, strict=True):
            listed = self.sequence(seq)
            total += max(0, -(-(listed.length + count) // self.page_size) - len(listed.pages))
            if count and self._copies(listed, users):
                users[listed.pages[-1]] -= 1
                total += 1
        return total

    def make_room(self, seq: int, count: int) -> None:
        """Pages for `count` more tokens of a sequence; its last page becomes its own."""
        listed = self.sequence(seq)
        if count and self._copies(listed, self.users):
            old, new = listed.pages[-1], self._page()
            size = self.page_size
            for pool in (*self.k, *self.v):
                if pool is not None:
                    pool[:, new * size : (new + 1) * size] = pool[:, old * size : (old + 1) * size]
            self._release([old])
            listed.pages[-1] = new
        while len(listed.pages) * self.page_size < listed.length + count:
            listed.pages.append(self._page())

    def trim(self, seq: int) -> None:
        """Give back the pages past a sequence's end."""
        listed = self.sequence(seq)
        kept = -(-listed.length // self.page_size)
        self._release(listed.pages[kept:])
        del listed.pages[kept:]

    def _page(self) -> int:
        page = heapq.heappop(self.spare)
        self.users[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                heapq.heappush(self.spare, page)

    def room(self, store: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        """A layer's pool, made when the first keys or values say what they are like."""
        pool = store[layer]
        if pool is None:
            pool = store[layer] = new.new_zeros(new.shape[1], self.nowhere + 1, new.shape[3])
        if pool.dtype != new.dtype or pool.device != new.device:
            raise ValueError(f"cache: it holds {pool.dtype} on {pool.device}, found {new.dtype} on {new.device}")
        if (pool.shape[0], pool.shape[2]) != (new.shape[1], new.shape[3]):
            raise ValueError(
                f"cache: expected {pool.shape[0]} heads of dim {pool.shape[2]}, found {new.shape[1]} of {new.shape[3]}"
            )
        return pool

    # files

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        used = [page for page in range(self.pages) if self.users[page]]
        size = self.page_size
        slots = torch.tensor([slot for page in used for slot in range(page * size, (page + 1) * size)]).long()
        tensors = {
            f"{name}.{layer}": pool[:, slots.to(pool.device)]
            for name, store in (("k", self.k), ("v", self.v))
            for layer, pool in enumerate(store)
            if pool is not None
        }
        sequences = [[seq, listed.pages, listed.length] for seq, listed in self.sequences.items()]
        return tensors, {
            "layers": self.layers, "pages": self.pages, "page_size": size, "used": used, "sequences": sequences,
            "order": self._order, "next": self._next,
        }  # fmt: skip

    def restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        PagedCache.__init__(self, plain["layers"], pages=plain["pages"], page_size=plain["page_size"])
        size = self.page_size
        slots = torch.tensor([slot for page in plain["used"] for slot in range(page * size, (page + 1) * size)]).long()
        for key, kept in tensors.items():
            name, layer = key.split(".")
            pool = kept.new_zeros(kept.shape[0], self.nowhere + 1, kept.shape[2])
            pool[:, slots.to(pool.device)] = kept
            (self.k if name == "k" else self.v)[int(layer)] = pool
        for seq, pages, length in plain["sequences"]:
            self.sequences[seq] = Listed(list(pages), length)
            for page in pages:
                self.users[page] += 1
        self.spare = [page for page in range(self.pages) if not self.users[page]]
        self._order, self._next = list(plain["order"]), plain["next"]
