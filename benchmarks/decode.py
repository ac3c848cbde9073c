"""Decoding: tokens a second against length, with and without a cache, beside transformers' GPT-2 of the same size.

    python benchmarks/decode.py [--lengths 64 256 1024] [--steps 8] [--rounds 4] [--out benchmarks/results]

Our decoder is GPT-2 here: the same sizes and the same (random) weights, and the two must agree on their logits before
anything is timed. Contenders take turns, so that a drifting clock hits all; each keeps its best round. One row,
float32. "without" reads the whole sequence again for every token, which is what a cache saves.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from regard.cache import Cache, KVCache, PagedCache, WindowCache
from regard.nn import Decoder, layers

PLACES = 4096
WINDOW = 128

Way = Callable[[Tensor], Any]


def gpt2(dim: int, depth: int, heads: int, vocabulary: int) -> Any:
    """transformers' GPT-2 with random weights, in the form it decodes fastest in."""
    sizes = {"n_embd": dim, "n_layer": depth, "n_head": heads, "vocab_size": vocabulary, "n_positions": PLACES}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="sdpa")).eval()


def ours(peer: Any) -> Decoder:
    """Our decoder with the peer's sizes and weights."""
    c = peer.config
    model = Decoder(
        c.vocab_size, c.n_embd, c.n_layer, c.n_head, absolute="learned", length=PLACES, activation="gelu_tanh"
    ).eval()
    body = peer.transformer
    state = {"embedding.weight": body.wte.weight, "places.table.weight": body.wpe.weight}
    state |= {"norm.weight": body.ln_f.weight, "norm.bias": body.ln_f.bias}
    for n, block in enumerate(body.h):
        at = f"blocks.{n}."
        for name, part in (("attention_norm", block.ln_1), ("feed_forward_norm", block.ln_2)):
            state |= {f"{at}{name}.weight": part.weight, f"{at}{name}.bias": part.bias}
        weights, biases = block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            state |= {f"{at}attention.{name}.weight": weight.mT, f"{at}attention.{name}.bias": bias}
        for name, part in (
            ("attention.output", block.attn.c_proj),
            ("feed_forward.up", block.mlp.c_fc),
            ("feed_forward.down", block.mlp.c_proj),
        ):
            state |= {f"{at}{name}.weight": part.weight.mT, f"{at}{name}.bias": part.bias}
    model.load_state_dict(state)
    return model


@contextmanager
def plain_products() -> Any:
    """Our model with PyTorch's own product for a single row, as transformers has it."""
    before, layers.FEW_ROWS = layers.FEW_ROWS, 0
    try:
        yield
    finally:
        layers.FEW_ROWS = before


def others(model: Decoder) -> dict[str, Decoder]:
    """Models of the same size with other kinds of attention, and weights from ours where they have the same."""
    kinds: dict[str, dict[str, Any]] = {
        "T5 bias": {"position": "t5"},
        "rotary": {"position": "rotary"},
        f"window of {WINDOW}, WindowCache": {"window": WINDOW},
    }
    made = {}
    for name, options in kinds.items():
        made[name] = Decoder(model.vocabulary or 0, model.dim, model.layers, model.attentions[0].heads, **options)
        made[name].load_state_dict(model.state_dict(), strict=False, assign=True)
    return {name: other.eval() for name, other in made.items()}


def contenders(model: Decoder, more: dict[str, Decoder], peer: Any, tokens: Tensor) -> dict[str, Way]:
    """Each reads the prompt once; what is timed is a function of the next token."""
    depth = model.layers
    pages = -(-PLACES // 16)
    kinds: dict[str, Cache] = {"KVCache": KVCache(depth), "PagedCache": PagedCache(depth, pages=pages)}
    ways: dict[str, Way] = {}
    for name, cache in kinds.items():
        model(tokens, cache=cache, last=True)
        ways[f"ours, {name}"] = lambda token, cache=cache: model(token, cache=cache, last=True)

    def plain(token: Tensor) -> Tensor:
        with plain_products():
            return model(token, cache=kinds["KVCache"], last=True)

    ways["ours, KVCache, PyTorch's products"] = plain
    for name, other in more.items():
        cache = WindowCache(depth, window=WINDOW) if "WindowCache" in name else KVCache(depth)
        other(tokens, cache=cache, last=True)
        ways[f"ours, {name}"] = lambda token, m=other, cache=cache: m(token, cache=cache, last=True)
    kept = transformers.DynamicCache()
    peer(tokens, past_key_values=kept, use_cache=True, logits_to_keep=1)
    ways["GPT-2, DynamicCache"] = lambda token: peer(token, past_key_values=kept, use_cache=True)
    return ways


def best(ways: dict[str, Way], token: Tensor, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds a token, the best round of each."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            way(token)
            began = time.perf_counter()
            for _ in range(steps):
                way(token)
            found[name] = min(found[name], 1e3 * (time.perf_counter() - began) / steps)
    return found


def measure(lengths: list[int], steps: int, rounds: int, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    peer = gpt2(*sizes)
    model = ours(peer)
    check = torch.randint(sizes[3], (1, 40))
    apart = float((model(check) - peer(check).logits).abs().max())
    if apart > 1e-3:
        raise AssertionError(f"the two models differ by {apart:.2e}: they are not the same")
    rows, more = [], others(model)
    for length in lengths:
        tokens = torch.randint(sizes[3], (1, length))
        found = best(contenders(model, more, peer, tokens), tokens[:, :1], steps, rounds)
        again = {
            "ours, without": lambda _, tokens=tokens: model(tokens, last=True),
            "GPT-2, without": lambda _, tokens=tokens: peer(tokens, use_cache=False, logits_to_keep=1),
        }
        found |= best(again, tokens[:, :1], 1, 1)
        rows.append({"length": length, "milliseconds": found})
        print(f"{length:6}  " + "  ".join(f"{name} {ms:.1f}" for name, ms in found.items()), flush=True)
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sizes": dict(zip(("dim", "layers", "heads", "vocabulary"), sizes, strict=True)),
        "largest difference of logits": apart,
        "rows": rows,
    }


def table(results: dict[str, Any]) -> str:
    """The results as a page."""
    rows, sizes = results["rows"], results["sizes"]
    names = list(rows[0]["milliseconds"])
    lengths = [row["length"] for row in rows]
    lines = [
        "# Decoding, tokens a second",
        "",
        f"GPT-2 with {sizes['layers']} layers of {sizes['dim']}, {sizes['heads']} heads and {sizes['vocabulary']} "
        f"tokens, random weights, one row, float32. Made by `benchmarks/decode.py` on {results['date']}: "
        f"{results['machine']}, torch {results['torch']}, transformers {results['transformers']}. Ours has the same "
        f"weights; the logits of the two differ by at most {results['largest difference of logits']:.1e}.",
        "",
        "| tokens before | " + " | ".join(map(str, lengths)) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for name in names:
        speeds = [1e3 / row["milliseconds"][name] for row in rows]
        lines.append(f"| {name} | " + " | ".join(f"{x:.3g}" for x in speeds) + " |")
    for name, peer, label in (
        ("ours, KVCache", "GPT-2, DynamicCache", "ours / GPT-2, each with its cache"),
        ("ours, KVCache, PyTorch's products", "GPT-2, DynamicCache", "the same, PyTorch's products in ours"),
        ("ours, without", "GPT-2, without", "ours / GPT-2, without"),
        ("ours, KVCache", "ours, without", "ours, with its cache / without"),
    ):
        ratios = [row["milliseconds"][peer] / row["milliseconds"][name] for row in rows]
        lines.append(f"| **{label}** | " + " | ".join(f"**{x:.2f}**" for x in ratios) + " |")
    lines += [
        "",
        "A token with the cache costs the weights, read once, and the keys and values before it: linear in length, and",
        "small beside the weights until thousands of tokens. Without it a token costs the whole sequence again.",
        "",
        "Where ours is faster than GPT-2 it is because of the projections: with one row, PyTorch multiplies on one",
        "core, and `project` in `src/regard/nn/layers.py` gives each core a part of the outputs. The row with",
        "PyTorch's products is ours without that. T5, rotary and the window are other models of the same size.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs=4, default=[768, 12, 12, 50257], help="dim layers heads vocabulary")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    with torch.no_grad():
        results = measure(given.lengths, given.steps, given.rounds, tuple(given.sizes))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "decode.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "decode.md").write_text(table(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
