"""Every recipe is a module: it trains, its numbers are saved and loaded, and it moves between dtypes."""

from __future__ import annotations

import inspect

import pytest
import torch
from published import ENGINES
from torch import nn

import regard as rg

HEADS, DIM, GRID = 2, 4, (3, 4)
LENGTH = 12

#: name: (make it, the other arguments of attention, the names of what it learns)
RECIPES = {
    "t5": (lambda: rg.recipes.t5(HEADS, buckets=8, max_distance=9), {"scale": 1.0}, {"readout"}),
    "alibi": (lambda: rg.recipes.alibi(HEADS), {"mask": rg.causal}, set()),
    "swin": (lambda: rg.recipes.swin(HEADS, GRID), {"geometry": rg.Grid(*GRID)}, {"readout"}),
    "swin_v2": (
        lambda: rg.recipes.swin_v2(HEADS, GRID, hidden=16),
        {"geometry": rg.Grid(*GRID), "score": rg.Cosine(), "scale": 10.0},
        {"features.weight1", "features.bias1", "features.weight2"},
    ),
    "beit": (lambda: rg.recipes.beit(HEADS, (3, 3)), {"geometry": rg.Grid(3, 3, unplaced=3)}, {"readout"}),
    "shaw": (lambda: rg.recipes.shaw(DIM, 3), {}, {"features.values"}),
    "transformer_xl": (
        lambda: rg.recipes.transformer_xl(HEADS, DIM),
        {},
        {"parts.0.weight", "parts.1.weight", "parts.1.offset"},
    ),
    "deberta": (
        lambda: rg.recipes.deberta(HEADS, DIM, buckets=4, max_position=8),
        {"scale": (3 * DIM) ** -0.5},
        {"parts.0.features.values", "parts.1.features.values"},
    ),
    "sam": (
        lambda: rg.recipes.sam(DIM, GRID),
        {"geometry": rg.Grid(*GRID)},
        {"features.parts.0.feature.values", "features.parts.1.feature.values"},
    ),
}


def test_no_recipe_is_forgotten():
    public = {name for name, _ in inspect.getmembers(rg.recipes, inspect.isfunction) if not name.startswith("_")}
    assert {name for name in public if getattr(rg.recipes, name).__module__ == rg.recipes.__name__} == set(RECIPES)
    for name in RECIPES:
        assert f"\n| {name} |" in rg.recipes.__doc__, f"{name} is not in the table of recipes"


def vectors(dtype: torch.dtype = torch.float32):
    return torch.randn(3, 2, HEADS, LENGTH, DIM, dtype=dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RECIPES)
def test_trains(name, engine):
    make, how, learned = RECIPES[name]
    recipe, (q, k, v), goal = make(), vectors(), torch.randn(2, HEADS, LENGTH, DIM)
    assert {key for key, _ in recipe.named_parameters()} == learned
    before = {key: x.clone() for key, x in recipe.named_parameters()}
    if not learned:
        q.requires_grad_()
    optimizer = torch.optim.SGD([q] if not learned else recipe.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(rg.attention(q, k, position=recipe, engine=engine, **how) @ v, goal)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    for key, x in recipe.named_parameters():
        assert not torch.equal(x, before[key]), f"{key} did not move"


@pytest.mark.parametrize("name", RECIPES)
def test_saves_and_loads(name, tmp_path):
    make, how, _ = RECIPES[name]
    first, second, (q, k, v) = make(), make(), vectors()
    with torch.no_grad():
        for x in first.parameters():
            x.normal_()
    torch.save(first.state_dict(), tmp_path / "recipe.pt")
    expected = rg.attention(q, k, position=first, **how) @ v
    if list(first.parameters()):
        assert not torch.equal(rg.attention(q, k, position=second, **how) @ v, expected)
    second.load_state_dict(torch.load(tmp_path / "recipe.pt", weights_only=True))
    assert torch.equal(rg.attention(q, k, position=second, **how) @ v, expected)


def test_is_part_of_the_model_that_holds_it():
    model = nn.ModuleDict({"position": rg.recipes.deberta(HEADS, DIM, buckets=4, max_position=8)})
    assert {f"position.{key}" for key in RECIPES["deberta"][2]} == {key for key, _ in model.named_parameters()}
    assert all(x.dtype == torch.float64 for x in model.double().parameters())
