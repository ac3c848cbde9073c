"""Models of Hugging Face on Regard beside what they run on today: time and peak memory of one layer.

    python benchmarks/huggingface.py cpu [--case NAME ...] [--repeat R] [--passes forward training]
    python benchmarks/huggingface.py gpu

Each model has one layer of 768 with 12 heads and random weights. It is made once for every attention that
transformers offers for it (eager and sdpa, where it has them) and once more for Regard, all with the same weights.
Before anything is timed the outputs must agree. The contenders take turns, so that a drifting clock hits all; each
keeps its best round, and "today" is the best of transformers' own. Memory: see measure.py.

cpu: float32, one row, 2048 tokens (T5 8192, SAM its 64 x 64). gpu: bfloat16, four rows, 4096 tokens.
A model that fails says why in the table, and the others go on. Results are written after each model, and a model that
is not measured keeps its figures: a suite can be measured in parts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import Clock, _allocated, _high_water, day, reason
from report import PASSES, _grid, _mark, _met, _short
from run import machine
from torch import Tensor, nn

HIDDEN, HEADS, WORDS = 768, 12, 1000
RESULTS = Path(__file__).parent / "results"
#: rows, tokens where a case does not say otherwise, dtype
SUITES = {"cpu": (1, 2048, torch.float32), "gpu": (4, 4096, torch.bfloat16)}
OURS = "regard"
TODAY = ("eager", "sdpa")


class Model(NamedTuple):
    """One model: how to make it for a number of tokens, and what to call with what."""

    name: str
    make: Callable[[int, str], nn.Module]  # tokens, implementation
    feed: Callable[[nn.Module, int, int], dict[str, Any]]  # model, rows, tokens -> inputs
    call: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
    tokens: int | None = None  # on CPU, when not the suite's
    faster: float | None = None  # at least so many times as fast as today's best, on CPU
    memory: float | None = None  # at most this share of today's extra memory, on CPU
    today: tuple[str, ...] = ("eager", "sdpa")  # what of transformers' own is tried
    count: Callable[[int], int] = lambda tokens: tokens  # how many tokens a square image makes of so many


def of(module: str, kind: str, **settings: Any) -> Callable[[int, str], nn.Module]:
    """A maker of transformers.models.<module>.<kind>: settings may be functions of the number of tokens."""

    def make(tokens: int, implementation: str) -> nn.Module:
        model = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
        given = {name: value(tokens) if callable(value) else value for name, value in settings.items()}
        return model(model.config_class(**given, attn_implementation=implementation))

    return make


def words(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, WORDS, (rows, tokens))}


def frames(width: int) -> Callable[[nn.Module, int, int], dict[str, Any]]:
    return lambda model, rows, tokens: {"input_features": torch.randn(rows, tokens, width)}


def image(patch: int) -> Callable[[nn.Module, int, int], dict[str, Any]]:
    return lambda model, rows, tokens: {"pixel_values": torch.randn(rows, 3, *[math.isqrt(tokens) * patch] * 2)}


def layer_of(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    """Parakeet's layer gets hidden states: its encoder would first shorten frames by convolutions that take longer."""
    hidden = torch.randn(rows, tokens, HIDDEN)
    return {"hidden_states": hidden, "position_embeddings": model.encode_positions(hidden)}


SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 4 * HIDDEN}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": lambda n: n + 2}

MODELS = (
    Model(
        "DeBERTa-v2",
        of(
            "deberta_v2",
            "DebertaV2Model",
            **TEXT,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            max_relative_positions=-1,
        ),
        words,
        faster=6,
        memory=1 / 4,
    ),
    Model("MPNet", of("mpnet", "MPNetModel", **TEXT), words, faster=6),
    Model(
        "SAM, 64 x 64",
        of(
            "sam",
            "SamVisionModel",
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_hidden_layers=1,
            mlp_dim=4 * HIDDEN,
            image_size=lambda n: 16 * math.isqrt(n),
            patch_size=16,
            window_size=0,
            global_attn_indexes=[0],
        ),
        image(16),
        tokens=4096,
        faster=1.6,
        memory=1 / 4,
    ),
    Model(
        "Wav2Vec2-BERT",
        of("wav2vec2_bert", "Wav2Vec2BertModel", **SIZES, position_embeddings_type="relative_key"),
        frames(160),
        faster=2.5,
    ),
    Model(
        "Parakeet",
        of("parakeet", "ParakeetEncoder", **SIZES, max_position_embeddings=lambda n: n),
        layer_of,
        call=lambda model: model.layers[0],
        faster=1.5,
    ),
    Model(
        "T5 encoder",
        of(
            "t5",
            "T5EncoderModel",
            d_model=HIDDEN,
            num_heads=HEADS,
            d_kv=64,
            d_ff=4 * HIDDEN,
            num_layers=1,
            vocab_size=WORDS,
        ),
        words,
        tokens=8192,
        faster=4,
        memory=1 / 8,
        today=("sdpa",),  # eager holds several times 3 GiB of weights on CPU, and is the slower
    ),
    Model(
        "BEiT",
        of(
            "beit",
            "BeitModel",
            **SIZES,
            image_size=lambda n: 16 * math.isqrt(n),
            patch_size=16,
            use_relative_position_bias=True,
        ),
        image(16),
        count=lambda tokens: math.isqrt(tokens) ** 2 + 1,
    ),
    Model(
        "Swin, two blocks of windows of 8 x 8",
        of(
            "swin",
            "SwinModel",
            embed_dim=HIDDEN,
            depths=[2],
            num_heads=[HEADS],
            window_size=8,
            image_size=lambda n: 32 * (math.isqrt(n) // 8),
            patch_size=4,
        ),
        lambda model, rows, tokens: {"pixel_values": torch.randn(rows, 3, *[32 * (math.isqrt(tokens) // 8)] * 2)},
        count=lambda tokens: (8 * (math.isqrt(tokens) // 8)) ** 2,
    ),
    Model("Bloom", of("bloom", "BloomModel", hidden_size=HIDDEN, n_head=HEADS, n_layer=1, vocab_size=WORDS), words),
    Model("BERT, no relative term", of("bert", "BertModel", **TEXT), words),
)


class Setting:
    """One model in one suite: contenders with the same weights, and inputs."""

    def __init__(self, model: Model, suite: str, tokens: int | None = None):
        rows, usual, self.dtype = SUITES[suite]
        self.model, self.rows = model, rows
        self.tokens = tokens or (model.tokens if suite == "cpu" and model.tokens else usual)
        self.device = torch.device("cuda" if suite == "gpu" else "cpu")
        self.weights: dict[str, Tensor] = {}

    def contender(self, name: str) -> nn.Module:
        """The model on `name`; raises where transformers does not offer it."""
        torch.manual_seed(0)
        made = self.model.make(self.tokens, TODAY[0] if name == OURS else name).eval()
        if not self.weights:
            with torch.no_grad():  # tables of positions begin as zeros: none of them may be left out
                for parameter in made.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            self.weights = made.state_dict()
        made.load_state_dict(self.weights)
        made = made.to(self.device, self.dtype)
        if name == OURS:
            from regard.huggingface import enable

            enable(made)
        return made

    def way(self, contender: nn.Module, mode: str) -> Callable[[], Tensor]:
        """A function of nothing: the output; in training, with the gradients of everything learned."""
        torch.manual_seed(1)
        with torch.no_grad(), torch.device(self.device):
            given = self.model.feed(contender, self.rows, self.tokens)
        inputs = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in given.items()}
        call = self.model.call(contender)

        def run() -> Tensor:
            with torch.set_grad_enabled(mode == "training"):
                found = call(**inputs)
                out = found if isinstance(found, Tensor) else found[0]
                if mode == "training":
                    contender.zero_grad(set_to_none=True)
                    out.backward(torch.ones_like(out))
            return out.detach()

        return run


def ways_of(s: Setting, mode: str) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Tensor], dict[str, str]]:
    """Every contender that runs, what it gave, and why the others do not."""
    ways, outs, why = {}, {}, {}
    for name in (*s.model.today, OURS):
        try:
            way = s.way(s.contender(name), mode)
            outs[name] = way()
            ways[name] = way
        except Exception as error:  # whatever a model raises is its answer
            why[name] = reason(error)
        _empty(s.device)
    return ways, outs, why


def apart(outs: dict[str, Tensor]) -> float:
    """The largest difference of Regard's output from today's, over the largest number in it."""
    ours, others = outs[OURS].float(), [x.float() for name, x in outs.items() if name != OURS]
    return max((float((ours - x).abs().max() / x.abs().max()) for x in others), default=math.nan)


def times(s: Setting, mode: str, repeat: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of each contender, and how far Regard's output is from the others'."""
    ways, outs, why = ways_of(s, mode)
    found: dict[str, Any] = {name: {"why": words} for name, words in why.items()}
    if OURS in ways and len(ways) > 1:
        found["apart"] = apart(outs)
        most = 1e-3 if s.dtype == torch.float32 else 5e-2
        if not found["apart"] <= most:
            why[OURS] = f"its output differs from the model's by {found['apart']:.1e} of the largest number"
            return found | {OURS: {"why": why[OURS]}}
    del outs
    taken = Clock(s.device, repeat).race(ways, seconds)
    return found | {name: {"ms": round(x * 1000, 3)} for name, x in taken.items()}


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# memory


def memory(s: Setting, suite: str, mode: str) -> dict[str, Any]:
    """Peak MiB of each contender above its weights and inputs."""
    if suite == "gpu":
        ways, _, why = ways_of(s, mode)
        found: dict[str, Any] = {name: {"why": words} for name, words in why.items()}
        return found | {name: {"MiB": round(_allocated(way), 1)} for name, way in ways.items()}
    return {name: _in_a_process(s.model.name, name, mode) for name in (*s.model.today, OURS)}


def _in_a_process(model: str, name: str, mode: str) -> dict[str, Any]:
    asked = json.dumps([model, name, mode])
    done = subprocess.run([sys.executable, __file__, "cpu", "--peak", asked], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"why": reason(RuntimeError(last)).removeprefix("RuntimeError: ")}
    return json.loads(done.stdout.splitlines()[-1])


def peak(model: Model, name: str, mode: str) -> dict[str, Any]:
    """In a fresh process: one pass of one contender, after a small one that loads what is loaded at first use."""
    small = Setting(model, "cpu", tokens=256)
    small.way(small.contender(name), mode)()
    s = Setting(model, "cpu")
    way = s.way(s.contender(name), mode)
    before = _high_water(reset=True)
    way()
    return {"MiB": round(_high_water() - before, 1)}


# the table


def table(results: dict[str, Any]) -> str:
    """The results as a page."""
    suite = results["suite"]
    rows_, tokens, dtype = SUITES[suite]
    known = {model.name: model for model in MODELS}
    lines, notes = [], []
    for name, case in results["cases"].items():
        target = known[name] if suite == "cpu" else None
        for mode in [mode for mode in PASSES if mode in case["time"] or mode in case["memory"]]:
            lines.append(_row(name, case, mode, target if mode == "forward" else None, notes))
    machine_ = "; ".join(f"{key}: {value}" for key, value in results["machine"].items())
    parts = [
        f"# Models of Hugging Face: {suite}",
        f"One layer of {HIDDEN} with {HEADS} heads, random weights, {rows_} row{'s' if rows_ > 1 else ''}, "
        f"{str(dtype).removeprefix('torch.')}. Measured {results['date']} by `benchmarks/huggingface.py {suite}`. "
        f"{machine_}.",
        'Time in milliseconds; memory in MiB, the peak above weights and inputs. "today" is the best of what '
        "transformers offers for the model, for time and for memory apart, all in the same run.",
        *_grid(
            ["model", "tokens", "pass", "eager", "sdpa", "Regard", "x today", "target", "", "memory today", "Regard",
             "share", "target", "", "apart"],
            lines,
        ),
        "apart: the largest difference of Regard's output from the others', over the largest number in it.",
    ]  # fmt: skip
    if notes:
        parts.append("\n".join(f"{n}. {words}" for n, words in enumerate(notes, 1)))
    return "\n\n".join(parts) + "\n"


def _row(name: str, case: dict[str, Any], mode: str, target: Model | None, notes: list[str]) -> list[str]:
    taken, peaks = case["time"].get(mode, {}), case["memory"].get(mode, {})
    row = [name, str(case["tokens"]), PASSES[mode], *(_cell(taken.get(x), "ms", notes) for x in (*TODAY, OURS))]
    ours, today = taken.get(OURS, {}).get("ms"), best(taken, "ms")
    ratio = today / ours if ours and today else None
    row += ["" if ratio is None else f"**{ratio:.2f}**"]
    want = None if target is None else target.faster
    row += ["" if want is None else f"{want:g}", _mark(None if ratio is None or want is None else ratio >= want)]
    ours, today = peaks.get(OURS, {}).get("MiB"), best(peaks, "MiB")
    share = ours / today if ours is not None and today else None
    row += ["" if today is None else _short(today), _cell(peaks.get(OURS), "MiB", notes)]
    row += ["" if share is None else f"**{share:.2f}**"]
    want = None if target is None else target.memory
    row += ["" if want is None else f"{want:g}", _mark(_met(share, want))]
    return [*row, f"{taken['apart']:.0e}" if "apart" in taken else ""]


def best(figures: dict[str, Any], unit: str) -> float | None:
    """The least of transformers' own."""
    return min((figures[name][unit] for name in TODAY if unit in figures.get(name, {})), default=None)


def _cell(found: dict[str, Any] | None, unit: str, notes: list[str]) -> str:
    if not found:
        return ""
    if unit in found:
        return _short(found[unit])
    if "does not support" in found["why"] or "KeyError: 'sdpa'" in found["why"]:
        return "none"
    if found["why"] not in notes:
        notes.append(found["why"].replace("|", "\\|"))
    return f"no ({notes.index(found['why']) + 1})"


# the command


def main(given_words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only models whose name begins so")
    parser.add_argument("--passes", nargs="+", choices=list(PASSES), help="cpu: forward, gpu: both unless given")
    parser.add_argument("--only", choices=("time", "memory"), help="keep the other figures as they are")
    parser.add_argument("--repeat", type=int, default=5, help="rounds at the most, of which the best counts")
    parser.add_argument("--seconds", type=float, help="of a race, about (cpu: 12, gpu: 2)")
    parser.add_argument("--table", action="store_true", help="write the Markdown from the JSON, measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args(given_words)
    warnings.simplefilter("ignore")
    if given.peak:
        name, contender, mode = json.loads(given.peak)
        print(json.dumps(peak(next(m for m in MODELS if m.name == name), contender, mode)))
        return
    if given.suite == "gpu" and not torch.cuda.is_available():
        raise SystemExit("gpu: expected a CUDA device, found none")
    chosen = [m for m in MODELS if not given.case or any(m.name.lower().startswith(c.lower()) for c in given.case)]
    if not chosen:
        raise SystemExit(f"--case: expected a model of {', '.join(m.name for m in MODELS)}, found {given.case}")
    store = given.out / f"huggingface-{given.suite}.json"
    results: dict[str, Any] = {"suite": given.suite, "machine": {}, "date": "", "cases": {}}
    if store.is_file():
        results = json.loads(store.read_text(encoding="utf-8"))
    if not given.table:
        import transformers

        transformers.logging.set_verbosity_error()
        results |= {"machine": machine("cuda" if given.suite == "gpu" else "cpu"), "date": day()}
        results["machine"]["transformers"] = transformers.__version__
        for model in chosen:
            began = time.perf_counter()
            results["cases"][model.name] = measured(model, results["cases"].get(model.name, {}), given)
            _write(results, store)
            print(_line(model.name, results["cases"][model.name]), f"[{time.perf_counter() - began:.0f} s]", flush=True)
    _write(results, store)


def measured(model: Model, before: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """New figures in place of those before."""
    s = Setting(model, given.suite)
    found: dict[str, Any] = {
        "tokens": model.count(s.tokens),
        "time": before.get("time", {}),
        "memory": before.get("memory", {}),
    }
    for mode in given.passes or (["forward"] if given.suite == "cpu" else list(PASSES)):
        if given.only != "memory":
            found["time"][mode] = times(s, mode, given.repeat, given.seconds or (12.0 if given.suite == "cpu" else 2.0))
        if given.only != "time":
            found["memory"][mode] = memory(s, given.suite, mode)
        _empty(s.device)
    return found


def _line(name: str, case: dict[str, Any]) -> str:
    parts = [name]
    for kind, unit in (("time", "ms"), ("memory", "MiB")):
        for mode, figures in case[kind].items():
            known = {x: figures.get(x, {}) for x in (*TODAY, OURS)}
            parts.append(f"{mode} " + ", ".join(f"{x} {f[unit]:.0f} {unit}" for x, f in known.items() if unit in f))
            parts += [f"{x}: {f['why']}" for x, f in known.items() if "why" in f and x == OURS]
    return "; ".join(parts)


def _write(results: dict[str, Any], store: Path) -> None:
    """In the order of MODELS, whatever was measured last."""
    results["cases"] = {m.name: results["cases"][m.name] for m in MODELS if m.name in results["cases"]}
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    store.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
