"""A model in one safetensors file: its weights, and the arguments it was made with as JSON in the header. No pickle.

What JSON cannot say (a term made by a function of the user's own) is marked as such, and has to be given again:
`load(path, position=make)`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import nn

from .. import geometry, masks, scores
from .recipe import Recipe

#: the key of the header that holds the arguments
HEADER = "regard"

Model = TypeVar("Model", bound="Saved")
_KINDS: dict[str, Callable[..., Any]] = {}


class Saved(nn.Module):
    """A model that knows how it was made."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _KINDS[cls.__name__] = cls

    def remember_arguments(self, **arguments: Any) -> None:
        self._arguments = arguments

    @property
    def configuration(self) -> dict[str, Any]:
        """How the model was made, in plain data."""
        return {"model": type(self).__name__, **{name: _plain(x) for name, x in self._arguments.items()}}

    def save(self, path: str | os.PathLike, **notes: str) -> None:
        """Write weights and configuration to a safetensors file, with notes (such as where the data came from)."""
        if HEADER in notes:
            raise ValueError(f"notes: {HEADER!r} is where the configuration goes; choose another name")
        header = {HEADER: json.dumps(self.configuration, ensure_ascii=False), **notes}
        safetensors.torch.save_model(self, os.fspath(path), metadata=header)

    @classmethod
    def load(cls: type[Model], path: str | os.PathLike, *, device: str = "cpu", **arguments: Any) -> Model:
        """The model of a file, in eval mode. Arguments replace those of the file."""
        model = load(path, device=device, **arguments)
        if not isinstance(model, cls):
            raise TypeError(f"path: expected {cls.__name__}, found {type(model).__name__}")
        return model


def load(path: str | os.PathLike, *, device: str = "cpu", **arguments: Any) -> Any:
    """The model of a file, in eval mode. Arguments replace those of the file (engine="tiled", position=make, ...)."""
    with safetensors.safe_open(os.fspath(path), framework="pt") as file:
        header = file.metadata() or {}
        names = list(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    if HEADER not in header:
        raise ValueError(f"path: {os.fspath(path)} was not written by save: its header has no {HEADER!r}")
    model = _build(json.loads(header[HEADER]), arguments)
    floats = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    kinds = {floats[d] for d in dtypes if d in floats}
    if len(kinds) == 1:
        model.to(kinds.pop())  # as it was saved
    safetensors.torch.load_model(model, os.fspath(path), device="cpu")
    return model.to(device).eval()


def _build(said: dict[str, Any], arguments: dict[str, Any]) -> Any:
    said = dict(said)
    kind = said.pop("model", None)
    if kind not in _KINDS:
        raise ValueError(f"path: expected one of {', '.join(sorted(_KINDS))}, found a model of kind {kind!r}")
    made = {}
    for name, value in {**said, **arguments}.items():
        if name in arguments:
            made[name] = arguments[name]
        elif isinstance(value, dict) and "model" in value:
            made[name] = _build(value, {})
        else:
            made[name] = _from_plain(name, value)
    return _KINDS[kind](**made)


def _plain(x: Any) -> Any:
    """A value as JSON can hold it."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, (list, tuple)):
        return [_plain(each) for each in x]
    if isinstance(x, Recipe):
        return {"recipe": [[name, _plain_options(options)] for name, options in x.parts], "shared": x.shared}
    if type(x) in (scores.Dot, scores.Cosine, scores.Euclidean, scores.InverseDistance):
        return {"score": type(x).__name__, "with": dataclasses.asdict(x)}
    if isinstance(x, geometry.Line):
        return {"line": True}
    if isinstance(x, geometry.Grid):
        return {"grid": list(x.shape), "unplaced": x.unplaced}
    if isinstance(x, masks.Mask) and (said := _plain_mask(x)) is not None:
        return {"mask": said}
    if isinstance(x, Saved):
        return x.configuration
    return {"own": f"{type(x).__name__}"}


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in options.items()}


def _plain_mask(mask: masks.Mask) -> list | None:
    """The masks that a layer may keep: those without tensors."""
    if mask is masks.causal:
        return ["causal"]
    if isinstance(mask, masks._Window):
        return ["window", mask.lo, mask.hi, mask.name]
    if isinstance(mask, masks._And):
        parts = [_plain_mask(part) for part in mask.parts()]
        return None if None in parts else ["and", *parts]
    return None


def _mask(said: list) -> masks.Mask:
    if said[0] == "causal":
        return masks.causal
    if said[0] == "window":
        lo, hi = (tuple(x) if isinstance(x, list) else x for x in said[1:3])
        return masks._Window(lo, hi, said[3])
    return masks._And(tuple(_mask(part) for part in said[1:]))


def _from_plain(name: str, said: Any) -> Any:
    if isinstance(said, list):
        return [_from_plain(name, each) for each in said]
    if not isinstance(said, dict):
        return said
    if "recipe" in said:
        first, *rest = [Recipe(kind, shared=said["shared"], **options) for kind, options in said["recipe"]]
        return sum(rest, start=first)
    if "score" in said:
        return getattr(scores, said["score"])(**said["with"])
    if "line" in said:
        return geometry.Line()
    if "grid" in said:
        return geometry.Grid(*said["grid"], unplaced=said["unplaced"])
    if "mask" in said:
        return _mask(said["mask"])
    raise ValueError(
        f"{name}: the model was made with a {said.get('own')} of its own, which the file cannot hold; "
        f"load it with {name}=..."
    )
