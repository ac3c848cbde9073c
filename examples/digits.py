"""Read handwritten digits with attention on a grid: 64 pixels look at each other, and only displacement says where.

    python examples/digits.py --out digits.png        needs scikit-learn, for its 8 x 8 images

Each pixel is a token: a vector made of its brightness, without any absolute position. A learned table gives each head
a number for every displacement (rows, columns) on the grid, as in Swin: so a head can learn "one above" or "two to the
right", for every pixel alike. The mean over pixels is classified. A fifth of the images, drawn at random, is held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from drawing import Clock, Panel, save, steps, verdict
from torch import Tensor, nn

import regard as rg
from regard.nn import Encoder, Looks, Recipe

SIDE, WIDTH, HEADS, LAYERS = 8, 64, 4, 2


class Reader(nn.Module):
    """Pixels [batch, 64], 0 to 1, to one logit a digit."""

    def __init__(self) -> None:
        super().__init__()
        position = Recipe("swin", window=(SIDE, SIDE))
        self.brightness = nn.Linear(2, WIDTH)
        self.encoder = Encoder(
            None, WIDTH, LAYERS, HEADS, position=position, geometry=rg.Grid(SIDE, SIDE), hidden=2 * WIDTH, dropout=0.1
        )
        self.digit = nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.digit(self.look(pixels)[0].mean(1))

    def look(self, pixels: Tensor) -> tuple[Tensor, Looks]:
        """What the encoder makes of the pixels, and the A of every layer."""
        return self.encoder(self.brightness(torch.stack([pixels, 1 - pixels], -1)), look=True)


def images() -> tuple[Tensor, Tensor]:
    """All 1797 images [n, 64], 0 (paper) to 1 (ink), and their digits [n]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the images come with scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    return torch.tensor(data.data).float() / 16, torch.tensor(data.target).long()


def profiles(model: Reader, pixels: Tensor) -> list[Tensor]:
    """Mean weight per displacement, [2 SIDE - 1, 2 SIDE - 1] for each head of the first layer."""
    with torch.no_grad():
        _, looks = model.look(pixels)
    mass = looks.encoder[0].profile().mean(0)
    pairs = torch.tensor([SIDE - abs(d) for d in range(1 - SIDE, SIDE)])
    return list(mass / (pairs[:, None] * pairs))  # mass over the pairs that have this displacement


def train(epochs: int = 16, seed: int = 0, batch: int = 32) -> dict:
    torch.manual_seed(seed)
    pixels, digits = images()
    mixed = torch.randperm(len(pixels))
    pixels, digits = pixels[mixed], digits[mixed]
    cut = len(pixels) * 4 // 5
    model = Reader()
    count = epochs * (cut // batch)
    tables = [p for name, p in model.named_parameters() if ".position." in name]
    others = [p for name, p in model.named_parameters() if ".position." not in name]
    optimizer = torch.optim.AdamW([{"params": tables, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.05}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 4e-3], total_steps=count, pct_start=0.3)
    result = {"model": model, "before": profiles(model, pixels[:64])}
    order = torch.randperm(cut)
    for step, bar in steps(count, "digits"):
        if step % (cut // batch) == 0:
            order = torch.randperm(cut)
        rows = order[step % (cut // batch) * batch :][:batch]
        loss = nn.functional.cross_entropy(model(pixels[rows]), digits[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            bar.update(bar.task_ids[0], note=f"loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        right = (model(pixels[cut:]).argmax(-1) == digits[cut:]).float().mean().item()
    return result | {"right": right, "after": profiles(model, pixels[cut : cut + 64]), "held": len(pixels) - cut}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="image file for A before and after")
    options = parser.parse_args()
    clock = Clock()
    result = train(options.epochs, options.seed)
    verdict(f"{result['held']} held-out digits read right", result["right"], 0.95, shown=".1%")
    if options.out:
        names = [f"{d:+d}" for d in range(1 - SIDE, SIDE)]
        panels = [
            Panel(f"head {head}, {when} training", result[when][head], names, names)
            for when in ("before", "after")
            for head in range(HEADS)
        ]
        title = "First layer: mean weight by displacement, query minus key"
        save(options.out, title, panels, across=HEADS, axes=("rows down", "columns right"))
    clock.tell()


if __name__ == "__main__":
    main()
