"""Lessons as notebooks, from the same source: a page that writes HTML, and files that show it when their cells are run.

    python -m regard.lessons.notebook FOLDER [en|zh]          one file a lesson, numbered

A notebook holds no numbers of its own: its first cell has the lesson computed and shown in the kernel, the second is what to
try, to be changed at will, the third asks the question and folds the answer away. `body` needs nothing but regard; showing it
needs IPython, which every notebook has. The files are plain JSON, nbformat 4.5.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console, RenderableType

from ..views.terminal import beside
from . import (
    LANGUAGES,
    PARTS,
    cache,
    errors,
    grid,
    heads,
    learning,
    line,
    lookup,
    matrix,
    quiz,
    real,
    scores,
    sentence,
    softmax,
)
from .page import Page, Words
from .picture import svg

#: the lessons by name
LESSONS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        lookup, scores, softmax, matrix, heads, cache, line, grid, learning, sentence, real, errors, quiz
    )
}  # fmt: skip
#: columns of the pictures, and how wide they are at most, in pixels: letters as large as the words around them
WIDTH, WIDE = 110, 1030


class Html(Page):
    """A page whose paragraphs and pictures are pieces of HTML; the end of the lesson is kept apart.

    Pictures are SVG: there wide characters keep their columns whatever fonts the reader has.
    """

    def __init__(self, language: str, words: Words, number: int | None = None):
        super().__init__(Console(file=io.StringIO(), width=WIDTH), language, words, number)
        self.pieces: list[str] = []
        self.end: list[str] = []

    def open(self, **numbers: Any) -> None:
        number = "" if self.number is None else f"{self.number}  "
        self.pieces.append(f"<h1>{escape(number + self('title'))}</h1>")
        self.say("shows", **numbers)

    def paragraph(self, text: str, label: str = "") -> None:
        self.pieces.append(f"<p>{_bold(label)}{_marked(text)}</p>")

    def show(self, *parts: RenderableType) -> None:
        self.pieces.append(f'<div style="max-width:{WIDE}px">{svg(beside(*parts), WIDTH)}</div>')

    def ask(self, question: str, answer: str) -> None:
        self.pieces.append(self._folded(question, answer))

    def close(self, code: str, answer: Mapping[str, Any] | None = None, **numbers: Any) -> None:
        self.end = [
            f"<p>{_bold(self.label('try'))}{_marked(self('try'))}</p>",
            self._folded(self("question", **numbers), self("answer", **(answer or {}))),
            f"<p>{_bold(self.label('next'))}{_marked(self('next'))}</p>",
        ]

    def _folded(self, question: str, answer: str) -> str:
        """The answer is there for whoever opens it."""
        return (
            f"<p>{_bold(self.label('question'))}{_marked(question)}</p>"
            f"<details><summary>{escape(self.label('answer').strip())}</summary><p>{_marked(answer)}</p></details>"
        )


def body(name: str, language: str = "en") -> tuple[str, list[str]]:
    """A lesson as HTML, computed now; and its end: what to try, the question with its answer folded away, what is next."""
    lesson = _lesson(name, language)
    page = Html(language, lesson.WORDS, PARTS.index(name) + 1)
    lesson.show(page)
    return "\n".join(page.pieces), page.end


def tell(name: str, language: str = "en") -> None:
    """Show a lesson in a notebook, up to what there is to try."""
    text, end = body(name, language)
    _display(text + "\n" + end[0])


def ask(name: str, language: str = "en") -> None:
    """Show a lesson's question in a notebook, its answer folded away, and where to go next."""
    _, end = body(name, language)
    _display("\n".join(end[1:]))


def cells(name: str, language: str = "en") -> list[dict[str, Any]]:
    """The cells of a lesson's notebook."""
    lesson = _lesson(name, language)
    words = lesson.WORDS[language]
    heading = f"# {PARTS.index(name) + 1}  {words['title']}\n\n{words['shows']}"
    sources = [
        f'from regard.lessons.notebook import ask, tell\n\ntell("{name}", "{language}")',
        _as_python(lesson.TRY),
        f'ask("{name}", "{language}")',
    ]
    found: list[dict[str, Any]] = [_cell("markdown", f"{name}-0", heading)]
    found += [_cell("code", f"{name}-{n}", source) for n, source in enumerate(sources, 1)]
    return found


def book(parts: Sequence[dict[str, Any]], language: str) -> dict[str, Any]:
    """A notebook of these cells."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}, "regard": {"language": language}}
    return {"cells": list(parts), "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def write(folder: str | Path, language: str = "en") -> list[Path]:
    """One notebook a lesson into a folder, which is made if need be; their paths, in order."""
    _lesson(PARTS[0], language)  # refuses a language there is not before anything is written
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for number, name in enumerate(PARTS, 1):
        path = target / f"{number:02}-{name}.ipynb"
        text = json.dumps(book(cells(name, language), language), ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        written.append(path)
    return written


def main(arguments: Sequence[str]) -> int:
    """Write the notebooks; the exit code."""
    if len(arguments) not in (1, 2):
        print("usage: python -m regard.lessons.notebook FOLDER [en|zh]", file=sys.stderr)
        return 2
    try:
        for path in write(*arguments):
            print(path)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _lesson(name: str, language: str) -> ModuleType:
    if name not in PARTS:
        raise ValueError(f"name: expected one of {', '.join(PARTS)}, found {name!r}")
    if language not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(LANGUAGES)}, found {language!r}")
    return LESSONS[name]


def _cell(kind: str, name: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def _as_python(code: str) -> str:
    """A command as the call it is: a notebook's shell may not find the program."""
    if not code.startswith("regard "):
        return code
    return f"from regard.cli import main\n\nmain({shlex.split(code)[1:]!r})"


def _bold(label: str) -> str:
    return f"<b>{escape(label)}</b>" if label else ""


def _marked(text: str) -> str:
    """Words with code set apart."""
    return "".join(f"<code>{escape(p)}</code>" if n % 2 else escape(p) for n, p in enumerate(text.split("`")))


def _display(text: str) -> None:
    try:
        from IPython.display import HTML, display
    except ImportError:
        raise RuntimeError("lessons are shown in a notebook by IPython, which is not installed") from None
    display(HTML(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
