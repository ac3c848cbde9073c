"""How kernels are started: what of a problem chooses them, and a log that tells what the compiler did."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .choice import Tiling, interpreted, line_block
from .given import Given, Has

log = logging.getLogger("regard")

#: asked for before the first kernel is made, so it cannot change
INTERPRETED = interpreted()


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


def is_bare(given: Given) -> bool:
    """Nothing but scale * q·k, and a table."""
    return is_easy(given) and not (given.row or given.axes or given.slope)


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
    if dtype != torch.float32 or INTERPRETED:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Ready(NamedTuple):
    """A compiled kernel, and the arguments after those that vary."""

    kernel: Any
    rest: tuple


#: kernels that are compiled, by all that the compiler looks at; and by the very numbers of a call, which is quicker
_ready: dict[tuple, Ready] = {}
_called: dict[Any, Ready] = {}
#: where tensors stand among arguments of some types, and where tuples do
_places: dict[tuple, tuple[tuple[int, ...], tuple[int, ...]]] = {}
#: calls that are remembered: every length of a decoder's steps is one
CALLS = 4096


def run(kernel: Any, programs: int, tiling: Tiling, *args: Any, **flags: Any) -> Ready | None:
    """Launch a kernel; the first call of a structure compiles, and says so. Gives what is to be started next time.

    Later calls go past Triton's own search for the compiled kernel, which takes longer than all else that is done
    before a launch: it looks at every argument in Python. Pointers are handed over as numbers: a tensor would be asked
    for its own again, and the driver whether it is on the device.
    """
    if INTERPRETED:
        _tell(kernel, tuple(flags.items()), lambda: kernel[(programs,)](*args, **flags, **options_of(tiling)))
        return None
    device = args[0].device.index
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return run(kernel, programs, tiling, *args, **flags)
    kinds = (*map(type, args),)
    places = _places.get(kinds)
    if places is None:
        places = _places[kinds] = _sorted(kinds)
    handed, said, low = list(args), list(args), 0
    for n in places[0]:
        x = args[n]
        handed[n] = at = x.data_ptr()
        said[n] = x.dtype
        low |= at
    for n in places[1]:
        said[n] = _seen(args[n])
    if low & 15:  # some pointer is not at a whole vector: the compiler wants to know which
        said += [x.data_ptr() & 15 == 0 for x in args if isinstance(x, Tensor)]
    exact = (id(kernel), tiling, device, kinds, *flags.values(), *said)
    ready = _called.get(exact)
    if ready is None:
        key: list = [id(kernel), tiling, device, *flags.values()]
        look_at(args, key.append)
        shape = tuple(key)
        ready = _ready.get(shape)
        if ready is None:
            made = _tell(kernel, shape, lambda: kernel[(programs,)](*args, **flags, **options_of(tiling)))
            ready = Ready(made, tuple(flags[name] for name in kernel.arg_names[len(args) :]))
            _ready[shape] = ready
            return ready
        _keep(exact, ready)
    start(ready.kernel, programs, device, (*handed, *ready.rest))
    return ready


class Start:
    """A launch whose numbers are known: what changes from call to call are tensors, and tuples that look alike.

    The tensors come first. They have the same dtypes and are on the same device every time: who keeps a launch keeps it
    by those.
    """

    def __init__(self, device: torch.device, kernel: Any, programs: int, tiling: Tiling, *numbers: Any, **flags: Any):
        self.device, self.kernel, self.programs, self.tiling = device.index, kernel, programs, tiling
        self.numbers, self.flags = numbers, flags

    def __call__(self, tensors: tuple[Tensor | None, ...], *more: tuple) -> None:
        low, handed = 0, []
        for x in tensors:
            at = None if x is None else x.data_ptr()
            handed.append(at)
            low |= at or 0
        # which pointers are not at whole vectors, the compiler wants to know
        call = (self, *[(at or 0) & 15 == 0 for at in handed]) if low & 15 else self
        ready = _called.get(call)
        if ready is not None and self.device == torch._C._cuda_getDevice():
            start(ready.kernel, self.programs, self.device, (*handed, *more, *self.numbers, *ready.rest))
            return
        ready = run(self.kernel, self.programs, self.tiling, *tensors, *more, *self.numbers, **self.flags)
        if ready is not None:
            _keep(call, ready)


#: launches by what chooses their numbers
_starts: dict[tuple, Start] = {}


def again(key: tuple, tensors: tuple[Tensor | None, ...], tuples: tuple, make: Callable[[], Start]) -> None:
    """Launch what was launched before for the same key, or what `make` makes: a pass comes with one layer after layer.

    The key says all that the numbers and flags follow from, and what the compiler sees of tensors and tuples.
    """
    known = _starts.get(key)
    if known is None:
        if len(_starts) >= CALLS:
            _starts.clear()
        known = _starts[key] = make()
    known(tensors, *tuples)


def _keep(call: Any, ready: Ready) -> None:
    if len(_called) >= CALLS:
        _called.clear()
    _called[call] = ready


def _sorted(kinds: tuple[type, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which arguments of these types are tensors, and which are tuples; all others stand for themselves."""
    tensors = tuple(n for n, kind in enumerate(kinds) if issubclass(kind, Tensor))
    return tensors, tuple(n for n, kind in enumerate(kinds) if issubclass(kind, tuple))


def start(kernel: Any, programs: int, device: int, args: tuple) -> None:
    """Start a compiled kernel on the current stream, as Triton does after its search, less what nobody asked for.

    Hooks, such as a profiler's, are called where there are any: then Triton does it all.
    """
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        kernel[(programs, 1, 1)](*args)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernel.run(programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)


def options_of(tiling: Tiling) -> dict[str, int]:
    """What the compiler is told. (A product and a sum in one operation is Triton's habit no longer from 3.10 on.)"""
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": True}
    return options if tiling.registers is None else options | {"maxnreg": tiling.registers}


def _seen(x: Any) -> Any:
    """What the compiler sees of one argument that is a tuple."""
    known = getattr(x, "seen", None)
    if known is not None:
        return known
    key: list = []
    look_at((x,), key.append)
    return tuple(key)


def look_at(args: tuple, say: Callable[[Any], None]) -> None:
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
                look_at(x, say)
        else:
            say(kind if kind is float or kind is bool else x.value)


_told: set[tuple] = set()


def _tell(kernel: Any, shape: tuple, call: Callable[[], Any]) -> Any:
    """Call what may compile, and say so the first time."""
    begin = time.perf_counter()
    result = call()
    if (kernel, shape) not in _told:
        _told.add((kernel, shape))
        log.info("triton: compiled %s in %.1f s", kernel.fn.__name__, time.perf_counter() - begin)
    return result
