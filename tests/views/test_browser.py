"""The explorer in a real browser: each view loads, says the numbers that A gives, and answers to mouse and keyboard.

One server and one browser for all tests; a page each. A page that asks another machine for something, or that writes an
error to its console, fails its test. Where there is no browser these are skipped, and say so.
"""

from __future__ import annotations

import re

import pytest
import torch
from browsing import browser, needs_browser, over, pages, settled, until, weight  # noqa: F401

import regard as rg

pytestmark = needs_browser

TEXT = "Each query asks every key. 小沈阳江西演唱会邀请了，Each query asks every key."


@pytest.fixture(scope="module")
def trace():
    model, tokenizer = rg.models.load("tiny")
    with rg.record(model, tokenizer=tokenizer, values=True) as trace, torch.no_grad():
        model(torch.tensor([tokenizer.encode(TEXT)]))
    return trace


@pytest.fixture(scope="module")
def grid():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 36, 16)
    return rg.attention(q, k, position=rg.recipes.sam(dim=16, grid=(6, 6)), geometry=rg.Grid(6, 6))


@pytest.fixture(scope="module")
def server(trace, grid):
    from regard.views.server import Server

    with Server() as server:
        server.add(trace, "text")
        server.add(grid, "grid")
        yield server


@pytest.fixture
def opened(server, browser):  # noqa: F811
    """Open the page at an address; errors and requests to elsewhere fail the test when it ends."""
    with pages(browser) as opened:
        yield lambda hash="", **how: opened(server.url, hash, **how)


def test_pointing_gives_the_weight_of_A_and_clicking_locks_it(opened, trace):
    page = opened()
    A = trace[0, 0]
    i, j = 40, 25
    page.mouse.move(*over(page, i, j))
    assert weight(page, i, j) == pytest.approx(A[i, j].item(), rel=1e-6)
    page.mouse.click(*over(page, i, j))
    page.mouse.move(*over(page, 10, 3))
    assert weight(page, 10, 3) == pytest.approx(A[10, 3].item(), rel=1e-6)
    page.mouse.move(5, 5)  # away from the map the locked pair comes back
    assert weight(page, i, j) == pytest.approx(A[i, j].item(), rel=1e-6)
    assert re.search(r"i=40&j=25", page.url)


def test_every_cell_of_the_map_is_an_entry_of_A(opened, trace):
    page = opened()
    A = trace[0, 0].dense()
    shown = page.evaluate("() => [...regard.map.tiles.values()].find((tile) => tile.cols > 1).mean")
    shown = torch.tensor([float("nan") if x is None else x for x in shown]).view(A.shape)
    seen = torch.ones_like(A).tril().bool()
    assert torch.isnan(shown[~seen]).all()
    torch.testing.assert_close(shown[seen], A[seen])


def test_a_changed_cell_is_noticed(opened, server, monkeypatch):
    """The same comparison goes red when the server changes one number: the page shows what it is sent."""
    from regard.views.server import app

    was = app.packed

    def packed(*given):
        found, exact = was(*given)
        return found[:32] + b"\0\0\0\x3f" + found[36:], exact

    monkeypatch.setattr(app, "packed", packed)
    page = opened("#h=7")
    assert page.evaluate("() => regard.map.shown(0, 0).value") == 0.5


def test_explaining_a_pair_adds_up(opened, trace):
    page = opened("#i=30&j=20")
    weight(page, 30, 20)
    rows = page.locator("#explain tr").all_inner_texts()
    parts = [float(row.split()[-1].replace("−", "-")) for row in rows]
    told = trace[0, 0].explain(30, 20)
    assert sum(parts[:-4]) == pytest.approx(parts[-4], abs=2e-3)
    assert parts[-4] == pytest.approx(told.logit, rel=1e-3) and parts[-2] == pytest.approx(told.weight, rel=1e-3)


def test_top_keys_are_those_of_A_and_can_be_clicked(opened, trace):
    page = opened("#i=30&j=20")
    weight(page, 30, 20)
    best = trace[0, 0].topk(3).indices[30].tolist()
    keys = page.locator("#top-keys button")
    assert [int(keys.nth(n).locator("span").first.inner_text()) for n in range(3)] == best
    keys.first.click()
    assert weight(page, 30, best[0]) == pytest.approx(trace[0, 0][30, best[0]].item(), rel=1e-6)


def test_zooming_to_a_single_cell_by_wheel_and_by_keyboard(opened):
    page = opened()
    x, y = over(page, 40, 25)
    page.mouse.move(x, y)
    for _ in range(12):
        page.mouse.wheel(0, -400)
    until(page, "() => regard.map.view.scale >= 47 && regard.map.settled")
    assert page.evaluate("() => regard.map.cell") == 1
    i0, i1, j0, j1 = page.evaluate("() => regard.map.view.seen")
    assert i0 <= 40 < i1 and j0 <= 25 < j1 and i1 - i0 < 20
    page.keyboard.press("0")
    until(page, "() => regard.map.view.scale <= regard.map.view.fitting * 1.001")
    page.keyboard.press("z")
    until(page, "() => regard.map.view.scale >= 47")


def test_numbers_are_written_into_large_cells(opened, trace):
    page = opened("#i=40&j=25&u=20.0&v=35.0&z=46.000000")
    until(page, "() => regard.map.settled && regard.map.cell === 1")
    written = page.evaluate("""() => {
        const said = [], pen = regard.map.canvas.getContext('2d'), was = pen.fillText;
        pen.fillText = (text) => said.push(text);
        regard.map.drawNumbers(pen);
        pen.fillText = was;
        return said;
    }""")
    i0, i1, j0, j1 = page.evaluate("() => regard.map.view.seen")
    shown = [trace[0, 0][i, j].item() for i in range(i0, i1) for j in range(j0, j1) if j <= i]
    assert len(written) == len(shown) > 50
    for text, x in zip(written, shown, strict=True):
        assert float(text.replace("−", "-")) == pytest.approx(x, abs=0.005, rel=0.5)


def test_all_by_keyboard(opened, trace):
    page = opened("#i=30&j=20")
    weight(page, 30, 20)
    page.focus("#maps canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert weight(page, 31, 21) == pytest.approx(trace[0, 0][31, 21].item(), rel=1e-6)
    page.keyboard.press("Enter")
    for pressed in "] h=1, } l=1, s n=log, c c=cividis, m p=max, f f=1, t t=1".split(", "):
        key, wanted = pressed.split()
        page.keyboard.press(key)
        until(page, "(wanted) => location.hash.includes(wanted)", wanted)
    settled(page)
    assert weight(page, 31, 21) == pytest.approx(trace[1, 1][31, 21].item(), rel=1e-6)
    page.keyboard.press("?")
    assert page.locator("#help dt").count() > 10
    page.keyboard.press("Escape")
    until(page, "() => !document.querySelector('#help').open")
    page.keyboard.press("w")
    until(page, "() => location.hash.includes('w=logits')")


def test_settings_change_without_asking_for_tiles_again(opened):
    page = opened()
    asked = []
    page.on("request", lambda request: "/api/tile" in request.url and asked.append(request.url))
    for choice, value in (("#scale", "log"), ("#colours", "grey"), ("#pooling", "max")):
        page.select_option(choice, value)
    page.click("#hide-first")
    page.wait_for_timeout(300)
    assert page.evaluate("() => regard.map.options") | {"axes": 0} == {
        "what": "weights", "scale": "log", "map": "grey", "pooling": "max", "hideFirst": True, "axes": 0,
    }  # fmt: skip
    assert not asked


def test_the_address_restores_what_was_shown(opened, trace):
    page = opened("#l=2&h=3&i=44&j=12&n=row&c=cividis&lang=zh&theme=dark&u=10.0&v=20.0&z=20.000000")
    assert page.locator("#language").inner_text() == "English"
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("() => [regard.map.options.scale, regard.map.options.map]") == ["row", "cividis"]
    assert page.evaluate("() => regard.map.view.scale") == pytest.approx(20, rel=0.01)
    until(page, "() => document.querySelector('#readout').textContent.includes('查询 44')")
    found = float(page.get_attribute("#weight", "data-value"))
    assert found == pytest.approx(trace[2, 3][44, 12].item(), rel=1e-6)


def test_both_languages_say_everything(opened):
    page = opened()
    english, chinese = page.evaluate("""async () => {
        const { WORDS } = await import('/web/words.js');
        return Object.values(WORDS).map((words) => Object.keys(words));
    }""")
    assert english == chinese
    used = page.evaluate("""async () => {
        const names = ['app', 'panels', 'overview', 'tokens', 'gridview', 'charts', 'map'];
        const texts = await Promise.all(names.map(async (name) => (await fetch(`/web/${name}.js`)).text()));
        return texts.flatMap((text) => [...text.matchAll(/say\\("(\\w+)"/g)].map((found) => found[1]));
    }""")
    assert used and set(used) <= set(english)
    page.click("#language")
    until(page, "() => document.querySelector('#go').textContent === '看'")
    assert page.evaluate("() => document.documentElement.lang") == "zh-CN"


def test_two_maps_share_their_cursor(opened):
    page = opened("#i=30&j=20")
    page.keyboard.press("x")
    until(page, "() => regard.stage.length === 2 && regard.stage.every((each) => each.map?.settled)")
    page.mouse.move(*over(page, 41, 17))
    assert until(page, "() => regard.stage[1].map.linked") == {"i": 41, "j": 17}
    assert page.locator("#maps figure").count() == 2


def test_the_overview_shows_every_head_and_opens_the_one_clicked(opened, trace):
    page = opened()
    until(page, "() => document.querySelectorAll('#overview .thumb').length === 48")
    does = {row["head"]: row["does"] for row in trace.statistics() if row["layer"] == 1}
    thumb = page.locator("#overview .thumb[data-at='1/3']")
    until(page, "() => document.querySelector(\"#overview .thumb[data-at='1/3']\").title.includes(':')")
    assert does[3] in thumb.get_attribute("title")
    thumb.click()
    until(page, "() => regard.stage[0].head === 3 && regard.stage[0].look === 1")


def test_the_grid_view_is_linked_with_A(opened, grid):
    page = opened("#s=2&g=1&i=14&j=22")
    until(page, "() => document.querySelector('#grid')?.textContent.includes('δ')")
    assert "(-1, -2)" in page.locator("#grid p").inner_text()  # (2, 2) less (3, 4)
    page.focus("#grid-cells")
    page.keyboard.press("ArrowLeft")
    assert weight(page, 14, 21) == pytest.approx(grid[0, 0, 14, 21].item(), rel=1e-5)
    page.click("#grid button")
    assert page.locator("#grid button").inner_text() == "flat"


def test_a_text_of_ones_own_is_recorded(opened):
    page = opened()
    page.fill("#text", "one two one two one two")
    page.press("#text", "Enter")
    until(page, "() => regard.stage[0].provider.qLen === 23 && regard.map.settled")
    assert "one two" in page.locator("#source option:checked").inner_text()


@pytest.mark.parametrize("size", [(360, 740), (1920, 1080)], ids=["phone", "projector"])
def test_it_fits_the_screen(opened, size):
    page = opened(viewport={"width": size[0], "height": size[1]})
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= size[0]
    assert page.locator("#maps canvas").first.bounding_box()["width"] > 0.5 * min(size[0], 700)


def test_the_lessons_are_a_click_away_in_the_language_that_is_spoken(opened):
    page = opened("#lang=zh&theme=dark")
    link = page.locator("#header a.button")
    assert link.inner_text() == "课程"
    link.click()
    page.wait_for_url("**/lessons#*")
    until(page, "() => document.documentElement.lang === 'zh-CN' && document.body.innerText.length > 200")
    assert "lang=zh" in page.url and "theme=dark" in page.url


def test_where_nothing_is_open_the_page_says_how_to_begin(browser):  # noqa: F811
    from regard.views.server import Server

    with Server() as server, pages(browser) as opened:
        page = opened(server.url, wait=False)
        until(page, "() => document.querySelector('#start a')")
        assert "Nothing is open yet" in page.locator("#start").inner_text()
        page.keyboard.press("l")
        until(page, "() => document.querySelector('#start')?.innerText.includes('还没有打开')")
        page.keyboard.press("d")
        assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
        page.select_option("#model", "digits")
        assert "数字" in page.get_attribute("#text", "placeholder")
        page.fill("#text", "4")
        page.press("#text", "Enter")
        until(page, "() => window.regard?.stage[0].provider.qLen === 64 && regard.map.settled")
        page.keyboard.press("g")
        until(page, "() => Boolean(regard.gridView?.image)")
        page.fill("#text", "forty")
        page.press("#text", "Enter")
        until(page, "() => document.querySelector('#toast').textContent.includes('a digit from 0 to 9')")
