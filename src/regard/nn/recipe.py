"""Position terms by name: what a layer is told so that it can make its own, and what a file can say about it.

    Recipe("t5", buckets=32, bidirectional=False)     each layer learns its own bias
    Recipe("t5", shared=True)                         one bias for all layers, as in T5
    Recipe("alibi") + Recipe("shaw", clip=16)         a sum of terms

A name is one of `regard.recipes`, or "rotary" (Rotary) or "table" (a learned number a head and clipped displacement).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .. import recipes
from ..features import Clipped
from ..position import Position, Rotary, Static


def rotary(**options: Any) -> Rotary:
    return Rotary(**options)


def table(heads: int, clip: int | tuple[int, int]) -> Static:
    """A learned number for each head and displacement, constant beyond `clip`."""
    return Static(Clipped(*clip) if isinstance(clip, tuple) else Clipped(clip), heads)


KINDS: dict[str, Callable[..., Position]] = {
    name: made
    for name, made in vars(recipes).items()
    if inspect.isfunction(made) and made.__module__ == recipes.__name__
}
KINDS |= {"rotary": rotary, "table": table}


class Recipe:
    """A term, or a sum of terms, by name and options. Call it with heads and head_dim to make the term."""

    def __init__(self, name: str, *, shared: bool = False, **options: Any):
        if name not in KINDS:
            raise ValueError(f"position: expected one of {', '.join(sorted(KINDS))}, found {name!r}")
        given = {"heads", "dim"} & set(options)
        if given:
            raise ValueError(f"position: {name} gets its {' and '.join(sorted(given))} from the layer; leave it out")
        try:
            inspect.signature(KINDS[name]).bind(**self._sizes(name, 1, 1), **options)
        except TypeError as error:
            raise TypeError(f"position: {name}: {error}") from None
        # lists come back from JSON where tuples went in
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        self.parts: tuple[tuple[str, dict[str, Any]], ...] = ((name, options),)
        self.shared = bool(shared)

    @staticmethod
    def _sizes(name: str, heads: int, head_dim: int) -> dict[str, int]:
        wanted = inspect.signature(KINDS[name]).parameters
        return {key: size for key, size in (("heads", heads), ("dim", head_dim)) if key in wanted}

    def __call__(self, heads: int, head_dim: int) -> Position:
        terms = [KINDS[name](**self._sizes(name, heads, head_dim), **options) for name, options in self.parts]
        return terms[0] if len(terms) == 1 else sum(terms[1:], start=terms[0])

    def __add__(self, other: Recipe) -> Recipe:
        if not isinstance(other, Recipe):
            return NotImplemented
        if other.shared != self.shared:
            raise ValueError("position: one recipe of a sum is shared between layers and the other is not")
        both = Recipe(*[name for name, _ in self.parts[:1]], shared=self.shared, **self.parts[0][1])
        both.parts = (*self.parts, *other.parts)
        return both

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and (self.parts, self.shared) == (other.parts, other.shared)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        last = {"shared": True} if self.shared else {}
        said = [
            f"Recipe({', '.join([repr(name), *(f'{key}={value!r}' for key, value in {**options, **last}.items())])})"
            for name, options in self.parts
        ]
        return " + ".join(said)


#: a term all layers share, a maker of terms (given heads and head_dim), a name, or one of these for each layer
Positions = Position | Recipe | Callable[[int, int], Position] | str | None


def make_position(given: Positions, heads: int, head_dim: int) -> Position | None:
    """A term for one layer."""
    if isinstance(given, str):
        given = Recipe(given)
    if given is None or isinstance(given, Position):
        return given
    if not callable(given):
        raise TypeError(
            f"position: expected a term, a name, a Recipe or a function of (heads, head_dim), found {given!r}"
        )
    made = given(heads, head_dim)
    if made is not None and not isinstance(made, Position):
        raise TypeError(f"position: expected the function to make a term, found {type(made).__name__}")
    return made


def each_layer(given: Any, layers: int, name: str) -> list[Any]:
    """One for each layer: the same for all, or as many as there are layers."""
    if not isinstance(given, (list, tuple)):
        return [given] * layers
    if len(given) != layers:
        raise ValueError(f"{name}: expected one for each of the {layers} layers, found {len(given)}")
    return list(given)


def make_positions(given: Positions | Sequence[Positions], layers: int, heads: int, head_dim: int) -> list:
    """A term for each layer; a shared recipe is made once."""
    shared: dict[Recipe, Position | None] = {}
    made = []
    for one in each_layer(given, layers, "position"):
        if isinstance(one, Recipe) and one.shared:
            if one not in shared:
                shared[one] = make_position(one, heads, head_dim)
            made.append(shared[one])
        else:
            made.append(make_position(one, heads, head_dim))
    return made
