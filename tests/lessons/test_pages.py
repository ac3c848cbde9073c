"""Lessons as pages: the same words and numbers as data, every word of a picture said, inputs refused by name."""

from __future__ import annotations

import inspect
import json
import re
import string
from pathlib import Path

import pytest
import torch

from regard.lessons import LANGUAGES, PARTS, inputs, notebook, pages, softmax

WEB = Path(pages.__file__).parents[1] / "views" / "web"
PLAYED = [name for name in PARTS if hasattr(notebook.LESSONS[name], "play")]


def script(name: str) -> str:
    return (WEB / f"lesson_{name}.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ("lookup", "softmax", "matrix", "quiz"))
def test_a_page_says_what_the_terminal_says(name, language):
    told = pages.told(name, language)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    words = notebook.LESSONS[name].WORDS[language]
    assert (told["title"], told["number"]) == (words["title"], PARTS.index(name) + 1)
    html = re.sub("<[^>]*>", "", notebook.body(name, language)[0])
    for block in told["blocks"]:
        if block["kind"] == "paragraph":
            assert inspect.cleandoc(block["text"]).replace("`", "")[:20] in re.sub(
                r"&[#\w]+;", lambda m: _plain(m[0]), html
            )
    assert told["code"] == notebook.LESSONS[name].TRY and told["answer"] and told["question"]


def _plain(entity: str) -> str:
    import html

    return html.unescape(entity)


def test_tables_and_pictures_keep_their_numbers():
    parts = [part for block in pages.told("softmax", "en")["blocks"] for part in block.get("parts", ())]
    kinds = [part["kind"] for part in parts]
    assert kinds.count("table") == 2 and kinds.count("bars") == 3
    shares = next(part for part in parts if part["kind"] == "bars")
    assert shares["values"] == softmax.softmax() and shares["texts"] == ["0.0055", "0.0000", "0.9943", "0.0002"]
    maps = [
        part
        for block in pages.told("matrix", "zh")["blocks"]
        for part in block.get("parts", ())
        if part["kind"] == "map"
    ]
    assert maps and maps[0]["rows"] == ["小", "沈", "阳"] and maps[0]["visible"][0] == [True, False, False]
    board = [part for block in pages.told("grid", "en")["blocks"] for part in block.get("parts", ())]
    assert any(part["kind"] == "picture" and part["svg"].startswith("<svg") for part in board)


def test_the_list_has_every_lesson_in_order():
    for language in LANGUAGES:
        told = pages.listed(language)
        assert [each["name"] for each in told["lessons"]] == list(PARTS)
        assert all(said.strip() for said in told["words"].values())
    assert set(pages.WORDS["en"]) == set(pages.WORDS["zh"])


def test_the_frame_says_only_words_there_are():
    used = set()
    for path in [WEB / "lessons.js", *WEB.glob("lesson_*.js")]:
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\.page\(\"(\w+)\"", text))
        if path.stem in ("lessons", "lesson_blocks", "lesson_stage"):
            used |= set(re.findall(r"(?<![.\w])say\(\"(\w+)\"", text))
    assert used == set(pages.WORDS["en"]) and len(used) > 10


@pytest.mark.parametrize("name", PLAYED)
def test_every_word_of_a_picture_is_there_and_said(name):
    """The script says each `play_...` of its lesson and no others: by name, or by a template."""
    text = script(name)
    words = {key.removeprefix("play_") for key in notebook.LESSONS[name].WORDS["en"] if key.startswith("play_")}
    said = set(re.findall(r"\bsay\(\"(\w+)\"", text))
    assert said <= words, f"said and not there: {said - words}"
    begun = {found for found in re.findall(r"\bsay\(`(\w+)\$\{", text)}
    ended = {found for found in re.findall(r"\bsay\(`\$\{\w+\}(\w+)`", text)}
    named = set(re.findall(r"\"(\w+)\"", text))  # a list of names, each of which is said
    left = {
        word for word in words - said - named if not word.startswith(tuple(begun)) and not word.endswith(tuple(ended))
    }
    assert not left, f"there and never said: {left}"
    assert all(any(word.startswith(each) for word in words) for each in begun)


@pytest.mark.parametrize("path", sorted(WEB.glob("lesson*.js")), ids=lambda path: path.stem)
def test_the_browser_draws_and_never_does_softmax(path):
    assert not re.search(r"Math\.(exp|log|sqrt|pow|tanh)|\*\*", path.read_text(encoding="utf-8").replace("/**", ""))


@pytest.mark.parametrize("name", PLAYED)
def test_words_of_a_picture_have_plain_places_and_the_same_in_both_languages(name):
    words = notebook.LESSONS[name].WORDS
    for key in (key for key in words["en"] if key.startswith("play_")):
        places = []
        for language in LANGUAGES:
            fields = [(f, spec) for _, f, spec, _ in string.Formatter().parse(words[language][key]) if f is not None]
            assert all(f and not spec for f, spec in fields), (
                f"{name}.{key}: the script puts formatted numbers into plain places"
            )
            places.append({f for f, _ in fields})
        assert places[0] == places[1], f"{name}.{key}"


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_picture_s_answer_is_json_and_gives_its_inputs_back(name, language):
    answer = pages.play(name, {}, language)
    json.dumps(answer, allow_nan=False)  # raises for what JSON does not know
    assert "bounds" in answer and set(answer["inputs"]) <= set(
        inspect.signature(notebook.LESSONS[name].play).parameters
    )
    again = pages.play(name, answer["inputs"], language)
    assert again == answer, "the inputs that are given back give the same picture"


@pytest.mark.parametrize("name", PLAYED)
def test_what_a_picture_does_not_take_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"inputs: {name} takes .*, found 'nonsense'"):
        pages.play(name, {"nonsense": 1}, "en")
    for key in pages.play(name, {}, "en")["inputs"]:
        for wrong in ({"a": 1}, [[["x"]]]):
            with pytest.raises(ValueError, match=rf"^{key}.*expected "):
                pages.play(name, {key: wrong}, "en")
            with pytest.raises(ValueError, match=rf"^{key}.*：应为.*，得到的是 "):
                pages.play(name, {key: wrong}, "zh")


def test_unknown_lessons_and_languages_are_refused():
    with pytest.raises(KeyError, match="lesson: expected one of lookup, "):
        pages.told("nothing", "en")
    with pytest.raises(ValueError, match="language: expected one of en, zh, found 'fr'"):
        pages.told("lookup", "fr")
    with pytest.raises(KeyError, match="lookup has no stream"):
        pages.stream("lookup", {}, "en")


def test_inputs_are_checked():
    assert inputs.number("x", 3, 0, 5) == 3.0 and inputs.whole("x", 3.0, 0, 5) == 3
    for check in (
        lambda: inputs.number("x", True, 0, 5),
        lambda: inputs.number("x", float("nan"), 0, 5),
        lambda: inputs.number("x", 5.1, 0, 5),
        lambda: inputs.whole("x", 2.5, 0, 5),
        lambda: inputs.numbers("x", [1], 0, 5, (2, 3)),
        lambda: inputs.numbers("x", "12", 0, 5, (2, 3)),
        lambda: inputs.matrix("x", [[1, 2]], 0, 5, (2, 2)),
        lambda: inputs.choice("x", 1.0, (1, 2)),
        lambda: inputs.truth("x", 1),
        lambda: inputs.text("x", "  ", 5),
        lambda: inputs.text("x", "toolong", 5),
    ):
        with pytest.raises(ValueError, match=r"^x\b.*expected .*, found "):
            check()
    assert inputs.plain({"a": torch.tensor([1.0, -torch.inf])}) == {"a": [1.0, None]}


# Softmax


def test_softmax_plays_the_mission_s_numbers():
    answer = softmax.play()
    assert [round(w, 4) for w in answer["weights"]] == [0.0055, 0.0, 0.9943, 0.0002]
    assert round(answer["chosen"]["root"], 1) == 22.6 and answer["chosen"]["dim"] == 512
    assert answer["chosen"]["gradient"]["raw"] < 0.05 * answer["chosen"]["gradient"]["scaled"]


def test_softmax_plays_what_pytorch_gives():
    logits, factor = [1.0, -2.0, 0.5], 1.5
    answer = softmax.play(logits=logits, factor=factor)
    x = torch.tensor(logits, dtype=torch.float64) * factor
    p = x.softmax(-1)
    assert answer["weights"] == pytest.approx(p.tolist())
    assert answer["entropy"] == pytest.approx(float(-(p * p.log()).sum()))
    jacobian = torch.autograd.functional.jacobian(lambda y: y.softmax(-1), x)
    assert answer["slope"] == pytest.approx(float(jacobian.norm()))
