"""The lessons' pictures in a real browser: by mouse and by keyboard they show the numbers that `play` gives."""

from __future__ import annotations

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

from regard.lessons import errors, lookup, matrix, quiz, scores, softmax

pytestmark = needs_browser


# Softmax


def test_softmax_bars_are_dragged_and_moved_by_keys(lesson):
    page = lesson("softmax")
    assert values(page, "#shares .share") == pytest.approx(softmax.play()["weights"])
    box = page.locator(".column").nth(1).bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + box["height"] * 0.7)
    page.mouse.down()
    page.mouse.move(box["x"] + 10, box["y"] + box["height"] * 0.1, steps=3)
    page.mouse.up()
    logits = inputs(page)["logits"]
    assert logits[1] == pytest.approx(8.0, abs=0.3)
    assert values(page, "#shares .share") == pytest.approx(softmax.play(logits=logits)["weights"])
    page.focus(".column >> nth=0")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Shift+ArrowUp")
    assert inputs(page)["logits"][0] == pytest.approx(softmax.LOGITS[0] + 1.1)
    assert values(page, "#shares .share") == pytest.approx(softmax.play(logits=inputs(page)["logits"])["weights"])
    page.reload()  # the address restores it
    settled(page)
    assert inputs(page)["logits"][0] == pytest.approx(softmax.LOGITS[0] + 1.1)


def test_softmax_factor_and_dimension(lesson):
    page = lesson("softmax")
    page.focus("#factor")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert inputs(page)["factor"] == pytest.approx(1.2)
    expected = softmax.play(factor=1.2)
    assert value(page, "#entropy") == pytest.approx(expected["entropy"]) and value(page, "#slope") == pytest.approx(
        expected["slope"]
    )
    page.locator("#dim label", has_text="8").first.click()
    until(page, "() => regard.stage.settled && regard.stage.inputs.dim === 8")
    small = softmax.play(dim=8)["chosen"]
    assert values(page, "#roots td.n") == pytest.approx(
        [small["entropy"]["raw"], small["gradient"]["raw"], small["entropy"]["scaled"], small["gradient"]["scaled"]]
    )
    page.focus("#dim-1")
    page.keyboard.press("ArrowRight")
    assert inputs(page)["dim"] == softmax.CURVE[2]
    page.click("#more")
    assert len(inputs(page)["logits"]) == 5


# The soft look-up


def test_look_up_query_is_dragged_and_moved_by_keys(lesson):
    page = lesson("lookup")
    assert round(value(page, "#result"), 4) == 45.0769
    box = page.locator("svg.line").bounding_box()
    handle = page.locator("#query-handle circle").first.bounding_box()
    page.mouse.move(handle["x"] + 9, handle["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.3 * box["width"], handle["y"] + 9, steps=4)
    page.mouse.up()
    query = inputs(page)["query"]
    assert 49 < query < 53 and value(page, "#result") == pytest.approx(lookup.play(query=query)["result"])
    page.focus("#query-handle")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert inputs(page)["query"] == pytest.approx(query + 1.25)
    assert values(page, "#store .weight") == pytest.approx(lookup.play(query=query + 1.25)["weights"])
    page.focus("#query")
    page.keyboard.press("ArrowLeft")
    assert inputs(page)["query"] == pytest.approx(query + 1.0)


@pytest.mark.parametrize("way", lookup.CHOICES)
def test_look_up_every_way_of_weighing(lesson, way):
    page = lesson("lookup")
    page.locator("#way label").nth(lookup.CHOICES.index(way)).click()
    until(page, "(way) => regard.stage.settled && regard.stage.inputs.way === way", way)
    expected = lookup.play(way=way)
    assert value(page, "#result") == pytest.approx(expected["result"])
    assert values(page, "#all .share") == pytest.approx(list(expected["results"].values()))
    assert page.locator("#code").inner_text() == expected["code"]
    assert page.locator("#sigma").is_visible() == (way == "gauss") and page.locator("#nearest").is_visible() == (
        way == "nearest"
    )
    assert f"way={way}" in page.url or way == "inverse"


def test_look_up_width_and_values(lesson):
    page = lesson("lookup", {"way": "gauss"}, lang="zh")
    page.focus("#sigma")
    page.keyboard.press("End")
    assert inputs(page)["sigma"] == lookup.SIGMA[1]
    page.locator("#store input").nth(0).fill("70")
    until(page, "() => regard.stage.settled && regard.stage.inputs.values[0] === 70")
    expected = lookup.play(way="gauss", sigma=lookup.SIGMA[1], values=[70.0, 43.0, 48.0])
    assert value(page, "#result") == pytest.approx(expected["result"])
    page.reload()
    assert value(page, "#result") == pytest.approx(expected["result"])


# Scores


def test_scores_vectors_are_dragged_and_moved_by_keys(lesson):
    page = lesson("scores")
    box = page.locator("#plane").bounding_box()
    tip = page.locator("#plane [data-name=k2] circle").first.bounding_box()
    page.mouse.move(tip["x"] + 9, tip["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.75 * box["height"], steps=4)
    page.mouse.up()
    found = inputs(page)
    assert found["keys"][1] == pytest.approx([2.0, -2.0], abs=0.2)
    expected = scores.play(query=found["query"], keys=found["keys"])
    assert values(page, "#measures [data-what=dot]") == pytest.approx(expected["dots"])
    page.focus("#plane [data-name=q]")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Shift+ArrowLeft")
    query = inputs(page)["query"]
    assert query == pytest.approx([scores.ARROW[0] - 1.0, scores.ARROW[1] + 0.1])
    expected = scores.play(query=query, keys=found["keys"])
    assert values(page, "#measures [data-what=cosine]") == pytest.approx(expected["cosines"])
    assert values(page, "#scores td.n") == pytest.approx([w for each in expected["scores"] for w in each["weights"]])


def test_scores_directions(lesson):
    page = lesson("scores")
    for name, dot in (("right", 0.0), ("opposite", -5.0), ("same", 5.0)):
        page.focus(f"#turn-{name}")
        page.keyboard.press("Enter")
        until(page, "(dot) => regard.stage.settled && Math.abs(regard.stage.answer.dots[0] - dot) < 1e-9", dot)
        assert values(page, "#measures [data-what=dot]")[0] == pytest.approx(dot)


@pytest.mark.parametrize("lang", ("en", "zh"))
def test_scores_of_the_two_examples(lesson, lang):
    page = lesson("scores", lang=lang)
    page.focus("#data-0")
    page.keyboard.press("ArrowRight")
    until(page, "() => regard.stage.settled && document.querySelector('#vectors th')?.textContent === 'king'")
    assert values(page, "#measures [data-what=dot]") == [14, -14, 6]
    page.locator("#data label").nth(2).click()
    until(page, "() => regard.stage.settled && document.querySelector('#vectors th')?.textContent === '邀请'")
    assert [round(x, 2) for x in values(page, "#measures [data-what=dot]")] == [0.53, 0.66, 0.40]
    page.locator("#vectors input").nth(0).fill("2")
    until(page, "() => regard.stage.settled && regard.stage.inputs.query[0] === 2")
    assert values(page, "#measures [data-what=dot]") == pytest.approx(
        scores.play(data="invite", query=[2, 0.2, 0.7])["dots"]
    )
    page.reload()
    settled(page)
    assert inputs(page)["query"][0] == 2 and page.locator("#vectors th").first.inner_text() == "邀请"


# The matrix


def test_the_matrix_every_step_by_keyboard_shows_what_play_gives(lesson):
    page = lesson("matrix")
    expected = matrix.play()
    shown = {
        "scores": "scores", "scale": "divided", "position": "logits", "mask": "logits", "softmax": "weights",
        "output": "y",
    }  # fmt: skip
    for step in matrix.STEPS[1:]:
        page.focus("#after")
        page.keyboard.press("Enter")
        until(page, "(step) => regard.stage.settled && regard.stage.inputs.step === step", step)
        if step in shown:
            flat = [x for row in expected[shown[step]] for x in row]
            assert values(page, f"#made-{shown[step]} tbody td") == pytest.approx(flat)
    assert page.locator("#after").is_disabled()
    assert page.locator("#made-y tr").count() == 3 and page.locator("#made-y td").count() == 15


def test_the_matrix_every_number_can_be_changed(lesson):
    page = lesson("matrix")
    page.locator("#x input").nth(5).fill("2")
    until(page, "() => regard.stage.settled && regard.stage.inputs.x[1][1] === 2")
    x = inputs(page)["x"]
    expected = matrix.play(x=x)
    visible = [
        w
        for row, seen in zip(expected["weights"], expected["visible"], strict=True)
        for w, s in zip(row, seen, strict=True)
        if s
    ]
    assert values(page, "#A td[data-value]:not([data-value=''])") == pytest.approx(visible)
    page.locator("#place").check()
    until(page, "() => regard.stage.settled && document.querySelector('#made-where')")
    added = matrix.play(x=x, place=True)
    assert values(page, "#made-made tbody td") == pytest.approx([each for row in added["made"] for each in row])
    page.locator("#step label").nth(1).click()
    for name in ("w_q", "w_k", "w_v"):
        page.locator(f"#{name} input").nth(0).fill("-1.5")
        until(page, "(name) => regard.stage.settled && regard.stage.inputs[name][0][0] === -1.5", name)
    page.focus("#v_dim")
    page.keyboard.press("ArrowLeft")
    until(page, "() => regard.stage.settled && regard.stage.inputs.v_dim === 4")
    found = inputs(page)
    expected = matrix.play(**found)
    assert values(page, "#made-v td") == pytest.approx([v for row in expected["v"] for v in row])
    assert page.locator("#w_v input").count() == 16
    page.reload()
    settled(page)
    assert inputs(page) == found


def test_the_matrix_a_cell_tells_its_row_and_its_terms(lesson):
    page = lesson("matrix")
    expected = matrix.play()
    page.hover("#A td[data-i='2'][data-j='1']")
    assert page.locator("#pair .q").inner_text() == "query 阳 looks at key 沈"
    assert value(page, "#pair-weight") == pytest.approx(expected["weights"][2][1])
    assert value(page, "#pair-term") == pytest.approx(expected["term"][2][1])
    assert values(page, "#pair .share") == pytest.approx(expected["weights"][2])
    page.focus("#A td[data-i='2'][data-j='1']")
    page.keyboard.press("ArrowLeft")
    assert value(page, "#pair-lse") == pytest.approx(expected["lse"][2])
    assert value(page, "#pair-weight") == pytest.approx(expected["weights"][2][0])
    page.focus("#turned")
    page.keyboard.press("Space")
    until(page, "() => regard.stage.settled && regard.stage.inputs.turned")
    assert float(page.get_attribute("#A td[data-i='0'][data-j='2']", "data-value")) == pytest.approx(
        expected["weights"][2][0]
    )


def test_the_matrix_position_mask_and_direction(lesson):
    page = lesson("matrix", {"step": "position"})
    page.focus("#slope")
    page.keyboard.press("ArrowRight")
    assert inputs(page)["slope"] == pytest.approx(0.6)
    page.locator("#step label").nth(5).click()
    page.locator("#mask label").nth(0).click()
    until(page, "() => regard.stage.settled && regard.stage.inputs.mask === 'none'")
    expected = matrix.play(slope=0.6, mask="none")
    assert values(page, "#A td[data-i]") == pytest.approx([w for row in expected["weights"] for w in row])
    for n, tie in enumerate(matrix.TIES):
        page.locator("#tie label").nth(n).click()
        until(page, "(tie) => regard.stage.settled && regard.stage.inputs.tie === tie", tie)
        assert value(page, "#apart") == pytest.approx(matrix.play(tie=tie)["apart"], abs=1e-12)
        agree = matrix.WORDS["en"]["play_agree"]
        assert (page.locator("#verdict").inner_text() == agree) is (tie != "free")


# Errors and the quiz


@pytest.mark.parametrize("lang", ("en", "zh"))
def test_every_claim_is_put_to_the_test(lesson, lang):
    page = lesson("errors", lang=lang)
    assert (
        page.locator(".claim .wrong").count() == 0
        and errors.WORDS[lang]["no"] not in page.locator("#lesson").inner_text()
    )
    for name in errors.checks():
        page.focus(f"#run-{name}")
        page.keyboard.press("Enter")
        until(page, "(name) => document.querySelector(`#claim-${name} .wrong`)", name)
        expected = errors.play(claim=name, language=lang)
        assert page.locator(f"#claim-{name} .wrong").inner_text() == expected["verdict"]
        numbers = [x for row in expected["evidence"]["rows"] for x in row if isinstance(x, float)]
        assert values(page, f"#claim-{name} td[data-value]") == pytest.approx(numbers)
        assert page.locator(f"#others-{name}").is_visible() == (name in errors.DRAWN)
    page.click("#others-axes")
    until(page, "() => regard.stage.settled && regard.stage.inputs.draws === 1")
    assert (
        page.locator("#claim-axes .wrong").inner_text() == errors.play(claim="axes", draws=1, language=lang)["verdict"]
    )


@pytest.mark.parametrize("lang", ("en", "zh"))
def test_the_quiz_reveals_what_was_chosen_or_thought(lesson, lang):
    page = lesson("quiz", lang=lang)
    assert page.locator(".result p").count() == 0
    answers = [0] * 8
    for at, name in enumerate(quiz.QUESTIONS):
        if at % 3 == 2:  # think, and look it up
            page.focus(f"#reveal-{name}")
            page.keyboard.press("Enter")
            answers[at] = quiz.THOUGHT
        else:
            page.locator(f"#quiz-{name}-{1 + at % 2}").check()
            answers[at] = 1 + at % 2
        until(page, "(name) => document.querySelector(`#question-${name} .result p`)", name)
        expected = quiz.play(answers=answers, language=lang)["questions"][at]
        assert page.locator(f"#question-{name} .result").inner_text().endswith(expected["answer"].replace("`", ""))
        assert (
            page.locator(f"#question-{name} .option.right input").get_attribute("id")
            == f"quiz-{name}-{quiz.RIGHT[name]}"
        )
    score = value(page, "#score")
    assert score == quiz.play(answers=answers)["score"]
    page.reload()
    assert value(page, "#score") == score and page.locator(".result p").count() == 8


def test_a_changed_number_is_noticed(lesson, monkeypatch):
    """The comparisons above go red when the server computes something else: the page shows what it is sent."""
    right = lookup.play()["result"]
    monkeypatch.setattr(lookup, "KEYS", (51.0, 56.0, 58.5))
    assert abs(value(lesson("lookup"), "#result") - right) > 0.01
