"""A part of A as a problem of its own: the same logits and weights as the whole, by every engine and description."""

from __future__ import annotations

import pytest
import torch
from descriptions import Case, cases
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import all_within_budget, within_budget
from torch import Tensor

import regard as rg
from regard.engines.cpu import looking
from regard.engines.tiled import strips
from regard.plan import engine_module
from regard.summaries import LogSumExp

CELL = 2


def pooled(weights: Tensor, logits: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Sums, counts and maxima of cells, from stored matrices, cell by cell."""
    q_len, k_len = weights.shape[-2:]
    shape = *weights.shape[:2], -(-q_len // CELL), -(-k_len // CELL)
    names = ("sum", "max", "logit sum", "logit max", "count")
    found = {name: weights.new_full(shape, -torch.inf if name == "logit max" else 0.0) for name in names}
    for a in range(shape[2]):
        for b in range(shape[3]):
            at = (..., slice(a * CELL, (a + 1) * CELL), slice(b * CELL, (b + 1) * CELL))
            found["sum"][..., a, b] = weights[at].sum((-2, -1))
            found["max"][..., a, b] = weights[at].amax((-2, -1))
            found["logit sum"][..., a, b] = torch.where(visible[at], logits[at], 0.0).sum((-2, -1))
            found["logit max"][..., a, b] = logits[at].amax((-2, -1))
            found["count"][..., a, b] = visible[at].to(weights).sum((-2, -1))
    return found


def sink_column(sink: Tensor, logits: Tensor) -> Tensor:
    return sink.to(logits).reshape(1, -1, 1, 1).expand(logits.shape[0], logits.shape[1], logits.shape[2], 1)


def dense(built, rows: slice, cols: slice) -> dict[str, Tensor]:
    """What a part must give, from the whole, stored."""
    steps = rg.attention(built.q, built.k, **built.kwargs, engine="reference").steps()
    sink = built.kwargs.get("sink")
    ends = steps.masked if sink is None else torch.cat([steps.masked, sink_column(sink, steps.masked)], dim=-1)
    lse = ends.logsumexp(-1, keepdim=True)  # weights as they come from a stored log-sum-exp
    whole = torch.exp(steps.masked - lse.masked_fill(lse == -torch.inf, 0.0)), steps.masked, steps.visible
    weights, logits, visible = (x.detach()[:, :, rows][..., cols] for x in whole)
    return {"weights": weights, "logits": logits, **pooled(weights, logits, visible)}


def looked_at(engine: str, problem, lse: Tensor, rows: slice, cols: slice) -> dict[str, Tensor]:
    part, ends = problem.part(rows, cols), lse[:, :, rows].clone()
    module = engine_module(engine)
    summaries = [rg.Heatmap(cell=CELL), rg.Heatmap(cell=CELL, of="logits"), rg.Heatmap(cell=1), LogSumExp()]
    states = module.reduce(part, summaries, None, ends)
    for one in (rg.Heatmap(cell=CELL, of="logits"), rg.Heatmap(cell=1)):  # an engine may fuse one map a pass
        same = next(n for n, s in enumerate(summaries) if type(s) is type(one) and vars(s) == vars(one))
        assert torch.equal(module.reduce(part, [one], None, ends)[0][1], states[same][1])
    assert torch.equal(states[3][0], ends.to(states[3][0].dtype))
    (total, count, peak), (logit_total, also, logit_peak) = states[:2]
    assert torch.equal(count, also)
    return {
        "weights": states[2][0],
        "logits": module.tile(part, slice(0, rows.stop - rows.start), slice(0, cols.stop - cols.start)),
        "sum": total, "max": peak, "logit sum": logit_total, "logit max": logit_peak, "count": count,
    }  # fmt: skip


def compare(case: Case, engine: str, rows: slice, cols: slice) -> None:
    """An engine's part against float64 and plain PyTorch."""
    built, exact, nudged = case.build(), case.build(exact=True), case.build(exact=True, nudge=True)
    with torch.no_grad():
        A = rg.attention(built.q, built.k, **built.kwargs)
        problem, lse = A._still, A.lse
        if engine_module(engine).refuse(problem.form, "cpu", "float32") is not None:
            return
        found = looked_at(engine, problem, lse, rows, cols)
        wanted, plain, moved = (dense(x, rows, cols) for x in (exact, built, nudged))
    # weights share the logits' budget: an error of a logit is one of its weight
    all_within_budget(found, plain, wanted, moved)


@st.composite
def parts(draw) -> tuple[Case, tuple[float, ...]]:
    return draw(cases()), tuple(draw(st.floats(0, 1)) for _ in range(4))


#: a part that is the class token alone, and one within a line of a grid: their keys are one run that begins elsewhere
ALONE = Case(
    seed=0, batch=1, heads=1, kv_heads=1, geometry="class grid", q_shape=(2, 3), k_shape=(2, 3), score="dot",
    scale="default", terms=("cells", "query cells"), mask="none", starts="zero", softcap=False, sink=False, v_dim=1,
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts())
@example((ALONE, (0.0, 0.0, 0.0, 0.0)))
@example((ALONE, (0.3, 0.8, 0.75, 0.9)))
@pytest.mark.parametrize("engine", ["reference", "tiled", "cpu"])
def test_a_part_is_the_whole_seen_through_a_window(engine, given_part):
    case, at = given_part
    built = case.build()
    spans = []
    for low, high, length in ((*at[:2], built.sizes[2]), (*at[2:], built.sizes[3])):
        if not length:
            return
        first = min(int(low * length), length - 1)
        spans.append(slice(first, first + 1 + int(high * (length - first - 1))))
    compare(case, engine, *spans)


def whole(case: Case, engine: str, exact: bool = False, nudge: bool = False) -> dict[str, Tensor]:
    """Every summary that is compiled, of all of A."""
    built = case.build(exact=exact, nudge=nudge)
    with torch.no_grad():
        A = rg.attention(built.q, built.k, **built.kwargs, engine=engine)
        # apart: what adds up rows would have their log-sum-exp found before for all of them
        lse, entropy, top, cells = A.summarize(LogSumExp(), rg.Entropy(), rg.TopK(3), rg.Heatmap(2))
        (logits,) = A.summarize(rg.Heatmap(2, of="logits"))
        received, *rest = A.summarize(rg.Received(), *([rg.Profile()] if on_line(case) else []))
    return {
        "lse": lse, "entropy": entropy, "received": received, "top": top.weights, "sum": cells.sum, "max": cells.max,
        "count": cells.count, "logit sum": logits.sum, "logit max": logits.max,
        **({"profile": rest[0]} if rest else {}),
    }  # fmt: skip


def on_line(case: Case) -> bool:
    return case.geometry == "line"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_long_rows_are_looked_at_in_blocks_of_keys(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looking, "LONG", 0)  # every row is long
        patch.setattr(looking, "ROWS", 2)
        patch.setattr(strips, "STRIP", 4)
        built = case.build()
        problem = rg.attention(built.q, built.k, **built.kwargs)._still
        if engine_module("cpu").refuse(problem.form, "cpu", "float32") is not None:
            return
        found = whole(case, "cpu")
    plain, exact, nudged = (whole(case, "reference", *how) for how in ((), (True,), (True, True)))
    all_within_budget(found, plain, exact, nudged)


def test_a_window_of_some_keys_needs_the_log_sum_exp():
    A = rg.attention(torch.randn(1, 1, 6, 4), torch.randn(1, 1, 8, 4))[0, 0]
    (pooled_,) = A.window(slice(1, 5), slice(2, 7), rg.Heatmap(cell=1), lse=A.lse[1:5])
    within_budget(pooled_.sum, A[1:5, 2:7], A.to(torch.float64)[1:5, 2:7])
    with pytest.raises(ValueError, match="lse: expected that of the queries"):
        A.window(slice(1, 5), slice(2, 7), rg.Heatmap(cell=1))
    for rows in (slice(3, 3), slice(0, 6, 2), slice(9, 12)):
        with pytest.raises(ValueError, match="window: expected spans"):
            A.window(rows, slice(None), rg.Entropy())


@pytest.mark.parametrize(
    ("given_", "says"),
    [({}, "either cells or cell"), ({"cells": 2, "cell": 2}, "either cells or cell"), ({"cell": 0}, "cell: expected"),
     ({"cells": 2.5}, "cells: expected"), ({"cells": 2, "of": "lies"}, "of: expected 'weights' or 'logits'")],
)  # fmt: skip
def test_heat_maps_that_are_none_are_refused(given_, says):
    with pytest.raises(ValueError, match=says):
        rg.Heatmap(**given_)
