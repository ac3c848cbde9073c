"""Findings as one page: tables, every head small, one head large with its tokens. No script, no network, no font files.

Maps are indexed PNG images of one pixel a cell, in the page itself; the large map of a short text is SVG, whose cells
say their weight under the mouse. Everything that comes from a text or a file is escaped.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape

import torch
from torch import Tensor

from .findings import DECADES, EXACT, LARGE, Findings
from .layout import cut, neighbours, printable
from .terminal import colour
from .words import DOES, says

#: tokens of the map with labels when the text is longer than EXACT
ZOOM = 28
#: rows of the table of links
LINKS = 16
#: display columns of a token with its neighbours
AROUND = 22
#: pixels of a cell of the large map, at least and at most, and of the whole where that leaves a choice
CELL, WIDE, MAP = 18, 30, 560

STYLE = """
:root { color-scheme: light; --ink: #1f2328; --faint: #646b75; --line: #dfe3e8; --mark: #d1495b }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 40px 28px 64px; color: var(--ink); background: #fff;
  font: 15px/1.55 system-ui, "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em }
h2 { font-size: 17px; margin: 44px 0 10px }
p { margin: 6px 0; max-width: 76ch } .faint { color: var(--faint) }
.note { border-left: 3px solid #e0a100; padding: 2px 12px; background: #fffaf0 }
.text { overflow-wrap: anywhere }
.scroll { overflow-x: auto; max-width: 100% }
.beside { display: flex; flex-wrap: wrap; gap: 16px 56px; align-items: flex-start }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
th { text-align: left; font-weight: 600; color: var(--faint); border-bottom: 1px solid var(--line) }
th { padding: 4px 18px 4px 0 }
td { padding: 3px 18px 3px 0; border-bottom: 1px solid #f1f3f5; white-space: nowrap }
th.n, td.n { text-align: right }
tr.shown td { background: #fdf1f2 } tr.shown td:first-child { box-shadow: -3px 0 var(--mark) }
td.at { color: var(--faint) } td.at b { color: var(--ink); background: #eef1f5; border-radius: 3px; padding: 0 3px }
.heads td, .heads th { border: 0; padding: 3px; text-align: center; color: var(--faint) }
.heads td, .heads th { font-weight: 400; font-size: 12px }
.heads img { display: block; width: var(--w); height: var(--w); image-rendering: pixelated }
.heads .shown img { outline: 2px solid var(--mark); outline-offset: 2px }
.pooled { flex: 0 1 480px }
.pooled img { display: block; width: 100%; aspect-ratio: 1; image-rendering: pixelated }
.bar { display: inline-block; width: 180px; height: 10px; vertical-align: middle; border-radius: 2px; margin: 0 8px }
.meter { display: inline-block; height: 9px; background: #5b6c8f; border-radius: 2px; vertical-align: middle }
svg text { font: 12px system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; fill: var(--ink) }
svg .axis { fill: var(--faint) }
"""


def page(findings: Findings, language: str = "en") -> str:
    """The whole page, as text."""
    return Page(findings, language).html()


class Page:
    """One page of findings."""

    def __init__(self, findings: Findings, language: str):
        self.f, self.language, self.say, self.does = findings, language, says(language), DOES[language]

    def html(self) -> str:
        f, say = self.f, self.say
        title = escape(say("title", model=f.model))
        tokens = len(f.rows)
        said = say("from_trace", tokens=tokens)
        if f.text is not None:
            said = say("text", tokens=tokens, text=cut(printable(" ".join(f.text.split())), 600))
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in f.notes)
        parts = [
            f'<h1>{title}</h1><p class="faint text">{escape(said)}</p>{notes}',
            self.large(),
            f'<h2>{escape(say("all_heads"))}</h2>{self.small()}<p class="faint">{escape(say("all_heads_note"))}</p>',
            f'<div class="beside"><div>{self.links()}</div><div>{self.entropies()}</div></div>',
            self.heads(),
        ]
        return (
            f'<!doctype html>\n<html lang="{"zh-Hans" if self.language == "zh" else "en"}"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            f"style-src 'unsafe-inline'\"><title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
            + "\n".join(parts)
            + "\n</body></html>\n"
        )

    # Maps

    def small(self) -> str:
        """Every head, a layer a row."""
        f = self.f
        numbers = sorted({head.head for head in f.heads})
        wide = max(28, min(112, 1000 // len(numbers) - 8))
        header = "".join(f"<th>{n}</th>" for n in numbers)
        rows = []
        for layer in f.layers:
            cells = []
            for n in numbers:
                if (layer, n) not in f.small:
                    cells.append("<td></td>")
                    continue
                about = f"{self.say('layer')} {layer}, {self.say('head')} {n}: {self.does[f.of(layer, n).does][1]}"
                image = picture(*f.shares(layer, n))
                shown = ' class="shown"' if (layer, n) == f.shown else ""
                cells.append(f'<td{shown}><img alt="{escape(about)}" title="{escape(about)}" src="{image}"></td>')
            rows.append(f"<tr><th>{layer}</th>{''.join(cells)}</tr>")
        corner = f"{escape(self.say('layer'))} \\ {escape(self.say('head'))}"
        return (
            f'<div class="scroll"><table class="heads" style="--w: {wide}px"><tr><th>{corner}</th>{header}</tr>'
            f"{''.join(rows)}</table></div>"
        )

    def large(self) -> str:
        """The head that is shown: weight by weight, and a long A pooled beside it."""
        f, say = self.f, self.say
        layer, head = f.shown
        title = say("shown", layer=layer, head=head, does=self.does[f.of(layer, head).does][1])
        why = say("shown_why", layer=layer, head=head, why=say("why_asked" if f.asked else "why_telling"))
        long = max(f.size) > EXACT
        rows, cols = f.window(ZOOM if long else EXACT)
        exact = self.cells(rows, cols)
        if long:
            part = say("part", a=rows.start, b=rows.stop - 1, n=f.size[0])
            if rows != cols:
                part = say("part_both", a=rows.start, b=rows.stop - 1, c=cols.start, d=cols.stop - 1)
            exact = f'<div><p class="faint">{escape(part)}</p>{exact}</div>'
            exact = f'<div class="beside">{self.pooled()}{exact}</div>'
        return f"<h2>{escape(title)}</h2><p>{escape(why)}</p>{exact}"

    def pooled(self) -> str:
        f, say = self.f, self.say
        found = f.matrix.heatmap(LARGE)
        mean = found.mean.float().cpu()
        top = float(mean.max()) or 1.0
        shares = (1 + (mean / top).clamp(min=1e-30).log10() / DECADES).clamp(min=0)
        about = say("overview", n=f.size[0], m=f.size[1])
        image = picture(shares, found.count.cpu() > 0)
        bar = legend(f"{top / 10**DECADES:.1e}", f"{top:.1e} (log)")
        return (
            f'<div class="pooled"><p class="faint">{escape(about)}</p><img alt="{escape(about)}" src="{image}">'
            f'<p class="faint">{bar}<br>{escape(say("axes"))}</p></div>'
        )

    def cells(self, rows: slice, cols: slice) -> str:
        """A map with its tokens, each cell with its weight under the mouse."""
        f = self.f
        weights = f.matrix[rows, cols].detach().float().cpu()
        seen = f.matrix.logits[rows, cols].detach().cpu() > -torch.inf
        down, across = ([printable(cut(label, 16)) for label in some] for some in (f.rows[rows], f.columns[cols]))
        cell = min(WIDE, max(CELL, MAP // max(len(down), len(across))))
        left, top = (8 * max(map(_width, names), default=1) + 30 for names in (down, across))
        left = max(left, 64)  # room for the axis' name
        wide, high = left + cell * len(across), top + cell * len(down)
        peak = float(weights.max()) or 1.0
        parts = [
            f'<text class="axis" x="{left}" y="12">{escape(self.say("key"))} →</text>'
            f'<text class="axis" x="0" y="{top - 6}">{escape(self.say("query"))} ↓</text>'
        ]
        for j, label in enumerate(across):
            x = left + cell * j + cell / 2
            if _width(label) <= 2:
                parts.append(f'<text x="{x:g}" y="{top - 6}" text-anchor="middle">{escape(label)}</text>')
            else:
                parts.append(f'<text transform="translate({x + 4:g} {top - 6}) rotate(-90)">{escape(label)}</text>')
        for i, label in enumerate(down):
            y = top + cell * i + cell / 2 + 4
            parts.append(f'<text x="{left - 6}" y="{y:g}" text-anchor="end">{escape(label)}</text>')
        for i, (row, ok) in enumerate(zip(weights.tolist(), seen.tolist(), strict=True)):
            for j, (x, visible) in enumerate(zip(row, ok, strict=True)):
                if visible:
                    fill = "".join(f"{c:02x}" for c in colour(x / peak))
                    about = f"{down[i]} → {across[j]}: {x:.4f}"
                    place = f'x="{left + cell * j}" y="{top + cell * i}" width="{cell}" height="{cell}"'
                    parts.append(f'<rect {place} fill="#{fill}"><title>{escape(about)}</title></rect>')
        inside = "".join(parts)
        bar = legend("0", f"{peak:.2f}")
        return (
            f'<div><div class="scroll"><svg width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" role="img" '
            f'shape-rendering="crispEdges">{inside}</svg></div><p class="faint">{bar}<br>'
            f"{escape(self.say('axes'))}</p></div>"
        )

    # Tables

    def heads(self) -> str:
        f, say = self.f, self.say
        names = [name for name in ("self", "previous", "induction", "first", "toeplitz")
                 if any(head.shares[name] is not None for head in f.heads)]  # fmt: skip
        header = [say("layer"), say("head"), say("does"), *map(say, names), say("entropy")]
        rows = []
        for h in f.heads:
            shares = ["–" if h.shares[name] is None else f"{h.shares[name]:.2f}" for name in names]
            rows.append([str(h.layer), str(h.head), escape(self.does[h.does][1]), *shares, f"{h.entropy:.2f}"])
        marked = [(h.layer, h.head) == f.shown for h in f.heads]
        most = max(1, f.size[1])
        explained = say("shares", most=float(torch.tensor(float(most)).log()))
        found = table(header, rows, {0, 1, *range(3, len(header))}, marked)
        return f'<h2>{escape(say("heads"))}</h2><p class="faint">{escape(explained)}</p>{found}'

    def links(self) -> str:
        f, say = self.f, self.say
        header = [say("link"), say("weight"), say("expected"), say("where")]
        rows = []
        for link in f.links[:LINKS]:
            ends = in_place(f.rows, link.query), in_place(f.columns, link.key)
            where = f"{link.layer}.{link.head}"
            rows.append([" → ".join(ends), f"{link.weight:.2f}", f"{link.expected:.2f}", where])
        explained = say("links_say" if rows else "no_links")
        found = table(header, rows, {1, 2, 3}, first="at") if rows else ""
        return f'<h2>{escape(say("links"))}</h2><p class="faint" style="max-width: 46ch">{escape(explained)}</p>{found}'

    def entropies(self) -> str:
        f, say = self.f, self.say
        values = {layer: f.entropy(layer) for layer in f.layers}
        top = max(values.values()) or 1.0
        rows = [
            [str(layer), f"{x:.2f}", f'<span class="meter" style="width: {180 * x / top:.0f}px"></span>']
            for layer, x in values.items()
        ]
        found = table([say("layer"), say("entropy"), ""], rows, {0, 1})
        return f"<h2>{escape(say('entropy_layers'))}</h2>{found}"


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: set[int], marked: Sequence[bool] = (), first: str = ""
) -> str:
    """A table; cells are HTML already, headers are not."""
    head = "".join(f"<th{' class=n' if at in right else ''}>{escape(name)}</th>" for at, name in enumerate(header))
    body = []
    for number, row in enumerate(rows):
        classes = ["n" if at in right else first if at == 0 else "" for at in range(len(row))]
        cells = "".join(f"<td{f' class={c}' if c else ''}>{x}</td>" for c, x in zip(classes, row, strict=True))
        mark = ' class="shown"' if number < len(marked) and marked[number] else ""
        body.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def in_place(labels: Sequence[str], at: int) -> str:
    """A token with some neighbours, as HTML."""
    before, label, after = map(escape, neighbours(labels, at, AROUND))
    return f"{before}<b>{label}</b>{after}"


def legend(low: str, high: str) -> str:
    stops = ", ".join(f"rgb{colour(n / 8)}" for n in range(9))
    return f'{escape(low)}<span class="bar" style="background: linear-gradient(90deg, {stops})"></span>{escape(high)}'


def _width(label: str) -> int:
    return sum(2 if ord(c) > 0x2E80 else 1 for c in label)


def picture(shares: Tensor, visible: Tensor) -> str:
    """Shares from 0 to 1 in viridis, as a data address: an indexed PNG, one pixel a cell, white where none may meet."""
    levels = (shares.clamp(0, 1) * 254).round().to(torch.uint8) + 1
    rows = levels.masked_fill(~visible, 0)
    high, wide = rows.shape
    raw = b"".join(b"\0" + bytes(row) for row in rows.tolist())
    palette = bytes((255, 255, 255)) + b"".join(bytes(colour(n / 254)) for n in range(255))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 3, 0, 0, 0)), (b"PLTE", palette),
        (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""),
    )  # fmt: skip
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
