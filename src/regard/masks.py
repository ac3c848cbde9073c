"""Masks: which keys a query may look at (maths.md, eq. 15 to 17). Also any set of pairs, for `A.mass` and `A.share`.

A mask is a small value, never an N x N tensor unless the user brings one. `&`, `|` and `~` combine them.
Positions are absolute: a query's place is q_start plus its index, and so for keys.

    causal             the key is not after the query
    window(l, r)       at most l before and r after the query; a pair of tuples for the axes of a grid
    offset(d)          exactly at displacement d = query - key
    lengths(n)         only the first n[b] keys of batch row b
    documents(ids)     query and key in the same document
    nearest(k)         the k keys with the largest logits, among those that the masks it is combined with (&) allow
    dense(tensor)      a boolean, True = may look
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Pairs:
    """What a mask may ask about all pairs of a (small) problem: the reference evaluates masks on it."""

    q_at: Tensor  # absolute positions [batch or 1, q_len]
    k_at: Tensor  # [batch or 1, k_len]
    delta: Tensor  # p_i - p_j: [batch or 1, q_len, k_len, axes]
    placed: Tensor  # both tokens have a place: [batch or 1, q_len, k_len]
    logits: Tensor  # [batch, heads, q_len, k_len], for score-dependent masks
    allowed: Tensor | None = None  # what the masks combined with & allow already

    @property
    def flat(self) -> Tensor:
        """Displacement in the sequence, [batch or 1, q_len, k_len]."""
        return self.q_at.unsqueeze(-1) - self.k_at.unsqueeze(-2)


class Mask:
    """Base of all masks. `visible` is the definition: booleans that broadcast to [batch, heads, q_len, k_len]."""

    #: depends on the logits, not on positions alone
    scored = False
    #: depends on the order of queries and keys in the sequence
    ordered = False

    def visible(self, pairs: Pairs) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no visible(pairs)")

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        """Raise, in the user's words, unless this mask fits a problem of these sizes."""

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def parts(self) -> tuple[Mask, ...]:
        return ()

    def __bool__(self) -> bool:
        raise TypeError("a mask is not true or false: combine masks with & | ~, not with and, or, not")

    def __and__(self, other: Mask) -> Mask:
        return _And(_operands(_And, self, other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(_operands(_Or, self, other))

    def __invert__(self) -> Mask:
        return self.part if isinstance(self, _Not) else _Not(self)


def _operands(kind: type, *masks: Mask) -> tuple[Mask, ...]:
    for mask in masks:
        if not isinstance(mask, Mask):
            raise TypeError(f"mask: expected a mask, found {type(mask).__name__} (wrap a boolean tensor in dense())")
    return tuple(part for mask in masks for part in (mask.parts() if type(mask) is kind else (mask,)))


class _Combination(Mask):
    def __init__(self, masks: tuple[Mask, ...]):
        self._parts = masks

    @property
    def scored(self) -> bool:  # type: ignore[override]
        return any(part.scored for part in self._parts)

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return any(part.ordered for part in self._parts)

    def parts(self) -> tuple[Mask, ...]:
        return self._parts

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self._parts for t in part.tensors())

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        for part in self._parts:
            part.check(batch, heads, q_len, k_len, axes)


class _And(_Combination):
    def visible(self, pairs: Pairs) -> Tensor:
        allowed = pairs.allowed
        for part in self._parts:
            if not part.scored:
                seen = part.visible(pairs)
                allowed = seen if allowed is None else allowed & seen
        result = allowed
        inner = Pairs(**{**vars(pairs), "allowed": allowed})
        for part in self._parts:
            if part.scored:
                seen = part.visible(inner)
                result = seen if result is None else result & seen
        assert result is not None
        return result

    def __repr__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, _Or) else str(p) for p in self._parts)


class _Or(_Combination):
    def visible(self, pairs: Pairs) -> Tensor:
        seen = self._parts[0].visible(pairs)
        for part in self._parts[1:]:
            seen = seen | part.visible(pairs)
        return seen

    def __repr__(self) -> str:
        return " | ".join(f"({p})" if isinstance(p, _And) else str(p) for p in self._parts)


class _Not(_Combination):
    def __init__(self, mask: Mask):
        super().__init__((mask,))
        self.part = mask

    def visible(self, pairs: Pairs) -> Tensor:
        return ~self.part.visible(pairs)

    def __repr__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Combination) else f"~{self.part}"


class _Causal(Mask):
    """The key is not after the query."""

    ordered = True

    def visible(self, pairs: Pairs) -> Tensor:
        return (pairs.flat >= 0).unsqueeze(1)

    def __repr__(self) -> str:
        return "causal"


causal = _Causal()


class _Window(Mask):
    """lo <= δ <= hi, in the sequence (integers) or on every axis of the geometry (tuples)."""

    def __init__(self, lo: int | tuple | None, hi: int | tuple | None, name: str):
        self.lo, self.hi, self.name = lo, hi, name
        self.ordered = not isinstance(lo, tuple)

    def visible(self, pairs: Pairs) -> Tensor:
        if not isinstance(self.lo, tuple) and not isinstance(self.hi, tuple):
            lo = True if self.lo is None else pairs.flat >= self.lo
            hi = True if self.hi is None else pairs.flat <= self.hi
            seen = (pairs.flat == pairs.flat) & lo & hi
        else:
            assert isinstance(self.lo, tuple) and isinstance(self.hi, tuple)
            seen = pairs.placed
            for axis, (lo, hi) in enumerate(zip(self.lo, self.hi, strict=True)):
                seen = seen & (pairs.delta[..., axis] >= lo) & (pairs.delta[..., axis] <= hi)
        return seen.unsqueeze(1)

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        if isinstance(self.lo, tuple) and len(self.lo) != axes:
            raise ValueError(f"mask: {self.name} names {len(self.lo)} axes, the geometry has {axes}")

    def __repr__(self) -> str:
        return self.name


def window(left: int | tuple[int, ...] | None, right: int | tuple[int, ...] | None = 0) -> Mask:
    """Keys at most `left` before and `right` after the query (None: no bound). Tuples: on each axis of a grid."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        if not isinstance(left, tuple) or not isinstance(right, tuple) or len(left) != len(right):
            raise ValueError(f"window: expected two integers or two tuples of one length, found {left} and {right}")
        for name, bounds in (("left", left), ("right", right)):
            if not all(isinstance(n, int) for n in bounds):
                raise ValueError(f"{name}: expected integers, found {bounds}")
        return _Window(tuple(-r for r in right), left, f"window({left}, {right})")
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and not isinstance(bound, int):
            raise ValueError(f"{name}: expected an integer or None, found {bound!r}")
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window: no key is at most {left} before and {right} after a query")
    return _Window(None if right is None else -right, left, f"window({left}, {right})")


def offset(*delta: int) -> Mask:
    """Pairs at exactly this displacement (query minus key): one number in the sequence, several on a grid's axes."""
    if not delta or not all(isinstance(d, int) for d in delta):
        raise ValueError(f"delta: expected integers, found {delta}")
    at = delta[0] if len(delta) == 1 else delta
    return _Window(at, at, f"offset({', '.join(map(str, delta))})")


class _Keys(Mask):
    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def visible(self, pairs: Pairs) -> Tensor:
        seen = (pairs.k_at >= self.first) & (pairs.k_at <= self.last)
        return seen[:, None, None, :]

    def __repr__(self) -> str:
        return f"keys({self.first}, {self.last})"


def keys(first: int, last: int | None = None) -> Mask:
    """Keys at positions first to last (inclusive; one position when last is left out), whatever the query."""
    last = first if last is None else last
    for name, at in (("first", first), ("last", last)):
        if not isinstance(at, int):
            raise ValueError(f"{name}: expected an integer, found {at!r}")
    if last < first:
        raise ValueError(f"keys: expected first <= last, found {first} and {last}")
    return _Keys(first, last)


class _Lengths(Mask):
    def __init__(self, count: Tensor, queries: Tensor | None):
        self.count, self.queries = count, queries

    def visible(self, pairs: Pairs) -> Tensor:
        seen = (pairs.k_at < self.count[:, None])[:, None, None, :]
        if self.queries is not None:
            seen = seen & (pairs.q_at < self.queries[:, None])[:, None, :, None]
        return seen

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        for name, count in (("lengths", self.count), ("queries", self.queries)):
            if count is not None and len(count) not in (1, batch):
                raise ValueError(f"mask: {name} has {len(count)} entries, expected one a batch row ({batch})")

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.count,) if self.queries is None else (self.count, self.queries)

    def __repr__(self) -> str:
        return "lengths" if self.queries is None else "lengths of keys and queries"


def lengths(count: Tensor | Sequence[int], queries: Tensor | Sequence[int] | None = None) -> Mask:
    """Only the first count[b] positions of batch row b are looked at; `queries` likewise says which may look."""
    return _Lengths(_whole_numbers("count", count), None if queries is None else _whole_numbers("queries", queries))


class _Same(Mask):
    def __init__(self, q_ids: Tensor, k_ids: Tensor, name: str):
        self.q_ids, self.k_ids, self.name = q_ids, k_ids, name

    def visible(self, pairs: Pairs) -> Tensor:
        q_ids, k_ids = self.q_ids.unsqueeze(-1), self.k_ids.unsqueeze(-2)
        return ((q_ids == k_ids) & (q_ids >= 0)).unsqueeze(1)

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        for side, ids, length in (("queries", self.q_ids, q_len), ("keys", self.k_ids, k_len)):
            if ids.shape[-1] != length or ids.shape[0] not in (1, batch):
                raise ValueError(
                    f"mask: {self.name} has ids of shape {list(ids.shape)} for the {side}, "
                    f"expected [{batch} or 1, {length}]"
                )

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_ids, self.k_ids)

    def __repr__(self) -> str:
        return self.name


def documents(ids: Tensor | None = None, keys: Tensor | None = None, *, cumulative: Tensor | None = None) -> Mask:
    """Query and key lie in the same document: ids [length] or [batch, length], negative = in none.

    `keys` gives the keys' ids when they differ. `cumulative` takes the starts of packed documents and their total
    length instead ([0, 5, 9] = tokens 0 to 4 and 5 to 8).
    """
    if (ids is None) == (cumulative is None):
        raise ValueError("documents: give either ids or cumulative")
    if cumulative is not None:
        bounds = _whole_numbers("cumulative", cumulative)
        if not torch.compiler.is_compiling() and (len(bounds) < 2 or bounds[0] != 0 or bool((bounds.diff() < 0).any())):
            raise ValueError(f"cumulative: expected numbers from 0 upwards, found {bounds.tolist()}")
        places = torch.arange(int(bounds[-1]), device=bounds.device)
        ids = torch.searchsorted(bounds[1:].contiguous(), places, right=True)
    assert ids is not None
    q_ids = _id_rows("ids", ids)
    return _Same(q_ids, q_ids if keys is None else _id_rows("keys", keys), "documents")


def induction(tokens: Tensor) -> Mask:
    """Pairs in which the key follows an earlier copy of the query's token: what an induction head looks at."""
    rows = _id_rows("tokens", tokens)
    before = torch.cat([torch.full_like(rows[:, :1], -1), rows[:, :-1]], dim=-1)
    return _Same(rows, before, "induction") & causal


class _Nearest(Mask):
    scored = True

    def __init__(self, count: int):
        self.count = count

    def visible(self, pairs: Pairs) -> Tensor:
        logits = pairs.logits
        if pairs.allowed is not None:
            logits = logits.masked_fill(~pairs.allowed, -torch.inf)
        order = logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.count]
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, True)
        return chosen & (logits > -torch.inf)

    def __repr__(self) -> str:
        return f"nearest({self.count})"


def nearest(count: int) -> Mask:
    """The `count` keys with the largest logits; ties go to the lower index."""
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"count: expected a positive integer, found {count!r}")
    return _Nearest(count)


class _Dense(Mask):
    def __init__(self, values: Tensor):
        self.values = values

    def visible(self, pairs: Pairs) -> Tensor:
        return self.values

    def check(self, batch: int, heads: int, q_len: int, k_len: int, axes: int) -> None:
        expected = (batch, heads, q_len, k_len)
        if any(n not in (1, m) for n, m in zip(self.values.shape, expected, strict=True)):
            raise ValueError(
                f"mask: dense has shape {list(self.values.shape)}, expected one that broadcasts to {list(expected)}"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def __repr__(self) -> str:
        return "dense"


def dense(values: Tensor) -> Mask:
    """A boolean that broadcasts to [batch, heads, q_len, k_len]; True = may look."""
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        found = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"dense: expected a boolean tensor (True = may look), found {found}")
    if not 2 <= values.dim() <= 4:
        raise ValueError(f"dense: expected [q_len, k_len] with up to two axes before it, found {list(values.shape)}")
    return _Dense(values.reshape((1,) * (4 - values.dim()) + values.shape))


def _whole_numbers(name: str, values: Tensor | Sequence[int]) -> Tensor:
    numbers = torch.as_tensor(values)
    if numbers.dim() != 1 or numbers.dtype.is_floating_point or numbers.dtype == torch.bool:
        raise ValueError(f"{name}: expected a row of whole numbers, found {numbers.dtype} {list(numbers.shape)}")
    return numbers.long()


def _id_rows(name: str, ids: Tensor) -> Tensor:
    ids = torch.as_tensor(ids)
    if ids.dim() not in (1, 2) or ids.dtype.is_floating_point:
        raise ValueError(
            f"{name}: expected whole numbers [length] or [batch, length], found {ids.dtype} {list(ids.shape)}"
        )
    return ids.long().reshape(1, -1) if ids.dim() == 1 else ids.long()
