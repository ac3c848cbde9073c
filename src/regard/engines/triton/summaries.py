"""Summaries of A by kernels: which passes they need, and how the passes' sums become the states of `summaries`.

Rows come first, for the log-sum-exp; entropy comes with it, and so do the groups of keys among which the strongest
are, or cells of a heat map that are whole tiles wide. Then columns, for mass received and other heat maps, and
diagonals, for the profile of a line. What has no kernel is shown strips by the tiled engine, and only that. A state is
the one its summary defines: `finish` never knows who filled it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Problem
from ...summaries import Entropy, Heatmap, LogSumExp, Profile, Received, TopK
from ...tables import constant, spread
from .. import tiled
from .cells import count_cells, pool
from .choice import Tiling, interpreted, power
from .collect import on_line
from .columns import by_columns
from .given import Given, Known
from .launch import dense_rows, is_bare, precision, run
from .looks import by_diagonals
from .prepare import LOG2E, prepare, spans
from .rows import by_rows
from .strongest import by_groups

Pairs = list[tuple[Any, list[Tensor]]]  # summaries and their states

#: keys a row that there is a kernel for
MOST = 64
#: groups of keys a row whose largest logits are kept, at the most; keys of the smallest; and bytes for them at a time
GROUPS, SMALLEST, ROOM = 1024, 8, 136 << 20
#: keys of such groups that are looked at together
CHUNK = 128
#: keys of a tile at the most where more is to do than dot products
NARROW = 64
#: of a program that looks at groups: many share a multiprocessor
REGISTERS = 80
#: of a program that reads tables or checks pairs, by columns
CUT_REGISTERS = 168
#: tiles that are added up before their cells are summed, where cells are that high
ROUNDS = 4
#: programs by rows that a multiprocessor has at once
RESIDENT = 4
#: cells that a program puts together from rows, or counts the visible pairs of
COLUMNS, COUNTED = 32, 1024


def reduce(
    problem: Problem,
    summaries: Sequence[Any],
    progress: Callable[[int, int], None] | None = None,
    lse: Tensor | None = None,
) -> list[Any]:
    """The state of each summary after all of A, of a problem that kernels take (`choice.unsuited` has no reason).

    A log-sum-exp that is known already saves the first pass.
    """
    fused = [fits(summary, problem, lse is not None) for summary in summaries]
    rest = [summary for summary, own in zip(summaries, fused, strict=True) if not own]
    states = iter(tiled.reduce(spread(problem), rest, progress, lse) if rest else [])
    found: list[Any] = [None if own else next(states) for own in fused]

    waiting: dict[type, list[int]] = {}
    for at, each in enumerate(summaries):
        if fused[at]:
            waiting.setdefault(type(each), []).append(at)

    def begun(kind: type) -> Pairs:
        """Summaries of one kind with states to fill, made when their pass comes: what it needs besides is gone then."""
        if kind not in waiting:
            return []
        mine = [n for n in waiting[kind] if found[n] is None]
        for n in mine:
            found[n] = look.start(summaries[n])
        return [(summaries[n], found[n]) for n in mine]

    if any(fused):
        look = Look(problem, lse)
        n = look.pooled([each if own else None for each, own in zip(summaries, fused, strict=True)])
        if n is not None:
            found[n] = look.start(summaries[n])
        look.rows(begun(Entropy), begun(TopK), None if n is None else (summaries[n], found[n]))
        received, maps = begun(Received), begun(Heatmap)
        for n in range(max(bool(received), len(maps))):  # the first pass gives both
            look.columns(received if n == 0 else [], maps[n] if n < len(maps) else None)
        look.diagonals(begun(Profile))
        for _, state in begun(LogSumExp):
            state[0] = _plain(look.lse)
        if progress is not None:
            total = problem.sizes[0] * problem.sizes[1] * problem.sizes[2]
            progress(total, total)
    return found


def fits(summary: Any, problem: Problem, known: bool = False) -> bool:
    """There is a kernel for it. A subclass may redefine anything, so it is shown strips.

    The kernel by rows finds their log-sum-exp itself, so it is not for a part of the keys, whose rows' is `known`.
    """
    kind = type(summary)
    if kind in (TopK, Entropy) and known and problem.is_part:
        return False
    if kind is TopK:
        return summary.k <= MOST
    if kind is Profile:
        return problem.form.q_geometry[0] == "line"
    if kind is Heatmap:
        return summary.of == "weights"
    return kind in (Received, Entropy, LogSumExp)


def log_sum_exp(problem: Problem) -> Tensor:
    """Each row's log-sum-exp, without a product: [batch, heads, q_len], -inf where nothing is seen."""
    look = Look(problem)
    look.rows([], [])
    return _plain(look.lse)


def _plain(lse: Tensor) -> Tensor:
    """From the kernels' log-sum-exp to everybody's."""
    lse = lse / LOG2E
    return lse.masked_fill_(lse == torch.inf, -torch.inf)


class Look:
    """One problem's passes. `lse` is in units of log 2, +inf where a row sees nothing.

    `ends` are what weights are relative to, and a factor: in float32 a row's maximum and one over its sum, for the
    rounding of a log-sum-exp is common to a row. Else it is the log-sum-exp, and the factor is not read.
    """

    def __init__(self, problem: Problem, lse: Tensor | None = None):
        self.problem = problem
        self.q, self.k = dense_rows(problem.q), dense_rows(problem.k)
        self.batch, self.heads, self.q_len, self.k_len = problem.sizes
        self.given: Known = prepare(problem, dtype=torch.float32).given
        self.known = lse is not None
        self.half = self.k.dtype != torch.float32
        if lse is None:
            self.lse = torch.empty(self.batch, self.heads, self.q_len, dtype=torch.float32, device=self.q.device)
        else:
            # rounded once: a factor in float32 would be off by as much as an entry of A, and the same way in all rows
            self.lse = (lse.double() * LOG2E).float().masked_fill_(lse == -torch.inf, torch.inf).contiguous()
        fixed = not self.known and not self.half
        self.ends = (torch.empty_like(self.lse), torch.empty_like(self.lse)) if fixed else (self.lse, self.lse)
        dim = self.q.shape[-1]
        self.width = {"Q_STEP": self.q.stride(2), "K_STEP": self.k.stride(2), "DIM": dim, "BLOCK_D": power(dim)}
        self.flags = {**self.width, "PRECISION": precision(self.k.dtype), "BARE": self.bare(), "FIX": fixed}
        self.strides = (*self.q.stride()[:2], *self.k.stride()[:2], self.heads // self.k.shape[1])
        mask = self.given.mask
        self.counted = bool(mask) and (mask.q_ids is not None or mask.dense is not None)  # no bounds tell what is seen
        table = self.given.table
        self.quick = not self.counted and (not table or table.reach is not None)  # a pass by columns writes, others add

    def start(self, summary: Any) -> list[Any]:
        """A state for kernels to fill. What they write all of needs no first numbers: but masks cut maps."""
        problem, device, kind = self.problem, self.q.device, type(summary)
        if kind is TopK:
            kinds = torch.float32, torch.float32, torch.long
            shape = self.batch, self.heads, self.q_len, summary.k
            return [torch.empty(shape, dtype=kind, device=device) for kind in kinds]
        if kind is Entropy or kind is LogSumExp:
            return [torch.empty_like(self.lse)]
        if kind is Profile:
            return [self.lse.new_empty(self.batch, self.heads, self.q_len + self.k_len - 1)]
        if kind is Received and self.quick:
            return [self.lse.new_empty(self.batch, self.heads, self.k_len)]
        if kind is not Heatmap or self.counted:
            return summary.start(problem)
        high, wide = summary.cell(problem)
        q_cells, k_cells = -(-self.q_len // high), -(-self.k_len // wide)
        shape = self.batch, self.heads, q_cells, k_cells
        if not self.given.mask:
            total, peak = self.lse.new_empty(shape), self.lse.new_empty(shape)
            count = _extents(self.q_len, high, True, device) * _extents(self.k_len, wide, False, device)
            return [total, count.expand(shape), peak]
        total, peak = self.lse.new_zeros(2, *shape).unbind()
        count = torch.empty(self.batch, 1, q_cells, k_cells, dtype=torch.float64, device=device)
        block = 32 if interpreted() else COUNTED
        run(
            count_cells, -(-q_cells * k_cells // block) * self.batch, Tiling(block, 1, 4, 1),
            count, self.given, high, wide, q_cells, k_cells, BLOCK=block,
        )  # fmt: skip
        return [total, count.expand(shape), peak]

    def bare(self) -> bool:
        """Nothing is added but a table, and the largest dot product has the largest logit."""
        given = self.given
        return is_bare(given) and not (given.table and given.table.gate) and self.problem.scale >= 0

    def tiling(self, what: str) -> Tiling:
        """How large a tile is: small, so that several programs share a multiprocessor. Measured on one H200."""
        if interpreted():
            return Tiling(32, 32, 4, 1)
        wide = power(self.q.shape[-1])
        if self.k.dtype == torch.float32:
            return Tiling(64, 32, 4, 2) if wide <= 128 else Tiling(32, 32, 4, 2)
        if wide < 128:
            if what not in ("rows", "ends") and not self.flags["BARE"]:
                return Tiling(64, 64, 4, 3, 168)
            return Tiling(64, 64, 4, 3, 96) if what == "ends" else Tiling(64, 128, 4, 2 if what == "rows" else 3, 128)
        return Tiling(64, 64, 4, 3 if wide == 128 and what not in ("rows", "ends") else 2)

    def diagonal_tiling(self) -> Tiling:
        """Tiles whose sums stay in registers, as high as they are wide or a multiple of it."""
        if interpreted():
            return Tiling(32, 16, 4, 1)
        wide = power(self.q.shape[-1])
        if self.k.dtype == torch.float32:
            return Tiling(32, 32, 4, 1) if wide <= 128 else Tiling(16, 16, 4, 1)
        if wide < 128:
            return Tiling(64, 64, 4, 3, 128)
        return Tiling(128, 128, 8, 2) if wide == 128 else Tiling(64, 64, 4, 2)

    def pooled(self, summaries: Sequence[Any]) -> int | None:
        """Which map comes with the rows: the first whose cells are whole tiles wide, if nothing else needs columns.

        Sums are kept as logarithms, which round too much for float32; and groups are of one kind only.
        """
        kinds = [type(each) for each in summaries]
        if self.known or not self.half or TopK in kinds or Received in kinds:
            return None
        size = self.tiling("rows").block_k
        for n, each in enumerate(summaries):
            if type(each) is Heatmap and each.cell(self.problem)[1] % size == 0:
                return n
        return None

    def rows(self, entropies: Pairs, tops: Pairs, pooled: tuple[Heatmap, list[Tensor]] | None = None) -> None:
        """Log-sum-exps, and what else is read row by row. Several TopK share the longest."""
        if self.known and not entropies and not tops:
            return
        tiling = self.tiling("rows" if entropies or tops or pooled else "ends")
        narrow = min(tiling.block_k, 16 if interpreted() else NARROW)
        given = spans(self.given, tiling.block_q, narrow, self.batch, self.q.device)
        entropy = entropies[0][1][0] if entropies else self.lse
        programs = together = -(-self.q_len // tiling.block_q) * self.batch * self.heads
        longest = max((summary.k for summary, _ in tops), default=0)
        most = next((state for summary, state in tops if summary.k == longest), [])
        size = pooled[0].cell(self.problem)[1] if pooled else group_size(self.k_len, tiling.block_k)
        groups = -(-self.k_len // max(size, tiling.block_k)) * max(tiling.block_k // size, 1)  # of whole tiles
        group = 0 if not tops and not pooled else SMALLEST if size == SMALLEST else -1
        pitch = -(-groups // 16) * 16 + 16  # rows begin at whole vectors
        pitch *= 2 if pooled else 1
        best = self.lse
        if tops or pooled:
            times = -(-programs * tiling.block_q * pitch * 4 // ROOM)
            if pooled:  # but enough to fill the machine, for there are few of a long head
                times = min(times, max(1, programs // (RESIDENT * _multiprocessors(self.q.device))))
            together = -(-programs // times)
            best = self.lse.new_empty(together * tiling.block_q, pitch)
        width, rows = power(max(longest, 1), 1), tiling.block_q if interpreted() else 1
        once = width * size <= CHUNK
        if pooled:
            for x in (pooled[1][0], pooled[1][2]):  # portions of rows are added
                x.zero_()
        for begin in range(0, programs, together):
            count = min(together, programs - begin)
            run(
                by_rows, count, tiling,
                self.q, self.k, self.lse, *self.ends, entropy, best, given, *self.strides, begin, pitch, size,
                **self.flags, BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, NARROW=narrow, ENTROPY=bool(entropies),
                GROUP=group, STEADY=self.half, POOL=pooled is not None,
            )  # fmt: skip
            if pooled:
                self._pool(given, pooled, best, begin, count, pitch, tiling.block_q, narrow)
            if tops:
                run(
                    by_groups, count * tiling.block_q // rows, Tiling(rows, 1, 1, 1, REGISTERS),
                    self.q, self.k, best, *most, given, *self.strides, begin, pitch, size, **self.width,
                    BLOCK_Q=tiling.block_q, NARROW=narrow, PRECISION=self.flags["PRECISION"], ROWS=rows,
                    LINES=max(rows, 16), GROUPS=power(groups), TOP=longest, WIDTH=width,
                    CHUNK=width * size if once else min(size, CHUNK), ONCE=once,
                    SMALL=SMALLEST if size == SMALLEST else 0,
                )  # fmt: skip
        for _, state in entropies[1:]:
            state[0].copy_(entropy)
        for summary, state in tops:
            for own, longer in zip(state, most, strict=True):
                if own is not longer:
                    own.copy_(longer[..., : summary.k])

    def _pool(
        self, given: Given, pooled: tuple[Heatmap, list[Tensor]], best: Tensor, begin: int, count: int, pitch: int,
        block: int, narrow: int,
    ) -> None:  # fmt: skip
        """Add to cells what some programs have left of their rows."""
        total, _, peak = pooled[1]
        high, wide = pooled[0].cell(self.problem)
        q_cells, k_cells = total.shape[-2:]
        blocks = -(-self.q_len // block)
        head, last = begin // blocks, (begin + count - 1) // blocks
        line, lines = 0, q_cells
        if head == last:  # not all rows of a head: their lines alone
            line = (blocks - 1 - (begin + count - 1) % blocks) * block // high
            lines = -(-min((blocks - begin % blocks) * block, self.q_len) // high) - line
        columns = 16 if interpreted() else COLUMNS
        run(
            pool, -(-k_cells // columns) * lines * (last - head + 1), Tiling(block, columns, 4, 2),
            best, self.lse, total, peak, given, begin, count, pitch, wide, high, q_cells, k_cells, head, line, lines,
            BLOCK_Q=block, NARROW=narrow, COLUMNS=columns,
        )  # fmt: skip

    def columns(self, received: Pairs, pooled: tuple[Heatmap, list[Tensor]] | None) -> None:
        """Mass received, and one heat map."""
        tiling = self.tiling("columns" if not pooled else "both" if received else "cells")
        high, wide = pooled[0].cell(self.problem) if pooled else (tiling.block_q, tiling.block_k // 2)
        q_cells, k_cells = -(-self.q_len // high), -(-self.k_len // wide)
        # a tile takes some rows of several cells at a time, of all there are if they are few
        room_high = max(power(high // ROUNDS + 1, 2) // 2, tiling.block_q // power(q_cells, 1))
        room_high = min(room_high, tiling.block_q) if pooled else tiling.block_q
        room_wide = min(power(wide, 1), tiling.block_k if pooled else tiling.block_k // 2)
        q_parts, k_parts = -(-high // room_high), -(-wide // tiling.block_k)
        blocks = -(-k_cells // (tiling.block_k // room_wide)) * k_parts
        dense = wide % room_wide == 0
        # blocks of keys are those of `spans` where cells fill their room
        given = spans(self.given, tiling.block_q, tiling.block_k, self.batch, self.q.device) if dense else self.given
        counted = pooled is not None and self.counted
        held: list[Tensor] = [self.lse] * 3
        if pooled and k_parts == 1:
            total, count, peak = pooled[1]
            held = [total, torch.zeros_like(total, dtype=torch.int32) if counted else total, peak]
        elif pooled:  # a cell in several parts, which are joined below
            shape = self.batch, self.heads, q_cells, k_cells * k_parts
            held = [self.lse.new_zeros(shape) for _ in range(2)]
            held.insert(1, self.lse.new_zeros(shape, dtype=torch.int32) if counted else held[0])
        rows = tiling.block_q // room_high * high  # of a group
        quick = not self.counted and (not given.table or given.table.reach is not None)
        ragged = not dense or self.k_len % tiling.block_k or self.q_len % rows
        cut = bool(given.mask or ragged or (given.table and given.table.reach is None))
        # tables are read, and pairs checked, in smaller tiles, where they cut no cell; checks want registers
        near = max(min(tiling.block_k, 16 if interpreted() else NARROW), room_wide)
        small = tiling._replace(registers=tiling.registers and CUT_REGISTERS, block_k=near)
        for own in ([tiling] if quick else []) + ([small] if cut else []):
            times = tiling.block_k // own.block_k
            run(
                by_columns, blocks * times * self.batch * self.heads, own,
                self.q, self.k, *self.ends, received[0][1][0] if received else self.lse, *held, given, *self.strides,
                high, wide, q_cells, k_cells * k_parts, q_parts, k_parts, blocks * times, **self.flags,
                BLOCK_Q=tiling.block_q, BLOCK_K=own.block_k, SPAN=tiling.block_k, NEAR=near, HIGH=room_high,
                WIDE=room_wide, RECEIVED=bool(received), POOL=pooled is not None, COUNT=counted,
                WHOLE=high % room_high == 0, DENSE=dense, QUICK=quick and own is tiling,
            )  # fmt: skip
        for _, state in received[1:]:
            state[0].copy_(received[0][1][0])
        if pooled:
            total, count, peak = pooled[1]
            if k_parts > 1:
                total.copy_(held[0].unflatten(-1, (k_cells, k_parts)).sum(-1))
                peak.copy_(held[2].unflatten(-1, (k_cells, k_parts)).amax(-1))
            if counted:
                count.copy_(held[1].unflatten(-1, (k_cells, k_parts)).sum(-1))

    def diagonals(self, profiles: Pairs) -> None:
        """Mass per displacement on a line."""
        if not profiles:
            return
        tiling = self.diagonal_tiling()
        size, tall = tiling.block_k, tiling.block_q // tiling.block_k
        q_blocks, k_blocks = -(-self.q_len // tiling.block_q), -(-self.k_len // size)
        lines = (q_blocks - 1) * tall + k_blocks
        parts = self.lse.new_empty(self.batch, self.heads, lines, tall + 1, size)
        run(
            by_diagonals, lines * self.batch * self.heads, tiling,
            self.q, self.k, *self.ends, parts, self.given, *self.strides, **self.flags,
            BLOCK_Q=tiling.block_q, BLOCK_K=size, COUNT=self.counted,
        )  # fmt: skip
        (_, first), *others = profiles
        first[0] = on_line(self.given, parts, None, 1 - k_blocks, self.heads, self.batch, None, 0)
        for _, state in others:
            state[0].copy_(first[0])


def group_size(k_len: int, block_k: int) -> int:
    """Keys of a group, a power of two: SMALLEST, or where GROUPS of them are too few for all, of whole tiles."""
    size = power(-(-k_len // GROUPS), SMALLEST)
    return size if size == SMALLEST else max(size, block_k)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@constant(64)
def _extents(length: int, size: int, down: bool, device: torch.device) -> Tensor:
    """How many tokens each cell has, all of `size` but for the last: [cells], or [cells, 1] if `down`."""
    cells = -(-length // size)
    extents = torch.full((cells,), float(size), dtype=torch.float64, device=device)
    extents[-1:] = length - (cells - 1) * size
    return extents[:, None] if down else extents
