"""Masks: each against its rule written by hand for every pair, alone, combined, and as a set of pairs for `mass`."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import regard as rg


@pytest.fixture(params=[None, "reference"], ids=["planned", "reference"])
def attention(request):
    return functools.partial(rg.attention, engine=request.param)


Q_LEN, K_LEN, Q_START, K_START = 5, 7, 3, 1


def seen(attention, mask, batch=2, heads=2, **options) -> torch.Tensor:
    """Which pairs a mask shows, [batch, heads, q_len, k_len], as A itself says it."""
    q, k = torch.randn(batch, heads, Q_LEN, 3), torch.randn(batch, heads, K_LEN, 3)
    A = attention(q, k, mask=mask, q_start=Q_START, k_start=K_START, **options)
    visible = A.logits.dense() > -torch.inf
    assert torch.equal(A.dense() > 0, visible)
    assert torch.equal(A.heatmap(max(Q_LEN, K_LEN)).count, visible.float())
    if not mask.scored:  # the same set of pairs, asked of an A without a mask
        inside = attention(q, k, q_start=Q_START, k_start=K_START, **options)
        assert torch.equal(inside.mass(mask) > 0, visible.any(-1))
    return visible


def rule(says, batch=2, heads=2) -> torch.Tensor:
    """The same by hand: says(batch row, head, query position, key position) for every pair."""
    shape = (batch, heads, Q_LEN, K_LEN)
    each = itertools.product(*map(range, shape))
    return torch.tensor([bool(says(b, h, i + Q_START, j + K_START)) for b, h, i, j in each]).reshape(shape)


RULES = {
    "causal": (rg.causal, lambda b, h, i, j: j <= i),
    "anticausal": (~rg.causal, lambda b, h, i, j: j > i),
    "window": (rg.window(2), lambda b, h, i, j: i - 2 <= j <= i),
    "window both ways": (rg.window(2, 1), lambda b, h, i, j: i - 2 <= j <= i + 1),
    "window without a left end": (rg.window(None, 1), lambda b, h, i, j: j <= i + 1),
    "window without a right end": (rg.window(1, None), lambda b, h, i, j: j >= i - 1),
    "window ahead": (rg.window(-1, 2), lambda b, h, i, j: i + 1 <= j <= i + 2),
    "window behind": (rg.window(3, -1), lambda b, h, i, j: i - 3 <= j <= i - 1),
    "window of everything": (rg.window(None, None), lambda b, h, i, j: True),
    "offset": (rg.offset(2), lambda b, h, i, j: i - j == 2),
    "offset ahead": (rg.offset(-1), lambda b, h, i, j: i - j == -1),
    "a key": (rg.keys(3), lambda b, h, i, j: j == 3),
    "some keys": (rg.keys(2, 4), lambda b, h, i, j: 2 <= j <= 4),
    "lengths": (rg.lengths([4, 0]), lambda b, h, i, j: j < (4, 0)[b]),
    "one length": (rg.lengths(torch.tensor([5])), lambda b, h, i, j: j < 5),
    "lengths of both": (rg.lengths([4, 7], [6, 4]), lambda b, h, i, j: j < (4, 7)[b] and i < (6, 4)[b]),
    "and": (rg.causal & rg.keys(2, 4) & rg.window(3), lambda b, h, i, j: 2 <= j <= 4 and i - 3 <= j <= i),
    "or": (rg.offset(0) | rg.keys(1) | rg.offset(1), lambda b, h, i, j: i - j in (0, 1) or j == 1),
    "not": (~(rg.causal & rg.keys(2, 4)), lambda b, h, i, j: not (j <= i and 2 <= j <= 4)),
    "mixed": (rg.causal & (rg.keys(1) | rg.window(1)) & ~rg.offset(0), lambda b, h, i, j: j in ({1, i - 1} - {i})),
    "batch and not": (rg.causal & ~rg.lengths([4, 2]), lambda b, h, i, j: (4, 2)[b] <= j <= i),
}


@pytest.mark.parametrize("name", RULES)
def test_a_mask_is_its_rule(attention, name):
    mask, says = RULES[name]
    assert torch.equal(seen(attention, mask), rule(says))


def test_documents(attention):
    q_ids, k_ids = torch.tensor([[0, 0, 1, -1, 2], [2, 1, 1, 0, 5]]), torch.tensor([[0, 1, 1, -1, 2, 2, 0], [1] * 7])
    mask = rg.documents(q_ids, k_ids)
    same = lambda b, h, i, j: 0 <= q_ids[b, i - Q_START] == k_ids[b, j - K_START]  # noqa: E731
    assert torch.equal(seen(attention, mask), rule(same))
    shared = rg.documents(q_ids[0], k_ids[1])
    assert torch.equal(seen(attention, shared), rule(lambda b, h, i, j: q_ids[0, i - Q_START] == 1))


def test_documents_packed_one_after_the_other(attention):
    x = torch.randn(1, 1, 9, 3)
    A = attention(x, x, mask=rg.documents(cumulative=torch.tensor([0, 5, 5, 9])))
    ids = torch.tensor([0] * 5 + [2] * 4)  # the second document is empty
    assert torch.equal(A.dense()[0, 0] > 0, ids[:, None] == ids)


def test_a_dense_boolean(attention):
    for shape in [(Q_LEN, K_LEN), (1, K_LEN), (Q_LEN, 1), (2, Q_LEN, K_LEN), (2, 1, 1, K_LEN), (2, 2, Q_LEN, K_LEN)]:
        values = torch.rand(shape) < 0.6
        expected = values.expand(2, 2, Q_LEN, K_LEN)
        assert torch.equal(seen(attention, rg.dense(values)), expected), shape


def test_induction_pairs(attention):
    tokens = torch.tensor([[7, 2, 7, 2, 2], [1, 1, 3, 1, 3]])
    x = torch.randn(2, 1, 5, 3)
    found = attention(x, x, mask=rg.induction(tokens)).dense() > 0
    for b, i, j in itertools.product(range(2), range(5), range(5)):
        assert found[b, 0, i, j] == (1 <= j <= i and tokens[b, j - 1] == tokens[b, i])


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("other", [None, rg.window(2, 2), rg.lengths([4, 0])], ids=str)
def test_the_nearest_keys_among_those_allowed(attention, count, other):
    q, k = torch.randn(2, 2, Q_LEN, 3), torch.randint(-1, 2, (2, 1, K_LEN, 3)).float()  # many ties
    options = {"q_start": Q_START, "k_start": K_START, "position": rg.recipes.t5(2).requires_grad_(False)}
    logits = attention(q, k, mask=other, **options).logits.dense()
    mask = rg.nearest(count) if other is None else other & rg.nearest(count)
    chosen = attention(q, k, mask=mask, **options).logits.dense() > -torch.inf
    for row, marks in zip(logits.flatten(0, 2), chosen.flatten(0, 2), strict=True):
        order = sorted((j for j in range(K_LEN) if row[j] > -torch.inf), key=lambda j: (-row[j].item(), j))
        assert marks.nonzero().flatten().tolist() == sorted(order[:count])


def test_the_nearest_of_two_alternatives(attention):
    q, k = torch.randn(1, 2, 6, 3), torch.randn(1, 2, 6, 3)
    near = attention(q, k, mask=rg.nearest(2)).dense() > 0
    own = torch.eye(6, dtype=torch.bool)
    for mask, expected in (
        (rg.nearest(2) | rg.offset(0), near | own),
        (~rg.nearest(2), ~near),
        (rg.nearest(2) & ~rg.nearest(1), near & ~(attention(q, k, mask=rg.nearest(1)).dense() > 0)),
    ):
        assert torch.equal(attention(q, k, mask=mask).dense() > 0, expected.expand(1, 2, 6, 6)), str(mask)


def test_windows_and_offsets_on_a_grid(attention):
    grid = rg.Grid(2, 3, unplaced=1)
    places = [None, *itertools.product(range(2), range(3))]
    x = torch.randn(1, 1, 7, 3)
    cases = (
        (rg.window((1, 0), (0, 2)), lambda a, b: 0 <= a <= 1 and -2 <= b <= 0),
        (rg.offset(1, -2), lambda a, b: (a, b) == (1, -2)),
        (~rg.offset(0, 0), lambda a, b: (a, b) != (0, 0)),
    )
    for mask, says in cases:
        found = attention(x, x, geometry=grid, mask=mask).dense()[0, 0] > 0
        for (i, p), (j, o) in itertools.product(enumerate(places), repeat=2):
            if p is None or o is None:  # without a displacement it lies in no window; so it lies outside
                assert found[i, j] == (mask is cases[2][0])
            else:
                assert found[i, j] == says(p[0] - o[0], p[1] - o[1])


def test_causal_compares_positions_in_the_sequence_on_a_grid_too(attention):
    x = torch.randn(1, 1, 6, 3)
    assert torch.equal(
        attention(x, x, geometry=rg.Grid(2, 3), mask=rg.causal).dense()[0, 0] > 0, torch.ones(6, 6).tril() > 0
    )


def test_a_row_of_a_batch_has_its_own_positions(attention):
    q, k = torch.randn(2, 1, 2, 3), torch.randn(2, 1, 6, 3)
    A = attention(q, k, mask=rg.causal, q_start=torch.tensor([0, 4]), k_start=torch.tensor([0, 1]))
    for b, i, j in itertools.product(range(2), range(2), range(6)):
        assert (A.dense()[b, 0, i, j] > 0) == (j + (0, 1)[b] <= i + (0, 4)[b])


def test_a_mask_goes_with_the_batch_rows_and_heads_that_are_chosen(attention):
    q, k = torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)
    values = torch.rand(2, 2, 5, 5) < 0.5
    A = attention(q, k, mask=rg.dense(values) & rg.lengths([3, 5]))
    expected = values & (torch.arange(5) < torch.tensor([3, 5])[:, None, None, None])
    assert torch.equal(A[1, 0].dense() > 0, expected[1, 0])
    assert torch.equal(A[:, [1]].dense() > 0, expected[:, [1]])


def test_masks_print_as_they_are_written():
    assert str(rg.causal & rg.window(2, 1)) == "causal & window(2, 1)"
    assert str(rg.causal & (rg.offset(0) | rg.keys(1, 2))) == "causal & (offset(0) | keys(1, 2))"
    assert str(~(rg.causal & rg.nearest(2)) | ~rg.causal) == "~(causal & nearest(2)) | ~causal"
    assert ~~rg.causal is rg.causal
