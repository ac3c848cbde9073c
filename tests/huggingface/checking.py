"""What every test of a Hugging Face model asks: outputs, gradients and rows of A like eager's, and the model back.

The oracle is the model itself with eager attention in float64; the budget is twice what the same model with eager
attention loses in the dtype under test (tests/support.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support import all_within_budget
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard.huggingface
from regard import AttentionMatrix
from regard.huggingface.enabling import configs_of


def check_model(
    make: Callable[[], nn.Module],
    inputs: dict[str, Any],
    *,
    valid: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    gradients: bool = True,
    attentions: bool = True,
    layers: int | None = None,
) -> regard.huggingface.Enabled:
    """Compare a model on regard with itself on eager attention, and check that disable gives it back.

    make        a fresh small model with eager attention (its weights may be random: one copy serves all)
    inputs      its keyword arguments; floating-point ones are cast to the dtype
    valid       [batch, length], True for tokens that count: padding's own outputs are anybody's, and differ
    train       in training mode (set every dropout to 0 in the configuration)
    attentions  ask for `output_attentions` and compare every weight of every A
    layers      how many attention modules must have been enabled
    """
    plain = make().to(dtype).train(train)
    for config in configs_of(plain):
        assert config._attn_implementation_internal in ("eager", None), "make the model with eager attention"
    exact = copy.deepcopy(plain).double()
    before = snapshot(plain, inputs, attentions, valid)
    keys = list(plain.state_dict())
    enabled = regard.huggingface.enable(plain)
    assert layers is None or len(enabled.layers) == layers, str(enabled)
    assert list(plain.state_dict()) == keys
    found = results(plain, inputs, dtype, valid, gradients, attentions)
    regard.huggingface.disable(plain)
    assert list(plain.state_dict()) == keys
    after = snapshot(plain, inputs, attentions, valid)
    assert before.keys() == after.keys()
    for name in before:
        same = torch.equal if isinstance(before[name], Tensor) else lambda a, b: a == b
        assert same(before[name], after[name]), f"{name}: disable did not restore it"
    with InFloat64():
        want = results(exact, inputs, torch.float64, valid, gradients, attentions)
    near = results(plain, inputs, dtype, valid, gradients, attentions)
    for kind in want:
        assert want[kind].keys() == found[kind].keys(), f"{kind}: {want[kind].keys() ^ found[kind].keys()}"
        assert want[kind], f"no {kind} to compare"
        all_within_budget(found[kind], near[kind], want[kind])
    return enabled


class InFloat64(TorchFunctionMode):
    """Models cast to float32 here and there (norms, rotations, softmax). The oracle stays in float64 throughout."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def results(
    model: nn.Module,
    inputs: dict[str, Any],
    dtype: torch.dtype,
    valid: Tensor | None,
    gradients: bool,
    attentions: bool,
) -> dict[str, dict[str, Tensor]]:
    """Outputs, weights and gradients of every parameter, by name."""
    model.zero_grad()
    made = run(model, inputs, dtype, attentions)
    outputs = {name: masked(x, valid) for name, x in tensors(made) if "attentions" not in name}
    found = {"outputs": {name: x.detach() for name, x in outputs.items()}}
    if attentions:
        found["weights"] = {name: weights(A, valid) for name, A in matrices(made)}
    if gradients:
        loss = sum((x * steady(x)).sum() for x in outputs.values())
        loss.backward()
        found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype, attentions: bool) -> Any:
    cast = {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    torch.manual_seed(0)  # for models that draw numbers (masks of time, dropped layers)
    return model(**cast, **({"output_attentions": True} if attentions else {}))


def snapshot(model: nn.Module, inputs: dict[str, Any], attentions: bool, valid: Tensor | None) -> dict[str, Any]:
    """What must be the same, bit by bit, after disable."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        made = run(model, inputs, dtype, attentions)
    state: dict[str, Any] = {f"output {name}": x for name, x in tensors(made)}
    state |= {f"A {name}": x for name, x in matrices(made)}
    state["implementations"] = [config._attn_implementation for config in configs_of(model)]
    state["classes"] = [type(module) for module in model.modules()]
    return state


def tensors(made: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor of a model's output that is no attention, by name."""
    if isinstance(made, Tensor):
        if made.is_floating_point():
            yield name, made
    elif hasattr(made, "items"):
        for key, x in made.items():
            if "attentions" not in key:
                yield from tensors(x, f"{name}.{key}" if name else key)
    elif isinstance(made, (tuple, list)):
        for i, x in enumerate(made):
            yield from tensors(x, f"{name}[{i}]")


def matrices(made: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything under a name that says attentions."""
    if hasattr(made, "items"):
        for key, x in made.items():
            yield from matrices(x, f"{name}.{key}" if name else key)
    elif isinstance(made, (tuple, list)):
        for i, x in enumerate(made):
            yield from matrices(x, f"{name}[{i}]")
    elif "attentions" in name and made is not None:
        yield name, made


def weights(A: Any, valid: Tensor | None) -> Tensor:
    """All weights, with the rows of padding left out."""
    values = A.dense() if isinstance(A, AttentionMatrix) else A
    values = values.detach()
    if valid is not None and values.dim() == 4 and values.shape[::2] == valid.shape:
        values = values * valid[:, None, :, None]
    return values


def masked(x: Tensor, valid: Tensor | None) -> Tensor:
    """An output with what padding gives set to 0."""
    if valid is None or x.shape[:2] != valid.shape:
        return x
    return torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x, 0.0)


def steady(x: Tensor) -> Tensor:
    """The same numbers for the same shape: what outputs are weighed with before they are added up."""
    numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return numbers.to(x.dtype)
