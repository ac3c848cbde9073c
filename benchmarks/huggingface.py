"""Models of Hugging Face on Regard beside what they run on today: time and peak memory of one layer.

    python benchmarks/huggingface.py cpu [--case NAME ...] [--repeat R] [--passes forward training] [--only error]
    python benchmarks/huggingface.py gpu

Each model has one layer of 768 with 12 heads and random weights. It is made once for every attention that
transformers offers for it (eager and sdpa, where it has them) and once more for Regard, all with the same weights.
The contenders take turns, so that a drifting clock hits all; each keeps its best round, and "today" is the best of
transformers' own. Memory: see measure.py.

Error: the same model, weights and inputs in the next wider type (float64 for float32, float32 for bfloat16) is the
oracle. Regard's error may be twice that of the model's own attention in the same type, and a rounding; where it is
more, no speed is shown. The error of an output is its largest, over the largest number; that of training is over all
gradients at once, as lengths of vectors: some gradients are zero but for rounding (a bias of keys), and have no error
of their own.

cpu: float32, one row, 2048 tokens (T5 8192, SAM its 64 x 64), errors at 1024. gpu: bfloat16, four rows, 4096 tokens,
errors on one row.
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
ORACLE = "oracle"
KINDS = ("error", "time", "memory")
#: the oracle's type, and the most tokens of which an error is taken
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
MOST = {"cpu": 1024, "gpu": 4096}


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

    def __init__(self, model: Model, suite: str, tokens: int | None = None, rows: int | None = None):
        usual_rows, usual, self.dtype = SUITES[suite]
        self.model, self.rows = model, rows or usual_rows
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

    def inputs(self, contender: nn.Module) -> dict[str, Tensor]:
        """The same for every contender."""
        torch.manual_seed(1)
        with torch.no_grad(), torch.device(self.device):
            given = self.model.feed(contender, self.rows, self.tokens)
        return {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in given.items()}

    def d_out(self, out: Tensor) -> Tensor:
        """The gradient of the output, the same for every contender. (Ones would come to nothing behind a norm.)"""
        numbers = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        return numbers.to(self.device, self.dtype).to(out.dtype)

    def way(self, contender: nn.Module, mode: str, inputs: dict[str, Tensor] | None = None) -> Callable[[], Tensor]:
        """A function of nothing: the output; in training, with the gradients of everything learned."""
        inputs = self.inputs(contender) if inputs is None else inputs
        call = self.model.call(contender)
        asked: list[Tensor] = []

        def run() -> Tensor:
            with torch.set_grad_enabled(mode == "training"):
                found = call(**inputs)
                out = found if isinstance(found, Tensor) else found[0]
                if mode == "training":
                    contender.zero_grad(set_to_none=True)
                    if not asked:
                        asked.append(self.d_out(out))
                    out.backward(asked[0])
            return out.detach()

        return run


def ways_of(s: Setting, mode: str) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Every contender that runs, and why the others do not."""
    ways, why = {}, {}
    for name in (*s.model.today, OURS):
        try:
            way = s.way(s.contender(name), mode)
            way()
            ways[name] = way
        except Exception as error:  # whatever a model raises is its answer
            why[name] = reason(error)
        _empty(s.device)
    return ways, why


def _times(s: Setting, ways: dict[str, Callable[[], Tensor]], repeat: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of each contender."""
    taken = Clock(s.device, repeat).race(ways, seconds)
    return {name: {"ms": round(x * 1000, 3)} for name, x in taken.items()}


# error


def errors(model: Model, suite: str, mode: str) -> dict[str, float]:
    """How far each contender is from the oracle."""
    usual = Setting(model, suite)
    s = Setting(model, suite, tokens=min(usual.tokens, MOST[suite]), rows=1)
    found: dict[str, float] = {}
    exact: list[Tensor] = []
    for name in (ORACLE, *model.today, OURS):
        try:
            contender = s.contender(model.today[0] if name == ORACLE else name)
            inputs = s.inputs(contender)
            if name == ORACLE:  # of the numbers that the others compute with: rounded once, and then held wider
                wide = WIDER[s.dtype]
                contender = contender.to(wide)
                inputs = {key: x.to(wide) if x.is_floating_point() else x for key, x in inputs.items()}
            out = s.way(contender, mode, inputs)()
            gradients = [p.grad for p in contender.parameters() if p.grad is not None]
            made = [out] if mode == "forward" else gradients
            if name == ORACLE:
                exact = made
            else:
                found[name] = distance(made, exact, mode)
        except Exception as error:
            if name == ORACLE:
                raise
            if name == OURS:
                found["why"] = reason(error)  # type: ignore[assignment]
        _empty(s.device)
    return found


def distance(made: list[Tensor], exact: list[Tensor], mode: str) -> float:
    """Of an output, the largest error over the largest number; of gradients, lengths of all together."""
    pairs = [(x.double(), y.double()) for x, y in zip(made, exact, strict=True)]
    if mode == "forward":
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    return math.sqrt(
        sum(float((x - y).square().sum()) for x, y in pairs) / sum(float(y.square().sum()) for _, y in pairs)
    )


def too_far(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """Why Regard's figures do not count, or None."""
    if "why" in found:
        return str(found["why"])
    if OURS not in found:
        return None
    own = found.get(TODAY[0], found.get(TODAY[1], 0.0))
    if found[OURS] <= 2 * own + torch.finfo(dtype).eps:
        return None
    return f"its error is {found[OURS]:.1e}, and that of the model's own attention {own:.1e}"


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# memory


def memory(s: Setting, suite: str, mode: str, ways: dict[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """Peak MiB of each contender above its weights and inputs."""
    if suite == "gpu":
        return {name: {"MiB": round(_allocated(way), 1)} for name, way in ways.items()}
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
             "share", "target", "", "error today", "Regard"],
            lines,
        ),
        f"Error: against the same model in {str(WIDER[dtype]).removeprefix('torch.')}, with one row of at most "
        f"{MOST[suite]} tokens. Forward: the largest, over the largest number of the output; forward + backward: of "
        "all gradients together, as the length of a vector. That of the model's eager attention, where there is one, "
        "is today's; Regard may have twice as much, plus a rounding.",
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
    error = case.get("error", {}).get(mode, {})
    own = error.get(TODAY[0], error.get(TODAY[1]))
    return [*row, *("" if x is None else f"{x:.0e}" for x in (own, error.get(OURS)))]


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
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="keep the other figures")
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
    """New figures in place of those before. A pass that breaks says so in its place."""
    s = Setting(model, given.suite)
    found: dict[str, Any] = {"tokens": model.count(s.tokens), **{kind: dict(before.get(kind, {})) for kind in KINDS}}
    for mode in given.passes or (["forward"] if given.suite == "cpu" else list(PASSES)):
        try:
            for kind, figures in passed(s, mode, given, found["error"].get(mode, {})).items():
                found[kind][mode] = figures
        except Exception as error:  # memory that is not there, for one: the other models go on
            found["time"][mode] = {OURS: {"why": reason(error)}}
        _empty(s.device)
    return found


def passed(s: Setting, mode: str, given: argparse.Namespace, known: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Error, time and memory of one model in one pass, those that are asked for; `known`: its error before."""
    found: dict[str, dict[str, Any]] = {}
    if "error" in given.only:
        found["error"] = errors(s.model, given.suite, mode)
    far = too_far(found.get("error", known), s.dtype)
    timed, weighed = "time" in given.only, "memory" in given.only
    if not timed and not (weighed and given.suite == "gpu"):
        return found | ({"memory": memory(s, given.suite, mode, {})} if weighed else {})
    ways, why = ways_of(s, mode)
    failed = {name: {"why": words} for name, words in why.items()}
    if timed:
        found["time"] = failed | _times(s, ways, given.repeat, given.seconds or (12.0 if given.suite == "cpu" else 2.0))
        if far is not None:
            found["time"][OURS] = {"why": far}
    if weighed:
        found["memory"] = failed | memory(s, given.suite, mode, ways)
    return found


def _line(name: str, case: dict[str, Any]) -> str:
    parts = [name]
    for kind, unit in (("time", "ms"), ("memory", "MiB")):
        for mode, figures in case.get(kind, {}).items():
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
