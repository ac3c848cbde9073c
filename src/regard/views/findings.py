"""What there is to say about a trace, as plain numbers: what heads do, links, entropies, the head worth showing.

Terminal, picture, page and JSON all show these findings; none of them computes anything else. Per layer it is one pass
of `A.summarize`, so that a text may be long.

A link is a query and a key that meet more than can be expected. The strongest weights of a text are mostly dull: a head
that looks at the token before does so everywhere, and many heads rest on one key. So a link is ranked by what its
weight has over the largest of three: the head's mean weight at that displacement, its mean weight on that key (both
over the *other* queries that can look so), and an even share among the keys that the query sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Entropy, Heatmap, Profile, Received, TopK
from ..trace import Look, Trace

#: cells of the small map of each head, and of the large map of the one that is shown
SMALL, LARGE = 48, 256
#: keys of each query among which links are sought, and links that are kept
TOP, LINKS = 4, 24
#: powers of ten shown where weights are pooled
DECADES = 4
#: tokens up to which a map is shown weight by weight
EXACT = 64
#: the shares of a head, as `trace.statistics()` calls them
SHARES = ("self", "previous", "induction", "first", "sink", "toeplitz", "spread")

#: tokens that stand for no text: no link leads to or from them
SPECIAL = re.compile(r"\[(?:CLS|SEP|PAD|BOS|EOS)\]|</?(?:s|pad|bos|eos|cls|sep)>|<\|[^|]*\|>")

#: called with how much of how much is done
Report = Callable[[int, int], None]


class Head(NamedTuple):
    """One head: what it does in a word, and the shares that say so."""

    layer: int
    head: int
    does: str  # a word of trace.statistics.RULES
    shares: dict[str, float | None]
    entropy: float  # mean over queries, in nats
    telling: float  # how much its links stand out, the mean over queries


class Link(NamedTuple):
    """A query that looks at a key more than expected."""

    query: int
    key: int
    weight: float
    expected: float
    layer: int
    head: int


class Small(NamedTuple):
    """One head pooled into few cells: mean weights, and which cells hold a pair that may meet."""

    weights: Tensor  # [cells, cells]
    visible: Tensor


@dataclass
class Findings:
    """Everything that is shown of one text."""

    model: str
    text: str | None
    rows: list[str]  # what stands beside queries
    columns: list[str]  # what stands above keys
    heads: list[Head]
    links: list[Link]
    small: dict[tuple[int, int], Small]
    shown: tuple[int, int]  # layer, head
    asked: bool  # whether that head was asked for
    matrix: AttentionMatrix  # of that head, lazy
    anchor: Link | None  # its strongest link
    profile: list[float]  # its mass per displacement, from 1 - k_len on; empty where queries and keys differ
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        return sorted({head.layer for head in self.heads})

    @property
    def size(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def shares(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """A head's small map in its own scale, 0 to 1, and which cells may be seen.

        Weight by weight the scale is even; pooled cells differ by powers of ten, so theirs is logarithmic.
        """
        weights, visible = self.small[layer, head]
        scaled = weights / weights.max().clamp(min=1e-30)
        if max(self.size) > SMALL:
            scaled = (1 + scaled.clamp(min=1e-30).log10() / DECADES).clamp(min=0)
        return scaled, visible

    def entropy(self, layer: int) -> float:
        """Mean over the heads of a layer, in nats."""
        found = [head.entropy for head in self.heads if head.layer == layer]
        return sum(found) / len(found)

    def of(self, layer: int, head: int) -> Head:
        return next(each for each in self.heads if (each.layer, each.head) == (layer, head))

    def window(self, tokens: int) -> tuple[slice, slice]:
        """Queries and keys that fit a map of so many tokens: all of them, or those around the head's strongest link."""
        q_len, k_len = self.size
        query, key = self._strongest() if self.anchor is None else (self.anchor.query, self.anchor.key)
        if q_len == k_len and abs(query - key) < tokens:  # both in one window: the diagonal stays a diagonal
            middle = (query + key) // 2
            return (around(middle, tokens, q_len),) * 2
        return around(query, tokens, q_len), around(key, tokens, k_len)

    def _strongest(self) -> tuple[int, int]:
        """Without a link: the largest weight off the first query."""
        weights, indices = self.matrix.topk(1)
        query = int(weights[1:, 0].argmax()) + 1 if len(weights) > 1 else 0
        return query, max(0, int(indices[query, 0]))

    def to_json(self) -> dict[str, Any]:
        """All of it for programs: the shown head weight by weight where the text is short, else pooled."""
        layer, head = self.shown
        exact = max(self.size) <= EXACT
        pooled = None if exact else self.matrix.heatmap(SMALL)
        weights = self.matrix.dense().detach() if exact else pooled.mean  # type: ignore[union-attr]
        return {
            "model": self.model,
            "text": self.text,
            "queries": self.rows,
            "keys": self.columns if self.columns != self.rows else None,
            "notes": self.notes,
            "heads": [
                {
                    "layer": h.layer, "head": h.head, "does": h.does, **numbers(h.shares),
                    "entropy": number(h.entropy), "telling": number(h.telling),
                }
                for h in self.heads
            ],
            "layers": [{"layer": n, "entropy": number(self.entropy(n))} for n in self.layers],
            "links": [
                {**link._asdict(), "weight": number(link.weight), "expected": number(link.expected),
                 "from": self.rows[link.query], "to": self.columns[link.key]}
                for link in self.links
            ],
            "shown": {
                "layer": layer,
                "head": head,
                "asked": self.asked,
                "cell": [1, 1] if pooled is None else list(pooled.cell),
                "weights": [list(map(number, row)) for row in weights.tolist()],
                "profile": list(map(number, self.profile)),
            },
        }  # fmt: skip


def gather(
    trace: Trace, *, model: str, text: str | None = None, layer: int | None = None, head: int | None = None,
    report: Report | None = None,
) -> Findings:  # fmt: skip
    """Look at every head of a trace of one text.

    layer, head   the head to show; where one is not given, the most telling head that fits
    """
    looks = trace.looks
    wanted = _chosen(looks, layer, head)
    work = [len(look.heads) * look.q_len * look.k_len for look in looks]
    total = 2 * sum(work)

    def share_of(first: int, size: int) -> Report | None:
        return None if report is None else lambda done, whole: report(first + size * done // max(whole, 1), total)

    labels, keys = trace.labels(), trace.labels("k")
    special = [at for at, label in enumerate(keys) if SPECIAL.fullmatch(label)]
    rows = trace.statistics(progress=share_of(0, sum(work)) or False)
    heads, small, profiles = [], {}, {}
    found: list[tuple[float, Link]] = []
    for at, (look, A) in enumerate(trace):
        said = {row["head"]: row for row in rows if row["layer"] == look.layer}
        listed = any(row["toeplitz"] is not None for row in said.values())
        seen = see(A[0], share_of(sum(work) + sum(work[:at]), work[at]), line=listed)
        tells = telling(seen, special)
        found += links_of(seen, look.layer, look.heads, special)
        for n, number_ in enumerate(look.heads):
            row = said[number_]
            shares = {name: row[name] for name in SHARES}
            heads.append(Head(look.layer, number_, row["does"], shares, row["entropy"], tells[n]))
            small[look.layer, number_] = Small(seen.pooled[n], seen.visible[n])
            profiles[look.layer, number_] = [] if seen.profile is None else seen.profile[n].tolist()
    best = max((each for each in heads if (each.layer, each.head) in wanted), key=lambda each: each.telling)
    shown = best.layer, best.head
    own = [(over, link) for over, link in found if (link.layer, link.head) == shown]
    anchor = max(own, default=(0.0, None), key=lambda each: each[0])[1]
    return Findings(
        model, text, labels, keys, heads, strongest(found), small, shown,
        layer is not None and head is not None, trace[shown], anchor,
        profiles[shown],
    )  # fmt: skip


def _chosen(looks: Sequence[Look], layer: int | None, head: int | None) -> set[tuple[int, int]]:
    """The heads that are meant, each (layer, head)."""
    there = {(look.layer, number) for look in looks for number in look.heads}
    for name, at, asked in (("layer", 0, layer), ("head", 1, head)):
        numbers = sorted({each[at] for each in there})
        if asked is not None and asked not in numbers:
            raise ValueError(f"--{name}: expected one of {', '.join(map(str, numbers))}, found {asked}")
    fit = {(a, b) for a, b in there if layer in (None, a) and head in (None, b)}
    if not fit:
        raise ValueError(f"--head: layer {layer} has no head {head}")
    return fit


def around(middle: int, size: int, length: int) -> slice:
    """`size` places around one of them, inside a length."""
    first = max(0, min(middle - size // 2, length - size))
    return slice(first, min(length, first + size))


def number(x: float) -> float | None:
    """A number as JSON knows it: six digits are more than float32 keeps of a weight; none for NaN and infinity."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def numbers(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if x is None else number(x) for name, x in values.items()}


class Seen(NamedTuple):
    """What one pass over a layer gives, for every head."""

    weights: Tensor  # [heads, q_len, top]
    keys: Tensor
    entropy: Tensor  # [heads]
    received: Tensor  # [heads, k_len]
    profile: Tensor | None  # [heads, q_len + k_len - 1]
    pooled: Tensor  # [heads, cells, cells]
    visible: Tensor
    pairs: int  # pairs that may meet, in one head


def see(A: AttentionMatrix, progress: Report | None = None, *, line: bool = True) -> Seen:
    """One pass over a layer's A [heads, q_len, k_len]; `line` says that displacements can be listed."""
    line = line and A.shape[-1] == A.shape[-2]
    wanted = [TopK(TOP), Entropy(), Received(), Heatmap(SMALL), *([Profile()] if line else [])]
    top, entropy, received, pooled, *rest = A.summarize(*wanted, progress=progress or False)
    count = pooled.count
    return Seen(
        top.weights.float().cpu(), top.indices.cpu(), entropy.double().mean(-1).cpu(), received.double().cpu(),
        rest[0].double().cpu() if rest and rest[0].dim() == 2 else None, pooled.mean.float().cpu(), (count > 0).cpu(),
        int(count[0].sum()),
    )  # fmt: skip


def excess(seen: Seen, avoid: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """What each of the top weights has over what is expected, and what that is: [heads, q_len, top] both.

    avoid    keys no link leads to, such as [SEP]
    """
    heads, q_len, _ = seen.weights.shape
    k_len = seen.received.shape[-1]
    weights, keys = seen.weights.double(), seen.keys.clamp(min=0)
    rows = torch.arange(q_len)[:, None]
    causal = q_len == k_len and seen.pairs == q_len * (q_len + 1) // 2
    sees = (rows + 1 if causal else torch.full_like(rows, max(1, seen.pairs // max(1, q_len)))).double()
    seen_by = (q_len - keys if causal else torch.full_like(keys, q_len)).double()
    expected = (1 / sees).expand_as(weights)
    by_key = seen.received.gather(-1, keys.flatten(1)).unflatten(-1, keys.shape[1:])
    expected = torch.maximum(expected, (by_key - weights) / (seen_by - 1).clamp(min=1))
    alike = torch.zeros_like(seen.keys, dtype=torch.bool)
    if seen.profile is not None:
        delta = rows - keys
        by_delta = seen.profile.gather(-1, (delta + k_len - 1).flatten(1)).unflatten(-1, keys.shape[1:])
        expected = torch.maximum(expected, (by_delta - weights) / (q_len - delta.abs() - 1).clamp(min=1))
        alike = delta == 0  # a token's look at itself is no link
    dull = (seen.keys < 0) | alike | torch.isin(keys, torch.tensor(list(avoid), dtype=keys.dtype))
    dull |= torch.isin(rows, torch.tensor(list(avoid), dtype=rows.dtype))
    return (weights - expected).masked_fill(dull, -1.0), expected


def links_of(seen: Seen, layer: int, heads: Sequence[int], avoid: Sequence[int] = ()) -> list[tuple[float, Link]]:
    """The strongest links of one layer, with what they have over the expected, and the strongest of each head."""
    over, expected = excess(seen, avoid)
    where = over.flatten().topk(min(LINKS, over.numel())).indices
    if over.numel():
        own = over.flatten(1).argmax(-1) + torch.arange(len(over)) * over[0].numel()
        where = torch.cat([where, own]).unique()
    found = []
    for h, query, t in zip(*(x.tolist() for x in torch.unravel_index(where, over.shape)), strict=True):
        if over[h, query, t] > 0:
            key, weight = int(seen.keys[h, query, t]), float(seen.weights[h, query, t])
            link = Link(query, key, weight, float(expected[h, query, t]), layer, heads[h])
            found.append((float(over[h, query, t]), link))
    return found


def strongest(found: list[tuple[float, Link]]) -> list[Link]:
    """Links in order, each pair of tokens once, under the head that shows it best."""
    links: dict[tuple[int, int], Link] = {}
    for _, link in sorted(found, key=lambda each: -each[0]):
        links.setdefault((link.query, link.key), link)
    return list(links.values())[:LINKS]


def telling(seen: Seen, avoid: Sequence[int] = ()) -> list[float]:
    """How much each head tells about the text: the mean over queries of its best link's excess."""
    over, _ = excess(seen, avoid)
    return over.amax(-1).clamp(min=0).mean(-1).tolist() if over.numel() else [0.0] * len(over)
