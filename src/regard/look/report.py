"""Findings in a terminal: what heads do, links, entropies, and a heat map with the tokens beside it."""

from __future__ import annotations

import math

import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from ..lessons.page import broken
from ..views.findings import Findings, Head
from ..views.layout import cut, neighbours, pad, printable
from ..views.terminal import LONGEST_ROW, Heatmap, bars, beside, heatmap, pooled, table
from ..views.words import DOES, says

#: rows of the table of heads, and of links
HEADS, LINKS = 12, 10
#: cells of the picture of a long A; tokens of an exact map, and of one beside the picture at least
PICTURE, MOST, LEAST = 44, 48, 16
#: display columns of a token in its place in the text
AROUND = 14


class Report:
    """One text's findings on one console."""

    def __init__(self, console: Console, findings: Findings, language: str):
        self.console, self.f, self.say = console, findings, says(language)
        self.does = DOES[language]

    def show(self, heading: str | None = None, first: bool = True) -> None:
        """All of it; of several parts, each under its heading, and the text with the first."""
        f, say = self.f, self.say
        self.console.print()
        if first:
            self.console.rule(Text(say("title", model=f.model), style="bold"), align="left", style="dim")
            tokens = len(f.rows)
            if f.text is None:
                self.words(say("from_trace", tokens=tokens))
            else:
                shown = cut(printable(" ".join(f.text.split())), 200)
                self.words(say("text", tokens=tokens, text=shown.replace("`", "'")))
            self.notes()
        if heading is not None:
            self.console.print()
            self.console.rule(Text(heading, style="bold"), align="left", style="dim")
        if not first:
            self.notes()
        self.put(self.overview())
        self.put(self.heads())
        self.words(say("shares", most=math.log(max(1, f.size[1]))))
        self.put(self.links(), self.entropies())
        self.words(say("links_say" if f.links else "no_links"))
        layer, head = f.shown
        why = say("why_asked" if f.asked else "why_telling")
        self.words(say("shown_why", layer=layer, head=head, why=why))
        self.put(*self.maps())

    def notes(self) -> None:
        for note in self.f.notes:
            self.words(note)

    def words(self, text: str) -> None:
        """A paragraph."""
        self.console.print()
        for line in broken(text, self.console.width):
            self.console.print(line, no_wrap=True, overflow="fold")

    def put(self, *parts: RenderableType) -> None:
        self.console.print()
        self.console.print(beside(*parts))

    # Heads

    def overview(self) -> Text:
        """A letter for what each head does, layers down."""
        f = self.f
        numbers = sorted({head.head for head in f.heads})
        wide = max(1 + cell_len(letter) for letter in (str(numbers[-1]), *(letter for letter, _ in self.does.values())))
        margin = len(str(f.layers[-1]))
        fit = numbers[: max(1, (self.console.width - margin - 1) // wide)]
        result = Text(self.say("overview_heads"), style="bold")
        result.append("\n" + " " * (margin + 1), "not bold")
        result.append("".join(pad(str(n), wide, right=True) for n in fit), "not bold dim")
        found = {(head.layer, head.head): head for head in f.heads}
        for layer in f.layers:
            result.append(f"\n{layer:>{margin}} ", "not bold dim")
            for n in fit:
                letter = self.does[found[layer, n].does][0] if (layer, n) in found else " "
                style = "not bold reverse" if (layer, n) == f.shown else "not bold dim" if letter == "·" else "bold"
                cell = pad(letter, wide, right=True)
                result.append(cell[: -len(letter)], "not bold").append(letter, style)
        if len(fit) < len(numbers):
            result.append("\n" + self.say("more_heads", count=len(numbers) - len(fit)), "not bold dim")
        used = [name for name in self.does if any(head.does == name for head in f.heads)]
        legend = "  ".join(f"`{self.does[name][0]} {self.does[name][1]}`" for name in used)  # each in one piece
        for line in broken(legend, self.console.width):
            result.append("\n").append(line.plain, "not bold")
        return result

    def chosen(self) -> list[Head]:
        """The clearest head of each kind, then the most telling ones, in the order of layers."""
        f = self.f
        first = [f.of(*f.shown)]
        for name in self.does:
            first += sorted((h for h in f.heads if h.does == name), key=lambda h: -_clear(h))[
                : 1 if name == "mixed" else 2
            ]
        rest = sorted(f.heads, key=lambda h: -h.telling)
        some = dict.fromkeys((h.layer, h.head) for h in [*first, *rest])
        return [f.of(*each) for each in sorted(list(some)[:HEADS])]

    def heads(self) -> RenderableType:
        f, say = self.f, self.say
        some = f.heads if len(f.heads) <= HEADS else self.chosen()
        columns = [name for name in ("self", "previous", "induction", "first", "toeplitz") if any(
            head.shares[name] is not None for head in f.heads
        )]  # fmt: skip
        header = [say("layer"), say("head"), say("does"), *map(say, columns), say("entropy")]
        rows = [
            [
                str(h.layer),
                str(h.head),
                self.does[h.does][1],
                *(_share(h.shares[name]) for name in columns),
                f"{h.entropy:.2f}",
            ]
            for h in some
        ]
        title = say("heads") if len(some) == len(f.heads) else say("heads_few", count=len(some), all=len(f.heads))
        return table(header, rows, title=title)

    # Links and entropies

    def links(self) -> RenderableType:
        f, say = self.f, self.say
        header = [say("link"), say("weight"), say("expected"), say("where")]
        rows = [
            [
                Text(f"{in_place(f.rows, link.query)} → {in_place(f.columns, link.key)}"), f"{link.weight:.2f}",
                f"{link.expected:.2f}", f"{link.layer}.{link.head}",
            ]
            for link in f.links[:LINKS]
        ]  # fmt: skip
        return table(header, rows, title=say("links"))

    def entropies(self) -> RenderableType:
        f = self.f
        values = [f.entropy(layer) for layer in f.layers]
        return bars(values, map(str, f.layers), title=self.say("entropy_layers"), form=".2f", width=20)

    # The map

    def maps(self) -> list[RenderableType]:
        f, say = self.f, self.say
        layer, head = f.shown
        title = say("shown", layer=layer, head=head, does=self.does[f.of(layer, head).does][1])
        room = self.fits()
        if max(f.size) <= room:
            return [self.exact(slice(0, f.size[0]), slice(0, f.size[1]), title)]
        cells = max(8, min(PICTURE, self.console.width - len(str(f.size[0])) - 2))
        whole = pooled(
            f.matrix, cells, title=f"{title}\n{say('overview', n=f.size[0], m=f.size[1])}", axes=say("axes"),
            masked=say("masked"),
        )  # fmt: skip
        left = self.fits(cells + len(str(f.size[0])) + 5)  # what there is beside it
        rows, cols = f.window(left if left >= LEAST else min(room, MOST // 2))
        if rows == cols:
            part = say("part", a=rows.start, b=rows.stop - 1, n=f.size[0])
        else:
            part = say("part_both", a=rows.start, b=rows.stop - 1, c=cols.start, d=cols.stop - 1)
        return [whole, self.exact(rows, cols, part)]

    def fits(self, taken: int = 0) -> int:
        """Tokens of a map whose columns all fit beside their labels, and beside what takes so many columns."""
        margin = max(cell_len(cut(printable(label), LONGEST_ROW)) for label in self.f.rows) + 1
        return min(MOST, max(4, (self.console.width - margin - taken) // 2))

    def exact(self, rows: slice, cols: slice, title: str) -> Heatmap:
        f = self.f
        return heatmap(
            f.matrix[rows, cols].detach().float().cpu(),
            visible=f.matrix.logits[rows, cols].detach().cpu() > -torch.inf,
            rows=f.rows[rows], columns=f.columns[cols], title=title, axes=self.say("axes"), masked=self.say("masked"),
        )  # fmt: skip


def _clear(head: Head) -> float:
    """How clearly a head is of its kind: its largest share."""
    return max(
        (x for name, x in head.shares.items() if x is not None and name not in ("spread", "toeplitz")), default=0.0
    )


def _share(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def in_place(labels: list[str], at: int) -> str:
    """A token in brackets with its neighbours: ␣it␣[u]p,"""
    before, label, after = neighbours(labels, at, AROUND - 2)
    return f"{before}[{label}]{after}"
