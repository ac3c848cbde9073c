"""A.show(): the kernel's answers are A's own numbers, and the widget's script shows them in a real browser."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import regard as rg
from regard.views import widget as widgets
from regard.views.bundle import MAP, scripts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def made(length: int = 40, heads: int = 2) -> rg.AttentionMatrix:
    q, k = torch.randn(2, 1, heads, length, 8)
    return rg.attention(q, k, mask=rg.causal, position=rg.recipes.alibi(heads=heads))


class Kernel:
    """What a widget sends, kept."""

    def __init__(self, A):
        self.atlases, self.sent = widgets.Atlases(A), []

    def send(self, told, buffers=()):
        self.sent.append((told, [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in buffers]))

    def ask(self, **told):
        widgets.answer(self, self.atlases, {"id": 7, **told})
        return self.sent.pop()


def test_tiles_pairs_and_peaks_are_those_of_A():
    A = made()
    kernel = Kernel(A)
    told, (mean, peak, *first) = kernel.ask(what="tile", of="weights", head=1, cell=1, row=0, col=0)
    assert told == {"id": 7, "rows": 40, "cols": 40, "exact": True}
    seen = torch.ones(40, 40).tril().bool()
    torch.testing.assert_close(mean.view(40, 40)[seen], A[0, 1].dense()[seen])
    assert mean.view(40, 40)[~seen].isnan().all() and len(first) == 2
    told, _ = kernel.ask(what="pair", head=1, i=30, j=11)
    assert told["weight"] == pytest.approx(A[0, 1, 30, 11].item(), rel=1e-6)
    _, (every, rest) = kernel.ask(what="peaks", head=0, cell=1)
    torch.testing.assert_close(every, A[0, 0].dense().amax(-1))
    torch.testing.assert_close(rest, A[0, 0].dense()[:, 1:].amax(-1))


def test_a_long_A_becomes_exact_step_by_step():
    A = made(9000, 1)
    kernel = Kernel(A)
    for _ in range(10000):
        told, _ = kernel.ask(what="step", head=0)
        if told["exact"]:
            break
    top = kernel.atlases.of(0).levels[-1]
    told, (mean, *_) = kernel.ask(what="tile", of="weights", head=0, cell=top, row=0, col=0)
    pooled = A[0, 0].summarize(rg.Heatmap(cell=top))[0]
    seen = pooled.count > 0
    assert told["exact"]
    torch.testing.assert_close(mean.view(seen.shape)[seen], pooled.mean[seen].float(), rtol=1e-4, atol=1e-9)


def test_what_goes_wrong_is_told_to_the_page():
    kernel = Kernel(made())
    assert "expected a tile" in kernel.ask(what="tile", of="weights", cell=1, row=9, col=0)[0]["error"]
    assert "expected tile" in kernel.ask(what="shell")[0]["error"]


def test_labels_are_checked():
    with pytest.raises(ValueError, match="labels: expected 40 for the queries, found 3"):
        widgets.Atlases(made()).about(["a", "b", "c"])


def test_show_makes_a_widget():
    pytest.importorskip("anywidget", reason="needs anywidget (pip install anywidget)")
    shown = made().show(labels=[f"t{n}" for n in range(40)], language="zh")
    assert shown.about["heads"] == ["row 0, head 0", "row 0, head 1"] and shown.language == "zh"
    assert shown.about["labels"]["k"][39] == "t39"


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")
def test_the_script_shows_what_the_kernel_says(tmp_path):
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    A = made()
    kernel = Kernel(A)

    def ask(told: str) -> str:
        widgets.answer(kernel, kernel.atlases, json.loads(told))
        answer, floats = kernel.sent.pop()
        return json.dumps([answer, [[None if x != x else x for x in each.tolist()] for each in floats]])

    about = json.dumps(kernel.atlases.about(None))
    page_text = f"""<!doctype html><meta charset="utf-8"><style>{widgets.STYLE}</style><div id="place"></div>
    <script type="module">
      {scripts(MAP, "widget.js").replace("export default", "const made =")}
      let hear = null;
      const model = {{
        get: (name) => ({{ about: {about}, language: "en" }})[name],
        on: (_, act) => (hear = act),
        send: async (told) => {{
          const [answer, floats] = JSON.parse(await window.kernel(JSON.stringify(told)));
          hear(answer, floats.map((x) => new DataView(Float32Array.from(x, (y) => y ?? NaN).buffer)));
        }},
      }};
      made.render({{ model, el: document.getElementById("place") }});
    </script>"""
    (tmp_path / "page.html").write_text(page_text, encoding="utf-8")
    with sync.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.expose_function("kernel", ask)
        page.goto((tmp_path / "page.html").as_uri())
        for _ in range(200):
            if page.evaluate("() => document.querySelector('#place').regardMap?.settled"):
                break
            page.wait_for_timeout(30)
        shown = page.evaluate("() => place.regardMap.shown(30, 11).value")
        assert shown == pytest.approx(A[0, 0, 30, 11].item(), rel=1e-5)
        page.evaluate("() => place.regardMap.look(30, 11, { lock: true })")
        for _ in range(100):
            if page.get_attribute(".note", "data-value"):
                break
            page.wait_for_timeout(30)
        assert float(page.get_attribute(".note", "data-value")) == pytest.approx(A[0, 0, 30, 11].item(), rel=1e-5)
        browser.close()
    assert not wrong
