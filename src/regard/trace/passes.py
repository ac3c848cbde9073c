"""The passes of one layer: the steps of a generation are joined into one A where that says what the steps said.

A step continues a pass when it begins where the pass ends, its keys are the pass's keys and more, and one mask gives
both the rows they had. So it is not continued when rows were reordered between steps (beams), when a cache has let go
of keys that no mask hides, or when a second text begins: that is a pass of its own, and the trace says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import masks
from ..description import Description
from ..geometry import Line
from . import stored
from .keeping import Kept, to_host

#: pairs of a mask that is written out because no other says what the steps saw
PAIRS = 1 << 22
#: chunks of a pass before they are put together
CHUNKS = 64


class Chunks:
    """A tensor [batch, heads, length, ...] that grows at its end, kept in pieces."""

    def __init__(self, kept: Kept, what: str):
        self.kept, self.what = kept, what
        self.names: list[str] = []
        self.length = 0

    def append(self, x: Tensor) -> None:
        self.names.append(self.kept.put(x, self.what))
        self.length += x.shape[2]
        if len(self.names) > CHUNKS:
            self.whole()

    def whole(self) -> str:
        """The name of all of it, put together."""
        if len(self.names) > 1:
            made = torch.cat([self.kept[name] for name in self.names], dim=2)
            for name in self.names:
                self.kept.drop(name)
            self.names = [self.kept.put(made, self.what)]
        return self.names[0]

    def ends_as(self, x: Tensor, first: int) -> bool:
        """Whether what is kept from place `first` on is the beginning of x."""
        at = 0
        for name in self.names:
            part = self.kept[name]
            skip = max(0, first - at)
            if skip < part.shape[2]:
                here = at + skip - first
                if not torch.equal(part[:, :, skip:], x[:, :, here : here + part.shape[2] - skip]):
                    return False
            at += part.shape[2]
        return True


class Pass:
    """What one layer attended to in one go, or in steps that follow each other."""

    def __init__(
        self, kept: Kept, own: list[Any], d: Description, said: dict[str, Any], heads: Sequence[int], cross: bool
    ):
        self.kept, self.own, self.said, self.heads, self.cross = kept, own, said, tuple(heads), cross
        self.q, self.k, self.v, self.lse = (Chunks(kept, what) for what in ("q", "k", "v", "lse"))
        self.tokens: list[Tensor | None] = []
        self.real: list[Tensor | None] = []
        self.exact = True  # every step's log-sum-exp is known
        self.steps = 0
        self.batch = d.q.shape[0]
        self.starts = d.q_start, d.k_start
        self.causal = d.mask is not None and d.mask.ordered
        self.mask = self._mask(said)

    def _mask(self, said: dict[str, Any]) -> Any:
        """A mask whose tensors are ours, whatever becomes of the model's."""
        reading = stored.Reading(self.kept.__getitem__, self.own)
        return None if said["mask"] is None else reading.object(said["mask"], "mask", "mask")

    def take(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
        """Add queries, and the keys (and values) that are new."""
        self.q.append(q)
        if k is not None:
            self.k.append(k)
        if v is not None:
            self.v.append(v)
        self.steps += 1

    @property
    def sees_itself(self) -> bool:
        """Queries and keys are the same tokens."""
        return not self.cross and self.k.length == self.q.length and _less(*self.starts) == 0

    def take_lse(self, lse: Tensor | None) -> None:
        if lse is None:
            self.exact = False
        elif self.exact:
            self.lse.append(lse)

    def continues(
        self, d: Description, said: dict[str, Any], k: Tensor, heads: Sequence[int], moving: bool
    ) -> str | None:
        """Take over a step's description if it goes on from here; else say why it does not.

        `moving` says that the stack's own attention went on: what a cross-attention may have no place to tell by.
        """
        if (
            tuple(heads) != self.heads
            or d.q.shape[0] != self.batch
            or k.shape[1] != self.kept.shape(self.k.names[0])[1][1]
        ):
            return "another batch"
        if not (isinstance(d.q_geometry, Line) and isinstance(d.k_geometry, Line)):
            return "a new image"
        place = _less(d.q_start, self.starts[0])
        goes_on = place is not None and place == self.q.length
        first = _less(d.k_start, self.starts[1])
        if first is None or (place is None and not self.cross):
            return "rows of different lengths"
        if first < 0 or not (goes_on or (self.cross and moving)):
            return "another text"
        if self.cross and (first or k.shape[2] != self.k.length):
            return "another text"
        held = self.k.length - first  # keys of ours that the step has, too
        if held > k.shape[2] or held < 0:
            return "keys that were let go"
        if not self.k.ends_as(k, first):
            return "rows that were reordered"
        terms = self._terms(said, d.q.shape[2])
        if terms is None:
            return "other position terms"
        mask = self._joined_mask(d, said, first, k.shape[2])
        if isinstance(mask, str):
            return mask
        keep = stored.Plain(d, self.kept.put_once)
        self.said = {**self.said, **terms, "mask": None if mask is None else keep.object(mask)}
        self.mask = mask
        return None

    # Terms and scales

    def _terms(self, said: dict[str, Any], count: int) -> dict[str, Any] | None:
        """Terms and scale of all queries, or None when they cannot be one."""
        old, new = self.said, said
        if any(old[name] != new[name] for name in ("score", "softcap", "sink")) or len(old["terms"]) != len(
            new["terms"]
        ):
            return None
        terms = []
        for ours, theirs in zip(old["terms"], new["terms"], strict=True):
            if ours != theirs:
                if ours["is"] != "Bound" or theirs["is"] != "Bound" or ours["term"] != theirs["term"]:
                    return None
                if ours["key"] != theirs["key"] or any(
                    (ours[x] is None) != (theirs[x] is None) for x in ("gate", "query")
                ):
                    return None
                ours = {**ours, **{name: self._rows(ours[name], theirs[name], count) for name in ("gate", "query")}}
            terms.append(ours)
        if type(old["scale"]) is not type(new["scale"]):
            return None
        scale = old["scale"]
        if isinstance(scale, dict):
            scale = self._rows(scale, new["scale"], count)
        elif scale != new["scale"]:
            return None
        return {"terms": terms, "scale": scale}

    def _rows(self, ours: Any, theirs: Any, count: int) -> Any:
        """One value a query, [.., q_len or 1, ..], of the queries so far and of those that come."""
        if ours is None or ours == theirs:
            return ours
        old, new = self.kept[ours["tensor"]], self.kept[theirs["tensor"]]
        parts = [x.expand(*x.shape[:2], n, x.shape[3]) for x, n in ((old, self.q.length), (new, count))]
        shape = [max(a, b) for a, b in zip(old.shape[:2], new.shape[:2], strict=True)]
        return {"tensor": self.kept.put_once(torch.cat([x.expand(*shape, -1, -1) for x in parts], dim=2))}

    # Masks

    def _joined_mask(self, d: Description, said: dict[str, Any], first: int, k_len: int) -> Any:
        """One mask for the queries so far and for those that come, or why there is none."""
        theirs = self._mask(said)
        if any(mask is not None and mask.scored for mask in (self.mask, theirs)):
            return "a mask that depends on the scores"
        q_len, total = d.q.shape[2], first + k_len
        rows = _seen(theirs, d.q_start, d.k_start, q_len, k_len)
        rows = torch.nn.functional.pad(rows, (first, 0))  # keys that were let go
        old, new = slice(0, self.q.length), slice(self.q.length, self.q.length + q_len)
        candidates = [_extended(self.mask, theirs, first, self.k.length)]
        if self.mask is None and self.q.length == 1:
            candidates.append(masks.causal)  # the only row so far sees all there was
        for mask in candidates:
            if isinstance(mask, str) or (mask is None and total > self.k.length):
                continue
            try:
                late = _seen(mask, *self.starts, self.q.length + q_len, total, old, slice(self.k.length, total))
                mine = _seen(mask, *self.starts, self.q.length + q_len, total, new, slice(0, total))
            except (ValueError, RuntimeError):
                continue
            if not bool(late.any()) and bool((mine == rows).all()):
                return mask
        if (self.q.length + q_len) * total > PAIRS:
            return "a mask that no description says"
        before = _seen(self.mask, *self.starts, self.q.length, self.k.length)
        before = torch.nn.functional.pad(before, (0, total - self.k.length))
        shape = [max(a, b) for a, b in zip(before.shape[:2], rows.shape[:2], strict=True)]
        return masks.dense(torch.cat([x.expand(*shape, -1, -1) for x in (before, rows)], dim=2))


def normal(d: Description) -> Description:
    """Starts as numbers where all rows agree, and no keys after the last query where none may look at them.

    A static cache hands over room that is not filled yet; what is there changes from step to step.
    """
    q_start, k_start = (_number(start) for start in (d.q_start, d.k_start))
    d = dataclasses.replace(d, q_start=q_start, k_start=k_start)
    if not (isinstance(q_start, int) and isinstance(k_start, int)) or not isinstance(d.q_geometry, Line):
        return d
    last = q_start + d.q.shape[2] - k_start
    if not 0 < last < d.k.shape[2] or not _causal(d.mask) or any(hasattr(term, "key") for term in d.terms):
        return d
    return dataclasses.replace(d, k=d.k[:, :, :last], mask=_cut(d.mask, d.k.shape[2], last))


def _number(start: int | Tensor) -> int | Tensor:
    if not isinstance(start, Tensor):
        return start
    found = start.tolist()
    return found[0] if found and len(set(found)) == 1 else start


def _less(a: int | Tensor, b: int | Tensor) -> int | None:
    """a - b, when it is one number for all rows."""
    a, b = (x.cpu() if isinstance(x, Tensor) else x for x in (a, b))
    found = (
        _number(torch.as_tensor(a) - torch.as_tensor(b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else a - b
    )
    return found if isinstance(found, int) else None


def _causal(mask: Any) -> bool:
    """No query sees a key after it."""
    if isinstance(mask, masks._And):
        return any(_causal(part) for part in mask.parts())
    window = isinstance(mask, masks._Window) and isinstance(mask.lo, int) and mask.lo >= 0
    return mask is masks.causal or window


def _cut(mask: Any, size: int, count: int) -> Any:
    """A mask over `size` keys for the first `count` of them."""
    if isinstance(mask, masks._Combination):
        parts = tuple(_cut(part, size, count) for part in mask.parts())
        return masks._Not(parts[0]) if isinstance(mask, masks._Not) else type(mask)(parts)
    if isinstance(mask, masks._Dense) and mask.values.shape[-1] == size:
        return masks._Dense(mask.values[..., :count])
    if isinstance(mask, masks._Same):
        return masks._Same(mask.q_ids, mask.k_ids[:, :count], mask.name)
    return mask


def _extended(old: Any, new: Any, first: int, size: int) -> Any:
    """The mask `old`, over `size` keys, with what `new` says of later queries and keys. A sentence if it cannot be."""
    if isinstance(new, masks._Combination) and type(old) is type(new) and len(old.parts()) == len(new.parts()):
        parts = [_extended(a, b, first, size) for a, b in zip(old.parts(), new.parts(), strict=True)]
        if any(part is None or isinstance(part, str) for part in parts):
            return "masks that do not go together"
        return masks._Not(parts[0]) if isinstance(old, masks._Not) else type(old)(tuple(parts))
    if isinstance(old, masks._Same) and isinstance(new, masks._Same):
        q_ids = torch.cat([old.q_ids, new.q_ids], dim=-1)
        return masks._Same(q_ids, torch.cat([old.k_ids, new.k_ids[:, size - first :]], dim=-1), old.name)
    if (
        isinstance(old, masks._Dense)
        and isinstance(new, masks._Dense)
        and old.values.shape[2] == new.values.shape[2] == 1
    ):
        return masks._Dense(torch.cat([old.values, new.values[..., size - first :]], dim=-1))
    return old


def _seen(
    mask: Any, q_start: int | Tensor, k_start: int | Tensor, q_len: int, k_len: int,
    rows: slice | None = None, cols: slice | None = None,
) -> Tensor:  # fmt: skip
    """What a mask shows, [batch or 1, heads or 1, rows, cols], by its definition."""
    rows, cols = rows or slice(0, q_len), cols or slice(0, k_len)
    if mask is None:
        return torch.ones(1, 1, rows.stop - rows.start, cols.stop - cols.start, dtype=torch.bool)
    cut = _part(mask, rows, cols)
    q_at, k_at = (
        torch.as_tensor(to_host(start) if isinstance(start, Tensor) else start).reshape(-1, 1)
        + torch.arange(part.start, part.stop)
        for start, part in ((q_start, rows), (k_start, cols))
    )
    delta = (q_at.unsqueeze(-1) - k_at.unsqueeze(-2)).unsqueeze(-1)
    pairs = masks.Pairs(q_at, k_at, delta, torch.ones_like(delta[..., 0], dtype=torch.bool), torch.empty(0))
    found = cut.visible(pairs)
    return found.expand(*found.shape[:2], rows.stop - rows.start, cols.stop - cols.start)


def _part(mask: Any, rows: slice, cols: slice) -> Any:
    """A mask for some queries and keys: those that hold a number a query or key are cut."""
    if isinstance(mask, masks._Combination):
        parts = tuple(_part(part, rows, cols) for part in mask.parts())
        return masks._Not(parts[0]) if isinstance(mask, masks._Not) else type(mask)(parts)
    if isinstance(mask, masks._Dense):
        at = [span if mask.values.shape[axis] > 1 else slice(None) for axis, span in ((2, rows), (3, cols))]
        return masks._Dense(mask.values[:, :, at[0], at[1]])
    if isinstance(mask, masks._Same):
        return masks._Same(mask.q_ids[:, rows], mask.k_ids[:, cols], mask.name)
    return mask
