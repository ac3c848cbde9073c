"""`regard look`: a text, a model, and what its heads look at. The command line reads arguments and calls `look`.

| file | what it does |
|---|---|
| report | what is printed |
| steps | what stands on the screen meanwhile |
| doctor | what is usable on this machine |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .. import __version__, subjects
from ..trace import Trace, record
from ..views import figure, page
from ..views.findings import Findings, gather
from ..views.fonts import package_for
from ..views.words import says
from ..watching import listening
from .report import Report
from .steps import Step, steps

#: what --out writes
ENDINGS = (".html", *figure.ENDINGS, ".json")


class Request(NamedTuple):
    """What was asked for on the command line."""

    text: str | None = None  # a text, the name of a file, or "-"
    model: str = subjects.EMBEDDED
    layer: int | None = None
    head: int | None = None
    out: str | None = None
    save: str | None = None
    json: bool = False
    language: str = "en"


def look(request: Request, console: Console) -> None:
    """Do what was asked for. What is wrong with it is a ValueError of one sentence."""
    say = says(request.language)
    _check_paths(request)
    with steps() as step:
        trace, findings = _found(request, step, say)
        done = []
        if request.save is not None:
            _written(request.save, trace.save)
            done.append(say("saved", path=request.save, size=_size(request.save)))
        if request.out is not None:
            step(say("drawing"))
            findings.notes += _draw(request.out, findings, request.language, say)
            done.append(say("wrote", path=request.out, size=_size(request.out)))
    if request.json:
        print(json.dumps(document(findings), ensure_ascii=False))
        return
    report = Report(console, findings, request.language)
    report.show()
    for sentence in done or [say("next")]:
        report.words(sentence)


def document(findings: Findings) -> dict[str, Any]:
    """Findings for programs, with who made them."""
    return {"regard": __version__, **findings.to_json()}


def _check_paths(request: Request) -> None:
    """Before anything is computed: can the results be written where they should?"""
    if request.out is not None and Path(request.out).suffix.lower() not in ENDINGS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(ENDINGS)}, found {request.out!r}")
    for name, path in (("--out", request.out), ("--save", request.save)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{name}: there is no folder {str(Path(path).parent)!r}")


def _found(request: Request, step: Step, say: Callable[..., str]) -> tuple[Trace, Findings]:
    text = subjects.read_text(request.text)
    notes: list[str] = []
    if isinstance(text, Path):
        trace, name, said = Trace.open(text), text.name, None
        part, others = _one_kind(trace)
        first = part.looks[0]
        notes = [say("note_part", part=f"{first.stack}, {first.kind}", others="; ".join(others))] if others else []
    else:
        step(say("opening"))
        subject = subjects.open_model(request.model, text)
        told = step(say("reading"))
        trace, name, said = _recorded(subject, told), subject.name, text
        notes = [say(key, **numbers) for key, numbers in subject.notes]
        part = trace
    told = step(say("looking"))
    findings = gather(part, model=name, text=said, layer=request.layer, head=request.head, report=told)
    findings.notes += [*notes, *trace.notes]
    return trace, findings


def _one_kind(trace: Trace) -> tuple[Trace, list[str]]:
    """One stack, kind, run and batch row of a trace, for a look is about one text; and what is left out."""
    first = trace.looks[0]
    part = trace.only(stack=first.stack, kind=first.kind, run=first.run)
    there = dict.fromkeys((look.stack, look.kind, look.run) for look in trace.looks)
    others = [f"{stack}, {kind}" + f", run {run}" * bool(run) for stack, kind, run in list(there)[1:]]
    if first.batch == 1:
        return part, others
    return part.row(0), [*others, f"rows 1 to {first.batch - 1} of the batch"]


def _recorded(subject: subjects.Subject, told: Callable[[int, int], None]) -> Trace:
    """The trace of a model that reads the text."""
    count = 0

    def attended(*_: Any) -> None:
        nonlocal count
        if subject.layers:
            told(min(count, subject.layers), subject.layers)
        count += 1

    try:
        with record(subject.model, tokenizer=subject.tokenizer) as trace, listening(attended):
            subject.read()
    except (ValueError, RuntimeError, ImportError) as error:  # a model that regard does not run, with the reason
        raise ValueError(f"--model {subject.name}: {error}") from error
    return trace


def _draw(path: str, findings: Findings, language: str, say: Callable[..., str]) -> list[str]:
    """Write a picture, a page or numbers; what is to be said about it."""
    ending = Path(path).suffix.lower()
    if ending == ".json":
        text = json.dumps(document(findings), ensure_ascii=False, indent=1)
        _written(path, lambda p: Path(p).write_text(text + "\n", encoding="utf-8"))
    elif ending == ".html":
        text = page.page(findings, language)
        _written(path, lambda p: Path(p).write_text(text, encoding="utf-8"))
    else:
        missing = _written(path, lambda p: figure.draw(findings, p, language))
        if missing:
            return [say("note_glyphs", characters=missing, package=package_for(missing))]
    return []


def _written(path: str, write: Callable[[str], Any]) -> Any:
    try:
        return write(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}") from None


def _size(path: str) -> str:
    size = Path(path).stat().st_size
    power = next((n for n in range(3) if size < 1024 ** (n + 1)), 3)
    return f"{size / 1024**power:.0f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
