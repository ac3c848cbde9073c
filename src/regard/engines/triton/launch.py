"""How kernels are started: what of a problem chooses them, and a log that tells what the compiler did."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from .choice import Tiling, interpreted, line_block
from .given import Given

log = logging.getLogger("regard")


def dense_rows(x: Tensor) -> Tensor:
    """The same numbers, each row in one piece: kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def added(given: Given) -> str:
    """What tiles load besides keys and values."""
    return "axes" if given.axes else "table" if given.table or given.gathered else "nothing"


def is_easy(given: Given) -> bool:
    """Nothing but scale * q·k, with a scale that keeps the order; tables and axes; and a number a row."""
    parts = given.row_scale or given.col_scale or given.col or given.cross_row or given.slope or given.gathered
    return not parts and given.softcap is None and given.scale >= 0


def is_plain(given: Given) -> bool:
    """Nothing but scale * q·k."""
    return is_easy(given) and not (given.row or given.table or given.axes)


def on_lines(tiling: Tiling, given: Given) -> Tiling:
    """Key tiles that lie in one line of a grid, where terms of its axes are added."""
    if not given.axes:
        return tiling
    return tiling._replace(block_k=line_block(given.axes.wide, tiling.block_k))


def is_ragged(given: Given, tiling: Tiling) -> bool:
    """Some tile on the lines of a grid is cut, by a mask or by the end of a line."""
    return bool(given.axes) and (bool(given.mask) or given.axes.wide % tiling.block_k > 0)


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are rounded: not at all, unless PyTorch's own are."""
    if dtype != torch.float32 or interpreted():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


_seen: set[tuple] = set()


def run(kernel: Any, programs: int, tiling: Tiling, *args: Any, **flags: Any) -> None:
    """Launch a kernel; the first call of a structure compiles, and says so."""
    shape = tuple(flags.items()), tiling, kernel.fn.__name__, _shape(args)
    fresh = shape not in _seen
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    if tiling.registers is not None:
        options["maxnreg"] = tiling.registers
    begin = time.perf_counter()
    with torch.cuda.device(args[0].device) if args[0].is_cuda else _nowhere():
        kernel[(programs,)](*args, **flags, **options)
    if fresh:
        _seen.add(shape)
        log.info("triton: compiled %s in %.1f s", kernel.fn.__name__, time.perf_counter() - begin)


class _nowhere:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _shape(x: Any) -> Any:
    """What of an argument the compiler sees: types, and which fields there are."""
    if isinstance(x, tuple):
        return tuple(_shape(each) for each in x)
    return x.dtype if isinstance(x, Tensor) else type(x)
