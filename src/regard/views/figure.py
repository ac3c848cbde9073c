"""Findings as a picture: every head small, one head large with its tokens, its displacements, and entropies.

    draw(findings, "look.png", "en")        also .svg and .pdf; matplotlib is imported here and nowhere earlier

Colours are viridis. Rows are queries and columns are keys, and the axes say so. Returns the characters that no
installed font has: they are drawn by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .findings import DECADES, EXACT, LARGE, Findings, Link
from .fonts import fonts_for, numbered
from .layout import cut, printable
from .words import DOES, says

#: what `draw` writes
ENDINGS = (".png", ".svg", ".pdf")
#: tokens of the labelled map when the text is longer than EXACT
ZOOM = 40
#: displacements shown on each side
NEAR = 40
MAP = "viridis"
INK, FAINT, LINE, DOT, MARK, PINK = "#222222", "#767676", "#c8c8c8", "#5b6c8f", "#d1495b", "#ff8fa0"
STYLE = {
    "font.size": 9, "axes.edgecolor": LINE, "axes.labelcolor": FAINT, "axes.titlesize": 10.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK, "text.color": INK,
    "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlepad": 10, "svg.hashsalt": "regard",
}  # fmt: skip


def draw(findings: Findings, path: str | Path, language: str = "en") -> str:
    """Write the picture; returns the characters that could only be drawn by number."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"out: expected a name that ends in {', '.join(ENDINGS)}, found {str(path)!r}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("out: a picture needs matplotlib, which is not installed; pip install matplotlib") from None
    say = says(language)
    heading = _heading(findings, say)
    drawn = [*findings.rows, *findings.columns, *heading, *(say(key) for key in ("all_heads", "query", "of_mass"))]
    families, missing = fonts_for(map(printable, drawn))
    with rc_context({**STYLE, "font.family": families}):
        picture = Picture(findings, say, language, missing)
        figure = Figure(figsize=picture.size(), layout="constrained")
        picture.put(figure, heading)
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending[1:]]
        figure.savefig(path, dpi=160, facecolor="white", metadata=dates)
    return missing


def _heading(findings: Findings, say: Callable[..., str]) -> tuple[str, str]:
    tokens = len(findings.rows)
    below = say("from_trace", tokens=tokens)
    if findings.text is not None:
        below = say("text", tokens=tokens, text=cut(printable(" ".join(findings.text.split())), 110))
    return say("title", model=findings.model), below


class Picture:
    """The panels of one picture."""

    def __init__(self, findings: Findings, say: Callable[..., str], language: str, missing: str):
        self.findings, self.say, self.missing = findings, say, missing
        self.does = DOES[language]
        self.long = max(findings.size) > EXACT
        self.layers = findings.layers
        self.numbers = sorted({head.head for head in findings.heads})

    def size(self) -> tuple[float, float]:
        """Inches: small maps as large as their number allows, the large map beside them."""
        return self._small_width() + (12.0 if self.long else 7.0), 9.0

    def _small_width(self) -> float:
        return min(8.0, max(3.4, 4.8 * len(self.numbers) / max(1, len(self.layers))))

    def put(self, figure: Any, heading: tuple[str, str]) -> None:
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
        title, below = (numbered(line, self.missing) for line in heading)
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold")
        top, bottom = figure.subfigures(2, 1, height_ratios=[6.4, 2.2])
        top.suptitle(below + "\n", x=0.012, ha="left", fontsize=9.5, color=FAINT)
        widths = [self._small_width(), 6.2, *([5.6] if self.long else [])]
        axes = top.subplots(1, len(widths), width_ratios=widths)
        self.small(axes[0])
        if self.long:
            self.overview(axes[1], top)
        self.large(axes[-1], top)
        left, right = bottom.subplots(1, 2, width_ratios=[self._small_width(), sum(widths[1:])])
        self.entropies(left)
        self.profile(right)

    def label(self, text: str) -> str:
        return numbered(printable(text), self.missing)

    def named(self, layer: int, head: int) -> str:
        found = self.findings.of(layer, head)
        return self.say("shown", layer=layer, head=head, does=self.does[found.does][1])

    # Panels

    def small(self, axes: Any) -> None:
        """Every head, a layer a row."""
        whole, cell, wide = mosaic(self.findings, self.layers, self.numbers)
        axes.imshow(whole.numpy(), cmap=_colours(), vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        for put, names, size in ((axes.set_xticks, self.numbers, wide), (axes.set_yticks, self.layers, cell)):
            some = range(0, len(names), math.ceil(len(names) / 16))  # of many heads, not every number
            put([n * size + (size - 3) / 2 for n in some], [str(names[n]) for n in some])
        layer, head = self.findings.shown
        if len(self.findings.heads) > 1:
            at = self.numbers.index(head) * wide - 1.5, self.layers.index(layer) * cell - 1.5
            axes.add_patch(_frame(at, wide, cell, MARK)).set_clip_on(False)
        axes.set(xlabel=self.say("head"), ylabel=self.say("layer"), title=self.say("all_heads"))
        _bare(axes)

    def large(self, axes: Any, figure: Any) -> None:
        """The shown head, weight by weight, with its tokens."""
        f = self.findings
        rows, cols = f.window(ZOOM if self.long else EXACT)
        weights = f.matrix[rows, cols].detach().float().cpu()
        seen = f.matrix.logits[rows, cols].detach().cpu() > -torch.inf
        image = axes.imshow(
            weights.masked_fill(~seen, torch.nan).numpy(), cmap=_colours(), vmin=0, interpolation="nearest"
        )
        self._tokens(axes, f.rows[rows], f.columns[cols])
        title = self.named(*f.shown)
        if self.long and rows == cols:
            title = self.say("part", a=rows.start, b=rows.stop - 1, n=f.size[0])
        elif self.long:
            title = self.say("part_both", a=rows.start, b=rows.stop - 1, c=cols.start, d=cols.stop - 1)
        axes.set_title(title)
        for link in f.links:
            self._mark(axes, link, rows, cols)
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=28, pad=0.02, label=self.say("weight"))
        bar.outline.set_visible(False)

    def _tokens(self, axes: Any, rows: Sequence[str], cols: Sequence[str]) -> None:
        size = max(5.0, min(9.5, 330 / max(1, len(rows), len(cols))))
        across = [self.label(cut(text, 14)) for text in cols]
        down = [self.label(cut(text, 14)) for text in rows]
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xticks(range(len(across)), across, fontsize=size)
        for label in axes.get_xticklabels():  # a word is turned, a character stands
            label.set_rotation(90 if len(label.get_text()) > 1 else 0)
        axes.set_yticks(range(len(down)), down, fontsize=size)
        axes.set(xlabel=self.say("key"), ylabel=self.say("query"))
        _bare(axes)

    def _mark(self, axes: Any, link: Link, rows: slice, cols: slice) -> None:
        """A frame around a link of this head."""
        inside = rows.start <= link.query < rows.stop and cols.start <= link.key < cols.stop
        if inside and (link.layer, link.head) == self.findings.shown:
            at = link.key - cols.start - 0.5, link.query - rows.start - 0.5
            axes.add_patch(_frame(at, 1, 1, PINK))

    def overview(self, axes: Any, figure: Any) -> None:
        """A long A pooled, with a frame around what is shown weight by weight."""
        from matplotlib.colors import LogNorm

        f = self.findings
        pooled = f.matrix.heatmap(LARGE)
        mean = pooled.mean.float().cpu().masked_fill(pooled.count.cpu() == 0, torch.nan)
        top = float(mean.nan_to_num().max()) or 1.0
        image = axes.imshow(
            mean.clamp(min=top / 10**DECADES).numpy(), cmap=_colours(), norm=LogNorm(top / 10**DECADES, top),
            aspect="equal", extent=(0, mean.shape[1] * pooled.cell[1], mean.shape[0] * pooled.cell[0], 0),
            interpolation="nearest",
        )  # fmt: skip
        axes.set(xlim=(0, f.size[1]), ylim=(f.size[0], 0), xlabel=self.say("key"), ylabel=self.say("query"))
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        _bare(axes, ticks=2)
        rows, cols = f.window(ZOOM)
        at, wide = (cols.start, rows.start), (cols.stop - cols.start, rows.stop - rows.start)
        axes.add_patch(_frame(at, *wide, MARK))
        axes.set_title(self.named(*f.shown))
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=28, pad=0.02, label=self.say("weight_mean"))
        bar.outline.set_visible(False)

    def entropies(self, axes: Any) -> None:
        """A dot a head, and the mean of each layer."""
        f = self.findings
        axes.scatter(
            [h.layer for h in f.heads], [h.entropy for h in f.heads], s=16, color=DOT, alpha=0.55, linewidths=0
        )
        axes.plot(self.layers, [f.entropy(layer) for layer in self.layers], color=DOT, linewidth=1.4)
        shown = f.of(*f.shown)
        axes.scatter([shown.layer], [shown.entropy], s=44, facecolors="none", edgecolors=MARK, linewidths=1.6)
        axes.set(xlabel=self.say("layer"), title=self.say("entropy_layers"), ylim=(0, None))
        axes.set_xticks(self.layers[:: math.ceil(len(self.layers) / 16)])
        axes.tick_params(length=2)

    def profile(self, axes: Any) -> None:
        """Mass of the shown head per displacement, near the diagonal."""
        f = self.findings
        axes.set(xlabel=self.say("displacement"), ylabel=self.say("of_mass"), title=self.say("profile"))
        if not f.profile:
            axes.set_axis_off()
            return
        zero = (len(f.profile) - 1) // 2
        total = sum(f.profile) or 1.0
        first = max(-zero, -NEAR) if any(f.profile[:zero]) else 0  # nothing to the left of a causal diagonal
        reach = range(first, min(zero, NEAR) + 1)
        axes.bar(reach, [f.profile[zero + d] / total for d in reach], width=0.8, color=DOT)
        axes.set_xlim(reach[0] - 1, reach[-1] + 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(length=2)


def mosaic(findings: Findings, layers: Sequence[int], heads: Sequence[int]) -> tuple[Tensor, int, int]:
    """Small maps in one image, each in its own scale, two blank cells between; and the step from one to the next."""
    high, wide = next(iter(findings.small.values())).weights.shape
    whole = torch.full((len(layers) * (high + 2) - 2, len(heads) * (wide + 2) - 2), torch.nan)
    for layer, head in findings.small:
        at = layers.index(layer) * (high + 2), heads.index(head) * (wide + 2)
        scaled, visible = findings.shares(layer, head)
        whole[at[0] : at[0] + high, at[1] : at[1] + wide] = scaled.masked_fill(~visible, torch.nan)
    return whole, high + 2, wide + 2


def _colours() -> Any:
    """Viridis, and white where nothing can be seen."""
    from matplotlib import colormaps

    return colormaps[MAP].with_extremes(bad="white")


def _frame(at: tuple[float, float], wide: float, high: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(at, wide, high, fill=False, edgecolor=colour, linewidth=1.6)


def _bare(axes: Any, ticks: float = 0) -> None:
    axes.set_anchor("NW")
    axes.tick_params(length=ticks)
    for side in axes.spines.values():
        side.set_visible(False)
