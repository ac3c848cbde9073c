"""Reading the project's documents as programs: code blocks with the output they promise, links, trees.

In a document, ```python is code that runs, in order, in one namespace per document; a ```text right after it is
what it prints. Code whose first line names a file of the package stands for what is written into that file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Example(NamedTuple):
    line: int
    code: str
    prints: str | None


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(text: str) -> list[tuple[int, int, str, str]]:
    """Fenced blocks: first line, line after the last, language, body."""
    found, lines, at = [], text.splitlines(), 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].rstrip() == "```")
            found.append((at + 1, end + 1, lines[at][3:].strip(), "\n".join(lines[at + 1 : end]) + "\n"))
            at = end
        at += 1
    return found


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    lines: list[str] = text.splitlines()
    for first, last, _, _ in reversed(fences(text)):
        del lines[first - 1 : last]
    return "\n".join(lines)


def examples(text: str) -> list[Example]:
    """Every ```python block, with the ```text that follows it."""
    blocks, found = fences(text), []
    lines = text.splitlines()
    for n, (first, last, language, body) in enumerate(blocks):
        if language != "python":
            continue
        prints = None
        if (
            n + 1 < len(blocks)
            and blocks[n + 1][2] == "text"
            and not "".join(lines[last : blocks[n + 1][0] - 1]).strip()
        ):
            prints = blocks[n + 1][3]
        found.append(Example(first, body, prints))
    return found


def run(name: str, example: Example, namespace: dict[str, Any], patch: pytest.MonkeyPatch) -> str:
    """What an example prints."""
    code = compile("\n" * example.line + example.code, name, "exec")
    file = re.match(r"# src/(regard/[\w/]+)\.py\n", example.code)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if file:
            _write_into(file[1].replace("/", "."), code, patch)
        else:
            exec(code, namespace)
    return said.getvalue()


def _write_into(module_name: str, code: Any, patch: pytest.MonkeyPatch) -> None:
    """Put code into a module of the package, new or there already, until the test ends."""
    if importlib.util.find_spec(module_name) is None:
        module = ModuleType(module_name)
        module.__package__ = module_name.rpartition(".")[0]
        patch.setitem(sys.modules, module_name, module)
        exec(code, vars(module))
        return
    module, scratch = importlib.import_module(module_name), {}
    exec(code, scratch)
    for name in set(scratch) - {"__builtins__"}:
        assert hasattr(module, name), f"{module_name} has no {name} to replace"
        patch.setattr(module, name, scratch[name])
    for value in vars(module).values():  # a process that starts with this file has cached nothing
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def links(text: str) -> list[str]:
    """Targets of links and pictures, in Markdown or HTML."""
    body = prose(text)
    return re.findall(r"\]\(([^)\s]+)\)", body) + re.findall(r"(?:src|href)=\"([^\"]+)\"", body)


def anchors(text: str) -> set[str]:
    """The names of a document's headings, as links spell them."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(name: str) -> list[str]:
    """Links of a document that lead nowhere: no such file in the project, or no such heading in it."""
    broken = []
    for link in links(text_of(name)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        inside = target.resolve().is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def tree(text: str) -> list[tuple[str, str]]:
    """The annotated tree of a document: paths (folders end in /) and what is said of each."""
    ((_, _, _, body),) = [block for block in fences(text) if block[2] == "text" and block[3].startswith("regard/\n")]
    found: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in body.splitlines()[1:]:
        branch = re.match(r"((?:│   |    )*)[├└]── (\S+) *(.*)$", line)
        assert branch, f"a line of the tree that is not one: {line!r}"
        depth, name, words = len(branch[1]) // 4, branch[2], branch[3]
        parents = [*parents[:depth], name]
        found.append(("".join(parents), words))
    return found
