"""A digit before the model that reads digits: what it says, and what one of the 64 pixels looks at."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..models import digits
from .matrix import by


@functools.cache
def _reader() -> digits.Loaded:
    return digits.load()


def digit(number: int, layer: int, head: int, pixel: int) -> dict[str, Any]:
    """The model that reads digits before one of its images: what it says, and what a pixel looks at."""
    model, images = _reader()
    with torch.no_grad():
        logits, looks = model(images[number : number + 1], look=True)
        A = looks.encoder[layer][0, head]
        block: Any = model.encoder.blocks[layer]
        learned = block.attention.position.readout[head]
    side = (digits.SIDE, digits.SIDE)
    around = tuple(2 * n - 1 for n in side)
    row, top = A[pixel, :], A.topk(3)
    return {
        "image": images[number].unflatten(0, side).tolist(), "weights": row.unflatten(0, side).tolist(),
        "received": A.received().unflatten(0, side).tolist(), "profile": A.profile().tolist(),
        "learned": learned.unflatten(0, around).tolist(), "probabilities": logits[0].softmax(-1).tolist(),
        "top": [
            {"cell": list(divmod(j, digits.SIDE)), "weight": w}
            for w, j in zip(top.weights[pixel].tolist(), top.indices[pixel].tolist(), strict=True)
        ],
        "cell": list(divmod(pixel, digits.SIDE)), "shape": by(tuple(A.shape)),
    }  # fmt: skip
