"""Masks of transformers as descriptions: the same pairs as its own, and never N x N where there is a description."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils as theirs

from regard.huggingface import masks
from regard.huggingface.masks import Described, describe, read

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1], [-1] * 10])
PREFIX = torch.tensor([3, 6])


def prefix(batch, head, q, k):
    """A prefix language model: keys of the prefix are seen by all."""
    return (k <= q) | (k < PREFIX[batch])


FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "both ways": theirs.bidirectional_mask_function,
    "sliding": theirs.sliding_window_causal_mask_function(3),
    "sliding both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "chunked": theirs.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "packed": theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(IDS)),
    "blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "packed, sliding, blocks": theirs.or_masks(
        theirs.and_masks(theirs.sliding_window_causal_mask_function(4), theirs.packed_sequence_mask_function(IDS)),
        theirs.blockwise_overlay(BLOCKS),
    ),
    "prefix": prefix,
    "prefix of keys and queries": lambda b, h, q, k: (q < 4) & (k < 4) | (k == q),
    "not causal": lambda b, h, q, k: ~(k <= q),
    "a diagonal": lambda b, h, q, k: q - k == 2,
    "a distance": lambda b, h, q, k: abs(q - k) < 3,
    "far": lambda b, h, q, k: (q - k >= 4) | (k - q > 5),
    "strided": lambda b, h, q, k: q % 3 == k % 3,
    "chunks": lambda b, h, q, k: torch.div(q, 4, rounding_mode="trunc") == torch.div(k, 4, rounding_mode="floor"),
    "nothing": lambda b, h, q, k: (q < 0) & (k <= q),
}


def dense_mask(function, q_len, k_len, q_start, k_start, padding=None):
    return theirs.sdpa_mask(
        batch_size=2, q_length=q_len, kv_length=k_len, q_offset=q_start, kv_offset=k_start, mask_function=function,
        attention_mask=padding, allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    ).expand(2, 1, q_len, k_len)  # fmt: skip


@pytest.mark.parametrize("where", [(10, 10, 0, 0), (3, 10, 7, 0), (1, 10, 9, 0), (4, 6, 6, 4), (3, 10, 0, 0)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_pairs(name, where, caplog):
    q_len, k_len, q_start, k_start = where
    with caplog.at_level(logging.WARNING, logger="regard"):
        found = describe(
            batch_size=2, q_length=q_len, kv_length=k_len, q_offset=q_start, kv_offset=k_start,
            mask_function=FUNCTIONS[name],
        )  # fmt: skip
    assert torch.equal(found.dense(), dense_mask(FUNCTIONS[name], *where))
    assert not caplog.records
    for values in () if found.mask is None or q_len == 1 else found.mask.tensors():
        assert values.numel() <= 2 * k_len  # a row of ids or of booleans a batch row


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes", "all but one row", "short"])
@pytest.mark.parametrize("name", ["causal", "both ways", "sliding"])
def test_with_padding(name, kind):
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[
        1, {"none": [], "left": [0, 1, 2], "right": [8, 9], "holes": [1, 4], "all but one row": range(10)}.get(kind, [])
    ] = False
    padding = padding[:, :7] if kind == "short" else padding  # a static cache, not filled yet
    found = describe(
        batch_size=2, q_length=4, kv_length=8, q_offset=6, kv_offset=2, mask_function=FUNCTIONS[name],
        attention_mask=padding,
    )  # fmt: skip
    assert torch.equal(found.dense(), dense_mask(FUNCTIONS[name], 4, 8, 6, 2, padding))


def test_what_hides_nothing_is_left_out():
    last = describe(batch_size=1, q_length=1, kv_length=9, q_offset=8, mask_function=FUNCTIONS["causal"])
    assert last.mask is None
    wide = describe(
        batch_size=1, q_length=9, kv_length=9, mask_function=theirs.sliding_window_causal_mask_function(20),
        attention_mask=torch.ones(1, 9, dtype=torch.bool),
    )  # fmt: skip
    assert repr(wide.mask) == "causal"
    assert repr(describe(2, 5, 5, mask_function=FUNCTIONS["sliding"]).mask) == "window(2, None) & causal"


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: BLOCKS[b, q] <= BLOCKS[b, k],
        lambda b, h, q, k: (q + k) % 2 == 0,
        lambda b, h, q, k: IDS[b, (q + k) % 10] > 0,
        lambda b, h, q, k: torch.clamp(q, max=4) == k,
    ],
)
def test_what_cannot_be_described_is_asked_for_every_pair_and_said(function, caplog):
    masks._said.clear()
    with caplog.at_level(logging.WARNING, logger="regard"):
        found = describe(batch_size=2, q_length=10, kv_length=10, mask_function=function)
    assert torch.equal(found.dense(), dense_mask(function, 10, 10, 0, 0))
    assert "asked for every pair" in caplog.text


def test_the_start_may_be_a_tensor():
    """Static caches say in a tensor where the queries stand."""
    found = describe(
        batch_size=2, q_length=2, kv_length=10, q_offset=torch.tensor(5), mask_function=FUNCTIONS["sliding"]
    )
    assert torch.equal(found.dense(), dense_mask(FUNCTIONS["sliding"], 2, 10, 5, 0))


def test_what_models_do_to_a_mask():
    made = describe(
        batch_size=2, q_length=10, kv_length=10, mask_function=FUNCTIONS["packed"],
        attention_mask=torch.tensor([[1] * 10, [1, 0] * 5]),
    )  # fmt: skip
    assert made.shape == (2, 1, 10, 10) and made.size(-1) == 10 and made.dim() == made.ndim == 4 and len(made) == 2
    assert made.to(torch.float32) is made and made[:, :, :, :10] is made and made[:, :, :, :20] is made
    cut = made[:, :, :, :6]
    assert isinstance(cut, Described) and torch.equal(cut.dense(), made.dense()[..., :6])
    assert torch.equal(made[..., :6].dense(), cut.dense())
    assert read(made, 10, 6).mask.tensors()[1].shape[-1] == 6
    moved = made.to("meta")
    assert moved.device.type == "meta" and {x.device.type for x in moved.mask.tensors()} == {"meta"}
    assert made.to(device="cpu", dtype=torch.bool) is made
    with pytest.raises(ValueError, match="is for 10 keys, found 11"):
        read(made, 10, 11)
    again = describe(batch_size=2, q_length=10, kv_length=10, attention_mask=made)
    assert again is made
    for do in (lambda: made[:, 0], lambda: made[:, :, -1:], lambda: made + 1, lambda: made.masked_fill):
        with pytest.raises((TypeError, AttributeError), match=r"dense\(\)"):
            do()
    with pytest.raises(TypeError, match="compare it with None"):
        bool(made)


def test_tensors_as_arguments_of_attention():
    numbers = torch.randn(2, 1, 1, 7)
    hidden = torch.full((2, 1, 1, 7), torch.finfo(torch.float32).min)
    assert read(None, 5, 7) == (None, 0, 0, None)
    assert read(torch.zeros(2, 1, 5, 7), 5, 7) == (None, 0, 0, None)
    assert repr(read(torch.tensor([[1, 1, 0], [1, 0, 0]]), 3, 3).mask) == "lengths"
    assert read(hidden, 5, 7).bias is None and not read(hidden, 5, 7).mask.values.any()
    assert read(numbers, 5, 7).mask is None and "FromKey" in read(numbers, 5, 7).bias.describe()
    with pytest.raises(TypeError, match="attention_mask: expected a tensor or None, found list"):
        read([1], 1, 1)
    with pytest.raises(ValueError, match="attention_mask: expected two to four axes"):
        read(torch.ones(3), 3, 3)
    with pytest.raises(TypeError, match="attention_mask: expected booleans or numbers"):
        read(torch.ones(2, 1, 3, 3, dtype=torch.long), 3, 3)
