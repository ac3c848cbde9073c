"""Recording a model: q, k, log-sum-exp and description of every A it makes, while it runs as it always does.

    with record(model, tokenizer=tokenizer) as trace:
        model(tokens)
    trace[2, 5].heatmap()

The layers tell of their A before they multiply with it (`regard.watching`). The recorder copies q and k, and takes the
log-sum-exp that the product leaves behind; nothing is computed twice. Models that are compiled run eagerly meanwhile.
A Hugging Face model is enabled for the length of the `with` if it is not already.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..matrix import AttentionMatrix
from ..watching import listening
from . import stored
from .keeping import Kept, to_host
from .looks import Trace
from .naming import group_of, is_cross
from .passes import Pass, normal
from .writing import document

log = logging.getLogger("regard")

#: arguments in which models are given tokens, and in which they are told which of them are real
IDS = ("input_ids", "decoder_input_ids", "tokens", "x", "source", "target")
REAL = ("attention_mask", "decoder_attention_mask", "lengths")


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
    folder: str | Path | None = None,
    values: bool = False,
    tokenizer: Any = None,
    tokens: Any = None,
) -> Iterator[Trace]:
    """Record what a model attends to, for the length of a `with`. The trace is filled when the `with` ends.

    layers     only these layers, by number, of every stack
    heads      only these heads, by number; the trace keeps their true numbers
    dtype      keep q and k in this dtype; the weights are then those of the rounded q and k
    memory     bytes that are kept in RAM; the rest goes to disk, in `folder` or where temporary files go
    values     keep the values, too
    tokenizer  names the tokens: one of transformers', or of `regard.models`
    tokens     the tokens, when the model is not given them: ids [batch, length], a list of labels, or a dictionary of
               those by stack ("encoder", "decoder")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    for name, chosen in (("layers", layers), ("heads", heads)):
        bad = [n for n in chosen or () if isinstance(n, bool) or not isinstance(n, int) or n < 0]
        if bad:
            raise ValueError(f"{name}: expected numbers from 0 on, found {bad[0]!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point dtype, found {dtype!r}")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 0):
        raise ValueError(f"memory: expected a number of bytes, found {memory!r}")
    recorder = Recorder(model, layers, heads, dtype, Kept(memory, folder), values)
    trace = Trace({}, recorder.kept)
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the compiler need not be imported
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(is_compiled(module) for module in model.modules()):
            log.info("record: the model is compiled; it runs eagerly while it is recorded")
        stack.enter_context(enabled(model))
        stack.enter_context(recorder.hooks())
        stack.enter_context(listening(recorder.attended))
        yield trace
    recorder.finish()
    if not recorder.spots:
        raise RuntimeError(
            "record: nothing was recorded: no layer of the model attended through regard inside the `with`"
        )
    if not any(spot.passes for spot in recorder.spots.values()):
        raise ValueError(f"layers: expected some of the model's {len(recorder.spots)} attention layers, found {layers}")
    trace._fill(document(recorder, tokenizer, tokens), recorder.own)


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def enabled(model: nn.Module) -> AbstractContextManager:
    """Regard inside a model of transformers, unless it is there already; nothing for other models."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not any(isinstance(module, transformers.PreTrainedModel) for module in model.modules()):
        return ExitStack()
    from ..huggingface import enabled as inside

    return inside(model)


class Spot:
    """A place in the model where it attends: a module, or one of several calls to the same."""

    def __init__(self, path: str, group: str, cross: bool, layer: int, heads: tuple[int, ...]):
        self.path, self.group, self.cross, self.layer, self.heads = path, group, cross, layer, heads
        self.passes: list[Pass] = []
        self.why: list[str] = []  # why each pass after the first is one of its own


class Recorder:
    """Listens to a model, and keeps what it hears."""

    def __init__(
        self, model: nn.Module, layers: Collection[int] | None, heads: Collection[int] | None,
        dtype: torch.dtype | None, kept: Kept, values: bool,
    ):  # fmt: skip
        self.model, self.layers, self.dtype, self.kept, self.values = model, layers, dtype, kept, values
        self.heads = None if heads is None else tuple(sorted(set(heads)))
        self.modules = {  # a compiled module is called what it was called before
            id(module): (".".join(part for part in name.split(".") if part != "_orig_mod"), module)
            for name, module in model.named_modules()
        }
        self.spots: dict[tuple[str, int], Spot] = {}
        self.own: list[Any] = []
        self.notes: list[str] = []
        self._depth = 0
        self._calls: dict[str, int] = {}
        self._counts: dict[tuple[str, bool], int] = {}
        self._ids: dict[str, dict[str, tuple[Tensor, Tensor | None]]] = {}
        self._moving: dict[str, bool] = {}
        self._pending: tuple[Pass, AttentionMatrix, Sequence[int]] | None = None

    # What the layers tell

    def attended(self, layer: nn.Module, A: AttentionMatrix, v: Tensor) -> None:
        found = self.modules.get(id(layer))
        if found is None or torch._C._current_graph_task_id() != -1:
            return  # another model's; or a checkpoint that is computed again for the backward pass
        self.settle()
        path, module = found
        spot = self._spot(path, module, A)
        if self.layers is not None and spot.layer not in self.layers:
            return
        if A._selection:
            raise ValueError(f"record: {path} multiplies a part of an A; it cannot be recorded")
        with torch.no_grad():
            self._take(spot, A, v)

    def _spot(self, path: str, module: nn.Module, A: AttentionMatrix) -> Spot:
        nth = self._calls.get(path, 0)
        self._calls[path] = nth + 1
        if (path, nth) not in self.spots:
            group, cross, count = group_of(path), is_cross(path, module), A.shape[1]
            layer = self._counts.get((group, cross), 0)
            self._counts[group, cross] = layer + 1
            heads = tuple(range(count)) if self.heads is None else self.heads
            if heads and heads[-1] >= count:
                raise ValueError(f"heads: expected numbers from 0 to {count - 1} ({path}), found {heads[-1]}")
            self.spots[path, nth] = Spot(path, group, cross, layer, heads)
        return self.spots[path, nth]

    def _take(self, spot: Spot, A: AttentionMatrix, v: Tensor) -> None:
        d = normal(A._description)
        some = None if len(spot.heads) == d.q.shape[1] else spot.heads
        pick = stored.Plain(d, self.kept.put_once, None, some).pick
        said = stored.plain(d, self.kept.put_once, self._keep_own, some)
        q, k, v = (pick(x, 1) for x in (d.q, d.k, v[:, :, : d.k.shape[2]]))
        last = spot.passes[-1] if spot.passes else None
        why, keys = "", None
        if last is not None:
            keys = to_host(k, self.dtype)
            why = last.continues(d, said, keys, spot.heads, self._moving.get(spot.group, False)) or ""
        if not spot.cross:
            self._moving[spot.group] = last is not None and not why
        if last is None or why:
            last = Pass(self.kept, self.own, d, said, spot.heads, spot.cross)
            spot.passes.append(last)
            spot.why.append(why)
        had = last.k.length
        first = had - ((_start(d.k_start) - _start(last.starts[1])) if had else 0)
        fresh = None
        if not last.k.names or k.shape[2] > first:
            fresh = to_host(k[:, :, first:], self.dtype) if keys is None else keys[:, :, first:].clone()
        news = to_host(v[:, :, first:], self.dtype) if self.values and fresh is not None else None
        last.take(to_host(q, self.dtype), fresh, news)
        ids, real = self._of(spot.path, d.q.shape[0], d.q.shape[2])
        last.tokens.append(ids)
        last.real.append(real)
        self._pending = last, A, spot.heads

    def _keep_own(self, x: Any) -> int:
        self.own.append(x)
        return len(self.own) - 1

    def settle(self) -> None:
        """Take the log-sum-exp that the last product left behind; where it left none, it is computed when asked for."""
        if self._pending is None:
            return
        last, A, heads = self._pending
        self._pending = None
        lse = A._lse
        if lse is not None and lse.shape[1] != len(heads):
            lse = lse.index_select(1, torch.tensor(heads, device=lse.device))
        # of rounded q and k the rows would not add up to one: their own is computed when it is asked for
        rounded = self.dtype is not None and self.dtype != A.dtype
        last.take_lse(None if lse is None or rounded else to_host(lse))

    def finish(self) -> None:
        self.settle()
        for spot in self.spots.values():
            if len(spot.passes) > 1 and any(spot.why):
                reasons = " and ".join(dict.fromkeys(why for why in spot.why if why))
                self.notes.append(f"{spot.path}: {len(spot.passes)} passes, for there were {reasons}")
        for note in self.notes:
            log.info("record: %s", note)

    # What the model is given

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Notice where a call begins, and what tokens it is given."""
        handles = []
        for path, module in self.modules.values():
            if not any(True for _ in module.children()) and module is not self.model:
                continue
            names = _names(module)
            asked = [name for name in (*IDS, *REAL) if name in names]

            def enter(
                _: nn.Module, args: tuple, kwargs: dict, path: str = path, names: list = names, asked: list = asked
            ) -> None:
                if self._depth == 0:
                    self._calls.clear()
                    self._ids.clear()
                self._depth += 1
                if asked:
                    given = {**dict(zip(names, args, strict=False)), **kwargs}
                    self._given(path, {name: given[name] for name in asked if given.get(name) is not None})

            def leave(*_: Any) -> None:
                self._depth -= 1

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _given(self, path: str, given: dict[str, Any]) -> None:
        """Remember the tokens a module is given, a decoder's own apart, and which of them are real."""
        for name in IDS:
            x = given.get(name)
            if not isinstance(x, Tensor) or x.dim() != 2 or x.is_floating_point() or x.dtype == torch.bool:
                continue
            stack = "decoder" if name == "decoder_input_ids" else ""
            mask, counts = given.get(f"{stack}_attention_mask".lstrip("_")), given.get("lengths")
            real = mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
            if counts is not None:
                real = torch.arange(x.shape[1]) < torch.as_tensor(counts).cpu()[:, None]
            self._ids.setdefault(path, {}).setdefault(stack, (x, real))

    def _of(self, path: str, batch: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """What the nearest module above was given for these queries: tokens, and whether they are real."""
        at, stack = path, "decoder" if "decoder" in path.split(".") else ""
        while at and at not in self._ids:
            at = at.rpartition(".")[0]
        found = self._ids.get(at, {})
        ids, real = found.get(stack) or found.get("") or (None, None)
        if ids is None or ids.shape != (batch, count):
            return None, None
        fits = real is not None and real.shape[0] == batch and real.shape[1] >= count  # with a cache, all of them
        return to_host(ids), to_host(real[:, -count:]) if fits and real is not None else None


def _start(start: int | Tensor) -> int:
    return int(start[0]) if isinstance(start, Tensor) else start


def _names(module: nn.Module) -> list[str]:
    """The names of a module's arguments, in order."""
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []
