"""The lazy matrix: what it gives, against the dense one; and how it behaves inside PyTorch."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from descriptions import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from support import within_budget

import regard as rg
from regard import indexing


def make(batch=2, heads=4, kv_heads=2, q_len=9, k_len=9, dim=8, v_dim=5, dtype=torch.float32, grad=False):
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, v_dim)
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for shape in shapes]


@given(case=cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_reversed_is_softmax_over_queries_of_the_transposed_logits(case):
    built = case.build(torch.float64)
    with torch.no_grad():
        A = built.matrix()
        logits = built.matrix("reference").logits.dense().mT
        B = A.reversed()
        assert B.shape == logits.shape
        seen = (logits > -torch.inf).any(-1, keepdim=True)
        expected = torch.where(seen, torch.softmax(torch.where(seen, logits, 0.0), -1), 0.0)
        within_budget(B.dense().float(), expected.float(), expected)
        within_budget(B.logits.dense().float(), logits.float(), logits)
        values = torch.randn(*B.shape[:2], B.shape[-1], 2, dtype=torch.float64)
        product = expected @ values
        within_budget((B @ values).float(), product.float(), product)
        within_budget(B.reversed().logits.dense().float(), logits.mT.float(), logits.mT)


@pytest.mark.parametrize("starts", [{}, {"q_start": 4, "k_start": 1}, {"q_start": torch.tensor([0, 3])}])
def test_the_band_holds_the_weights_near_the_diagonal(starts):
    q, k, _ = make(q_len=300, k_len=290, dtype=torch.float64, grad=True)
    A = rg.attention(q, k, position=rg.recipes.shaw(8, 3).double(), **starts)
    dense, band = A.dense(), A.band(2)
    q_start, k_start = (torch.as_tensor(starts.get(name, 0)).expand(2) for name in ("q_start", "k_start"))
    expected = torch.zeros_like(band)
    for b in range(2):
        for i in range(300):
            for t in range(5):
                j = i + int(q_start[b]) - int(k_start[b]) + t - 2
                if 0 <= j < 290:
                    expected[b, :, i, t] = dense[b, :, i, j]
    within_budget(band.float(), expected.float(), expected)
    weight = torch.randn_like(band)
    by_band, by_dense = (torch.autograd.grad((x * weight).sum(), q, retain_graph=True)[0] for x in (band, expected))
    within_budget(by_band.float(), by_dense.float(), by_dense)


def test_relative_values_of_vits():
    """y = A @ v + A.band(w) @ R is the sum over keys of A (v_j + R[j - i])."""
    q, k, v = make(kv_heads=4, v_dim=8, dtype=torch.float64)
    relative = torch.randn(5, 8, dtype=torch.float64)
    A = rg.attention(q, k)
    found = A @ v + A.band(2) @ relative
    step = torch.arange(9) - torch.arange(9)[:, None]  # key minus query
    near = (step.abs() <= 2).double()
    table = relative[(step + 2).clamp(0, 4)] * near[..., None]
    expected = A.dense() @ v + torch.einsum("bhij,ijd->bhid", A.dense(), table)
    within_budget(found.float(), expected.float(), expected)


def test_products_of_parts():
    q, k, v = make()
    A = rg.attention(q, k, mask=rg.causal)
    whole = A @ v
    torch.testing.assert_close(A[1] @ v[1], whole[1])
    torch.testing.assert_close(A[:, 3] @ v[:, 1], whole[:, 3])
    torch.testing.assert_close(A[1, 3] @ v[1, 1], whole[1, 3])
    torch.testing.assert_close(A[:, [0, 3]] @ v, whole[:, [0, 3]])
    assert A[1, 3].shape == (9, 9) and A[1].shape == (4, 9, 9) and len(A) == 2
    assert A[0, 1, 2, 3].shape == () and A[..., 3].shape == (2, 4, 9)


def test_a_product_can_be_repeated_and_differentiated_twice_over():
    """Each product has a graph of its own: two losses from one A do not disturb each other."""
    q, k, v = make(grad=True)
    term = rg.recipes.t5(4)
    A = rg.attention(q, k, position=term)
    with torch.no_grad():
        A.entropy()  # looking first must not lose the gradient
    (A @ v).sum().backward()
    first = term.readout.grad.clone()
    (A @ v).sum().backward()
    torch.testing.assert_close(term.readout.grad, 2 * first)
    assert not A.entropy().requires_grad and A.lse.requires_grad


def test_gradients_of_gradients_refuse():
    q, k, v = make(grad=True)
    (grad,) = torch.autograd.grad((rg.attention(q, k) @ v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        torch.autograd.grad(grad.sum(), k)


def test_changing_an_input_in_place_is_noticed():
    q, k, v = make()
    term = rg.recipes.t5(4)
    A = rg.attention(q, k, position=term)
    B = A[0]
    with torch.no_grad():
        term.readout.add_(1.0)
    for use in (lambda: A @ v, A.entropy, lambda: B.lse, lambda: A[0, 0, 0, 0]):
        with pytest.raises(RuntimeError, match="changed in place"):
            use()


def test_dropout_is_the_same_for_the_same_matrix_and_never_seen():
    q, k, v = make(q_len=200, k_len=200, kv_heads=4)
    A = rg.attention(q, k, dropout=0.4)
    assert torch.equal(A @ v, A @ v)
    assert not torch.equal(A @ v, rg.attention(q, k, dropout=0.4) @ v)
    torch.testing.assert_close(A.dense(), rg.attention(q, k).dense())
    torch.testing.assert_close(A[1, 2] @ v[1, 2], (A @ v)[1, 2])
    each = torch.eye(200).expand(2, 4, 200, 200)
    kept = (A @ each != 0).float()
    assert abs(kept.mean().item() - 0.6) < 0.01
    torch.testing.assert_close(A @ each, A.dense() * kept / 0.6)
    across = kept - kept.mean()
    for shift in (1, 2, 7):  # neighbours are independent, in rows, columns and heads
        for axis in (1, 2, 3):
            assert (across * across.roll(shift, axis)).mean().abs() < 0.01


def test_compiled_whole_and_not_again_for_another_length():
    from torch._dynamo.testing import CompileCounterWithBackend

    term = rg.recipes.t5(4) + rg.recipes.shaw(8, 4) + rg.Rotary()
    sink = torch.randn(4, requires_grad=True)

    def layer(q, k, v, start):
        mask = rg.causal & rg.window(30)
        A = rg.attention(q, k, position=term, mask=mask, sink=sink, softcap=20.0, q_start=start)
        return A @ v

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in (9, 12, 17, 23, 40):
        inputs = make(q_len=length, k_len=length + 3, grad=True)
        expected, found = layer(*inputs, 3), compiled(*inputs, 3)
        torch.testing.assert_close(found, expected)
        leaves = [*inputs, sink, *term.parameters()]
        grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)]
        torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2  # once for one length, once for any


@pytest.mark.parametrize(
    "kind", ["grid", "points", "nearest", "euclidean", "lengths", "starts a row", "documents", "deberta", "dropout"]
)
def test_every_sort_of_description_compiles_whole(kind):
    torch._dynamo.reset()
    q, k, v = make(q_len=12, k_len=12, grad=True)
    keywords = {
        "grid": dict(geometry=rg.Grid(3, 4), position=rg.recipes.sam(8, (3, 4)) + rg.recipes.swin(4, (3, 4))),
        "points": dict(
            geometry=rg.Points(torch.randint(9, (12, 2))), position=rg.Static(rg.OnAxis(1, rg.Buckets()), 4)
        ),
        "nearest": dict(mask=rg.causal & rg.nearest(3)),
        "euclidean": dict(score=rg.Euclidean(2.0)),
        "lengths": dict(mask=rg.lengths(torch.tensor([5, 9]))),
        "starts a row": dict(position=rg.recipes.t5(4), mask=rg.causal, q_start=torch.tensor([0, 4])),
        "documents": dict(mask=rg.documents(torch.arange(12) // 5) & rg.causal),
        "deberta": dict(position=rg.recipes.deberta(4, 8, buckets=8, max_position=16)),
        "dropout": dict(dropout=0.3),
    }[kind]

    def layer(q, k, v):
        return rg.attention(q, k, **keywords) @ v

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    if kind == "dropout":
        torch.manual_seed(3)
        found = compiled(q, k, v)
        assert found.isfinite().all() and not torch.equal(found, compiled(q, k, v))
        return
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))
    torch.testing.assert_close(*(torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (compiled, layer)))


def test_exported_and_run_again():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.term = rg.recipes.t5(4)

        def forward(self, q, k, v):
            return rg.attention(q, k, position=self.term, mask=rg.causal) @ v

    layer, inputs = Layer(), make()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(layer, tuple(inputs), dynamic_shapes=({2: length}, {2: length}, {2: length}))
    other = make(q_len=17, k_len=17)
    torch.testing.assert_close(program.module()(*other), layer(*other))


def test_autocast_computes_in_the_lower_precision():
    q, k, v = make(kv_heads=4)
    term = rg.recipes.transformer_xl(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = rg.attention(q, k, position=term, mask=rg.causal) @ v
    low = rg.attention(q.bfloat16(), k.bfloat16(), position=term, mask=rg.causal) @ v.bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, low)


def test_vmap_refuses_with_a_reason():
    q, k, v = make(kv_heads=4, v_dim=8)
    with pytest.raises(RuntimeError, match="batch axis"):
        torch.vmap(lambda q, k, v: rg.attention(q, k) @ v)(*(x[None] for x in (q, k, v)))


def test_torch_functions_say_what_to_do_instead():
    q, k, v = make()
    A = rg.attention(q, k)
    torch.testing.assert_close(torch.matmul(A, v), A @ v)
    with pytest.raises(TypeError, match="on the left"):
        v.mT @ A
    with pytest.raises(TypeError, match="softmax does not take a lazy A"):
        torch.softmax(A, -1)


def test_a_view_of_a_large_matrix_costs_nothing():
    q = torch.randn(1, 1, 1_000_000, 4)
    A = rg.attention(q, q, mask=rg.causal)
    assert A.shape == (1, 1, 1_000_000, 1_000_000) and "3.64 TiB" in repr(A)
    with pytest.raises(ValueError, match=r"1,000,000,000,000 numbers, 3.64 TiB"):
        A.dense()
    with pytest.raises(ValueError, match="force=True"):
        A[0, 0, :5000]
    row = A[0, 0, 999_999]
    assert row.shape == (1_000_000,) and abs(row.sum().item() - 1) < 1e-3


def test_forcing_a_large_block(monkeypatch):
    monkeypatch.setattr(indexing, "LIMIT", 10)
    q, k, _ = make()
    A = rg.attention(q, k)
    with pytest.raises(ValueError, match="force=True"):
        A.dense()
    torch.testing.assert_close(A.dense(force=True).sum(-1), torch.ones(2, 4, 9))
    assert A.block(slice(0, 3), [1, 2], force=True).shape == (2, 4, 3, 2)


def test_steps_show_the_pipeline():
    q, k, v = make()
    term = rg.recipes.t5(4)
    A = rg.attention(q, k, position=term, mask=rg.causal)
    s = A.steps(v)
    torch.testing.assert_close(s.scaled, s.scores / 8**0.5)
    (bias,) = s.terms.values()
    torch.testing.assert_close(s.logits, s.scaled + bias)
    assert torch.equal(s.visible, torch.ones(9, 9).tril().bool().expand(2, 4, 9, 9))
    torch.testing.assert_close(s.weights, torch.softmax(s.masked, -1))
    torch.testing.assert_close(s.out, A @ v)
    one = A[1, 3].steps(v[1, 1])
    torch.testing.assert_close(one.out, s.out[1, 3])
    torch.testing.assert_close(one.weights, s.weights[1, 3])


@given(case=cases(), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_explanations_add_up(case, data):
    built = case.build(torch.float64)
    A = built.matrix()
    batch, heads, q_len, k_len = built.sizes
    if not q_len or not k_len:
        return
    b, h, i, j = (data.draw(st.integers(0, n - 1)) for n in built.sizes)
    with torch.no_grad():
        told, weight = A[b, h].explain(i, j), A[b, h][i, j].item()
    total = torch.tensor(sum(told.parts.values()), dtype=torch.float64)
    if case.softcap:
        total = 3.0 * torch.tanh(total / 3.0)
    if told.visible:
        within_budget(torch.tensor(told.logit), total.float(), total)
    within_budget(torch.tensor(told.weight), torch.tensor(weight), torch.tensor(weight, dtype=torch.float64))
    assert ("masked" in str(told)) == (not told.visible)
    steps = built.matrix("reference")[b, h].steps()
    for name, value in steps.terms.items():
        within_budget(torch.tensor(told.parts[name]), value[i, j].float(), value[i, j], name)


def test_progress_is_told_and_a_bar_is_shown_in_a_terminal(monkeypatch, capsys):
    from regard.engines.tiled import strips

    monkeypatch.setattr(strips, "STRIP", 64)
    q, k, _ = make(q_len=64, k_len=64)
    seen = []
    rg.attention(q, k).summarize(rg.Entropy(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * 4 * 64, 2 * 4 * 64) and len(seen) > 4 and seen == sorted(seen)
    import regard.progress as progress

    clock = iter(range(10_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv("FORCE_COLOR", "1")
    rg.attention(q, k).entropy(progress=True)
    assert "looking at A" in capsys.readouterr().err


def test_planning_is_logged(caplog):
    q, k, v = make(dim=6)
    with caplog.at_level(logging.DEBUG, logger="regard"):
        rg.attention(q, k, softcap=12.345, mask=rg.window(3)) @ v
    assert "engine  tiled" in caplog.text and "12.345" in caplog.text


def test_terms_are_modules():
    q, k, v = make(dtype=torch.float64)
    term = (rg.recipes.transformer_xl(4, 8) + rg.recipes.t5(4)).double()
    twin = copy.deepcopy(term)
    for p in twin.parameters():
        torch.nn.init.normal_(p)
    assert not torch.allclose(rg.attention(q, k, position=twin) @ v, rg.attention(q, k, position=term) @ v)
    twin.load_state_dict(term.state_dict())
    torch.testing.assert_close(rg.attention(q, k, position=twin) @ v, rg.attention(q, k, position=term) @ v)
