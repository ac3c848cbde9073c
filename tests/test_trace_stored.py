"""Descriptions as plain data: each comes back from a file with the same bits, and only what regard knows is read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from descriptions import Case, cases
from hypothesis import HealthCheck, given, settings

import regard as rg
from regard import features, geometry, masks, position, scores
from regard.trace import files, stored

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def through_a_file(A: rg.AttentionMatrix, folder, heads=None) -> rg.AttentionMatrix:
    """A said as plain data, written, opened and made again."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> str:
        name = f"t{len(tensors)}"
        tensors[name] = x.detach().clone()
        return name

    d = A._description
    said = stored.plain(d, keep, heads=heads)
    pick = stored.Plain(d, keep, None, heads).pick
    tensors |= {"q": pick(d.q, 1).detach().clone(), "k": pick(d.k, 1).detach().clone()}
    path = folder / "a.trace"
    files.write(path, {"said": said}, tensors)
    found = files.Mapped(path)
    assert found.document["said"] == json.loads(json.dumps(said))
    return stored.rebuild(found.document["said"], found["q"], found["k"], found.__getitem__)


def same(A: rg.AttentionMatrix, B: rg.AttentionMatrix) -> None:
    """The same bits: logits, rows and log-sum-exp."""
    with torch.no_grad():
        assert A.shape == B.shape and A.dtype == B.dtype
        assert A._description.terms == () or [t.describe() for t in A._description.terms] == [
            t.describe() for t in B._description.terms
        ]
        assert repr(A._description.mask) == repr(B._description.mask)
        for a, b in ((A.logits.dense(), B.logits.dense()), (A.lse, B.lse), (A.dense(), B.dense())):
            assert torch.equal(files_bits(a), files_bits(b))


def files_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def undropped(case: Case) -> Case:
    """Looking is never dropped, so dropout is not stored; engines may take another way with it."""
    return replace(case, dropout=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stored")


@QUICK
@given(case=cases())
def test_every_description_comes_back_with_the_same_bits(case, folder):
    with torch.no_grad():
        A = undropped(case).build().matrix()
        same(A, through_a_file(A, folder))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_in_half_precision_too(case, folder):
    with torch.no_grad():
        A = undropped(case).build(torch.bfloat16).matrix()
        same(A, through_a_file(A, folder))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(geometries=("line", "class grid", "places")))
def test_some_heads_are_those_heads(case, folder):
    with torch.no_grad():
        A = case.build(torch.float64).matrix()
        heads = [h for h in range(A.shape[1]) if h % 2 == 0] if A.shape[1] > 1 else [0]
        B = through_a_file(A, folder, heads)
        assert B.shape[1] == len(heads)
        torch.testing.assert_close(B.logits.dense(), A.logits.dense()[:, heads])


def own(base: type) -> list[type]:
    found = [base] if base.__module__.startswith("regard.") else []
    return found + [kind for each in base.__subclasses__() for kind in own(each)]


def test_every_class_of_regard_has_its_line():
    """A class that is added later must be given one here, or said as a table (features of adapters)."""
    abstract = {
        scores.Score, geometry.Geometry, features.Feature, features.OneHot, masks.Mask, masks._Combination,
        position.Term, position._FromContent,
    }  # fmt: skip
    known = {kind.cls for kind in stored.KINDS.values()}
    for base in (scores.Score, geometry.Geometry, features.Feature, masks.Mask, position.Term):
        inside = {
            kind for kind in own(base) if ".huggingface" not in kind.__module__ and ".lessons" not in kind.__module__
        }
        assert inside - abstract <= known


class Rings(rg.Feature):
    """A user's own."""

    dim = 2

    def __init__(self, period: int, axes: int = 1):
        super().__init__()
        self.period, self.axes = period, axes

    def forward(self, delta: torch.Tensor) -> torch.Tensor:
        total = delta.sum(-1)
        return torch.stack([(total % self.period == 0).float(), total * 0.1], dim=-1)

    def unplaced(self) -> torch.Tensor:
        return torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.mark.parametrize("where", [None, rg.Grid(2, 3, unplaced=1)])
@pytest.mark.parametrize("kind", ["static", "query"])
def test_a_feature_of_ones_own_is_stored_as_its_values(folder, where, kind):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 4).unbind()
    feature = Rings(3, 1 if where is None else 2)
    term = rg.Static(feature, 2) if kind == "static" else rg.FromQuery.learn(feature, 4, 2)
    starts = {} if where is not None else {"q_start": 4, "k_start": 1}
    with torch.no_grad():
        A = rg.attention(q, k, position=term, geometry=where, **starts)
        B = through_a_file(A, folder)
    assert isinstance(B._description.terms[0].features, rg.Table)
    torch.testing.assert_close(A.logits.dense(), B.logits.dense())


class Own(masks.Mask):
    def visible(self, pairs):
        return (pairs.flat % 2 == 0).unsqueeze(1)


def test_a_mask_of_ones_own_is_refused_by_name(folder):
    A = rg.attention(*torch.randn(2, 1, 1, 3, 4).unbind(), mask=Own())
    with pytest.raises(ValueError, match="Own is not regard's own"):
        through_a_file(A, folder)


def said_of(**kwargs) -> tuple[dict, dict]:
    tensors: dict[str, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> str:
        tensors[f"t{len(tensors)}"] = x.detach()
        return f"t{len(tensors) - 1}"

    q, k = torch.randn(2, 1, 2, 5, 4).unbind()
    A = rg.attention(q, k, **kwargs)
    return stored.plain(A._description, keep), tensors | {"q": q, "k": k}


HOSTILE = {
    "a class of another module": lambda s: s["terms"][0].update({"is": "os.system"}),
    "a base class": lambda s: s["terms"][0].update({"is": "Term"}),
    "a mask where a term belongs": lambda s: s["terms"].__setitem__(0, {"is": "_Causal"}),
    "a field too many": lambda s: s["terms"][0].update({"__class__": "x"}),
    "a field too few": lambda s: s["terms"][0].pop("scale"),
    "a name that is a list": lambda s: s["score"].update({"is": ["Dot"]}),
    "text for a number": lambda s: s["terms"][0].update({"scale": "1"}),
    "a huge number": lambda s: s["terms"][0]["features"].update({"count": 10**30}),
    "a truth for a number": lambda s: s["terms"][0]["features"].update({"count": True}),
    "a tensor that is none": lambda s: s["terms"][0].update({"readout": {"tensor": 5}}),
    "a tensor for a number": lambda s: s.update({"softcap": {"tensor": "q"}}),
    "the wrong tensor": lambda s: s["terms"][0].update({"readout": {"tensor": "q"}}),
    "a start before the beginning": lambda s: s["starts"].__setitem__(0, -1),
    "starts missing": lambda s: s.update({"starts": []}),
    "terms that are no list": lambda s: s.update({"terms": {}}),
    "a grid of a billion cells": lambda s: s.update(
        {"geometry": [{"is": "Grid", "shape": [1 << 20, 1 << 20], "unplaced": 0}] * 2}
    ),
    "an object of this machine's memory": lambda s: s.update({"mask": {"is": "own", "object": 0}}),
    "a nest of masks": lambda s: s.update({"mask": nest(100)}),
    "masks combined of nothing": lambda s: s.update({"mask": {"is": "_And", "parts": []}}),
    "another kind of description": lambda s: s.clear(),
}


def nest(depth: int) -> dict:
    found: dict = {"is": "_Causal"}
    for _ in range(depth):
        found = {"is": "_Not", "part": found}
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_what_regard_does_not_know_is_refused(name):
    said, tensors = said_of(position=rg.recipes.t5(heads=2), mask=rg.causal)
    find = tensors.__getitem__
    stored.rebuild(json.loads(json.dumps(said)), tensors["q"], tensors["k"], find)  # as it was, it is read
    HOSTILE[name](said)
    with pytest.raises(ValueError):
        stored.rebuild(said, tensors["q"], tensors["k"], find)


def test_nothing_is_drawn_from_the_random_numbers():
    said, tensors = said_of(position=rg.Static(rg.Network(2, hidden=3)) + rg.recipes.shaw(4, 2))
    state = torch.get_rng_state()
    A = stored.rebuild(said, tensors["q"], tensors["k"], tensors.__getitem__)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(p.requires_grad for term in A._description.terms for p in term.parameters())
