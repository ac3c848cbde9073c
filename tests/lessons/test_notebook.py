"""Lessons as notebooks: the same words and numbers as HTML, files that are valid, and cells that run."""

from __future__ import annotations

import html
import json
import re

import pytest
from rich.text import Text

from regard.lessons import LANGUAGES, PARTS, cache, lookup, notebook
from regard.lessons.picture import ACROSS, svg
from regard.views.terminal import VIRIDIS


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ("lookup", "cache", "quiz"))
def test_a_lesson_as_html_says_what_the_terminal_says(name, language):
    text, end = notebook.body(name, language)
    words = notebook._lesson(name, language).WORDS[language]
    plain = html.unescape(re.sub("<[^>]*>", "", text))
    assert words["title"] in plain and words["shows"].split("{")[0] in plain
    assert len(end) == 3 and "<details>" in end[1] and f"<code>regard lesson {_next(name)}</code>" in end[2]
    folded = html.unescape(re.sub("<[^>]*>", "", end[1].partition("<details>")[2]))
    assert words["answer"].split("{")[0] in folded and re.search(r"\d", folded)
    assert not re.search(r"<script|https?:(?!//www.w3.org/2000/svg\")|href|src=", text)
    opened = re.findall(r"<(\w+)", text)
    closed = re.findall(r"</(\w+)", text) + [tag.split()[0] for tag in re.findall(r"<(\w[^<>]*)/>", text)]
    assert sorted(opened) == sorted(closed)


def _next(name: str) -> str:
    return PARTS[(PARTS.index(name) + 1) % len(PARTS)]


def test_numbers_are_computed_when_shown(monkeypatch):
    assert "45.0769" in notebook.body("lookup")[0]
    monkeypatch.setattr(lookup, "VALUES", (40.0, 43.0, 68.0))
    assert "45.0769" not in notebook.body("lookup")[0]


def test_pictures_keep_their_colours_and_letters():
    text, _ = notebook.body("cache")
    assert text.count("<svg") == 2 and "&#x27;k&#x27;" in text
    assert {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in (VIRIDIS[0], VIRIDIS[-1])} <= set(re.findall(r"#\w{6}", text))
    assert str(cache.count().cached) in text


def test_words_are_escaped():
    assert notebook._marked("a < b and `x[0] < 1`") == "a &lt; b and <code>x[0] &lt; 1</code>"


@pytest.mark.parametrize("language", LANGUAGES)
def test_files_are_one_a_lesson_and_hold_no_numbers(tmp_path, language):
    paths = notebook.write(tmp_path / "new", language)
    assert [path.name for path in paths] == [f"{n:02}-{name}.ipynb" for n, name in enumerate(PARTS, 1)]
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["metadata"]["regard"] == {"language": language}
        assert not any(cell["outputs"] for cell in found["cells"] if cell["cell_type"] == "code")
        for cell in found["cells"][1:]:
            compile("".join(cell["source"]), path.name, "exec")


def test_what_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="language: expected one of en, zh, found 'fr'"):
        notebook.write(tmp_path / "none", "fr")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="name: expected one of lookup, "):
        notebook.body("nothing")
    assert notebook.main([]) == 2 and notebook.main([str(tmp_path), "fr"]) == 2
    assert "usage" in capsys.readouterr().err
    assert notebook.main([str(tmp_path), "zh"]) == 0 and len(capsys.readouterr().out.split()) == len(PARTS)


def test_files_are_valid_notebooks(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    for path in notebook.write(tmp_path):
        nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.slow
def test_cells_run():
    """All lessons in both languages in one kernel, each cell as a reader would run it."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    all_of_them = [
        cell | {"id": f"{language}-{cell['id']}"}
        for language in LANGUAGES
        for name in PARTS
        for cell in notebook.cells(name, language)
    ]
    book = nbformat.reads(json.dumps(notebook.book(all_of_them, "en")), as_version=4)
    nbclient.NotebookClient(book, timeout=None, kernel_name="python3").execute()
    shown = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert len(shown) == 3 * len(PARTS) * len(LANGUAGES) and all(shown)
    first = next(output for output in shown[0] if output.output_type == "display_data")
    assert "45.0769" in first.data["text/html"]


def test_every_lesson_is_there():
    assert list(notebook.LESSONS) == list(PARTS)


def test_spaces_are_not_stretched():
    """Letters that stand apart are set one by one: a browser draws several spaces as one."""
    found = re.findall(r'<text x="(\d+)"[^>]*textLength="(\d+)"[^>]*>([^<]*)</text>', svg(Text("ab c   d"), width=10))
    assert found == [("0", str(4 * ACROSS), "ab c"), (str(7 * ACROSS), str(ACROSS), "d")]
