"""What can be looked at: traces that were given, recorded from a text, or made of an uploaded file.

Every source is a trace, and perhaps the picture that its tokens are patches of. A file of q and k (.npz or
.safetensors, with v, a grid and an image if they are there) becomes one by recording a module that does nothing but
attend. Uploads are written to a folder of our own under a name of our own, and are read without pickle. The browser
names sources by numbers that the server made.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...masks import causal
from ...matrix import AttentionMatrix, attention
from ...trace import Look, Trace, is_trace, record
from ...watching import attended
from .images import picture, placed

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


class Held(NamedTuple):
    """What a file or a model gave: a trace, and the picture its tokens are patches of, as bytes."""

    trace: Trace
    image: Tensor | None = None


@dataclass
class Seen:
    """One look of a source for one row of the batch, as pages know it."""

    look: Look
    trace: Trace  # of this look and row alone
    row: int
    image: Tensor | None = None
    device: torch.device | None = None  # where it is computed; where its tensors are unless said
    lock: threading.Lock = field(default_factory=threading.Lock)
    _made: dict[int | None, AttentionMatrix] = field(default_factory=dict)
    _values: Tensor | None = None
    _lse: Tensor | None = None  # of all heads, where it was recorded

    def matrix(self, head: int | None = None) -> AttentionMatrix:
        """A of one head, [q_len, k_len], or of all, [heads, q_len, k_len]."""
        with self.lock:
            if None not in self._made and (head is None or self.device is not None):
                whole = self.trace[self.look.layer]
                self._made[None] = whole[0] if self.device is None else self._moved(whole, self.device)[0]
            if head is not None and head not in self._made:
                if self.device is None:
                    self._made[head] = self.trace[self.look.layer, head]
                else:
                    at = self.look.heads.index(head)
                    A = self._made[None][at]
                    self._made[head] = A if self._lse is None else A.knowing(self._lse[at])
            return self._made[head]

    def _moved(self, whole: AttentionMatrix, device: torch.device) -> AttentionMatrix:
        """A on another device: q and k are moved once. The pages of a file that they were in are let go."""
        self._lse = None if whole.remembered is None else whole.remembered[0].to(device)
        moved = whole.to(device)
        if moved.device != whole.device:
            self.trace.let_go(whole)
        return moved

    def values(self) -> Tensor | None:
        """The values of this look, [kv_heads, k_len, v_dim]; None if they were not recorded."""
        if self._values is None:
            try:
                found = self.trace.values(self.look.layer)[0]
            except ValueError:
                return None
            self._values = found if self.device is None else found.to(self.device)
        return self._values

    def ids(self) -> Tensor | None:
        """The tokens of the queries, [q_len]; None where they have none, or are not the keys' as well."""
        q, k = (self.trace.tokens(side) for side in ("q", "k"))
        return q[0] if q is not None and k is not None and torch.equal(q, k) else None

    def real(self) -> Tensor | None:
        """Which queries are no padding, [q_len]; None where all are."""
        name = self.trace._sequence("q", "real")
        return None if name is None else self.trace._tensors[name][self.row if self.trace._batch is not None else 0]

    def labels(self, side: str) -> list[str] | None:
        """What to write beside rows or columns; None where there is nothing better than their numbers."""
        if self.trace._sequence(side, "ids") is None and self.trace._sequence(side, "labels") is None:
            return None
        return self.trace.labels(side)

    def told(self) -> dict[str, Any]:
        """What a page is told of it."""
        look, form = self.look, self.matrix().plan.form
        name = f"{look.path or 'A'}" + (f", row {self.row}" if self.row or look.batch > 1 else "")
        terms = dict.fromkeys([*form.rewrites, *(piece.label for piece in form.pieces)])
        return {
            "name": name, "stack": look.stack, "kind": look.kind, "layer": look.layer, "heads": list(look.heads),
            "q_len": look.q_len, "k_len": look.k_len, "batch": self.row, "geometry": self.geometry(),
            "terms": list(terms), "causal": _is_causal(form.mask),
        }  # fmt: skip

    def geometry(self) -> dict[str, Any] | None:
        """Grids of two axes, as the grid view draws them: shapes, tokens without a place, and where they begin."""
        A = self.matrix()
        q, k = A.plan.form.q_geometry, A.plan.form.k_geometry
        if q[0] != "grid" or k[0] != "grid" or len(q[1]) != 2 or len(k[1]) != 2:
            return None
        (query,), (key,) = A.starts
        return {
            "q": list(q[1]), "k": list(k[1]), "unplaced": k[2], "q_unplaced": q[2], "q_start": query, "k_start": key,
            "image": self.image is not None,
        }  # fmt: skip


def _is_causal(mask: tuple | None) -> bool:
    """Whether a mask in its normal form lets no query look ahead."""
    if mask is None:
        return False
    if mask[0] == "and":
        return any(_is_causal(part) for part in mask[1:])
    return mask[0] == "within" and mask[1] is not None and mask[1] >= 0


class Source:
    """A trace with a number, or one that is being made."""

    def __init__(self, number: str, name: str, kind: str):
        self.id, self.name, self.kind = number, name, kind
        self.state, self.error = "recording", ""
        self.seen: list[Seen] = []
        self.trace: Trace | None = None
        self.notes: list[str] = []

    def fill(self, trace: Trace, image: Tensor | None = None, device: torch.device | None = None) -> None:
        self.trace = trace
        for at, look in zip(trace._at, trace.looks, strict=True):
            for row in range(look.batch):
                part = trace._with([at]).row(row) if trace._batch is None else trace._with([at])
                part._ready = OrderedDict()  # of its own: several threads ask, each for another look
                self.seen.append(Seen(look, part, row, image, device))
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

    def __init__(self, upload: int = UPLOAD, text: int = TEXT, device: str | torch.device | None = None):
        self.limits = {"upload": upload, "text": text}
        self.device = None if device is None else torch.device(device)
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

    def add(
        self, name: str, trace: Trace | AttentionMatrix, kind: str = "trace", image: Tensor | None = None
    ) -> Source:  # fmt: skip
        source = self.new(name, kind)
        source.fill(trace_of(trace) if isinstance(trace, AttentionMatrix) else trace, image, self.device)
        return source

    def make(self, source: Source, how: Callable[[], Held]) -> None:
        """Fill a source; what goes wrong is told to who asks for it."""
        try:
            source.fill(*how(), self.device)
        except Exception as error:  # whatever a file leads to
            log.info("explorer: source %s", source.id, exc_info=True)
            source.seen, source.state = [], "failed"
            source.error = " ".join(str(error).replace(str(self.folder), "").split())[:500] or type(error).__name__


def models() -> list[dict[str, str]]:
    """Models that can be asked to read a text here, or to look at the image of a digit."""
    from ...subjects import DIGITS, EMBEDDED, FOLDER, MINILM

    there = importlib.util.find_spec(FOLDER[0]) is not None and importlib.util.find_spec("transformers") is not None
    found = [{"name": EMBEDDED, "label": "tiny"}, *([{"name": MINILM, "label": "MiniLM"}] if there else [])]
    return [*({**each, "reads": "text"} for each in found), {"name": DIGITS, "label": "digits", "reads": "digit"}]


def read(model: str, text: str) -> Held:
    """The trace of a model that reads a text, or looks at an image."""
    from ...subjects import open_model

    subject = open_model(model, text)
    with torch.no_grad(), record(subject.model, values=True, tokenizer=subject.tokenizer) as trace:
        subject.read()
    return Held(trace, None if subject.image is None else picture(subject.image))


def opened(path: Path, name: str) -> Held:
    """The trace in a file, or of the q and k in it."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK":
        return _attention(_from_npz(path), name)
    if is_trace(path):
        return Held(Trace.open(path))
    return _attention(_from_safetensors(path, name), name)


def _from_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    with zipfile.ZipFile(path) as inside:
        wanted = {info.filename.removesuffix(".npy"): info for info in inside.infolist()}
        size = sum(info.file_size for name, info in wanted.items() if name in NAMES)
        if size > UPLOAD:
            raise ValueError(f"npz: {size:,} bytes of arrays, expected at most {UPLOAD:,}")
    with np.load(path, allow_pickle=False) as held:
        return {name: _tensor(name, held[name]) for name in NAMES if name in held.files}


NAMES = ("q", "k", "v", "scale", "causal", "grid", "unplaced", "image")


def _tensor(name: str, x: Any) -> Tensor:
    if name == "image" and getattr(x, "dtype", None) == "uint8":
        return torch.from_numpy(x)
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


def _attention(held: dict[str, Tensor], name: str) -> Held:
    """A of the tensors of a file: q, k, perhaps v, a scale, whether it is causal, a grid, and the image on it."""
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
    image = picture(held["image"]) if "image" in held else None
    grid = placed(k.shape[2], held.get("grid"), held.get("unplaced"), image)
    start = k.shape[2] - q.shape[2] if is_causal else 0
    if start < 0:
        raise ValueError(f"causal: expected no more queries than keys, found {q.shape[2]} and {k.shape[2]}")
    if grid is not None and q.shape[2] != k.shape[2]:
        raise ValueError(f"grid: expected as many queries as keys, found {q.shape[2]} and {k.shape[2]}")
    A = attention(q, k, scale=scale, mask=causal if is_causal else None, geometry=grid, q_start=start or None)
    return Held(trace_of(A, held.get("v")), image)
