"""The lessons in a real browser: one server and one browser for a file of tests; fixtures to import.

    from lesson_browser import opened_lesson, running_browser, running_server  # fixtures: lesson, browser, server

`lesson(name, inputs)` opens a page and waits until its picture shows what was asked for. A page that asks another
machine for something, or that writes an error to its console, fails its test.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import Any
from urllib.parse import quote

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
pytest.importorskip("uvicorn", reason="needs the explorer's extra (pip install 'regard[explore]')")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()
READY = (
    "() => Boolean(document.querySelector('#lesson article') && (!document.querySelector('#play')"
    " || (window.regard && regard.stage && regard.stage.settled)))"
)


@pytest.fixture(scope="module", name="server")
def running_server():
    from regard.views.server import Server

    with Server() as server:
        yield server


@pytest.fixture(scope="module", name="browser")
def running_browser():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(name="lesson")
def opened_lesson(server, browser):
    """Open a lesson, with inputs in its address; errors and requests to elsewhere fail the test when it ends."""
    contexts, wrong = [], []

    def opened(name: str = "", inputs: dict[str, Any] | None = None, /, lang: str = "en", refused: bool = False, **how):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-US", **how})
        context.set_default_timeout(120_000)  # a busy machine is slow, not wrong
        contexts.append(context)
        page = context.new_page()
        # where the server is to refuse what the address asks for, the browser says so
        page.on(
            "console",
            lambda said: said.type == "error" and not (refused and "400" in said.text) and wrong.append(said.text),
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        ours = (server.url, "blob:", "data:")
        page.on("request", lambda asked: not asked.url.startswith(ours) and wrong.append(asked.url))
        page.goto(server.url + f"lessons/{name}".rstrip("/") + address(inputs or {}, lang))
        settled(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def address(inputs: dict[str, Any], lang: str = "en") -> str:
    said = {key: x if isinstance(x, str) else json.dumps(x, separators=(",", ":")) for key, x in inputs.items()}
    return "#" + "&".join(f"{key}={quote(x)}" for key, x in {"lang": lang, **said}.items())


def until(page, function: str, argument: Any = None, seconds: float = 60.0) -> Any:
    """What a function of the page gives, as soon as it is not empty."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            found = page.evaluate(function, argument)
        except playwright.Error as error:  # asked while one page made way for the next
            if "context was destroyed" not in str(error):
                raise
            found = None
        if found:
            return found
        page.wait_for_timeout(20)
    shown = page.evaluate("() => [location.href, document.querySelector('.stage')?.textContent.slice(0, 200)]")
    raise AssertionError(f"still not: {function} of {argument!r}; the page is at {shown}")


def settled(page) -> None:
    until(page, READY)


def inputs(page) -> dict[str, Any]:
    """What the picture was asked for last."""
    settled(page)
    return page.evaluate("() => regard.stage.inputs")


def value(page, selector: str) -> float:
    """The unrounded number that an element shows."""
    settled(page)
    return float(page.get_attribute(selector, "data-value"))


def values(page, selector: str) -> list[float]:
    settled(page)
    return [float(x) for x in page.locator(selector).evaluate_all("(all) => all.map((each) => each.dataset.value)")]
