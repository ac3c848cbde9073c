"""From what a recorder heard to a trace's document: looks with names, token sequences with labels, notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .labels import labels_of
from .naming import stack_names

if TYPE_CHECKING:
    from .recording import Recorder

VERSION = 1


def document(recorder: Recorder, tokenizer: Any, tokens: Any) -> dict[str, Any]:
    """The document of a trace, as files hold it."""
    spots = [spot for spot in recorder.spots.values() if spot.passes]
    causal: dict[str, bool] = {}
    for spot in spots:
        causal[spot.group] = causal.get(spot.group, False) or (not spot.cross and spot.passes[0].causal)
    stacks = stack_names(list(causal.items()))
    sequences = Sequences(recorder, tokenizer)
    looks = []
    for spot in spots:
        for run, each in enumerate(spot.passes):
            own = sequences.add(each.tokens, each.real, _given(tokens, stacks[spot.group]), each.batch, each.q.length)
            looks.append({
                "path": spot.path,
                "stack": stacks[spot.group],
                "kind": "cross" if spot.cross else "self",
                "layer": spot.layer,
                "run": run,
                "heads": list(spot.heads),
                "q": each.q.whole(),
                "k": each.k.whole(),
                "v": each.v.whole() if each.v.names else None,
                "lse": each.lse.whole() if each.exact and each.lse.names else None,
                "tokens": [own, own if each.sees_itself else None],
                "description": each.said,
            })  # fmt: skip
    _sources(looks, sequences)
    sequences.check_used(tokens)
    return {"version": VERSION, "looks": looks, "sequences": sequences.listed, "notes": recorder.notes}


def _given(tokens: Any, stack: str) -> Any:
    return tokens.get(stack) if isinstance(tokens, dict) else tokens


class Sequences:
    """Token sequences, each once, with their labels."""

    def __init__(self, recorder: Recorder, tokenizer: Any):
        self.kept, self.tokenizer = recorder.kept, tokenizer
        self.listed: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.asked: set[tuple[int, int]] = set()
        self.used = False

    def add(
        self, ids: Sequence[Tensor | None], real: Sequence[Tensor | None], given: Any, batch: int, count: int
    ) -> int | None:
        """The number of a sequence [batch, count], or None when nothing is known of it."""
        known = _whole(ids)
        labels = None
        if given is not None:
            self.asked.add((batch, count))
            told = _read(given, batch, count)
            self.used = self.used or told is not None
            known, labels = told or (known, None)
            if labels is not None:
                known = _whole(ids)
        if known is None and labels is None:
            return None
        if labels is None and known is not None and self.tokenizer is not None:
            labels = [labels_of(self.tokenizer, row) for row in known.tolist()]
        masked = _whole(real)
        if masked is not None and bool(masked.all()):
            masked = None
        entry = {
            "ids": None if known is None else self.kept.put_once(known.long()),
            "real": None if masked is None else self.kept.put_once(masked),
            "labels": labels,
        }
        if entry not in self.listed:
            self.listed.append(entry)
            self.lengths.append(count)
        return self.listed.index(entry)

    def check_used(self, given: Any) -> None:
        """Tokens that fit nothing were meant for something."""
        if given is not None and not self.used:
            there = " or ".join(f"{batch} x {count}" for batch, count in sorted(self.asked)) or "none"
            raise ValueError(f"tokens: expected as many as the model looked with ({there}), found others")


def _whole(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The steps' tokens one after the other, if all are known."""
    found = [part for part in parts if part is not None]
    return torch.cat(found, dim=1) if found and len(found) == len(parts) else None


def _read(given: Any, batch: int, count: int) -> tuple[Tensor | None, list[list[str]] | None] | None:
    """Tokens as the user gave them, ids or labels, for every row or one for all; None where they do not fit."""
    rows = list(given.tolist() if isinstance(given, Tensor) else given)
    if rows and not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    rows = rows * batch if len(rows) == 1 else rows
    texts = [isinstance(token, str) for row in rows for token in row]
    if not all(texts) and not all(type(token) is int for row in rows for token in row):
        raise TypeError("tokens: expected ids [batch, length] or a list of labels")
    if len(rows) != batch or any(len(row) != count for row in rows):
        return None
    if all(texts):
        return None, [list(row) for row in rows]
    return torch.tensor(rows).reshape(batch, count), None


def _sources(looks: list[dict[str, Any]], sequences: Sequences) -> None:
    """The keys of a cross-attention are the tokens of another stack, if one has as many."""
    for look in looks:
        if look["kind"] != "cross":
            continue
        k_len = sequences.kept.shape(look["k"])[1][2]
        for other in looks:
            at = other["tokens"][0]
            if other["stack"] != look["stack"] and at is not None and sequences.lengths[at] == k_len:
                look["tokens"][1] = at
