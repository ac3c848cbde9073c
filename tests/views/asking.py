"""Asking the explorer's server, and comparing what it says with A itself."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import httpx
import torch
from support import within_budget
from torch import Tensor

import regard as rg
from regard.views.server import Server

Q_LEN, K_LEN, HEADS = 300, 420, 2
MAP = "/1/0/1"  # source, look, head


def matrix(nudge: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[rg.AttentionMatrix, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, 8).to(dtype) for n in (Q_LEN, K_LEN, K_LEN))
    q[0, 1, 40] += nudge
    position = rg.recipes.t5(heads=HEADS).requires_grad_(False)
    position.readout.normal_()
    position = position.to(dtype)
    return rg.attention(q, k, position=position, mask=rg.causal, q_start=K_LEN - Q_LEN), v


class Asked:
    """A client of a server."""

    def __init__(self, server: Server):
        self.server = server
        origin = server.url.rstrip("/")
        self.http = httpx.Client(base_url=server.url, headers={"Origin": origin}, timeout=60, trust_env=False)

    def json(self, path: str, status: int = 200) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def floats(self, path: str) -> Tensor:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return torch.frombuffer(bytearray(answer.content), dtype=torch.float32)

    def tile(self, path: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        magic, version, rows, cols, flags, cell, row, col = struct.unpack_from("<8I", answer.content)
        assert (magic, version) == (0x52474152, 1)
        x = torch.frombuffer(bytearray(answer.content[32:]), dtype=torch.float32)
        mean, peak, rest = (
            x[: rows * cols].view(rows, cols),
            x[rows * cols : 2 * rows * cols].view(rows, cols),
            x[2 * rows * cols :],
        )
        assert len(rest) == (2 * rows if flags & 4 else 0)
        assert answer.headers["x-regard-state"] == ("exact" if flags & 1 else "sample")
        return mean, peak, {"flags": flags, "cell": cell, "row": row, "col": col, "rest": rest}

    def exact(self, at: str = MAP) -> dict[str, Any]:
        return until(lambda: (about := self.json(f"/api/map{at}"))["exact"] and about)


def until(happens: Callable[[], Any]) -> Any:
    """Wait for something that is bound to happen."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        found = happens()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen within five minutes")


def like(
    A: rg.AttentionMatrix, exact: rg.AttentionMatrix
) -> Callable[[Any, Callable[[rg.AttentionMatrix], Any]], None]:
    def check(found: Any, of: Callable[[rg.AttentionMatrix], Any]) -> None:
        found = found if isinstance(found, Tensor) else torch.tensor(found)
        with torch.no_grad():
            plain, right = (torch.as_tensor(of(each)) for each in (A, exact))
        within_budget(found.to(plain.dtype), plain, right)

    return check


def masked(A: rg.AttentionMatrix, x: Tensor) -> Tensor:
    """NaN where nothing is visible."""
    return x.masked_fill(A.logits.dense() == -torch.inf, torch.nan)


def twos(A: rg.AttentionMatrix, x: Tensor) -> Tensor:
    """Means of the visible pairs of cells of 2 x 2."""
    seen = A.logits.dense() > -torch.inf
    cells = (torch.where(seen, x, 0.0), seen)
    total, count = (y.view(Q_LEN // 2, 2, K_LEN // 2, 2).sum((1, 3)) for y in cells)
    return total / count
