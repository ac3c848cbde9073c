"""A progress bar for long passes: shown in a terminal, after a second, and gone when the pass is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Callback = Callable[[int, int], None]


@contextmanager
def reporting(progress: Callback | bool | None, what: str) -> Iterator[Callback | None]:
    """The user's callback; a bar when they gave none and look at a terminal; nothing when they said False."""
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield None
        return
    bar: Any = None
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            if time.monotonic() - began < 1.0 or done >= total:
                return
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            bar.add_task(what, total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()
