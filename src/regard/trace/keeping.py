"""What a recording keeps: tensors by name, in memory up to a bound and on disk beyond it.

Tensors that come again (a table that all layers share, a mask that every layer is given) are kept once: equal bytes of
one dtype and shape are one tensor. What does not fit into memory goes to a folder of its own, as safetensors, the
largest first, and is mapped from there when it is asked for. The folder is removed with the last that refers to it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from . import files

#: bytes below which a tensor stays in memory: a file for each would be worse
SMALL = 1 << 16


class Kept(Mapping[str, Tensor]):
    """Tensors by name. `memory` bounds the bytes of those that are held in RAM; None: no bound."""

    def __init__(self, memory: int | None = None, folder: str | Path | None = None):
        self.memory, self.folder = memory, folder
        self.here: dict[str, Tensor] = {}
        self.spilled: dict[str, files.Mapped] = {}
        self.bytes = 0
        self._names = 0
        self._same: dict[tuple, list[str]] = {}
        self._own: Path | None = None

    def put(self, x: Tensor, what: str = "t") -> str:
        """Keep a tensor of this machine's memory, as it is: the caller has copied it."""
        name, self._names = f"{what}.{self._names}", self._names + 1
        self.here[name] = x
        self.bytes += size_of(x)
        self._spill()
        return name

    def put_once(self, x: Tensor) -> str:
        """Keep a copy of a tensor, or find the one that is kept already."""
        x = to_host(x)
        key = (x.dtype, x.shape, zlib.crc32(files.raw(x)))
        for name in self._same.get(key, ()):
            if torch.equal(files_bytes(self[name]), files_bytes(x)):
                return name
        name = self.put(x)
        self._same.setdefault(key, []).append(name)
        return name

    def drop(self, name: str) -> None:
        if name in self.here:
            self.bytes -= size_of(self.here.pop(name))
        elif name in self.spilled:
            self.spilled.pop(name).path.unlink(missing_ok=True)

    def _spill(self) -> None:
        """Write the largest tensors to disk until the rest fits."""
        if self.memory is None or self.bytes <= self.memory:
            return
        for name in sorted(self.here, key=lambda name: -size_of(self.here[name])):
            x = self.here[name]
            if self.bytes <= self.memory or size_of(x) < SMALL:
                return
            path = self._place() / f"{name}.safetensors"
            files.write(path, {}, {name: x})
            self.spilled[name] = files.Mapped(path)
            del self.here[name]
            self.bytes -= size_of(x)

    def _place(self) -> Path:
        if self._own is None:
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            self._own = Path(tempfile.mkdtemp(prefix="regard-trace-", dir=self.folder))
            self._finalizer = weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        return self._own

    def close(self) -> None:
        """Forget everything, and remove what was written."""
        self.here.clear()
        self.spilled.clear()
        self._same.clear()
        self.bytes = 0
        if self._own is not None:
            self._finalizer()
            self._own = None

    def shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        if name in self.spilled:
            return self.spilled[name].shape(name)
        return self.here[name].dtype, list(self.here[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        return self.spilled[name][name] if name in self.spilled else self.here[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.here, *self.spilled)

    def __len__(self) -> int:
        return len(self.here) + len(self.spilled)


def size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def files_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself there, and 0 differs from -0."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def to_host(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of its own, in this machine's memory and laid out in order; an ordinary tensor in inference mode, too."""
    with torch.no_grad(), torch.inference_mode(False):
        x = x.detach()
        if x.device.type != "cpu" and dtype is not None:
            x = x.to(dtype)  # there, it is quick, and there may be less to copy
        return torch.empty(x.shape, dtype=dtype or x.dtype).copy_(x)
