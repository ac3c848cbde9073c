"""Summaries of A by kernels: which passes they need, and how the passes' sums become the states of `summaries`.

Rows come first, for the log-sum-exp; entropy comes with it, and so do the groups of keys among which the strongest
are. Then columns, for mass received and the heat map, and diagonals, for the profile of a line. What has no kernel is
shown strips by the tiled engine, and only that. A state is the one its summary defines: `start` makes it, and `finish`
never knows who filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...normal import Problem
from ...summaries import Entropy, Heatmap, LogSumExp, Profile, Received, TopK
from .. import tiled
from .choice import Tiling, interpreted, power
from .given import Given
from .launch import dense_rows, is_plain, precision, run
from .looks import by_columns, by_diagonals
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
#: tiles that are added up before their cells are summed, where cells are that high
ROUNDS = 4


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
    states = iter(tiled.reduce(problem, rest, progress, lse) if rest else [])
    found: list[Any] = [None if own else next(states) for own in fused]

    def begun(kind: type) -> Pairs:
        """Summaries of one kind with states to fill, made when their pass comes: what it needs besides is gone then."""
        mine = [n for n, summary in enumerate(summaries) if fused[n] and type(summary) is kind]
        for n in mine:
            found[n] = _start(summaries[n], problem)
        return [(summaries[n], found[n]) for n in mine]

    if any(fused):
        look = Look(problem, lse)
        look.rows(begun(Entropy), begun(TopK))
        received, maps = begun(Received), begun(Heatmap)
        for n in range(max(bool(received), len(maps))):  # the first pass gives both
            look.columns(received if n == 0 else [], maps[n] if n < len(maps) else None)
        look.diagonals(begun(Profile))
        for _, state in begun(LogSumExp):
            state[0].copy_(_plain(look.lse))
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


def _start(summary: Any, problem: Problem) -> list[Any]:
    """A state for kernels to fill. What they write all of needs no first numbers: keys, and maps that no mask cuts."""
    (batch, heads, q_len, k_len), device = problem.sizes, problem.q.device
    if type(summary) is TopK:
        kinds = torch.float32, torch.float32, torch.long
        return [torch.empty(batch, heads, q_len, summary.k, dtype=kind, device=device) for kind in kinds]
    if type(summary) is not Heatmap or problem.form.mask is not None:
        return summary.start(problem)
    high, wide = summary.cell(problem)
    shape = batch, heads, -(-q_len // high), -(-k_len // wide)
    total, peak = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    down, across = (_extents(n, size, device) for n, size in ((q_len, high), (k_len, wide)))
    return [total, (down[:, None] * across).expand(shape), peak]


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
    """One problem's passes. `lse` is in units of log 2, +inf where a row sees nothing."""

    def __init__(self, problem: Problem, lse: Tensor | None = None):
        self.problem = problem
        self.q, self.k = dense_rows(problem.q), dense_rows(problem.k)
        self.batch, self.heads, self.q_len, self.k_len = problem.sizes
        self.given: Given = prepare(problem).given
        self.known = lse is not None
        if lse is None:
            self.lse = torch.empty(self.batch, self.heads, self.q_len, dtype=torch.float32, device=self.q.device)
        else:
            self.lse = (lse * LOG2E).masked_fill_(lse == -torch.inf, torch.inf).contiguous()
        dim = self.q.shape[-1]
        self.width = {"DIM": dim, "BLOCK_D": power(dim)}
        self.flags = {**self.width, "PRECISION": precision(self.k.dtype), "BARE": self.bare()}
        self.strides = (*self.q.stride()[:3], *self.k.stride()[:3], self.heads // self.k.shape[1])

    def bare(self) -> bool:
        """Nothing is added but a table, and the largest dot product has the largest logit."""
        given = self.given
        return is_plain(given._replace(table=())) and not (given.table and given.table.gate) and self.problem.scale >= 0

    def tiling(self, what: str) -> Tiling:
        """How large a tile is: small, so that several programs share a multiprocessor. Measured on one H200."""
        if interpreted():
            return Tiling(32, 32 if what == "rows" else 16, 4, 1)
        wide = power(self.q.shape[-1])
        if self.k.dtype == torch.float32:
            return Tiling(64, 32, 4, 2) if wide <= 128 else Tiling(32, 32, 4, 2)
        if wide < 128:
            tilings = {"rows": Tiling(64, 128, 4, 2, 128), "columns": Tiling(64, 64, 4, 3, 128)}
            return tilings.get(what, Tiling(64, 128, 4, 2, 168))
        return Tiling(64, 64, 4, 3 if wide == 128 and what != "rows" else 2)

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

    def rows(self, entropies: Pairs, tops: Pairs) -> None:
        """Log-sum-exps, and what else is read row by row. Several TopK share the longest."""
        if self.known and not entropies and not tops:
            return
        tiling = self.tiling("rows")
        narrow = min(tiling.block_k, 16 if interpreted() else NARROW)
        given = spans(self.given, tiling.block_q, narrow, self.batch, self.q.device)
        entropy = entropies[0][1][0] if entropies else self.lse
        programs = together = -(-self.q_len // tiling.block_q) * self.batch * self.heads
        longest = max((summary.k for summary, _ in tops), default=0)
        most = next((state for summary, state in tops if summary.k == longest), [])
        size = group_size(self.k_len, tiling.block_k)
        groups = -(-self.k_len // max(size, tiling.block_k)) * max(tiling.block_k // size, 1)  # of whole tiles
        group = 0 if not tops else SMALLEST if size == SMALLEST else -1
        pitch = -(-groups // 16) * 16 + 16  # rows begin at whole vectors
        best = self.lse
        if tops:
            times = -(-programs * tiling.block_q * pitch * 4 // ROOM)
            together = -(-programs // times)
            best = self.lse.new_empty(together * tiling.block_q, pitch)
        width, rows = power(max(longest, 1), 1), tiling.block_q if interpreted() else 1
        once = width * size <= CHUNK
        for begin in range(0, programs, together):
            count = min(together, programs - begin)
            run(
                by_rows, count, tiling,
                self.q, self.k, self.lse, entropy, best, given, *self.strides, begin, pitch, size, **self.flags,
                BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, NARROW=narrow, ENTROPY=bool(entropies), GROUP=group,
                STEADY=self.k.dtype != torch.float32,
            )  # fmt: skip
            if tops:
                run(
                    by_groups, count * tiling.block_q // rows, Tiling(rows, 1, 1, 1, REGISTERS),
                    self.q, self.k, best, *most, given, *self.strides, begin, pitch, size, **self.width,
                    BLOCK_Q=tiling.block_q, NARROW=narrow, PRECISION=self.flags["PRECISION"], ROWS=rows,
                    LINES=max(rows, 16), GROUPS=power(groups), TOP=longest, WIDTH=width,
                    CHUNK=width * size if once else min(size, CHUNK), ONCE=once,
                )  # fmt: skip
        for _, state in entropies[1:]:
            state[0].copy_(entropy)
        for summary, state in tops:
            for own, longer in zip(state, most, strict=True):
                if own is not longer:
                    own.copy_(longer[..., : summary.k])

    def columns(self, received: Pairs, pooled: tuple[Heatmap, list[Tensor]] | None) -> None:
        """Mass received, and one heat map."""
        tiling = self.tiling("cells" if pooled else "columns")
        high, wide = pooled[0].cell(self.problem) if pooled else (tiling.block_q, tiling.block_k)
        q_cells, k_cells = -(-self.q_len // high), -(-self.k_len // wide)
        # a tile takes some rows of several cells at a time, of all there are if they are few
        room_high = max(power(high // ROUNDS + 1, 2) // 2, tiling.block_q // power(q_cells, 1))
        room_high = min(room_high, tiling.block_q) if pooled else tiling.block_q
        room_wide = min(power(wide, 1), tiling.block_k)
        q_parts, k_parts = -(-high // room_high), -(-wide // tiling.block_k)
        blocks = -(-k_cells // (tiling.block_k // room_wide)) * k_parts
        masked = bool(self.given.mask)
        held: list[Tensor] = [self.lse] * 3
        if pooled and k_parts == 1:
            total, count, peak = pooled[1]
            held = [total, torch.zeros_like(total, dtype=torch.int32) if masked else total, peak]
        elif pooled:  # a cell in several parts, which are joined below
            shape = self.batch, self.heads, q_cells, k_cells * k_parts
            held = [self.lse.new_zeros(shape, dtype=d) for d in (torch.float32, torch.int32, torch.float32)]
        run(
            by_columns, blocks * self.batch * self.heads, tiling,
            self.q, self.k, self.lse, received[0][1][0] if received else self.lse, *held, self.given, *self.strides,
            high, wide, q_cells, k_cells * k_parts, q_parts, k_parts, blocks, **self.flags,
            BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, HIGH=room_high, WIDE=room_wide,
            CHECK=masked or self.k_len % tiling.block_k > 0 or wide % room_wide > 0,
            RECEIVED=bool(received), POOL=pooled is not None, COUNT=pooled is not None and masked,
            EVEN=high % room_high == 0 and self.q_len % (tiling.block_q // room_high * high) == 0,
            DENSE=wide == room_wide, FLAT=q_parts < ROUNDS,
        )  # fmt: skip
        for _, state in received[1:]:
            state[0].copy_(received[0][1][0])
        if pooled:
            total, count, peak = pooled[1]
            if k_parts > 1:
                total.copy_(held[0].unflatten(-1, (k_cells, k_parts)).sum(-1))
                peak.copy_(held[2].unflatten(-1, (k_cells, k_parts)).amax(-1))
            if masked:
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
        mask = self.given.mask
        bounds = ("lo", "hi", *(name for name in mask._fields if name.endswith(("_batch", "_head")))) if mask else ()
        straight = not mask or all(x is None for name, x in mask._asdict().items() if name not in bounds)
        run(
            by_diagonals, lines * self.batch * self.heads, tiling,
            self.q, self.k, self.lse, parts, self.given, *self.strides, **self.flags,
            BLOCK_Q=tiling.block_q, BLOCK_K=size, STRAIGHT=straight,
        )  # fmt: skip
        whole = self.lse.new_zeros(self.batch, self.heads, (lines + tall) * size)
        for row in range(tall + 1):
            whole[..., row * size : (row + lines) * size] += parts[..., row, :].flatten(-2)
        first = k_blocks * size - (self.k_len - 1)
        for _, state in profiles:
            state[0].copy_(whole[..., first : first + self.q_len + self.k_len - 1])


def group_size(k_len: int, block_k: int) -> int:
    """Keys of a group, a power of two: SMALLEST, or where GROUPS of them are too few for all, of whole tiles."""
    size = power(-(-k_len // GROUPS), SMALLEST)
    return size if size == SMALLEST else max(size, block_k)


def _extents(length: int, size: int, device: torch.device) -> Tensor:
    """How many tokens each cell has: all of `size`, but for the last."""
    cells = -(-length // size)
    extents = torch.full((cells,), float(size), dtype=torch.float64, device=device)
    extents[-1:] = length - (cells - 1) * size
    return extents
