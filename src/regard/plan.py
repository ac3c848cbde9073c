"""The plan: which engine runs a normal form, what was rewritten on the way, and why not a faster engine.

A plan is made from structure (form, device, dtype), never from lengths, is cached by it, and prints itself.
This is the only module that names engines; everything else asks a plan for its engine.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from .normal import Form, Piece, Problem, decode, plain_tuple

log = logging.getLogger("regard")

#: engines from the fastest to the slowest; the last stores A and runs only when asked: the one before it takes all
ENGINES = ("cpu", "triton", "tiled", "reference")
#: those that read tables by bins
BY_BINS = ("triton",)


@dataclass(frozen=True)
class Plan:
    """How one A is computed. `print(A.plan)` shows it."""

    engine: str
    form: Form
    device: str
    dtype: str
    refused: tuple[tuple[str, str], ...]  # faster engines, and why each was not taken
    spec: str  # the same as text, for the operators
    remark: str | None = None  # what these tensors, besides their form, mean for it

    @property
    def module(self) -> ModuleType:
        """The engine: a module with forward, backward, tile and reduce."""
        return engine_module(self.engine)

    @property
    def fused(self) -> bool:
        """The engine has kernels of its own: it is not the one of plain operations, which takes everything."""
        return self.module is not universal()

    def __str__(self) -> str:
        form = self.form
        rows = [("engine", f"{self.engine} ({self.device}, {self.dtype})")]
        rows += [("not", f"{name}: {reason}") for name, reason in self.refused]
        note = getattr(self.module, "note", lambda: None)()
        rows += [("note", words) for words in (note, self.remark) if words is not None]
        rows.append(("content", _content(form)))
        rows += [("", text) for text in form.rewrites]
        rows += [("+", f"{piece.label}  ->  {_piece(piece)}") for piece in form.pieces]
        if form.softcap is not None:
            rows.append(("softcap", f"{form.softcap:g} * tanh(logit / {form.softcap:g})"))
        if form.mask is not None:
            rows.append(("mask", _mask(form.mask)))
        if form.sink >= 0:
            rows.append(("sink", "one logit a head that takes weight and gives no value"))
        if form.dropout:
            rows.append(("dropout", f"{form.dropout:g}, in products only"))
        return "\n".join(f"{name:>8}  {text}" for name, text in rows)


def plan(form: Form, device: torch.device, dtype: torch.dtype, engine: str | None) -> Plan:
    """The plan for a form; the same object for the same structure."""
    return _plan(form, device.type, _name(dtype), engine)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wants_bins(device: str, engine: str | None) -> bool:
    """Lower with tables by bins: the engine that reads them so is asked for, or is the first on this device."""
    return engine in BY_BINS or (engine is None and device == "cuda")


def reads_bins(problem: Problem, engine: str | None) -> bool:
    """The engine that takes this problem reads its tables by bins. One that cannot take it says so when it is used."""
    try:
        return plan(problem.form, problem.q.device, problem.q.dtype, engine).engine in BY_BINS
    except ValueError:
        return False


def remarked(made: Plan, problem: Problem) -> Plan:
    """The same plan, with what its engine has to say of these tensors."""
    words = getattr(made.module, "remark", lambda problem: None)(problem)
    return made if words is None else replace(made, remark=words)


def plan_spec(form: tuple, device: str, dtype: str, engine: str | None) -> str:
    """A plan's text: what is left of planning in a compiled graph."""
    return _plan(form, device, dtype, engine).spec


def check_engine(engine: str | None) -> None:
    """Raise unless there is an engine of this name."""
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, found {engine!r}")


# What torch.compiler.assume_constant_result does, without importing the compiler, which takes a second.
plan_spec._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _plan(form: tuple, device: str, dtype: str, engine: str | None) -> Plan:
    """`form` may be plain tuples too: they are equal to it, and find the same plan."""
    check_engine(engine)
    form = plain_tuple(Form(*form))
    structure = decode(repr(("", form)))[1]
    refused: list[tuple[str, str]] = []
    for chosen in ENGINES if engine is None else (engine,):
        reason = engine_module(chosen).refuse(structure, device, dtype)
        if reason is None:
            break
        refused.append((chosen, reason))
    else:
        raise ValueError("engine: " + "; ".join(f"{name} cannot run this: {reason}" for name, reason in refused))
    made = Plan(chosen, structure, device, dtype, tuple(refused), repr((chosen, form)))
    log.debug("new plan\n%s", made)
    return made


def by_definition(engine: str | None) -> bool:
    """The engine asked for reads the description itself, and needs no operator."""
    return engine == "reference"


def definition() -> ModuleType:
    """The engine everything is judged against, for steps and for single equations."""
    return engine_module("reference")


def universal() -> ModuleType:
    """The engine that takes every description, for what needs no speed."""
    return engine_module("tiled")


@functools.cache
def engine_module(name: str) -> ModuleType:
    """An engine by name, imported when first used."""
    return importlib.import_module(f".engines.{name}", __package__)


def _content(form: Form) -> str:
    kinds = {"dot": "<q, k>", "squared": "-|q - k|^2 / 2, keys too far apart for a dot product"}
    kind = kinds.get(form.content[0]) or f"-{form.content[1]:g} log |q - k|"
    return f"scale * {kind}" + (", scale a tensor" if form.scale >= 0 else "")


def _piece(piece: Piece) -> str:
    where = {"line": "i - j", "grid": "displacement on the grid", "points": "displacement between points"}
    at = where[piece.space[0]] if piece.space else ""
    what = {
        "vector": "a bias per query or key",
        "table": f"table b[head, {at}]",
        "slope": "slope times distance, computed",
        "query": f"<u_i, R[{at}]>",
        "key": f"<w_j, R[{at}]>",
        "dot": "a second dot product (addition theorem)",
        "network": "a network, evaluated pair by pair",
    }[piece.kind]
    if piece.lookup >= 0 and piece.kind != "table":
        what += ", R kept by bins"
    if piece.reach is not None and piece.kind != "vector":
        what += f", constant from {piece.reach} on"
    return what + (", gated" if piece.gate >= 0 else "")


def _mask(mask: tuple) -> str:
    kind = mask[0]
    if kind in ("and", "or"):
        return "(" + f" {'&' if kind == 'and' else '|'} ".join(map(_mask, mask[1:])) + ")"
    if kind == "not":
        return f"~{_mask(mask[1])}"
    if kind == "within":
        lo, hi = mask[1:]
        if (lo, hi) == (0, None):
            return "causal"
        return f"{'' if lo is None else f'{lo} <= '}i - j{'' if hi is None else f' <= {hi}'}"
    if kind == "box":
        return f"{list(mask[1])} <= δ <= {list(mask[2])}"
    if kind == "range":
        return f"{mask[2]} <= {'key' if mask[1] == 'k' else 'query'} <= {mask[3]}"
    names = {"before": "lengths", "same": "same id", "dense": "dense", "nearest": "nearest", "chosen": "chosen keys"}
    return names[kind]
