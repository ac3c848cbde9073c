"""A in a terminal: heat maps, pooled pictures, bars and tables, as rich renderables.

    console.print(heatmap(A[0, 3], rows=tokens, columns=tokens, title="head 3"))
    console.print(pooled(A[0, 3], 64))                    any length: one pass, never stored
    console.print(beside(heatmap(a), heatmap(b)))         side by side where they fit, else one below the other

Rows are queries and columns are keys, and the picture says so. Colours are viridis: its lightness rises all the way, so
it can be read without colour vision. A console without colours gets shade characters instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from ..matrix import AttentionMatrix
from .layout import Lines, beside, characters, cut, named, pad, table

__all__ = ["bars", "beside", "colour", "heatmap", "pooled", "shade", "table"]

#: viridis at nine even steps
VIRIDIS = (
    (68, 1, 84),
    (71, 44, 122),
    (59, 81, 139),
    (44, 113, 142),
    (33, 144, 141),
    (39, 173, 129),
    (92, 200, 99),
    (170, 220, 50),
    (253, 231, 37),
)
SHADES = " ░▒▓█"
MASKED, UNKNOWN = "·", "?"
AXES = "rows: queries, columns: keys"
#: most columns a heat map takes: a longer A is pooled
WIDEST = 128
#: display columns of a row label, and characters of a column label, before it is cut
LONGEST_ROW, LONGEST_COLUMN = 18, 12
#: display columns of a label that is written across, above numbers
SHORT = 6
#: powers of ten between the ends of a logarithmic scale
DECADES = 4
DIM = Style(dim=True)


def colour(share: float) -> tuple[int, int, int]:
    """Viridis at 0 to 1, straight between the steps of the table."""
    at = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    return tuple(round(a + (b - a) * (at - low)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True))  # type: ignore[return-value]


def shade(share: float) -> str:
    """The shade character of 0 to 1: blank for what is as good as nothing (under 1/32), four steps for the rest."""
    return SHADES[0] if share < 1 / 32 else SHADES[min(4, 1 + int(4 * share))]


def has_colours(console: Console) -> bool:
    """Sixteen colours cannot hold the map, so fewer than 256 count as none."""
    return not console.no_color and console.color_system in ("256", "truecolor")


def heatmap(
    weights: AttentionMatrix | Tensor | Sequence[Sequence[float]],
    *,
    rows: Iterable[str] | None = None,
    columns: Iterable[str] | None = None,
    visible: Tensor | Sequence[Sequence[bool]] | None = None,
    title: str | None = None,
    values: str | Literal[False] = False,
    low: float | None = None,
    high: float | None = None,
    axes: str = AXES,
    masked: str = "masked",
) -> Heatmap:
    """A, or any matrix, as coloured cells.

    visible    which cells to show; the others are dots. A knows its own; in a matrix of logits -inf is a dot by itself
    values     False for colour alone, "percent" for whole percents, or a format such as ".2f" to write the numbers too
    low, high  the ends of the colour scale: 0 (or the smallest number, if negative) and the largest, unless given
    """
    if isinstance(weights, AttentionMatrix):
        if len(weights.shape) != 2:
            raise ValueError(
                f"heatmap: choose a batch row and a head first, as in A[0, 3], found {list(weights.shape)}"
            )
        _check_width(*weights.shape)
        visible = weights.logits.dense() > -math.inf if visible is None else visible
        cells = weights.dense().tolist()
    else:
        cells = weights.tolist() if isinstance(weights, Tensor) else [list(map(float, row)) for row in weights]
        if not all(isinstance(row, list) and not any(isinstance(x, list) for x in row) for row in cells):
            raise ValueError("heatmap: expected a matrix of two axes (queries, keys)")
        _check_width(len(cells), len(cells[0]) if cells else 0)
    seen = (
        [[x != -math.inf for x in row] for row in cells] if visible is None else [list(map(bool, r)) for r in visible]
    )
    if [len(row) for row in seen] != [len(row) for row in cells]:
        raise ValueError(f"visible: expected one a cell, {len(cells)} rows, found {len(seen)} rows of other lengths")
    width = len(cells[0]) if cells else 0
    names = [named("rows", rows, len(cells)), named("columns", columns, width)]
    shown = [
        x for row, ok in zip(cells, seen, strict=True) for x, v in zip(row, ok, strict=True) if v and math.isfinite(x)
    ]
    low = min(0.0, *shown, 0.0) if low is None else low
    high = max(shown, default=0.0) if high is None else high
    return Heatmap(cells, seen, names[0], names[1], title, values, float(low), float(high), axes, masked)


def _check_width(q_len: int, k_len: int) -> None:
    if max(q_len, k_len) > WIDEST:
        raise ValueError(f"heatmap: {q_len} x {k_len} is too large to show cell by cell; use pooled(A) or a slice of A")


@dataclass(frozen=True)
class Heatmap(Lines):
    """What `heatmap` makes."""

    cells: list[list[float]]
    visible: list[list[bool]]
    rows: list[str]
    columns: list[str]
    title: str | None
    values: str | Literal[False]
    low: float
    high: float
    axes: str
    masked: str

    def lines(self, console: Console, width: int) -> list[Text]:
        coloured = has_colours(console)
        texts = (
            [[self._number(i, j) for j in range(len(row))] for i, row in enumerate(self.cells)] if self.values else []
        )
        wide = max((cell_len(t) + 1 for row in texts for t in row), default=2)
        longest = max(map(cell_len, self.columns), default=0)
        if texts and longest <= SHORT:  # numbers have room for short labels to lie down
            wide = max(wide, longest + 1)
        names = [cut(label, LONGEST_ROW) for label in self.rows]
        margin = max(map(cell_len, names), default=0) + 1
        count = min(len(self.columns), max(1, (width - margin) // wide))
        result = [Text(self.title, style="bold")] if self.title else []
        result += [Text(" " * margin + line) for line in _column_labels(self.columns[:count], wide)]
        for i, name in enumerate(names):
            line = Text(pad(name, margin - 1, right=True) + " ")
            for j in range(count):
                line.append_text(self._cell(i, j, texts[i][j] if texts else "", wide, coloured))
            result.append(line)
        if count < len(self.columns):
            result.append(Text(f"{' ' * margin}+ {len(self.columns) - count} columns that do not fit", style=DIM))
        return [*result, *self._legend(margin, count * wide, coloured), *_axes(self.axes, margin, count * wide)]

    def _number(self, i: int, j: int) -> str:
        x = self.cells[i][j]
        if not self.visible[i][j] or not math.isfinite(x):
            return MASKED if not self.visible[i][j] else UNKNOWN
        text = f"{100 * x:.0f}" if self.values == "percent" else format(x, self.values or "")
        return text[1:] if text.startswith("-") and not text.strip("-0.") else text  # no minus before a zero

    def _share(self, x: float) -> float:
        return (x - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def _cell(self, i: int, j: int, text: str, wide: int, coloured: bool) -> Text:
        x = self.cells[i][j]
        if not self.visible[i][j]:
            return Text(pad(MASKED, wide - 1, right=bool(self.values)) + " ", style=DIM)
        if not math.isfinite(x):
            return Text(pad(UNKNOWN, wide - 1, right=True) + " ", style="bold red")
        if not coloured:
            return Text(pad(text, wide - 1, right=True) + " " if self.values else shade(self._share(x)) * wide)
        back = colour(self._share(x))
        return Text(pad(text, wide - 1, right=True) + " ", style=_over(back))

    def _legend(self, margin: int, room: int, coloured: bool) -> list[Text]:
        low, high = (f"{100 * x:.3g}%" if self.values == "percent" else f"{x:.3g}" for x in (self.low, self.high))
        note = "" if all(map(all, self.visible)) else f"{MASKED} {self.masked}"
        if self.values and not coloured:  # the numbers stand there, and no shade does
            return [Text(" " * margin + note)] if note else []
        return _colour_bar(margin, room, low, high, coloured, note)


def _over(back: tuple[int, int, int]) -> Style:
    """Text that can be read on this colour: black on light ones, white on dark ones."""
    light = 0.299 * back[0] + 0.587 * back[1] + 0.114 * back[2] > 128
    return Style(color=Color.from_rgb(*((0, 0, 0) if light else (255, 255, 255))), bgcolor=Color.from_rgb(*back))


def _colour_bar(margin: int, room: int, low: str, high: str, coloured: bool, note: str) -> list[Text]:
    """The colours between the numbers at their ends; the note beside it where it fits, else below."""
    line = Text(f"{' ' * margin}{low} ")
    if coloured:
        for step in range(10):
            line.append(" ", Style(bgcolor=Color.from_rgb(*colour(step / 9))))
    else:
        line.append("".join(s * 2 for s in SHADES))
    line.append(f" {high}")
    if not note:
        return [line]
    if line.cell_len + 2 + cell_len(note) <= margin + room:
        return [line.append(f"  {note}")]
    return [line, Text(" " * margin + note)]


def _axes(axes: str, margin: int, room: int) -> list[Text]:
    """What rows and columns are: on one line where it fits, else a line each."""
    lines = [axes] if cell_len(axes) <= room else re.split(r", |，", axes)
    return [Text(" " * margin + line, style=DIM) for line in lines]


def _column_labels(labels: list[str], wide: int) -> list[str]:
    """One line when every label fits its column, else one character a line, read downwards."""
    if all(cell_len(label) <= max(wide - 1, 2) and cell_len(label) <= wide for label in labels):
        return [
            "".join(pad(label, wide if wide == 2 else wide - 1, right=wide > 2) + " " * (wide > 2) for label in labels)
        ]
    columns = [characters(label) for label in labels]
    columns = [c if len(c) <= LONGEST_COLUMN else [*c[: LONGEST_COLUMN - 1], "…"] for c in columns]
    high = max(map(len, columns), default=0)
    columns = [[""] * (high - len(c)) + c for c in columns]
    return [
        "".join(pad(c[line], max(wide - 1, 2), right=wide > 2) + " " * (wide > 2) for c in columns)
        for line in range(high)
    ]


def pooled(
    A: AttentionMatrix, cells: int = 64, *, what: str = "mean", scale: str = "log", title: str | None = None,
    axes: str = AXES, masked: str = "masked", mark: int | None = None,
) -> Picture:  # fmt: skip
    """A of any length in at most cells x cells, by `A.heatmap`: two rows of cells a line.

    what    "mean" or "max" of the weights in a cell
    scale   "log" over four decades (what is smaller shares one colour), or "linear"
    mark    a query whose row is numbered
    """
    if len(A.shape) != 2:
        raise ValueError(f"pooled: choose a batch row and a head first, as in A[0, 3], found {list(A.shape)}")
    if what not in ("mean", "max"):
        raise ValueError(f"what: expected 'mean' or 'max', found {what!r}")
    if scale not in ("log", "linear"):
        raise ValueError(f"scale: expected 'log' or 'linear', found {scale!r}")
    found = A.heatmap(cells)
    grid = (found.mean if what == "mean" else found.max).tolist()
    seen = (found.count > 0).tolist()
    marked = None if mark is None else (mark, mark // found.cell[0])
    return Picture(grid, seen, title, axes, tuple(A.shape), masked, scale == "log", marked)


@dataclass(frozen=True)
class Picture(Lines):
    """What `pooled` makes."""

    cells: list[list[float]]
    visible: list[list[bool]]
    title: str | None
    axes: str
    size: tuple[int, ...]
    masked: str
    log: bool
    mark: tuple[int, int] | None  # a query, and the row of cells it is in

    def lines(self, console: Console, width: int) -> list[Text]:
        coloured = has_colours(console)
        top = max((x for row in self.cells for x in row), default=0.0)
        shares = [
            [(self._share(x, top) if v else None) for x, v in zip(row, seen, strict=True)]
            for row, seen in zip(self.cells, self.visible, strict=True)
        ]
        across = len(shares[0]) if shares else 0
        first, last = "0", str(self.size[0] - 1)
        margin = len(last) + 1
        end = str(self.size[1] - 1)
        result = [Text(self.title, style="bold")] if self.title else []
        result.append(Text(" " * margin + "0" + end.rjust(across - 1), style=DIM))
        for i in range(0, len(shares), 2):
            label, style = first if i == 0 else last if i + 2 >= len(shares) else "", DIM
            if self.mark is not None and self.mark[1] // 2 == i // 2:
                label, style = str(self.mark[0]), Style(bold=True)
            line = Text.assemble((label.rjust(margin - 1) + " ", style))
            below = shares[i + 1] if i + 1 < len(shares) else [None] * across
            for upper, lower in zip(shares[i], below, strict=True):
                line.append_text(_half_blocks(upper, lower, coloured))
            result.append(line)
        note = "" if all(map(all, self.visible)) else f"{MASKED} {self.masked}"
        low, high = (f"{top / 10**DECADES:.1e}", f"{top:.1e} (log)") if self.log else ("0", f"{top:.3g}")
        legend = _colour_bar(margin, across, low, high, coloured, note)
        return [*result, *legend, *_axes(self.axes, margin, across)]

    def _share(self, x: float, top: float) -> float:
        if not x > 0 or not top > 0:
            return 0.0
        return max(0.0, 1 + math.log10(x / top) / DECADES) if self.log else x / top


def _half_blocks(upper: float | None, lower: float | None, coloured: bool) -> Text:
    """Two cells, one above the other, in one character; None is masked."""
    if upper is None and lower is None:
        return Text(MASKED, style=DIM)
    if not coloured:
        return Text(shade(max(x for x in (upper, lower) if x is not None)))
    if upper is None or lower is None:
        inside = upper if lower is None else lower
        assert inside is not None
        return Text("▀" if lower is None else "▄", style=Style(color=Color.from_rgb(*colour(inside))))
    return Text("▀", style=Style(color=Color.from_rgb(*colour(upper)), bgcolor=Color.from_rgb(*colour(lower))))


def bars(
    values: Tensor | Sequence[float], labels: Iterable[str] | None = None, *, title: str | None = None,
    form: str = ".3g", width: int = 40, height: int | None = None,
) -> Bars:  # fmt: skip
    """A bar for each value: lying, with its number; or upright columns, when a height (in lines) is given."""
    numbers = [float(x) for x in (values.tolist() if isinstance(values, Tensor) else values)]
    names = [""] * len(numbers) if labels is None else named("labels", labels, len(numbers))
    if height is not None and any(x < 0 for x in numbers):
        raise ValueError("bars: upright columns start at 0; found a negative value")
    return Bars(numbers, names, title, form, width, height)


@dataclass(frozen=True)
class Bars(Lines):
    """What `bars` makes."""

    values: list[float]
    labels: list[str]
    title: str | None
    form: str
    width: int
    height: int | None

    def lines(self, console: Console, width: int) -> list[Text]:
        result = [Text(self.title, style="bold")] if self.title else []
        return result + (self._lying() if self.height is None else self._upright(self.height))

    def _lying(self) -> list[Text]:
        numbers = [format(x, self.form) for x in self.values]
        margin = max(map(cell_len, self.labels), default=0)
        figures = max(map(len, numbers), default=0)
        low, high = min([0.0, *self.values]), max([0.0, *self.values])
        unit = self.width / (high - low) if high > low else 0.0
        zero = round(-low * unit)
        result = []
        for x, label, number in zip(self.values, self.labels, numbers, strict=True):
            line = Text(
                pad(cut(label, LONGEST_ROW), margin, right=True) + " " * bool(margin) + number.rjust(figures) + " "
            )
            if x < 0:
                halves = round(-2 * x * unit)
                line.append(pad("▐" * (halves % 2) + "█" * (halves // 2), zero, right=True), "magenta")
            else:
                eighths = round(8 * x * unit)
                line.append(" " * zero + "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), "cyan")
            result.append(line)
        return result

    def _upright(self, height: int) -> list[Text]:
        wide = max([2, *(cell_len(label) + 1 for label in self.labels)])
        top = max([0.0, *self.values])
        levels = [round(8 * height * x / top) if top > 0 else 0 for x in self.values]
        scale = [format(top, self.form), *[""] * (height - 2), "0"][:height]
        margin = max(map(len, scale))
        result = []
        for line, figure in zip(range(height - 1, -1, -1), scale, strict=True):
            blocks = [" ▁▂▃▄▅▆▇█"[min(8, max(0, level - 8 * line))] * (wide - 1) for level in levels]
            result.append(Text.assemble((figure.rjust(margin) + " ", DIM), (" ".join(blocks), "cyan")))
        names = " ".join(pad(label, wide - 1, right=True) for label in self.labels)
        return [*result, Text(" " * (margin + 1) + names, style=DIM)]
