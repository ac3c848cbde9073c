"""A real browser for the explorer's tests, and what they ask its page."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
pytest.importorskip("uvicorn", reason="needs the explorer's extra (pip install 'regard[explore]')")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def pages(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages. One that asks another machine for something, or writes an error, fails when they are closed."""
    contexts, wrong = [], []

    def opened(url: str, hash: str = "", wait: bool = True, **how: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **how})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        ours = (url, "blob:", "data:")
        page.on("request", lambda asked: not asked.url.startswith(ours) and wrong.append(asked.url))
        page.goto(url + hash)
        if wait:
            settled(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def until(page: Any, function: str, argument: Any = None, seconds: float = 180.0) -> Any:
    """What a function of the page gives, as soon as it is not empty."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = page.evaluate(function, argument)
        if found:
            return found
        page.wait_for_timeout(40)
    shown = page.evaluate("() => [location.hash, document.querySelector('#readout')?.textContent.slice(0, 200)]")
    raise TimeoutError(f"still not: {function} of {argument!r}; the page is at {shown}")


def settled(page: Any) -> None:
    until(page, "() => Boolean(window.regard && regard.map && regard.map.settled && regard.stage[0].exact)")


def weight(page: Any, i: int, j: int) -> float:
    """The weight that the read-out shows for a pair."""
    for text in (f"query {i} ", f"key {j} "):
        until(page, "(text) => document.querySelector('#readout').textContent.includes(text)", text)
    return float(page.get_attribute("#weight", "data-value"))


def over(page: Any, i: int, j: int) -> tuple[float, float]:
    """Where the middle of an entry is on the page."""
    x, y = page.evaluate("([i, j]) => regard.map.view.point(i + 0.5, j + 0.5)", [i, j])
    margin = page.evaluate("() => regard.map.margin")
    box = page.locator("#maps canvas").first.bounding_box()
    return box["x"] + x + margin["left"], box["y"] + y + margin["top"]
