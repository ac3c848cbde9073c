"""The GPU engine on a GPU: the shared budget at sizes of many tiles, the same bits twice, compiled, long and large."""

from __future__ import annotations

import math

import pytest
import torch
from support import within_budget

import regard as rg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HEADS, LENGTH = 4, 500


def make(name: str, dim: int) -> tuple[int, dict]:
    """A length, and the arguments of `attention` for one kind of description."""
    terms = {
        "t5": lambda: rg.recipes.t5(HEADS),
        "alibi": lambda: rg.recipes.alibi(HEADS),
        "table": lambda: rg.Static(rg.Cells(LENGTH), HEADS),
        "shaw": lambda: rg.recipes.shaw(dim, 16),
        "deberta": lambda: rg.recipes.deberta(HEADS, dim, buckets=16, max_position=64),
        "swin": lambda: rg.recipes.swin(HEADS, (8, 64)),
        "beit": lambda: rg.recipes.beit(HEADS, (14, 14)),
        "sam": lambda: rg.recipes.sam(dim, (8, 64)),
        "sam 14": lambda: rg.recipes.sam(dim, (14, 14)),
    }
    grids = {"swin": rg.Grid(8, 64), "beit": rg.Grid(14, 14, unplaced=1), "sam": rg.Grid(8, 64)}
    grids["sam 14"] = rg.Grid(14, 14)
    term, _, mask = name.partition(" & ")
    keywords: dict = {"position": terms[term]()} if term in terms else {}
    length = LENGTH
    if term in grids:
        keywords["geometry"] = grids[term]
        length = math.prod(grids[term].shape) + grids[term].unplaced
    ids = torch.arange(length, device="cuda") // 150
    masks = {
        "causal": rg.causal,
        "window": rg.window(70, 10),
        "lengths": rg.causal & rg.lengths(torch.tensor([length - 77, 3], device="cuda")),
        "documents": rg.documents(ids.expand(2, -1)),
        "dense": rg.dense(torch.rand(length, length, device="cuda") > 0.3),
    }
    keywords["mask"] = masks.get(mask)
    if term == "soft":
        keywords |= {"softcap": 5.0, "sink": torch.randn(HEADS, device="cuda"), "dropout": 0.2}
    return length, keywords


KINDS = [
    "plain", "plain & causal", "plain & window", "plain & lengths", "plain & documents", "plain & dense",
    "soft & causal",
    "alibi", "alibi & causal", "t5", "t5 & causal", "t5 & window", "table", "table & causal", "shaw", "deberta",
    "swin", "beit", "sam", "sam 14", "sam & causal",
]  # fmt: skip


def results(name: str, dtype: torch.dtype, engine: str, exact: bool = False, dim: int = 64, v_dim: int = 64) -> dict:
    """Product, log-sum-exp and gradients; `exact` computes the same inputs in float64."""
    torch.manual_seed(0)
    length, keywords = make(name, dim)
    wide = torch.float64 if exact else dtype
    q, k, v, go = (
        torch.randn(2, heads, length, width, device="cuda", dtype=dtype).to(wide)
        for heads, width in ((HEADS, dim), (HEADS // 2, dim), (HEADS // 2, v_dim), (HEADS, v_dim))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    term = keywords.get("position")
    if term is not None:
        term.cuda()
        for p in term.parameters():
            p.data.normal_()
            p.data = (0.3 * p.data).to(dtype).to(torch.float64 if exact else torch.float32)
        leaves += [p for p in term.parameters() if p.requires_grad]
        if exact:
            term.double()
    if exact and "sink" in keywords:
        keywords["sink"] = keywords["sink"].double()
    torch.manual_seed(1)  # the seed of dropout
    A = rg.attention(q, k, engine=engine, **keywords)
    assert A.plan.engine == engine
    out = A @ v
    found = {"out": out, "lse": A.lse}
    for n, grad in enumerate(torch.autograd.grad(out, leaves, go)):
        found[f"gradient {n}"] = grad
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_stays_within_the_budget(name, dtype):
    found, plain = results(name, dtype, "triton"), results(name, dtype, "reference")
    exact = results(name, dtype, "reference", exact=True)
    for key in found:
        within_budget(found[key], plain[key], exact[key], key)


@pytest.mark.parametrize("dim, v_dim", [(80, 80), (128, 64), (40, 200), (256, 256)])
def test_heads_of_any_width(dim, v_dim):
    for dtype in (torch.float16, torch.float32):
        found, plain = (results("t5 & causal", dtype, engine, False, dim, v_dim) for engine in ("triton", "reference"))
        exact = results("t5 & causal", dtype, "reference", True, dim, v_dim)
        for key in found:
            within_budget(found[key], plain[key], exact[key], key)


@pytest.mark.parametrize("name", ["t5", "table & causal", "swin", "sam", "beit"])
def test_gradients_have_the_same_bits_every_time(name):
    first, second = (results(name, torch.bfloat16, "triton") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_compiled_with_autocast():
    term = rg.recipes.t5(HEADS).cuda()
    q, k, v = (torch.randn(2, HEADS, 200, 64, device="cuda", requires_grad=True) for _ in range(3))

    def layer(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return rg.attention(q, k, position=term, mask=rg.causal) @ v

    found, expected = torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    leaves = [q, k, v, *term.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad(y.float().square().sum(), leaves) for y in (found, expected)))


def test_131072_tokens_train_with_a_causal_t5_bias():
    n = 131_072
    term = rg.recipes.t5(2).cuda()
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rg.attention(q, k, position=term, mask=rg.causal) @ v
    out.sum().backward()
    each = q.numel() * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < 2 * 6 * each + (256 << 20)
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, term.readout))


def test_more_than_two_to_the_31_numbers():
    heads, n = 33, 1 << 20
    q = torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16)
    out = rg.attention(q, q, mask=rg.window(8, 8)) @ q
    rows = slice(n - 64, n)
    some = q[:, -1:, rows]
    expected = rg.attention(some, some, mask=rg.window(8, 8), engine="tiled") @ some
    torch.testing.assert_close(out[:, -1:, n - 40 :], expected[:, :, 24:], rtol=2e-2, atol=2e-2)
