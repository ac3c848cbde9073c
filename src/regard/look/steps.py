"""What is going on, on standard error: a bar that is there while a terminal's reader waits, and gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str], Callable[[int, int], None]]


@contextmanager
def steps() -> Iterator[Step]:
    """A function that names the next step and gives what to call with (done, total); silent where nobody reads."""
    if not sys.stderr.isatty():
        yield lambda name: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def step(name: str) -> Callable[[int, int], None]:
            bar.reset(task, description=name, total=None)
            bar.refresh()  # even a short step is named
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield step
