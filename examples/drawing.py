"""What the examples share: A before and after training as one picture, and a bar while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

#: fonts with Chinese characters, as Debian, macOS and Windows name them; the first that is installed is taken
CHINESE = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Microsoft YaHei",
)
#: axes with more labels than this count instead of naming
MOST_LABELS = 40


class Panel(NamedTuple):
    """One matrix of a picture: rows are queries, columns are keys."""

    title: str
    weights: Tensor
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()


def save(
    path: Path, title: str, panels: Sequence[Panel], *, across: int = 2, axes: tuple = ("queries", "keys")
) -> None:
    """Draw the panels, `across` beside each other, into an image file; `axes` says what goes down and what across."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--out needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    installed = {font.name for font in font_manager.fontManager.ttflist}
    chinese = [name for name in CHINESE if name in installed][:1]
    if not chinese and not all(
        label.isascii() for panel in panels for label in (panel.title, *panel.rows, *panel.columns)
    ):
        Console(stderr=True).print("--out: no font with Chinese characters is installed (on Debian: fonts-noto-cjk)")
    matplotlib.rcParams["font.sans-serif"] = [*chinese, "DejaVu Sans"]
    down = -(-len(panels) // across)
    figure, places = pyplot.subplots(down, across, figsize=(5.6 * across, 5.2 * down + 0.5), squeeze=False)
    figure.suptitle(title)
    for place in places.flat[len(panels) :]:
        place.axis("off")
    for panel, place in zip(panels, places.flat, strict=False):
        image = place.imshow(
            panel.weights.detach().cpu().numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest"
        )
        figure.colorbar(image, ax=place, fraction=0.046)
        place.set_title(panel.title)
        place.set_ylabel(axes[0])
        place.set_xlabel(axes[1])
        for axis, labels in ((place.yaxis, panel.rows), (place.xaxis, panel.columns)):
            if labels and len(labels) <= MOST_LABELS:
                axis.set_ticks(range(len(labels)), labels, fontsize=9 if len(labels) <= 24 else 7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def steps(count: int, what: str) -> Iterator[tuple[int, Progress]]:
    """0 to count - 1, with a bar that shows how far it is; `bar.update(0, note=...)` writes beside it."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
        bar.add_task(what, total=count, note="")
        for step in range(count):
            yield step, bar
            bar.advance(bar.task_ids[0])


def verdict(what: str, found: float, target: float, *, at_most: bool = False, shown: str = ".3f") -> bool:
    """Print a figure against its target, and whether it is met."""
    met = found <= target if at_most else found >= target
    bound = "at most" if at_most else "at least"
    Console().print(f"{what}: {found:{shown}} (target: {bound} {target:{shown}}) {'met' if met else '[red]MISSED[/]'}")
    return met


class Clock:
    """How long an example took, in seconds."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def tell(self) -> None:
        Console().print(f"took {time.monotonic() - self.began:.0f} s")
