"""From a problem to what kernels are given: pieces folded into few tensors, tables laid out, masks joined.

| pieces | become |
|---|---|
| biases a query or a key | one vector over rows, one over columns |
| slopes on a line | one factor a row: arithmetic in the kernel |
| tables on a line, or on a grid without unplaced tokens | one `Toeplitz`: rows of tiles load whole vectors |
| terms of a query on both axes of a grid (SAM) | `Axes`: what each query gives to each line and each column |
| other tables, and content terms over few displacements | `Gathered`: an entry a pair |

Everything is linear in the lengths. What depends on the form and on shapes alone is found once (`Shape`): a model calls
with the same ones layer after layer, step after step.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from ...normal import BINS, Form, Piece, Problem, each_head
from ..tiled.places import coordinates
from .axes import KnownSide, Side, meeting, side_of
from .choice import mask_parts
from .given import Axes, Gathered, Given, Has, Known, Mask, Operand, Toeplitz
from .launch import look_at
from .lay import LOG2E, Layout, full_table, toeplitz

__all__ = ["LOG2E", "Prepared", "prepare", "spans", "turned"]


class Ways(NamedTuple):
    """Which pieces go where."""

    rows: tuple[Piece, ...]
    cols: tuple[Piece, ...]
    crossed: tuple[Piece, ...]
    slopes: tuple[Piece, ...]
    tabled: tuple[Piece, ...]
    axes: tuple[Piece, ...]  # of the first axis and of the second, or none
    odd: tuple[Piece, ...]  # gathered


class Prepared(NamedTuple):
    """What kernels are given, and which pieces went where: what gradients must know."""

    given: Known
    rows: tuple[Piece, ...]
    cols: tuple[Piece, ...]
    crossed: tuple[Piece, ...]
    slopes: tuple[Piece, ...]
    tabled: tuple[Piece, ...]
    axes: tuple[Piece, ...]
    odd: tuple[Piece, ...]
    turned: Toeplitz | tuple[()]  # the table for turned tiles, where both were asked for
    sides: tuple[Side, ...]  # both axes


class Shape(NamedTuple):
    """What of a problem is the same for all calls with its form and shapes."""

    number: int  # no two have the same
    ways: Ways
    plain: bool  # no tensor is in `given`
    more: bool  # there are others than those of tables and axes
    given: Known  # without tensors
    has: list[Has]  # once it is known
    laid: dict[tuple, Layout]  # of its table


Some = TypeVar("Some", bound=Given)
_numbers = itertools.count()
_FIELD = {name: at for at, name in enumerate(Given._fields)}
_TABLE, _AXES = _FIELD["table"], _FIELD["axes"]


def prepare(problem: Problem, both: bool = False, dtype: torch.dtype | None = None) -> Prepared:
    """What the kernels of a problem are given. `both`: turned tiles too, as the backward pass has them.

    dtype    of the table; q's if None
    """
    form, operands = problem.form, problem.operands
    shape = _shape(
        form, problem.sizes, problem.starts, problem.scale, problem.q.dtype, tuple([x.shape for x in operands])
    )
    ways = shape.ways
    if shape.plain:
        return Prepared(shape.given, *ways, (), ())
    table: Any = ()
    other: Any = ()
    axes: Any = ()
    sides: tuple[KnownSide, ...] = ()
    layout = gate = -1
    if ways.tabled:
        gate = ways.tabled[0].gate
        layout, laid = toeplitz(
            problem, ways.tabled, both, () if gate < 0 else _operand([_plain(problem, gate).squeeze(-1)]),
            dtype or problem.q.dtype, shape.laid,
        )  # fmt: skip
        table, other = laid[0], laid[1] if both else ()
    if ways.axes:
        sides = tuple(side_of(problem, piece) for piece in ways.axes)
        axes = Axes(*meeting(problem, sides[0], sides[1], LOG2E), *form.q_geometry[1], *form.k_geometry[1])
    values = list(shape.given)
    values[_TABLE], values[_AXES] = table, axes
    more: dict[str, Any] = _others(problem, ways) if shape.more else {}
    for name, x in more.items():
        values[_FIELD[name]] = x
    if not shape.has:
        shape.has.append(_has(Given(*values), problem.q.dtype))
    values[0] = shape.has[0]
    given = tuple.__new__(Known, values)
    if gate < 0 and not more:
        low = table.ptr.data_ptr() if table else 0
        if axes:
            low |= axes.down.data_ptr() | axes.across.data_ptr()
        if not low & 15:  # laid out as often before
            given.seen = shape.number, layout
            return Prepared(given, *ways, other, sides)
    seen: list = [shape.number]
    look_at((table, axes, *more.values()), seen.append)
    given.seen = tuple(seen)
    return Prepared(given, *ways, other, sides)


def _more(form: Form) -> bool:
    """There are tensors besides those of pieces and masks."""
    return max(form.q_start, form.k_start, form.scale, form.sink, form.seeds) >= 0


def _others(problem: Problem, ways: Ways) -> dict[str, Any]:
    """What is rare or small: vectors over rows and columns, gathered pieces, masks, dropout, the sink."""
    form, (batch, heads, _, _) = problem.form, problem.sizes
    crossed = [_plain(problem, piece.slots[0]).squeeze(-2) for piece in ways.crossed]
    scales = _plain(problem, form.scale) if form.scale >= 0 else None
    by_row = scales is not None and scales.shape[-1] == 1
    return {
        "q_starts": _starts(problem, form.q_start),
        "k_starts": _starts(problem, form.k_start),
        "row_scale": _operand([scales.squeeze(-1)]) if scales is not None and by_row else (),
        "col_scale": _operand([scales.squeeze(-2)]) if scales is not None and not by_row else (),
        "row": _operand([_gated(piece, problem).squeeze(-1) for piece in ways.rows], LOG2E),
        "col": _operand([_plain(problem, piece.slots[0]).squeeze(-2) for piece in ways.cols], LOG2E),
        "cross_row": _operand([_plain(problem, ways.crossed[0].gate).squeeze(-1)], LOG2E) if crossed else (),
        "cross_col": _operand(crossed),
        "slope": _operand([_gated(piece, problem).squeeze(-1) for piece in ways.slopes], LOG2E),
        "gathered": tuple([_gathered(problem, piece) for piece in ways.odd]),
        "mask": _mask(problem),
        "seeds": problem.operands[form.seeds].expand(batch, heads).contiguous() if form.dropout else None,
        "sink": _operand([problem.operands[form.sink].unsqueeze(-1)], LOG2E) if form.sink >= 0 else (),
    }


@functools.lru_cache(maxsize=256)
def _shape(
    form: Form, sizes: tuple[int, int, int, int], starts: tuple[int, int], scale: float, dtype: torch.dtype,
    shapes: tuple[torch.Size, ...],
) -> Shape:  # fmt: skip
    _, heads, q_len, k_len = sizes
    fields: dict[str, Any] = dict.fromkeys(Given._fields, ())
    fields |= dict.fromkeys(("q_starts", "k_starts", "softcap", "seeds", "dropped", "boost"))
    fields |= {"heads": heads, "q_len": q_len, "k_len": k_len, "q_start": starts[0], "k_start": starts[1]}
    fields["scale"] = scale * LOG2E
    if form.softcap is not None:
        fields["softcap"] = form.softcap * LOG2E
    if form.dropout:
        fields |= {"dropped": int(form.dropout * 2**32), "boost": 1 / (1 - form.dropout)}
    ways = _sort(form, sizes, starts, shapes)
    still = all(part[0] in ("within", "range") for part in mask_parts(form.mask))
    if still:
        fields["mask"] = _mask(Problem(form, None, None, [], starts, scale))  # type: ignore[arg-type]
    more = not still or len(ways.tabled) + len(ways.axes) < len(form.pieces) or _more(form)
    given = Known(**fields)
    given = given._replace(has=_has(given, dtype))
    number = next(_numbers)
    given.seen = (number,)
    return Shape(number, ways, not form.pieces and not more, more, given, [], {})


def _has(given: Given, dtype: torch.dtype) -> Has:
    table, slope = given.table, given.slope
    ramp = bool(slope) and not slope.step and not table and dtype != torch.float32  # a slope in two parts rounds twice
    return _constants(
        bool(given.row_scale), bool(given.col_scale), bool(given.row), bool(given.col), bool(given.cross_row),
        bool(slope), ramp, bool(table), bool(table) and table.reach is not None, len(given.gathered),
        bool(given.axes), bool(given.mask), bool(given.sink),
    )  # fmt: skip


@functools.cache
def _constants(*there: int) -> Has:
    return Has(*(tl.constexpr(x) for x in there))


def _sort(form: Form, sizes: tuple, starts: tuple[int, int], shapes: tuple[torch.Size, ...]) -> Ways:
    """Each piece by the way it takes."""
    ways: dict[str, list[Piece]] = {name: [] for name in Ways._fields}
    axes: dict[int, Piece] = {}
    for piece in form.pieces:
        if piece.kind == "vector":
            by_row = shapes[piece.slots[0]][-1] == 1
            ways["rows" if by_row else "cols" if piece.gate < 0 else "crossed"].append(piece)
        elif piece.kind == "slope":
            ways["slopes"].append(piece)
        elif piece.kind == "query" and piece.gate < 0 and len(piece.space) > 1 and len(piece.space[1]) == 1:
            straight = _straight(form, sizes, starts, piece) and piece.space[1][0] not in axes
            ways["axes" if straight else "odd"].append(piece)
            if straight:
                axes[piece.space[1][0]] = piece
        elif piece.kind == "table" and (piece.space[0] == "line" or _straight(form, sizes, starts, piece)):
            ways["tabled"].append(piece)
        else:
            ways["odd"].append(piece)
    if len(axes) == 2 and len({(shapes[p.slots[1]][-1], shapes[p.slots[1]][1] > 1) for p in axes.values()}) == 1:
        ways["axes"] = [axes[0], axes[1]]
    else:
        ways["odd"] += ways["axes"]
        ways["axes"] = []
    first = ways["tabled"][:1]
    plain = [piece for piece in ways["tabled"] if piece.gate < 0]
    kept = plain or first
    ways["odd"] += [piece for piece in ways["tabled"] if piece not in kept]
    ways["tabled"] = kept
    return Ways(**{name: tuple(pieces) for name, pieces in ways.items()})


def _straight(form: Form, sizes: tuple, starts: tuple[int, int], piece: Piece) -> bool:
    """A term on a grid of two axes on which every token has a place, in order from the first."""
    if piece.space[0] != "grid" or form.q_geometry[2] or form.k_geometry[2] or len(form.q_geometry[1]) != 2:
        return False
    counts = math.prod(form.q_geometry[1]), math.prod(form.k_geometry[1])
    if form.q_start >= 0 or form.k_start >= 0 or starts != (0, 0) or counts != tuple(sizes[2:]):
        return False
    return len(piece.space[1]) < 2 or piece.space[1] == (0, 1)


def _plain(problem: Problem, slot: int) -> Tensor:
    """An operand in float32, with one set for all heads or one for each."""
    return each_head(problem.operands[slot], problem.q.shape[1]).float()


def _gated(piece: Piece, problem: Problem) -> Tensor:
    x = _plain(problem, piece.slots[0])
    return x if piece.gate < 0 else x * _plain(problem, piece.gate)


def _operand(parts: list[Tensor], factor: float = 1.0) -> Operand | tuple[()]:
    """The sum of some [batch or 1, heads or 1, length or 1]."""
    if not parts:
        return ()
    x = parts[0].float() if factor == 1.0 else parts[0].float() * factor
    for part in parts[1:]:
        x = x + part.float() * factor
    x = x.contiguous()
    return Operand(x, *(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)))


def _starts(problem: Problem, slot: int) -> Tensor | None:
    return None if slot < 0 else problem.operands[slot].expand(problem.sizes[0], 1).contiguous()


def _gathered(problem: Problem, piece: Piece) -> Gathered:
    """A table, or what every query (or key) gives to each displacement."""
    form, (_, _, q_len, k_len) = problem.form, problem.sizes
    device, bins, alone = problem.q.device, None, None
    if piece.space[0] == "line":
        near = torch.arange(k_len - 1, q_len + k_len - 1, device=device, dtype=torch.int32)
        far = torch.arange(k_len, device=device, dtype=torch.int32)
    else:
        near, far, size = _grid_entries(problem, piece.space[1])
        alone = size if form.q_geometry[2] or form.k_geometry[2] else None
    row = col = 0
    if piece.kind == "table":
        x = full_table(problem, piece)
    else:
        u, table = (_plain(problem, slot) for slot in piece.slots)
        if piece.lookup >= 0:
            index = problem.operands[piece.lookup][:, 0]
            if BINS in piece.config and piece.space[0] == "grid":
                table = torch.nn.functional.pad(table, (0, 0, 0, 1))
            if piece.space[0] == "line":
                bins = index.to(torch.int32).contiguous()
            else:
                table = table[:, :, index[0]]
        x = u @ table.mT  # [batch, heads, length, displacements]
        row, col = (x.shape[-1], 0) if piece.kind == "query" else (0, x.shape[-1])
    x = (x * LOG2E).contiguous()
    batch, head = (0 if x.shape[n] == 1 else x.stride(n) for n in (0, 1))
    return Gathered(
        x, batch, head, row, col, near, far,
        bins, 0 if bins is None or len(bins) == 1 else bins.shape[1], alone,
        () if piece.gate < 0 else _operand([_plain(problem, piece.gate).squeeze(-1)]), tl.constexpr(piece.gate >= 0),
    )  # fmt: skip


def _grid_entries(problem: Problem, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """The table entry of a pair as a difference, a_i - o_j, -1 for tokens without a place; and how many there are."""
    form, (_, _, q_len, k_len) = problem.form, problem.sizes
    ends = []
    for side, count in (("q", q_len), ("k", k_len)):
        place, placed = coordinates(problem, side, slice(0, count))
        total, size = torch.zeros((), dtype=torch.long, device=problem.q.device), 1
        for axis in reversed(axes):
            span = form.k_geometry[1][axis]
            total = total + (place[0, :, axis] + (span - 1 if side == "q" else 0)) * size
            size *= form.q_geometry[1][axis] + span - 1
        ends.append((total if placed is None else total.masked_fill(~placed[0], -1)).to(torch.int32).contiguous())
    return ends[0], ends[1], size


def turned(made: Prepared) -> Given:
    """The same for turned tiles: what is laid along queries lies along keys."""
    given = made.given
    if given.table:
        given = given._replace(table=made.turned)
    if given.axes:
        a = given.axes
        given = given._replace(axes=a._replace(across=a.across.permute(0, 1, 3, 4, 2).contiguous()))
    if given is not made.given:  # laid alike, besides what a table says of its side
        given.seen = "turned", *made.given.seen
    return given


def _mask(problem: Problem) -> Mask | tuple[()]:
    if problem.form.mask is None:
        return ()
    found: dict[str, Any] = dict.fromkeys(Mask._fields)

    def tighten(low: str, high: str, lo: int | None, hi: int | None) -> None:
        found[low] = lo if found[low] is None else found[low] if lo is None else max(found[low], lo)
        found[high] = hi if found[high] is None else found[high] if hi is None else min(found[high], hi)

    for part in mask_parts(problem.form.mask):
        if part[0] == "within":
            tighten("lo", "hi", *part[1:])
        elif part[0] == "range":
            side = "" if part[1] == "k" else "q_"
            tighten(f"{side}first", f"{side}last", *part[2:])
        elif part[0] == "before":
            count = problem.operands[part[2]].expand(problem.sizes[0], 1).contiguous()
            found["before" if part[1] == "k" else "q_before"] = count
        elif part[0] == "same":
            for side, slot in zip("qk", part[1:], strict=True):
                ids = problem.operands[slot][:, 0].contiguous()
                found[f"{side}_ids"], found[f"{side}_ids_batch"] = ids, 0 if len(ids) == 1 else ids.shape[1]
        else:
            assert part[0] == "dense"
            x = problem.operands[part[1]]
            found["dense"] = x.view(torch.uint8)
            for name, n, stride in zip(("batch", "head", "row", "col"), x.shape, x.stride(), strict=True):
                found[f"dense_{name}"] = 0 if n == 1 else stride
    return Mask(**found)


def spans(given: Some, block_q: int, block_k: int, batch: int, device: torch.device) -> Some:
    """The same, with the tiles that ids let each block of queries and of keys meet."""
    mask = given.mask
    if not mask or mask.q_ids is None:
        return given
    (q_low, q_high), (k_low, k_high) = _ends(mask.q_ids, block_q), _ends(mask.k_ids, block_k)
    sides = []
    for low, high, others, block, length in (
        (q_low, q_high, (k_low, k_high), block_k, given.k_len),
        (k_low, k_high, (q_low, q_high), block_q, given.q_len),
    ):
        made = []
        at = torch.arange(others[0].shape[1], device=device)
        step = max(1, (1 << 22) // max(len(at) * batch, 1))
        for first in range(0, low.shape[1], step):
            some = slice(first, first + step)
            meets = (low[:, some, None] <= others[1][:, None]) & (others[0][:, None] <= high[:, some, None])
            begin = torch.where(meets, at, len(at)).amin(-1) * block
            end = torch.where(meets, at + 1, 0).amax(-1) * block
            made.append(torch.stack([begin, end.clamp(max=length)], -1))
        sides.append(torch.cat(made, 1).expand(batch, -1, -1).to(torch.int32).contiguous())
    return given._replace(mask=mask._replace(q_spans=sides[0], k_spans=sides[1]))


def _ends(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id of each block, of those that see anything: [batch, blocks]."""
    most = torch.iinfo(ids.dtype).max
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % block), value=-1).unflatten(1, (-1, block))
    return ids.masked_fill(ids < 0, most).amin(-1), ids.amax(-1)
