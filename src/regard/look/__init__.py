"""`regard look`: a text, a model, and what its heads look at. The command line reads arguments and calls `look`.

| file | what it does |
|---|---|
| report | what is printed |
| parts | encoder, decoder, and the one's look at the other |
| steps | what stands on the screen meanwhile |
| doctor | what is usable on this machine |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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
from .parts import Part, absent, open_pair, parts_of
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
        trace, shown = _found(request, step, say)
        done = []
        if request.save is not None:
            _written(request.save, trace.save)
            done.append(say("saved", path=request.save, size=_size(request.save)))
        if request.out is not None:
            step(say("drawing"))
            for path in _draw(request.out, shown, request.language, say):
                done.append(say("wrote", path=path, size=_size(path)))
    if request.json:
        print(json.dumps(document(shown), ensure_ascii=False))
        return
    several = len(shown) > 1
    for part, findings in shown:
        report = Report(console, findings, request.language)
        report.show(part.heading(request.language) if several else None, first=findings is shown[0][1])
    for sentence in done or [say("next")]:
        report.words(sentence)


#: a part of what a model looks at, and what there is to say about it
Shown = list[tuple[Part, Findings]]


def document(shown: Shown) -> dict[str, Any]:
    """Findings for programs, with who made them: the first part, and the others under "parts"."""
    (first, findings), *rest = shown
    found = {"regard": __version__, **findings.to_json()}
    if rest:
        found["part"] = first.name
        found["parts"] = [{"part": part.name, **more.to_json()} for part, more in rest]
    return found


def _check_paths(request: Request) -> None:
    """Before anything is computed: can the results be written where they should?"""
    if request.out is not None and Path(request.out).suffix.lower() not in ENDINGS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(ENDINGS)}, found {request.out!r}")
    for name, path in (("--out", request.out), ("--save", request.save)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{name}: there is no folder {str(Path(path).parent)!r}")


def _found(request: Request, step: Step, say: Callable[..., str]) -> tuple[Trace, Shown]:
    text = subjects.read_text(request.text)
    notes: list[str] = []
    if isinstance(text, Path):
        trace, name, said = Trace.open(text), text.name, None
    else:
        step(say("opening"))
        pair = open_pair(request.model, text)
        subject = subjects.open_model(request.model, text) if pair is None else pair[0]
        told = step(say("reading"))
        trace, name, said = _recorded(subject, told), subject.name, text
        notes = [say(key, **numbers) for key, numbers in subject.notes]
        notes += [] if pair is None else [pair[1].sentence(request.language)]
    parts, others = parts_of(trace)
    if others:
        notes.append(say("note_part", part="; ".join(part.name for part in parts), others="; ".join(others)))
    told = step(say("looking"))
    asked = [part for part in parts if part.holds(request.layer, request.head)] or parts  # else each says what it has
    shown: Shown = []
    for part in parts:
        layer, head = (request.layer, request.head) if part in asked else (None, None)
        findings = gather(part.trace, model=name, text=said, layer=layer, head=head, report=told)
        if part not in asked:
            findings.notes.append(absent(request.layer, request.head, request.language))
        shown.append((part, findings))
    shown[0][1].notes += [*notes, *trace.notes]
    return trace, shown


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


def _draw(path: str, shown: Shown, language: str, say: Callable[..., str]) -> list[str]:
    """Write a picture or a page of each part, or numbers of all; gives their names."""
    ending = Path(path).suffix.lower()
    if ending == ".json":
        text = json.dumps(document(shown), ensure_ascii=False, indent=1)
        _written(path, lambda p: Path(p).write_text(text + "\n", encoding="utf-8"))
        return [path]
    names = [path]
    for part, _ in shown[1:]:
        names.append(str(Path(path).with_stem(f"{Path(path).stem}-{part.stack}-{part.kind}")))
    for name, (_, findings) in zip(names, shown, strict=True):
        draw = _page if ending == ".html" else figure.draw
        missing = _written(name, partial(draw, findings, language=language))
        if missing:
            findings.notes.append(say("note_glyphs", characters=missing, package=package_for(missing)))
    return names


def _page(findings: Findings, path: str, language: str) -> None:
    Path(path).write_text(page.page(findings, language), encoding="utf-8")


def _written(path: str, write: Callable[[str], Any]) -> Any:
    try:
        return write(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}") from None


def _size(path: str) -> str:
    size = Path(path).stat().st_size
    power = next((n for n in range(3) if size < 1024 ** (n + 1)), 3)
    return f"{size / 1024**power:.0f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
