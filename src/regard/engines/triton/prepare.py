"""From a problem to what kernels are given: pieces folded into few tensors, tables laid out, masks joined.

| pieces | become |
|---|---|
| biases a query or a key | one vector over rows, one over columns |
| slopes on a line | one factor a row: arithmetic in the kernel |
| tables on a line, or on a grid without unplaced tokens | one `Toeplitz`: rows of tiles load whole vectors |
| terms of a query on both axes of a grid (SAM) | `Axes`: what each query gives to each line and each column |
| other tables, and content terms over few displacements | `Gathered`: an entry a pair |

Everything is linear in the lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...normal import Piece, Problem, each_head
from ..tiled.places import coordinates
from .axes import Meeting
from .choice import Tiling, interpreted, mask_parts
from .given import Axes, Gathered, Given, Has, Mask, Operand, Toeplitz
from .launch import dense_rows, run

LOG2E = 1.4426950408889634
#: room after a table for tiles that reach past the end
ROOM = 272


class Prepared(NamedTuple):
    """What kernels are given, and which pieces went where: what gradients must know."""

    given: Given
    rows: tuple[Piece, ...]
    cols: tuple[Piece, ...]
    crossed: tuple[Piece, ...]
    slopes: tuple[Piece, ...]
    tabled: tuple[Piece, ...]
    axes: tuple[Piece, ...]
    odd: tuple[Piece, ...]  # gathered


def prepare(problem: Problem) -> Prepared:
    """What the kernels of a problem are given."""
    form, (batch, heads, q_len, k_len) = problem.form, problem.sizes
    sorted_ = _sort(problem)
    row = [_gated(piece, problem).squeeze(-1) for piece in sorted_["rows"]]
    col = [_plain(problem, piece.slots[0]).squeeze(-2) for piece in sorted_["cols"]]
    crossed = [_plain(problem, piece.slots[0]).squeeze(-2) for piece in sorted_["crossed"]]
    slope = [_gated(piece, problem).squeeze(-1) for piece in sorted_["slopes"]]
    scales = _plain(problem, form.scale) if form.scale >= 0 else None
    by_row = scales is not None and scales.shape[-1] == 1
    given = Given(
        has=(),
        heads=heads,
        q_len=q_len,
        k_len=k_len,
        q_start=problem.starts[0],
        k_start=problem.starts[1],
        q_starts=_starts(problem, form.q_start),
        k_starts=_starts(problem, form.k_start),
        scale=problem.scale * LOG2E,
        row_scale=_operand([scales.squeeze(-1)]) if scales is not None and by_row else (),
        col_scale=_operand([scales.squeeze(-2)]) if scales is not None and not by_row else (),
        row=_operand(row, LOG2E),
        col=_operand(col, LOG2E),
        cross_row=_operand([_plain(problem, sorted_["crossed"][0].gate).squeeze(-1)], LOG2E) if crossed else (),
        cross_col=_operand(crossed),
        slope=_operand(slope, LOG2E),
        table=toeplitz(problem, sorted_["tabled"]) if sorted_["tabled"] else (),
        gathered=tuple(_gathered(problem, piece) for piece in sorted_["odd"]),
        axes=_axes(problem, sorted_["axes"]) if sorted_["axes"] else (),
        softcap=None if form.softcap is None else form.softcap * LOG2E,
        mask=_mask(problem),
        seeds=problem.operands[form.seeds].expand(batch, heads).contiguous() if form.dropout else None,
        dropped=int(form.dropout * 2**32) if form.dropout else None,
        boost=1 / (1 - form.dropout) if form.dropout else None,
        sink=_operand([problem.operands[form.sink].unsqueeze(-1)], LOG2E) if form.sink >= 0 else (),
    )
    given = given._replace(has=_has(given, problem.q.dtype))
    return Prepared(given, **{name: tuple(pieces) for name, pieces in sorted_.items()})


def _has(given: Given, dtype: torch.dtype) -> Has:
    there = {name: bool(getattr(given, name, ())) for name in Has._fields}
    there |= {"cross": bool(given.cross_row), "clipped": bool(given.table) and given.table.reach is not None}
    ramp = bool(given.slope) and not given.slope.step and not given.table
    there["ramp"] = ramp and dtype != torch.float32  # a slope in two parts rounds twice
    return _constants(*(len(given.gathered) if name == "gathered" else there[name] for name in Has._fields))


@functools.cache
def _constants(*there: int) -> Has:
    return Has(*(tl.constexpr(x) for x in there))


def _sort(problem: Problem) -> dict[str, list[Piece]]:
    """Each piece by the way it takes."""
    ways: dict[str, list[Piece]] = {name: [] for name in ("rows", "cols", "crossed", "slopes", "tabled", "axes", "odd")}
    axes: dict[int, Piece] = {}
    for piece in problem.form.pieces:
        x = problem.operands[piece.slots[0]]
        if piece.kind == "vector":
            ways["rows" if x.shape[-1] == 1 else "cols" if piece.gate < 0 else "crossed"].append(piece)
        elif piece.kind == "slope":
            ways["slopes"].append(piece)
        elif piece.kind == "query" and piece.gate < 0 and _straight(problem, piece) and len(piece.space[1]) == 1:
            ways["odd" if piece.space[1][0] in axes else "axes"].append(piece)
            axes.setdefault(piece.space[1][0], piece)
        elif piece.kind == "table" and (piece.space[0] == "line" or _straight(problem, piece)):
            ways["tabled"].append(piece)
        else:
            ways["odd"].append(piece)
    if len(axes) != 2:
        ways["odd"] += ways["axes"]
        ways["axes"] = []
    first = ways["tabled"][:1]
    plain = [piece for piece in ways["tabled"] if piece.gate < 0]
    kept = plain or first
    ways["odd"] += [piece for piece in ways["tabled"] if piece not in kept]
    ways["tabled"] = kept
    return ways


def _straight(problem: Problem, piece: Piece) -> bool:
    """A term on a grid of two axes on which every token has a place, in order from the first."""
    form = problem.form
    if piece.space[0] != "grid" or form.q_geometry[2] or form.k_geometry[2] or len(form.q_geometry[1]) != 2:
        return False
    counts = math.prod(form.q_geometry[1]), math.prod(form.k_geometry[1])
    if form.q_start >= 0 or form.k_start >= 0 or problem.starts != (0, 0) or counts != problem.sizes[2:]:
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


def toeplitz(problem: Problem, pieces: Sequence[Piece], by_key: bool = False) -> Toeplitz:
    """The sum of tables, in shifted copies, in the dtype of q: its rounding is that of a logit's parts.

    The copies are kept on the table they were made of, for as long as it lives and is not changed in place: where the
    lowered table is kept between calls, it is laid out once. They are for one stream, which made them.
    """
    source = problem.operands[pieces[0].slots[0]]
    keeps = len(pieces) == 1 and pieces[0].gate < 0 and source.is_cuda and not source.is_inference()
    if not keeps or torch.cuda.is_current_stream_capturing():
        return _lay_out(problem, pieces, by_key)
    stream = torch.cuda.current_stream(source.device).cuda_stream
    form = problem.form
    shape = problem.sizes[1:], form.q_geometry, form.k_geometry, pieces[0]
    key = source._version, stream, by_key, problem.q.dtype, *shape
    kept = source.__dict__.setdefault("_regard_laid", {})
    if key not in kept:
        if len(kept) > 4:
            kept.clear()
        kept[key] = _lay_out(problem, pieces, by_key)
    return kept[key]


def _lay_out(problem: Problem, pieces: Sequence[Piece], by_key: bool) -> Toeplitz:
    tables = [_plain(problem, piece.slots[0]) for piece in pieces]
    total = sum(tables[1:], tables[0]).contiguous()
    near, width, pitch, dtype, line, reach = None, None, 0, problem.q.dtype, total.shape[-1], None
    copies = 16 // dtype.itemsize
    size = total.shape[-1]
    if pieces[0].space[0] == "line":
        reaches = [piece.reach for piece in pieces]
        reach = max(r for r in reaches if r is not None) if None not in reaches else None
        pitch_of_line = size
    else:
        (q_high, q_wide), (k_high, k_wide) = problem.form.q_geometry[1], problem.form.k_geometry[1]
        line = q_wide + k_wide - 1
        pitch = pitch_of_line = -(-line // copies) * copies
        size = (q_high + k_high - 1) * line
        near = _near(*((k_high, k_wide) if by_key else (q_high, q_wide)), pitch, str(total.device))
        width = tl.constexpr(q_wide if by_key else k_wide)
    lines = size // line
    stride = -(-(lines * pitch_of_line + ROOM + pitch) // 16) * 16
    laid = torch.empty(*total.shape[:2], copies, stride, dtype=dtype, device=total.device)
    block = 16 if interpreted() else 1024
    blocks = -(-stride // block)
    run(
        lay_kernel, blocks * laid.shape[0] * laid.shape[1] * copies, Tiling(block, 1, 4, 1),
        total, laid, blocks, copies, total.shape[-1], stride, size, line, pitch_of_line, LOG2E,
        REVERSED=not by_key, BLOCK=block,
    )  # fmt: skip
    batch, head = (0 if laid.shape[n] == 1 else laid.stride(n) for n in (0, 1))
    gate = pieces[0].gate
    return Toeplitz(
        laid, batch, head, stride, tl.constexpr(copies), tl.constexpr(by_key), near, width, pitch,
        () if gate < 0 else _operand([_plain(problem, gate).squeeze(-1)]), tl.constexpr(gate >= 0), reach,
    )  # fmt: skip


@functools.lru_cache(maxsize=32)
def _near(high: int, wide: int, pitch: int, device: str) -> Tensor:
    """a_i of a grid: the same for every call."""
    with torch.inference_mode(False):
        at = torch.arange(high * wide, device=device, dtype=torch.int32)
        return (high - 1 - at // wide) * pitch + wide - 1 - at % wide


@triton.jit
def lay_kernel(
    table_ptr, laid_ptr, blocks, copies, entries, stride, size, line, pitch, factor,
    REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy s of a table, from entry s on: lines of `line` entries, `pitch` apart, the last one first if REVERSED."""
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    copy, head = rest % copies, rest // copies
    at = block * BLOCK + tl.arange(0, BLOCK)
    entry = at + copy
    y, x = entry // pitch, entry % pitch
    entry = y * line + x
    inside = (x < line) & (entry < size)
    if REVERSED:
        entry = size - 1 - entry
    value = tl.load(table_ptr + head.to(tl.int64) * entries + entry, mask=inside, other=0.0) * factor
    tl.store(laid_ptr + rest.to(tl.int64) * stride + at, value.to(laid_ptr.dtype.element_ty), mask=at < stride)


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
        x = _plain(problem, piece.slots[0])
    else:
        u, table = (_plain(problem, slot) for slot in piece.slots)
        if piece.lookup >= 0:
            index = problem.operands[piece.lookup][:, 0]
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


def axis_rows(problem: Problem, piece: Piece, factor: float) -> Tensor:
    """R of one axis, times a factor, for each place of a query and of a key: [.., q places, k places, f]."""
    table = each_head(problem.operands[piece.slots[1]], problem.q.shape[1]).float()
    index = axis_entries(problem, piece)
    if piece.lookup >= 0:
        index = problem.operands[piece.lookup][0, 0][index]
    return (table if factor == 1.0 else table * factor).to(problem.q.dtype)[:, :, index]


def axis_entries(problem: Problem, piece: Piece) -> Tensor:
    """The displacement's entry for each place of a query and of a key on one axis."""
    (axis,) = piece.space[1]
    return _entries(problem.form.q_geometry[1][axis], problem.form.k_geometry[1][axis], str(problem.q.device))


@functools.lru_cache(maxsize=32)
def _entries(mine: int, theirs: int, device: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(mine, device=device)[:, None] - torch.arange(theirs, device=device) + theirs - 1


def meeting(problem: Problem, piece: Piece, factor: float = 1.0) -> Meeting:
    """A term of the query on one axis, as matrix products."""
    u = dense_rows(each_head(problem.operands[piece.slots[0]], problem.q.shape[1]).to(problem.q.dtype))
    rows = axis_rows(problem, piece, factor)
    return Meeting(u, rows, piece.space[1][0], problem.form.q_geometry[1])


def _axes(problem: Problem, pieces: list[Piece]) -> Axes:
    """What each query gives to each line and column of keys."""
    form = problem.form
    made = {piece.space[1][0]: meeting(problem, piece, LOG2E).values(*problem.sizes[:2]) for piece in pieces}
    return Axes(made[0], made[1], *form.q_geometry[1], *form.k_geometry[1])


def turned(problem: Problem, made: Prepared) -> Given:
    """The same for turned tiles: what is laid along queries lies along keys."""
    given = made.given
    if given.table:
        given = given._replace(table=toeplitz(problem, made.tabled, by_key=True))
    if given.axes:
        a = given.axes
        given = given._replace(axes=a._replace(across=a.across.permute(0, 1, 3, 4, 2).contiguous()))
    return given


def _mask(problem: Problem) -> Mask | tuple[()]:
    if problem.form.mask is None:
        return ()
    batch = problem.sizes[0]
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
            count = problem.operands[part[2]].expand(batch, 1).contiguous()
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


def spans(given: Given, block_q: int, block_k: int, batch: int, device: torch.device) -> Given:
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
