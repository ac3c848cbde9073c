"""Masks of transformers as descriptions: what travels through a model instead of an N x N tensor.

`describe` is what transformers calls to make a mask. It reads off the function of indices what it says (symbols.py) and
adds the padding. Only what cannot be described is asked for every pair, and the log says so.

`Described` is what models hand on from layer to layer. It has the face that they need (shape, slices of whole axes,
`to`), and `read` turns whatever reaches an attention module into what `regard.attention` takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..features import Clipped, Constant
from ..masks import Mask, _And, _Causal, _Dense, _Lengths, _Not, _Or, _Same, _Window, dense, lengths
from ..position import FromKey, FromQuery, Position
from .symbols import Undescribed, found

if TYPE_CHECKING:
    from ..matrix import AttentionMatrix

log = logging.getLogger("regard")


class Described:
    """A mask as a description, where transformers would put a tensor [batch, 1, q_len, k_len].

    mask      which keys a query may look at; None: all
    q_start   the place of the first query in the sequence: a number, or one in a tensor (static caches)
    k_start   the place of the first key
    """

    ndim = 4
    dtype = torch.bool
    is_regard_mask = True

    def __init__(
        self, mask: Mask | None, q_start: int | Tensor, k_start: int, size: tuple[int, int, int], device: Any,
        packed: bool = False,
    ):  # fmt: skip
        self.mask, self.q_start, self.k_start = mask, q_start, k_start
        self.batch, self.q_len, self.k_len = size
        self.device, self.packed = device, packed

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.q_len, self.k_len))

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return 4

    def to(self, *args: Any, **kwargs: Any) -> Described:
        """Itself, or its rows of ids and booleans on another device. A description has no dtype to change."""
        places = [x for x in (*args, kwargs.get("device")) if isinstance(x, (str, int, torch.device, Tensor))]
        if not places:
            return self
        device = places[0].device if isinstance(places[0], Tensor) else torch.device(places[0])
        if device == self.device:
            return self
        q_start = self.q_start.to(device) if isinstance(self.q_start, Tensor) else self.q_start
        mask = None if self.mask is None else _each(self.mask, lambda x, side: x.to(device))
        return Described(mask, q_start, self.k_start, (self.batch, self.q_len, self.k_len), device, self.packed)

    def contiguous(self) -> Described:
        return self

    def __len__(self) -> int:
        return self.batch

    def __bool__(self) -> bool:
        raise TypeError("a mask is not true or false: compare it with None")

    def __getitem__(self, index: Any) -> Described:
        """Whole axes, or the first keys: what models cut masks down to ([:, :, :, :k_len])."""
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given = (*given[:at], *(slice(None),) * (5 - len(given)), *given[at + 1 :])
        given = (*given, *(slice(None),) * (4 - len(given)))
        for part, length in zip(given[:3], self.shape[:3], strict=True):
            if not _from_the_first(part) or (part.stop is not None and part.stop < length):
                raise self._refusal(f"[{index}]")
        if len(given) != 4 or not _from_the_first(given[3]):
            raise self._refusal(f"[{index}]")
        stop = given[3].stop
        return self if stop is None or stop >= self.k_len else self.first_keys(stop)

    def first_keys(self, count: int) -> Described:
        """The same for the first keys only. Rows of ids and booleans are cut with the keys."""

        def cut(x: Tensor, side: str) -> Tensor:
            whole = side == "q" or not side or (side == "pairs" and x.shape[-1] == 1)
            return x if whole else x[..., :count]

        mask = None if self.mask is None else _each(self.mask, cut)
        return Described(mask, self.q_start, self.k_start, (self.batch, self.q_len, count), self.device, self.packed)

    def _refusal(self, what: str) -> TypeError:
        return TypeError(
            f"{what} of a mask that regard keeps as a description ({self!r}): call dense() on it for a tensor "
            "[batch, 1, q_len, k_len], True where a query may look"
        )

    def __add__(self, other: Any) -> Any:
        raise self._refusal("a sum")

    __radd__ = __and__ = __or__ = __mul__ = __add__

    def __invert__(self) -> Hidden:
        return Hidden(self)

    def blind(self) -> Tensor:
        """[batch, 1, q_len], True for queries that may look at nothing."""
        return self._all_alike().lse == -torch.inf

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(self._refusal(name)))

    def dense(self) -> Tensor:
        """[batch, 1, q_len, k_len], True where a query may look. Takes N x N booleans."""
        return self._all_alike().logits.dense(force=True) > -torch.inf

    def _all_alike(self) -> AttentionMatrix:
        """An A in which a query looks at all keys alike that the mask shows it."""
        from ..matrix import attention

        q, k = (torch.zeros(self.batch, 1, n, 1, device=self.device) for n in (self.q_len, self.k_len))
        return attention(q, k, mask=self.mask, q_start=self.starts[0], k_start=self.k_start)

    @property
    def starts(self) -> tuple[int | Tensor, int]:
        return self.q_start, self.k_start

    def __repr__(self) -> str:
        return f"Described({'all' if self.mask is None else self.mask}, {self.batch} x {self.q_len} x {self.k_len})"


class Hidden:
    """The pairs that a description hides, as a model asks for them: torch.all(~mask, dim=-1), and nothing else."""

    def __init__(self, shown: Described):
        self.shown = shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        given = {"dim": args[1]} if len(args) == 2 else kwargs or {}
        if func is not torch.all or given != {"dim": -1} or len(args) > 2:
            raise args[0].shown._refusal(f"{getattr(func, '__name__', func)} of what is hidden")
        return args[0].shown.blind()


def _from_the_first(part: Any) -> bool:
    """A slice from the beginning on, of every entry, not counted from the end."""
    plain = isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)
    return plain and (part.stop is None or part.stop >= 0)


def _each(mask: Mask, change: Callable[[Tensor, str], Tensor]) -> Mask:
    """The same mask with each of its tensors changed; `change` is told whose numbers they are: "q", "k" or "pairs"."""
    if isinstance(mask, _And):
        return _And(tuple(_each(part, change) for part in mask.parts()))
    if isinstance(mask, _Or):
        return _Or(tuple(_each(part, change) for part in mask.parts()))
    if isinstance(mask, _Not):
        return ~_each(mask.part, change)
    if isinstance(mask, _Same):
        return _Same(change(mask.q_ids, "q"), change(mask.k_ids, "k"), mask.name)
    if isinstance(mask, _Dense):
        return dense(change(mask.values, "pairs"))
    if isinstance(mask, _Lengths):
        return lengths(change(mask.count, ""), None if mask.queries is None else change(mask.queries, ""))
    return mask


# What an attention module is given, as what regard.attention takes


class Read(NamedTuple):
    """A mask as arguments of `attention`: attention(q, k, mask=..., q_start=..., k_start=..., position=...)."""

    mask: Mask | None = None
    q_start: int | Tensor = 0
    k_start: int = 0
    bias: Position | None = None  # what an additive mask adds besides hiding

    def also(self, mask: Mask | None) -> Read:
        """With another mask beside it."""
        if mask is None:
            return self
        return self._replace(mask=mask if self.mask is None else self.mask & mask)


def read(attention_mask: Any, q_len: int, k_len: int) -> Read:
    """Whatever a model hands to its attention (None, a description, a boolean or an additive tensor)."""
    if attention_mask is None:
        return Read()
    if isinstance(attention_mask, Described):
        if k_len > attention_mask.k_len:
            raise ValueError(f"attention_mask: {attention_mask!r} is for {attention_mask.k_len} keys, found {k_len}")
        if k_len < attention_mask.k_len:
            attention_mask = attention_mask.first_keys(k_len)
        return Read(attention_mask.mask, *attention_mask.starts)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor or None, found {type(attention_mask).__name__}")
    values = attention_mask
    if values.dim() == 2:  # [batch, k_len], as tokenizers make them
        return Read(of_keys(values[:, :k_len].bool(), 0))
    if values.dim() == 3:
        values = values.unsqueeze(1)
    if values.dim() != 4:
        raise ValueError(f"attention_mask: expected two to four axes, found shape {list(values.shape)}")
    values = values[..., :k_len] if values.shape[-1] > k_len else values
    if values.dtype == torch.bool:
        return Read(dense(values))
    if not values.dtype.is_floating_point:
        raise TypeError(f"attention_mask: expected booleans or numbers to add to the logits, found {values.dtype}")
    return additive(values, q_len, k_len)


def additive(values: Tensor, q_len: int, k_len: int) -> Read:
    """Numbers [batch or 1, heads or 1, q_len or 1, k_len] to add to the logits: the very negative ones hide a key."""
    hidden = values <= torch.finfo(values.dtype).min / 2
    plain = not torch.compiler.is_compiling() and not values.requires_grad
    if plain and not bool(hidden.any()):
        mask = None
    else:
        mask = dense(~hidden)
    if plain and bool((hidden | (values == 0)).all()):
        return Read(mask)
    return Read(mask, bias=bias_term(values.masked_fill(hidden, 0.0), q_len, k_len))


def bias_term(values: Tensor, q_len: int, k_len: int, q_start: int | Tensor = 0, k_start: int = 0) -> Position:
    """A ready bias [batch or 1, heads or 1, q_len or 1, k_len] as a term, with its gradient.

    The same for every query, it is read from the keys. Otherwise each query reads its own row by displacement: a view
    of the bias with its keys the other way round, so that it is kept once more and not twice over. To multiply or look
    at such an A takes (q_len + k_len)² numbers: adapters that describe how the bias is made do without.
    """
    if values.shape[-2] == 1:
        one = torch.ones(1, 1, 1, dtype=values.dtype, device=values.device)
        return FromKey(Constant(), weight=one).bind(key=values.mT)
    say_once("a bias is handed over for every pair: it takes N x N, and its A is slow to look at; no adapter knows it")
    # displacements reach from -right to left; entry right + i - j of query i is its bias for key j
    shift = q_start - k_start
    if isinstance(shift, Tensor):  # a static cache: anywhere among the keys
        left, right = q_len + k_len - 1, k_len - 1
    else:
        left, right = max(q_len - 1 + shift, 0), max(k_len - 1 - shift, 0)
        if left + right + 1 == q_len + k_len - 1:
            # entry d of query i is for key k_len - 1 + i - d, and lies there when row i is moved i places to the left;
            # entries that belong to no key are its neighbours', and no pair reads them
            turned = values.expand(*values.shape[:2], q_len, k_len).flip(-1).contiguous()
            steps = (*turned.stride()[:2], k_len - 1, 1)
            by_displacement = turned.as_strided((*turned.shape[:2], q_len, q_len + k_len - 1), steps)
            return FromQuery(Clipped(left, right)).bind(query=by_displacement)
    rows = torch.arange(q_len, device=values.device)[:, None] + shift
    j = rows + right - torch.arange(left + right + 1, device=values.device)
    by_displacement = values.gather(-1, j.clamp(0, k_len - 1).expand(*values.shape[:2], -1, -1))
    return FromQuery(Clipped(left, right)).bind(query=by_displacement.masked_fill((j < 0) | (j >= k_len), 0.0))


_said: set[str] = set()


def say_once(text: str) -> None:
    """A warning in the log, the first time it is due."""
    if not torch.compiler.is_compiling() and text not in _said:
        _said.add(text)
        log.warning(text)


# What transformers calls to make a mask


def of_keys(seen: Tensor, k_start: int) -> Mask | None:
    """A padding mask [batch, k_len], True for real keys, as a mask; None when all are."""
    if torch.compiler.is_compiling():
        return dense(seen[:, None, None, :])
    count = seen.sum(-1)
    k_len = seen.shape[-1]
    if bool((count == k_len).all()):
        return None
    at = torch.arange(k_len, device=seen.device)
    if torch.equal(seen, at < count[:, None]):
        return lengths(count + k_start)
    first = k_len - count
    if torch.equal(seen, at >= first[:, None]) and seen.device.type == "cpu":
        return ~lengths(first + k_start)  # compiled on the CPU; kernels for GPUs know no ~, but take a row of booleans
    return dense(seen[:, None, None, :])


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Described:
    """What transformers calls to make a mask: a description of it."""
    if isinstance(attention_mask, Described):  # made before, for generation with a static cache
        return attention_mask
    compiling = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone().reshape(1).long()  # the cache counts on in the same tensor
        if q_offset.device.type == "cpu" and not compiling:
            q_offset = int(q_offset)
    device = torch.device(device)
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    where = (batch_size, q_length, kv_length, q_offset, kv_offset, device)
    packed = False
    try:
        mask = found(mask_function, *where)
        packed = mask is not None and _has_documents(mask)
    except Undescribed as reason:
        say_once(f"a mask function of transformers ({mask_function.__qualname__}) is asked for every pair: {reason}")
        mask = dense(_every_pair(mask_function, *where, use_vmap=kwargs.get("use_vmap", False)))
    if mask is not None and not compiling:
        mask = simplified(mask, q_length, kv_length, q_offset, kv_offset)
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if seen.shape[-1] < kv_length:  # a static cache: keys that are not written yet
            seen = torch.nn.functional.pad(seen, (0, kv_length - seen.shape[-1]))
        padding = of_keys(seen, kv_offset)
        if padding is not None:
            mask = padding if mask is None else mask & padding
    return Described(mask, q_offset, kv_offset, (batch_size, q_length, kv_length), device, packed)


def _has_documents(mask: Mask) -> bool:
    return isinstance(mask, _Same) or any(_has_documents(part) for part in mask.parts())


def _every_pair(
    function: Callable, batch: int, q_len: int, k_len: int, q_start: Any, k_start: int, device: Any, use_vmap: bool
) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    made = sdpa_mask(
        batch_size=batch, q_length=q_len, kv_length=k_len, q_offset=q_start, kv_offset=k_start, mask_function=function,
        allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
    )  # fmt: skip
    assert made is not None
    return made


def simplified(mask: Mask, q_len: int, k_len: int, q_start: int | Tensor, k_start: int) -> Mask | None:
    """Without what hides nothing at these lengths: a causal mask for the last query, a window wider than the keys."""
    if isinstance(mask, _And):
        parts = [simplified(part, q_len, k_len, q_start, k_start) for part in mask.parts()]
        left = [part for part in parts if part is not None]
        return None if not left else left[0] if len(left) == 1 else _And(tuple(left))
    if not isinstance(mask, (_Causal, _Window)) or isinstance(q_start, Tensor) or not q_len or not k_len:
        return mask
    lo: Any
    hi: Any
    lo, hi = (0, None) if isinstance(mask, _Causal) else (mask.lo, mask.hi)
    least, most = q_start - (k_start + k_len - 1), q_start + q_len - 1 - k_start
    hides = (lo is not None and least < lo) or (hi is not None and most > hi)
    return mask if hides else None
