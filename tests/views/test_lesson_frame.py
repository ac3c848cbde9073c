"""What every lesson's page has in common, in a real browser: both languages, keys, addresses, something to copy."""

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
)

from regard.lessons import PARTS, lookup, notebook, pages, softmax

pytestmark = needs_browser


def test_the_list_leads_to_every_lesson(lesson):
    page = lesson()
    links = page.locator(".lesson-list a")
    assert links.count() == len(PARTS)
    assert [links.nth(n).get_attribute("href").split("#")[0] for n in range(len(PARTS))] == [
        f"/lessons/{name}" for name in PARTS
    ]
    page.keyboard.press("l")
    until(page, "(title) => document.querySelector('.title').textContent === title", pages.WORDS["zh"]["title"])
    links.nth(2).click()
    until(page, "() => location.pathname === '/lessons/softmax'")
    settled(page)
    assert page.locator(".title").inner_text().endswith(softmax.WORDS["zh"]["title"])
    assert page.evaluate("() => document.documentElement.lang") == "zh-CN"


@pytest.mark.parametrize("lang", ("en", "zh"))
@pytest.mark.parametrize("name", ("lookup", "scores", "softmax", "matrix", "errors", "quiz"))
def test_every_lesson_opens_in_both_languages_on_a_phone(lesson, name, lang):
    page = lesson(name, lang=lang, viewport={"width": 360, "height": 740})
    words = notebook.LESSONS[name].WORDS[lang]
    text = page.locator("#lesson").inner_text()
    assert words["title"] in text and words["shows"] in text
    assert page.locator(".code code").inner_text() == notebook.LESSONS[name].TRY
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert not page.locator("#answer").is_visible()
    page.locator("summary", has_text=pages.WORDS[lang]["answer"]).last.click()
    assert page.locator("#answer").is_visible()
    assert page.locator("#answer").inner_text() == pages.told(name, lang)["answer"].replace("`", "")


def test_keys_go_to_the_next_lesson_and_turn_language_and_theme(lesson):
    page = lesson("lookup")
    page.keyboard.press("]")
    until(page, "() => location.pathname === '/lessons/scores'")
    settled(page)
    before = page.evaluate("() => document.documentElement.dataset.theme")
    page.keyboard.press("d")
    assert (
        until(
            page,
            "(b) => document.documentElement.dataset.theme !== b && document.documentElement.dataset.theme",
            before,
        )
        == "dark"
    )
    page.keyboard.press("[")
    until(page, "() => location.pathname === '/lessons/lookup'")
    settled(page)
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"  # the setting goes along


def test_what_to_try_is_copied(lesson):
    page = lesson("softmax", permissions=["clipboard-read", "clipboard-write"])
    page.click("#copy")
    until(page, "(text) => document.querySelector('#copy').textContent === text", pages.WORDS["en"]["copied"])
    assert page.evaluate("() => navigator.clipboard.readText()") == softmax.TRY


def test_an_address_that_asks_for_what_cannot_be_is_told_and_begins_anew(lesson):
    page = lesson("softmax", {"factor": 99}, refused=True)
    assert "factor: expected a number from 0 to 5, found 99" in page.locator(".trouble").inner_text()
    assert inputs(page)["factor"] == 1.0 and value(page, "#entropy") == pytest.approx(softmax.play()["entropy"])


def test_start_again(lesson):
    page = lesson("softmax", {"factor": 2.5, "logits": [1, 2]})
    assert inputs(page)["factor"] == 2.5
    page.click("#again")
    until(page, "(n) => regard.stage.settled && document.querySelectorAll('.column').length === n", len(softmax.LOGITS))
    assert value(page, "#entropy") == pytest.approx(softmax.play()["entropy"])
    assert "factor" not in page.url


#: the controls of a picture that Tab stops at: one of a group of radio buttons (the arrow keys go to the others)
CONTROLS = """() => {
    const groups = new Set();
    window.wanted = [...document.querySelectorAll('#play :is(button, input, [tabindex="0"])')].filter((each) => {
        if (each.disabled || !each.getClientRects().length || each.closest('details:not([open])')) return false;
        if (each.type !== 'radio') return true;
        const chosen = document.querySelector(`input[name="${each.name}"]:checked`);
        if (groups.has(each.name) || (chosen && chosen !== each)) return false;
        return groups.add(each.name);
    });
    window.reached = new Set();
    document.addEventListener('focusin', (event) => reached.add(event.target));
    document.querySelector('#again').focus();
    return wanted.length;
}"""
UNNAMED = """() => {
    const named = (each) => each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.[0]?.textContent;
    return wanted.filter((each) => !named(each)).map((each) => each.outerHTML);
}"""


@pytest.mark.parametrize("name", PARTS)
def test_every_control_is_reached_by_tab_and_has_a_name(lesson, name):
    page = lesson(name)
    for _ in range(page.evaluate(CONTROLS) + 2):
        page.keyboard.press("Tab")
    assert page.evaluate("() => wanted.filter((each) => !reached.has(each)).map((each) => each.outerHTML)") == []
    assert page.evaluate(UNNAMED) == []


def test_what_changes_is_read_out(lesson):
    page = lesson("lookup")
    page.focus("#query-handle")
    page.keyboard.press("Shift+ArrowRight")
    told = lookup.WORDS["en"]["play_told"].split("{")[0] + "58"
    until(page, "(told) => document.querySelector('#live').textContent.startsWith(told)", told)


def test_another_address_is_followed(lesson):
    page = lesson("softmax")
    page.evaluate("() => (location.hash = '#factor=2&lang=zh')")
    until(
        page,
        "() => document.documentElement.lang === 'zh-CN' && regard.stage.inputs.factor === 2",
    )
    assert value(page, "#entropy") == pytest.approx(softmax.play(factor=2.0)["entropy"])
