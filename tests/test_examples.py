"""Each example learns, in a shorter form, and their pieces are right."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import ROOT

import regard as rg

sys.path.insert(0, str(ROOT / "examples"))

import copying
import dates
import drawing
import lookup

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_lookup_learns():
    result = lookup.train(count=120)
    assert result["after"] <= 0.1 * result["before"]
    flat, sharp = result["A before"], result["A after"]
    assert sharp.max() > 3 * flat.max()
    keys = len(sharp)
    assert (sharp * torch.ones(keys, keys).triu(-9).tril(9)).sum() > 0.8 * keys  # a band along the sorted keys


def test_lookup_does_not_see_its_own_pair():
    """Left one out: with its own value in reach, the training loss would be the noise and teach nothing."""
    data = lookup.Stores(1, size=6)
    A = lookup.Lookup()(data.keys, data.keys, mask=~rg.offset(0))
    assert torch.equal(A[0, 0].dense().diagonal(), torch.zeros(6))


def test_copying_rows_can_be_known_where_they_say():
    rows, known = copying.rows_of(200, torch.Generator().manual_seed(3))
    assert rows.shape == (200, 2 * copying.HALF + 1) and known.shape == (200, 2 * copying.HALF)
    assert not known[:, : copying.HALF].any() and known[:, copying.HALF :].float().mean() > 0.7
    for row, sure in zip(rows[:50].tolist(), known[:50].tolist(), strict=True):
        pairs = set(itertools.pairwise(row[: copying.HALF]))
        for at, yes in enumerate(sure):
            assert not yes or (row[at], row[at + 1]) in pairs


def test_copying_grows_an_induction_head():
    result = copying.train(count=150)
    assert result["induction"][1].max() >= 0.6
    assert result["previous"][0].max() >= 0.25
    assert result["induction"][0].max() < 0.3  # one layer cannot
    assert result["loss"][-1] < 0.5 * result["loss"][0]


def test_dates_are_written_as_people_write_them():
    assert dates.pair(1987, 8, 23) == ("23 August 1987", "一九八七年八月二十三日")
    assert dates.pair(2010, 10, 10) == ("10 October 2010", "二〇一〇年十月十日")
    assert dates.pair(1900, 12, 1) == ("1 December 1900", "一九〇〇年十二月一日")
    everything = dates.all_dates()
    assert len(everything) == len(set(everything)) == 73049  # 200 years with 49 leap days
    ids, lengths = dates.encode(["1 May 1999", "31 May 1999"], dates.ENGLISH, frame=False)
    assert lengths.tolist() == [10, 11] and ids[0, -1] == dates.PAD


def test_dates_word_order_is_all_or_nothing_when_it_should_be(monkeypatch):
    """Year to year, month to month and day to day is 1; everything on the blanks between them is 0."""
    english, chinese = dates.pair(1987, 8, 23)
    right = torch.zeros(len(chinese), len(english))
    right[:5, 10:], right[5:7, 3:9], right[7:, :2] = 1 / 4, 1 / 6, 1 / 2
    wrong = torch.zeros_like(right)
    wrong[:, 2], wrong[:, 9] = 0.5, 0.5
    for A, share in ((right, 1.0), (wrong, 0.0)):
        monkeypatch.setattr(dates, "cross", lambda *_, A=A: A)
        assert dates.in_order(dates.make(), [(english, chinese)]) == pytest.approx(share)


def test_dates_begin_to_be_translated():
    result = dates.train(count=200, batch=48)
    assert result["right"] > 0.3
    assert result["order"] > dates.in_order(dates.make(), result["held"][:50])
    assert result["A after"].shape == (len(result["example"][1]), len(result["example"][0]))


def test_digits_begin_to_be_read():
    pytest.importorskip("sklearn", reason="the images come with scikit-learn")
    import digits

    result = digits.train(epochs=4)
    assert result["right"] > 0.6
    assert result["after"][0].shape == (15, 15)
    assert max(p.max() for p in result["after"]) > 3 * max(p.max() for p in result["before"])


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    panels = [drawing.Panel("before", torch.rand(3, 4), ["年", "b", "c"], ["1", "2", "3", "4"])] * 3
    drawing.save(tmp_path / "a.png", "A", panels)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_verdicts_tell_hits_from_misses(capsys):
    assert drawing.verdict("share", 0.91, 0.9)
    assert not drawing.verdict("share", 0.89, 0.9)
    assert drawing.verdict("error", 0.05, 0.1, at_most=True)
    said = capsys.readouterr().out
    assert said.count("met") == 2 and said.count("MISSED") == 1


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem != "drawing"], ids=lambda p: p.stem)
def test_examples_tell_how_they_are_used(path: Path):
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True)
    assert "--out" in done.stdout and "--seed" in done.stdout
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert f"{path.name}" in readme
