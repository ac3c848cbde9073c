"""A model that reads handwritten digits, 8 x 8 pixels each, by attention on a grid; and ten images to show it.

    model, images = load()
    logits, looks = model(images[7:8], look=True)      # looks.encoder[0] is the lazy A of the first layer, 64 x 64

A pixel is a token: a vector made of its brightness, without any absolute position. A learned table gives each head a
number for every displacement (rows, columns), as in Swin. The weights were made by training/digits.py; the images are
ten of those it held out, from the Optical Recognition of Handwritten Digits data (E. Alpaydin, C. Kaynak, 1998; UCI
Machine Learning Repository, CC BY 4.0).
"""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..geometry import Grid
from ..nn import Encoder, Looks, Recipe

FILE = "digits.safetensors"
SIDE, WIDTH, HEADS, LAYERS = 8, 64, 4, 2


class Digits(nn.Module):
    """Pixels [batch, 64], 0 (paper) to 1 (ink), to one logit a digit."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.brightness = nn.Linear(2, WIDTH)
        self.encoder = Encoder(
            None, WIDTH, LAYERS, HEADS, position=Recipe("swin", window=(SIDE, SIDE)), geometry=Grid(SIDE, SIDE),
            hidden=2 * WIDTH, dropout=dropout,
        )  # fmt: skip
        self.digit = nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor, look: bool = False) -> Any:
        """The logits; with `look` also the A of every layer."""
        x = self.brightness(torch.stack([pixels, 1 - pixels], -1))
        if not look:
            return self.digit(self.encoder(x).mean(1))
        x, looks = self.encoder(x, look=True)
        found: tuple[Tensor, Looks] = self.digit(x.mean(1)), looks
        return found


class Loaded(NamedTuple):
    """The model in eval mode, and an image of each digit, [10, 64], 0 to 1."""

    model: Digits
    images: Tensor


def load() -> Loaded:
    """The model that comes with regard, and its images. Stored as float16, it computes in float32."""
    with as_file(files(__package__).joinpath(FILE)) as path, safe_open(path, "pt") as held:
        images = held.get_tensor("images").float() / 16
        state = {name: held.get_tensor(name).float() for name in held.keys() if name != "images"}
    model = Digits()
    model.load_state_dict(state)
    return Loaded(model.eval(), images)


def about() -> dict[str, Any]:
    """How it was made and what it was measured to do."""
    with as_file(files(__package__).joinpath(FILE)) as path, safe_open(path, "pt") as held:
        return json.loads((held.metadata() or {})["about"])
