"""The engines as PyTorch operators, so that `torch.compile`, `torch.export` and autograd see one opaque call.

A plan travels as text, its tensors as a list; nothing about lengths is in the text. Gradients of gradients refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..normal import Form, Problem, decode, plain_tuple, product_buffer, wide
from ..plan import by_definition, definition, engine_module, plan, plan_spec
from ..summaries import TopK


def attend(problem: Problem, v: Tensor, engine: str | None) -> tuple[Tensor, Tensor]:
    """(A @ v, lse) by the planned engine, differentiable in q, k, v and every floating operand."""
    if by_definition(engine):
        return definition().forward(problem, v)
    tensors = [problem.q, problem.k, v, *problem.operands]
    if not torch.compiler.is_compiling():
        _refuse_tangents(tensors)
    spec = spec_of(problem, engine)
    if _nobody_watches(tensors):  # an operator costs as much as a short product
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            rest = problem.starts, problem.scale, spec
            return _Product.apply(problem.q, problem.k, v, rest, *problem.operands)
        return engine_module(decode(spec)[0]).forward(problem, v)
    return forward(problem.q, problem.k, v, problem.operands, list(problem.starts), problem.scale, spec)


def _nobody_watches(tensors: list[Tensor]) -> bool:
    """No graph, transform or dispatch mode would see the operator."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


class _Product(torch.autograd.Function):
    """The operator's gradient where nobody watches: the same, for a third of what an operator takes in Python."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple, *operands: Tensor) -> tuple[Tensor, Tensor]:
        starts, scale, spec = rest
        engine, form = decode(spec)
        out, lse = engine_module(engine).forward(_problem(q, k, operands, starts, scale, form), v)
        ctx.save_for_backward(q, k, v, out, lse, *operands)
        ctx.set_materialize_grads(False)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *operands = ctx.saved_tensors
        starts, scale, spec = ctx.rest
        needs = list(ctx.needs_input_grad[4:])
        engine, form = decode(spec)
        if d_lse is None:  # as mostly
            d_lse = getattr(engine_module(engine), "zeros_like", torch.zeros_like)(lse)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if torch.is_grad_enabled():  # a graph of this gradient is asked for: the operator says what is to be said of it
            grads = backward(q, k, v, out, lse, d_out, d_lse, operands, needs, list(starts), scale, spec)
            d_q, d_k, d_v, *some = grads
            found = [g if need else None for g, need in zip(some, needs, strict=True)]
            return d_q, d_k, d_v, None, *found
        problem = _problem(q, k, operands, starts, scale, form)
        d_q, d_k, d_v, found = engine_module(engine).backward(problem, v, out, lse, d_out, d_lse, needs)
        return d_q, d_k, d_v, None, *found


def _refuse_tangents(tensors: list[Tensor]) -> None:
    """Forward-mode derivatives would be lost in the operator: say so rather than give zeros."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors if x.is_floating_point()):
        raise RuntimeError("regard: forward-mode derivatives of A @ v are not available; use engine='reference'")


def settle(problem: Problem, engine: str | None, known: list[Tensor]) -> Problem:
    """Masks that depend on the scores, turned into chosen keys (eq. 17). `known` keeps them for the next use."""
    mask = problem.form.mask
    if mask is None or not _scored(mask):
        return problem
    operands = list(problem.operands)
    fresh = list(known)
    settled = _settle(mask, problem, operands, engine, fresh, bool(known))
    if not torch.compiler.is_compiling():
        known[:] = fresh
    return problem._replace(form=problem.form._replace(mask=settled), operands=operands)


def spec_of(problem: Problem, engine: str | None) -> str:
    if not torch.compiler.is_compiling():
        return plan(problem.form, problem.q.device, problem.q.dtype, engine).spec
    dtype = str(problem.q.dtype).removeprefix("torch.")
    return plan_spec(plain_tuple(problem.form), problem.q.device.type, dtype, engine)


def _scored(mask: tuple) -> bool:
    if mask[0] in ("and", "or", "not"):
        for part in mask[1:]:
            if _scored(part):
                return True
    return mask[0] == "nearest"


def _settle(
    mask: tuple, problem: Problem, operands: list[Tensor], engine: str | None, known: list[Tensor], done: bool
) -> tuple:
    if mask[0] in ("and", "or", "not"):
        parts = []
        for part in mask[1:]:
            parts.append(_settle(part, problem, operands, engine, known, done))
        return (mask[0], *parts)
    if mask[0] != "nearest":
        return mask
    if done:
        known.append(known.pop(0))
    else:
        context = problem._replace(form=problem.form._replace(mask=mask[2], dropout=0.0))
        picked = nearest(
            context.q.detach(), context.k.detach(), [x.detach() for x in context.operands],
            list(context.starts), context.scale, spec_of(context, engine), mask[1],
        )  # fmt: skip
        known.append(picked)
    operands.append(known[-1])
    return ("chosen", len(operands) - 1, False)


def _problem(
    q: Tensor, k: Tensor, operands: Sequence[Tensor], starts: Sequence[int], scale: float, form: Form
) -> Problem:
    return Problem(form, q, k, list(operands), (starts[0], starts[1]), scale)


@torch.library.custom_op("regard::forward", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], starts: Sequence[int], scale: float, spec: str
) -> tuple[Tensor, Tensor]:
    engine, form = decode(spec)
    return engine_module(engine).forward(_problem(q, k, operands, starts, scale, form), v)


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], starts: Sequence[int], scale: float, spec: str
) -> tuple[Tensor, Tensor]:
    problem = _problem(q, k, operands, starts, scale, Form())
    return product_buffer(problem, v), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


@torch.library.custom_op("regard::backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    operands: Sequence[Tensor],
    needs: Sequence[bool],
    starts: Sequence[int],
    scale: float,
    spec: str,
) -> list[Tensor]:
    """Gradients of q, k, v and each operand, in that order; an empty tensor where none is needed."""
    engine, form = decode(spec)
    problem = _problem(q, k, operands, starts, scale, form)
    d_q, d_k, d_v, rest = engine_module(engine).backward(problem, v, out, lse, d_out, d_lse, needs)
    found = [laid_like(g, x) for g, x in ((d_q, q), (d_k, k), (d_v, v))]
    return [*found, *(q.new_empty(0) if g is None else laid_like(g, x) for g, x in zip(rest, operands, strict=True))]


def laid_like(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient in the layout that a compiled graph was promised: that of empty_like."""
    promised = torch.empty_like(x, device="meta").stride()
    return grad if grad.stride() == promised else torch.empty_like(x, dtype=grad.dtype).copy_(grad)


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    operands, needs = rest[4], rest[5]
    like = [torch.empty_like(x) for x in (q, k, v)]
    return [*like, *(torch.empty_like(x) if need else q.new_empty(0) for x, need in zip(operands, needs, strict=True))]


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, operands, starts, scale, spec = inputs
    ctx.save_for_backward(q, k, v, *output, *operands)
    ctx.needs = [x.requires_grad for x in operands]
    ctx.rest = list(starts), scale, spec


def _grad(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple:
    q, k, v, out, lse, *operands = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    d_q, d_k, d_v, *rest = backward(q, k, v, out, lse, d_out, d_lse, operands, ctx.needs, *ctx.rest)
    kept = [g if need else None for g, need in zip(rest, ctx.needs, strict=True)]
    return d_q, d_k, d_v, kept, None, None, None


forward.register_autograd(_grad, setup_context=_setup)


def _refuse_twice(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("regard: the gradient of a gradient of A @ v is not available; use engine='reference' for it")


backward.register_autograd(_refuse_twice, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("regard::nearest", mutates_args=())
def nearest(
    q: Tensor, k: Tensor, operands: Sequence[Tensor], starts: Sequence[int], scale: float, spec: str, count: int
) -> Tensor:
    """Indices of the `count` largest logits of each query, -1 where there are fewer: [batch, heads, q_len, count]."""
    engine, form = decode(spec)
    problem = _problem(q, k, operands, starts, scale, form)
    top = TopK(count)
    (state,) = engine_module(engine).reduce(problem, [top])
    return top.finish(state, problem).indices


@nearest.register_fake
def _(
    q: Tensor, k: Tensor, operands: Sequence[Tensor], starts: Sequence[int], scale: float, spec: str, count: int
) -> Tensor:
    return q.new_empty(*q.shape[:3], count, dtype=torch.long)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "regard: vmap over A @ v is not available; put the mapped axis into the batch axis of q, k and v"
    )


for _operator in (forward, backward, nearest):
    _operator.register_vmap(_refuse_vmap)
