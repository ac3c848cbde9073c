"""What kernels are told besides q, k and v: plain tuples of tensors and numbers, made by `prepare`, read by `tiles`.

Triton takes named tuples as arguments. A field that is None, or a `tl.constexpr`, is known when a kernel is compiled,
so a kernel holds no code for what a problem does not have. A tuple that is absent is (), and `Has` tells which are
there: a kernel cannot ask a tuple. Nor may it give one of these tuples another name, for that makes numbers of its
constants. Biases are in units of log 2, as `tiles` computes logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operand(NamedTuple):
    """A vector a row or a column: [batch or 1, heads or 1, length or 1], float32. A stride is 0 where it is shared."""

    ptr: Any
    batch: Any
    head: Any
    step: Any


class Has(NamedTuple):
    """What a problem has of each, each a constexpr: a kernel cannot ask a tuple whether it is there."""

    row_scale: Any
    col_scale: Any
    row: Any
    col: Any
    cross: Any
    slope: Any
    ramp: Any  # the same slope for all rows of a head, and no table beside it
    table: Any
    clipped: Any
    gathered: Any  # how many
    axes: Any
    mask: Any
    sink: Any


class Toeplitz(NamedTuple):
    """A table over displacements, reversed, so that a row of a tile reads ascending entries: entry = a_i + o_j.

    On a line a_i = q_len - 1 - i and o_j = j; on a grid they are row-major over the axes. `copies` copies of it lie
    `stride` apart, copy s beginning at entry s: a row reads the copy in which it begins at a whole vector of 16 bytes.
    `by_key`: for turned tiles, whose rows are keys. The table is not reversed then, and entry = a_j + o_i.
    """

    ptr: Any
    batch: Any
    head: Any
    stride: Any
    copies: Any  # constexpr
    by_key: Any  # constexpr
    near: Any  # int32: a_i (or a_j); None on a line
    width: Any  # constexpr: the second axis of the grid that o_j (or o_i) counts on; None on a line
    pitch: Any  # entries of one line of a grid
    gate: Any  # Operand over rows, or ()
    gated: Any  # constexpr
    reach: Any  # constant where |displacement| >= reach; None: nowhere


class Gathered(NamedTuple):
    """A bias read by an entry a pair: the way of any grid and of clipped content terms, and slower.

    value = x[batch, head, i or 0, j or 0, entry], entry = a_i - o_j, or bins[a_i - o_j]; negative a_i or o_j have no
    place, and read the last three entries.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    near: Any  # [q_len] int32: a_i
    far: Any  # [k_len] int32: o_j
    bins: Any  # int32 [entries], or None
    bins_batch: Any
    alone: Any  # the first of the last three entries; None where all have places
    gate: Any
    gated: Any  # constexpr


class Axes(NamedTuple):
    """Two terms a query has on the axes of a grid of keys (SAM), for each place of a key.

    value = down[batch, head, y_i, y_j, x_i] + across[batch, head, x_i, y_i, x_j], as matrix products leave them
    """

    down: Any
    across: Any
    q_high: Any
    q_wide: Any
    high: Any
    wide: Any


class Mask(NamedTuple):
    """Masks joined by `and`: lo <= displacement <= hi, keys first .. last, keys before a count, same ids, dense."""

    lo: Any
    hi: Any
    first: Any  # positions of keys
    last: Any
    before: Any  # [batch] int64
    q_first: Any  # positions of queries
    q_last: Any
    q_before: Any
    q_ids: Any  # [batch, q_len] int64
    k_ids: Any
    q_ids_batch: Any
    k_ids_batch: Any
    dense: Any  # bytes [batch, heads, q_len, k_len]
    dense_batch: Any
    dense_head: Any
    dense_row: Any
    dense_col: Any
    q_spans: Any  # [batch, blocks, 2] int32: the keys a block of queries may meet, from the ids
    k_spans: Any  # the same for a block of keys


class Given(NamedTuple):
    """Everything a logit depends on besides q and k."""

    has: Any
    heads: Any
    q_len: Any
    k_len: Any
    q_start: Any
    k_start: Any
    q_starts: Any  # [batch] int64, added to the number; None
    k_starts: Any
    scale: Any  # in units of log 2
    row_scale: Any  # Operand, or ()
    col_scale: Any
    row: Any
    col: Any
    cross_row: Any  # cross_row_i * cross_col_j
    cross_col: Any
    slope: Any  # Operand over rows: -slope_i * |displacement|
    table: Any  # Toeplitz, or ()
    gathered: Any  # tuple of Gathered
    axes: Any  # Axes, or ()
    softcap: Any
    mask: Any  # Mask, or ()
    seeds: Any  # [batch, heads] int64; None: no dropout
    dropped: Any  # the threshold of the hash
    boost: Any  # 1 / (1 - dropout)
    sink: Any  # Operand with step 0, or ()


class Known(Given):
    """The same, with what the compiler sees of it (`launch.look_at`) found already."""

    _fields = Given._fields  # Triton looks for them in the class itself
    seen: Any = None


class Sums(NamedTuple):
    """Where sums of dS go, each [batch, heads, q_len or k_len] float32; None: not wanted."""

    fix: Any  # what weights of a row must be multiplied by to make good the rounding of its log-sum-exp; float32 only
    outside: Any  # not a sum: the weight that a row has outside of this problem's keys; None: nothing
    plain: Any  # sum of dS
    scale: Any  # of dS times q·k
    cross: Any  # of dS times the other factor of a cross term
    slope: Any  # of -dS times |displacement|
    gate: Any  # of dS times the table
    left: Any  # of dS where the table is constant: displacement >= reach
    right: Any  # displacement <= -reach
    down: Any  # of dS over keys of one line: [columns of tiles, batch, heads, y_i, y_j, x_i]
    across: Any  # over keys of one column: [batch, heads, x_i, y_i, x_j]
