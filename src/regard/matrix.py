"""A as a value: multiplied, sliced, summarised and explained, never stored.

`attention(...)` describes A and computes nothing. Each method that computes is one pass over its strips. A[b, h] is
again such a value; an index into queries or keys gives numbers. Products, slices, logits, lse and bands are
differentiable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .above import view
from .description import Description, check_values, describe
from .engines import ops
from .face import INSTEAD, TensorFace
from .geometry import Geometry
from .indexing import Index, check_size, human_size, kinds, numbers, plain, single, span, span_length
from .lower import lower
from .masks import Mask, induction
from .normal import Problem
from .plan import Plan, by_definition, check_engine, definition, plan, reads_bins, remarked, universal, wants_bins
from .position import Position, Rotary
from .progress import Callback, reporting
from .scores import Score
from .slices import band, weights_of
from .summaries import (
    Entropy,
    FirstKeyShare,
    Heatmap,
    Mass,
    Pooled,
    PreviousShare,
    Profile,
    Received,
    SelfShare,
    Share,
    SinkShare,
    Summary,
    Toeplitz,
    Top,
    TopK,
)
from .tables import check_ranges, spread

#: logits held at a time while rows are read
ROWS = 1 << 22
#: where nothing is to be changed: it may be entered any number of times
PLAIN = nullcontext()


def attention(
    q: Tensor,
    k: Tensor,
    *,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    position: Position | list | tuple | None = None,
    mask: Mask | None = None,
    geometry: Geometry | tuple[Geometry, Geometry] | None = None,
    q_start: int | Tensor | None = None,
    k_start: int | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    engine: str | None = None,
) -> AttentionMatrix:
    """The attention matrix of q [batch, heads, q_len, dim] and k [batch, kv_heads, k_len, dim], as a lazy value.

    A[i, j] = softmax_j(scale * score(q_i, k_j) + position(i, j)), after `softcap` and `mask`, with an optional `sink`.

    score      Dot() unless given; Cosine(), Euclidean(sigma), InverseDistance(power)
    scale      multiplies the score: a number, or a tensor that broadcasts to [batch, heads, q_len, 1];
               1 / sqrt(dim) for Dot unless given, 1 for the others
    position   a term or a sum of terms, see `regard.position` and `regard.recipes`
    mask       which keys a query may look at, see `regard.masks`
    geometry   where tokens are: Line() unless given, a Grid or Points; a pair (queries', keys') when they differ
    q_start, k_start   the place of the first query or key in the whole sequence: a number, or one a batch row
    softcap    c * tanh(logit / c)
    sink       a logit a head that takes weight and gives no value
    dropout    probability of dropping a weight in products (give it only while training)
    engine     run on this one; otherwise the plan chooses
    """
    check_engine(engine)
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.device.type != "meta":
        if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
            low = torch.get_autocast_dtype(q.device.type)
            q, k = q.to(low), k.to(low)
    return AttentionMatrix(
        check_ranges(describe(
            q, k, score=score, scale=scale, position=position, mask=mask, geometry=geometry, q_start=q_start,
            k_start=k_start, softcap=softcap, sink=sink, dropout=dropout, engine=engine,
        ))
    )  # fmt: skip


class Explanation(NamedTuple):
    """Where one weight came from. The parts add up to the logit before softcap and mask."""

    parts: dict[str, float]
    logit: float  # what softmax sees: after softcap, -inf when masked
    visible: bool
    lse: float
    weight: float

    def __str__(self) -> str:
        rows = [
            *self.parts.items(),
            ("logit", self.logit),
            ("log-sum-exp of the row", self.lse),
            ("weight", self.weight),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:+.6g}" for name, value in rows]
        return "\n".join(lines if self.visible else [*lines, "(masked)"])


class AttentionMatrix(TensorFace):
    """A, lazily. Made by `attention`; batch and head indices give another one."""

    def __init__(
        self, description: Description, selection: tuple = (), dropped: tuple[bool, bool] = (False, False),
        seen: list[tuple[str, Tensor, int]] | None = None,
    ):  # fmt: skip
        self._description, self._selection, self._dropped = description, selection, dropped
        self._cached: Problem | None = None
        self._picked: list[Tensor] = []
        self._lse: Tensor | None = None
        self._plan: Plan | None = None
        if seen is None and not torch.compiler.is_compiling():
            seen = [(name, t, t._version) for name, t in description.held if not t.is_inference()]
        self._seen = seen

    # What it is

    @property
    def shape(self) -> torch.Size:
        """[batch, heads, q_len, k_len], less the axes that were indexed away."""
        sizes = self._still.sizes
        return torch.Size([n for n, gone in zip(sizes, (*self._dropped, False, False), strict=True) if not gone])

    @property
    def plan(self) -> Plan:
        """Which engine runs, what was rewritten, and why not a faster engine."""
        if self._plan is None:
            made = plan(self._still.form, self.device, self.dtype, self._description.engine)
            self._plan = remarked(made, self._still)
        return self._plan

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """The places of the first query and of the first key in the whole sequence: one a batch row, or one for all."""
        problem = self._still
        given = zip((problem.form.q_start, problem.form.k_start), problem.starts, strict=True)
        first, second = ([n] if at < 0 else problem.operands[at].flatten().tolist() for at, n in given)
        return first, second

    def __repr__(self) -> str:
        d = self._description
        parts = [" x ".join(map(str, self.shape)), f"{self.dtype}".removeprefix("torch."), str(self.device)]
        parts += [term.describe() for term in d.terms]
        parts += [f"mask {d.mask}"] if d.mask is not None else []
        parts += ["reversed"] if "reverse" in self._selection else []
        return f"AttentionMatrix({', '.join(parts)}; dense it would take {human_size(self.shape.numel(), self.dtype)})"

    def __len__(self) -> int:
        return self.shape[0]

    # What it gives

    def __matmul__(self, v: Tensor) -> Tensor:
        """A @ v: the fused product, differentiable in q, k, v and every learned part of the description."""
        if isinstance(v, Tensor) and v.device == self.device and v.dtype != torch.float64:
            if torch.is_autocast_enabled(v.device.type):
                v = v.to(self.dtype)
        problem = self._problem()
        v = check_values(v, problem.k, self._description.q.dtype, problem.q.shape[1], self._dropped)
        with self._own_precision():
            out, lse = ops.attend(problem, v, self._description.engine)
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._lse = lse.detach()
        return self._drop(out)

    def __rmatmul__(self, v: Any) -> Any:
        raise TypeError("v @ A: A stands on the left of what it multiplies; A.reversed() turns it around")

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch.matmul(A, v), and A @ v as torch.compile hands it over (it may swap the operands)."""
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__):
            left, right = args
            # Dynamo gives A @ v as matmul(v, A): inside a graph the order cannot be told, outside it can
            swapped = func is torch.Tensor.__rmatmul__ or torch.compiler.is_compiling()
            if isinstance(left, AttentionMatrix):
                return left.__matmul__(right)
            return right.__matmul__(left) if swapped else right.__rmatmul__(left)
        raise TypeError(f"{getattr(func, '__name__', func)} does not take a lazy A: {INSTEAD}")

    def __getitem__(self, index: Index | tuple[Index, ...] | None) -> Any:
        """Batch and head indices give a lazy A; an index into queries or keys gives exact weights as a tensor."""
        if index is None:
            return self._with_batch_axis()
        chosen, rows, cols = self._split(index)
        if rows is None and cols is None:
            return chosen
        return chosen.block(*(slice(None) if x is None else x for x in (rows, cols)))

    def block(self, rows: Index, cols: Index, *, force: bool = False) -> Tensor:
        """Exact weights of some queries and keys: [.., rows, cols]. Large blocks must be forced."""
        return self._block(rows, cols, force, logits=False)

    @property
    def logits(self) -> Logits:
        """What softmax sees, to be indexed like A: after softcap, -inf where masked."""
        return Logits(self)

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each query's logits, the sink included: [.., q_len]. A = exp(logits - lse)."""
        return self._drop(self._whole_lse())

    def _whole_lse(self) -> Tensor:
        if self._lse is not None and not self._tracks:
            self._check_unchanged()
            return self._lse.clone()
        problem = self._problem()
        empty = problem.k.new_empty((*problem.k.shape[:3], 0), dtype=self.dtype)
        with self._own_precision():
            lse = ops.attend(problem, empty, self._description.engine)[1]
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._lse = lse.detach().clone()
        return lse

    @property
    def remembered(self) -> Tensor | None:
        """The log-sum-exp if it is known already, from a product or a recording; else None. Computes nothing."""
        return None if self._lse is None else self._drop(self._lse)

    def knowing(self, lse: Tensor) -> AttentionMatrix:
        """The same A with its log-sum-exp [.., q_len] given: rows are not looked at again to find it."""
        known = copy.copy(self)
        known._lse = lse.to(self.device).reshape(self._still.sizes[:3])
        return known

    def dense(self, *, force: bool = False) -> Tensor:
        """All of A as a tensor. Above a size it must be forced."""
        return self.block(slice(None), slice(None), force=force)

    def band(self, width: int) -> Tensor:
        """The weights near the diagonal, [.., q_len, 2 width + 1]: keys from `width` before to `width` after a query.

        Entry t is the key at the query's position + t - width; 0 where there is no such key. For relative values
        (VITS): y = A @ v + A.band(4) @ R.
        """
        if not isinstance(width, int) or width < 0:
            raise ValueError(f"width: expected an integer >= 0, found {width!r}")
        problem, lse = self._problem(), self._whole_lse()
        with self._own_precision():
            return self._drop(band(self.plan.module.tile, problem, lse, width))

    def reversed(self) -> AttentionMatrix:
        """Keys look at queries: softmax over queries of the transposed logits, terms and mask transposed with them."""
        return AttentionMatrix(self._description, (*self._selection, "reverse"), self._dropped, self._seen)

    def steps(self, v: Tensor | None = None, *, force: bool = False) -> Any:
        """Every step of the pipeline, dense, by the definition: scores, terms, logits, mask, weights, output."""
        self._check_unchanged()
        if "reverse" in self._selection:
            raise ValueError("steps: A.reversed() has no steps of its own; take them from A")
        check_size(self.shape.numel(), self.dtype, force, "A.steps(v, force=True)")
        if v is not None:
            v = check_values(v, self._still.k, self.dtype, self._still.q.shape[1], self._dropped)
        whole = definition().steps(self._description)
        names, values = whole._fields, list(whole)
        for batch, heads in self._selection:
            values = [_pick(x, batch, heads) for x in values]
        picked = dict(zip(names, values, strict=True))
        if v is not None:
            picked["out"] = definition().mix(picked["weights"], v)
        return type(whole)(**{name: self._drop(value) for name, value in picked.items()})

    def explain(self, i: int, j: int) -> Explanation:
        """Which part of the logit of query i and key j came from where, and what softmax made of it. For one head."""
        if self._dropped != (True, True):
            raise ValueError("explain: choose a batch row and a head first, as in A[0, 3].explain(7, 5)")
        q_len, k_len = self.shape
        i, j = single(i, q_len, "i"), single(j, k_len, "j")
        problem = self._still
        with torch.no_grad():
            parts = {label: float(x) for label, x in universal().explain(spread(problem), i, j).items()}
            if problem.plain is not None:
                parts = self._split_rotation(parts, problem, i, j)
            logit = float(self._block(i, j, force=False, logits=True))
            lse = float(self.lse[i])
            weight = float(self.block(i, j))
        return Explanation(parts, logit, logit > float("-inf"), lse, weight)

    def show(self, *, labels: Sequence | tuple | None = None, language: str = "en") -> Any:
        """A map of A in a notebook, to zoom into. `labels`: of the tokens, a list, or (queries', keys')."""
        return view("widget").widget(self, labels=labels, language=language)

    # Summaries

    def summarize(self, *summaries: Summary, progress: Callback | bool | None = None) -> tuple[Any, ...]:
        """Several summaries in one pass, exact and detached. `progress` is called with (done, total) queries."""
        for summary in summaries:
            if not isinstance(summary, Summary):
                raise TypeError(f"summarize: expected summaries such as TopK(8), found {summary!r}")
        self._check_unchanged()
        problem = self._still
        with torch.no_grad(), self._own_precision(), reporting(progress, "looking at A") as report:
            made = plan(problem.form, self.device, self.dtype, self._description.engine)
            states = made.module.reduce(problem, summaries, report, self._lse)  # a product has left it here
            results = [s.finish(state, problem) for s, state in zip(summaries, states, strict=True)]
        return tuple(self._drop(result) for result in results)

    def window(self, rows: slice, cols: slice, *summaries: Summary, lse: Tensor | None = None) -> tuple[Any, ...]:
        """Summaries of some queries and keys, as if there were no others: cells and places count from the first ones.

        lse    of these queries, [.., rows]: what softmax saw of the keys that are left out; needed unless all are in
        """
        self._check_unchanged()
        problem = self._still
        q_len, k_len = problem.sizes[2:]
        r, c = span(rows, q_len, "query", self.device)[0], span(cols, k_len, "key", self.device)[0]
        if not isinstance(r, slice) or not isinstance(c, slice) or not span_length(r) or not span_length(c):
            raise ValueError(f"window: expected spans of queries and keys, found {rows} and {cols}")
        if lse is None and span_length(c) < k_len:
            raise ValueError(f"lse: expected that of the queries, for keys {cols} of {k_len}, found None")
        ends = None if lse is None else lse.reshape(*problem.sizes[:2], -1)
        part = problem.part(r, c)
        with torch.no_grad(), self._own_precision():
            states = self.plan.module.reduce(part, summaries, None, ends)
            return tuple(self._drop(s.finish(state, part)) for s, state in zip(summaries, states, strict=True))

    def _one(self, summary: Summary, progress: Callback | bool | None) -> Any:
        return self.summarize(summary, progress=progress)[0]

    def topk(self, k: int, *, progress: Callback | bool | None = None) -> Top:
        """(weights, indices) of the k strongest keys of each query: [.., q_len, k]."""
        return self._one(TopK(k), progress)

    def heatmap(self, cells: int = 512, *, progress: Callback | bool | None = None) -> Pooled:
        """A as a picture of at most cells x cells: sum, visible count, max and mean of each cell."""
        return self._one(Heatmap(cells), progress)

    def profile(self, *, progress: Callback | bool | None = None) -> Tensor:
        """Mass per displacement, the smallest first: [.., q_len + k_len - 1], or [.., 2h - 1, 2w - 1] on a grid."""
        return self._one(Profile(), progress)

    def received(self, *, progress: Callback | bool | None = None) -> Tensor:
        """Mass each key receives: [.., k_len]."""
        return self._one(Received(), progress)

    def entropy(self, *, progress: Callback | bool | None = None) -> Tensor:
        """Entropy of each query's weights, in nats: [.., q_len]."""
        return self._one(Entropy(), progress)

    def mass(self, pairs: Mask, *, progress: Callback | bool | None = None) -> Tensor:
        """Mass of each query on a set of pairs, given as a mask: [.., q_len]."""
        return self._one(Mass(pairs), progress)

    def share(self, pairs: Mask, *, progress: Callback | bool | None = None) -> Tensor:
        """Share of the mass on a set of pairs, among the queries that see such a pair: [batch, heads]."""
        return self._one(Share(pairs), progress)

    def self_share(self) -> Tensor:
        """Share of the diagonal."""
        return self._one(SelfShare(), None)

    def previous_share(self) -> Tensor:
        """Share of the key just before the query."""
        return self._one(PreviousShare(), None)

    def first_key_share(self) -> Tensor:
        """Share of the first key."""
        return self._one(FirstKeyShare(), None)

    def induction_share(self, tokens: Tensor) -> Tensor:
        """Share of the keys that follow an earlier copy of the query's token."""
        return self._one(Share(induction(tokens)), None)

    def sink_share(self) -> Tensor:
        """Share the sink takes."""
        return self._one(SinkShare(), None)

    def toeplitz_share(self) -> Tensor:
        """How much of A's variance the displacement explains."""
        return self._one(Toeplitz(), None)

    # How it does it

    @property
    def _tracks(self) -> bool:
        return torch.is_grad_enabled() and any([t.requires_grad for _, t in self._description.held])

    @property
    def _still(self) -> Problem:
        """The problem without gradients; made once."""
        if self._cached is not None:
            return self._cached
        with torch.no_grad() if torch.is_grad_enabled() else PLAIN:
            made = self._lower()
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._cached = made
        return made

    def _problem(self) -> Problem:
        """The problem as gradients want it: made anew for each use that records them, so that none is shared."""
        self._check_unchanged()
        return self._lower() if self._tracks else self._still

    def _lower(self) -> Problem:
        d = self._description
        bins = not torch.compiler.is_compiling() and wants_bins(d.q.device.type, d.engine)
        with self._own_precision():
            problem = lower(d, bins)
            if bins and not reads_bins(problem, d.engine):
                problem = spread(problem)
            if not by_definition(d.engine):
                problem = ops.settle(problem, d.engine, self._picked)
        for step in self._selection:
            problem = problem.transposed() if step == "reverse" else problem.select(*step)
        return problem

    def _own_precision(self) -> AbstractContextManager:
        """Autocast lowers q, k and v and nothing else: engines choose the precision of what they do."""
        if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(self.device.type):
            return PLAIN
        return torch.autocast(self.device.type, enabled=False)

    def _check_unchanged(self) -> None:
        if self._seen is None or torch.compiler.is_compiling():
            return
        if self._description.surely_holds(self._seen):
            return
        now = [(name, t) for name, t in self._description.tensors() if not t.is_inference()]
        for (name, tensor, version), (_, current) in zip(self._seen, now, strict=True):
            if tensor is not current or tensor._version != version:
                how = "changed in place" if tensor is current else "replaced"
                raise RuntimeError(
                    f"{name}: a tensor of shape {list(tensor.shape)} that A was made from has been {how} "
                    "since; make A again with attention(...)"
                )

    def __deepcopy__(self, memo: dict) -> AttentionMatrix:
        return AttentionMatrix(copy.deepcopy(self._description, memo), self._selection, self._dropped)

    def __reduce__(self) -> tuple:
        return AttentionMatrix, (self._description, self._selection, self._dropped)

    def _drop(self, result: Any) -> Any:
        """Take away the axes that were indexed away, in a tensor or in what holds tensors."""
        if True not in self._dropped:
            return result
        if isinstance(result, Tensor):
            for axis in (1, 0):
                result = result.squeeze(axis) if self._dropped[axis] else result
        elif isinstance(result, dict):
            return {name: self._drop(x) for name, x in result.items()}
        elif isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*(self._drop(x) if isinstance(x, Tensor) else x for x in result))
        return result

    def _split(self, index: Index | tuple[Index, ...]) -> tuple[AttentionMatrix, Index | None, Index | None]:
        """An index as: the lazy A of its batch and head part, and its query and key parts (None where absent)."""
        index = index if isinstance(index, tuple) else (index,)
        axes = 4 - sum(self._dropped)
        if sum(x is Ellipsis for x in index) > 1 or len(index) - (Ellipsis in kinds(index)) > axes:
            raise IndexError(f"A has {axes} axes {list(self.shape)}, found {len(index)} indices")
        if Ellipsis in kinds(index):
            at = kinds(index).index(Ellipsis)
            index = index[:at] + (slice(None),) * (axes - len(index) + 1) + index[at + 1 :]
        index = (*index, *(slice(None),) * (axes - len(index)))
        index = tuple(plain(x) for x in index)
        if sum(not isinstance(x, (int, slice)) for x in index) > 1:
            raise IndexError("A: index one axis with a list or a tensor at a time")
        lead, (rows, cols) = list(index[:-2]), index[-2:]
        sizes, dropped = self._still.sizes, list(self._dropped)
        step: list[slice | Tensor] = []
        for axis in range(2):
            if self._dropped[axis]:
                step.append(slice(None))
                continue
            part = lead.pop(0)
            if isinstance(part, int):
                at = single(part, sizes[axis], ("batch", "head")[axis])
                step.append(slice(at, at + 1))
                dropped[axis] = True
            else:
                step.append(span(part, sizes[axis], ("batch", "head")[axis], self.device)[0])
        chosen, all_of_it = self, True
        for part, size in zip(step, sizes, strict=False):
            all_of_it &= isinstance(part, slice) and part.indices(size) == (0, size, 1)
        if not all_of_it or tuple(dropped) != self._dropped:
            gone = (dropped[0], dropped[1])
            chosen = AttentionMatrix(self._description, (*self._selection, tuple(step)), gone, self._seen)
            chosen._picked = self._picked
        for part, size in zip((rows, cols), sizes[2:], strict=True):
            if not isinstance(part, (int, slice)):
                numbers(part, size, self.device)
        whole = [None if isinstance(x, slice) and x == slice(None) else x for x in (rows, cols)]
        return chosen, whole[0], whole[1]

    def _block(self, rows: Index, cols: Index, force: bool, logits: bool) -> Tensor:
        problem = self._problem()
        batch, heads, q_len, k_len = problem.sizes
        r, r_gone = span(rows, q_len, "query", self.device)
        c, c_gone = span(cols, k_len, "key", self.device)
        n = batch * heads * span_length(r) * span_length(c)
        check_size(n, self.dtype, force, "A.block(rows, cols, force=True) or A.dense(force=True)")
        tile = self.plan.module.tile
        with self._own_precision():
            if logits:
                result = tile(problem, r, c)
            elif self._lse is not None and not self._tracks:
                result = weights_of(tile(problem, r, c), self._lse[:, :, r])
            elif span_length(c) < k_len and batch * heads * span_length(r) * k_len > ROWS:
                # few columns of many rows: whole rows would stay in the graph
                result = weights_of(tile(problem, r, c), self._whole_lse()[:, :, r])
            else:
                result = self._weights_of_rows(problem, r, c)
        for axis, gone in ((-1, c_gone), (-2, r_gone)):
            result = result.squeeze(axis) if gone else result
        return self._drop(result)

    def _weights_of_rows(self, problem: Problem, rows: slice | Tensor, cols: slice | Tensor) -> Tensor:
        """Weights of some rows, whose log-sum-exp is found on the way, a few rows at a time."""
        batch, heads, _, k_len = problem.sizes
        sink = problem.operands[problem.form.sink] if problem.form.sink >= 0 else None
        at = torch.arange(rows.start, rows.stop, device=self.device) if isinstance(rows, slice) else rows
        parts = []
        for part in at.split(max(1, ROWS // max(1, batch * heads * k_len))):
            straight = isinstance(rows, slice) and len(part)
            some = slice(int(part[0]), int(part[-1]) + 1) if straight else part
            logits = self.plan.module.tile(problem, some, slice(0, k_len))
            parts.append(definition().normalise(logits, sink)[0][..., cols])
        return torch.cat(parts, dim=2)

    def _split_rotation(self, parts: dict[str, float], problem: Problem, i: int, j: int) -> dict[str, float]:
        """A rotary term's part: rotated content minus content."""
        assert problem.plain is not None
        d = self._description
        q, k = problem.plain
        plain = definition().score(d.score, q[:, :, i : i + 1], k[:, :, j : j + 1])
        scale = problem.operands[problem.form.scale] if problem.form.scale >= 0 else None
        factor = (
            d.scale if scale is None else float(scale[0, 0, min(i, scale.shape[2] - 1), min(j, scale.shape[3] - 1)])
        )
        before = float(plain) * float(factor)
        name = next(term.describe() for term in d.terms if isinstance(term, Rotary))
        return {
            "content": before,
            name: parts["content"] - before,
            **{n: x for n, x in parts.items() if n != "content"},
        }


class Logits:
    """What softmax sees, indexed like A. Made by `A.logits`."""

    def __init__(self, matrix: AttentionMatrix):
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        return self._matrix.shape

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        chosen, rows, cols = self._matrix._split(index)
        if rows is None and cols is None:
            return Logits(chosen)
        rows, cols = (slice(None) if x is None else x for x in (rows, cols))
        return chosen._block(rows, cols, force=False, logits=True)

    def dense(self, *, force: bool = False) -> Tensor:
        """All logits as a tensor. Above a size it must be forced."""
        return self._matrix._block(slice(None), slice(None), force, logits=True)

    def __repr__(self) -> str:
        return f"logits of {self._matrix!r}"


def _pick(x: Any, batch: Any, heads: Any) -> Any:
    """Some batch rows and heads of a tensor, or of a dictionary of tensors."""
    if isinstance(x, dict):
        return {name: _pick(y, batch, heads) for name, y in x.items()}
    return None if x is None else x[batch][:, heads]
