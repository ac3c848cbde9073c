"""A trace: every A that a model made, to be looked at later, at any length.

    trace = regard.Trace.open("text.trace")
    print(trace)                       a table of its looks
    trace[2]                           the lazy A of layer 2: [batch, heads, q_len, k_len]
    trace[2, 5]                        that of head 5: [q_len, k_len], an ordinary A
    trace.decoder[2], trace.cross[2]   of an encoder-decoder
    trace.row(3)                       of several rows of a batch, one
    trace.labels()                     what to write beside the queries;  trace.labels("k") beside the keys

A is made again from q, k and its description when it is asked for, and from a file it is mapped, not read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..above import view
from ..indexing import plain
from ..matrix import AttentionMatrix
from ..progress import Callback
from . import files, stored
from .keeping import Kept
from .reading import check
from .tables import Table, lines

#: A's that are held ready
READY = 8


class Look(NamedTuple):
    """One A of a trace: where it was made, and its sizes."""

    path: str  # of the attention module
    stack: str  # "encoder", "decoder", or a part of the path where there are several of a kind
    kind: str  # "self" or "cross"
    layer: int
    run: int  # the passes of a layer that could not be joined are numbered
    heads: tuple[int, ...]  # their numbers in the model
    batch: int
    q_len: int
    k_len: int


class Trace:
    """What a model attended to. Made by `record` or `Trace.open`."""

    def __init__(self, document: dict[str, Any], tensors: Mapping[str, Tensor], own: Sequence[Any] = ()):
        self._tensors = tensors
        self._ready: OrderedDict[int, AttentionMatrix] = OrderedDict()
        self._batch: int | None = None
        self._fill(document, own)

    def _fill(self, document: dict[str, Any], own: Sequence[Any]) -> None:
        self._document, self._own = document, own
        self._at = list(range(len(document.get("looks", ()))))

    # What is in it

    @property
    def looks(self) -> tuple[Look, ...]:
        """Where each A was made, and its sizes."""
        return tuple(self._look(at) for at in self._at)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the recording has to say: passes that could not be joined, and why."""
        return tuple(self._document.get("notes", ()))

    def _look(self, at: int) -> Look:
        said = self._said(at)
        batch, _, q_len, _ = self._shape(said["q"])
        batch = batch if self._batch is None else 1
        where = {name: said[name] for name in ("path", "stack", "kind", "layer", "run")}
        return Look(**where, heads=tuple(said["heads"]), batch=batch, q_len=q_len, k_len=self._shape(said["k"])[2])

    def _said(self, at: int) -> dict[str, Any]:
        return self._document["looks"][at]

    def _shape(self, name: str) -> list[int]:
        return self._tensors.shape(name)[1]  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[tuple[Look, AttentionMatrix]]:
        """Every look with its lazy A [batch, heads, q_len, k_len]."""
        for at in self._at:
            yield self._look(at), self._matrix(at)

    def __repr__(self) -> str:
        return f"Trace({len(self)} looks)"

    def __str__(self) -> str:
        rows = [{**look._asdict(), "heads": _span(look.heads)} for look in self.looks]
        if all(row["run"] == 0 for row in rows):
            rows = [{name: x for name, x in row.items() if name != "run"} for row in rows]
        return "\n".join([lines(rows), *self.notes])

    # Parts of it

    def only(
        self,
        *,
        stack: str | None = None,
        kind: str | None = None,
        layers: Sequence[int] | None = None,
        run: int | None = None,
    ) -> Trace:
        """The part of a trace that belongs to a stack, a kind ("self" or "cross"), some layers or a run."""
        wanted = {"stack": stack, "kind": kind, "run": run}
        looks = dict(zip(self._at, self.looks, strict=True))
        for name, value in wanted.items():
            there = sorted({getattr(look, name) for look in looks.values()})
            if value is not None and value not in there:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, there)) or 'none'}, found {value!r}")
            looks = {at: look for at, look in looks.items() if value in (None, getattr(look, name))}
        if layers is not None:
            looks = {at: look for at, look in looks.items() if look.layer in layers}
        return self._with(list(looks))

    def _with(self, at: list[int], batch: int | None = None) -> Trace:
        made = Trace.__new__(Trace)
        made.__dict__.update(self.__dict__)
        made._at, made._batch = at, self._batch if batch is None else batch
        made._whole = self  # type: ignore[attr-defined]  # tensors live as long as a part of the trace
        return made

    @property
    def encoder(self) -> Trace:
        """The self-attention of the encoder."""
        return self.only(stack="encoder").only(kind="self")

    @property
    def decoder(self) -> Trace:
        """The self-attention of the decoder."""
        return self.only(stack="decoder").only(kind="self")

    @property
    def cross(self) -> Trace:
        """The cross-attention."""
        return self.only(kind="cross")

    def row(self, batch: int) -> Trace:
        """The trace of one row of the batch."""
        if self._batch is not None:
            raise ValueError("row: a row was chosen already")
        fit = [at for at in self._at if 0 <= batch < self._look(at).batch]
        if not fit:
            raise IndexError(
                f"row: expected a row from 0 to {max((x.batch for x in self.looks), default=0) - 1}, found {batch}"
            )
        return self._with(fit, batch)

    # Its matrices

    def __getitem__(self, index: int | tuple[int, Any]) -> AttentionMatrix:
        """`trace[layer]` is A [batch, heads, q_len, k_len]; `trace[layer, head]` that of one head, [q_len, k_len]."""
        layer, head = map(plain, index) if isinstance(index, tuple) and len(index) == 2 else (plain(index), None)
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise IndexError(f"trace: expected trace[layer] or trace[layer, head], found {index!r}")
        at = self._find(layer)
        A = self._matrix(at)
        if head is None:
            return A
        look = self._look(at)
        if isinstance(head, bool) or not isinstance(head, int) or head not in look.heads:
            raise IndexError(f"head: expected one of those recorded ({_span(look.heads)}), found {head!r}")
        if look.batch != 1:
            raise IndexError(
                f"trace: {look.batch} rows were recorded at once; choose one, as in trace.row(0)[{layer}, {head}]"
            )
        number = look.heads.index(head)
        return _part(A[0, number], A, slice(0, 1), slice(number, number + 1))

    def _find(self, layer: int) -> int:
        numbers = sorted({look.layer for look in self.looks})
        if layer < 0 and numbers and layer >= -len(numbers):
            layer = numbers[layer]
        fit = [(at, look) for at, look in zip(self._at, self.looks, strict=True) if look.layer == layer]
        if not fit:
            raise IndexError(f"layer: expected one of those recorded ({_span(numbers)}), found {layer}")
        for name, how in (("stack", "only(stack=...)"), ("kind", "only(kind=...)"), ("run", "only(run=...)")):
            there = dict.fromkeys(getattr(look, name) for _, look in fit)
            if len(there) > 1:
                raise IndexError(
                    f"layer: {layer} has {len(fit)} looks, of {name} {', '.join(map(str, there))}; "
                    f"choose with trace.{how}"
                )
        return fit[0][0]

    def _matrix(self, at: int) -> AttentionMatrix:
        if at not in self._ready:
            self._ready[at] = self._made(at)
            while len(self._ready) > READY:
                self._ready.popitem(last=False)
        self._ready.move_to_end(at)
        A = self._ready[at]
        if self._batch is None:
            return A
        row = slice(self._batch, self._batch + 1)
        return _part(A[row], A, row, slice(None))

    def _made(self, at: int) -> AttentionMatrix:
        said = self._said(at)
        tensors = self._tensors
        try:
            A = stored.rebuild(
                said["description"], tensors[said["q"]], tensors[said["k"]], tensors.__getitem__, self._own
            )
        except (ValueError, TypeError, RuntimeError, IndexError, OverflowError, RecursionError) as error:
            if not isinstance(tensors, files.Mapped):
                raise
            raise tensors.wrong(f"a look {said['path']!r:.60} that is no A ({error})") from None
        if said["lse"] is not None:
            A._lse = tensors[said["lse"]]
        return A

    def values(self, layer: int) -> Tensor:
        """The values of a layer, [batch, kv_heads, k_len, v_dim], when they were recorded."""
        said = self._said(self._find(layer))
        if said["v"] is None:
            raise ValueError("values: none were recorded; say record(model, values=True)")
        v = self._tensors[said["v"]]
        return v if self._batch is None else v[self._batch : self._batch + 1]

    # Its tokens

    def _sequence(self, side: str, name: str) -> Any:
        if side not in ("q", "k"):
            raise ValueError(f"side: expected 'q' or 'k', found {side!r}")
        found = {self._said(at)["tokens"]["qk".index(side)] for at in self._at}
        if len(found) > 1:
            raise ValueError(
                "tokens: the looks have several token sequences; choose with trace.only(...), .decoder or .cross"
            )
        at = next(iter(found), None)
        return None if at is None else self._document["sequences"][at][name]

    def tokens(self, side: str = "q") -> Tensor | None:
        """The tokens of the queries ("q") or keys ("k"), [batch, length]; None when the model was not given any."""
        name = self._sequence(side, "ids")
        ids = None if name is None else self._tensors[name]
        return ids if ids is None or self._batch is None else ids[self._batch : self._batch + 1]

    def labels(self, side: str = "q") -> list[str]:
        """What to write beside the queries ("q") or the keys ("k"): words, or places where tokens have no names."""
        rows = self._sequence(side, "labels")
        lengths = {(look.q_len, look.k_len)["qk".index(side)] for look in self.looks}
        batches = {look.batch for look in self.looks}
        if batches not in ({1}, set()):
            raise ValueError(
                f"labels: {max(batches)} rows were recorded at once; choose one, as in trace.row(0).labels()"
            )
        if len(lengths) > 1:
            raise ValueError("labels: the looks have several lengths; choose with trace.only(...)")
        if rows is None:
            ids = self.tokens(side)
            return [str(n) for n in (range(*lengths) if ids is None else ids[0].tolist())] if lengths else []
        return list(rows[self._batch or 0])

    # What it says

    def statistics(self, *, progress: Callback | bool | None = None) -> Table:
        """What each head does: shares and entropy, a row for each layer and head, in one pass a layer."""
        from .statistics import statistics

        return statistics(self, progress)

    def rollout(
        self, queries: Sequence[int] | Tensor | None = None, *, progress: Callback | bool | None = None
    ) -> Tensor:
        """What flows from each token to some queries (or all) through every layer: [batch, queries, k_len]."""
        from .rollout import rollout

        return rollout(self, queries, progress)

    def compare(self, other: Trace, *, progress: Callback | bool | None = None) -> Table:
        """How far apart the A's of two traces are, a row for each layer and head."""
        from .comparing import compare

        return compare(self, other, progress)

    # Files

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace to one safetensors file. Whoever opens the path finds the old file or the whole new one."""
        from .reading import save

        save(self, path)

    def to_html(
        self, path: str | os.PathLike, *, name: str = "", language: str | None = None,
        progress: Callback | bool | None = None,
    ) -> None:  # fmt: skip
        """Write one HTML file that opens from disk: every head's pooled map and the strongest keys of every query.

        name       the page's title
        language   "en" or "zh"; the reader's browser chooses unless it is given
        """
        view("standalone").write(self, path, name=name, language=language, progress=progress)

    @classmethod
    def open(cls, path: str | os.PathLike) -> Trace:
        """The trace of a file, mapped and not read. What is no trace, or a damaged one, is refused in a sentence."""
        tensors = files.Mapped(path)
        check(tensors)
        return cls(tensors.document, tensors)

    def let_go(self, A: AttentionMatrix) -> None:
        """Keep nothing of an A of this trace in memory that its file has: it is read again when asked for."""
        self._ready.clear()
        if isinstance(self._tensors, files.Mapped):
            self._tensors.let_go(x for _, x in A._description.held)

    def close(self) -> None:
        """Let go of the tensors, and remove what a recording wrote to disk."""
        self._ready.clear()
        if isinstance(self._tensors, Kept):
            self._tensors.close()
        self._at = []

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _part(part: AttentionMatrix, whole: AttentionMatrix, batch: slice, heads: slice) -> AttentionMatrix:
    """A part of A with what the whole knows of it: its log-sum-exp, which takes a pass, and q and k made ready."""
    if part is not whole:
        if whole._lse is not None:
            part._lse = whole._lse[batch][:, heads]
        if not torch.is_inference_mode_enabled():  # what is made there is of no use elsewhere
            part._cached = whole._still.select(batch, heads)
    return part


def _span(numbers: Sequence[int]) -> str:
    """0-11, or 0, 3, 5."""
    numbers = list(numbers)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


__all__ = ["Look", "Trace"]
