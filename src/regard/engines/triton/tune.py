"""Tile sizes by trial: with REGARD_TUNE=1 a kernel's first call of a kind tries a few, and the fastest is kept.

Without it the table in `choice` holds, measured on one H200: nothing is tried while you wait, and results have the same
bits on every run of one version. A kind is a kernel with the widths of heads, dtype and what is added; never a length.
What was found is kept in the user's cache folder, by GPU and version of Triton, and the log says what was tried.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .choice import Tiling, interpreted

log = logging.getLogger("regard")

#: tile sizes that are tried, the usual one among them; and timed rounds of each
MOST, ROUNDS = 4, 3

_found: dict[str, Tiling] = {}


def tuned(kernel: str, kind: tuple, usual: Tiling, start: Callable[[Tiling], Any]) -> Tiling:
    """The usual tile size, or the fastest of a few if that is asked for. `start` launches the kernel with one."""
    if os.environ.get("REGARD_TUNE") != "1" or interpreted() or torch.cuda.is_current_stream_capturing():
        return usual
    key = " ".join([kernel, *(str(x).removeprefix("torch.") for x in kind)])
    if not _found:
        _found.update(_read())
    if key not in _found:
        _found[key] = fastest(key, candidates(usual), lambda tiling: _milliseconds(lambda: start(tiling)))
        _write()
    return _found[key]


def candidates(usual: Tiling) -> list[Tiling]:
    """The usual one first, then half as high, half as wide, and one stage less."""
    others = [
        usual._replace(block_q=max(usual.block_q // 2, 16), warps=max(usual.warps // 2, 4), registers=None),
        usual._replace(block_k=max(usual.block_k // 2, 16)),
        usual._replace(stages=max(usual.stages - 1, 1)),
    ]
    return list(dict.fromkeys([usual, *others]))[:MOST]


def fastest(key: str, tilings: list[Tiling], time: Callable[[Tiling], float]) -> Tiling:
    """The one that takes least. One that the machine has no room for is left out, and the log says so."""
    taken: dict[Tiling, float] = {}
    for tiling in tilings:
        try:
            taken[tiling] = time(tiling)
        except Exception as error:  # whatever the compiler raises for want of shared memory or registers
            if not taken:
                raise
            log.info("triton: %s does not take tiles %s: %s", key, tuple(tiling), type(error).__name__)
    best = min(taken, key=lambda tiling: taken[tiling])
    words = ", ".join(f"{tiling.block_q} x {tiling.block_k}: {ms:.3f} ms" for tiling, ms in taken.items())
    log.info("triton: tuned %s to tiles of %d x %d (%s)", key, best.block_q, best.block_k, words)
    return best


def _milliseconds(call: Callable[[], Any]) -> float:
    """The best of some rounds, after one that compiles."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def _file() -> Path:
    import triton

    name = re.sub(r"\W+", "-", f"{torch.cuda.get_device_name()}-triton-{triton.__version__}")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard" / f"tiles-{name}.json"


def _read() -> dict[str, Tiling]:
    """What was found before. A file that is none of ours, or broken, is as good as none."""
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
        return {key: Tiling(*checked(numbers)) for key, numbers in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def checked(numbers: list) -> list:
    """Numbers that can be a tile's, or a ValueError."""
    block_q, block_k, warps, stages, registers, late = numbers
    sizes = all(n in (16, 32, 64, 128, 256) for n in (block_q, block_k)) and warps in (1, 2, 4, 8, 16)
    if (
        not sizes
        or stages not in range(1, 8)
        or not (registers is None or registers in range(32, 256))
        or late not in (0, 1)
    ):
        raise ValueError(f"tiles: expected sizes, warps, stages, registers and when to sum, found {numbers}")
    return numbers


def _write() -> None:
    """Keep what is found, whole or not at all; where nothing can be written it is found again next time."""
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({key: list(tiling) for key, tiling in _found.items()}, indent=1), encoding="utf-8")
        part.replace(path)
