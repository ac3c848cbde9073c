"""A.show(): the map of an A in a notebook (JupyterLab, VS Code, Colab), with the explorer's own canvas.

The kernel computes tiles when the page asks for them, so A may have any length. Needs anywidget:
pip install "regard[notebook]".
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..matrix import AttentionMatrix
from .atlas import TILE, Atlas
from .bundle import MAP, scripts

STYLE = """
.regard-widget { --ink: #1d2127; --faint: #5f6772; --paper: #fff; --hidden: #eceff2; --query: #b8560a; --key: #10743c;
  color: var(--ink); background: var(--paper); font: 13px/1.4 system-ui, sans-serif; padding: 6px; border-radius: 6px }
.regard-widget > canvas { width: 100%; height: 460px; display: block; touch-action: none; cursor: crosshair }
.regard-widget .tools { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; margin-bottom: 4px }
.regard-widget .foot { display: flex; gap: 14px; align-items: center; min-height: 32px }
.regard-widget .bar { width: 240px; height: 30px }
"""


def widget(A: AttentionMatrix, *, labels: Any = None, language: str = "en") -> Any:
    """A widget that shows A. `labels`: what to write beside queries and keys, a list, or a pair of lists."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(f"A.show() needs {error.name}: pip install 'regard[notebook]'") from None
    if language not in ("en", "zh"):
        raise ValueError(f"language: expected 'en' or 'zh', found {language!r}")

    class Widget(anywidget.AnyWidget):  # made here: anywidget is imported late
        _esm = scripts(MAP, "widget.js")
        _css = STYLE
        about = traitlets.Dict().tag(sync=True)
        language = traitlets.Unicode("en").tag(sync=True)

    atlases = Atlases(A)
    made = Widget(about=atlases.about(labels), language=language)
    made.on_msg(lambda _, told, __: answer(made, atlases, told))
    return made


class Atlases:
    """The maps of A's heads, each made when it is first looked at."""

    def __init__(self, A: AttentionMatrix):
        self.A, self.made = A, dict[int, Atlas]()
        self.lead = tuple(A.shape[:-2])
        words = ("row", "head") if len(self.lead) == 2 else ("head",) * len(self.lead)
        spans = [[f"{word} {n}" for n in range(size)] for word, size in zip(words, self.lead, strict=True)]
        self.names = [", ".join(each) for each in itertools.product(*spans)]

    def about(self, labels: Any) -> dict[str, Any]:
        q_len, k_len = self.A.shape[-2:]
        pair = labels if isinstance(labels, tuple) else (labels, labels)
        for side, length, some in zip("qk", (q_len, k_len), pair, strict=True):
            if some is not None and len(some) != length:
                whose = "queries" if side == "q" else "keys"
                raise ValueError(f"labels: expected {length} for the {whose}, found {len(some)}")
        told = {side: None if some is None else [str(x) for x in some] for side, some in zip("qk", pair, strict=True)}
        sizes = {"q_len": q_len, "k_len": k_len, "levels": self.of(0).levels, "tile": TILE}
        return {**sizes, "heads": self.names, "labels": told}

    def of(self, n: int) -> Atlas:
        if n not in self.made:
            A = self.A
            if len(self.lead) == 2:
                A = A[n // self.lead[1], n % self.lead[1]]
            elif self.lead:
                A = A[n]
            self.made[n] = Atlas(A)
        return self.made[n]


def answer(made: Any, atlases: Atlases, told: Any) -> None:
    """One question of the page. What goes wrong is an answer too: a notebook shows no traceback of a message."""
    try:
        number, what = int(told["id"]), told["what"]
        atlas = atlases.of(int(told.get("head", 0)))
        with torch.no_grad():
            if what == "tile":
                found = atlas.tile(int(told["cell"]), int(told["row"]), int(told["col"]), what=str(told["of"]))
                floats = [found.mean, found.max]
                if found.col == 0:
                    floats += atlas.first_column(found, str(told["of"]))
                rows, cols = found.mean.shape
                made.send({"id": number, "rows": rows, "cols": cols, "exact": found.exact}, _bytes(floats))
            elif what == "step":  # a tenth of a second of the pass that makes samples exact
                atlas.weights.step()
                made.send({"id": number, "progress": atlas.progress, "exact": atlas.exact})
            elif what == "peaks":
                *floats, exact = atlas.peaks(int(told["cell"]))
                made.send({"id": number, "exact": exact}, _bytes(floats))
            elif what == "pair":
                weight = atlas.of_rows(slice(int(told["i"]), int(told["i"]) + 1))[int(told["i"]), int(told["j"])]
                made.send({"id": number, "weight": float(weight)})
            else:
                raise ValueError(f"what: expected tile, step, peaks or pair, found {what!r:.40}")
    except Exception as error:
        made.send({"id": told.get("id", 0) if isinstance(told, dict) else 0, "error": f"{error}"})


def _bytes(floats: list) -> list[bytes]:
    return [x.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes() for x in floats]
