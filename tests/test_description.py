"""Bad input: when A is made, a message says what is wrong: the argument, what was found and what was expected."""

from __future__ import annotations

import math
import re

import pytest
import torch

import regard as rg

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 5, 6


def q(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (BATCH, HEADS, LENGTH, DIM))


def k(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (BATCH, KV_HEADS, LENGTH, DIM))


def v() -> torch.Tensor:
    return torch.randn(BATCH, KV_HEADS, LENGTH, 3)


def made(**options) -> rg.AttentionMatrix:
    return rg.attention(q(), k(), **options)


def refused(error: type[Exception], words: str, action) -> None:
    """The action raises this error, and its message says these words in this order (… for anything between)."""
    pattern = ".*".join(re.escape(part) for part in words.split("…"))
    with pytest.raises(error, match=f"(?s)^{pattern}"):
        action()


Value, Type, META = ValueError, TypeError, "meta"
DEVICE = "expected the device of q (cpu), found meta"
of = rg.attention
NAN, IDS = torch.tensor([math.nan]), torch.zeros(1, LENGTH).long()

# q and k

VECTORS = {
    "q a list": (lambda: of([1.0], k()), Type, "q: expected a tensor…found list"),
    "k a list": (lambda: of(q(), [1.0]), Type, "k: expected a tensor…found list"),
    "three axes": (lambda: of(q(4, 5, 6), k()), Value, "q: expected four axes…found shape [4, 5, 6]"),
    "k of five": (lambda: of(q(), k(1, 2, 4, 5, 6)), Value, "k: expected four axes…found shape [1, 2,"),
    "integers": (lambda: of(q().long(), k().long()), Type, "q: expected floating-point…found torch.int64"),
    "complex": (lambda: of(q() * 1j, k() * 1j), Type, "q: expected floating-point…torch.complex64"),
    "dtypes": (lambda: of(q(), k().double()), Type, "k: expected the dtype of q (torch.float32), found…64"),
    "devices": (lambda: of(q(), k().to("meta")), Value, "k: expected the device of q (cpu), found meta"),
    "batch": (lambda: of(q(), k(3, 2, 5, 6)), Value, "k: expected the batch size of q (2), found 3"),
    "dim": (lambda: of(q(), k(2, 2, 5, 4)), Value, "k: expected the dim of q (6), found 4"),
    "heads": (lambda: of(q(), k(2, 3, 5, 6)), Value, "k: its heads must divide…(4), found 3"),
    "more heads": (lambda: of(q(), k(2, 8, 5, 6)), Value, "k: its heads must divide…(4), found 8"),
    "no heads": (lambda: of(q(), k(2, 0, 5, 6)), Value, "k: its heads must divide…(4), found 0"),
}  # fmt: skip

# what attention takes besides

START = "q_start: expected"
OPTIONS = {
    "score": ({"score": "dot"}, Type, "score: expected Dot, Cosine…found 'dot'"),
    "score class": ({"score": rg.Cosine}, Type, "score: expected Dot, Cosine…found <class"),
    "scale zero": ({"scale": 0.0}, Value, "scale: expected a finite number other than zero…found 0.0"),
    "scale NaN": ({"scale": math.nan}, Value, "scale: expected a finite number other than zero…found nan"),
    "scale infinite": ({"scale": math.inf}, Value, "scale: expected a finite number other than zero…found inf"),
    "scale text": ({"scale": "half"}, Value, "scale: expected a finite number other than zero…found 'half'"),
    "scale shape": ({"scale": torch.ones(3, 1, 1)}, Value, "scale: expected…[2, 4, 5, 1], found [3, 1, 1]"),
    "scale per key": ({"scale": torch.ones(5)}, Value, "scale: expected…[2, 4, 5, 1], found [5]"),
    "scale whole": ({"scale": torch.ones(4, 1, 1).long()}, Type, "scale: expected floating-point…found torch.int64"),
    "scale device": ({"scale": torch.ones(1, device=META)}, Value, "scale: " + DEVICE),
    "negative start": ({"q_start": -1}, Value, f"{START}…>= 0, found -1"),
    "k_start": ({"k_start": -2}, Value, "k_start: expected…>= 0, found -2"),
    "start real": ({"q_start": 1.5}, Type, f"{START}…found 1.5"),
    "start text": ({"q_start": "1"}, Type, f"{START}…found '1'"),
    "start list": ({"q_start": [1, 2]}, Type, f"{START}…found [1, 2]"),
    "start bool": ({"q_start": True}, Value, f"{START}…found True"),
    "starts": ({"q_start": torch.tensor([1, 2, 3])}, Value, f"{START}…one a batch row ([2]), found torch.int64 [3]"),
    "starts real": ({"q_start": torch.tensor([1.0, 2.0])}, Value, f"{START}…found torch.float32 [2]"),
    "starts bool": ({"q_start": torch.tensor([True, False])}, Value, f"{START}…found torch.bool [2]"),
    "starts negative": ({"k_start": torch.tensor([0, -3])}, Value, "k_start: …found -3"),
    "softcap": ({"softcap": 0.0}, Value, "softcap: expected a positive number, found 0.0"),
    "softcap negative": ({"softcap": -2}, Value, "softcap: expected a positive number, found -2"),
    "softcap NaN": ({"softcap": math.nan}, Value, "softcap: expected a positive number, found nan"),
    "softcap text": ({"softcap": "x"}, Value, "softcap: expected a positive number, found 'x'"),
    "sink length": ({"sink": torch.zeros(3)}, Value, "sink: expected one logit a head ([4])…found [3]"),
    "sink axes": ({"sink": torch.zeros(1, 4)}, Value, "sink: expected one logit a head ([4])…found [1, 4]"),
    "sink list": ({"sink": [0.0] * 4}, Type, "sink: expected…found list"),
    "sink NaN": ({"sink": math.nan}, Value, "sink: expected finite numbers, found"),
    "sink device": ({"sink": torch.zeros(4, device=META)}, Value, "sink: " + DEVICE),
    "dropout one": ({"dropout": 1.0}, Value, "dropout: expected a probability…found 1.0"),
    "dropout below": ({"dropout": -0.1}, Value, "dropout: expected a probability…found -0.1"),
    "dropout NaN": ({"dropout": math.nan}, Value, "dropout: expected a probability from 0…found nan"),
    "dropout text": ({"dropout": "x"}, Type, "dropout: expected a probability from 0…found 'x'"),
    "engine": ({"engine": "warp"}, Value, "engine: expected one of…tiled…found 'warp'"),
    "geometry": ({"geometry": "grid"}, Type, "geometry: expected a geometry or (queries', keys'), found 'grid'"),
    "small grid": ({"geometry": rg.Grid(2, 2)}, Value, "geometry: Grid(2, 2) has 4 tokens, found q_len = 5"),
    "large grid": ({"geometry": rg.Grid(2, 4)}, Value, "geometry: Grid(2, 4) has 8 tokens, found q_len = 5…q_start"),
    "beyond a grid": ({"geometry": rg.Grid(2, 4), "q_start": 4, "k_start": 0}, Value,
                      "geometry: Grid(2, 4) has 8 tokens, found q_len = 5, q_start = 4"),
    "starts beyond": ({"geometry": rg.Grid(8), "q_start": torch.tensor([0, 4]), "k_start": 0}, Value,
                      "geometry: Grid(8) has 8 tokens, found q_len = 5, q_start = 4"),
    "few points": ({"geometry": rg.Points(torch.zeros(4, 2))}, Value, "geometry: Points([4, 2]) has 4 tokens, found"),
    "points batch": ({"geometry": rg.Points(torch.zeros(3, 5, 2))}, Value, "geometry: Points has 3 batch…expected 2"),
    "points device": ({"geometry": rg.Points(torch.zeros(5, 2, device=META))}, Value, "geometry: " + DEVICE),
    "axes of two": ({"geometry": (rg.Grid(5), rg.Grid(5, 1))}, Value, "geometry:…axes, found Grid(5) and Grid"),
    "points, line": ({"geometry": (rg.Points(torch.zeros(5, 1)), rg.Line())}, Value, "geometry: Points go with Points"),
    "grid, line": ({"geometry": (rg.Grid(5), rg.Line())}, Value, "geometry:…found Grid(5) and Line()"),
    "line, grid": ({"geometry": (rg.Line(), rg.Grid(5))}, Value, "geometry:…found Line() and Grid(5)"),
}  # fmt: skip

# masks

MASKS = {
    "a tensor": (lambda: torch.ones(5, 5) > 0, Type, "mask: expected a mask…found Tensor…dense()"),
    "a function": (lambda: rg.nearest, Type, "mask: expected a mask…found function"),
    "and a tensor": (lambda: rg.causal & (torch.ones(5, 5) > 0), Type, "mask: expected a mask, found Tensor…dense()"),
    "floats": (lambda: rg.dense(torch.zeros(5, 5)), Type, "dense: expected a boolean tensor…found …float32"),
    "a list": (lambda: rg.dense([[True]]), Type, "dense: expected a boolean tensor…found list"),
    "one axis": (lambda: rg.dense(torch.ones(5) > 0), Value, "dense: expected [q_len, k_len]…found [5]"),
    "size": (lambda: rg.dense(torch.ones(5, 4) > 0), Value, "mask: dense has shape [1, 1, 5, 4]…[2, 4, 5, 5]"),
    "heads": (lambda: rg.dense(torch.ones(3, 5, 5) > 0), Value, "mask: dense has shape [1, 3, 5, 5]…[2, 4, 5, 5]"),
    "device": (lambda: rg.dense(torch.ones(5, 5, device=META) > 0), Value, "mask: " + DEVICE),
    "lengths": (lambda: rg.lengths([1, 2, 3]), Value, "mask: lengths has 3 entries, expected…(2)"),
    "queries": (lambda: rg.lengths([1], [1, 2, 3]), Value, "mask: queries has 3 entries, expected…(2)"),
    "real lengths": (lambda: rg.lengths([1.5]), Value, "count: expected…whole numbers, found …float32"),
    "one length": (lambda: rg.lengths(3), Value, "count: expected…whole numbers, found torch.int64 []"),
    "documents": (lambda: rg.documents(torch.zeros(4).long()), Value, "mask: documents…[1, 4]…queries…[2 or 1, 5]"),
    "key documents": (lambda: rg.documents(IDS, IDS.expand(3, 5)), Value, "mask: documents…[3, 5]…keys…[2 or 1, 5]"),
    "real documents": (lambda: rg.documents(torch.zeros(5)), Value, "ids: expected whole numbers…found …float32"),
    "no documents": (lambda: rg.documents(), Value, "documents: give either ids or cumulative"),
    "bounds": (lambda: rg.documents(cumulative=torch.tensor([0, 3, 2])), Value, "cumulative: expected…found [0, 3, 2]"),
    "total": (lambda: rg.documents(cumulative=torch.tensor([0, 3])), Value, "mask: documents has…shape [1, 3]"),
    "tokens": (lambda: rg.induction(torch.zeros(4).long()), Value, "mask: induction has…shape [1, 4]"),
    "window axes": (lambda: rg.window((1, 1), (0, 0)), Value, "mask: window((1, 1), (0, 0)) names 2 axes…has 1"),
    "offset axes": (lambda: rg.offset(0, 1), Value, "mask: offset(0, 1) names 2 axes, the geometry has 1"),
    "inside &": (lambda: rg.causal & ~rg.lengths([1, 2, 3]), Value, "mask: lengths has 3 entries"),
    "window": (lambda: rg.window(1.5), Value, "left: expected an integer or None, found 1.5"),
    "empty window": (lambda: rg.window(-2, 1), Value, "window: no key is at most -2 before and 1 after a query"),
    "uneven window": (lambda: rg.window((1, 1), 0), Value, "window: expected two…found (1, 1) and 0"),
    "window of reals": (lambda: rg.window((1.5,), (1,)), Value, "left: expected…found (1.5,)"),
    "offset": (lambda: rg.offset(0.5), Value, "delta: expected integers, found (0.5,)"),
    "keys": (lambda: rg.keys(3, 1), Value, "keys: expected first <= last, found 3 and 1"),
    "real keys": (lambda: rg.keys(1.5), Value, "first: expected an integer, found 1.5"),
    "nearest": (lambda: rg.nearest(0), Value, "count: expected a positive integer, found 0"),
}  # fmt: skip

# position terms


def t5() -> rg.Static:
    return rg.recipes.t5(4)


def shaw() -> rg.FromQuery:
    return rg.recipes.shaw(DIM, 2)


def static(*given, **named) -> rg.Static:
    return rg.Static(rg.Clipped(2), *given, **named)


def spoiled(term, name: str):
    """A term with NaN written into a parameter after it was made."""
    with torch.no_grad():
        dict(term.named_parameters())[name].view(-1)[1] = math.nan
    return term


def table(dim: int = DIM) -> rg.Table:
    return rg.Table(dim, clip=2)


ONE_SET = "expected one set for each of the 4 heads, or one for all, found 3"
TERMS = {
    "text": (lambda: "t5", Type, "position: expected a term…found str"),
    "a feature": (lambda: rg.Slope(), Type, "position: expected a term…found Slope"),
    "in a list": (lambda: [t5(), 3], Type, "position: expected a term…found int"),
    "short table": (lambda: rg.Static(rg.Cells(4), 4), Value, "position: Cells(4) holds…-3 to 3…reaches from -4 to 4"),
    "no features": (lambda: rg.Static("slope"), Type, "features: expected a feature…found str"),
    "axes": (lambda: rg.Static(rg.Cells(2, 3), 4), Value, "position: Cells(2, 3) looks at 2 axes, the geometry has 1"),
    "static heads": (lambda: static(3), Value, f"readout: {ONE_SET}"),
    "feature heads": (lambda: rg.Static(rg.Network(3)), Value, f"position: features: {ONE_SET}"),
    "weight heads": (lambda: rg.FromQuery.learn(table(), DIM, 3), Value, f"weight: {ONE_SET}"),
    "offset heads": (lambda: rg.FromQuery(table(), offset=torch.zeros(3, DIM)), Value, f"offset: {ONE_SET}"),
    "both heads": (lambda: rg.Static(rg.Network(4), 3), Value, "heads: the features have 4, found 3"),
    "readout": (lambda: static(readout=torch.zeros(4)), Value, "readout: expected [heads, 5]…[4]"),
    "query dim": (lambda: rg.FromQuery(table(4)), Value, "position: without a weight…(6), found Table(Clipped(2"),
    "weight dim": (lambda: rg.FromKey.learn(table(4), 5), Value, "weight: expected [heads or 1, 6…found [1, 5, 4]"),
    "weight axes": (lambda: rg.FromQuery(table(4), weight=torch.zeros(6, 4)), Value, "weight: expected…found [6, 4]"),
    "offset axes": (lambda: rg.FromQuery(table(), offset=torch.zeros(6)), Value, "offset: expected…found [6]"),
    "offset dim": (lambda: rg.FromKey(table(), offset=torch.zeros(1, 5)), Value, "offset: expected…6], found [1, 5]"),
    "device": (lambda: t5().to("meta"), Value, "position: " + DEVICE),
    "NaN given": (lambda: rg.Static(rg.Clipped(0), readout=NAN[None]), Value, "readout: expected finite"),
    "NaN weight": (lambda: rg.FromQuery(table(4), weight=NAN.expand(1, 6, 4)), Value, "weight: expected finite"),
    "NaN offset": (lambda: rg.FromQuery(table(), offset=NAN.expand(1, 6)), Value, "offset: expected finite"),
    "NaN readout": (lambda: spoiled(t5(), "readout"), Value, "position: NaN in readout of Static(Buckets("),
    "NaN table": (lambda: spoiled(shaw(), "features.values"), Value, "position: NaN in features.values of From"),
    "NaN network": (lambda: spoiled(rg.Static(rg.Network(4)), "features.bias1"), Value, "position: NaN in features"),
    "NaN in a sum": (lambda: rg.Rotary() + spoiled(t5(), "readout"), Value, "position: NaN in readout"),
    "NaN bound": (lambda: spoiled(t5(), "readout").bind(gate=torch.ones(1, 1, 1, 1)), Value, "position: NaN"),
    "NaN frequency": (lambda: rg.Rotary(frequencies=NAN.expand(3)), Value, "frequencies: expected finite"),
    "odd dim": (lambda: rg.Rotary(3), Value, "dim: expected an even number of dimensions to rotate, found 3"),
    "large dim": (lambda: rg.Rotary(8), Value, "position: Rotary needs…at most 6, found 8"),
    "frequencies": (lambda: rg.Rotary(frequencies=torch.ones(2)), Value, "frequencies: expected 3 (for 6…found 2"),
    "frequency axes": (lambda: rg.Rotary(frequencies=torch.ones(2, 2)), Value, "frequencies: expected a row…found"),
    "base": (lambda: rg.Rotary(base=0), Value, "base: expected a positive number, found 0"),
    "two rotations": (lambda: rg.Rotary() + t5() + rg.Rotary(), Value, "position: at most one Rotary term"),
    "bound to nothing": (lambda: t5().bind(), Value, "bind: give a gate, a query or a key"),
    "bound rotation": (lambda: rg.Rotary().bind(gate=q()), Value, "bind: a Rotary term takes neither gate"),
    "gate": (lambda: t5().bind(gate=torch.ones(2, 3, 5, 1)), Value, "gate: expected…[2, 4, 5, 1], found [2, 3"),
    "gate axes": (lambda: t5().bind(gate=torch.ones(5)), Value, "gate: expected…[2, 4, 5, 1], found [5]"),
    "query of static": (lambda: t5().bind(query=q()), Value, "query: only a FromQuery term…found Static"),
    "key of query": (lambda: shaw().bind(key=k()), Value, "key: only a FromKey term…found FromQuery"),
    "query length": (lambda: shaw().bind(query=q(2, 4, 3, 6)), Value, "bind: expected [2, heads, 5…found [2, 4, 3, 6]"),
    "query heads": (lambda: shaw().bind(query=q(2, 3, 5, 6)), Value, "bind: a query or key: " + ONE_SET),
    "query dtype": (lambda: shaw().bind(query=q().long()), Type, "bind: …query…floating-point…found torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", VECTORS)
def test_vectors(kind):
    action, error, words = VECTORS[kind]
    refused(error, words, action)


@pytest.mark.parametrize("kind", OPTIONS)
def test_options(kind):
    options, error, words = OPTIONS[kind]
    refused(error, words, lambda: made(**options))


@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind):
    make, error, words = MASKS[kind]
    refused(error, words, lambda: made(mask=make()))


@pytest.mark.parametrize("kind", TERMS)
def test_position_terms(kind):
    make, error, words = TERMS[kind]
    refused(error, words, lambda: made(position=make()))


def test_terms_on_grids_and_points():
    grid, points = rg.Grid(5, 1), rg.Points(torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0], [4, 0]]))
    words = "position: Cells(2, 2) holds displacements -1 to 1 on axis 0, but the geometry reaches from -4 to 4"
    for geometry in (grid, points):
        refused(ValueError, words, lambda: made(geometry=geometry, position=rg.Static(rg.Cells(2, 2), 4)))  # noqa: B023
    flat = rg.recipes.t5(4)
    refused(
        ValueError,
        "position: Buckets(32…looks at 1 axes, the geometry has 2",
        lambda: made(geometry=grid, position=flat),
    )
    real = rg.Points(torch.rand(5, 1))
    refused(
        ValueError,
        "geometry: Clipped(2) needs whole",
        lambda: made(geometry=real, position=rg.Static(rg.Clipped(2), 4)),
    )
    words = "position: Rotary needs a multiple of 4 dimensions (two an axis), at most 6, found 6"
    refused(ValueError, words, lambda: made(geometry=grid, position=rg.Rotary()))
    odd = lambda: rg.attention(q(2, 4, 5, 5), k(2, 2, 5, 5), position=rg.Rotary())  # noqa: E731
    refused(ValueError, "position: Rotary needs a multiple of 2 dimensions…found 5", odd)


@pytest.mark.parametrize("mask", [rg.causal, rg.window(1), rg.offset(0), rg.lengths([1]) & ~rg.causal], ids=str)
def test_queries_whose_place_is_not_known(mask):
    words = "q_start: q_len = 2 and k_len = 5 differ…q_start=3…q_start=0"
    refused(ValueError, words, lambda: rg.attention(q(2, 4, 2, 6), k(), mask=mask))
    for start in (0, 3):
        rg.attention(q(2, 4, 2, 6), k(), mask=mask, q_start=start)
    rg.attention(q(2, 4, 2, 6), k(), mask=rg.lengths([3]))  # no order, no question


# using A


def test_values():
    A = made()
    for wrong, error, words in (
        (3, Type, "v: expected a tensor, found int"),
        ([1.0], Type, "v: expected a tensor, found list"),
        (torch.ones(2, 2, 4, 3), Value, "v: expected shape [2, 2, 5, …found [2, 2, 4, 3]"),
        (torch.ones(2, 3, 5, 3), Value, "v: expected shape [2, 2, 5, …found [2, 3, 5, 3]"),
        (torch.ones(5, 3), Value, "v: expected shape [2, 2, 5, …found [5, 3]"),
        (v().double(), Type, "v: expected the dtype of q and k (torch.float32), found torch.float64"),
        (v().to("meta"), Value, "v: expected the device of q and k (cpu), found meta"),
    ):
        refused(error, words, lambda: A @ wrong)  # noqa: B023
        if isinstance(wrong, torch.Tensor):
            refused(error, words, lambda: torch.matmul(A, wrong))  # noqa: B023
            refused(error, words, lambda: A.steps(wrong))  # noqa: B023
    # of one head, in the shapes of one head
    refused(Value, "v: expected shape [5, …found [2, 2, 5, 3]", lambda: A[0, 0] @ v())
    refused(Value, "v: expected shape [2, 5, …found [3, 5, 3]", lambda: A[0] @ torch.ones(3, 5, 3))
    refused(Type, "v @ A: A stands on the left", lambda: v() @ A)
    refused(Type, "softmax does not take a lazy A", lambda: torch.softmax(A, -1))


INDICES = {
    "batch": (2, "batch: expected an index from -2 to 1, found 2"),
    "head": ((0, -5), "head: expected an index from -4 to 3, found -5"),
    "query": ((0, 0, 5), "query: expected an index from -5 to 4, found 5"),
    "key": ((0, 0, 0, 9), "key: expected an index from -5 to 4, found 9"),
    "bool": (True, "batch: expected an integer, found True"),
    "five": ((0, 0, 0, 0, 0), "A has 4 axes [2, 4, 5, 5], found 5 indices"),
    "two ellipses": ((..., ...), "A has 4 axes [2, 4, 5, 5], found 2"),
    "two lists": ((0, 0, [0, 1], [0, 1]), "A: index one axis with a list or a tensor at a time"),
    "lists of heads and rows": (([0], 1, [2]), "A: index one axis with a list or a tensor at a time"),
    "list": ((0, [0, 4]), "index: expected from -4 to 3, found 0 to 4"),
    "booleans": ((0, torch.ones(3) > 0), "index: expected whole numbers or 4 booleans, found torch.bool [3]"),
    "real": ((0, 0, 1.5), "index: expected whole numbers or 5 booleans, found"),
    "reals": ((0, torch.ones(2)), "index: expected whole numbers or 4 booleans, found torch.float32 [2]"),
    "table": ((0, [[0, 1]]), "index: expected whole numbers or 4 booleans, found torch.int64 [1, 2]"),
    "text": ("head", "index: expected whole numbers or 2 booleans, found 'head'"),
    "none": (None, "index: expected whole numbers or 2 booleans, found None"),
    "none in a row": ((0, 0, None), "index: expected whole numbers or 5 booleans, found None"),
}


@pytest.mark.parametrize("kind", INDICES)
def test_bad_indices(kind):
    index, words = INDICES[kind]
    refused(IndexError, words, lambda: made()[index])
    refused(IndexError, words, lambda: made().logits[index])


def test_good_indices_that_are_easy_to_refuse():
    A = made()
    whole = A.dense()
    assert A[:, []].shape == (2, 0, 5, 5) and A[0, 0, []].shape == (0, 5)
    assert torch.equal(A[torch.tensor(1), 0, 2], whole[1, 0, 2])
    assert torch.equal(A[..., ::-2], whole.flip(-1)[..., ::2]) and torch.equal(A[::-1].dense(), whole.flip(0))
    assert torch.equal(A[1, 0, torch.arange(5) > 2], whole[1, 0, 3:])


def test_bad_questions():
    A = made()
    for error, words, action in (
        (Value, "explain: choose a batch row and a head first", lambda: A.explain(0, 0)),
        (IndexError, "i: expected an index from -5 to 4, found 5", lambda: A[0, 0].explain(5, 0)),
        (IndexError, "j: expected an integer, found 1.0", lambda: A[0, 0].explain(0, 1.0)),
        (Value, "k: expected a positive integer, found 0", lambda: A.topk(0)),
        (Value, "cells: expected a positive integer, found 2.5", lambda: A.heatmap(2.5)),
        (Value, "width: expected an integer >= 0, found -1", lambda: A.band(-1)),
        (Type, "pairs: expected a mask…positions only, found nearest(2)", lambda: A.mass(rg.nearest(2))),
        (Type, "pairs: expected a mask…found None", lambda: A.share(None)),
        (Value, "mask: offset(0, 1) names 2 axes, the geometry has 1", lambda: A.share(rg.offset(0, 1))),
        (Value, "mask: induction has…shape [1, 4]…[2 or 1, 5]", lambda: A.induction_share(torch.zeros(4).long())),
        (Type, "summarize: expected summaries such as TopK(8), found 'topk'", lambda: A.summarize("topk")),
        (Type, "summarize: expected summaries such as TopK(8), found <class", lambda: A.summarize(rg.TopK)),
        (Value, "steps: A.reversed() has no steps", lambda: A.reversed().steps()),
    ):
        refused(error, words, action)
    scattered = made(geometry=rg.Points(torch.zeros(5, 2)))
    refused(Value, "Profile: displacements between Points cannot be listed", scattered.profile)
    refused(Value, "Toeplitz: displacements between Points cannot be listed", scattered.toeplitz_share)


def test_all_of_a_large_matrix_is_refused_with_its_size():
    x = torch.zeros(1, 1, 100_000, 1)
    A = rg.attention(x, x, mask=rg.causal)
    assert "37.3 GiB" in repr(A)
    refused(Value, "this would be 100,000,000 numbers, 381 MiB", lambda: A[0, 0, :1000])
    refused(Value, "this would be 100,000,000 numbers, 381 MiB", lambda: A.logits[0, 0, :1000])
    words = "this would be 10,000,000,000 numbers, 37.3 GiB…force=True"
    for action in (A.dense, A.steps, A.logits.dense, lambda: A.block(slice(None), slice(None))):
        refused(Value, words, action)
    assert A[0, 0, 7, :9].tolist() == [0.125] * 8 + [0.0]  # a little of it costs little


def parts() -> dict:
    """A description with a tensor in every argument, and those tensors by argument."""
    gate, mask = torch.ones(2, 4, 5, 1), torch.ones(5, 5) > 0
    lengths, coords, term = torch.tensor([5, 5]), torch.zeros(5, 1), rg.Static(rg.Slope(), 4)
    tensors = {"q": q(), "k": k(), "scale": torch.ones(4, 1, 1), "sink": torch.zeros(4)}
    starts = {"q_start": torch.tensor([0, 0]), "k_start": torch.tensor([0, 0])}
    options = {**tensors, **starts, "geometry": rg.Points(coords), "position": term.bind(gate=gate)}
    options["mask"] = rg.dense(mask) & rg.lengths(lengths)
    named = {**tensors, **starts, "geometry": coords, "position": term.readout}
    return {"options": options, "tensors": [*named.items(), ("position", gate), ("mask", mask), ("mask", lengths)]}


USES = {
    "product": lambda A: A @ v(),
    "slice": lambda A: A[0, 0, 1],
    "logits": lambda A: A.logits[0, 0, 1],
    "lse": lambda A: A.lse,
    "band": lambda A: A.band(1),
    "summary": lambda A: A.topk(2),
    "explanation": lambda A: A[0, 0].explain(1, 1),
    "steps": lambda A: A.steps(),
    "of a head": lambda A: A[0].entropy(),
    "reversed": lambda A: A.reversed().dense(),
}


@pytest.mark.parametrize("at", range(11))
def test_a_tensor_changed_in_place_under_a_live_a(at):
    given = parts()
    name, tensor = given["tensors"][at]
    A = rg.attention(**given["options"])
    before = A[0]
    before.lse  # remembered, and still refused  # noqa: B018
    with torch.no_grad():
        tensor.zero_()
    for action in (*USES.values(), lambda A: before.lse, lambda A: before @ v()[0]):
        refused(RuntimeError, f"{name}: …changed in place…make A again with attention(...)", lambda: action(A))  # noqa: B023


def test_an_optimiser_step_makes_an_old_a_stale():
    term = rg.recipes.t5(4)
    optimiser = torch.optim.SGD(term.parameters(), lr=0.1)
    A = made(position=term)
    (A @ v()).sum().backward()
    optimiser.step()
    refused(RuntimeError, "position: …changed in place", lambda: A @ v())
    made(position=term) @ v()


def test_a_term_made_inside_a_compiled_graph_learns():
    """As adapters make theirs, of a model's own parameter; nothing but that parameter asks for a gradient."""
    table, x = torch.nn.Embedding(32, 4), torch.randn(1, 4, 10, 8)

    def look(x: torch.Tensor) -> torch.Tensor:
        term = rg.Static(rg.Buckets(32, 128), readout=table.weight.T)
        return rg.attention(x, x, position=term) @ x

    grads = []
    for way in (look, torch.compile(look, fullgraph=True, backend="aot_eager")):
        (grad,) = torch.autograd.grad(way(x).square().sum(), table.weight)
        grads.append(grad)
    torch.testing.assert_close(*grads)
