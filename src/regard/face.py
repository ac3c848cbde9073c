"""What a lazy A answers when it is treated as a tensor: its sizes, `detach` and `to`; else, what to call instead.

Programs that were written for stored weights (`outputs.attentions`) hand them on, move and detach them. A can do that
without being computed: its description is copied, with every tensor in it detached or moved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .position import Bound

if TYPE_CHECKING:
    from typing_extensions import Self

    from .description import Description


class TensorFace:
    """Base of AttentionMatrix: the part of a tensor's face that needs no numbers."""

    _description: Description
    _selection: tuple
    _dropped: tuple[bool, bool]
    _seen: list | None

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return self._description.q.dtype

    @property
    def device(self) -> torch.device:
        return self._description.q.device

    @property
    def ndim(self) -> int:
        return 4 - sum(self._dropped)

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for _, t in self._description.tensors())

    def detach(self) -> Self:
        """The same A, from which no gradient flows back. It shares q, k and all parameters with this one."""
        return self._with(lambda name, t: t.detach())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """A of the same q and k on another device, or in another dtype: they are cast, and weights come from that."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        if (device, dtype) == (self.device, self.dtype):
            return self
        if not dtype.is_floating_point:
            raise TypeError(f"to: weights are floating-point numbers, found {dtype}; call A.dense() for a tensor")
        vectors = {id(x) for x in _vectors(self._description)}

        def move(name: str, t: Tensor) -> Tensor:
            return t.to(device, dtype if id(t) in vectors else t.dtype, non_blocking=non_blocking)

        return self._with(move)

    def _with_batch_axis(self) -> Self:
        """A[b][None]: the batch axis again."""
        if not self._dropped[0]:
            raise IndexError(f"index: expected whole numbers or {self.shape[0]} booleans, found None")
        return type(self)(self._description, self._selection, (False, self._dropped[1]), self._seen)  # type: ignore[call-arg]

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> Self:
        return self.to(device)

    def float(self) -> Self:
        return self.to(torch.float32)

    def double(self) -> Self:
        return self.to(torch.float64)

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)

    def _with(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A of a copy of the description, in which each tensor is what `change` makes of it."""
        memo: dict[int, Any] = {id(t): change(name, t) for name, t in self._description.tensors()}
        seed = self._description.seed
        if seed is not None:
            memo[id(seed)] = change("seed", seed)
        return type(self)(copy.deepcopy(self._description, memo), self._selection, self._dropped)  # type: ignore[call-arg]

    def __getattr__(self, name: str) -> Any:
        """What a tensor has and A has not: say what to call instead."""
        if not name.startswith("_") and hasattr(Tensor, name):
            raise AttributeError(f"A is lazy and has no {name}: {INSTEAD}")
        raise AttributeError(f"{type(self).__name__} has no {name}")


#: said wherever a tensor is expected and A is given
INSTEAD = (
    "multiply it (A @ v), index it (A[b, h, i, j]), summarise it (A.topk, A.heatmap, ...), or make it dense on purpose "
    "(A.dense())"
)


def _vectors(description: Description) -> list[Tensor]:
    """q, k and what stands in for them in a term: the tensors whose dtype is A's."""
    found = [description.q, description.k]
    for term in description.terms:
        if isinstance(term, Bound):
            found += [x for x in (term.query, term.key) if x is not None]
    return found
