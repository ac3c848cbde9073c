"""Pictures and pages: written whole, with every character, and nothing from elsewhere."""

from __future__ import annotations

import base64
import copy
import re
import struct
import zlib

import pytest
import torch

import regard as rg
from regard.trace import record
from regard.views import figure, fonts
from regard.views.findings import Findings, Small, gather
from regard.views.page import page, picture
from regard.views.terminal import colour

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

SENTENCE = "小沈阳江西演唱会邀请了，"


def findings_of(text: str) -> Findings:
    model, tokenizer = rg.models.load("tiny")
    with record(model, tokenizer=tokenizer) as trace, torch.no_grad():
        model(torch.tensor([tokenizer.encode(text)]))
    return gather(trace, model="tiny", text=text)


@pytest.fixture(scope="module")
def found() -> Findings:
    return findings_of(SENTENCE)


@pytest.fixture(scope="module")
def long() -> Findings:
    return findings_of("a soft look-up, " * 6)


def no_fonts(monkeypatch) -> None:
    monkeypatch.setattr(fonts, "_candidates", lambda: ())


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_every_kind_is_written(found, tmp_path, ending, start):
    path = tmp_path / f"x{ending}"
    missing = figure.draw(found, path, "zh")
    assert path.read_bytes().startswith(start)
    assert missing == fonts.fonts_for([SENTENCE]).missing


def test_the_same_picture_every_time(found, tmp_path):
    for name in ("a.svg", "b.svg"):
        figure.draw(found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_long_text_is_drawn_whole_and_in_part(long, tmp_path, monkeypatch):
    drawn, overview = [], figure.Picture.overview

    def seen(self, axes, top):
        overview(self, axes, top)
        drawn.append((axes.images[0].get_array().shape, [len(p.get_xy()) for p in axes.patches]))

    monkeypatch.setattr(figure.Picture, "overview", seen)
    figure.draw(long, tmp_path / "x.svg")
    n = len(long.rows)
    assert drawn == [((n, n), [2])]  # no more than LARGE tokens: a cell each, and a frame around the part


def test_a_name_of_another_kind(found, tmp_path):
    with pytest.raises(ValueError, match=r"out: expected a name that ends in \.png, \.svg, \.pdf, found"):
        figure.draw(found, tmp_path / "x.bmp")


def test_small_maps_in_one_image(found):
    found = copy.copy(found)
    ones, seen = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    found.small = {(0, 1): Small(ones, seen), (4, 0): Small(ones * 0.5, ~seen)}
    whole, down, across = figure.mosaic(found, [0, 4], [0, 1])
    assert whole.shape == (6, 8) and (down, across) == (4, 5)
    assert bool((whole[:2, 5:] == 1).all()) and bool(whole[4:, :3].isnan().all()) and bool(whole[2:4].isnan().all())


def test_pooled_maps_have_a_logarithmic_scale(found, long):
    weights = found.small[found.shown].weights
    torch.testing.assert_close(found.shares(*found.shown)[0], weights / weights.max())
    weights = long.small[long.shown].weights
    scaled, visible = long.shares(*long.shown)
    assert float(scaled.max()) == 1 and float(scaled.min()) == 0
    tenth = (weights / weights.max() > 0.09) & (weights / weights.max() < 0.11) & visible
    assert bool(tenth.any()) and bool((scaled[tenth] - 0.75).abs().lt(0.02).all())


# Fonts


def test_fonts_have_what_is_asked_for():
    families, missing = fonts.fonts_for(["abc", SENTENCE])
    assert families[0] == fonts.OWN and not set(missing) - set(SENTENCE)
    paths = dict(fonts._candidates())
    for c in set(SENTENCE) - set(missing):
        assert any(c in fonts._glyphs(paths[name]) for name in families[1:])


def test_characters_that_no_font_has_are_drawn_by_number(found, tmp_path, monkeypatch):
    no_fonts(monkeypatch)
    written = []
    numbered = figure.numbered
    monkeypatch.setattr(figure, "numbered", lambda *a: written.append(numbered(*a)) or written[-1])
    missing = figure.draw(found, tmp_path / "x.png")
    assert set(SENTENCE) <= set(missing) and "‹6C88›" in written
    assert fonts.package_for(missing) == "fonts-noto-cjk"
    assert fonts.package_for("\u0e01") == "fonts-noto"


def test_the_command_says_so(tmp_path, monkeypatch, capsys):
    from regard import cli

    no_fonts(monkeypatch)
    assert cli.main(["look", SENTENCE, "--out", str(tmp_path / "x.png")]) == 0
    shown = capsys.readouterr().out
    assert "No installed font has" in shown and "apt install fonts-noto-cjk" in " ".join(shown.split())


# Pages


def pixels(address: str) -> list[list[tuple[int, int, int]]]:
    """The colours of an indexed PNG in a data address."""
    raw = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    chunks, at = {}, 8
    while at < len(raw):
        size, kind = struct.unpack(">I4s", raw[at : at + 8])
        data = raw[at + 8 : at + 8 + size]
        assert struct.unpack(">I", raw[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + size
    wide, high = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows, palette = zlib.decompress(chunks[b"IDAT"]), chunks[b"PLTE"]
    return [
        [tuple(palette[3 * rows[i * (wide + 1) + 1 + j] :][:3]) for j in range(wide)] for i in range(high)
    ]  # fmt: skip


def test_pixels_are_the_colours_of_shares():
    shares = torch.tensor([[0.0, 1.0, 0.5], [2.0, -1.0, 0.25]])
    visible = torch.tensor([[True, True, True], [True, True, False]])
    got = pixels(picture(shares, visible))
    assert got[0][:2] == [colour(0.0), colour(1.0)] and got[1] == [colour(1.0), colour(0.0), (255, 255, 255)]
    assert max(abs(a - b) for a, b in zip(got[0][2], colour(0.5), strict=True)) <= 1


def test_a_page_needs_nothing_else(found):
    text = page(found, "zh")
    assert not re.search(r"https?:|<script|<link|@import|url\(|javascript:|\son\w+=", text)
    assert "default-src 'none'" in text and 'lang="zh-Hans"' in text
    assert all(f">{c}</text>" in text for c in SENTENCE if c != "唱")


def test_cells_say_their_weights(found):
    text = page(found)
    cells = re.findall(r"<title>(\S+) → (\S+): ([\d.]+)</title>", text)
    n = len(found.rows)
    assert len(cells) == n * (n + 1) // 2  # causal: what may be seen
    dense = found.matrix.dense().detach()
    want = [
        (found.rows[i], found.columns[j], f"{float(dense[i, j]):.4f}") for i in range(n) for j in range(i + 1)
    ]  # fmt: skip
    assert cells == want


def test_a_page_of_a_long_text(long):
    text = page(long)
    assert f"all {len(long.rows)} x {len(long.rows)}, pooled" in text
    assert text.count("<img ") == len(long.heads) + 1
    assert len(text) < 1_000_000


def test_what_comes_from_a_text_is_escaped():
    evil = "<script>alert('&')</script>"
    found = findings_of(evil)
    found.model, found.notes = '"><img src=x>', ["<b>note</b>"]
    text = page(found)
    body = text[text.index("<body>") :]
    assert "<script" not in body and "<img src=x" not in body and "<b>note" not in body
    assert "&lt;script&gt;" in body
