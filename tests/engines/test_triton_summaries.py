"""Summaries by Triton kernels, against the definition: on a GPU, and in Triton's interpreter where there is none.

The interpreter must be asked for before kernels are imported, so these tests run in a process of their own there: the
first test starts it.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inside import watched
from support import all_within_budget

import regard as rg
from regard.engines import tiled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_TRITON = importlib.util.find_spec("triton") is not None
here = pytest.mark.skipif(
    not HAS_TRITON or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a GPU or Triton's interpreter (the first test starts a process that has it)",
)
FIVE = (rg.TopK(3), rg.Heatmap(8), rg.Profile(), rg.Received(), rg.Entropy())


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_all_of_it_in_the_interpreter():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-rs"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("SKIPPED [") == 1, "all but this one run there"


@pytest.fixture(autouse=True)
def nothing_is_read_elsewhere():
    """In the interpreter every load and store lies inside of its launch's tensors."""
    if not INTERPRETED:
        yield
        return
    with watched():
        yield


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same on every device."""
    random = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cpu").to(torch.get_default_device())


def problem(q_len=50, k_len=50, *, heads=2, kv_heads=2, batch=1, dim=8, dtype=torch.float32, **description):
    q, k = numbers(batch, heads, q_len, dim), numbers(batch, kv_heads, k_len, dim, seed=1)
    return q.to(dtype), k.to(dtype), description


def results(q, k, description, asked, engine):
    """Real tensors by name, and indices apart."""
    A = rg.attention(q, k, engine=engine, **description)
    found = A.summarize(*asked, progress=False) if engine != "triton" else kernels(A, asked)
    real, whole = {}, {}
    for n, result in enumerate(found):
        for m, x in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(x, torch.Tensor):
                (real if x.is_floating_point() else whole)[f"{n}.{m} {type(asked[n]).__name__}"] = x.cpu()
    return real, whole


def kernels(A, asked):
    from regard.engines.triton import summaries

    with torch.no_grad():
        states = summaries.reduce(A._still, asked)
        return tuple(each.finish(state, A._still) for each, state in zip(asked, states, strict=True))


def compare(make, asked=FIVE, ordered=True) -> None:
    """Kernels against the definition: `make` gives q, k and a description on the device it is called under."""
    with torch.device(DEVICE):
        found, order = results(*make(), asked, "triton")
    plain, _ = results(*make(), asked, "reference")
    exact, exact_order = results(*doubled(*make(), 0), asked, "reference")
    nudged, _ = results(*doubled(*make(), torch.finfo(make()[0].dtype).eps), asked, "reference")
    for name in exact:
        all_within_budget(*({name: x[name]} for x in (found, plain, exact, nudged)))
    for name, index in exact_order.items() if ordered else ():
        assert torch.equal(order[name], index), name


def doubled(q, k, description, eps):
    """All of it in float64, every number moved by eps of itself, up or down."""

    def wide(x):
        sign = 1 - 2 * (torch.arange(x.numel(), device=x.device).reshape(x.shape) * 7 // 3 % 2)
        return x.detach().double() * (1 + sign * eps)

    change = {}
    for name, value in description.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = wide(value)
        elif isinstance(value, torch.nn.Module):
            value = copy.deepcopy(value).double()
            for p in value.parameters():
                p.data = wide(p.data)
        change[name] = value
    return wide(q), wide(k), change


def drawn(term):
    """A term with random parameters."""
    for n, p in enumerate(term.parameters()):
        p.data = numbers(*p.shape, seed=2 + n)
    return term


SHORT_T5 = dict(buckets=8, max_distance=10)

CASES = {
    "plain": lambda: problem(),
    "whole tiles": lambda: problem(64, 64),
    "wide and short": lambda: problem(20, 70, q_start=0),
    "tall": lambda: problem(70, 20, q_start=0),
    "a table constant far away": lambda: problem(70, 70, position=drawn(rg.recipes.t5(2, **SHORT_T5))),
    "the same, whole tiles": lambda: problem(96, 96, position=drawn(rg.recipes.t5(2, **SHORT_T5))),
    "the same, causal": lambda: problem(70, 70, position=drawn(rg.recipes.t5(2, **SHORT_T5)), mask=rg.causal),
    "a table": lambda: problem(40, 40, position=drawn(rg.Static(rg.Cells(40), 2)), mask=rg.window(9, 4)),
    "slopes": lambda: problem(40, 40, heads=4, kv_heads=2, position=rg.recipes.alibi(4), mask=rg.causal),
    "starts": lambda: problem(
        20, 45, position=drawn(rg.Static(rg.Cells(70), 2)), q_start=12, k_start=3, sink=numbers(2), mask=rg.causal
    ),
    "a sink": lambda: problem(sink=numbers(2)),
    "lengths": lambda: problem(33, 33, batch=2, mask=rg.lengths(torch.tensor([0, 20]))),
    "documents": lambda: problem(40, 40, mask=rg.documents(torch.arange(40) // 12) & rg.causal),
    "dense": lambda: problem(20, 20, mask=rg.dense(numbers(20, 20) > 0)),
    "keys": lambda: problem(40, 40, mask=rg.keys(5, 20)),
    "softcap and a scale": lambda: problem(25, 25, softcap=2.0, scale=numbers(1, 2, 25, 1).abs() + 0.1),
    "a clipped content term": lambda: problem(25, 25, position=drawn(rg.recipes.shaw(8, 4))),
    "a class token": lambda: problem(
        25, 25, position=drawn(rg.recipes.beit(2, (4, 6))), geometry=rg.Grid(4, 6, unplaced=1)
    ),
    "a grid's table": lambda: problem(24, 24, position=drawn(rg.recipes.swin(2, (4, 6))), geometry=rg.Grid(4, 6)),
    "two axes": lambda: problem(24, 24, position=drawn(rg.recipes.sam(8, (4, 6))), geometry=rg.Grid(4, 6)),
    "odd width": lambda: problem(30, 30, dim=5),
    "wide heads": lambda: problem(20, 40, dim=72, q_start=0),
}  # fmt: skip


@here
@pytest.mark.parametrize("name", CASES)
def test_summaries_equal_the_definition(name):
    compare(CASES[name])


@here
def test_half_precision():
    def make():
        return problem(40, 40, dtype=torch.float16, position=drawn(rg.recipes.t5(2, **SHORT_T5)), mask=rg.causal)

    compare(make, ordered=False)


@here
@pytest.mark.parametrize("cells", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("mask", [None, rg.causal], ids=["all", "causal"])
def test_cells_smaller_and_larger_than_a_tile(cells, mask):
    """Cells of every size against tiles of 32 x 16: several in one, one in several, and sizes that do not divide."""
    compare(lambda: problem(75, 80, q_start=5, mask=mask), (rg.Heatmap(cells), rg.Received()))


@here
@pytest.mark.parametrize("q_len, k_len", [(64, 64), (50, 70)], ids=["whole tiles", "others"])
def test_small_cells_beside_a_table(q_len, k_len):
    """Keys of a tile come in another order where the table is constant: cells and mass received must not mind."""

    def make():
        return problem(q_len, k_len, q_start=0, position=drawn(rg.recipes.t5(2, **SHORT_T5)))

    compare(make, (rg.Heatmap(16), rg.Received()))
    compare(make, (rg.Received(),))


@here
@pytest.mark.parametrize("factor", [1.0, 0.0, -0.0])
def test_equal_logits_rank_by_the_lower_key(factor):
    """Four keys come again and again, one of them late; or all logits are 0, of either sign."""

    def make():
        q, k, _ = problem(20, 4)
        which = torch.cat([numbers(40).argsort() % 3 + 1, numbers(24, seed=3).argsort() % 4])
        return q * factor, k[:, :, which], {"q_start": 0}

    compare(make, (rg.TopK(8), rg.TopK(3)))
    compare(make, (rg.TopK(1),))


@here
def test_what_has_no_kernel_is_shown_strips(monkeypatch):
    """Only that: the others are not shown any."""
    shown = []
    monkeypatch.setattr(tiled, "reduce", lambda p, s, *rest, real=tiled.reduce: (shown.extend(s), real(p, s, *rest))[1])

    class Halves(rg.Heatmap):
        """Another summary than its base, perhaps."""

    asked = (rg.Toeplitz(), rg.Entropy(), rg.SelfShare(), rg.TopK(65), Halves(2), rg.Received(), rg.Profile())
    compare(lambda: problem(70, 70, mask=rg.causal), asked)
    assert [type(each).__name__ for each in shown] == ["Toeplitz", "Share", "TopK", "Halves"]


@here
def test_a_problem_that_no_kernel_takes_is_shown_strips(monkeypatch):
    from regard.engines import triton as engine

    monkeypatch.setitem(globals(), "kernels", lambda A, asked: A.summarize(*asked, progress=False))
    shown = []
    monkeypatch.setattr(tiled, "reduce", lambda p, s, *rest, real=tiled.reduce: (shown.extend(s), real(p, s, *rest))[1])
    asked = (rg.Entropy(), rg.Profile())
    compare(lambda: problem(20, 20, dim=300), asked)
    assert engine.tiled is tiled and tuple(shown) == asked


@here
def test_states_have_the_same_bits_every_time():
    with torch.device(DEVICE):
        made = problem(70, 70, position=drawn(rg.recipes.t5(2, **SHORT_T5)))
        twice = [results(*made, FIVE, "triton") for _ in range(2)]
    for first, second in zip(twice[0], twice[1], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@here
def test_progress_is_told():
    from regard.engines.triton import summaries

    told = []
    with torch.device(DEVICE):
        q, k, _ = problem()
        summaries.reduce(rg.attention(q, k)._still, FIVE, lambda *args: told.append(args))
    assert told == [(100, 100)]


@here
def test_the_log_sum_exp_alone():
    from regard.engines.triton.summaries import log_sum_exp

    def lse(q, k, description):
        return rg.attention(q, k, engine="reference", **description).lse

    def make():
        return problem(33, 33, batch=2, mask=rg.lengths(torch.tensor([0, 20])))

    with torch.device(DEVICE):
        q, k, description = make()
        found = log_sum_exp(rg.attention(q, k, **description)._still).cpu()
    eps = torch.finfo(q.dtype).eps
    plain, exact, nudged = lse(*make()), lse(*doubled(*make(), 0)), lse(*doubled(*make(), eps))
    all_within_budget(*({"lse": x} for x in (found, plain, exact, nudged)))


@here
def test_a_log_sum_exp_that_is_known_saves_the_first_pass(monkeypatch):
    from regard.engines.triton import summaries

    asked = (rg.Heatmap(8), rg.Profile(), rg.Received())
    with torch.device(DEVICE):
        q, k, description = problem(33, 33, batch=2, mask=rg.lengths(torch.tensor([0, 20])))
        A = rg.attention(q, k, **description)
        first = summaries.reduce(A._still, asked)
        lse = summaries.log_sum_exp(A._still)
        monkeypatch.setattr(summaries, "by_rows", None)
        second = summaries.reduce(A._still, asked, None, lse)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


@here
@pytest.mark.parametrize("table", [True, False], ids=["table", "plain"])
@pytest.mark.parametrize("late", [0, 20, 70, 100])
def test_what_weights_are_relative_to_was_too_far_off(late, table):
    """In half precision that is one number a row. Where all logits are far from it, a block comes again."""

    def make():
        q, k, description = problem(40, 100, heads=1, kv_heads=1, dtype=torch.float16, q_start=0)
        k[:, :, :late], k[:, :, late:] = -12, 12  # logits more than 100 above 0, or below, in units of log 2
        return q.abs() * 3, k, description | ({"position": drawn(rg.recipes.t5(1, **SHORT_T5))} if table else {})

    compare(make, (rg.TopK(3), rg.Entropy(), rg.Received()), ordered=False)


#: q_len, k_len, where both begin, and the size of a cell: groups of rows are 32 (cells of 1), 64 (of 2) or 128 high
PLACES = {
    "both sides": (160, 64, 0, 64, 1),
    "both sides, cells of several rows": (512, 32, 0, 250, 8),
    "both sides, cells of whole tiles": (512, 32, 0, 250, 32),
    "queries behind": (128, 64, 40, 0, 2),
    "queries before": (128, 64, 0, 100, 2),
    "far behind": (256, 64, 500, 0, 8),
    "far before": (64, 96, 0, 500, 1),
}


@here
@pytest.mark.parametrize("name", PLACES)
def test_half_precision_beside_the_reach_of_a_table(name):
    """Tiles on both sides of a table's reach are one loop: each has its own value of the table, and its own cells."""
    q_len, k_len, q_start, k_start, cell = PLACES[name]

    def make():
        term = drawn(rg.recipes.t5(1, **SHORT_T5))
        starts = {"q_start": q_start, "k_start": k_start}
        return problem(q_len, k_len, heads=1, kv_heads=1, dtype=torch.float16, position=term, **starts)

    compare(make, (rg.Heatmap(cell=cell), rg.Received(), rg.Entropy()))
    compare(make, (rg.Heatmap(cell=cell), rg.TopK(3)))
    compare(make, (rg.Received(),))


@here
@pytest.mark.parametrize("q_len, k_len", [(32, 16), (32, 48), (64, 112), (96, 128), (70, 150)])
def test_half_precision_without_a_table(q_len, k_len):
    """One tile, an odd number of narrow ones, several wide ones, and ends that fill none."""
    compare(lambda: problem(q_len, k_len, dtype=torch.float16, q_start=0), (rg.Entropy(), rg.TopK(2), rg.Profile()))
    compare(lambda: problem(q_len, k_len, dtype=torch.float16, q_start=0), (rg.Heatmap(cell=8), rg.Received()))


@here
@pytest.mark.parametrize("mask, dtype", [(rg.window(90, 80), torch.float32), (None, torch.float16)], ids=str)
def test_groups_of_several_tiles(monkeypatch, mask, dtype):
    """As with very many keys: few groups, each of some tiles, looked at in several chunks."""
    from regard.engines.triton import summaries

    monkeypatch.setattr(summaries, "GROUPS", 8)
    monkeypatch.setattr(summaries, "CHUNK", 32)

    def make():
        return problem(40, 300, heads=1, kv_heads=1, q_start=130, mask=mask, dtype=dtype)

    compare(make, (rg.TopK(2), rg.TopK(1)), ordered=dtype == torch.float32)


@here
def test_more_keys_than_are_looked_at_together():
    compare(lambda: problem(20, 90, heads=1, kv_heads=1, q_start=0, mask=rg.keys(3, 80)), (rg.TopK(40),))


@here
@pytest.mark.parametrize("distinct", [600, 5])
def test_eights_of_groups_and_portions_of_rows(monkeypatch, distinct):
    """Many groups are found in two steps; and where groups of all rows are too many, some rows come at a time."""
    from regard.engines.triton import summaries

    monkeypatch.setattr(summaries, "ROOM", 1)

    def make():
        q, k, description = problem(40, distinct, heads=1, kv_heads=1, q_start=0)
        return q, k[:, :, numbers(600).argsort() % distinct], description

    compare(make, (rg.TopK(2), rg.Entropy()))


@here
def test_a_given_log_sum_exp_is_rounded_once():
    """In units of log 2. What is the same for a row, or for all rows, does not average out in a cell."""
    from regard.engines.triton import summaries

    with torch.device(DEVICE):
        q, k, _ = problem(64, 64)
        lse = numbers(1, 2, 64, seed=2) * 20
        found = summaries.Look(rg.attention(q, k)._still, lse).lse
    assert torch.equal(found, (lse.double() / math.log(2)).float())
