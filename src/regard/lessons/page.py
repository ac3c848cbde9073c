"""Where a lesson is put: its words in one language, and the renderables between them, on a rich console.

A lesson's words are a dictionary of languages, each a dictionary of sentences with places for numbers ("gives {y:.4f}").
What stands between backticks is code. Lines are broken here, not by rich: Chinese has no spaces to break at, and a line
must not begin with a comma.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from ..views.terminal import beside, heatmap, pooled

Words = Mapping[str, Mapping[str, str]]

#: widest line of words, in display columns, however wide the terminal is
WIDEST = 96
CODE = "bold cyan"
#: what no line begins with, and what none ends with
CLOSING, OPENING = "，。；：、？！）》”’…,.;:?!)", "（《“‘("
#: a space, a run of narrow characters, or one wide character
_PIECE = re.compile(r"\s+|[^\s⺀-￯“”‘’…]+|.")
#: what a view says of itself, by language
VIEW = {
    "en": {"axes": "rows: queries, columns: keys", "masked": "masked", "between": ", "},
    "zh": {"axes": "行：查询，列：键", "masked": "被遮住", "between": "、"},
}


class Page:
    """One lesson on one console, in one language."""

    def __init__(self, console: Console, language: str, words: Words):
        if language not in words:
            raise ValueError(f"language: expected one of {', '.join(words)}, found {language!r}")
        self.console, self.language, self.words = console, language, words[language]

    def __call__(self, key: str, /, **numbers: Any) -> str:
        """A sentence with its numbers."""
        return self.words[key].format(**numbers)

    def open(self, **numbers: Any) -> None:
        """The lesson's title, and the sentence that says what it shows."""
        self.console.print()
        self.console.rule(Text(self("title"), style="bold"), align="left", style="dim")
        self.say("shows", **numbers)

    def say(self, key: str, /, **numbers: Any) -> None:
        """A paragraph, broken into lines."""
        self.console.print()
        for line in broken(self(key, **numbers), min(self.console.width, WIDEST)):
            self.console.print(line, no_wrap=True, overflow="fold")

    def show(self, *parts: RenderableType) -> None:
        """Renderables, side by side where they fit."""
        self.console.print()
        self.console.print(beside(*parts))

    def listed(self, items: Iterable[Any]) -> str:
        """Things one after the other, as this language separates them."""
        return VIEW[self.language]["between"].join(map(str, items))

    def map(self, weights: Any, **how: Any) -> RenderableType:
        """A heat map that speaks this page's language."""
        return heatmap(weights, **{**self._says(), **how})

    def picture(self, A: Any, cells: int, **how: Any) -> RenderableType:
        """A pooled picture that does."""
        return pooled(A, cells, **{**self._says(), **how})

    def _says(self) -> dict[str, str]:
        return {name: VIEW[self.language][name] for name in ("axes", "masked")}


def broken(text: str, width: int) -> list[Text]:
    """A paragraph as lines of at most `width` display columns, code set apart."""
    pieces: list[tuple[str, str]] = []
    for at, part in enumerate(text.split("`")):
        if at % 2 and 2 * cell_len(part) <= width:  # short code stays in one piece
            pieces.append((part, CODE))
        else:
            pieces += [(piece, CODE if at % 2 else "") for piece in _PIECE.findall(part)]
    lines = [Text()]
    for piece in _joined(pieces):
        wide = sum(cell_len(t) for t, _ in piece)
        blank = not piece[0][0].strip()
        if lines[-1].cell_len + (0 if blank else wide) > width and lines[-1].plain.strip():
            lines[-1].rstrip()
            lines.append(Text())
        if blank and not lines[-1].plain:
            continue
        for t, style in piece:
            lines[-1].append(t, style)
    return lines


def _joined(pieces: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Pieces that stay on one line: punctuation with what it closes or opens, narrow ones that touch ("`q`·k")."""
    result: list[list[tuple[str, str]]] = []
    before = " "
    for piece in pieces:
        first = piece[0][0]
        touch = not before.isspace() and not first.isspace()
        narrow = cell_len(before) < 2 and cell_len(first) < 2
        if touch and (narrow or first in CLOSING or before in OPENING):
            result[-1].append(piece)
        else:
            result.append([piece])
        before = piece[0][-1]
    return result
