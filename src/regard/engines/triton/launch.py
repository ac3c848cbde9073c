"""How kernels are started: what of a problem chooses them, and a log that tells what the compiler did."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .choice import Tiling, interpreted, line_block
from .given import Given, Has

log = logging.getLogger("regard")


def dense_rows(x: Tensor) -> Tensor:
    """The same numbers, each row in one piece: kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def added(given: Given) -> str:
    """What tiles have besides keys and values."""
    if given.axes or given.table or given.gathered:
        return "axes" if given.axes else "table"
    return "slope" if given.slope else "cut" if given.mask else "nothing"


def is_easy(given: Given) -> bool:
    """Nothing but scale * q·k, with a scale that keeps the order; tables, slopes and axes; and a number a row."""
    parts = given.row_scale or given.col_scale or given.col or given.cross_row or given.gathered
    return not parts and given.softcap is None and given.scale >= 0 and not (given.slope and given.axes)


def is_plain(given: Given) -> bool:
    """Nothing but scale * q·k."""
    return is_easy(given) and not (given.row or given.table or given.axes or given.slope)


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


#: kernels that are compiled, by all that the compiler looks at
_ready: dict[tuple, tuple[Any, tuple]] = {}


def run(kernel: Any, programs: int, tiling: Tiling, *args: Any, **flags: Any) -> None:
    """Launch a kernel; the first call of a structure compiles, and says so.

    Later calls go past Triton's own search for the compiled kernel, which takes longer than all else that is done
    before a launch: it looks at every argument in Python.
    """
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    if tiling.registers is not None:
        options["maxnreg"] = tiling.registers
    if interpreted():
        _tell(kernel, tuple(flags.items()), lambda: kernel[(programs,)](*args, **flags, **options))
        return
    device = args[0].device
    key: list = [kernel, tiling, device.index, *flags.values()]
    _look_at(args, key.append)
    shape = tuple(key)
    with torch.cuda.device(device) if device.index != torch.cuda.current_device() else _NOWHERE:
        found = _ready.get(shape)
        if found is not None:
            found[0][(programs, 1, 1)](*args, *found[1])
            return
        rest = tuple(flags[name] for name in kernel.arg_names[len(args) :])
        compiled = _tell(kernel, shape, lambda: kernel[(programs,)](*args, **flags, **options))
        _ready[shape] = compiled, rest


def _look_at(args: tuple, say: Callable[[Any], None]) -> None:
    """What of some arguments the compiler sees: types, whether pointers and numbers are multiples of 16, ones."""
    for x in args:
        kind = type(x)
        if x is None:
            say(None)
        elif kind is int:
            say(1 if x == 1 else (x & 15 == 0, -(2**31) <= x < 2**31))
        elif isinstance(x, Tensor):
            say(x.dtype)
            say(x.data_ptr() & 15 == 0)
        elif kind is Has:  # there is one of each, which is kept
            say(id(x))
        elif isinstance(x, tuple):
            say(len(x))
            if x:
                _look_at(x, say)
        else:
            say(kind if kind is float or kind is bool else x.value)


_NOWHERE = contextlib.nullcontext()
_told: set[tuple] = set()


def _tell(kernel: Any, shape: tuple, call: Callable[[], Any]) -> Any:
    """Call what may compile, and say so the first time."""
    begin = time.perf_counter()
    result = call()
    if (kernel, shape) not in _told:
        _told.add((kernel, shape))
        log.info("triton: compiled %s in %.1f s", kernel.fn.__name__, time.perf_counter() - begin)
    return result
