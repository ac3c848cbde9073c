"""Learn a soft look-up from data: a query number fetches a value, as a mixture of those stored under nearby keys.

    python examples/lookup.py --out lookup.png

A store holds 64 pairs (x, y); y follows a wave, with noise. W_Q and W_K turn a number's features (1, x, x²) into a
query and a key; nothing tells them that near means alike. They learn it by leaving one out: every stored x asks all
*other* pairs (the mask hides the diagonal), and the mixture that comes back should be its y. Each step has new stores
with new waves, so there is no curve to learn by heart. Then a store that was never seen is asked for numbers it does
not hold.

A Gaussian look-up is among what these features can express, since -(x - k)²/2σ² is q·k with q = (-x²/2, x, -1/2)/σ²
and k = (1, k, k²); so training finds the width σ that suits the data, and A sharpens from flat to a band.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from drawing import Clock, Panel, save, steps, verdict
from torch import Tensor, nn

import regard as rg

DIM, NOISE = 8, 0.05
#: mission M0's store and query, which the learned look-up is asked at the end
STORE, QUERY = ((51, 40), (56, 43), (58, 48)), 57


class Lookup(nn.Module):
    """F(q) = softmax(q W_Q (K W_K)ᵀ / √d) V over numbers: one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, DIM, bias=False), nn.Linear(3, DIM, bias=False)

    def forward(self, x: Tensor, keys: Tensor, mask: object = None) -> rg.AttentionMatrix:
        """A, [stores, 1, queries, keys], from numbers x [stores, queries] and keys [stores, keys] in -1 to 1."""
        q, k = self.query(features(x)), self.key(features(keys))
        return rg.attention(q.unsqueeze(1), k.unsqueeze(1), mask=mask, q_start=0)


def features(x: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(x), x, x * x], -1)


class Stores:
    """Some stores of pairs: sorted keys, and values that follow a wave of its own each."""

    def __init__(self, count: int, size: int = 64):
        self.speed, self.phase = torch.rand(count, 1) * 4 + 2, torch.rand(count, 1) * 6.2832
        self.keys = (torch.rand(count, size) * 2 - 1).sort().values
        self.values = self.wave(self.keys) + NOISE * torch.randn(count, size)

    def wave(self, x: Tensor) -> Tensor:
        """What the values follow, without the noise."""
        return torch.sin(self.speed * x + self.phase)


def fetch(A: rg.AttentionMatrix, values: Tensor) -> Tensor:
    return (A @ values[:, None, :, None])[:, 0, :, 0]


def train(count: int = 400, seed: int = 0, stores: int = 8) -> dict:
    """Train, and give back the errors and the matrices before and after."""
    torch.manual_seed(seed)
    model = Lookup()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    unseen = Stores(32)
    asked = torch.rand(32, 100) * 1.8 - 0.9  # inside the store: a look-up does not extrapolate

    def look() -> tuple[float, Tensor]:
        with torch.no_grad():
            error = (fetch(model(asked, unseen.keys), unseen.values) - unseen.wave(asked)).square().mean()
            return error.item(), model(unseen.keys, unseen.keys)[0, 0].dense()

    before = look()
    for step, bar in steps(count, "look-up"):
        data = Stores(stores)
        loss = (fetch(model(data.keys, data.keys, mask=~rg.offset(0)), data.values) - data.values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            bar.update(bar.task_ids[0], note=f"loss {loss.item():.4f}")
    after = look()
    return {"model": model, "before": before[0], "after": after[0], "A before": before[1], "A after": after[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="image file for A before and after")
    options = parser.parse_args()
    clock = Clock()
    result = train(options.steps, options.seed)
    print(f"mean squared error on unseen numbers: untrained {result['before']:.4f}, trained {result['after']:.5f}")
    verdict("trained / untrained", result["after"] / result["before"], 0.1, at_most=True)
    keys, values = torch.tensor(STORE, dtype=torch.float32).T
    centre, width = keys.mean(), 10.0  # to the scale of the numbers it learned on
    with torch.no_grad():
        A = result["model"]((torch.tensor([[QUERY]]) - centre) / width, (keys[None] - centre) / width)
    shares = ", ".join(f"{k:g}: {a:.4f}" for k, a in zip(keys.tolist(), A[0, 0].dense()[0].tolist(), strict=True))
    print(f"the store 51→40, 56→43, 58→48 asked for 57: {fetch(A, values[None]).item():.4f} (weights {shares})")
    if options.out:
        panels = [Panel("before training", result["A before"]), Panel("after training", result["A after"])]
        save(options.out, "A soft look-up learns that near means alike", panels)
    clock.tell()


if __name__ == "__main__":
    main()
