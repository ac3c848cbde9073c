"""Documents of traces: what a file must say before it is believed, and how a trace is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import files
from .writing import VERSION

if TYPE_CHECKING:
    from .looks import Trace

_TEXT, _WHOLE, _NAME, _LIST, _ANY = "text", "a whole number", "the name of a tensor", "a list", "anything"
_FIELDS = {
    "path": _TEXT, "stack": _TEXT, "kind": _TEXT, "layer": _WHOLE, "run": _WHOLE, "heads": _LIST, "q": _NAME,
    "k": _NAME, "v": f"{_NAME} or nothing", "lse": f"{_NAME} or nothing", "tokens": _LIST, "description": _ANY,
}  # fmt: skip
_FORMAT = "regard.trace"


class Chosen(Mapping[str, Tensor]):
    """Some of the tensors there are, under their names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: list[str]):
        self.tensors, self.names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write the looks of a trace, and the tensors that they use."""
    if trace._batch is not None:
        raise ValueError("save: a row of a trace cannot be saved by itself; save the whole trace")
    looks = [trace._said(at) for at in trace._at]
    if own := _own(looks):
        raise ValueError(f"save: {type(trace._own[own[0]]).__name__} is not regard's own, and no file can hold it")
    used: dict[int, int] = {}
    for look in looks:
        for at in look["tokens"]:
            if at is not None:
                used.setdefault(at, len(used))
    sequences = [trace._document["sequences"][at] for at in used]
    looks = [{**look, "tokens": [None if at is None else used[at] for at in look["tokens"]]} for look in looks]
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "looks": looks,
        "sequences": sequences,
        "notes": list(trace.notes),
    }
    names = dict.fromkeys(name for part in (looks, sequences) for name in _names(part) if name in trace._tensors)
    files.write(path, document, Chosen(trace._tensors, list(names)))


def _own(said: Any) -> list[int]:
    """Objects that are held in memory only."""
    if isinstance(said, dict):
        here = [said["object"]] if said.get("is") == "own" else []
        return here + [n for x in said.values() for n in _own(x)]
    return [n for x in said for n in _own(x)] if isinstance(said, list) else []


def _names(said: Any) -> Iterator[str]:
    """The names of tensors in a part of a document, the looks' own first."""
    if isinstance(said, dict):
        for key in ("q", "k", "v", "lse", "ids", "real", "tensor"):
            if isinstance(said.get(key), str):
                yield said[key]
        for x in said.values():
            yield from _names(x)
    elif isinstance(said, list):
        for x in said:
            yield from _names(x)


def check(tensors: files.Mapped) -> None:
    """Refuse a document that is not as `save` writes it. Descriptions are checked when their A is made."""
    said = tensors.document
    if said.get("format") != _FORMAT:
        raise tensors.wrong("a document of another format")
    if said.get("version") != VERSION:
        raise tensors.wrong(f"version {said.get('version')!r:.20} where this regard reads {VERSION}")
    for name in ("looks", "sequences", "notes"):
        if not isinstance(said.get(name), list):
            raise tensors.wrong(f"a document without its list of {name}")
    if not all(isinstance(note, str) for note in said["notes"]):
        raise tensors.wrong("notes that are no text")
    for at, look in enumerate(said["looks"]):
        _check_look(tensors, at, look, len(said["sequences"]))
    for at, sequence in enumerate(said["sequences"]):
        _check_sequence(tensors, at, sequence)
    for at, look in enumerate(said["looks"]):
        _check_tokens(tensors, at, look)


def _check_look(tensors: files.Mapped, at: int, look: Any, sequences: int) -> None:
    def wrong(what: str) -> ValueError:
        return tensors.wrong(f"look {at} with {what}")

    if not isinstance(look, dict) or set(look) != set(_FIELDS):
        raise wrong(f"other fields than {', '.join(_FIELDS)}")
    for name, what in _FIELDS.items():
        x = look[name]
        fits = {
            _TEXT: isinstance(x, str) and len(x) < 4096,
            _WHOLE: _whole(x),
            _LIST: isinstance(x, list),
            _NAME: isinstance(x, str),
            f"{_NAME} or nothing": x is None or isinstance(x, str),
            _ANY: True,
        }[what]
        if not fits:
            raise wrong(f"{name} {x!r:.40} where {what} belongs")
    if look["kind"] not in ("self", "cross"):
        raise wrong(f"the kind {look['kind']!r:.40} where self or cross belongs")
    shapes = {name: tensors.shape(look[name]) for name in ("q", "k", "v", "lse") if look[name] is not None}
    for name, axes in (("q", 4), ("k", 4), ("v", 4), ("lse", 3)):
        if name in shapes and (len(shapes[name][1]) != axes or not shapes[name][0].is_floating_point):
            raise wrong(f"{name} of shape {shapes[name][1]} and {shapes[name][0]}")
    q, k = shapes["q"][1], shapes["k"][1]
    if shapes["q"][0] != shapes["k"][0] or q[0] != k[0] or q[3] != k[3] or not k[1] or q[1] % k[1]:
        raise wrong(f"q {q} and k {k} that do not go together")
    if "lse" in shapes and shapes["lse"][1] != q[:3]:
        raise wrong(f"lse {shapes['lse'][1]} beside q {q}")
    if "v" in shapes and (shapes["v"][1][0] != k[0] or shapes["v"][1][2] != k[2]):
        raise wrong(f"v {shapes['v'][1]} beside k {k}")
    heads = look["heads"]
    if len(heads) != q[1] or not all(_whole(n) for n in heads) or len(set(heads)) != len(heads):
        raise wrong(f"heads {heads!s:.60} beside q {q}")
    pair = look["tokens"]
    if len(pair) != 2 or not all(n is None or (_whole(n) and n < sequences) for n in pair):
        raise wrong(f"tokens {pair!s:.60}, of {sequences} sequences")


def _check_sequence(tensors: files.Mapped, at: int, said: Any) -> None:
    if not isinstance(said, dict) or set(said) != {"ids", "real", "labels"}:
        raise tensors.wrong(f"sequence {at} with other fields than ids, real, labels")
    for name in ("ids", "real"):
        if said[name] is not None and (not isinstance(said[name], str) or len(tensors.shape(said[name])[1]) != 2):
            raise tensors.wrong(f"sequence {at} with unreadable {name}")
    if said["ids"] is not None and tensors.shape(said["ids"])[0].is_floating_point:
        raise tensors.wrong(f"sequence {at} with ids that are no whole numbers")
    rows = said["labels"]
    if rows is not None:
        fits = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        if not fits or not all(isinstance(label, str) and _printable(label) for row in rows for label in row):
            raise tensors.wrong(f"sequence {at} with labels that are no lists of words")


def _check_tokens(tensors: files.Mapped, at: int, look: dict[str, Any]) -> None:
    """The sequences of a look have its rows and lengths."""
    batch = tensors.shape(look["q"])[1][0]
    for side, n in zip("qk", look["tokens"], strict=True):
        if n is None:
            continue
        said, length = tensors.document["sequences"][n], tensors.shape(look[side])[1][2]
        for name in ("ids", "real"):
            if said[name] is not None and tensors.shape(said[name])[1] != [batch, length]:
                raise tensors.wrong(f"look {at} with {name} of another shape than its {side}")
        rows = said["labels"]
        if rows is not None and (len(rows) != batch or any(len(row) != length for row in rows)):
            raise tensors.wrong(f"look {at} with labels of another number than its {side}")


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31


def _printable(label: str) -> bool:
    try:
        label.encode()
    except UnicodeEncodeError:
        return False
    return True
