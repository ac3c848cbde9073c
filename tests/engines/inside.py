"""Every access of a kernel lies inside one of the tensors it was given: watched in Triton's interpreter.

On a GPU a read past the end mostly goes well, because the allocator has more memory there, and one day it does not. The
interpreter reads by real addresses as well, so a launch notes where its tensors begin and end, and each load and store
compares its addresses with that, those that a mask switches off left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor


class Spans:
    """Where the tensors of one launch lie: [first byte, one past the last), in order, those that touch joined."""

    def __init__(self, kernel: str, args: Any):
        self.kernel = kernel
        self.named = sorted(self._of("", args), key=lambda span: span[1:])
        begins, ends = [0], [0]
        for _, begin, end in self.named:
            if begin < ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        self.begins, self.ends = np.array(begins, np.uint64), np.array(ends, np.uint64)

    def _of(self, name: str, x: Any) -> Iterator[tuple[str, int, int]]:
        if isinstance(x, Tensor) and x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            yield name, x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
        elif isinstance(x, dict):
            for key, value in x.items():
                yield from self._of(f"{name}.{key}" if name else key, value)
        elif isinstance(x, tuple):
            for key, value in zip(getattr(x, "_fields", range(len(x))), x, strict=True):
                yield from self._of(f"{name}.{key}", value)

    def check(self, what: str, addresses: np.ndarray, active: np.ndarray, size: int) -> None:
        at = np.asarray(addresses, np.uint64)[np.asarray(active, bool)]
        home = np.searchsorted(self.begins, at, "right") - 1
        wrong = at[at + np.uint64(size) > self.ends[home]]
        if len(wrong):
            first = int(wrong[0])
            away = [(max(begin - first, first + size - end), name) for name, begin, end in self.named]
            distance, name = min(away, default=(0, "nothing"))
            raise AssertionError(
                f"{self.kernel}: a {what} of {size} bytes outside of all tensors it was given, "
                f"{distance} bytes from {name}, which is nearest ({len(wrong)} of {len(at)} addresses)"
            )


@contextmanager
def watched() -> Iterator[None]:
    """Loads and stores of interpreted kernels are checked."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    here: list[Spans] = []

    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        found = arguments(self, args, kwargs)
        names = dict(zip(self.arg_names, found[0], strict=False))
        here[:] = [Spans(self.fn.__name__, names | found[1])]
        return found

    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        here[0].check("load", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, *rest, **named)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        here[0].check("store", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return store(self, ptrs, value, mask, *rest, **named)

    with (
        mock.patch.object(executor, "_init_args_hst", noted),
        mock.patch.object(builder, "create_masked_load", loaded),
        mock.patch.object(builder, "create_masked_store", stored),
    ):
        yield
