"""Models that come with regard: small enough to carry, trained, and opened without a network or a pickle.

    model, tokenizer = load("tiny")
    tokens = torch.tensor([tokenizer.encode("小沈阳江西演唱会邀请了，")])
    logits, looks = model(tokens, look=True)      # looks.decoder[2] is the lazy A of the third layer
    tokenizer.labels(tokens[0].tolist())          # what to write beside its rows

"tiny" is a causal decoder over characters, English and Chinese, with relative positions only, so that it has no maximum
length. Where it comes from, and what it can do, is in the README beside the weights and in docs/tiny.md.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import torch

from ..nn import Decoder
from .tokenizer import Tokenizer

#: the models there are
NAMES = ("tiny",)

__all__ = ["NAMES", "Loaded", "Tokenizer", "about", "load"]


class Loaded(NamedTuple):
    """A model in eval mode and the tokenizer that belongs to it."""

    model: Decoder
    tokenizer: Tokenizer


@cache
def _page(name: str) -> dict[str, Any]:
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, found {name!r}")
    return json.loads(files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))


def about(name: str = "tiny") -> dict[str, Any]:
    """How a model was made and what it was measured to do: configuration, training, corpus, held-out figures."""
    return {key: value for key, value in _page(name).items() if key != "characters"}


def load(name: str = "tiny", *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    """A model that comes with regard, in eval mode, and its tokenizer. Stored as float16, it computes in `dtype`."""
    tokenizer = Tokenizer(_page(name)["characters"])
    with as_file(files(__package__).joinpath(f"{name}.safetensors")) as path:
        model = Decoder.load(path)
    return Loaded(model.to(device, dtype).eval(), tokenizer)
