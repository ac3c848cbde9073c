"""Who computes, said aloud: a layer that no fast engine of its device takes, and the term that is the reason.

The tiled engine runs every description, on any device, in memory linear in length; but it can be slower than a model's
own attention. What sends a layer there, or its gradient, is in the plan. It is asked when a model is enabled, where an
adapter can show an A of a few tokens before the model has run (`Adapter.sample`), and when a layer first attends to so
many keys. Either way the log warns, and the layer's line of `print(enabled)` says it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..matrix import AttentionMatrix
from ..normal import Form
from ..plan import Plan, engine_module
from .masks import say_once

#: what was found for a layer, by how many digits its number of keys has in base 2
_found: WeakKeyDictionary[nn.Module, dict[int, str | None]] = WeakKeyDictionary()


def slower(plan: Plan) -> str | None:
    """Why an engine that runs plain attention on this device does not run this, or not all of it; or None."""
    for name, reason in plan.refused:
        if engine_module(name).refuse(Form(), plan.device, plan.dtype) is None:
            return f"{reason}; the tiled engine runs it"
    if plan.remark is not None or plan.device != "cuda":
        return plan.remark
    # Kernels for GPUs read such a term, but its gradient they leave to the tiled engine's strips (triton.gradients):
    # DeBERTa trains at a tenth of its own speed, Wav2Vec2-BERT at a third (benchmarks/results/huggingface-gpu.md).
    content = [piece for piece in plan.form.pieces if piece.kind in ("query", "key") and piece.space == ("line",)]
    return f"{content[0].label}: no kernel for its gradient, so that training is slow" if content else None


def notice(module: nn.Module, A: AttentionMatrix, k_len: int) -> None:
    """Look at who runs a layer's A, once for each order of length, and warn if that is slow.

    k_len is told, for A would have to be rewritten for its kernel to say it, at every call.
    """
    if torch.compiler.is_compiling():
        return
    known, order = _found.setdefault(module, {}), k_len.bit_length()
    if order in known:
        return
    known[order] = reason = slower(A.plan)
    if reason is not None:
        say_once(f"{type(module).__name__} can be slower on regard than by itself: {reason}")


def said(module: nn.Module) -> str | None:
    """What was last found for a layer, for its line in a table."""
    reasons = [reason for reason in _found.get(module, {}).values() if reason is not None]
    return reasons[-1] if reasons else None


def forget(module: nn.Module) -> None:
    """Another device or type may change who runs it: look again."""
    _found.pop(module, None)
