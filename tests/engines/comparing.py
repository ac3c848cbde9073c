"""An engine against the definition, on one description: what the engines' tests share."""

from __future__ import annotations

import pytest
import torch
from descriptions import GRID_TERMS, LINE_TERMS, MASKS, POINT_TERMS, Case
from support import all_within_budget

from regard.engines import cpu
from regard.engines.cpu import feeding, sources
from regard.engines.tiled import strips as strips_module


def cut(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    if small:
        monkeypatch.setattr(strips_module, "STRIP", 8)
        monkeypatch.setattr(strips_module, "MIN_ROWS", 2)
        monkeypatch.setattr(feeding, "ROWS", 3)
        monkeypatch.setattr(sources, "ROWS", 3)
        monkeypatch.setattr(cpu, "FEW", 1)


def results(
    case: Case, dtype: torch.dtype, engine: str | None, exact: bool = False, nudge: bool = False, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The product, lse, weights and logits of a case, and every gradient of a random function of them."""
    built = case.build(dtype, exact, nudge, device)
    A = built.matrix(engine)
    out = A @ built.v
    weights, logits, lse = A.dense(), A.logits.dense(), A.lse
    found = {"out": out, "weights": weights, "logits": logits, "lse": lse}
    random = torch.Generator().manual_seed(7)
    for what, x in list(found.items()):
        x = torch.where(x.isfinite(), x, 0.0).double()
        loss = (x * torch.randn(x.shape, generator=random, dtype=torch.float64).to(device)).sum()
        leaves = built.leaves if loss.requires_grad else {}  # nothing to differentiate in an empty A
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if leaves else ()
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found[f"gradient of {what} to {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def compare(case: Case, dtype: torch.dtype, engine: str | None, device: str = "cpu") -> None:
    """An engine against the definition: values share one budget and gradients another."""
    found, plain = (results(case, dtype, each, device=device) for each in (engine, "reference"))
    exact, nudged = (results(case, dtype, "reference", exact=True, nudge=n, device=device) for n in (False, True))
    for kind in (True, False):
        names = [name for name in found if name.startswith("gradient") == kind and name in exact]
        all_within_budget(*({name: x[name] for name in names} for x in (found, plain, exact, nudged)))


def plain_case(**changes) -> Case:
    usual = dict(
        seed=1, batch=2, heads=4, kv_heads=2, geometry="line", q_shape=(7,), k_shape=(7,), score="dot",
        scale="default", terms=(), mask="none", starts="zero", softcap=False, sink=False, v_dim=3,
    )  # fmt: skip
    return Case(**{**usual, **changes})


KINDS = (
    [("line", (7,), (term,), "none") for term in LINE_TERMS]
    + [(g, (3, 2), (term,), "none") for g in ("grid", "class grid") for term in GRID_TERMS]
    + [(g, (7,), (term,), "none") for g in ("points", "places") for term in POINT_TERMS]
    + [("line", (7,), ("t5",), mask) for mask in MASKS]
)
