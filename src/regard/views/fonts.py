"""Fonts that have the glyphs: matplotlib draws a box for a character its font lacks, so this looks before it draws.

The list of installed fonts says names, not glyphs; so each candidate's own character map is read, likely ones first,
until every character is found. What no font has is named, with the Debian package that would bring it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

#: parts of the names of fonts that are likely to have what is missing, the best first
LIKELY = (
    "Noto Sans CJK SC", "Source Han Sans SC", "Noto Sans SC", "PingFang", "Microsoft YaHei", "WenQuanYi", "SimHei",
    "Heiti", "Droid Sans Fallback", "AR PL", "Arial Unicode", "Noto Sans CJK", "Noto Sans", "Noto Serif CJK",
)  # fmt: skip
#: the Debian package with glyphs of each script; the last is for anything else
PACKAGES = (("CJK", "fonts-noto-cjk"), ("HANGUL", "fonts-noto-cjk"), ("HIRAGANA", "fonts-noto-cjk"),
            ("KATAKANA", "fonts-noto-cjk"), ("", "fonts-noto"))  # fmt: skip
#: what matplotlib brings itself
OWN = "DejaVu Sans"


class Fonts(NamedTuple):
    """Font families in the order to try, and the characters that none of them has."""

    families: list[str]
    missing: str


def fonts_for(text: Iterable[str]) -> Fonts:
    """Installed fonts that together have all characters of a text, as far as there are any."""
    from matplotlib import font_manager

    wanted = {c for word in text for c in word if not c.isspace()}
    families = [OWN]
    wanted -= _glyphs(font_manager.findfont(OWN))
    for name, path in _candidates():
        if not wanted:
            break
        found = wanted & _glyphs(path)
        if found:
            families.append(name)
            wanted -= found
    return Fonts(families, "".join(sorted(wanted)))


@cache
def _candidates() -> tuple[tuple[str, str], ...]:
    """(family, file) of upright fonts of ordinary weight, likely ones first."""
    from matplotlib import font_manager

    def rank(name: str) -> int:
        return next((at for at, part in enumerate(LIKELY) if part in name), len(LIKELY))

    plain = [
        f for f in font_manager.fontManager.ttflist if f.style == "normal" and f.weight in (400, "normal", "regular")
    ]
    named = {f.name: f.fname for f in plain if "Last Resort" not in f.name and "LastResort" not in f.name}
    return tuple(sorted(named.items(), key=lambda item: (rank(item[0]), item[0])))


@cache
def _glyphs(path: str) -> frozenset[str]:
    """The characters a font file has glyphs for."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError, ValueError):  # a file that is gone or no font: it has none
        return frozenset()


def package_for(missing: str) -> str:
    """The Debian package that has glyphs like these."""
    name = unicodedata.name(missing[0], "") if missing else "CJK"
    return next(package for script, package in PACKAGES if name.startswith(script))


def numbered(label: str, missing: str) -> str:
    """A label with the characters that cannot be drawn given by their numbers."""
    return "".join(f"‹{ord(c):X}›" if c in missing else c for c in label)
