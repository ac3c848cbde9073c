"""Summaries of some rows of a long A by Triton kernels, as the explorer asks for them; and what they share.

As `test_triton_summaries.py`: on a GPU, and in Triton's interpreter in a process of its own where there is none. There
every load and store must lie inside of the tensors of its launch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inside import Spans
from support import all_within_budget, within_budget
from test_triton_summaries import (  # noqa: F401
    DEVICE,
    HAS_TRITON,
    INTERPRETED,
    SHORT_T5,
    doubled,
    drawn,
    here,
    nothing_is_read_elsewhere,
    numbers,
    problem,
)

import regard as rg
from regard.summaries import LogSumExp

ASKED = (LogSumExp(), rg.Entropy(), rg.Received(), rg.Profile())


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_all_of_it_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-rs"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("SKIPPED [") == 1, "all but this one run there"


def looked(q, k, description, engine, rows, asked) -> dict[str, torch.Tensor]:
    """Real results by name, of some rows and all keys."""
    A = rg.attention(q, k, engine=engine, **description)
    found = {}
    with torch.no_grad():
        for n, result in enumerate(A.window(rows, slice(None), *asked)):
            for m, x in enumerate(result if isinstance(result, tuple) else (result,)):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    found[f"{n}.{m} {type(asked[n]).__name__}"] = x.cpu()
    return found


def compare(make, rows, asked) -> None:
    """Kernels against strips; visible pairs are the same."""
    with torch.device(DEVICE):
        found = looked(*make(), "triton", rows, asked)
    eps = torch.finfo(make()[0].dtype).eps
    plain = looked(*make(), "tiled", rows, asked)
    exact, nudged = (looked(*doubled(*make(), moved), "tiled", rows, asked) for moved in (0, eps))
    for name in exact:
        if name.endswith(".1 Heatmap"):
            assert torch.equal(found[name], exact[name]), "visible pairs"
        all_within_budget(*({name: x[name]} for x in (found, plain, exact, nudged)))


def long(k_len=200, **description):
    """One head that sees itself, causal with a T5 bias if nothing else is said."""
    given = {"position": drawn(rg.recipes.t5(1, **SHORT_T5)), "mask": rg.causal} | description
    return problem(k_len, k_len, heads=1, kv_heads=1, **given)


PLACES = {
    "the first rows": (slice(0, 64), 32),
    "rows in the middle, whole cells": (slice(64, 128), 64),
    "half a cell": (slice(96, 128), 64),
    "a ragged end": (slice(160, 200), 64),
    "one row": (slice(199, 200), 128),
    "cells that divide nothing": (slice(70, 140), 47),
    "a cell wider than all keys": (slice(40, 100), 512),
}


@here
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    "mask, dtype",
    [(rg.causal, torch.float32), (rg.causal, torch.float16), (None, torch.float32)],
    ids=["causal", "causal, half precision", "all"],
)
def test_some_rows_of_many_keys(name, mask, dtype):
    rows, cell = PLACES[name]
    compare(lambda: long(mask=mask, dtype=dtype), rows, (rg.Heatmap(cell=cell), LogSumExp(), rg.Entropy()))


@here
@pytest.mark.parametrize("name", ["rows in the middle, whole cells", "a ragged end", "cells that divide nothing"])
def test_what_is_received_and_mass_per_displacement(name):
    rows, cell = PLACES[name]
    compare(long, rows, (rg.Heatmap(cell=cell), *ASKED))
    compare(long, rows, (rg.Received(),))


@here
def test_cells_whose_last_parts_lie_past_the_end():
    """64 keys a cell, the last of which has 16: no other part of it has any, though tiles divide all keys."""
    compare(lambda: long(144, mask=None), slice(0, 64), (rg.Heatmap(cell=64), rg.Received()))


MASKS = {
    "window": lambda: rg.window(40, 7),
    "window of the past": lambda: rg.window(70, -5),
    "keys": lambda: rg.keys(33, 150),
    "keys and a window": lambda: rg.keys(0, 60) & rg.window(90, 0),  # late rows see nothing
    "lengths": lambda: rg.lengths(torch.tensor([150])) & rg.causal,
    "documents": lambda: rg.documents(torch.arange(200) // 45) & rg.causal,
    "dense": lambda: rg.dense(numbers(200, 200) > 1.0),
}


@here
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("cell", [8, 96])
def test_masks_and_rows_that_see_nothing(name, cell):
    compare(lambda: long(200, mask=MASKS[name]()), slice(96, 192), (rg.Heatmap(cell=cell), *ASKED))


@here
def test_visible_pairs_follow_from_corners():
    """Counted without looking at a pair, for bounds, lengths of both sides, ranges and a start for each batch row."""
    from regard.engines.triton import summaries

    masks = [
        rg.causal, rg.window(3, 5), rg.window(0, 0), rg.window(9, -2), rg.offset(4), rg.keys(7, 19),
        rg.lengths(torch.tensor([0, 30])), rg.causal & rg.lengths(torch.tensor([25, 9])) & rg.keys(2, 100),
    ]  # fmt: skip
    for mask in masks:
        for cells in (1, 3, 40):
            with torch.device(DEVICE):
                q, k, _ = problem(37, 41, batch=2)
                given = {"mask": mask, "q_start": torch.tensor([3, 11]), "k_start": torch.tensor([0, 6])}
                A = rg.attention(q, k, **given)
                state = summaries.Look(A._still).start(rg.Heatmap(cells))
            exact = rg.attention(q.cpu(), k.cpu(), engine="tiled", **given).heatmap(cells).count
            assert torch.equal(state[1].cpu(), exact), (mask, cells)


@here
@pytest.mark.parametrize("mask, rooms", [("causal", 30_000), ("keys and a window", 1), ("all", 1 << 20)])
def test_a_map_whose_cells_are_tiles_comes_with_the_rows(monkeypatch, mask, rooms):
    """In half precision one pass gives it: of all rows at once, or of some at a time, which end within cells."""
    from regard.engines.triton import summaries

    monkeypatch.setattr(summaries, "by_columns", None)
    monkeypatch.setattr(summaries, "ROOM", rooms)
    monkeypatch.setattr(summaries, "RESIDENT", 1)
    given = {"causal": rg.causal, "all": None} | {name: make() for name, make in MASKS.items()}

    def make():
        shape = {"heads": 2, "kv_heads": 1, "batch": 2, "dtype": torch.float16}
        return problem(150, 150, **shape, position=drawn(rg.recipes.t5(2, **SHORT_T5)), mask=given[mask])

    size = 32 if INTERPRETED else 128
    compare(make, slice(10, 150), (rg.Heatmap(cell=size), LogSumExp(), rg.Entropy()))
    compare(make, slice(0, 150), (rg.Heatmap(cell=3 * size),))


@here
def test_the_same_where_the_maximum_is_found_again():
    """Logits more than 128 apart, in units of log 2: sums of cells are relative to other maxima, tile by tile."""

    def make():
        q, k, description = problem(64, 160, heads=1, kv_heads=1, q_start=0, dtype=torch.float16)
        k[:, :, :70], k[:, :, 70:] = -12, 12
        k[:, :, 100:] += numbers(1, 1, 60, 8, seed=5).half()
        return q.abs() * 3, k, description

    compare(make, slice(0, 64), (rg.Heatmap(cell=32 if INTERPRETED else 128), rg.Entropy()))


@here
def test_the_rounding_of_a_log_sum_exp_is_made_good():
    """All entries of a row would err alike: a log-sum-exp of 60 is rounded by some millionths, a row's sum is not."""
    far = 60.0

    def make(dtype):
        q, k, _ = problem(1, 200, heads=1, kv_heads=1)
        q[..., 0], k[..., 0] = far, 1.0
        engine = "triton" if dtype == torch.float32 else "tiled"
        return rg.attention(q.to(dtype), k.to(dtype), scale=1.0, q_start=0, engine=engine)

    with torch.device(DEVICE):
        A = make(torch.float32)
        assert A.plan.engine == "triton"
        found = A.window(slice(None), slice(None), rg.Heatmap(cell=200), rg.Received())
    exact = make(torch.float64).window(slice(None), slice(None), rg.Heatmap(cell=200), rg.Received())
    assert exact[0].sum.item() == pytest.approx(1, abs=1e-12)
    within_budget(found[0].sum.cpu(), torch.ones(1, 1, 1, 1), exact[0].sum, "a row's sum")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_an_access_outside_is_seen():
    """Of the watch itself: what lies inside, past the end, before the start, and what a mask leaves out."""
    import numpy as np

    x, y = torch.zeros(4, 6)[:, :3], torch.zeros(5, dtype=torch.int64)
    spans = Spans("kernel", {"x": x, "given": (None, y)})
    at = x.data_ptr() + 4 * np.array([0, 20, 21])
    spans.check("load", at[:2], np.array([True, True]), 4)
    spans.check("load", at, np.array([True, True, False]), 4)
    with pytest.raises(AssertionError, match=r"kernel: a load of 4 bytes .* 4 bytes from x"):
        spans.check("load", at, np.array([True, True, True]), 4)
    with pytest.raises(AssertionError, match=r"8 bytes from given\.1"):
        spans.check("store", np.array([y.data_ptr() - 8]), np.array([True]), 8)


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter's process only")
def test_a_kernel_that_reads_past_the_end_is_caught():
    from regard.engines.triton import summaries

    with torch.device(DEVICE):
        q, k, _ = problem()
        look = summaries.Look(rg.attention(q, k)._still)
        look.k = look.k[:, :, :40]  # but kernels are told of all
        with pytest.raises(Exception, match=r"by_rows: a load .* from k_ptr"):
            look.rows([], [])
