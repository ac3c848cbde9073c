"""The command: what it prints, how it fails, and that help does not wait for torch."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import regard as rg
from regard import cli
from regard.lessons import PARTS


def code_of(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_version(capsys):
    assert code_of("--version") == 0
    assert capsys.readouterr().out == f"regard {rg.__version__}\n"


def test_help_names_the_parts(capsys):
    assert code_of("look", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(part in shown for part in PARTS) and "--language en|zh" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "regard: expected a command, such as: regard look"),
        (("look", "--only", "x"), f"regard: argument --only: expected one of {', '.join(PARTS)}, found 'x'"),
        (("look", "--language", "fr"), "regard: argument --language: expected one of en, zh, found 'fr'"),
        (("look", "more"), "regard: unrecognized arguments: more"),
    ],
)
def test_mistakes_are_one_sentence_and_code_2(capsys, arguments, message):
    assert code_of(*arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", message + "\n")


def test_an_unknown_command(capsys):
    assert code_of("lok") == 2
    assert capsys.readouterr().err.startswith("regard: ") and len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.parametrize(("language", "words"), [("en", "The soft look-up"), ("zh", "软查找")])
def test_look(capsys, language, words):
    assert code_of("look", "--language", language, "--only", "lookup") == 0
    shown = capsys.readouterr()
    assert words in shown.out and "45.0769" in shown.out and not shown.err


@pytest.mark.parametrize("more", [(), ("--no-color",)])
def test_no_color_leaves_no_colour(capsys, monkeypatch, more):
    """In a terminal with colours: with --no-color none is set, without it some are."""
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert code_of("look", "--only", "cache", *more) == 0
    shown = capsys.readouterr().out
    assert ("48;2;" in shown) is not bool(more)
    assert ("░" in shown) is bool(more)


def test_a_terminal_without_chinese_shows_question_marks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert code_of("look", "--only", "sentence") == 0
    sys.stdout.flush()
    assert b"Looking at a sentence" in raw.getvalue() and b"????" in raw.getvalue()


def test_python_m_regard():
    found = subprocess.run(
        [sys.executable, "-m", "regard", "look", "--only", "cache"], capture_output=True, encoding="utf-8", timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "") and "1496" in found.stdout


def test_arguments_are_read_before_torch_is_imported():
    code = (
        "import sys\nfrom regard.cli import main\n"
        "for arguments in (['--help'], ['look', '--help'], ['--version'], ['look', '--only', 'x']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0
    assert found.stderr.splitlines()[-1] == "[]"
