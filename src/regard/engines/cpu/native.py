"""The passes of native.c, compiled by the machine's own C compiler when first needed, and kept.

Nothing depends on them: without a compiler, or with REGARD_NATIVE=0, the same work is done in PyTorch, more slowly, and
`missing()` says why. The library is built for the processor it runs on and kept under the user's cache folder, named
after everything it was made from. It shares PyTorch's OpenMP threads where PyTorch brings them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("regard")

SOURCE = Path(__file__).with_name("native.c")
PARTS = (SOURCE, *(SOURCE.with_name(name) for name in ("bins.c", "look.c", "attend.c", "decode.c")))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class Source(ctypes.Structure):
    """source_t of native.c."""

    _fields_ = (
        ("data", _Pointer), ("batch", _Int), ("head", _Int), ("row", _Int), ("col", _Int), ("thread", _Int),
        ("rows", _Pointer), ("runs", _Pointer), ("run_count", _Int), ("sliding", _Int), ("map", _Pointer),
        ("smooth", _Int),
    )  # fmt: skip


class Block(ctypes.Structure):
    """block_t of native.c."""

    _fields_ = tuple((name, _Int) for name in ("batch", "heads", "rows", "cols", "first_row", "first_col", "plane"))


class Factors(ctypes.Structure):
    """factors_t of attend.c."""

    _fields_ = (
        ("u", _Pointer), ("batch", _Int), ("head", _Int), ("row", _Int), ("features", _Pointer),
        ("features_batch", _Int), ("features_head", _Int), ("dim", _Int), ("entries", _Int), ("rows", _Pointer),
    )  # fmt: skip


class Drop(ctypes.Structure):
    """drop_t of native.c."""

    _fields_ = (
        ("seeds", _Pointer), ("batch", _Int), ("head", _Int), ("least", ctypes.c_uint32), ("over", ctypes.c_float),
    )  # fmt: skip


class Attend(ctypes.Structure):
    """attend_t of attend.c."""

    _fields_ = (
        *((name, _Pointer) for name in ("q", "k", "v")),
        *((name, _Int) for name in ("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_group")),
        *((name, _Int) for name in ("v_batch", "v_head", "v_group", "dim", "v_dim", "q_len", "k_len", "first_row")),
        ("low", _Int), ("high", _Int), ("out", _Pointer), ("lse", _Pointer),
        *((name, _Int) for name in ("out_batch", "out_head", "out_row", "lse_batch", "lse_head")),
        ("room", _Pointer), ("room_size", _Int), ("term", Factors), ("made", _Pointer), ("drop", Drop),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class Decode(ctypes.Structure):
    """decode_t of decode.c."""

    _fields_ = (
        *((name, _Pointer) for name in ("q", "k", "v")),
        *((name, _Int) for name in ("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "k_group")),
        *((name, _Int) for name in ("v_batch", "v_head", "v_row", "v_group", "batch", "planes", "members")),
        *((name, _Int) for name in ("q_len", "k_len", "dim", "v_dim", "low", "high")),
        ("slope", _Pointer), *((name, _Int) for name in ("slope_batch", "slope_head", "shift")),
        ("out", _Pointer), ("lse", _Pointer),
        *((name, _Int) for name in ("out_batch", "out_head", "out_row", "lse_batch", "lse_head")),
        ("room", _Pointer), ("scale", ctypes.c_float),
    )  # fmt: skip


class Share(ctypes.Structure):
    """share_t of look.c."""

    _fields_ = (
        ("begin", _Pointer), ("end", _Pointer), ("inside", _Pointer), ("batch", _Int), ("head", _Int), ("row", _Int),
        ("mass", _Pointer),
    )  # fmt: skip


class Look(ctypes.Structure):
    """look_t of look.c."""

    _fields_ = (
        ("lse", _Pointer), ("sink", _Pointer), ("entropy", _Pointer), ("received", _Pointer), ("profile", _Pointer),
        ("cell_sum", _Pointer), ("cell_max", _Pointer), ("cell", _Int), ("skip", _Int), ("cells", _Int),
        ("top_logit", _Pointer), ("top_index", _Pointer), ("top", _Int),
        ("logit_sum", _Pointer), ("logit_max", _Pointer), ("known", _Int), ("squares", _Pointer),
        ("shares", _Pointer), ("share_count", _Int), ("heads", _Int),
    )  # fmt: skip


def library() -> ctypes.CDLL | None:
    """The compiled passes, or None."""
    return _load()[0]


def missing() -> str | None:
    """Why there are no compiled passes; None where there are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "REGARD_NATIVE=0"
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) was found"
    try:
        path = _built(compiler)
        made = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the compiled CPU passes are not available: %s", error)
        return None, f"{compiler} could not build them: {error}"
    sources = [_Pointer, _Int, _Pointer]  # sources, how many, block
    for name, takes, gives in (
        ("regard_lay", [*sources, _Pointer], None),
        ("regard_weigh", [*sources, *[_Pointer] * 7], None),
        ("regard_look", [_Pointer, _Int, _Int, _Int, _Pointer], _Int),
        ("regard_pack", [_Pointer, *[_Int] * 8, _Pointer], None),
        ("regard_multiply", [_Pointer, _Int, _Int, _Int, _Pointer], None),
        ("regard_attend", [*sources, _Pointer], None),
        ("regard_decode", [*sources, _Int], _Int),
    ):
        getattr(made, name).argtypes = [*takes, ctypes.c_int]  # and threads
        getattr(made, name).restype = gives
    return made, None


def _built(compiler: str) -> Path:
    """Where the library is; built if it is not there yet."""
    threads = _openmp()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    made_from = [*(part.read_text() for part in PARTS), *FLAGS, *threads, version, platform.machine(), _processor()]
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:20]
    for folder in (_cache(), Path(tempfile.gettempdir()) / f"regard-{os.getuid() if hasattr(os, 'getuid') else 0}"):
        path = folder / f"native-{name}.so"
        if path.exists() and _ours(path):
            return path
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _ours(folder):
                _compile(compiler, threads, path)
                return path
        except OSError as error:
            log.debug("%s: %s", folder, error)
    raise OSError("neither the user's cache folder nor the temporary one can be written")


def _compile(compiler: str, threads: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        for extra in (["-fopenmp", *threads], []):  # some compilers have no OpenMP: then one thread
            command = [compiler, *FLAGS, *extra, str(SOURCE), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                os.replace(made, path)
                log.info("compiled the CPU passes with %s", compiler)
                return
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{compiler} failed")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def _ours(path: Path) -> bool:
    """Nobody else could have put it there."""
    if not hasattr(os, "getuid"):
        return True
    state = path.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _openmp() -> list[str]:
    """PyTorch's own OpenMP library, so that two pools of threads do not fight for the cores."""
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*.so*"))
    return [str(found[0])] if found else []


def pointer(x: Tensor | None, shift: int = 0) -> int | None:
    """The address of a tensor's first number, moved by some numbers."""
    return None if x is None else x.data_ptr() + shift * x.element_size()


def call(name: str, *args: object, threads: int | None = None) -> int:
    """One of the passes, on as many threads as PyTorch uses unless it is said."""
    made = library()
    assert made is not None
    return getattr(made, name)(*args, torch.get_num_threads() if threads is None else threads)


def array(sources: Sequence[Source]) -> ctypes.Array:
    return (Source * max(len(sources), 1))(*sources)
