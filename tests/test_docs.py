"""The documents are true: examples print what they say, links lead somewhere, every symbol is explained."""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import pytest
import torch
from documents import ROOT, broken_links, examples, fences, prose, run, text_of
from support import within_budget

import regard as rg

DOCUMENTS = ["CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PARTS = [path.relative_to(ROOT / "src/regard").with_suffix("").parts for path in ROOT.glob("src/regard/**/*.py")]
MODULES = {".".join(p[:-1] if p[-1] == "__init__" else p) for p in PARTS} - {"", "engines"}


@pytest.fixture
def told(monkeypatch):
    """Runs a document's examples, checks what they print, and gives the names they made."""
    plans = importlib.import_module("regard.plan")

    def tell(name: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "example"}
        for example in examples(text_of(name)):
            found = run(name, example, namespace, monkeypatch)
            assert found == (example.prints or ""), f"{name}, line {example.line}"
        return namespace

    yield tell
    plans._plan.cache_clear()  # plans that chose an example's engine


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_print_what_the_document_says(name, told):
    told(name)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    assert not broken_links(name)


def inputs(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, n, 4) for n in lengths]


def judge(length: int, description) -> None:
    """A of a description, made for a dtype, is within the error budget of the definition."""
    q, k = inputs(length, length)
    found = rg.attention(q, k, **description(torch.float32)).dense()
    plain = rg.attention(q, k, engine="reference", **description(torch.float32)).dense()
    exact = rg.attention(q.double(), k.double(), engine="reference", **description(torch.float64)).dense()
    within_budget(found, plain, exact)


def test_the_new_feature_is_what_the_definition_says(told):
    Rings = told("docs/architecture.md")["Rings"]
    for geometry, feature in ((rg.Line(), Rings(3)), (rg.Grid(3, 3), rg.PerAxis(Rings(2), Rings(2)))):

        def description(dtype, feature=feature, geometry=geometry):
            return {"position": rg.Static(feature, readout=torch.tensor([[2.0]], dtype=dtype)), "geometry": geometry}

        judge(9, description)


def test_the_new_term_is_what_the_definition_says(told):
    biased_shaw = told("docs/architecture.md")["biased_shaw"]
    term = {torch.float32: biased_shaw(heads=2, dim=4, clip=2)}
    term[torch.float64] = copy.deepcopy(term[torch.float32]).double()
    judge(7, lambda dtype: {"position": term[dtype]})


def test_the_new_mask_shows_the_pairs_it_says(told):
    made = told("docs/architecture.md")
    q, k = inputs(9, 9)
    steps = torch.arange(9)[:, None] - torch.arange(9)
    wanted = (steps >= 0) & (steps % 3 == 0) & (steps < 3 * 2)
    assert torch.equal(rg.attention(q, k, mask=made["dilated"](3, 2)).dense() > 0, wanted.expand(2, 2, 9, 9))


def test_the_new_summary_is_exact_and_merges(told):
    peak = told("docs/architecture.md")["Peak"]()
    q, k = inputs(9, 9)
    (found,) = rg.attention(q, k, mask=rg.causal).summarize(peak)
    plain, exact = (
        rg.attention(x, y, mask=rg.causal, engine="reference").dense().amax(-1)
        for x, y in ((q, k), (q.double(), k.double()))
    )
    within_budget(found, plain, exact)
    assert torch.equal(peak.merge([found], [found + 1])[0], found + 1)


def test_the_new_engine_computes_what_it_does_not_refuse(told):
    told("docs/architecture.md")
    q, k, v = (x.requires_grad_() for x in inputs(7, 5, 5))
    k, v = k[:, :1], v[:, :1]  # one key and value for both heads
    A = rg.attention(q, k)
    assert A.plan.engine == "small"
    results = []
    for B in (A, rg.attention(q, k, engine="reference")):
        out = B @ v
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = rg.attention(wide[0], wide[1], engine="reference") @ wide[2]
    exact = [out, *torch.autograd.grad(out.square().sum(), wide)]
    for found, plain, truth, what in zip(*results, exact, ("out", "d_q", "d_k", "d_v"), strict=True):
        within_budget(found, plain, truth, what)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_of_modules_and_their_contents_exist(name):
    """`lower.mask_form` in a document is a name in that module, and `engines/` files that are named are there."""
    for path in re.findall(r"`((?:src|tests|docs|engines|views|lessons)/[\w/.]*\w)`", prose(text_of(name))):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src/regard")), f"{name} names {path}"
    for dotted in re.findall(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`", prose(text_of(name))):
        module = next((m for m in sorted(MODULES, key=len, reverse=True) if f"{dotted}.".startswith(f"{m}.")), None)
        if module is None:
            continue
        thing = importlib.import_module(f"regard.{module}")
        if dotted.startswith("trace."):  # documents call a trace `trace`, as the module is called
            thing = thing if hasattr(thing, dotted.split(".")[1]) else thing.Trace
        for part in dotted[len(module) :].split(".")[1:]:
            assert hasattr(thing, part), f"{name} names {dotted}"
            thing = getattr(thing, part)


def test_every_module_has_its_line_in_the_architecture():
    rows = set(re.findall(r"^\| `([\w.]+)` \|", text_of("docs/architecture.md"), re.M))
    engines = {".".join(m.split(".")[:2]) for m in MODULES if m.startswith("engines.")}
    wanted = {m.split(".")[0] for m in MODULES} - {"engines"} | engines
    assert wanted == rows, f"without a line {sorted(wanted - rows)}, not there {sorted(rows - wanted)}"


def test_every_greek_letter_of_the_maths_has_its_line():
    text = text_of("docs/maths.md")
    table, rest = re.split(r"^## Scores$", text, maxsplit=1, flags=re.M)
    names = "alpha beta gamma delta epsilon varepsilon eta theta kappa lambda mu nu xi rho sigma tau varphi phi chi psi"
    names += " omega ell"
    letters = rf"\\({'|'.join(names.split())})(?![a-zA-Z])"
    formulas = " ".join(body for _, _, language, body in fences(rest) if language == "math")
    formulas += " ".join(re.findall(r"\$[^$]+\$", prose(rest)))
    used, explained = set(re.findall(letters, formulas)), set(re.findall(letters, table))
    assert used == explained, f"without a line {sorted(used - explained)}, without a use {sorted(explained - used)}"
