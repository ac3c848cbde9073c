"""What can be looked at: traces that were given, recorded from a text, or made of an uploaded file.

Every source is a trace. A file of q and k (.npz or .safetensors, with v if it is there) becomes one by recording a
module that does nothing but attend. Uploads are written to a folder of our own under a name of our own, and are read
without pickle. The browser names sources by numbers that the server made.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...masks import _And, causal
from ...matrix import AttentionMatrix, attention
from ...trace import Look, Trace, is_trace, record
from ...watching import attended

log = logging.getLogger("regard")

#: bytes of an upload, characters of a text, sources at a time
UPLOAD, TEXT, SOURCES = 2 << 30, 1_000_000, 64
#: labels that are told with a source; longer lists are asked for in parts
SHORT = 512


class Given(nn.Module):
    """A module that attends with what it was given, and nothing else."""

    def __init__(self, A: AttentionMatrix, v: Tensor | None):
        super().__init__()
        self.A, self.v = A, v

    def forward(self) -> None:
        A = self.A
        v = self.v if self.v is not None else torch.empty(*A.shape[:2], A.shape[3], 0, dtype=A.dtype, device=A.device)
        attended(self, A, v)


def trace_of(A: AttentionMatrix, v: Tensor | None = None) -> Trace:
    """A trace of one look, from an A [batch, heads, q_len, k_len]; `v` its values."""
    if len(A.shape) != 4:
        raise ValueError(
            f"A: expected [batch, heads, q_len, k_len], found {list(A.shape)}; give A before it is indexed"
        )
    module = Given(A, v)
    with record(module, values=v is not None) as trace:
        module()
    return trace


@dataclass
class Seen:
    """One look of a source for one row of the batch, as pages know it."""

    look: Look
    trace: Trace  # of this look and row alone
    row: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    _made: dict[int | None, AttentionMatrix] = field(default_factory=dict)

    def matrix(self, head: int | None = None) -> AttentionMatrix:
        """A of one head, [q_len, k_len], or of all, [heads, q_len, k_len]."""
        with self.lock:
            if head not in self._made:
                self._made[head] = (
                    self.trace[self.look.layer, head] if head is not None else self.trace[self.look.layer][0]
                )
            return self._made[head]

    def values(self) -> Tensor | None:
        """The values of this look, [kv_heads, k_len, v_dim]; None if they were not recorded."""
        try:
            return self.trace.values(self.look.layer)[0]
        except ValueError:
            return None

    def labels(self, side: str) -> list[str] | None:
        """What to write beside rows or columns; None where there is nothing better than their numbers."""
        if self.trace._sequence(side, "ids") is None and self.trace._sequence(side, "labels") is None:
            return None
        return self.trace.labels(side)

    def told(self) -> dict[str, Any]:
        """What a page is told of it."""
        look, d = self.look, self.matrix()._description
        name = f"{look.path or 'A'}" + (f", row {self.row}" if self.row or look.batch > 1 else "")
        return {
            "name": name, "stack": look.stack, "kind": look.kind, "layer": look.layer, "heads": list(look.heads),
            "q_len": look.q_len, "k_len": look.k_len, "batch": self.row, "geometry": self.geometry(),
            "terms": [term.describe() for term in d.terms], "causal": d.mask is causal or _has_causal(d.mask),
        }  # fmt: skip

    def geometry(self) -> dict[str, Any] | None:
        """Grids of two axes, as the grid view draws them."""
        form = self.matrix().plan.form
        q, k = form.q_geometry, form.k_geometry
        if q[0] != "grid" or k[0] != "grid" or len(q[1]) != 2 or len(k[1]) != 2:
            return None
        return {"q": list(q[1]), "k": list(k[1]), "unplaced": k[2]}


def _has_causal(mask: Any) -> bool:
    return isinstance(mask, _And) and any(part is causal for part in mask.parts())


class Source:
    """A trace with a number, or one that is being made."""

    def __init__(self, number: str, name: str, kind: str):
        self.id, self.name, self.kind = number, name, kind
        self.state, self.error = "recording", ""
        self.seen: list[Seen] = []
        self.trace: Trace | None = None
        self.notes: list[str] = []

    def fill(self, trace: Trace) -> None:
        self.trace = trace
        for at, look in zip(trace._at, trace.looks, strict=True):
            for row in range(look.batch):
                part = trace._with([at]).row(row) if trace._batch is None else trace._with([at])
                part._ready = OrderedDict()  # of its own: several threads ask, each for another look
                self.seen.append(Seen(look, part, row))
        self.notes = list(trace.notes)
        self.state = "ready"

    def told(self) -> dict[str, Any]:
        looks = [{"index": n, **seen.told()} for n, seen in enumerate(self.seen)]
        tokens = max((look["k_len"] for look in looks), default=0)
        told = {"id": self.id, "name": self.name, "kind": self.kind, "state": self.state, "error": self.error}
        return {**told, "tokens": tokens, "looks": looks, "notes": self.notes}

    def labels(self) -> dict[str, Any]:
        """The labels of the first look, where they are few."""
        if not self.seen:
            return {"q": None, "k": None}
        found = {side: self.seen[0].labels(side) for side in ("q", "k")}
        return {side: x if x is not None and len(x) <= SHORT else None for side, x in found.items()}


class Sources:
    """All sources, by number."""

    def __init__(self, upload: int = UPLOAD, text: int = TEXT):
        self.limits = {"upload": upload, "text": text}
        self._all: dict[str, Source] = {}
        self._count = 0
        self._lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="regard-explorer-"))

    def close(self) -> None:
        for source in self._all.values():
            source.seen.clear()
        self._all.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, number: str) -> Source:
        if number not in self._all:
            raise KeyError(f"source: no source {number!r:.40} here")
        return self._all[number]

    def told(self) -> list[dict[str, Any]]:
        return [source.told() for source in self._all.values()]

    def new(self, name: str, kind: str) -> Source:
        with self._lock:
            if len(self._all) >= SOURCES:
                raise ValueError(f"source: {SOURCES} are open, and that is all there may be; start again to have more")
            self._count += 1
            source = Source(str(self._count), name, kind)
            self._all[source.id] = source
        return source

    def add(self, name: str, trace: Trace | AttentionMatrix, kind: str = "trace") -> Source:
        source = self.new(name, kind)
        source.fill(trace_of(trace) if isinstance(trace, AttentionMatrix) else trace)
        return source

    def make(self, source: Source, how: Callable[[], Trace]) -> None:
        """Fill a source; what goes wrong is told to who asks for it."""
        try:
            source.fill(how())
        except Exception as error:  # whatever a file leads to
            log.info("explorer: source %s", source.id, exc_info=True)
            source.seen, source.state = [], "failed"
            source.error = " ".join(str(error).replace(str(self.folder), "").split())[:500] or type(error).__name__


def models() -> list[dict[str, str]]:
    """Models that can be asked to read a text here."""
    from ...subjects import EMBEDDED, FOLDER, MINILM

    found = [{"name": EMBEDDED, "label": "tiny (embedded)"}]
    there = importlib.util.find_spec(FOLDER[0]) is not None and importlib.util.find_spec("transformers") is not None
    return found + ([{"name": MINILM, "label": "MiniLM"}] if there else [])


def read(model: str, text: str) -> Trace:
    """The trace of a model that reads a text."""
    from ...subjects import open_model

    subject = open_model(model, text)
    with torch.no_grad(), record(subject.model, values=True, tokenizer=subject.tokenizer) as trace:
        subject.read()
    return trace


def opened(path: Path, name: str) -> Trace:
    """The trace in a file, or of the q and k in it."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK":
        return trace_of(*_attention(_from_npz(path), name))
    if is_trace(path):
        return Trace.open(path)
    return trace_of(*_attention(_from_safetensors(path, name), name))


def _from_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    with zipfile.ZipFile(path) as inside:
        wanted = {info.filename.removesuffix(".npy"): info for info in inside.infolist()}
        size = sum(info.file_size for name, info in wanted.items() if name in NAMES)
        if size > UPLOAD:
            raise ValueError(f"npz: {size:,} bytes of arrays, expected at most {UPLOAD:,}")
    with np.load(path, allow_pickle=False) as held:
        return {name: _tensor(name, held[name]) for name in NAMES if name in held.files}


NAMES = ("q", "k", "v", "scale", "causal")


def _tensor(name: str, x: Any) -> Tensor:
    if getattr(getattr(x, "dtype", None), "kind", "?") not in "fiub":
        raise ValueError(f"{name}: expected an array of numbers, found {getattr(x, 'dtype', type(x).__name__)}")
    return torch.from_numpy(x.astype("float32") if x.dtype.itemsize < 4 or x.dtype.kind != "f" else x)


def _from_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as held:
            return {each: held.get_tensor(each) for each in NAMES if each in held.keys()}
    except SafetensorError as error:
        raise ValueError(f"{name}: expected a trace, .npz or .safetensors, found something else ({error})") from None


def _attention(held: dict[str, Tensor], name: str) -> tuple[AttentionMatrix, Tensor | None]:
    """A of the tensors of a file: q, k, perhaps v, a scale, and whether it is causal."""
    for each in ("q", "k"):
        if each not in held:
            raise ValueError(f"{name}: expected tensors q and k, found {', '.join(sorted(held)) or 'neither'}")
    for each in ("q", "k", "v"):
        x = held.get(each)
        if x is None:
            continue
        if not 2 <= x.dim() <= 4 or not x.is_floating_point():
            raise ValueError(f"{each}: expected [batch, heads, length, dim], found {x.dtype} {list(x.shape)}")
        held[each] = x.reshape(*[1] * (4 - x.dim()), *x.shape)
    q, k = held["q"], held["k"]
    is_causal = "causal" in held and bool(held["causal"].reshape(-1)[0])
    scale = float(held["scale"].reshape(-1)[0]) if "scale" in held else None
    start = k.shape[2] - q.shape[2] if is_causal else 0
    if start < 0:
        raise ValueError(f"causal: expected no more queries than keys, found {q.shape[2]} and {k.shape[2]}")
    A = attention(q, k, scale=scale, mask=causal if is_causal else None, q_start=start)
    return A, held.get("v")
