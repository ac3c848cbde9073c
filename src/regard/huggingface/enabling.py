"""enable and disable: find every attention module of a model, check all, then change all; and put everything back.

An attention module is done in one of two ways. If an adapter lists its class, the adapter takes its place (adapter.py).
If its code asks transformers' attention interface, its configuration is given our name (interface.py). A module that
computes attention by itself and that no adapter knows is refused, and then nothing is changed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from .adapter import Adapter, is_swapped, name_of, restore, swap
from .running import forget, notice, said

#: files of this package that hold no adapter
_NO_PATTERN = {"adapter", "enabling", "interface", "masks", "running", "sequence", "symbols"}


class Layer(NamedTuple):
    """One attention module, and who runs it."""

    path: str
    module: nn.Module
    adapter: type[Adapter] | None  # None: the attention interface

    @property
    def how(self) -> str:
        if self.adapter is None:
            return "attention interface"
        return f"adapter {self.adapter.__module__.rpartition('.')[2]}.{self.adapter.__name__}"

    @property
    def line(self) -> str:
        """What runs it, and why slowly if so."""
        slow = said(self.module)
        return f"{_class_of(self.module).__name__}, {self.how}" + (f"; slow here: {slow}" if slow else "")


class Enabled:
    """A model whose attention runs on regard: which layers, and how. As a context manager it disables at its end."""

    def __init__(self, model: nn.Module, layers: list[Layer]):
        self.model, self.layers = model, layers
        self._configs: list[tuple[Any, Any]] = []  # a configuration and the implementation it named
        self._swapped: list[nn.Module] = []

    def _change(self) -> None:
        """All of it or nothing."""
        from .interface import NAME, register

        register()
        try:
            for layer in self.layers:
                if layer.adapter is not None and not is_swapped(layer.module):
                    swap(layer.module, layer.adapter)
                    self._swapped.append(layer.module)
                forget(layer.module)
                self._foresee(layer)
            for config in configs_of(self.model):
                before = config._attn_implementation_internal
                if before != NAME:
                    self._configs.append((config, before))
                    config._attn_implementation_internal = NAME
        except BaseException:
            self.disable()
            raise

    def _foresee(self, layer: Layer) -> None:
        """Say that a layer will be slow, where that is known before it runs."""
        if layer.adapter is None or any(p.is_meta for p in layer.module.parameters()):
            return
        with torch.no_grad():
            sample = layer.adapter.sample(layer.module)
        if sample is not None:
            notice(layer.module, sample, sample.shape[-1])

    def disable(self) -> None:
        """Put back what this enabled, in reverse order."""
        while self._configs:
            config, before = self._configs.pop()
            config._attn_implementation_internal = before
        while self._swapped:
            restore(self._swapped.pop())
        if self.model.__dict__.get(_KEPT) is self:
            del self.model.__dict__[_KEPT]

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"Enabled({type(self.model).__name__}: {len(self.layers)} attention modules on regard)"

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        lines = [f"{type(self.model).__name__}: {len(self.layers)} attention modules on regard"]
        lines += [f"  {layer.path:<{width}}  {layer.line}" for layer in self.layers]
        return "\n".join(lines)


#: where a model keeps its Enabled: it is copied and pickled with the model
_KEPT = "_regard_enabled"


def enable(model: nn.Module) -> Enabled:
    """Have every attention module of `model` run on regard. Refuses, changing nothing, if there is one that cannot.

    Returns what was enabled: print it to see every layer. A model that is enabled already stays so, and the second
    Enabled undoes nothing. Configurations are changed where they are: a second model that shares this one's
    configuration object is enabled with it.
    """
    _need_transformers()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch module, found {type(model).__name__}")
    made = Enabled(model, find(model))
    made._change()
    if _KEPT not in model.__dict__:
        model.__dict__[_KEPT] = made
    return made


def enabled(model: nn.Module) -> Enabled:
    """The same, to be read in a `with`: `with enabled(model):`."""
    return enable(model)


def disable(model: nn.Module) -> None:
    """Give `model` its own attention back, bit by bit. Does nothing to a model that is not enabled."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch module, found {type(model).__name__}")
    kept = model.__dict__.get(_KEPT)
    if kept is not None:
        kept.disable()


def find(model: nn.Module) -> list[Layer]:
    """Every attention module of a model with who can run it; raises, naming them, if some cannot be run."""
    layers, refused = [], []
    for path, module in model.named_modules():
        adapter, reason = _who_runs(module)
        path = path or "(the model itself)"
        if reason is not None:
            refused.append(f"{path} ({_class_of(module).__name__}): {reason}")
        elif adapter is not Adapter:
            layers.append(Layer(path, module, adapter))
    if refused:
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise NotImplementedError(
            f"enable: {type(model).__name__} was left as it is, because of {'; '.join(refused[:5])}{more}"
        )
    if not layers:
        raise ValueError(f"enable: found no attention module of transformers in {type(model).__name__}")
    return layers


def _who_runs(module: nn.Module) -> tuple[type[Adapter] | None, str | None]:
    """An adapter, None for the interface or Adapter for what is no attention; and why it is refused, or None."""
    kind = _class_of(module)
    adapter = adapters().get(name_of(kind))
    if adapter is not None:
        return adapter, adapter.refuses(module)
    sort = _sort(kind)
    if sort == "interface":
        from .interface import REFUSED

        asks = next((name for name in REFUSED if f"{name}=" in _words(kind)), None)
        if asks is not None:
            return None, f"it hands over {asks} ({REFUSED[asks]}), which regard cannot describe"
        if not hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            return None, "it asks the attention interface but has no configuration to name an implementation in"
        return None, None
    if sort == "alone":
        return None, "it computes attention by itself, and no adapter knows it"
    return Adapter, None


def _class_of(module: nn.Module) -> type:
    """A module's own class, swapped or not."""
    kind: Any = type(module)
    return kind._regard_class if is_swapped(module) else kind


@cache
def adapters() -> dict[str, type[Adapter]]:
    """Every adapter by the names of the classes it takes: those of all files of this package."""
    found: dict[str, type[Adapter]] = {}
    for name in (info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if name in _NO_PATTERN:
            continue
        module = importlib.import_module(f".{name}", __package__)
        for kind in vars(module).values():
            if not (isinstance(kind, type) and issubclass(kind, Adapter) and kind.__module__ == module.__name__):
                continue
            for name in kind.classes:
                assert name not in found, f"{name}: both {found[name].__qualname__} and {kind.__qualname__} take it"
                found[name] = kind
    return found


#: what code that computes attention by itself calls
_BY_ITSELF = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}


#: files of transformers whose classes every model has among its bases
_MACHINERY = {
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.integrations.peft",
    "transformers.utils.hub",
}


@cache
def _sort(kind: type) -> str:
    """ "interface": it asks transformers' attention interface; "alone": it computes attention by itself; "other"."""
    words = _words(kind)
    if "ALL_ATTENTION_FUNCTIONS" in words:
        return "interface"
    if re.search("Attention|Attn", kind.__name__) and words & _BY_ITSELF:
        return "alone"
    return "other"


@cache
def _words(kind: type) -> frozenset[str]:
    """Every name that the code of a class uses, with that of the functions it calls by name in its own file."""
    words: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "torch" or base.__module__ in _MACHINERY or base is object:
            continue
        for function in vars(base).values():
            function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            mine = set(_names(code))
            words |= mine
            for name in mine:
                called = getattr(function, "__globals__", {}).get(name)
                if inspect.isfunction(called) and called.__module__ == base.__module__:
                    words |= set(_names(called.__code__))
    return frozenset(words)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            yield from (f"{x}=" for x in constant if isinstance(x, str))


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration that some module of the model holds, and those inside them; each once.

    T5's stacks hold copies, so that changing the model's own configuration would change nothing.
    """
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                add(getattr(config, name, None))

    for module in model.modules():
        add(module.__dict__.get("config"))
    return list(found.values())


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("regard.huggingface needs transformers: pip install 'regard[huggingface]'") from error
