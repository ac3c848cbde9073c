"""The tour: every lesson in order, on one console. `regard lesson all` shows it, `regard lesson` what there is."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from rich.console import Console
from rich.text import Text

from . import PARTS
from .page import WIDEST, Page, Words, broken

WORDS: Words = {
    "en": {
        "title": "Regard: attention you can look into",
        "shows": "Attention is a soft look-up. It hangs on one matrix: A[i, j] = softmax_j( score(q_i, k_j) + position(i - j) ), and y = A V. This tour "
        "takes it apart in {count} lessons: {parts}. Every number is computed as it is shown. 中文：regard lesson all --language zh",
        "list": "Lessons",
        "which": "One of them: `regard lesson lookup`. All in order: `regard lesson all`. In the browser, with pictures to play with: `regard explore`, then Lessons. 中文：`regard lesson --language zh`",
        "end": "One lesson alone: `regard lesson line`. A text of yours: `regard look`. In Python: `import regard as rg; A = rg.attention(q, k); y = A @ v; A.heatmap(512)`.",
    },
    "zh": {
        "title": "Regard：看得见的注意力",
        "shows": "注意力是软查找，全系于一个矩阵：A[i, j] = softmax_j( score(q_i, k_j) + position(i - j) )，y = A V。这趟导览分 {count} 课把它拆开：{parts}。每个数都是显示时算"
        "出来的。English: regard lesson all --language en",
        "list": "课程",
        "which": "看其中一课：`regard lesson lookup`。按顺序全看：`regard lesson all`。在浏览器里动手试：`regard explore`，再点“课程”。English: `regard lesson --language en`",
        "end": "只看一课：`regard lesson line`。看你自己的文字：`regard look`。在 Python 里：`import regard as rg; A = rg.attention(q, k); y = A @ v; A.heatmap(512)`。",
    },
}


def show(console: Console, language: str = "en", only: str | None = None) -> None:
    """All parts, or one of them."""
    if only is not None:
        tell(only, console, language)
        return
    page = Page(console, language, WORDS)
    page.open(count=len(PARTS), parts=page.listed(PARTS))
    for name in PARTS:
        tell(name, console, language)
    page.say("end")


def tell(name: str, console: Console, language: str) -> None:
    """One lesson on a page of its own."""
    part = _part(name)
    part.show(Page(console, language, part.WORDS, PARTS.index(name) + 1))


def contents(console: Console, language: str = "en") -> None:
    """The lessons there are: name, title and what each shows."""
    page = Page(console, language, WORDS)
    console.print()
    console.rule(Text(page("list"), style="bold"), align="left", style="dim")
    wide = max(map(len, PARTS))
    for name in PARTS:
        words = _part(name).WORDS[language]
        first, *rest = broken(words["shows"], min(console.width, WIDEST) - wide - 2)
        console.print(Text.assemble((name.ljust(wide), "bold cyan"), "  ", (words["title"], "bold")))
        for line in (first, *rest):
            console.print(Text(" " * (wide + 2)).append_text(line), no_wrap=True, overflow="fold")
    page.say("which")


def _part(name: str) -> ModuleType:
    if name not in PARTS:
        raise ValueError(f"part: expected one of {', '.join(PARTS)}, found {name!r}")
    return import_module(f".{name}", __package__)
