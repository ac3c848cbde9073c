"""What a module's path says about its attention: which stack it belongs to, and whether it looks at itself or across.

encoder.block.3.layer.0.SelfAttention     encoder, self
decoder.block.3.layer.1.EncDecAttention   decoder, cross
blocks.3.attention                        a stack without a name: causal ones are called decoder, others encoder
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ACROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_?attn|encoder_?attention|src_?attn", re.IGNORECASE)


def is_cross(path: str, module: object) -> bool:
    """Whether an attention module looks at another sequence than its own."""
    said = getattr(module, "is_cross_attention", None)
    if isinstance(said, bool):
        return said
    parts = path.split(".")
    last = max((n for n, part in enumerate(parts) if part.isdigit()), default=-1)
    return any(_ACROSS.search(part) for part in parts[last + 1 :])


def group_of(path: str) -> str:
    """The path up to its first number: modules that share it are layers of one stack."""
    parts = path.split(".")
    first = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:first])


def stack_names(groups: Sequence[tuple[str, bool]]) -> dict[str, str]:
    """A name for each group of layers, given with whether it is causal: encoder or decoder, longer if two are alike."""
    plain = {group: _word(group) or ("decoder" if causal else "encoder") for group, causal in groups}
    named = {}
    for group, word in plain.items():
        alike = [other for other in plain if plain[other] == word]
        named[group] = word if len(alike) == 1 else _told_apart(group, alike)
    return named


def _word(group: str) -> str | None:
    for part in reversed(group.split(".")):
        for word in ("encoder", "decoder"):
            if part == word or part.endswith(f"_{word}"):
                return word
    return None


def _told_apart(group: str, alike: Sequence[str]) -> str:
    """The parts of a path in which groups of the same name differ: text_model and vision_model."""
    split = [other.split(".") for other in alike]
    own = group.split(".")
    for at, part in enumerate(own):
        here = [other[at] if at < len(other) else "" for other in split]
        if here.count(part) == 1:
            return part
    return group or "model"
