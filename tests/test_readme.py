"""The README is true: code prints what it says, the tree is the real one, links resolve, the point comes first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from documents import ROOT, broken_links, examples, fences, run, text_of, tree

README = text_of("README.md")


def test_code_prints_what_the_readme_says(monkeypatch):
    found = examples(README)
    assert found and all(example.prints for example in found)
    for example in found:
        namespace = {"__name__": "readme"}
        assert run("README.md", example, namespace, monkeypatch) == example.prints


def test_the_first_minute():
    """Installing and working code are on the first screen."""
    shells = [(line, body) for line, _, language, body in fences(README) if language == "sh"]
    assert any("make look" in body and "make test" in body for _, body in shells)
    install = next(line for line, body in shells if "pip install ." in body)
    assert install <= 23
    assert examples(README)[0].line <= 28
    statements = [line for line in examples(README)[0].code.splitlines() if line.strip() and "import" not in line]
    assert len(statements) <= 10


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_resolve(name):
    assert not broken_links(name)


def test_make_knows_the_commands_that_are_named():
    rules = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        shown = set(
            re.findall(r"^make (\w+)", "".join(b for _, _, lang, b in fences(text_of(name)) if lang == "sh"), re.M)
        )
        assert shown and shown <= rules


def test_everything_in_the_tree_exists_and_is_explained():
    listed = tree(README)
    assert len({path for path, _ in listed}) == len(listed)
    for path, words in listed:
        target = ROOT / path
        assert target.is_dir() if path.endswith("/") else target.is_file(), f"the tree names {path}"
        assert words, f"the tree says nothing of {path}"


def in_its_folders_table(path: str) -> bool:
    """Whether a folder that has a table of its files (in the words of its __init__.py) has a row for this one."""
    folder = ROOT / Path(path).parent
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return any(Path(path).stem in re.split(r",\s*", row) for row in re.findall(r"^\| ([\w, ]+) \|", words, re.M))


def test_every_module_is_in_the_tree():
    listed = {path for path, _ in tree(README)}
    modules = {
        str(path.relative_to(ROOT)) for path in (ROOT / "src/regard").rglob("*.py") if path.name != "__init__.py"
    } | {"src/regard/__init__.py"}
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "src/regard").rglob("__init__.py")}
    missing = {path for path in (modules | folders) - listed if path in folders or not in_its_folders_table(path)}
    assert not missing, f"the tree lacks {sorted(missing)}"


def test_the_package_shows_this_readme():
    assert re.search(r'^readme = "README.md"$', text_of("pyproject.toml"), re.M)
