"""A trace as one HTML file that opens from disk: the explorer's own map, with the numbers inside.

For each head there is a pooled map of at most 128 x 128 cells (every entry, where the text is that short) and the 16
strongest keys of every query, all exact. Weights are written as 16-bit logarithms, which keep four digits, or as they
are where that is small. The scripts of the explorer are put into the file; nothing is fetched.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from html import escape
from typing import Any

import torch
from torch import Tensor

from ..progress import Callback, reporting
from ..summaries import Heatmap, TopK
from ..trace import Trace
from .bundle import PAGE, scripts, text

CELLS, KEPT = 128, 16
#: bytes of numbers, before they are packed, above which a file would be no pleasure to open
MOST = 96 << 20
#: bytes of numbers up to which weights are written as they are
PLAIN = 4 << 20


def write(trace: Trace, path: str | os.PathLike, *, name: str = "", language: str | None = None,
          progress: Callback | bool | None = None) -> None:  # fmt: skip
    """Write the file. `name` is its title; `language` "en" or "zh" (the reader's browser chooses unless given)."""
    if language not in (None, "en", "zh"):
        raise ValueError(f"language: expected 'en' or 'zh', found {language!r}")
    looks = trace.looks
    if any(look.batch > 1 for look in looks):
        raise ValueError(f"trace: expected one row, found a batch of {looks[0].batch}; choose one with trace.row(n)")
    numbers = sum(len(x.heads) * 4 * (min(x.q_len, CELLS) * min(x.k_len, CELLS) + 2 * KEPT * x.q_len) for x in looks)
    if numbers > MOST:
        raise ValueError(
            f"trace: {numbers >> 20} MiB of numbers would make too large a page (at most {MOST >> 20}); choose layers "
            "or heads when recording, or look at the trace with `regard explore`"
        )
    does = {(row["stack"], row["kind"], row["layer"], row["head"]): row for row in trace.statistics(progress=progress)}
    sequences: list[list[str]] = []
    told = []
    with reporting(progress, "writing every head") as report:
        for n, (look, A) in enumerate(trace):
            told.append(_look(look, A, does, sequences, trace.only(stack=look.stack, kind=look.kind), numbers <= PLAIN))
            if report is not None:
                report(n + 1, len(looks))
    title = name or "Regard"
    data = {"name": title, "from": f"{len(looks)} x {len(looks[0].heads) if looks else 0} heads", "language": language,
            "looks": told, "sequences": sequences}  # fmt: skip
    page = _page(title, json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def _look(look: Any, A: Any, does: dict, sequences: list[list[str]], part: Trace, plain: bool) -> dict[str, Any]:
    cell = max(1, -(-max(look.q_len, look.k_len) // CELLS))
    kept = min(KEPT, look.k_len)
    cells, top = A.summarize(Heatmap(cell=cell), TopK(kept))
    mean = cells.mean.masked_fill(cells.count == 0, torch.nan)[0]
    rows = [does[look.stack, look.kind, look.layer, head] for head in look.heads]
    shares = ("self", "previous", "first", "induction", "toeplitz", "entropy")
    wide = look.k_len >= 65535
    keys = (top.indices[0] + 1).to(torch.int32).contiguous()  # 0: no such key
    return {
        "stack": look.stack, "kind": look.kind, "layer": look.layer, "heads": list(look.heads),
        "q_len": look.q_len, "k_len": look.k_len, "cell": cell, "rows": mean.shape[-2], "cols": mean.shape[-1],
        "kept": kept, "wide": wide, "does": [row["does"] for row in rows],
        "statistics": [{name: _short(row.get(name)) for name in shares} for row in rows],
        "labels": {side: _sequence(part.labels(side), sequences) for side in ("q", "k")},
        "mean": _weights(mean, plain), "top": _weights(top.weights[0], plain),
        "keys": _packed(keys.numpy().astype("<u4" if wide else "<u2").tobytes()),
    }  # fmt: skip


def _sequence(labels: list[str], sequences: list[list[str]]) -> int:
    """The number of a list of labels; lists that several looks share are written once."""
    if labels not in sequences:
        sequences.append(labels)
    return sequences.index(labels)


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


def _weights(x: Tensor, plain: bool) -> dict[str, str]:
    x = x.detach().float().cpu().contiguous()
    if plain:
        return {"kind": "float32", "data": _packed(x.numpy().astype("<f4").tobytes())}
    code = (-2000 * x.clamp(min=1e-30).double().log2()).round() + 1
    code = code.clamp(1, 65534).masked_fill(x == 0, 65535).masked_fill(x.isnan(), 0)
    return {"kind": "log16", "data": _packed(code.to(torch.int32).numpy().astype("<u2").tobytes())}


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _page(title: str, data: str) -> str:
    body = text("index.html").split("<body>")[1].split("</body>")[0]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n<style>\n{text("style.css")}'
        f'</style>\n</head>\n<body>{body}<script type="application/json" id="data">{_quoted(data)}</script>\n'
        f"<script>\n(() => {{\n{scripts(PAGE, 'page.js')}\n}})();\n</script>\n</body>\n</html>\n"
    )


def _quoted(data: str) -> str:
    """JSON that cannot end the element it stands in."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
