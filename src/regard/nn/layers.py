"""Attention with its projections, the feed-forward network, and the block made of both.

    Q = X W_Q    K = M W_K    V = M W_V    y = concat over heads of (A V) W_O        M = X unless a memory is given

A is `regard.attention(Q, K, ...)` with any description, and comes back with `look=True`: it is lazy, so looking costs
nothing until it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import Cache, LayerStep, Run, allows, needs_whole, sees_ahead, sees_back
from ..geometry import Geometry
from ..masks import Mask, lengths
from ..matrix import AttentionMatrix, attention
from ..position import Position
from ..scores import Score
from ..watching import attended, watched
from .recipe import Positions, make_position

#: what `Attention.remember` makes of a memory: its keys and values
Remembered = tuple[Tensor, Tensor]


#: rows up to which `project` cuts a product, and the least weights it is worth it for
FEW_ROWS, MANY_WEIGHTS = 4, 1 << 16


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. On a CPU, few rows (a decoding step) are multiplied by a part of W on each core.

    There a product with one row is limited by how fast W is read, and PyTorch's reads it with one core: as a batch of
    products, one for each part of the outputs, it took 0.3 to 0.5 of the time (float32, two cores).
    """
    few = 0 < x.numel() <= FEW_ROWS * weight.shape[1]
    if not few or weight.numel() < MANY_WEIGHTS or x.device.type != "cpu" or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    parts = torch.get_num_threads()
    tracks = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if parts < 2 or tracks or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, weight, bias)
    rows, even = x.reshape(-1, weight.shape[1]), len(weight) // parts * parts
    cut = weight[:even].unflatten(0, (parts, -1))
    y = torch.bmm(cut, rows.mT.expand(parts, -1, -1)).flatten(0, 1).mT  # [rows, outputs]
    if even < len(weight):
        y = torch.cat([y, nn.functional.linear(rows, weight[even:])], dim=-1)
    y = y.contiguous() if bias is None else torch.add(y, bias).contiguous()
    return y.reshape(*x.shape[:-1], len(weight))


class Linear(nn.Linear):
    """A Linear by `project`."""

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


class Attention(nn.Module):
    """Self-attention, or cross-attention when a memory is given: `query`, `key`, `value` and `output` are the W.

    dim         of x and of the result; `memory_dim` of the memory (dim unless given)
    kv_heads    key and value heads, fewer than `heads` for grouped or multi-query attention
    head_dim    of queries and keys (dim / heads unless given); `v_dim` of values (head_dim unless given)
    position    a term, a name or Recipe, or a function of (heads, head_dim) that makes a term
    mask        always applied; a call may add one
    sink        a learned logit a head that takes weight and gives no value
    dropout     of the weights, while training
    The rest is `regard.attention`'s.
    """

    position: Position | None

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_dim: int | None = None,
        memory_dim: int | None = None,
        position: Positions = None,
        mask: Mask | None = None,
        geometry: Geometry | tuple[Geometry, Geometry] | None = None,
        score: Score | None = None,
        scale: float | Tensor | None = None,
        softcap: float | None = None,
        sink: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        engine: str | None = None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        for name, count in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: expected a positive number, found {count!r}")
        if heads % kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads ({heads}), found {kv_heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads: expected a divisor of dim ({dim}) or a head_dim, found {heads}")
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.v_dim = self.head_dim if v_dim is None else v_dim
        memory_dim = dim if memory_dim is None else memory_dim
        self.query = Linear(dim, heads * self.head_dim, bias=bias)
        self.key = Linear(memory_dim, kv_heads * self.head_dim, bias=bias)
        self.value = Linear(memory_dim, kv_heads * self.v_dim, bias=bias)
        self.output = Linear(heads * self.v_dim, dim, bias=bias)
        self.position = make_position(position, heads, self.head_dim)
        self.sink = nn.Parameter(torch.zeros(heads)) if sink else None
        self.mask, self.geometry, self.score, self.scale = mask, geometry, score, scale
        self.softcap, self.dropout, self.engine = softcap, dropout, engine
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            if bias:
                nn.init.zeros_(projection.bias)

    def remember(self, memory: Tensor) -> Remembered:
        """Keys and values of a memory, to be given instead of it: they are the same for every query."""
        return _heads(self.key(memory), self.kv_heads), _heads(self.value(memory), self.kv_heads)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Remembered | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | LayerStep | None = None,
        start: int | Tensor | None = None,
        look: bool = False,
    ) -> Any:
        """x [batch, q_len, dim] to [batch, q_len, dim]; with `look`, (that, A).

        memory   [batch, k_len, memory_dim] or what `remember` made of it: cross-attention
        mask     in addition to the layer's own
        cache    keys and values of earlier calls: x continues them
        start    the place of x's first token in the whole sequence, a number or one a batch row (0 unless given);
                 with a cache it is known
        """
        if isinstance(cache, Cache):
            if start is not None:
                raise ValueError("start: a cache knows where its sequences stand; leave it out")
            with cache.step(x.shape[0], x.shape[1]) as step:
                return self._attend(x, memory, mask, step.layer(0), step.start(x.device), look)
        return self._attend(x, memory, mask, cache, start, look)

    def _attend(
        self,
        x: Tensor,
        memory: Tensor | Remembered | None,
        mask: Mask | None,
        cache: LayerStep | None,
        start: int | Tensor | None,
        look: bool,
    ) -> Any:
        q = _heads(self.query(x), self.heads)  # [batch, heads, q_len, head_dim]
        k, v = memory if isinstance(memory, tuple) else self.remember(x if memory is None else memory)
        both = [m for m in (self.mask, mask) if m is not None]
        seen = None if not both else both[0] if len(both) == 1 else both[0] & both[1]
        start = 0 if start is None else start
        if cache is None:
            runs = [Run(k, v, 0 if memory is not None else start)]
        elif memory is not None:
            raise ValueError("cache: cross-attention has none; give `remember(memory)` as the memory instead")
        else:
            held = cache.put(k, v, reach=sees_back(seen), whole=look or watched() or needs_whole(seen))
            runs = held.runs
            if held.lengths is not None and sees_ahead(seen):
                seen = lengths(held.lengths) if seen is None else seen & lengths(held.lengths)
            if look or watched():  # A must stay true when the cache goes on: it looks at a copy
                runs = [Run(runs[0].k.clone(), runs[0].v, runs[0].start)]
        masks = [seen if cache is None or look or watched() else _needed(seen, q, run, start) for run in runs]
        parts = [self._matrix(q, run, masks[n], start, sink=n == 0) for n, run in enumerate(runs)]
        if len(parts) == 1:
            attended(self, parts[0], runs[0].v)
            y = parts[0] @ runs[0].v
        else:
            y = merge([(A @ run.v, A.lse) for A, run in zip(parts, runs, strict=True)])
        y = self.output(y.transpose(1, 2).flatten(-2))
        return (y, parts[0]) if look else y

    def _matrix(self, q: Tensor, run: Run, mask: Mask | None, start: int | Tensor, sink: bool) -> AttentionMatrix:
        return attention(
            q, run.k, score=self.score, scale=self.scale, position=self.position, mask=mask, geometry=self.geometry,
            q_start=start, k_start=run.start, softcap=self.softcap, sink=self.sink if sink else None,
            dropout=self.dropout if self.training else 0.0, engine=self.engine,
        )  # fmt: skip

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}", f"v_dim={self.v_dim}"]
        return ", ".join(parts if self.mask is None else [*parts, f"mask={self.mask}"])


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * dim] to [batch, heads, length, dim], a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _needed(mask: Mask | None, q: Tensor, run: Run, start: int | Tensor) -> Mask | None:
    """The mask, or None where it hides nothing: a single query, the last of all, sees every key before it."""
    if isinstance(start, Tensor) or isinstance(run.start, Tensor):
        return mask
    first = start - run.start
    return None if allows(mask, first - run.k.shape[2] + 1, first + q.shape[2] - 1) else mask


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Products over several runs of keys, each with its log-sum-exp, as the product over all keys.

    y = Σ_r exp(lse_r - lse) y_r,  lse = log Σ_r exp(lse_r)
    """
    each = torch.stack([lse for _, lse in parts])
    total = each.logsumexp(0)
    total = total.masked_fill(total == -torch.inf, 0.0)  # a row that sees nothing: zeros
    shares = torch.exp(each - total).unsqueeze(-1)
    mixed = sum(share * y.to(share.dtype) for share, (y, _) in zip(shares, parts, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(parts[0][0].dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "swiglu": nn.functional.silu,
}


class FeedForward(nn.Module):
    """down(activation(up(x))), each token by itself; "swiglu" multiplies by a second projection, `gate`."""

    def __init__(self, dim: int, hidden: int | None = None, *, activation: str = "gelu", bias: bool = True):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, found {activation!r}")
        hidden = 4 * dim if hidden is None else hidden
        self.activation = activation
        self.up = Linear(dim, hidden, bias=bias)
        self.gate = Linear(dim, hidden, bias=bias) if activation == "swiglu" else None
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is not None:
            return self.down(ACTIVATIONS[self.activation](self.gate(x)) * up)
        return self.down(ACTIVATIONS[self.activation](up))


class Block(nn.Module):
    """x + attention(norm(x)), then (with a memory) x + cross(norm(x), memory), then x + feed_forward(norm(x)).

    norm        "pre" normalises what goes into each part, "post" the sum that comes out of it
    cross       the block also looks at a memory, of `memory_dim`
    dropout     of what each part adds; `attention_dropout` of the weights of A
    The rest is Attention's and FeedForward's. Position, mask and geometry belong to the self-attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        cross: bool = False,
        memory_dim: int | None = None,
        hidden: int | None = None,
        activation: str = "gelu",
        norm: str = "pre",
        norm_eps: float = 1e-5,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        position: Positions = None,
        mask: Mask | None = None,
        geometry: Geometry | tuple[Geometry, Geometry] | None = None,
        sink: bool = False,
        **attention: Any,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm: expected 'pre' or 'post', found {norm!r}")
        attention |= {"bias": bias, "dropout": attention_dropout}
        self.norm = norm
        self.attention = Attention(dim, heads, position=position, mask=mask, geometry=geometry, sink=sink, **attention)
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.cross = Attention(dim, heads, memory_dim=memory_dim, **attention) if cross else None
        self.cross_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias) if cross else None
        self.feed_forward = FeedForward(dim, hidden, activation=activation, bias=bias)
        self.feed_forward_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Remembered | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: Cache | LayerStep | None = None,
        start: int | Tensor | None = None,
        look: bool = False,
    ) -> Any:
        """x [batch, q_len, dim] to the same; with `look`, (that, A, A of the cross-attention or None)."""
        if (memory is None) != (self.cross is None):
            raise ValueError(
                "memory: this block was made without cross-attention" if self.cross is None else
                "memory: this block has cross-attention; give it something to look at"
            )  # fmt: skip

        def own(y: Tensor) -> Any:
            return self.attention(y, mask=mask, cache=cache, start=start, look=look)

        x, A = self._add(x, own, self.attention_norm, look)
        B = None
        if self.cross is not None:
            across = self.cross

            def other(y: Tensor) -> Any:
                return across(y, memory, mask=memory_mask, start=start, look=look)

            assert self.cross_norm is not None
            x, B = self._add(x, other, self.cross_norm, look)
        x, _ = self._add(x, self.feed_forward, self.feed_forward_norm, False)
        return (x, A, B) if look else x

    def _add(
        self, x: Tensor, part: Callable[[Tensor], Any], norm: nn.Module, look: bool
    ) -> tuple[Tensor, AttentionMatrix | None]:
        found = part(norm(x) if self.norm == "pre" else x)
        y, A = found if look else (found, None)
        x = x + self.drop(y)
        return (x if self.norm == "pre" else norm(x)), A


def initialise(stack: nn.Module, layers: int) -> None:
    """Normal weights of standard deviation 1 / sqrt(3 fan-in) (0.02 at 768), as small as PyTorch's own.

    What is added to the residual stream is smaller still, so that depth does not swell it.
    """
    for name, parameter in stack.named_parameters():
        if ".position." in name:
            continue  # terms know how to begin
        if name.endswith("weight") and parameter.dim() == 2:
            into_stream = name.endswith(("output.weight", "down.weight"))
            std = (3 * parameter.shape[-1]) ** -0.5
            nn.init.normal_(parameter, std=std / math.sqrt(2 * layers) if into_stream else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
