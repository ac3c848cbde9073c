"""What every pattern of attention module shares: an adapter takes the place of a module's class, and gives it back.

An adapter is a mixin with a `forward`. Swapping makes a class (adapter, the module's own class) and puts it on the
module object: parameters, buffers, hooks, names in `state_dict` and `isinstance` stay what they were, only `forward` is
ours. Restoring puts the old class back, so that the module behaves bit by bit as before.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..matrix import AttentionMatrix
from ..watching import attended
from .running import notice


class Adapter:
    """One pattern of attention module, run on regard."""

    #: the classes it takes, as "t5.T5Attention" for transformers.models.t5.modeling_t5.T5Attention
    classes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def refuses(cls, module: nn.Module) -> str | None:
        """Why this module cannot be run on regard, in a sentence; None when it can."""
        return None

    @classmethod
    def sample(cls, module: nn.Module) -> AttentionMatrix | None:
        """An A of a few tokens with this module's terms, to ask what would run it; None where that needs its input."""
        return None

    def look(self, A: AttentionMatrix, v: Tensor) -> Tensor:
        """A @ v, told to who records."""
        attended(self, A, v)  # type: ignore[arg-type]
        notice(self, A, v.shape[-2])  # type: ignore[arg-type]
        return A @ v

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Copied and pickled as the adapter and the class it runs: what is made of both has no name to be found by."""
        kind: Any = type(self)
        adapter = kind.__mro__[1]
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _made_again, (adapter, kind._regard_class), state


def name_of(kind: type) -> str:
    """ "t5.T5Attention" for a class of transformers; module and name for any other."""
    parts = kind.__module__.split(".")
    inside = parts[:2] == ["transformers", "models"] and len(parts) >= 4
    return f"{parts[2]}.{kind.__qualname__}" if inside else f"{kind.__module__}.{kind.__qualname__}"


_made: dict[tuple[str, str], type] = {}


def _joined(adapter: type[Adapter], kind: type) -> type:
    """The class of both; the same one each time, for what is compiled is kept by class."""
    key = f"{adapter.__module__}.{adapter.__qualname__}", f"{kind.__module__}.{kind.__qualname__}"
    if key not in _made or _made[key].__mro__[1:3] != (adapter, kind):
        _made[key] = type(kind.__name__, (adapter, kind), {"__module__": kind.__module__, "_regard_class": kind})
    return _made[key]


def _made_again(adapter: type[Adapter], kind: type) -> Any:
    joined: Any = _joined(adapter, kind)
    return joined.__new__(joined)


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Adapter)


def swap(module: nn.Module, adapter: type[Adapter]) -> None:
    """Have `adapter` run this module."""
    module.__class__ = _joined(adapter, type(module))


def restore(module: nn.Module) -> None:
    """Give a swapped module its own class back."""
    kind: Any = type(module)
    module.__class__ = kind._regard_class
