"""torch.nn.MultiheadAttention on regard."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import small
import transformers
from checking import check_model
from small import picture

from regard.huggingface.adapter import restore, swap
from regard.huggingface.multihead import MultiHead


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["none", "hidden", "added", "a head", "padding", "other widths", "no bias"])
def test_like_torch(kind, first):
    wide = {"kdim": 6, "vdim": 10} if kind == "other widths" else {}
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=first, bias=kind != "no bias", **wide).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x, k, v = torch.randn(3, 5, 8), torch.randn(3, 7, wide.get("kdim", 8)), torch.randn(3, 7, wide.get("vdim", 8))
    given = [part.double() if first else part.double().transpose(0, 1) for part in (x, k, v)]
    hide = torch.zeros(3, 7, dtype=torch.bool)
    hide[1, 5:] = True
    how = {
        "hidden": {"attn_mask": torch.ones(5, 7).triu(2).bool()},
        "added": {"attn_mask": torch.randn(5, 7).double()},
        "a head": {"attn_mask": torch.rand(6, 5, 7) < 0.3},
        "padding": {"key_padding_mask": hide},
    }.get(kind, {})
    want, weights = layer(*given, **how, average_attn_weights=False)
    swap(layer, MultiHead)
    found, A = layer(*given, **how)
    restore(layer)
    assert (found - want).abs().max() < 1e-12 and (A.dense() - weights).abs().max() < 1e-12
    assert type(layer) is torch.nn.MultiheadAttention


def test_a_key_of_its_own_is_refused():
    assert "key of its own" in MultiHead.refuses(torch.nn.MultiheadAttention(8, 2, add_bias_kv=True))


def siglip():
    size = {name: small.SIZE[name] for name in small.SIZE if name != "vocab_size"}
    config = transformers.SiglipVisionConfig(**size, image_size=16, patch_size=4, **small.EAGER)
    return small.made(transformers.SiglipVisionModel, config)


def test_a_pooling_head():
    check_model(siglip, {"pixel_values": picture()}, layers=3)
