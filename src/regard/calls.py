"""What calls have in common: a model asks for A with the same shapes and terms layer after layer, step after step.

What was checked and lowered for one call serves all that are like it. Two things must be known for that: what terms
hold now (`Parts`), and what else a call says (`like`). Nothing is kept that a user may change without its being seen.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .geometry import Geometry, Grid, Line
from .masks import _And, _Causal, _Keys, _Window
from .position import Bound, Term
from .scores import Dot, Score

#: tensors that are no more than that
PLAIN = (Tensor, nn.Parameter)
_numbers = itertools.count()
#: what every module has, besides what it holds: not what it was made with
_COMMON = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}


def _learned(module: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a term and of its parts, by name.

    PyTorch's own walk takes several times as long, and cannot be compiled for a term that is made inside the graph.
    """
    found: list[tuple[str, Tensor]] = [(prefix + n, t) for n, t in module._parameters.items() if t is not None]
    found += [(prefix + n, t) for n, t in module._buffers.items() if t is not None]
    for name, part in module._modules.items():
        if part is not None:
            found += _learned(part, f"{prefix}{name}.")
    return found


class Parts:
    """What a term holds: its parameters and buffers by name, and for which shapes it has been checked.

    It is found by one walk, and serves as long as every module of the term holds the very same things, the numbers it
    was made with included. No two have the same `number`.
    """

    #: shapes that are remembered
    most = 256

    def __init__(self, term: nn.Module, once: bool = False):
        """`once`: nobody will ask for them again, as in a compiled graph."""
        self.tensors = _learned(term)
        self.checked: set[tuple] = set()
        self.ranges: set[tuple] = set()
        if not once:
            self._watch_all(term)

    def _watch_all(self, term: nn.Module) -> None:
        self.number = next(_numbers)
        self.empty: list[dict] = []
        self.maps: list[tuple[dict, int, itemgetter]] = []
        waiting: list[nn.Module | None] = [term]
        while waiting:
            module = waiting.pop()
            if module is not None:
                own = [name for name in module.__dict__ if name not in _COMMON]
                self._watch(module.__dict__, own)
                for held in (module._parameters, module._buffers, module._modules):
                    self._watch(held, list(held))
                waiting += module._modules.values()
        self.things = self._now() or []

    def _watch(self, held: dict, names: list[str]) -> None:
        if held:
            self.maps.append((held, len(held), itemgetter(*names, *names[:1])))  # of one alone it gives no tuple
        else:
            self.empty.append(held)

    def _now(self) -> list | None:
        """All that is held; None where something was added or taken away."""
        if any(self.empty):
            return None
        found: list = []
        for held, size, get in self.maps:
            if len(held) != size:
                return None
            found += get(held)
        return found

    def holds(self) -> bool:
        """Nothing was replaced, added or taken away."""
        try:
            now = self._now()
        except KeyError:
            return False
        return now is not None and all(map(is_, now, self.things))

    def remember(self, known: set[tuple], key: tuple) -> None:
        if len(known) >= self.most:
            known.clear()
        known.add(key)


_parts: weakref.WeakKeyDictionary[nn.Module, Parts] = weakref.WeakKeyDictionary()


def parts_of(term: nn.Module) -> Parts:
    """What a term holds now."""
    if torch.compiler.is_compiling():
        return Parts(term, once=True)
    known = _parts.get(term)
    if known is None or not known.holds():
        known = _parts[term] = Parts(term)
    return known


class Call:
    """What all calls have in common whose shapes and kinds are those of one that was checked (`like`).

    It holds nothing that a call may change: no tensor of the user's, and of terms only the numbers of their `Parts`,
    which are new ones as soon as a term holds or says something else.
    """

    def __init__(self, score: Score, scale: Any, geometry: tuple[Geometry, Geometry]):
        self.score, self.scale, self.geometry = score, scale, geometry
        self.in_range = False  # `tables.check_ranges` has passed it
        self.lowered: dict[bool, Any] = {}  # by `lower.lower`


#: calls that are remembered: the least recently made go first
CALLS = 512
known_calls: dict[tuple, Call] = {}
_lock = threading.Lock()


def remember(key: tuple, call: Call) -> Call:
    with _lock:
        while len(known_calls) >= CALLS:
            known_calls.pop(next(iter(known_calls)))
        known_calls[key] = call
    return call


def like(
    q: Any, k: Any, score: Any, scale: Any, terms: tuple[Term | Bound, ...], parts: list[Parts], mask: Any,
    geometry: Any, q_start: Any, k_start: Any, softcap: Any, engine: Any,
) -> tuple | None:  # fmt: skip
    """What a call must share with another to be checked and lowered like it; None: it is looked at by itself.

    That is so where a tensor is given besides q, k and what terms hold, and for kinds of things that are not ours.
    """
    if type(q) not in PLAIN or type(k) not in PLAIN or (score is not None and type(score) is not Dot):
        return None
    for x, kind in ((scale, float), (softcap, float), (q_start, int), (k_start, int)):
        if x is not None and type(x) is not kind:
            return None
    seen, place = _mask_like(mask), _place_like(geometry)
    if seen is None or place is None:
        return None
    key = [
        q.shape, k.shape, q.dtype, k.dtype, q.device, k.device, q is k, scale, seen, place, q_start, k_start, softcap,
        engine,
    ]  # fmt: skip
    for term, inside in zip(terms, parts, strict=True):
        if type(term) is Bound:
            return None
        key.append(inside.number)
        for _, t in inside.tensors:
            key += (t.shape, t.dtype, t.device)
    return tuple(key)


def _mask_like(mask: Any) -> Any:
    """All that a mask without tensors says; None where it has some."""
    kind = type(mask)
    if mask is None or kind is _Causal:
        return kind
    if kind is _Window:
        return kind, mask.lo, mask.hi
    if kind is _Keys:
        return kind, mask.first, mask.last
    if kind is _And:
        inside = tuple([_mask_like(part) for part in mask.parts()])
        return None if None in inside else inside
    return None


def _place_like(geometry: Any) -> Any:
    """All that a line or a grid says; None for another geometry."""
    kind = type(geometry)
    if geometry is None or kind is Line:
        return Line
    if kind is Grid:
        return geometry.shape, geometry.unplaced
    if kind is tuple and len(geometry) == 2 and kind not in (type(geometry[0]), type(geometry[1])):
        pair = _place_like(geometry[0]), _place_like(geometry[1])
        return None if None in pair else ("pair", *pair)
    return None
