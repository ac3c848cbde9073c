"""Lessons as pages of the explorer: the same words, tables and pictures as plain data, and pictures that answer.

    told("softmax", "zh")                     a lesson: blocks of words, tables, heat maps; what to try, question, next
    play("softmax", {"factor": 2.0}, "zh")    what the lesson's picture shows for these inputs, computed now
    stream("learning", {}, "en")              the same, state by state, for what takes seconds

The server (views/server/lessons.py) asks for these by name, through `above`. The page draws; every number it shows was
computed here. A lesson's `play` takes keyword inputs, each with a default, checks them (inputs.py), and returns them
with their bounds beside what it computed, so that the page types in no number either.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..views.terminal import Bars, Heatmap
from . import LANGUAGES, PARTS
from .inputs import Refused, plain
from .notebook import LESSONS, WIDTH
from .page import Page, Words
from .picture import svg

Block = dict[str, Any]

#: what the pages say around every lesson
WORDS: Words = {
    "en": {
        "lessons": "Lessons",
        "title": "Attention, step by step",
        "shows": "Every number is computed as it is shown. Each lesson has a picture that answers to mouse and keyboard, something "
        "to try, and a question.",
        "explorer": "Explorer",
        "language": "中文",
        "theme": "Light or dark",
        "play": "Play with it",
        "again": "Start again",
        "computing": "computing…",
        "try": "Try",
        "copy": "Copy",
        "copied": "Copied",
        "question": "Question",
        "answer": "Answer",
        "next": "Next",
        "skip": "To the lesson",
        "failed": "That did not work: {error}",
        "keys": "Keys: Tab from control to control, arrow keys to change one (with Shift in larger steps), [ and ] for the lesson before and "
        "after, L for 中文, D for dark.",
        "masked": "masked",
    },
    "zh": {
        "lessons": "课程",
        "title": "一步一步看注意力",
        "shows": "每个数都是显示时算出来的。每一课都有一张会回应鼠标和键盘的图、一件可以试的事和一个问题。",
        "explorer": "注意力地图",
        "language": "English",
        "theme": "浅色或深色",
        "play": "动手试",
        "again": "重新开始",
        "computing": "正在算……",
        "try": "试一试",
        "copy": "复制",
        "copied": "已复制",
        "question": "问题",
        "answer": "答案",
        "next": "接下来",
        "skip": "跳到课文",
        "failed": "没有成功：{error}",
        "keys": "按键：Tab 在控件之间移动，方向键改变数值（按住 Shift 步子更大），[ 和 ] 是上一课和下一课，L 换成 English，D 换深浅。",
        "masked": "被遮住",
    },
}


class Blocks(Page):
    """A page that keeps a lesson as data: words with their marks, tables as tables, heat maps as numbers."""

    def __init__(self, language: str, words: Words, number: int):
        super().__init__(Console(file=io.StringIO(), width=WIDTH), language, words, number)
        self.blocks: list[Block] = []
        self.head: dict[str, Any] = {}
        self.end: dict[str, Any] = {}

    def open(self, **numbers: Any) -> None:
        self.head = {"number": self.number, "title": self("title"), "shows": self("shows", **numbers)}

    def paragraph(self, text: str, label: str = "") -> None:
        self.blocks.append({"kind": "paragraph", "label": label.strip(), "text": text})

    def show(self, *parts: RenderableType) -> None:
        self.blocks.append({"kind": "show", "parts": [part_of(part) for part in parts]})

    def ask(self, question: str, answer: str) -> None:
        self.blocks.append({"kind": "question", "question": question, "answer": answer})

    def close(self, code: str, answer: Mapping[str, Any] | None = None, **numbers: Any) -> None:
        self.end = {
            "try": self("try"), "code": code, "question": self("question", **numbers),
            "answer": self("answer", **(answer or {})), "next": self("next"),
        }  # fmt: skip


def part_of(part: RenderableType) -> Block:
    """A renderable as data; what is neither table, heat map nor bars stays a picture."""
    if isinstance(part, Table):
        columns = [[_text(cell) for cell in column.cells] for column in part.columns]
        header = [_text(column.header) for column in part.columns]
        return {"kind": "table", "header": header, "rows": [list(row) for row in zip(*columns, strict=True)]}
    if isinstance(part, Heatmap):
        texts = (
            [[part._number(i, j) for j in range(len(row))] for i, row in enumerate(part.cells)] if part.values else None
        )
        return {
            "kind": "map", "title": part.title, "cells": plain(part.cells), "visible": part.visible, "texts": texts,
            "rows": part.rows, "columns": part.columns, "low": part.low, "high": part.high, "axes": part.axes,
        }  # fmt: skip
    if isinstance(part, Bars):
        numbers = [format(x, part.form) for x in part.values]
        return {
            "kind": "bars", "title": part.title, "values": plain(part.values), "labels": part.labels, "texts": numbers,
            "upright": part.height is not None,
        }  # fmt: skip
    return {"kind": "picture", "svg": svg(part, WIDTH)}


def listed(language: str) -> dict[str, Any]:
    """The lessons there are, and the words of the pages."""
    _check(PARTS[0], language)
    lessons = [
        {"name": name, **{key: LESSONS[name].WORDS[language][key] for key in ("title", "shows")}} for name in PARTS
    ]
    return {"words": WORDS[language], "lessons": lessons}


def told(name: str, language: str) -> dict[str, Any]:
    """A lesson, computed now."""
    lesson = _check(name, language)
    page = Blocks(language, lesson.WORDS, PARTS.index(name) + 1)
    lesson.show(page)
    words = {key.removeprefix("play_"): said for key, said in lesson.WORDS[language].items() if key.startswith("play_")}
    plays = [kind for kind in ("play", "stream") if hasattr(lesson, kind)]
    return {"name": name, **page.head, "blocks": page.blocks, **page.end, "says": words, "plays": plays}


def play(name: str, inputs: Mapping[str, Any], language: str) -> dict[str, Any]:
    """What a lesson's picture shows for these inputs."""
    return _called(_check(name, language), "play", inputs, language)


def stream(name: str, inputs: Mapping[str, Any], language: str) -> Iterator[dict[str, Any]]:
    """The same, state by state."""
    return _called(_check(name, language), "stream", inputs, language)


def _called(lesson: ModuleType, what: str, inputs: Mapping[str, Any], language: str) -> Any:
    name = lesson.__name__.rpartition(".")[2]
    function = getattr(lesson, what, None)
    if function is None:
        raise KeyError(f"lesson: {name} has no {what}")
    takes = inspect.signature(function).parameters
    for given in inputs:
        if given not in takes or given == "language":
            known = ", ".join(each for each in takes if each != "language") or "none"
            raise ValueError(f"inputs: {name} takes {known}, found {given!r:.60}")
    spoken = {"language": language} if "language" in takes else {}
    try:
        found = function(**inputs, **spoken)
    except Refused as why:
        raise ValueError(why.words[language]) from why
    return _states(found, language) if what == "stream" else found


def _states(states: Iterator[dict[str, Any]], language: str) -> Iterator[dict[str, Any]]:
    """The same, refusals in the reader's language."""
    try:
        yield from states
    except Refused as why:
        raise ValueError(why.words[language]) from why


def _check(name: str, language: str) -> ModuleType:
    if name not in PARTS:
        raise KeyError(f"lesson: expected one of {', '.join(PARTS)}, found {name!r:.60}")
    if language not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(LANGUAGES)}, found {language!r:.60}")
    return LESSONS[name]


def _text(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
