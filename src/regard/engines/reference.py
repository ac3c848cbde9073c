"""The definition of A: dense, equation by equation, in the dtype it is given. Everything is judged against it.

It reads the *description*, not the plan's normal form, so that rewrites are judged too. Plain differentiable PyTorch;
equation numbers are those of docs/maths.md. It stores N x N and is meant for small problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..description import Description
from ..features import Feature
from ..masks import Mask, Pairs
from ..normal import Form, Problem
from ..position import FromKey, FromQuery, Rotary, Static, unbind
from ..scores import Cosine, Dot, Euclidean, InverseDistance, Score

#: The logit of a key at distance zero under InverseDistance: large enough that it takes all the weight.
EXACT_MATCH = 1e4


class Steps(NamedTuple):
    """Every step of the pipeline, in order; each [batch, heads, q_len, k_len] but for the last two."""

    scores: Tensor  # score(q_i, k_j), before any scale
    scaled: Tensor  # times scale
    terms: dict[str, Tensor]  # what each position term adds
    logits: Tensor  # scaled + terms, softcapped
    visible: Tensor  # the mask, True = may look
    masked: Tensor  # logits, -inf where not visible: what softmax sees
    weights: Tensor  # A
    lse: Tensor  # [batch, heads, q_len]: log of the softmax denominator
    out: Tensor | None  # A V: [batch, heads, q_len, v_dim]


def steps(d: Description, v: Tensor | None = None, dtype: torch.dtype | None = None) -> Steps:
    """Run the whole pipeline. `dtype` computes in another precision than q's (float64 for the oracle)."""
    dtype = d.q.dtype if dtype is None else dtype
    q, k = d.q.to(dtype), _per_head(d.k.to(dtype), d.q.shape[1])

    plain = score(d.score, q, k)
    scale = d.scale.to(dtype) if isinstance(d.scale, Tensor) else d.scale
    scaled = scale * plain

    q_at, k_at = d.positions("q"), d.positions("k")
    q_place, k_place = d.q_geometry.coordinates(q_at), d.k_geometry.coordinates(k_at)
    delta = q_place.unsqueeze(-2) - k_place.unsqueeze(-3)  # eq. 3: [batch or 1, q_len, k_len, axes]
    q_placed, k_placed = d.q_geometry.placed(q_at), d.k_geometry.placed(k_at)
    no_q = torch.zeros_like(q_at, dtype=torch.bool) if q_placed is None else ~q_placed
    no_k = torch.zeros_like(k_at, dtype=torch.bool) if k_placed is None else ~k_placed

    terms: dict[str, Tensor] = {}
    for term in d.terms:
        inner, bound = unbind(term)
        if isinstance(inner, Rotary):  # eq. 14
            turned = score(
                d.score,
                inner.rotate(q, q_place, q_placed),
                inner.rotate(k, k_place, k_placed),
            )
            value = scale * (turned - plain)
        else:
            R = _features(inner.features, delta, no_q, no_k, dtype)  # [batch or 1, heads or 1, q_len, k_len, dim]
            if isinstance(inner, Static):  # eq. 10
                value = torch.einsum("hf,bhijf->bhij", *_match_heads(inner.readout.to(dtype), R))
            elif isinstance(inner, FromQuery):  # eq. 11
                x = _content(inner, bound.query.to(dtype) if bound and bound.query is not None else q)
                value = torch.einsum("bhif,bhijf->bhij", *_match_heads(x, R))
            else:  # eq. 12
                assert isinstance(inner, FromKey)
                x = _content(
                    inner, _per_head(bound.key.to(dtype), q.shape[1]) if bound and bound.key is not None else k
                )
                value = torch.einsum("bhjf,bhijf->bhij", *_match_heads(x, R))
            value = inner.scale * value
            if bound is not None and bound.gate is not None:  # eq. 13
                value = bound.gate.to(dtype) * value
        name = term.describe()
        terms[_unique(name, terms)] = value.expand(scaled.shape)

    logits = scaled
    for value in terms.values():
        logits = logits + value
    if d.softcap is not None:
        logits = d.softcap * torch.tanh(logits / d.softcap)  # eq. 18

    visible = torch.ones_like(logits, dtype=torch.bool)
    if d.mask is not None:
        placed = ~(no_q.unsqueeze(-1) | no_k.unsqueeze(-2))
        visible = d.mask.visible(Pairs(q_at, k_at, delta, placed, logits.detach())).expand(logits.shape)
    masked = logits.masked_fill(~visible, -torch.inf)

    weights, lse = normalise(masked, None if d.sink is None else d.sink.to(dtype)[None])
    out = None if v is None else mix(weights, v)
    return Steps(plain, scaled, terms, logits, visible, masked, weights, lse, out)


def score(kind: Score, q: Tensor, k: Tensor) -> Tensor:
    """score(q_i, k_j) for all pairs, eq. 1 and 2: [batch, heads, q_len, k_len]."""
    if isinstance(kind, Dot):
        return q @ k.mT
    if isinstance(kind, Cosine):
        return torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    square = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    if isinstance(kind, Euclidean):
        return -square / (2 * kind.sigma**2)
    assert isinstance(kind, InverseDistance)
    met = square == 0
    far = -0.5 * kind.power * torch.log(square.masked_fill(met, 1.0))
    return far.masked_fill(met, EXACT_MATCH if kind.power > 0 else -torch.inf)


def _features(features: Feature, delta: Tensor, no_q: Tensor, no_k: Tensor, dtype: torch.dtype) -> Tensor:
    """R for every pair: [batch or 1, heads or 1, q_len, k_len, dim]. Pairs without a displacement read `unplaced`."""
    alone = no_q.unsqueeze(-1) | no_k.unsqueeze(-2)
    R = features(delta.masked_fill(alone.unsqueeze(-1), 0)).to(dtype)
    R = R.unsqueeze(1) if features.heads is None else R.movedim(0, 1)
    if bool(alone.any()):
        rows = features.unplaced()
        rows = R.new_zeros(3, features.dim) if rows is None else rows.to(R)
        case = torch.where(no_q.unsqueeze(-1) & no_k.unsqueeze(-2), 2, torch.where(no_q.unsqueeze(-1), 0, 1))
        own = rows[..., case, :]  # [(heads,) batch or 1, q_len, k_len, dim]
        own = own.unsqueeze(1) if rows.dim() == 2 else own.movedim(0, 1)
        R = torch.where(alone[:, None, :, :, None], own, R)
    return R


def _content(term: FromQuery | FromKey, x: Tensor) -> Tensor:
    """(x + c)ᵀ W."""
    if term.offset is not None:
        x = x + term.offset.to(x.dtype)[:, None]
    return x if term.weight is None else x @ term.weight.to(x.dtype)


def _match_heads(x: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """einsum wants equal sizes where we broadcast: heads (axis -2 of a readout, 1 of others) and batch."""
    if x.dim() == 2:
        heads = max(x.shape[0], R.shape[1])
        return x.expand(heads, -1), R.expand(-1, heads, -1, -1, -1)
    batch, heads = max(x.shape[0], R.shape[0]), max(x.shape[1], R.shape[1])
    return x.expand(batch, heads, -1, -1), R.expand(batch, heads, -1, -1, -1)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Shared keys or values, once for every query head of their group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _unique(name: str, taken: dict[str, Tensor]) -> str:
    if name not in taken:
        return name
    count = 2
    while f"{name} #{count}" in taken:
        count += 1
    return f"{name} #{count}"


# The four functions every engine has


def refuse(form: Form, device: str, dtype: str) -> str | None:
    """Why this engine cannot run a form: it defines them all."""
    return None


class Dense(NamedTuple):
    """The masked logits of a selection of A, and what else the softmax needs."""

    masked: Tensor
    sink: Tensor | None  # [1, heads]
    seeds: Tensor | None  # [batch, heads]
    visible: Tensor  # the mask: a visible key may still have a logit of -inf


def dense(problem: Problem, dtype: torch.dtype | None = None) -> Dense:
    """What softmax sees, after choosing batch rows and heads, or turning A around."""
    d: Description = problem.description
    whole = steps(d, dtype=dtype)
    masked, visible = whole.masked, whole.visible
    batch, heads = masked.shape[:2]
    sink = None if d.sink is None else d.sink.to(masked.dtype).expand(heads)[None]
    seeds = None
    if d.seed is not None:
        seeds = d.seed + torch.arange(batch * heads, device=masked.device).reshape(batch, heads)
    for step in problem.selection:
        if step == "reverse":
            masked, visible, sink, seeds = masked.mT, visible.mT, None, None
        elif step[0] == "part":
            masked, visible = (x[:, :, step[1]][..., step[2]] for x in (masked, visible))
        else:
            rows, columns = step
            masked, visible = masked[rows][:, columns], visible[rows][:, columns]
            sink = None if sink is None else sink[:, columns]
            seeds = None if seeds is None else seeds[rows][:, columns]
    return Dense(masked, sink, seeds, visible)


def forward(problem: Problem, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(A @ v, lse)."""
    masked, sink, seeds, _ = dense(problem, dtype)
    weights, lse = normalise(masked, sink)
    p = problem.description.dropout
    if seeds is not None:  # eq. 25
        i, j = (torch.arange(n, device=weights.device) for n in weights.shape[-2:])
        weights = weights * keep(seeds, i, j, p) / (1 - p)
    out = mix(weights, v)
    return out.to(v.dtype if dtype is None else dtype), lse


def tile(problem: Problem, rows: slice | Tensor, cols: slice | Tensor) -> Tensor:
    """Logits of some rows and columns, -inf where masked."""
    return dense(problem).masked[:, :, rows][..., cols]


def reduce(
    problem: Problem,
    summaries: Sequence[Any],
    progress: Callable[[int, int], None] | None = None,
    lse: Tensor | None = None,
) -> list[Any]:
    """Each summary's state after it has been shown all of A at once. `lse` is that of the rows, where it is known."""
    strip = Whole(problem, lse)
    states = [summary.start(problem) for summary in summaries]
    for summary, state in zip(summaries, states, strict=True):
        summary.update(state, strip)
    return states


class Whole:
    """All of A as one strip."""

    def __init__(self, problem: Problem, lse: Tensor | None = None):
        self.problem = problem
        masked, sink, _, visible = dense(problem)
        self.logits, (self.weights, self.lse) = masked, normalise(masked, sink)
        if lse is not None:  # eq. 20, of some of the keys
            self.lse, seen = lse, lse.masked_fill(lse == -torch.inf, 0.0)
            self.weights = torch.exp(masked - seen.to(masked.dtype).unsqueeze(-1))
        self.visible = visible.to(masked.dtype)
        batch, heads, q_len, k_len = masked.shape
        self.batch, self.heads, self.rows, self.cols = (slice(0, n) for n in (batch, heads, q_len, k_len))

    def pairs(self, mask: Mask) -> Tensor:
        return mask.visible(self._pairs())

    def add_by_displacement(self, total: Tensor, x: Tensor) -> None:
        """Sums over pairs of one displacement, in table order: the definition, one displacement at a time."""
        pairs, form = self._pairs(), self.problem.form
        if not x.numel():
            return
        if form.q_geometry[0] == "grid":
            low = 1 - torch.tensor(form.k_geometry[1])
            ends = torch.tensor(form.q_geometry[1])
        else:  # tables on a line begin at each batch row's smallest displacement
            low, ends = torch.zeros(1), torch.tensor([total.shape[-1]])
            pairs.delta = pairs.delta - pairs.delta[:, :1, -1:]
        for entry, at in enumerate(torch.cartesian_prod(*(torch.arange(a, b) for a, b in zip(low, ends, strict=True)))):
            same = (pairs.delta == at).all(-1) & pairs.placed
            total[..., entry] += (x * same.unsqueeze(1)).sum((-2, -1))

    def _pairs(self) -> Pairs:
        d: Description = self.problem.description

        def pick(x: Tensor, step: tuple) -> Tensor:
            return x[step[0]] if x.shape[0] > 1 else x

        places = []
        for side, geometry in (("q", d.q_geometry), ("k", d.k_geometry)):
            at = d.positions(side)
            placed = geometry.placed(at)
            places.append((at, geometry.coordinates(at), torch.ones_like(at) > 0 if placed is None else placed))
        for step in self.problem.selection:
            if step == "reverse":
                places.reverse()
            elif step[0] == "part":
                places = [(a[:, x], b[:, x], c[:, x]) for (a, b, c), x in zip(places, step[1:], strict=True)]
            else:
                places = [(pick(a, step), pick(b, step), pick(c, step)) for a, b, c in places]
        (q_at, q_place, q_placed), (k_at, k_place, k_placed) = places
        delta = q_place.unsqueeze(-2) - k_place.unsqueeze(-3)
        return Pairs(q_at, k_at, delta, q_placed.unsqueeze(-1) & k_placed.unsqueeze(-2), self.logits)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """A V, eq. 20, with values shared by groups of heads."""
    return weights @ _per_head(v.to(weights.dtype), weights.shape[1])


def normalise(masked: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis, with a sink that takes its share (eq. 19, 20): weights and log-sum-exp."""
    k_len = masked.shape[-1]
    if sink is not None:
        masked = torch.cat([masked, sink[:, :, None, None].expand(*masked.shape[:-1], 1)], dim=-1)
    if not masked.shape[-1]:
        return masked, masked.new_full(masked.shape[:-1], -torch.inf)
    lse = torch.logsumexp(masked, dim=-1)
    # torch.softmax: exp(logit - lse) loses digits where lse is large. Where nothing is seen, zeros and not NaN
    blind = lse.detach().unsqueeze(-1) == -torch.inf
    weights = torch.softmax(masked.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return weights[..., :k_len], lse


def keep(seeds: Tensor, rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """Which weights dropout keeps (eq. 25): a hash of seed, row and column, so any tile gives the same answer.

    seeds [batch, heads], rows [n], cols [m]: booleans [batch, heads, n, m].
    """
    row = _mix(_mix(seeds)[..., None, None] + rows[:, None] * 0x9E3779B1)
    cell = _mix(row + cols * 0x85EBCA77)
    return cell >= int(p * 2**32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that spreads every bit (held in int64)."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
