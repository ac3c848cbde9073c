"""The picture of the README: a terminal scene made by the program, as an SVG file.

    python -m regard.lessons.picture docs/images/look.svg

The SVG links to nothing: no web font, no script. Each wide character is set in the middle of its two columns and block
characters are drawn as rectangles, so it looks alike whatever fonts the reader has.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ..views.terminal import bars, beside, heatmap, pooled, table
from .page import CODE
from .sentence import COPIES, SENTENCE, matrices

WIDTH = 98
CELLS = 30
#: size of a character cell, of the letters in it, and the frame around all
ACROSS, DOWN, LETTER, FRAME = 9, 19, 15, 20
FONTS = (
    "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Noto Sans Mono CJK SC', 'Noto Sans CJK SC', "
    "'PingFang SC', 'Microsoft YaHei', monospace"
)
_BASE = [(28, 33, 40), (230, 80, 70), (60, 180, 110), (215, 170, 60), (90, 150, 240), (200, 120, 220), (86, 194, 214)]
THEME = TerminalTheme((16, 20, 26), (226, 230, 235), [*_BASE, (226, 230, 235)])


def scene() -> RenderableType:
    """The sentence's A three ways, its profile, and a long A as a picture beside an exact part of it."""
    found = matrices()
    A, long = found["causal"], matrices(COPIES)["causal"]
    titles = {"content": "content only", "position": "+ position (T5 bias)", "causal": "+ causal mask"}
    maps = [heatmap(M, rows=SENTENCE, columns=SENTENCE, title=titles[name]) for name, M in found.items()]
    middle = len(SENTENCE) * COPIES // 2
    part = slice(middle, middle + len(SENTENCE))
    deltas = [str(d) for d in range(1 - len(SENTENCE), len(SENTENCE))]
    top = A.topk(2)
    looks = [
        [SENTENCE[i], "  ".join(f"{SENTENCE[j]} {w:.0%}" for w, j in zip(weights, keys, strict=True) if j >= 0)]
        for i, (weights, keys) in enumerate(zip(top.weights.tolist(), top.indices.tolist(), strict=True))
    ]
    return Group(
        _typed("A = rg.attention(q, k, position=t5, mask=rg.causal)[0, 0]    # lazy: nothing is computed yet"),
        _typed("A"),
        Text(repr(A)),
        Text(),
        beside(*maps),
        Text(),
        _typed("A.profile()    # mass per displacement q - k, here without the mask"),
        bars(found["position"].profile(), deltas, form=".2f", height=4),
        Text(),
        _typed(f"A    # the same sentence {COPIES} times"),
        Text(repr(long)),
        Text(),
        beside(
            pooled(long, CELLS, title=f"A.heatmap({CELLS})", mark=middle),
            heatmap(
                long[part, part], visible=long.logits[part, part] > -float("inf"), rows=SENTENCE, columns=SENTENCE,
                title=f"A[{part.start}:{part.stop}, {part.start}:{part.stop}]",
            ),
            table(["query", "A.topk(2)"], looks),
        ),
    )  # fmt: skip


def _typed(code: str) -> Text:
    command, mark, comment = code.partition("    #")
    return Text.assemble((">>> ", "dim"), (command, CODE), (mark + comment, "dim"))


def svg(content: RenderableType, width: int = WIDTH) -> str:
    """Any renderable as an SVG of a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", no_color=False)
    lines = console.render_lines(content, pad=False)
    shapes: list[str] = []
    letters: list[str] = []
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            for text, wide in _runs(segment):
                shapes += _shapes(text, segment.style or Style(), row, column, wide)
                letters += _letters(text, segment.style or Style(), row, column, wide)
                column += wide
    across, down = width * ACROSS + 2 * FRAME, len(lines) * DOWN + 2 * FRAME
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" font-family="{escape(FONTS)}" '
            f'font-size="{LETTER}">',
            f'<rect width="{across}" height="{down}" rx="10" fill="{THEME.background_color.hex}"/>',
            f'<g transform="translate({FRAME} {FRAME})" shape-rendering="crispEdges">',
            *shapes,
            "</g>",
            f'<g transform="translate({FRAME} {FRAME})" xml:space="preserve">',
            *letters,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _runs(segment: Segment) -> Iterator[tuple[str, int]]:
    """A segment in runs of narrow letters, single wide characters and single blocks, with their columns."""
    run = ""
    for character in segment.text.rstrip("\n"):
        if cell_len(character) == 1 and character not in _BLOCKS:
            run += character
            continue
        if run:
            yield run, len(run)
        run = ""
        yield character, cell_len(character)
    if run:
        yield run, len(run)


#: block characters as (x, y, width, height) in eighths of a cell
_BLOCKS = {"█": (0, 0, 8, 8), "▀": (0, 0, 8, 4), "▄": (0, 4, 8, 4), "▐": (4, 0, 4, 8)}
_BLOCKS.update(
    {c: (0, 8 - n, 8, n) for n, c in enumerate("▁▂▃", 1)} | {c: (0, 8 - n, 8, n) for n, c in enumerate("▅▆▇", 5)}
)
_BLOCKS.update({c: (0, 0, n, 8) for n, c in enumerate("▏▎▍▌▋▊▉", 1)})


def _shapes(text: str, style: Style, row: int, column: int, wide: int) -> list[str]:
    """Rectangles: what lies behind the text, and what a block character fills."""
    x, y = column * ACROSS, row * DOWN
    found = []
    if style.bgcolor is not None and not style.bgcolor.is_default:
        found.append(f'<rect x="{x}" y="{y}" width="{wide * ACROSS}" height="{DOWN}" fill="{_hex(style.bgcolor)}"/>')
    if text in _BLOCKS:
        left, top, across, down = (n / 8 for n in _BLOCKS[text])
        place = f'x="{x + left * ACROSS:g}" y="{y + top * DOWN:g}" width="{across * ACROSS:g}" height="{down * DOWN:g}"'
        found.append(f'<rect {place} fill="{_ink(style)}"/>')
    return found


def _letters(text: str, style: Style, row: int, column: int, wide: int) -> list[str]:
    if not text.strip() or text in _BLOCKS:
        return []
    y = row * DOWN + round(DOWN * 0.74)
    look = f'fill="{_ink(style)}"' + (' font-weight="bold"' if style.bold else "")
    if wide == 2 and len(text) == 1:
        return [f'<text x="{(column + 1) * ACROSS}" y="{y}" text-anchor="middle" {look}>{escape(text)}</text>']
    found = []
    for words in re.finditer(r"\S+(?: \S+)*", text):  # a page may draw two spaces as one, and stretch what is left
        x, length = (column + words.start()) * ACROSS, len(words[0]) * ACROSS
        fit = f'textLength="{length}" lengthAdjust="spacingAndGlyphs"'
        found.append(f'<text x="{x}" y="{y}" {fit} {look}>{escape(words[0])}</text>')
    return found


def _ink(style: Style) -> str:
    """The text's colour; dim is half way to the background."""
    ink = THEME.foreground_color if style.color is None or style.color.is_default else style.color.get_truecolor(THEME)
    if style.dim:
        ink = type(ink)(*((a + b) // 2 for a, b in zip(ink, THEME.background_color, strict=True)))
    return ink.hex


def _hex(colour: Color) -> str:
    return colour.get_truecolor(THEME, foreground=False).hex


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("picture: expected the name of the SVG file to write", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(svg(scene()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
