"""Backward passes launched, and sums of dS turned into gradients of operands (eq. 24)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...normal import BINS, Piece, Problem, each_head
from ...tables import spread
from ..tiled.gradients import Gradients, deposit
from ..tiled.pieces import logits_of
from ..tiled.places import see
from ..tiled.strips import drop, each_block, each_strip, values_of
from .axes import to_content, to_rows
from .choice import Tiling, diagonal_tiling, key_tiling, power, query_tiling
from .collect import by_bins, on_grid, on_line
from .diagonal import diagonal_kernel
from .given import Given, Sums
from .launch import Start, added, again, dense_rows, is_ragged, on_lines, precision
from .prepare import Prepared, prepare, spans, turned
from .reverse import ROOM, inner_kernel, key_kernel, query_kernel
from .tune import tuned

Gradient = tuple[Tensor, Tensor, Tensor, list[Tensor | None]]


def backward(
    problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: Sequence[bool],
    outside: Tensor | None = None,
) -> Gradient:  # fmt: skip
    """Gradients of q, k, v and of the operands asked for. `outside`: the weight of a row's keys that are not here."""
    return _Backward(problem, v, out, lse, d_out, d_lse, needs, outside).gradients()


class _Backward:
    """One backward pass: what all its kernels read, and where gradients of operands are gathered."""

    def __init__(
        self, problem: Problem, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor,
        needs: Sequence[bool], outside: Tensor | None,
    ):  # fmt: skip
        self.problem, self.needs = problem, needs
        self.outside = None if outside is None else outside.contiguous()
        self.made: Prepared = prepare(problem, both=True)
        self.q, self.k, self.v, out, self.d_out = (dense_rows(x) for x in (problem.q, problem.k, v, out, d_out))
        if self.d_out.dtype != self.v.dtype:
            self.d_out = self.d_out.to(self.v.dtype)
        self.lse, self.d_lse = lse.contiguous(), d_lse
        self.dims = self.q.shape[-1], self.v.shape[-1]
        self.totals: list[Tensor | None] = [None] * len(needs)
        batch, heads, q_len, _ = problem.sizes
        whole = -(-q_len // ROOM.value) * ROOM.value
        self.ends = self.room(whole), self.room(whole)
        self.inner = self.ends[1][..., :q_len]
        block = min(max(16, 4096 // power(self.dims[1])), ROOM.value)
        tiling = query_tiling(*self.dims, self.k.dtype, "nothing")
        self.device = self.q.device
        self.alike = (
            self.made.given.seen, self.device, self.k.dtype, precision(self.k.dtype), tuple(needs), outside is None,
            *[x.shape for x in (self.q, self.k, self.v)],
            *[x.stride() for x in (self.q, self.k, self.v, self.d_out)],
        )  # fmt: skip
        again(
            (inner_kernel, self.alike, out.stride(), d_lse.stride(), out.dtype, d_lse.dtype),
            (out, self.d_out, self.lse, d_lse, *self.ends), (),
            lambda: Start(
                self.device, inner_kernel, whole // block * batch * heads, tiling,
                heads, q_len, *out.stride()[:3], *self.d_out.stride()[:3], *d_lse.stride(),
                V_DIM=self.dims[1], BLOCK_V=power(self.dims[1]), BLOCK_Q=block,
            ),
        )  # fmt: skip

    def room(self, *shape: int) -> Tensor:
        """Float32 for every head."""
        return torch.empty(*self.problem.sizes[:2], *shape, dtype=torch.float32, device=self.q.device)

    def gradients(self) -> Gradient:
        problem, made = self.problem, self.made
        tabled = self._wants(made.tabled) and self._walks()
        d_q = self.queries(tabled)
        d_k, d_v = self.keys()
        if tabled:
            self.table()
        if problem.form.sink >= 0 and self.needs[problem.form.sink]:
            self.add(problem.form.sink, (-self._sunk() * self.inner).sum(-1))
        odd = [piece for piece in made.odd if self._wants([piece])]
        odd += [] if tabled else [piece for piece in made.tabled if self._wants([piece])]
        if odd:
            self.strips(odd)
        rest: list[Tensor | None] = []
        for need, grad, x in zip(self.needs, self.totals, problem.operands, strict=True):
            grad = torch.zeros(x.shape, device=x.device) if need and grad is None else grad
            rest.append(grad.expand(x.shape).contiguous().to(x.dtype) if need and grad is not None else None)
        return d_q, d_k, d_v, rest

    def _sunk(self) -> Tensor:
        """The weight that each row has on the sink: [batch, heads, q_len]."""
        sink = self.problem.operands[self.problem.form.sink].float().unsqueeze(-1)
        return torch.where(self.lse == -torch.inf, 0.0, torch.exp(sink - self.lse))

    def _wants(self, pieces: Sequence[Piece]) -> bool:
        return any(self.needs[slot] for piece in pieces for slot in (*piece.slots, piece.gate) if slot >= 0)

    def _walks(self) -> bool:
        """The table has the same entries in every tile of a block diagonal, and terms of axes are not beside it."""
        if self.made.given.table.width is None:
            return True
        if self.made.axes:
            return False
        (_, q_wide), (_, k_wide) = self.problem.form.q_geometry[1], self.problem.form.k_geometry[1]
        tiling = diagonal_tiling(*self.dims, self.k.dtype, k_wide, False)
        return q_wide == k_wide and (tiling.block_k % k_wide == 0 or tiling.block_q == k_wide)

    def add(self, slot: int, grad: Tensor) -> None:
        """Into an operand's gradient, summed over what it has once or in groups: [batch, heads, ..]."""
        if not self.needs[slot]:
            return
        shape = self.problem.operands[slot].shape
        if 1 < shape[1] < grad.shape[1]:
            grad = grad.unflatten(1, (shape[1], -1)).sum(2, dtype=torch.float32)
        summed = [axis for axis in range(grad.dim()) if shape[axis] == 1 != grad.shape[axis]]
        grad = grad.sum(summed, keepdim=True, dtype=torch.float32) if summed else grad
        before = self.totals[slot]
        self.totals[slot] = grad if before is None else before + grad

    def add_product(self, piece: Piece, grad: Tensor) -> None:
        """Into a vector a row and its gate, from the gradient of their product: [batch, heads, q_len]."""
        grad, slot = grad.unsqueeze(-1), piece.slots[0]
        heads = grad.shape[1]
        if piece.gate >= 0:
            self.add(piece.gate, grad * each_head(self.problem.operands[slot], heads).float())
            grad = grad * each_head(self.problem.operands[piece.gate], heads).float()
        self.add(slot, grad)

    def _common(self) -> tuple:
        return (
            *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2], *self.d_out.stride()[:2],
        )  # fmt: skip

    def _flags(self) -> dict:
        dim, v_dim = self.dims
        blocks = {"BLOCK_D": power(dim), "BLOCK_V": power(v_dim)}
        steps = (("Q", self.q), ("K", self.k), ("V", self.v), ("D", self.d_out))
        blocks |= {f"{name}_STEP": x.stride(2) for name, x in steps}
        return {"DIM": dim, "V_DIM": v_dim, **blocks, "PRECISION": precision(self.k.dtype)}

    def queries(self, tabled: bool) -> Tensor:
        """d_q, and the sums of dS along rows."""
        kind = *self.dims, self.k.dtype, added(self.made.given)
        tiling = tuned("queries", kind, query_tiling(*kind), lambda tiling: self.sweep_keys(tiling, tabled))
        problem, made = self.problem, self.made
        d_q, wanted = self.sweep_keys(tiling, tabled)
        for piece in made.rows if wanted.plain is not None else ():
            self.add_product(piece, wanted.plain)
        for piece in made.slopes if wanted.slope is not None else ():
            self.add_product(piece, wanted.slope)
        if wanted.scale is not None:
            self.add(problem.form.scale, wanted.scale.unsqueeze(-1))
        if wanted.cross is not None:
            self.add(made.crossed[0].gate, wanted.cross.unsqueeze(-1))
        if wanted.gate is not None:
            self.add(made.tabled[0].gate, wanted.gate.unsqueeze(-1))
        self.far = None if wanted.left is None else (wanted.left, wanted.right)
        if self.far is not None and made.tabled[0].gate >= 0:
            gate = each_head(problem.operands[made.tabled[0].gate], problem.q.shape[1]).float().squeeze(-1)
            self.far = self.far[0] * gate, self.far[1] * gate
        if wanted.down is not None:
            down, across = wanted.down[0] if len(wanted.down) == 1 else wanted.down.sum(0), wanted.across
            if self.fix is not None:  # these were summed before their rows were known whole
                shape = problem.form.q_geometry[1]
                fix = self.fix.unflatten(-1, shape)
                down = (down.unflatten(-1, (shape[0], -1, shape[1])) * fix.unsqueeze(-2)).flatten(2)
                across = (across.unflatten(-1, (*shape[::-1], -1)) * fix.mT.unsqueeze(-1)).flatten(2)
            self.axes(down, across)
        return d_q

    def sweep_keys(self, tiling: Tiling, tabled: bool) -> tuple[Tensor, Sums]:
        """The pass over keys for blocks of queries."""
        problem, made, given = self.problem, self.made, self.made.given
        batch, heads, q_len, _ = problem.sizes
        tiling = on_lines(tiling, given)
        row = lambda want: self.room(q_len) if want else None  # noqa: E731
        gated = bool(given.table) and bool(given.table.gate) and self.needs[made.tabled[0].gate]
        far = tabled and given.table.reach is not None
        axes, columns = self._wants(made.axes), 1
        if axes:
            columns = -(-given.axes.wide // tiling.block_k)
        self.fix = row(self.q.dtype == torch.float32)
        wanted = Sums(
            fix=self.fix,
            outside=self.outside,
            plain=row(self._wants(made.rows)),
            scale=row(bool(given.row_scale) and self.needs[problem.form.scale]),
            cross=row(self._wants(made.crossed)),
            slope=row(self._wants(made.slopes)),
            gate=row(gated),
            left=row(far),
            right=row(far),
            down=self.q.new_empty(columns, batch, heads, q_len * given.axes.high) if axes else None,
            across=self.q.new_empty(batch, heads, q_len * given.axes.wide) if axes else None,
        )
        d_q = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.device)
        again(
            (query_kernel, tiling, tabled, self.alike),
            (self.q, self.k, self.v, self.d_out, *self.ends, d_q),
            (spans(given, tiling.block_q, tiling.block_k, batch, self.device), wanted),
            lambda: Start(
                self.device, query_kernel, -(-q_len // tiling.block_q) * batch * heads, tiling,
                *self._common(), heads // self.k.shape[1], heads // self.v.shape[1],
                **self._flags(), BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k,
                BACKWARDS=bool(given.mask) and given.mask.lo is not None, RAGGED=is_ragged(given, tiling),
            ),
        )  # fmt: skip
        return d_q, wanted

    def keys(self) -> tuple[Tensor, Tensor]:
        """d_k and d_v, and the sums of dS along columns."""
        problem, made, given = self.problem, self.made, turned(self.made)
        kind = *self.dims, self.k.dtype, added(given)
        tiling = tuned("keys", kind, key_tiling(*kind), lambda tiling: self.sweep_queries(tiling, given))
        d_k, d_v, wanted = self.sweep_queries(tiling, given)
        for piece in made.cols if wanted.plain is not None else ():
            self.add(piece.slots[0], wanted.plain.unsqueeze(-2))
        for piece in made.crossed if wanted.cross is not None else ():
            self.add(piece.slots[0], wanted.cross.unsqueeze(-2))
        if wanted.scale is not None:
            self.add(problem.form.scale, wanted.scale.unsqueeze(-2))
        joined = []
        for grad, x in ((d_k, self.k), (d_v, self.v)):
            if x.shape[1] != grad.shape[1]:
                grad = grad.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
            joined.append(grad)
        return joined[0], joined[1]

    def sweep_queries(self, tiling: Tiling, given: Given) -> tuple[Tensor, Tensor, Sums]:
        """The pass over queries for blocks of keys."""
        problem, made = self.problem, self.made
        batch, heads, _, k_len = problem.sizes
        tiling = on_lines(tiling, given)
        shared, columns = max(self.k.shape[1], self.v.shape[1]), 1
        blocks = -(-k_len // tiling.block_k)
        if given.axes:
            columns = -(-given.axes.wide // tiling.block_k)
            blocks = given.axes.high * columns
        col = lambda want: self.room(k_len) if want else None  # noqa: E731
        wanted = Sums(
            fix=self.fix,
            outside=None,
            plain=col(self._wants(made.cols)),
            scale=col(bool(given.col_scale) and self.needs[problem.form.scale]),
            cross=col(self._wants(made.crossed)),
            slope=None, gate=None, left=None, right=None, down=None, across=None,
        )  # fmt: skip
        d_k, d_v = (
            torch.empty(
                batch, shared, k_len, x.shape[-1],
                dtype=x.dtype if x.shape[1] == shared else torch.float32, device=x.device,
            )
            for x in (self.k, self.v)
        )  # fmt: skip
        again(
            (key_kernel, tiling, self.alike),
            (self.q, self.k, self.v, self.d_out, *self.ends, d_k, d_v),
            (spans(given, tiling.block_q, tiling.block_k, batch, self.device), wanted),
            lambda: Start(
                self.device, key_kernel, blocks * batch * shared, tiling,
                *self._common(), shared, heads // self.k.shape[1], heads // self.v.shape[1], columns, 1.0,
                **self._flags(), BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, RAGGED=is_ragged(given, tiling),
                GROUP=heads // shared,
            ),
        )  # fmt: skip
        return d_k, d_v, wanted

    def table(self) -> None:
        """The gradient of the table, by block diagonals."""
        problem, given = self.problem, self.made.given
        batch, heads, q_len, k_len = problem.sizes
        grid = problem.form.k_geometry[1][1] if given.table.width is not None else None
        clipped = given.table.reach is not None
        tiling = diagonal_tiling(*self.dims, self.k.dtype, grid, clipped)
        begin, end = self._diagonals(tiling)
        # batch rows that have a table of their own, or are summed apart, for there are few diagonals to share out
        own = batch if given.table.batch or clipped else 1
        # on a grid whose lines are as long as a tile is high, a tile's diagonals are displacements of columns
        whole = grid is not None and grid != tiling.block_q
        count = max(end - begin, 0)
        shape = (tiling.block_q, tiling.block_k) if whole else (tiling.block_q // tiling.block_k + 1, tiling.block_k)
        sums = torch.empty(own * heads, count, *shape, dtype=torch.float32, device=self.q.device)
        if count:
            again(
                (diagonal_kernel, tiling, self.alike),
                (self.q, self.k, self.v, self.d_out, *self.ends, self.fix, sums), (given,),
                lambda: Start(
                    self.device, diagonal_kernel, own * heads * count, tiling,
                    *self._common(), heads // self.k.shape[1], heads // self.v.shape[1], begin, count, batch // own,
                    **self._flags(), BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, WHOLE=whole,
                ),
            )  # fmt: skip
        sums = sums.view(own, heads, count, *shape)
        rows = batch if given.table.batch else 1
        for piece in self.made.tabled:
            if self.needs[piece.slots[0]]:
                self.add(piece.slots[0], self._table_of(piece, sums, begin, whole, rows))

    def _table_of(self, piece: Piece, sums: Tensor, begin: int, whole: bool, rows: int) -> Tensor:
        """From sums along diagonals to one table's entries or bins."""
        problem, operand, index = self.problem, self.problem.operands[piece.slots[0]], None
        bins, heads = operand.shape[-1], operand.shape[1]
        if piece.lookup >= 0:
            index = problem.operands[piece.lookup].flatten(1)
        once = index if index is not None and piece.config[0] and rows == 1 else None
        if self.made.given.table.width is None:
            grad = on_line(self.made.given, sums, self.far, begin, heads, rows, once, bins)
        else:
            shapes = problem.form.q_geometry[1], problem.form.k_geometry[1]
            grad = on_grid(sums, begin, shapes, whole, heads, rows, once, bins)
        return grad if index is None or once is not None else by_bins(grad.unsqueeze(-1), index, bins).squeeze(-1)

    def _diagonals(self, tiling: Tiling) -> tuple[int, int]:
        """Which block diagonals any pair that may meet, and any entry of its own, lies on."""
        problem, given = self.problem, self.made.given
        _, _, q_len, k_len = problem.sizes
        high, wide = tiling.block_q, tiling.block_k
        begin, end = 1 + (-k_len // wide), (-(-q_len // high) - 1) * (high // wide) + 1
        if problem.form.q_start >= 0 or problem.form.k_start >= 0:
            return begin, end
        shift, least, most = problem.starts[0] - problem.starts[1], None, None
        if given.mask:
            least, most = given.mask.lo, given.mask.hi
        if given.table.reach is not None:
            inside = given.table.reach - 1
            least = -inside if least is None else max(least, -inside)
            most = inside if most is None else min(most, inside)
        if least is not None:  # the last displacement of tile m is m wide + high - 1 + shift
            begin = max(begin, -(-(least - shift - high + 1) // wide))
        if most is not None:  # the first is (m - 1) wide + 1 + shift
            end = min(end, (most - shift - 1) // wide + 2)
        return begin, end

    def axes(self, down: Tensor, across: Tensor) -> None:
        """From what each query gives to lines and columns, to its content and to R."""
        problem, made, before = self.problem, self.made, None
        shared = made.axes[0].slots[0] == made.axes[1].slots[0]
        for axis, (piece, d_x) in enumerate(zip(made.axes, (down, across), strict=True)):
            if self.needs[piece.slots[0]]:
                before = to_content(problem, made.sides[axis], axis, d_x, before if shared else None)
                if axis or not shared:
                    self.add(piece.slots[0], before)
        if any(self.needs[piece.slots[1]] for piece in made.axes):
            first, second = (piece.lookup >= 0 and piece.config[0] for piece in made.axes)
            once = first, second
            found = to_rows(problem, made.sides, (down, across), once)
            for piece, grad, alone in zip(made.axes, found, once, strict=True):
                if piece.lookup >= 0 and not alone:
                    index = problem.operands[piece.lookup].flatten(1)[:, : grad.shape[2]]
                    grad = by_bins(grad, index, problem.operands[piece.slots[1]].shape[2])
                self.add(piece.slots[1], grad)

    def strips(self, pieces: Sequence[Piece]) -> None:
        """The pieces whose gradient no kernel sums: dS by strips, as the tiled engine has them."""
        wanted = {slot for piece in pieces for slot in (*piece.slots, piece.gate) if slot >= 0}
        needs = [need and slot in wanted for slot, need in enumerate(self.needs)]
        which = [n for n, piece in enumerate(self.problem.form.pieces) if piece in pieces]
        nothing = self.q.new_empty(0)
        found = through_spread(
            self.problem, needs, lambda whole: (nothing, nothing, nothing, self._strips(whole, which, needs))
        )
        for slot, grad in enumerate(found[3]):
            if grad is not None:
                self.add(slot, grad)

    def _strips(self, problem: Problem, which: list[int], needs: list[bool]) -> list[Tensor | None]:
        """Gradients of operands from some pieces of a problem without bins.

        In float32 a row's weights are made to sum to one here, not by what the kernels found for theirs (`fix`), and so
        is their mean gradient: a content term multiplies what is left of either by numbers that may be large.
        """
        wide, heads, lse = torch.float32, problem.sizes[1], self.lse
        exact, rest = self.fix is not None, torch.ones_like(lse)
        if exact and problem.form.sink >= 0:
            rest = rest - self._sunk()
        if exact and self.outside is not None:
            rest = rest - self.outside
        totals = [
            torch.zeros_like(x, dtype=wide) if need else None for x, need in zip(problem.operands, needs, strict=True)
        ]
        for block in each_block(problem):
            p, values = block.problem, values_of(self.v, block, heads)
            grads = Gradients(p, needs)
            for rows, cols in each_strip(p):
                at = block.batch, block.heads, rows
                logits = logits_of(p, rows, cols, masked=False)
                ends = lse[at].masked_fill(lse[at] == -torch.inf, torch.inf).unsqueeze(-1)
                weights = torch.exp(logits - ends)
                if p.form.mask is not None:
                    weights = weights.masked_fill(~see(p, p.form.mask, rows, cols), 0.0)
                d_weights = drop(p, self.d_out[at].to(wide) @ values[:, :, cols].mT, rows, cols)
                inner = self.inner[at].unsqueeze(-1)
                if exact:
                    whole = weights.sum(-1, keepdim=True)
                    weights = weights * torch.where(whole > 0, rest[at].unsqueeze(-1) / whole, 0.0)
                    if self.outside is None:  # else it has a part that is not here
                        inner = (weights * d_weights).sum(-1, keepdim=True) - self.d_lse[at].unsqueeze(-1)
                d_logits = weights * (d_weights - inner)
                if p.form.softcap is not None:
                    d_logits = d_logits * (1 - (logits / p.form.softcap).square())
                if p.form.mask is not None:
                    d_logits = d_logits.masked_fill(~see(p, p.form.mask, rows, cols), 0.0)
                if d_logits.numel():
                    grads.pull_pieces([p.form.pieces[n] for n in which], d_logits, rows, cols)
            grads.contract(problem.select(block.batch, block.heads))
            for total, part in zip(totals, grads.operands, strict=True):
                if total is not None and part is not None:
                    deposit(total, part, block, heads)
        return totals


def through_spread(problem: Problem, needs: Sequence[bool], found_by: Callable[[Problem], Gradient]) -> Gradient:
    """Gradients found for a problem whose tables are by displacement, taken back to bins where this one has them."""
    if not any(BINS in piece.config for piece in problem.form.pieces):
        return found_by(problem)
    with torch.enable_grad():
        mine = [x.detach().requires_grad_(need) for x, need in zip(problem.operands, needs, strict=True)]
        whole = spread(problem._replace(operands=mine))
    *content, found = found_by(whole._replace(operands=[x.detach() for x in whole.operands]))
    rest: list[Tensor | None] = []
    for grad, leaf, full in zip(found, mine, whole.operands, strict=True):
        if grad is not None and full is not leaf:
            (grad,) = torch.autograd.grad(full, leaf, grad.to(full.dtype))
        rest.append(grad)
    return content[0], content[1], content[2], rest
