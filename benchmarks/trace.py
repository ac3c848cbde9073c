"""What recording costs, and how soon a long trace opens.

    python benchmarks/trace.py [--length 2048] [--rounds 7] [--long 16384] [--out benchmarks/results]

Recording: transformers' BERT with random weights, 6 layers of 768, 12 heads, its attention on regard, one row, float32.
Plain and recorded runs take turns, so that a drifting clock hits both, and each keeps its best. The copy of q, k and
log-sum-exp into memory of their own is measured by itself: it is what any recording must pay.

Opening: a trace of 6 layers and 12 heads is recorded, saved and opened again; tiles of 256 x 256 anywhere in it are
compared bit by bit with those of the trace in memory, and with a softmax of whole rows in float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import regard as rg
from regard.huggingface import enabled
from regard.trace import Trace, record
from regard.trace.keeping import to_host

TILE = 256


def bert(length: int, layers: int, dim: int, heads: int) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * dim,
        vocab_size=1000, max_position_embeddings=length,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def timed(way: Callable[[], Any]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def recording(length: int, rounds: int, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Seconds of a plain run, of a recorded one, and of the copy."""
    layers, dim, heads = sizes
    model = bert(length, layers, dim, heads)
    tokens = torch.randint(1000, (1, length))

    def recorded() -> Trace:
        with record(model) as trace:
            model(tokens)
        return trace

    with enabled(model):
        trace = recorded()
        kept = [trace._tensors[said[name]] for said in trace._document["looks"] for name in ("q", "k", "lse")]
        best = {"plain": float("inf"), "recorded": float("inf"), "copy": float("inf")}
        ways = {"plain": lambda: model(tokens), "recorded": recorded, "copy": lambda: [to_host(x) for x in kept]}
        for _ in range(rounds):
            for name, way in ways.items():
                best[name] = min(best[name], timed(way))
    return {
        "length": length,
        "milliseconds": {name: 1e3 * x for name, x in best.items()},
        "MiB": sum(x.nbytes for x in kept) / 2**20,
        "recorded / plain": best["recorded"] / best["plain"],
        "recorded less the copy / plain": (best["recorded"] - best["copy"]) / best["plain"],
    }


def opening(length: int, layers: int, heads: int, dim: int, folder: Path) -> dict[str, Any]:
    """Seconds to save, to open, and to give a tile for the first time and again; and how exact tiles are."""
    torch.manual_seed(0)
    stack = torch.nn.ModuleList(
        rg.nn.Attention(heads * dim, heads, position="t5", mask=rg.causal) for _ in range(layers)
    )
    x = torch.randn(1, length, heads * dim)
    with record(stack) as trace:
        for layer in stack:
            layer(x)
    path = folder / "long.trace"
    saved = timed(lambda: trace.save(path))
    best, opened = float("inf"), Trace.open(path)
    for _ in range(5):
        best = min(best, timed(lambda: Trace.open(path)))
    first, again, equal, error = [], [], True, 0.0
    random = torch.Generator().manual_seed(0)
    for layer in range(layers):
        for turn in range(4):
            head = int(torch.randint(heads, (), generator=random))
            i = int(torch.randint(length - TILE, (), generator=random))
            j = int(torch.randint(max(i, 1), (), generator=random))
            rows, cols = slice(i, i + TILE), slice(j, j + TILE)
            began = time.perf_counter()
            tile = opened[layer, head].block(rows, cols)
            (again if turn else first).append(time.perf_counter() - began)
            equal &= torch.equal(tile, trace[layer, head].block(rows, cols))
            exact = trace[layer, head].logits[rows].double().softmax(-1)[:, cols]
            error = max(error, float((tile - exact).abs().max()))
    return {
        "length": length, "layers": layers, "heads": heads, "dim": dim, "MB": path.stat().st_size / 1e6,
        "milliseconds": {
            "save": 1e3 * saved, "open": 1e3 * best, "first tile of a layer": 1e3 * max(first),
            "a tile, the slowest": 1e3 * max(again), "a tile, the median": 1e3 * sorted(again)[len(again) // 2],
        },
        "tiles": len(first) + len(again), "bits equal": bool(equal), "largest error of a weight": error,
    }  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """The results as a page."""
    run, long = results["recording"], results["opening"]
    ms = {**run["milliseconds"], **long["milliseconds"]}
    return "\n".join([
        "# Traces",
        "",
        f"Made by `benchmarks/trace.py` on {results['date']}: {results['machine']}, torch {results['torch']}, "
        f"transformers {results['transformers']}.",
        "",
        f"Recording BERT, {results['layers']} layers of {results['dim']}, {results['heads']} heads, {run['length']} "
        f"tokens, one row, float32, its attention on regard; {run['MiB']:.0f} MiB are kept.",
        "",
        "| | ms |",
        "|---|---|",
        f"| plain | {ms['plain']:.0f} |",
        f"| recorded | {ms['recorded']:.0f} |",
        f"| the copy of q, k and lse alone | {ms['copy']:.0f} |",
        f"| **recorded / plain** | **{run['recorded / plain']:.3f}** |",
        f"| **recorded less the copy / plain** | **{run['recorded less the copy / plain']:.3f}** |",
        "",
        f"A trace of {long['length']} tokens, {long['layers']} layers, {long['heads']} heads of {long['dim']}, "
        f"float32, causal with a T5 bias: {long['MB']:.0f} MB on disk.",
        "",
        "| | ms |",
        "|---|---|",
        f"| save | {ms['save']:.0f} |",
        f"| **open** | **{ms['open']:.2f}** |",
        f"| first tile of a layer (its sums are checked), the slowest | {ms['first tile of a layer']:.0f} |",
        f"| a tile of 256 x 256 after that, median / slowest | {ms['a tile, the median']:.1f} / "
        f"{ms['a tile, the slowest']:.1f} |",
        "",
        f"{long['tiles']} tiles at random places have "
        f"{'the same bits as' if long['bits equal'] else 'OTHER BITS than'} those of the trace in memory; against a "
        f"softmax of whole rows in float64 no weight is off by more than {long['largest error of a weight']:.1e}.",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--sizes", type=int, nargs=3, default=[6, 768, 12], help="layers dim heads")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    layers, dim, heads = given.sizes
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        results = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "layers": layers, "dim": dim, "heads": heads,
            "recording": recording(given.length, given.rounds, (layers, dim, heads)),
            "opening": opening(given.long, layers, heads, dim // heads, Path(folder)),
        }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "trace.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "trace.md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
