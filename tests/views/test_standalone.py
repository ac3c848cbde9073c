"""trace.to_html(): one file with the numbers inside, which opens from disk and asks nobody."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import regard as rg

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")
TEXT = "Each query asks every key. 小沈阳江西演唱会邀请了，</script><b>Each query asks every key.</b>"


@pytest.fixture(scope="module")
def tiny():
    return rg.models.load("tiny")


def traced(tiny, text: str) -> rg.Trace:
    with rg.record(tiny.model, tokenizer=tiny.tokenizer) as trace, torch.no_grad():
        tiny.model(torch.tensor([tiny.tokenizer.encode(text)]))
    return trace


@pytest.fixture
def page(tmp_path):
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    asked, wrong = [], []
    with sync.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 800}, locale="en-US")
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def opened(path):
            page.goto(path.as_uri())
            for _ in range(400):
                if page.evaluate("() => Boolean(window.regard?.map.settled)"):
                    return page
                page.wait_for_timeout(30)
            raise AssertionError(f"never ready: {wrong}")

        yield opened
        browser.close()
    assert not wrong and len(asked) == 1 and asked[0].startswith("file:")


def look_at(page, i: int, j: int) -> float:
    page.evaluate("([i, j]) => regard.map.look(i, j, { lock: true })", [i, j])
    page.wait_for_timeout(50)
    return float(page.get_attribute("#weight", "data-value"))


@browser_needed
def test_a_short_text_is_there_whole(tiny, tmp_path, page):
    trace = traced(tiny, TEXT)
    trace.to_html(tmp_path / "short.html", name="short <text>")
    page = page(tmp_path / "short.html")
    for i, j in ((5, 0), (40, 22), (60, 60)):
        assert look_at(page, i, j) == pytest.approx(trace[0, 0][i, j].item(), rel=1e-3)
    page.select_option("#head", "3")
    page.select_option("#layer", "1")
    page.wait_for_timeout(200)
    assert look_at(page, 40, 39) == pytest.approx(trace[1, 3][40, 39].item(), rel=1e-3)
    assert page.locator("#overview .thumb").count() == 48
    assert page.locator("h1").inner_text() == "short <text>"
    page.click("#language")
    page.wait_for_timeout(300)
    assert page.locator("#turn").inner_text() == "转置"


@browser_needed
def test_a_longer_text_has_pooled_maps_and_exact_top_keys(tiny, tmp_path, page):
    trace = traced(tiny, TEXT * 4)
    trace.to_html(tmp_path / "long.html")
    page = page(tmp_path / "long.html")
    A = trace[0, 0]
    cell = page.evaluate("() => regard.map.cell")
    pooled = A.summarize(rg.Heatmap(cell=cell))[0].mean
    shown = page.evaluate("() => regard.map.shown(200, 190).value")
    assert cell > 1 and shown == pytest.approx(pooled[200 // cell, 190 // cell].item(), rel=1e-3)
    top = page.evaluate("() => regard.topOf(200)")
    assert [each["j"] for each in top] == A.topk(16).indices[200].tolist()
    for each, wanted in zip(top, A.topk(16).weights[200].tolist(), strict=True):
        assert each["weight"] == pytest.approx(wanted, rel=1e-3)


def test_twelve_layers_of_twelve_heads_at_512_tokens_stay_under_12_MB(tmp_path):
    torch.manual_seed(0)
    decoder = rg.nn.Decoder(64, 144, 12, 12, position="t5").eval()
    with rg.record(decoder) as trace, torch.no_grad():
        decoder(torch.randint(64, (1, 512)))
    trace.to_html(tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 12e6


def test_it_refuses_what_it_cannot_show(tiny, tmp_path):
    ids = torch.tensor([tiny.tokenizer.encode("two rows")] * 2)
    with rg.record(tiny.model, tokenizer=tiny.tokenizer) as trace, torch.no_grad():
        tiny.model(ids)
    with pytest.raises(ValueError, match=r"found a batch of 2; choose one with trace\.row"):
        trace.to_html(tmp_path / "x.html")
    trace.row(1).to_html(tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"?(https?:)?//", text)
    with pytest.raises(ValueError, match="language: expected 'en' or 'zh', found 'fr'"):
        trace.row(1).to_html(tmp_path / "x.html", language="fr")
