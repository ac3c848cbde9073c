"""Text to tokens and back: one token a character, and bytes for the characters it does not know.

    tokenizer.encode("小沈阳")        [1204, 229 ...]    ids 0 to 255 are bytes, the others are characters
    tokenizer.decode(ids)             "小沈阳"
    tokenizer.labels(ids)             ["小", "沈", "阳"]  what a picture writes beside a row

Every Unicode text can be encoded, and comes back the same. ASCII characters are their own bytes. A character without a
token of its own becomes the bytes of its UTF-8, and the labels say which piece of which character each of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

BYTES = 256
#: what stands for a character that would leave no mark on paper
NAMES = {" ": "␣", "\n": "↵", "\t": "⇥", "\u3000": "␣␣"}


class Tokenizer:
    """Characters with tokens of their own, in the order of their ids, which begin after the 256 bytes."""

    def __init__(self, characters: str):
        twice = sorted(c for c, n in Counter(characters).items() if n > 1)
        if twice:
            raise ValueError(f"characters: expected each once, found {''.join(twice)!r} more often")
        plain = sorted(c for c in characters if c.isascii() or "\ud800" <= c <= "\udfff")
        if plain:
            raise ValueError(f"characters: expected none of ASCII (those are bytes) and no surrogates, found {plain!r}")
        self.characters = characters
        self._ids = {c: BYTES + n for n, c in enumerate(characters)}

    @classmethod
    def learn(cls, text: str, size: int) -> Tokenizer:
        """A tokenizer of at most `size` tokens: the bytes, and the commonest characters of a text."""
        if size < BYTES:
            raise ValueError(f"size: expected at least {BYTES}, one a byte, found {size}")
        counts = Counter(c for c in text if not c.isascii())
        ranked = sorted(counts, key=lambda c: (-counts[c], c))
        return cls("".join(ranked[: size - BYTES]))

    def __len__(self) -> int:
        return BYTES + len(self.characters)

    def __repr__(self) -> str:
        return f"Tokenizer({BYTES} bytes and {len(self.characters)} characters, {self.characters[:8]!r} first)"

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A lone surrogate is no character, and refused."""
        ids: list[int] = []
        for at, c in enumerate(text):
            own = self._ids.get(c)
            if own is not None:
                ids.append(own)
                continue
            try:
                ids.extend(c.encode("utf-8"))
            except UnicodeEncodeError:
                raise ValueError(
                    f"text: expected Unicode characters, found the surrogate {c!a} at place {at}"
                ) from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that make no character become U+FFFD."""
        return "".join(text for text, _ in self._pieces(list(ids)))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """A readable name a token: the character, "沈1/3" for a piece of one, <E6> for a byte that is part of none."""
        names: list[str] = []
        for text, taken in self._pieces(list(ids)):
            if len(taken) == 1 and (taken[0] >= BYTES or taken[0] < 128):
                names.append(_name(text))
            elif text == "\ufffd":
                names.extend(f"<{byte:02X}>" for byte in taken)
            else:
                names.extend(f"{_name(text)}{n}/{len(taken)}" for n in range(1, len(taken) + 1))
        return names

    def _pieces(self, ids: Sequence[int]) -> Iterable[tuple[str, Sequence[int]]]:
        """Characters with the ids that spell them: one id, or the bytes of one character."""
        at = 0
        while at < len(ids):
            first = ids[at]
            if not 0 <= first < len(self):
                raise ValueError(f"ids: expected 0 to {len(self) - 1}, found {first} at place {at}")
            if first >= BYTES:
                yield self.characters[first - BYTES], ids[at : at + 1]
                at += 1
                continue
            count = 1 + (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0) if first < 0xF5 else 1
            taken = ids[at : at + count]
            try:
                yield bytes(taken).decode("utf-8"), taken
                at += count
            except ValueError:  # cut short, or a character's id among the bytes
                yield "\ufffd", ids[at : at + 1]
                at += 1


def _name(character: str) -> str:
    """What a picture can write for a character: itself, a sign for a blank, or its number."""
    return NAMES.get(character, character if character.isprintable() else f"<{ord(character):02X}>")
