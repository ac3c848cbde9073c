"""Where a lesson is put: its words in one language, and the renderables between them, on a rich console.

    page.open()                                   the title, and what the lesson shows
    page.say("exact", key=56.0, result=43.0)      a sentence of the lesson's words, with its numbers
    page.show(page.map(A), table(...))            pictures
    page.close(TRY, answer={"result": 45.5})      what to try, a question with its answer, where to go next

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
    "en": {
        "axes": "rows: queries, columns: keys", "masked": "masked", "between": ", ",
        "try": "Try. ", "question": "Question. ", "answer": "Answer. ", "next": "Next. ",
    },
    "zh": {
        "axes": "行：查询，列：键", "masked": "被遮住", "between": "、",
        "try": "试一试。", "question": "问题。", "answer": "答案。", "next": "接下来。",
    },
}  # fmt: skip
LABEL = "bold"


class Page:
    """One lesson on one console, in one language."""

    def __init__(self, console: Console, language: str, words: Words, number: int | None = None):
        if language not in words:
            raise ValueError(f"language: expected one of {', '.join(words)}, found {language!r}")
        self.console, self.language, self.words, self.number = console, language, words[language], number

    def __call__(self, key: str, /, **numbers: Any) -> str:
        """A sentence with its numbers."""
        return self.words[key].format(**numbers)

    def open(self, **numbers: Any) -> None:
        """The lesson's title, and the sentence that says what it shows."""
        self.console.print()
        title = self("title") if self.number is None else f"{self.number}  {self('title')}"
        self.console.rule(Text(title, style="bold"), align="left", style="dim")
        self.say("shows", **numbers)

    def say(self, key: str, /, **numbers: Any) -> None:
        """A paragraph, broken into lines."""
        self.paragraph(self(key, **numbers))

    def paragraph(self, text: str, label: str = "") -> None:
        """Words broken into lines, after a label if there is one."""
        self.console.print()
        for at, line in enumerate(broken(label + text, min(self.console.width, WIDEST))):
            if not at:
                line.stylize(LABEL, 0, len(label.rstrip()))
            self.console.print(line, no_wrap=True, overflow="fold")

    def code(self, lines: str) -> None:
        """A command, or lines of Python, as they are to be typed."""
        self.console.print()
        for line in lines.splitlines():
            self.console.print(Text("    " + line, style=CODE), soft_wrap=True)  # never broken: it is to be copied

    def ask(self, question: str, answer: str) -> None:
        """A question, and its answer."""
        self.paragraph(question, self.label("question"))
        self.paragraph(answer, self.label("answer"))

    def close(self, code: str, answer: Mapping[str, Any] | None = None, **numbers: Any) -> None:
        """The end of a lesson: something to try, a question (with `numbers`), its answer, and where to go next."""
        self.paragraph(self("try"), self.label("try"))
        self.code(code)
        self.ask(self("question", **numbers), self("answer", **(answer or {})))
        self.paragraph(self("next"), self.label("next"))

    def label(self, name: str) -> str:
        """What stands before a paragraph of its kind, in this language."""
        return VIEW[self.language][name]

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
