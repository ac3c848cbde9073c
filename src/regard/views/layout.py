"""What the terminal's pictures share: text by display width, renderables made of lines, and how they are set.

Widths are counted in display columns, since a Chinese character takes two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def named(name: str, labels: Iterable[str] | None, count: int) -> list[str]:
    if labels is None:
        return [str(n) for n in range(count)]
    found = [printable(str(label)) for label in labels]
    if len(found) != count:
        raise ValueError(f"{name}: expected {count} labels, found {len(found)}")
    return found


def printable(label: str) -> str:
    """Newlines and the like as Python writes them: a label never breaks the picture."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in label)


@dataclass(frozen=True)
class Lines:
    """A renderable of ready-made lines, as wide as the longest of them."""

    def lines(self, console: Console, width: int) -> list[Text]:
        raise TypeError(f"{type(self).__name__} defines no lines")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(console, options.max_width):
            line.no_wrap, line.overflow = True, "crop"
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max((line.cell_len for line in self.lines(console, options.max_width)), default=0)
        return Measurement(width, width)


def characters(label: str) -> list[str]:
    """Characters as they are seen: marks that take no column stay with what they mark."""
    found: list[str] = []
    for c in label:
        if found and cell_len(c) == 0:
            found[-1] += c
        else:
            found.append(c)
    return found


def cut(label: str, width: int) -> str:
    if cell_len(label) <= width:
        return label
    while cell_len(label) > width - 1:
        label = label[:-1]
    return label + "…"


def neighbours(labels: Sequence[str], at: int, width: int) -> tuple[str, str, str]:
    """A token, and as many of those before and after it as fit the width: what it looks like in its text.

    Tokens that are words stand apart; pieces of words (##ing), characters, and tokens that carry their blanks do not.
    """
    near = labels[max(0, at - 8) : at + 9]
    words = max(map(len, near)) > 2 and not any("␣" in label for label in near)
    label = cut(printable(labels[at]), width)
    room, sides = width - cell_len(label), ["", ""]
    places, open_ = [at - 1, at + 1], [True, True]
    while any(open_):
        for side in (0, 1):
            if not open_[side]:
                continue
            if not 0 <= places[side] < len(labels):
                open_[side] = False
                continue
            piece = printable(labels[places[side]])
            later = piece if side else printable(labels[places[side] + 1])
            gap = " " if words and not later.startswith("##") else ""
            if cell_len(piece + gap) > room:
                open_[side] = False
                continue
            room -= cell_len(piece + gap)
            sides[side] = sides[side] + gap + piece if side else piece + gap + sides[side]
            places[side] += 1 if side else -1
    return sides[0], label, sides[1]


def pad(text: str, width: int, right: bool = False) -> str:
    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> Table:
    """Rows of ready-made cells. A column whose cells all start like numbers is aligned to the right."""
    cells = [[x if isinstance(x, Text) else Text(str(x)) for x in row] for row in rows]
    heading = None if title is None else Text(title, style="bold")  # not markup: code has brackets
    result = Table(
        box=SIMPLE_HEAD, title=heading, title_justify="left", title_style="", pad_edge=False, show_edge=False,
        min_width=cell_len(title or ""),
    )  # fmt: skip
    for at, name in enumerate(header):
        numeric = all(row[at].plain.lstrip("+-.")[:1].isdigit() for row in cells)
        result.add_column(Text(name), justify="right" if numeric else "left")
    for row in cells:
        result.add_row(*row)
    return result


@dataclass(frozen=True)
class Beside:
    """Renderables next to each other, as many as fit on a line; the others below."""

    parts: tuple[RenderableType, ...]
    gap: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line: list[tuple[RenderableType, int]] = []
        for part in self.parts:
            wide = Measurement.get(console, options, part).maximum
            if line and sum(w + self.gap for _, w in line) + wide > options.max_width:
                yield self._row([p for p, _ in line])
                yield Text("")
                line = []
            line.append((part, wide))
        if line:
            yield self._row([p for p, _ in line])

    def _row(self, parts: list[RenderableType]) -> Table:
        grid = Table.grid(padding=(0, self.gap, 0, 0))
        for _ in parts:
            grid.add_column(no_wrap=True)
        grid.add_row(*parts)
        return grid


def beside(*parts: RenderableType) -> Beside:
    """Side by side where they fit, one below the other where they do not."""
    return Beside(parts)
