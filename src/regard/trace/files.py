"""One safetensors file: named tensors, and a document (JSON) in its header. Written at once or not at all; mapped, not
read.

The header holds, beside what safetensors asks for, the document as text, its CRC-32, and in the document the dtype,
shape and CRC-32 of every tensor. Opening checks the document and that everything lies within the file; a tensor's own
sum is checked when it is first touched. Tensors begin at multiples of 64 bytes, as in memory, so that a product has
the same bits.

Nothing in a file is ever executed, and no other error than ValueError comes of what is in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

#: the key of the header under which the document lies, and that of its sum
DOCUMENT, SUM = "regard.trace", "regard.trace.crc32"
#: bytes of the longest header, as in safetensors itself; tensors begin at multiples of ALIGN; bytes summed at a time
HEADER, ALIGN, CHUNK = 100_000_000, 64, 1 << 24
#: bytes of a tensor at the most
LARGEST = 1 << 46

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def raw(x: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    flat: Any = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def sum_of(data: memoryview) -> str:
    """CRC-32 as eight digits."""
    found = 0
    for at in range(0, len(data), CHUNK):
        found = zlib.crc32(data[at : at + CHUNK], found)
    return f"{found:08x}"


def write(path: str | os.PathLike, document: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put a document and tensors into a file. Whoever opens the path finds the old file or the whole new one.

    The mapping is asked for one tensor at a time, so that tensors which are not in memory need not all be there.
    """
    target = Path(path)
    made = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(made, "xb") as file:
            _write(file, document, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, target)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def _write(file: IO[bytes], document: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    entries: dict[str, Any] = {}
    sums: dict[str, str] = {}
    at = 0
    for name in tensors:
        x = tensors[name]
        if x.dtype not in _NAMES:
            raise ValueError(f"{name}: expected one of {', '.join(DTYPES)}, found {x.dtype}")
        size = x.numel() * x.element_size()
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + size]}
        sums[name] = "0" * 8
        at += size
        if at % ALIGN:  # safetensors allows no gap between tensors, so what fills one is a tensor
            fill = ALIGN - at % ALIGN
            entries[f"fill.{name}"] = {"dtype": "U8", "shape": [fill], "data_offsets": [at, at + fill]}
            at += fill
        del x
    header = _header(document, entries, sums)
    file.write(struct.pack("<Q", len(header)) + header)
    for name, entry in entries.items():
        if name not in sums:
            file.write(bytes(entry["shape"][0]))
            continue
        data = raw(tensors[name])
        sums[name] = sum_of(data)
        file.write(data)
    found = _header(document, entries, sums)
    assert len(found) == len(header)  # sums have one width
    file.seek(8)
    file.write(found)


def _header(document: dict[str, Any], entries: dict[str, Any], sums: dict[str, str]) -> bytes:
    listed = {name: [entries[name]["dtype"], entries[name]["shape"], found] for name, found in sums.items()}
    text = json.dumps({**document, "tensors": listed}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    notes = {DOCUMENT: text, SUM: f"{zlib.crc32(text.encode()):08x}"}
    header = json.dumps({"__metadata__": notes, **entries}, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGN)
    if len(header) > HEADER:
        raise ValueError(f"document: {len(header):,} bytes of description, expected at most {HEADER:,}")
    return header


class Mapped(Mapping[str, Tensor]):
    """The tensors of a file by name, mapped when they are asked for, and its document."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self._mark = _mark(file)
            self.size = self._mark[0]
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(HEADER, self.size - 8):
                raise self.wrong(f"a file of {self.size:,} bytes that does not begin as one")
            header = file.read(length)
        self.start = 8 + length
        entries = self._parse(header, "header")
        notes = entries.pop("__metadata__", None)
        if not isinstance(notes, dict) or not isinstance(notes.get(DOCUMENT), str):
            raise self.wrong("a safetensors file without a trace in its header")
        text = notes[DOCUMENT]
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            raise self.wrong("a document that is no Unicode text") from None
        if notes.get(SUM) != f"{zlib.crc32(encoded):08x}":
            raise self.wrong(f"a document with the sum {zlib.crc32(encoded):08x} where {notes.get(SUM)!r} is written")
        self.document = self._parse(encoded, "document")
        self._entries = self._check(entries, self.document.pop("tensors", None))
        self._touched: dict[str, Tensor] = {}

    def wrong(self, found: str) -> ValueError:
        return ValueError(f"{self.path}: expected a trace as regard saves it, found {found}")

    def _parse(self, data: bytes, what: str) -> dict[str, Any]:
        try:
            found = parse(data)
        except ValueError as error:
            raise self.wrong(f"a {what} that cannot be read ({error})") from None
        if not isinstance(found, dict):
            raise self.wrong(f"a {what} that is a {type(found).__name__}")
        return found

    def _check(self, entries: dict[str, Any], listed: Any) -> dict[str, tuple[torch.dtype, list[int], int, str]]:
        """Every tensor of the document is in the file, as it says, and the file holds nothing else."""
        if not isinstance(listed, dict):
            raise self.wrong("a document without a list of its tensors")
        spans, checked = [], {}
        for name, entry in entries.items():
            fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
            dtype, shape, offsets = str(fields.get("dtype")), fields.get("shape", ""), fields.get("data_offsets", "")
            if dtype not in DTYPES or not _wholes(shape) or not _wholes(offsets) or len(offsets) != 2:
                raise self.wrong(f"an unreadable entry for {name!r:.60}")
            size = math.prod(shape) * DTYPES[dtype].itemsize
            if len(shape) > 8 or size > LARGEST or offsets[1] - offsets[0] != size:
                raise self.wrong(
                    f"an entry for {name!r:.60} whose shape {shape!s:.60} and bytes {offsets!s:.60} differ"
                )
            spans.append((offsets[0], offsets[1]))
            if name in listed:
                if offsets[0] % DTYPES[dtype].itemsize:
                    raise self.wrong(f"a tensor {name!r:.60} that begins at byte {offsets[0]}")
                told = listed[name]
                if not isinstance(told, list) or len(told) != 3 or told[:2] != [dtype, shape]:
                    raise self.wrong(f"an entry for {name!r:.60} that is not as its document says")
                checked[name] = DTYPES[dtype], shape, self.start + offsets[0], str(told[2])
            elif not name.startswith("fill."):
                raise self.wrong(f"a tensor {name!r:.60} that its document does not know")
        if missing := [name for name in listed if name not in checked]:
            raise self.wrong(f"no tensor {missing[0]!r:.60}, which its document names")
        end = 0
        for first, last in sorted(spans):
            if first != end:
                raise self.wrong(f"tensors that do not follow each other at byte {end}")
            end = last
        if self.start + end != self.size:
            raise self.wrong(f"{self.size:,} bytes where {self.start + end:,} belong to it: cut short, or added to")
        return checked

    def shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        """dtype and shape, without touching the tensor."""
        if name not in self._entries:
            raise self.wrong(f"no tensor {name!r:.60}, which its document uses")
        return self._entries[name][:2]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._touched:
            dtype, shape = self.shape(name)
            first, told = self._entries[name][2:]
            size = math.prod(shape) * dtype.itemsize
            if not size:
                return torch.empty(shape, dtype=dtype)
            page = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            with open(self.path, "rb") as file:
                if _mark(file) != self._mark:
                    raise self.wrong("that it has been changed since it was opened")
                # a private copy of the pages that are written to: the file itself never changes
                pages = mmap.mmap(file.fileno(), first + size - page, access=mmap.ACCESS_COPY, offset=page)
            found = sum_of(memoryview(pages)[first - page :])
            if found != told:
                raise self.wrong(f"a tensor {name!r:.60} with the sum {found} where {told!r:.20} is written: altered")
            flat = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=first - page)
            self._touched[name] = flat.view(dtype).reshape(shape)
        return self._touched[name]

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Hold the pages of these no longer; they are mapped anew when they are asked for."""
        gone = {x.untyped_storage().data_ptr() for x in tensors}
        for name in [name for name, x in self._touched.items() if x.untyped_storage().data_ptr() in gone]:
            del self._touched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def parse(data: bytes) -> Any:
    """JSON of one meaning: no name twice, no NaN, not too deep. ValueError for all else."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _mark(file: IO[bytes]) -> tuple[int, ...]:
    """What tells a file from one that was put in its place, or changed: size, place and time."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that stands twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _wholes(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= LARGEST for n in x)


def is_trace(path: str | os.PathLike) -> bool:
    """Whether a file begins like a trace. Opening it may still find that it is damaged."""
    try:
        with open(path, "rb") as file:
            return f'"{DOCUMENT}"'.encode() in file.read(4096)
    except OSError:
        return False
