"""What to write beside rows and columns: a readable word for each token, whatever the tokenizer.

    byte-level pieces ("Ġthe", "å°", "ı")    ␣the, and 小1/2, 小2/2 for the pieces of a character that was cut in two
    sentencepiece ("▁the", "<0xE5>")         the same
    wordpiece ("##ing")                      ##ing: the marks say that it goes on
    regard's own                             tokenizer.labels

Every token gets one label, none is empty, and a character that leaves no mark on paper gets a sign or its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

#: what stands for a character that would leave no mark on paper
SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\u3000": "␣␣"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def labels_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One label a token."""
    ids = [int(n) for n in ids]
    own = getattr(tokenizer, "labels", None)
    if callable(own):
        return [str(label) for label in own(ids)]
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise TypeError(
            "tokenizer: expected one of regard's or of transformers' (with convert_ids_to_tokens), "
            f"found {type(tokenizer).__name__}"
        )
    pieces = [
        piece if isinstance(piece, str) else f"<{n}>" for n, piece in zip(ids, _pieces(tokenizer, ids), strict=True)
    ]
    special = set(getattr(tokenizer, "all_special_tokens", ()) or ())
    special |= {str(token) for token in (getattr(tokenizer, "added_tokens_encoder", None) or {})}
    if is_byte_level(tokenizer):
        table = byte_characters()
        cut = [None if piece in special else _encoded(piece, table) for piece in pieces]
    else:
        cut = [None if piece in special else _spelled(piece) for piece in pieces]
    return _joined(pieces, cut)


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[Any]:
    """Pieces as the tokenizer stores them; a number it does not know has none."""
    try:
        return list(tokenizer.convert_ids_to_tokens(list(ids)))
    except (IndexError, KeyError, ValueError, OverflowError):
        pieces: list[Any] = []
        for n in ids:
            try:
                pieces.append(tokenizer.convert_ids_to_tokens(n))
            except (IndexError, KeyError, ValueError, OverflowError):
                pieces.append(None)
        return pieces


@cache
def byte_characters() -> dict[str, int]:
    """The printable characters that byte-level tokenizers write bytes as.

    Bytes that print in Latin-1 stand for themselves; the others are numbered from 256 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def is_byte_level(tokenizer: Any) -> bool:
    """Whether the pieces are bytes in disguise: a fast tokenizer says so, of others the alphabet does."""
    if isinstance(getattr(tokenizer, "byte_decoder", None), dict):
        return True
    inner = getattr(tokenizer, "backend_tokenizer", None)
    for part in ("decoder", "pre_tokenizer"):
        if inner is not None and "ByteLevel" in repr(getattr(inner, part, None)):
            return True
    return False


def _encoded(piece: str, table: dict[str, int]) -> bytes:
    """The bytes of a byte-level piece. Characters outside of the alphabet (added tokens) stand for themselves."""
    if all(c in table for c in piece):
        return bytes(table[c] for c in piece)
    return piece.encode("utf-8", "replace")


def _spelled(piece: str) -> bytes:
    """The bytes of any other piece: ▁ is a blank, <0xE5> a byte."""
    byte = _BYTE.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode("utf-8", "replace")


def _joined(pieces: Sequence[str], cut: Sequence[bytes | None]) -> list[str]:
    """Labels, with characters that were cut into several tokens put together across them."""
    labels: list[str] = []
    at = 0
    while at < len(cut):
        data = cut[at]
        if data is None:
            labels.append(pieces[at])
            at += 1
            continue
        end = at + 1  # the run of tokens that must be read together to spell whole characters
        whole = data
        while end < len(cut) and end - at < 4 and _unfinished(whole) and (more := cut[end]) is not None:
            if not more or not 0x80 <= more[0] < 0xC0:
                break
            whole, end = whole + more, end + 1
        labels.extend(_run([part or b"" for part in cut[at:end]]))
        at = end
    return labels


def _unfinished(data: bytes) -> bool:
    """Whether bytes end in the middle of a character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back < (2 + (byte >= 0xE0) + (byte >= 0xF0))
        if byte < 0x80:
            return False
    return False


def _run(parts: Sequence[bytes]) -> list[str]:
    """Labels of tokens that spell characters together: 小1/2 and 小2/2 for one that was cut in two."""
    whole = b"".join(parts)
    owners = [n for n, part in enumerate(parts) for _ in part]  # the token of each byte
    found: list[list[str]] = [[] for _ in parts]
    at = 0
    while at < len(whole):
        first = whole[at]
        count = 1 + (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0) if first < 0xF5 else 1
        try:
            character = whole[at : at + count].decode("utf-8")
        except UnicodeDecodeError:
            character, count = f"<{first:02X}>", 1
        here = sorted(set(owners[at : at + count]))
        for n, token in enumerate(here):
            name = readable(character) if count > 1 or len(character) == 1 else character
            found[token].append(name if len(here) == 1 else f"{name}{n + 1}/{len(here)}")
        at += count
    return ["".join(names) or "∅" for names in found]


def readable(character: str) -> str:
    """A character, a sign for a blank, or its number."""
    if character in SIGNS or character.isprintable():
        return SIGNS.get(character, character)
    return f"<{ord(character):02X}>"
