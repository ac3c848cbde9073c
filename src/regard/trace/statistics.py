"""What each head does, in numbers and in a word.

| column | what it is |
|---|---|
| self, previous, first | share of the mass on the query itself, the key before it, the first key of the sequence |
| induction | share on keys that follow an earlier copy of the query's token, among queries that have one |
| sink | share that a learned sink takes |
| toeplitz | how much of A's variance the displacement explains |
| entropy | in nats, the mean over queries |
| spread | entropy as a share of the largest there could be, log of the keys a query sees |

Entropy and toeplitz take a pass over each A; the shares are read from the pairs that they are about (shares.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..masks import Mask, dense, induction, keys, offset
from ..matrix import AttentionMatrix
from ..progress import Callback, reporting
from ..summaries import Entropy, Share, SinkShare, Summary, Toeplitz
from .shares import Shares, applies
from .tables import Table

if TYPE_CHECKING:
    from .looks import Look, Trace

#: A share makes a head's name when it is at least so large; of several that are, the largest.
SHARES = {"sink": 0.5, "previous": 0.5, "self": 0.5, "first": 0.5, "induction": 0.4}
NAMES = {"sink": "sink", "previous": "previous token", "self": "self", "first": "first key", "induction": "induction"}
#: Else: the displacement explains at least so much of A; the entropy is at least or at most so much of the largest.
BY_DISTANCE, WIDE, SHARP = 0.5, 0.85, 0.25


def word(row: dict[str, Any]) -> str:
    """What a head with these numbers does, in a word."""
    named = [(row[name], name) for name, least in SHARES.items() if row.get(name) is not None and row[name] >= least]
    if named:
        return NAMES[max(named)[1]]
    toeplitz, spread = row.get("toeplitz"), row["spread"]
    if spread >= WIDE:
        return "wide"
    if toeplitz is not None and toeplitz >= BY_DISTANCE:
        return "by distance"
    return "sharp" if spread <= SHARP else "mixed"


class Room(Summary):
    """The largest entropy each query could have, log of the keys it sees: [.., q_len]."""

    def start(self, problem: Any) -> list[Tensor]:
        return [torch.zeros(problem.q.shape[:3], dtype=torch.float64, device=problem.q.device)]

    def update(self, state: list[Tensor], strip: Any) -> None:
        state[0][strip.batch, strip.heads, strip.rows] += strip.visible.sum(-1)

    def finish(self, state: list[Tensor], problem: Any) -> Tensor:
        return state[0].clamp(min=1).log()


def statistics(trace: Trace, progress: Callback | bool | None) -> Table:
    """A row for each layer and head; of several batch rows the mean."""
    rows: list[dict[str, Any]] = []
    several = any(look.run for look in trace.looks)
    work = [max(1, look.batch * len(look.heads) * look.q_len * look.k_len) for look in trace.looks]
    total, done = sum(work), 0
    with reporting(progress, "looking at every head") as report:
        for at, size in zip(trace._at, work, strict=True):
            look = trace._look(at)

            def tell(part: int, whole: int, done: int = done, size: int = size) -> None:
                if report is not None:
                    report(done + size * part // max(whole, 1), total)

            found = _found(trace, at, look, trace._matrix(at), tell)
            for n, head in enumerate(look.heads):
                numbers = {name: None if x is None else float(x[n]) for name, x in found.items()}
                place = {"stack": look.stack, "kind": look.kind, "run": look.run if several else None}
                rows.append({"layer": look.layer, "head": head, **place, "does": word(numbers), **numbers})
            done += size
            if report is not None:
                report(done, total)
    return Table(rows)


def _found(trace: Trace, at: int, look: Look, A: AttentionMatrix, tell: Callback) -> dict[str, Tensor | None]:
    """Each column for every head, the mean over the batch."""
    real, ids = _real(trace, at), _ids(trace, at)
    own = look.kind == "self" and trace._said(at)["tokens"][0] == trace._said(at)["tokens"][1]
    ids = ids if ids is not None and own and _repeats(ids) else None
    asked: dict[str, Summary] = {"entropy": Entropy()}
    if look.kind == "self" and A._description.q_geometry.enumerable:
        asked["toeplitz"] = Toeplitz()
    if not applies(A):
        asked |= _summaries(A, look, real, ids)
    values = dict(zip(asked, A.summarize(*asked.values(), progress=tell), strict=True))
    if applies(A):
        shares = Shares(A, real, trace._batch)
        values |= {"room": shares.room(), "first": shares.first(), "sink": shares.sink()}
        if look.kind == "self":
            values["self"], values["previous"] = shares.near(0, 1)
        if ids is not None:
            values["induction"] = shares.induction(ids)
    entropy = values.pop("entropy")
    room = values.pop("room").to(entropy).expand_as(entropy)
    counted = torch.ones_like(room) if real is None else real[:, None, :].expand_as(room).to(room)
    mean = {"entropy": _mean(entropy, counted), "spread": _mean(entropy / room.clamp(min=1e-9), counted * (room > 0))}
    found = {name: x.mean(0) for name, x in values.items()} | mean
    if A._description.sink is None:
        found.pop("sink")
    columns = ("self", "previous", "induction", "first", "sink", "toeplitz", "entropy", "spread")
    return {name: found.get(name) for name in columns}


def _summaries(A: AttentionMatrix, look: Look, real: Tensor | None, ids: Tensor | None) -> dict[str, Summary]:
    """The same columns by a pass over A, for grids and points and for masks that depend on scores."""
    only: Mask | None = None if real is None else dense(real[:, None, :, None])

    def share(pairs: Mask) -> Summary:
        return Share(pairs if only is None else pairs & only)

    start = A._description.k_start
    asked: dict[str, Summary] = {"room": Room(), "sink": SinkShare()}
    asked["first"] = share(keys(start if isinstance(start, int) else 0))
    if look.kind == "self":
        asked |= {"self": share(offset(0)), "previous": share(offset(1))}
    if ids is not None:
        asked["induction"] = share(induction(ids))
    return asked


def _repeats(ids: Tensor) -> bool:
    """Whether some token comes again: else nothing could be induced."""
    return any(len(row.unique()) < len(row) for row in ids)


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """Mean over rows and queries that count: [heads]."""
    return (x * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def _ids(trace: Trace, at: int) -> Tensor | None:
    n = trace._said(at)["tokens"][0]
    name = None if n is None else trace._document["sequences"][n]["ids"]
    return None if name is None else _row(trace, trace._tensors[name])


def _real(trace: Trace, at: int) -> Tensor | None:
    n = trace._said(at)["tokens"][0]
    name = None if n is None else trace._document["sequences"][n]["real"]
    return None if name is None else _row(trace, trace._tensors[name]).bool()


def _row(trace: Trace, x: Tensor) -> Tensor:
    return x if trace._batch is None else x[trace._batch : trace._batch + 1]
