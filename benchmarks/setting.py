"""A case as tensors, and the two ways to do it that are always measured: plain SDPA and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import SUMMARIES, TERMS, Case
from torch import Tensor
from torch.nn import functional as F

import regard as rg

Way = Callable[[], Any]


class Setting:
    """q, k, v, the gradient of the output and the position term of a case, from a fixed seed."""

    def __init__(self, case: Case, device: str | None = None):
        self.case, self.term = case, TERMS[case.term]
        self.device = torch.device(device or case.device)
        self.dtype = getattr(torch, case.dtype)
        batch, heads, q_len, k_len = case.sizes
        random = torch.Generator(self.device).manual_seed(0)

        def numbers(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=random, device=self.device, dtype=torch.float32).to(dtype)

        self.q = numbers(batch, heads, q_len, case.dim).requires_grad_()
        self.k = numbers(batch, heads, k_len, case.dim).requires_grad_()
        self.v = numbers(batch, heads, k_len, case.v_dim).requires_grad_()
        self.d_out = numbers(batch, heads, q_len, case.v_dim)
        self.position = self.term.make(case)
        if self.position is not None:
            self.position.to(self.device)
            for name, p in self.position.named_parameters():  # sizes that leave attention neither flat nor one-hot
                p.data = numbers(*p.shape, dtype=p.dtype) * (0.5 if name == "readout" else 0.1)
        self.geometry = self.term.geometry(case)
        self.scale = self.term.scale(case)

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that is learned."""
        return [self.q, self.k, self.v, *(self.position.parameters() if self.position is not None else ())]

    @property
    def q_start(self) -> int:
        """Queries stand at the end of the keys: a step of decoding."""
        return self.k.shape[2] - self.q.shape[2]

    def matrix(self, engine: str | None = None) -> rg.AttentionMatrix:
        return rg.attention(
            self.q, self.k, scale=self.scale, position=self.position, geometry=self.geometry,
            mask=rg.causal if self.case.causal else None, q_start=self.q_start or None, engine=engine,
        )  # fmt: skip

    def ours(self, engine: str | None = None) -> Way:
        if not self.case.asks:
            return lambda: self.matrix(engine) @ self.v
        asked = [SUMMARIES[name]() for name in self.case.asks]
        return lambda: self.matrix(engine).summarize(*asked, progress=False)

    def plain(self) -> Way:
        """SDPA without the term. Vectors of two lengths are padded to one, else SDPA leaves its fused kernel on CPU."""
        width = max(self.case.dim, self.case.v_dim)

        def run() -> Tensor:
            q, k, v = (padded(x, width) for x in (self.q, self.k, self.v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.case.causal, scale=self.scale)
            return out[..., : self.case.v_dim]

        return run

    def train(self, way: Way) -> Way:
        """A way with the gradients of everything learned (of q, k and v where it does not know the term)."""

        def run() -> tuple:
            return torch.autograd.grad(way(), self.leaves, self.d_out, allow_unused=True)

        return run


def padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
