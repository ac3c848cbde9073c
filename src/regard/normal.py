"""The normal form: the few things a kernel must know, as plain data and tensors (maths.md, eq. 21).

    logit[i, j] = scale_ij * content(q_i, k_j) + sum of pieces(i, j)

`Form` is structure: small, hashable, free of lengths, and written as text into the operators, so that a compiled model
does not depend on a length. `Problem` is a form with its tensors. Every operand has leading axes [batch or 1, heads or
1], heads being the query heads or the shared ones, so that indexing A indexes all of them alike.

Pieces, by kind (operands in order):
    vector   x [.., q_len or 1, k_len or 1]        added as it is
    table    t [.., n]                             t[index(i, j)], or t[lookup[index(i, j)]] where it is kept by bins
    slope    m [.., 1, 1]                          -m * distance(i, j)
    query    u [.., q_len, f], R [.., n, f]        <u_i, R[index(i, j)]>
    key      w [.., k_len, f], R [.., n, f]        <w_j, R[index(i, j)]>
    dot      a [.., q_len, f], b [.., k_len, f]    <a_i, b_j>
    network  W1, b1, W2                            the two-layer network of a displacement between points

A space says how a pair becomes an index:
    ("line",)                      i - j + k_len - 1, whatever the starts: tables begin at the smallest displacement met
    ("grid", axes)                 row-major over these axes' displacements, then three entries: query, key, both alone
    ("points", index, axis, sign)  the index map named by `index` of sign * (p_i - p_j), then the same three entries

Tables are kept by bins only for an engine that reads them so; `tables.spread` makes full ones of them. On a grid the
bin after the last then reads as zeros.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision a dtype is computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Piece(NamedTuple):
    kind: str
    label: str  # the part of the logit it belongs to: "content", or the term's description
    space: tuple = ()
    slots: tuple[int, ...] = ()  # its operands
    gate: int = -1  # operand [.., q_len or 1, k_len or 1] that multiplies it
    lookup: int = -1  # operand of integers [.., n of the space] into t or the rows of R; -1: they have them all
    reach: int | None = None  # constant where |δ| >= reach
    config: tuple = ()  # of bins: no two displacements share one; and, for an engine that reads bins, `BINS`


#: said by a piece whose bins are read by the engine itself
BINS = "bins"


class Form(NamedTuple):
    content: tuple = ("dot",)  # or ("distance", power): -power log |q - k|, or ("squared",): -|q - k|^2 / 2
    pieces: tuple[Piece, ...] = ()
    mask: tuple | None = None
    q_geometry: tuple = ("line",)  # or ("grid", shape, unplaced) or ("points", axes, coords slot, placed slot)
    k_geometry: tuple = ("line",)
    scale: int = -1  # operand that multiplies the content, besides the number
    softcap: float | None = None
    sink: int = -1  # operand [1, heads]
    dropout: float = 0.0
    seeds: int = -1  # operand [batch, heads], integers
    q_start: int = -1  # operand [batch, 1], when starts differ by row
    k_start: int = -1
    rewrites: tuple[str, ...] = ()  # what was done to q and k, in words


class Kept(Form):
    """A form that is met again and again: its hash, by which plans and the like are found, is computed once."""

    _fields = Form._fields
    hashed: int

    def __hash__(self) -> int:
        try:
            return self.hashed
        except AttributeError:
            self.hashed = tuple.__hash__(self)
            return self.hashed


class Problem(NamedTuple):
    """A form with its tensors: all an engine is given."""

    form: Form
    q: Tensor  # [batch, heads, q_len, dim], rotated, normalised or centred as the rewrites want
    k: Tensor  # [batch, kv_heads, k_len, dim]
    operands: list[Tensor]
    starts: tuple[int, int]
    scale: float
    plain: tuple[Tensor, Tensor] | None = None  # q and k before rotation, for `explain`
    description: Any = None  # where it came from, and how it was selected: what the reference reads
    selection: tuple = ()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    def select(self, batch: slice | Tensor, heads: slice | Tensor) -> Problem:
        """The same problem for some batch rows and query heads (slices or index tensors)."""
        count = self.q.shape[1]

        def pick(x: Tensor) -> Tensor:
            if x.shape[0] > 1:
                x = x[batch]
            if x.shape[1] > 1:
                x = pick_heads(x, heads, count)
            return x

        plain = None if self.plain is None else (pick(self.plain[0]), pick(self.plain[1]))
        q = self.q[batch][:, heads]
        k = pick_heads(self.k[batch], heads, count)
        return self._replace(
            q=q, k=k, operands=[pick(x) for x in self.operands], plain=plain,
            selection=(*self.selection, (batch, heads)),
        )  # fmt: skip

    @property
    def is_part(self) -> bool:
        """It holds some of the queries and keys of an A."""
        return any(step[0] == "part" for step in self.selection)

    def part(self, rows: slice, cols: slice) -> Problem:
        """Some queries and keys as a problem of their own, for looking: the same logits, in their places.

        Softmax of some of the keys is not A's: give an engine's `reduce` the log-sum-exp of the whole rows with it.
        """
        form, operands, k_len = self.form, list(self.operands), self.k.shape[2]
        for slot, axis, side in _along(form):
            span = (rows, cols)[side]
            if operands[slot].shape[axis] > 1:  # else one for all
                operands[slot] = operands[slot].narrow(axis, span.start, span.stop - span.start)
        low, high = rows.start - cols.stop + k_len, rows.stop - cols.start + k_len - 1  # displacements met, as entries
        for slot, axis in _by_displacement(form):
            operands[slot] = operands[slot].narrow(axis, low, high - low)
        for slot, over in _chosen(form.mask):
            mine, other = (cols, rows) if over else (rows, cols)
            picked = operands[slot][:, :, mine]
            gone = (picked < other.start) | (picked >= other.stop)
            operands[slot] = (picked - other.start).masked_fill(gone, -1)
        plain = None if self.plain is None else (self.plain[0][:, :, rows], self.plain[1][:, :, cols])
        return self._replace(
            form=form._replace(dropout=0.0, seeds=-1), q=self.q[:, :, rows], k=self.k[:, :, cols], operands=operands,
            starts=(self.starts[0] + rows.start, self.starts[1] + cols.start), plain=plain,
            selection=(*self.selection, ("part", rows, cols)),
        )  # fmt: skip

    def transposed(self) -> Problem:
        """Rows become columns: keys ask and queries answer. No sink and no dropout: they belonged to the rows."""
        form, operands = self.form, list(self.operands)
        heads = self.q.shape[1]
        pieces = tuple(_transpose_piece(piece, operands) for piece in form.pieces)
        scale = -1
        if form.scale >= 0:
            scale = _add(operands, operands[form.scale].mT)
        swapped = form._replace(
            pieces=pieces,
            mask=None if form.mask is None else _transpose_mask(form.mask, operands),
            q_geometry=form.k_geometry,
            k_geometry=form.q_geometry,
            q_start=form.k_start,
            k_start=form.q_start,
            scale=scale,
            sink=-1,
            dropout=0.0,
            seeds=-1,
        )
        q = each_head(self.k, heads).expand(-1, heads, -1, -1)
        plain = None
        if self.plain is not None:
            plain = each_head(self.plain[1], heads).expand(-1, heads, -1, -1), self.plain[0]
        return self._replace(
            form=swapped, q=q, k=self.q, operands=operands, starts=self.starts[::-1], plain=plain,
            selection=(*self.selection, "reverse"),
        )  # fmt: skip


def pick_heads(x: Tensor, heads: slice | Tensor, count: int) -> Tensor:
    """Some of `count` query heads, of an operand that has one for each, or fewer that groups of heads share."""
    shared = x.shape[1]
    if shared == count:
        return x[:, heads]
    group = count // shared
    if isinstance(heads, slice):
        first, last, step = heads.indices(count)
        if shared == 1 or (first, last, step) == (0, count, 1):
            return x
        if step == 1 and first // group == (last - 1) // group:
            return x[:, first // group : first // group + 1]
        heads = torch.arange(first, last, step, device=x.device)
    return x if shared == 1 else x[:, heads // group]


def each_head(x: Tensor, count: int) -> Tensor:
    """What groups of heads share, once for every head; what all share or none is left as it is."""
    return x if x.shape[1] in (1, count) else x.repeat_interleave(count // x.shape[1], dim=1)


def product_buffer(problem: Problem, v: Tensor) -> Tensor:
    """Room for A @ v, [batch, heads, q_len, v_dim], laid out as [batch, q_len, heads, v_dim]: heads join for free."""
    batch, heads, q_len, _ = problem.sizes
    return v.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)


def index_size(space: tuple, form: Form, q_len: int, k_len: int) -> int:
    """How many entries a table over this space has."""
    if space[0] == "line":
        return q_len + k_len - 1 if q_len and k_len else 0
    size = 1
    for axis in space[1]:
        size *= form.q_geometry[1][axis] + form.k_geometry[1][axis] - 1
    return size + 3


@functools.lru_cache(maxsize=1024)
def decode(spec: str) -> tuple[str, Form]:
    """Engine and form from the text of a plan."""
    engine, plain = ast.literal_eval(spec)
    form = Kept(*plain)
    return engine, form._replace(pieces=tuple(Piece(*piece) for piece in form.pieces))


def plain_tuple(form: Form) -> tuple:
    """A form as nested plain tuples."""
    pieces: Any = tuple(tuple(piece) for piece in form.pieces)
    return tuple(form._replace(pieces=pieces))


def _along(form: Form) -> set[tuple[int, int, int]]:
    """Slots of operands with an axis of queries (0) or keys (1), that axis, and which of the two it is."""
    masks = [form.mask] if form.mask is not None else []
    pairs = [form.scale, *(piece.gate for piece in form.pieces)]
    pairs += [piece.slots[0] for piece in form.pieces if piece.kind == "vector"]
    found: set[tuple[int, int, int]] = set()
    while masks:
        kind, *rest = masks.pop()
        if kind in ("and", "or", "not"):
            masks += rest
        elif kind == "same":
            found |= {(rest[0], -1, 0), (rest[1], -1, 1)}
        elif kind == "dense":
            pairs.append(rest[0])
    for slot in pairs:
        found |= {(slot, -2, 0), (slot, -1, 1)} if slot >= 0 else set()
    for piece in form.pieces:
        if piece.kind in ("query", "dot"):
            found.add((piece.slots[0], -2, 0))
        if piece.kind in ("key", "dot"):
            found.add((piece.slots[piece.kind == "dot"], -2, 1))
    for side, geometry in enumerate((form.q_geometry, form.k_geometry)):
        if geometry[0] == "points":
            found |= {(geometry[2], -2, side)} | ({(geometry[3], -1, side)} if geometry[3] >= 0 else set())
    return found


def _by_displacement(form: Form) -> set[tuple[int, int]]:
    """Slots of operands with an axis of all displacements on a line, and that axis."""
    found = set()
    for piece in form.pieces:
        if piece.space == ("line",):
            if piece.lookup >= 0:
                found.add((piece.lookup, -1))
            elif piece.kind == "table":
                found.add((piece.slots[0], -1))
            elif piece.kind in ("query", "key"):
                found.add((piece.slots[1], -2))
    return found


def _chosen(mask: tuple | None) -> set[tuple[int, bool]]:
    """Slots of the keys that were chosen for each query, and whether queries have become keys since."""
    if mask is None:
        return set()
    if mask[0] in ("and", "or", "not"):
        return set().union(*(_chosen(part) for part in mask[1:]))
    return {(mask[1], mask[2])} if mask[0] == "chosen" else set()


def _add(operands: list[Tensor], x: Tensor) -> int:
    operands.append(x)
    return len(operands) - 1


def _turn_table(space: tuple, x: Tensor, dim: int) -> Tensor:
    """A table over displacements, for the opposite displacements."""
    if space[0] == "line":
        return x.flip(dim)
    body, (q_alone, k_alone, both) = (
        x.narrow(dim, 0, x.shape[dim] - 3),
        x.narrow(dim, x.shape[dim] - 3, 3).split(1, dim),
    )
    turned = body if space[0] == "points" else body.flip(dim)  # points turn by the sign in their space
    return torch.cat([turned, k_alone, q_alone, both], dim)


def _transpose_piece(piece: Piece, operands: list[Tensor]) -> Piece:
    gate = piece.gate if piece.gate < 0 else _add(operands, operands[piece.gate].mT)
    space = piece.space
    if space and space[0] == "points":
        space = (*space[:3], -space[3])
    kind, slots, lookup = piece.kind, piece.slots, piece.lookup
    if kind == "vector":
        slots = (_add(operands, operands[slots[0]].mT),)
    elif kind in ("table", "query", "key"):
        kind = {"query": "key", "key": "query"}.get(kind, kind)
        if lookup >= 0:
            lookup = _add(operands, _turn_table(piece.space, operands[lookup], -1))
        elif kind == "table":
            slots = (_add(operands, _turn_table(piece.space, operands[slots[0]], -1)),)
        else:
            slots = (slots[0], _add(operands, _turn_table(piece.space, operands[slots[1]], -2)))
    elif kind == "dot":
        slots = slots[::-1]
    return piece._replace(kind=kind, slots=slots, space=space, gate=gate, lookup=lookup)


def _transpose_mask(mask: tuple, operands: list[Tensor]) -> tuple:
    kind = mask[0]
    if kind in ("and", "or", "not"):
        return (kind, *(_transpose_mask(part, operands) for part in mask[1:]))
    if kind == "within":
        lo, hi = mask[1:]
        return ("within", None if hi is None else -hi, None if lo is None else -lo)
    if kind == "box":
        return ("box", tuple(-h for h in mask[2]), tuple(-h for h in mask[1]))
    if kind == "range":
        return ("range", "q" if mask[1] == "k" else "k", *mask[2:])
    if kind == "before":
        return ("before", "q" if mask[1] == "k" else "k", mask[2])
    if kind == "same":
        return ("same", mask[2], mask[1])
    if kind == "dense":
        return ("dense", _add(operands, operands[mask[1]].mT))
    if kind == "nearest":  # only the definition leaves it unsettled, and it reads the description
        return mask
    assert kind == "chosen", f"a mask of kind {kind!r} must be settled before it is transposed"
    return ("chosen", mask[1], not mask[2])
