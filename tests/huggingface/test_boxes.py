"""Models of pages: LayoutLMv2, LayoutLMv3, and UDOP, whose bias is handed over ready."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest
import torch
from checking import check_model
from sequences import LENGTH, SIZES, STILL, T5, WORDS, of, padding, shaken, sound, tokens, transformers
from support import Largest
from torch import Tensor, nn

import regard as rg
from regard.huggingface import enable, masks
from regard.trace import Trace, record

PAGE = {
    **SIZES, **STILL, "vocab_size": WORDS, "max_position_embeddings": 64, "max_2d_position_embeddings": 64,
    "coordinate_size": 6, "shape_size": 4, "rel_pos_bins": 8, "max_rel_pos": 20, "rel_2d_pos_bins": 8,
    "max_rel_2d_pos": 20,
}  # fmt: skip
BOTH = {"has_relative_attention_bias": True, "has_spatial_attention_bias": True}


def boxes(most: int = 60) -> Tensor:
    """[2, length, 4]: left, top, right, bottom."""
    generator = torch.Generator().manual_seed(5)
    corners = [torch.randint(0, most // 2, (2, LENGTH, 2), generator=generator) for _ in range(2)]
    return torch.cat([corners[0], corners[0] + corners[1]], dim=-1)


def layoutlmv3(**more):
    return of("LayoutLMv3Model", "LayoutLMv3Config", **{**PAGE, **BOTH, "input_size": 16, "patch_size": 4, **more})


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_layoutlmv3(side):
    """Text and patches of an image, each with its place in the sequence and on the page."""
    inputs = {"input_ids": tokens(), "bbox": boxes(), "pixel_values": sound(2, 3, 16, 16)}
    inputs |= {"attention_mask": padding(side)} if side else {}
    check_model(layoutlmv3(), inputs, layers=3)


@pytest.mark.parametrize("text", [False, True])
def test_layoutlmv3_with_fewer_terms(text):
    """The page's bias counts only together with the text's, as published."""
    make = layoutlmv3(has_relative_attention_bias=text, has_spatial_attention_bias=not text)
    check_model(make, {"input_ids": tokens(), "bbox": boxes()}, layers=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layoutlmv3_in_training(dtype):
    check_model(layoutlmv3(), {"input_ids": tokens(), "bbox": boxes()}, train=True, dtype=dtype)


@pytest.mark.parametrize("more", [{}, {"fast_qkv": False}, {"has_spatial_attention_bias": False}], ids=str)
def test_layoutlmv2(more):
    """Its encoder alone: the model needs a package for its pictures."""
    from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

    def make() -> nn.Module:
        given = {**PAGE, **BOTH, **more}
        return shaken(LayoutLMv2Encoder(transformers.LayoutLMv2Config(**given, attn_implementation="eager")))

    hidden = torch.zeros(2, 1, 1, LENGTH)
    hidden[1, ..., -11:] = torch.finfo(torch.float32).min / 4
    inputs = {"hidden_states": sound(2, LENGTH, 32), "attention_mask": hidden, "bbox": boxes()}
    inputs["position_ids"] = torch.arange(LENGTH).flip(0)[None].expand(2, -1)
    check_model(make, inputs, layers=3, attentions=False)


def test_pages_take_no_memory_for_pairs():
    """What happens inside the engines is their own affair: the model hands on coordinates."""
    length = 1500
    model = layoutlmv3(max_position_embeddings=length + 2, vocab_size=WORDS)().eval()
    enable(model)
    with torch.no_grad(), patch.object(rg.AttentionMatrix, "__matmul__", lambda A, v: torch.zeros_like(v)):
        with Largest() as seen:
            model(input_ids=tokens(length, 1), bbox=boxes()[:1, :1].expand(1, length, 4))
    assert seen.numbers < length * length, f"{seen.numbers} numbers"


def test_recorded_and_opened_again(tmp_path):
    """Coordinates of tokens and three tables travel in a trace."""
    model = layoutlmv3()().eval()
    with torch.no_grad(), record(model) as trace:
        weights = model(input_ids=tokens(), bbox=boxes(), output_attentions=True).attentions
    trace.save(tmp_path / "x.trace")
    for (_, A), B in zip(Trace.open(tmp_path / "x.trace"), weights, strict=True):
        assert torch.allclose(A.dense(), B.dense(), atol=1e-5)
    assert "OnAxis(1, Buckets" in repr(weights[0])


def udop():
    kinds = [{"type": kind, "relative_attention_num_buckets": 8, "max_distance": 20} for kind in ("1d", "horizontal")]
    page = {"max_2d_position_embeddings": 64, "image_size": 16, "patch_size": 4, "relative_bias_args": kinds}
    return of("UdopForConditionalGeneration", "UdopConfig", **{**T5, **page})


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_udop(side):
    inputs = {"input_ids": tokens(), "bbox": boxes() / 60, "decoder_input_ids": tokens(17, seed=5)}
    check_model(udop(), inputs | ({"attention_mask": padding(side)} if side else {}))


def test_a_ready_bias_is_multiplied_as_fast_as_by_the_model(caplog, monkeypatch):
    """UDOP hands over a bias for every pair: A is there to be looked at, and the product is PyTorch's own."""
    monkeypatch.setattr(masks, "_said", set())
    model = udop()().eval()
    enable(model)
    inputs = {"input_ids": tokens(), "bbox": boxes() / 60, "decoder_input_ids": tokens(17, seed=5)}
    made = []
    product = rg.AttentionMatrix.__matmul__
    with patch.object(rg.AttentionMatrix, "__matmul__", lambda A, v: made.append(A) or product(A, v)):
        with caplog.at_level(logging.WARNING, logger="regard"), torch.no_grad():
            model(**inputs)
    assert not [A for A in made if A.shape[-2] == LENGTH], "a product of an A with a ready bias"
    assert "a bias is handed over for every pair" in caplog.text


@pytest.mark.parametrize("q_len, k_len, start", [(5, 5, 0), (3, 7, 4), (1, 6, 5), (4, 6, 0), (3, 4, 9)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_ready_bias_is_a_view(q_len, k_len, start, heads):
    """Every query reads its own row, wherever it stands; gradients come back to the bias."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, n, 4, generator=generator) for n in (q_len, k_len))
    bias = torch.randn(2, heads, q_len, k_len, generator=generator).requires_grad_()
    A = rg.attention(q, k, position=masks.bias_term(bias, q_len, k_len, start), q_start=start)
    want = torch.softmax(q @ k.mT / 2 + bias, dim=-1)
    assert torch.allclose(A.dense(), want, atol=1e-6)
    (slope,) = torch.autograd.grad(A.dense()[..., 0].sum(), bias)
    (wanted,) = torch.autograd.grad(want[..., 0].sum(), bias)
    assert torch.allclose(slope, wanted, atol=1e-6)
