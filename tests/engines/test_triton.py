"""The GPU engine without a GPU: what it refuses, and its kernels under Triton's interpreter in their own process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.engines import tiled
from regard.engines import triton as engine
from regard.engines.triton import tune
from regard.engines.triton.choice import Tiling
from regard.normal import Form

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("which", ["test_kernels_equal_the_definition", "not test_kernels_equal_the_definition"])
def test_kernels_under_the_interpreter(which):
    paths = [HERE, HERE.parent, HERE.parents[1] / "src"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    ran = subprocess.run(
        [*command, "-k", which, str(HERE / "triton_interpreted.py")], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_it_is_for_cuda_only():
    q = torch.randn(1, 1, 4, 4)
    assert rg.attention(q, q).plan.engine == "cpu"
    with pytest.raises(ValueError, match="triton cannot run this: runs on CUDA devices only, q is on cpu"):
        print(rg.attention(q, q, engine="triton").plan)


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engine.refuse(Form(), "cuda", "float32") == "Triton is not installed"


@needs_triton
@pytest.mark.parametrize(
    "words, keywords",
    [
        ("dot products only", {"score": rg.InverseDistance()}),
        ("differ at every displacement", {"position": rg.FromQuery.learn(rg.Sinusoid([1.0]), 4)}),
        ("between points", {"position": rg.Static(rg.Slope(1)), "geometry": rg.Points(torch.randn(4, 1))}),
        ("joined by |", {"mask": rg.causal | rg.keys(0, 1)}),
        ("turned by ~", {"mask": ~rg.causal}),
        ("several dense masks", {"mask": rg.dense(torch.eye(4) > 0) & rg.dense(torch.ones(4, 4) > 0)}),
    ],
)
def test_what_it_does_not_take_is_said(words, keywords):
    q = torch.randn(1, 1, 4, 4)
    assert words in engine.refuse(rg.attention(q, q, **keywords).plan.form, "cuda", "float32")


@needs_triton
def test_what_it_takes():
    q = torch.randn(1, 2, 4, 4)
    term = rg.recipes.t5(2) + rg.recipes.shaw(4, 2) + rg.recipes.alibi(2)
    mask = rg.causal & rg.lengths(torch.tensor([3])) & rg.documents(torch.zeros(1, 4, dtype=torch.long))
    form = rg.attention(q, q, position=term, mask=mask, softcap=3.0, dropout=0.1, sink=torch.zeros(2)).plan.form
    assert all(engine.refuse(form, "cuda", dtype) is None for dtype in ("float32", "bfloat16", "float16"))
    assert "float64" in engine.refuse(form, "cuda", "float64")


def test_importing_the_engine_does_not_import_triton():
    code = "import sys, regard.engines.triton; sys.exit('triton' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=str(HERE.parents[1] / "src"))
        ).returncode
        == 0
    )


USUAL = Tiling(128, 64, 8, 3, 128)


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """Tuning as on a GPU, with a clock of our own: narrow tiles are fast, and half as high ones have no room."""
    tried = []

    def time(call):
        call()
        if tried[-1].block_q < USUAL.block_q:
            raise RuntimeError("out of resource")
        return float(tried[-1].block_k)

    monkeypatch.setenv("REGARD_TUNE", "1")
    monkeypatch.setattr(tune, "_milliseconds", time)
    monkeypatch.setattr(tune, "_file", lambda: tmp_path / "regard" / "tiles.json")
    monkeypatch.setattr(tune, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tune, "_found", {})
    return tried


def ask(tried):
    return tune.tuned("forward", (64, 64, torch.bfloat16, "table"), USUAL, tried.append)


def test_nothing_is_tried_unless_asked_for(tuning, monkeypatch):
    monkeypatch.setenv("REGARD_TUNE", "0")
    assert ask(tuning) == USUAL and not tuning


def test_a_few_tiles_are_tried_once_and_the_fastest_is_kept(tuning, monkeypatch, caplog):
    with caplog.at_level("INFO", logger="regard"):
        best = ask(tuning)
    assert best.block_k == 32 and tuning[0] == USUAL and len(tuning) == len(set(tuning)) <= 4
    assert "tuned forward 64 64 bfloat16 table to tiles of 128 x 32" in caplog.text
    assert "does not take tiles (64, 64, 4, 3, None, False): RuntimeError" in caplog.text
    count = len(tuning)
    assert ask(tuning) == best and len(tuning) == count
    monkeypatch.setattr(tune, "_found", {})  # another process
    assert ask(tuning) == best and len(tuning) == count


@pytest.mark.parametrize("text", ["", "{", "[]", '{"forward": [128, 64]}', '{"forward": [128, 63, 8, 3, null, false]}'])
def test_a_broken_file_is_as_good_as_none(tuning, text):
    tune._file().parent.mkdir()
    tune._file().write_text(text)
    assert ask(tuning).block_k == 32 and tuning


def test_when_the_usual_tile_fails_the_error_is_raised(tuning, monkeypatch):
    def time(call):
        raise RuntimeError("out of resource")

    monkeypatch.setattr(tune, "_milliseconds", time)
    with pytest.raises(RuntimeError, match="out of resource"):
        ask(tuning)


def test_a_product_leaves_its_log_sum_exp_to_summaries(monkeypatch):
    seen, reduce = [], tiled.reduce
    monkeypatch.setattr(tiled, "reduce", lambda *given: seen.append(given[3]) or reduce(*given))
    q = torch.randn(1, 1, 6, 4)
    A = rg.attention(q, q, engine="tiled")
    before = A.entropy()
    A @ q
    torch.testing.assert_close(A.entropy(), before)
    assert seen[0] is None and torch.equal(seen[1], A.lse)
