"""Wav2Vec2-BERT, SpeechT5 and Wav2Vec2-Conformer against our recipes shaw and transformer_xl."""

from __future__ import annotations

import math

import pytest
import torch
from published import Taps, agree, load, randomise, same_gradients, split, wide
from support import within_budget
from torch import nn

import regard as rg

pytest.importorskip("transformers", reason="the published models are the reference here")

from transformers import Wav2Vec2BertConfig, Wav2Vec2ConformerConfig
from transformers.models.speecht5.modeling_speecht5 import (
    SpeechT5Attention,
    SpeechT5RelativePositionalEncoding,
)
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

HEADS, DIM, HIDDEN = 4, 8, 32
BATCH = 2
CLIP = 6


@pytest.mark.parametrize("length", [4, 30])  # shorter and longer than the clip
def test_wav2vec2_bert(length):
    """Its table counts key minus query, ours query minus key: the same rows from the other end."""
    config = Wav2Vec2BertConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, position_embeddings_type="relative_key",
        left_max_position_embeddings=CLIP, right_max_position_embeddings=CLIP,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = randomise(Wav2Vec2BertSelfAttention(config), 0.4)
    taps = Taps(q=module.linear_q, k=module.linear_k, v=module.linear_v, o=module.linear_out)
    _, weights = module(torch.randn(BATCH, length, HIDDEN).double())
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")
    recipe = rg.recipes.shaw(DIM, CLIP).double()
    table = module.distance_embedding.weight
    load(recipe.features.values, table.flip(0))
    agree(q, k, v, weights, taps.ins["o"], position=recipe)
    ours = [(recipe.features.values, lambda g: g.flip(0))]
    same_gradients(q, k, v, taps.ins["o"], ours, [table], position=recipe)


@pytest.mark.parametrize("length", [4, 30])
def test_speech_t5(length):
    """Shaw again, but the table has an even number of rows: from -span to span - 1, as DeBERTa's without buckets."""
    places = randomise(SpeechT5RelativePositionalEncoding(DIM, CLIP))
    module = randomise(SpeechT5Attention(HIDDEN, HEADS), 0.4)
    taps = Taps(q=module.q_proj, k=module.k_proj, v=module.v_proj, o=module.out_proj)
    x = torch.randn(BATCH, length, HIDDEN).double()
    _, weights = module(x, position_bias=places(x), output_attentions=True)
    q, k, v = (split(taps.outs[name], HEADS) for name in "qkv")
    table = rg.Table(DIM, index=rg.LogBuckets(CLIP, None), values=places.pe_k.weight)
    # Here q is scaled before it meets either k or R: both terms carry the scale
    agree(q, k, v, weights, taps.ins["o"], position=rg.FromQuery(table, scale=1 / math.sqrt(DIM)))


@pytest.mark.parametrize("length", [4, 50])
def test_wav2vec2_conformer(length):
    """Transformer-XL with sines and cosines in pairs, sine first."""
    config = Wav2Vec2ConformerConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, position_embeddings_type="relative", max_source_positions=20
    )
    config._attn_implementation = "eager"
    module = randomise(Wav2Vec2ConformerSelfAttention(config), 0.3)
    taps = Taps(q=module.linear_q, k=module.linear_k, v=module.linear_v, o=module.linear_out)
    x = torch.randn(BATCH, length, HIDDEN).double()
    with wide():  # its sinusoids are made in float32; past max_source_positions it makes more
        places = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    _, weights = module(x, relative_position_embeddings=places)
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")
    recipe = rg.recipes.transformer_xl(HEADS, DIM, order="sin_cos").double()
    by_key, by_distance = recipe
    load(by_key.weight, module.pos_bias_u[..., None])
    load(by_distance.weight, module.linear_pos.weight.unflatten(0, (HEADS, DIM)))
    load(by_distance.offset, module.pos_bias_v)
    agree(q, k, v, weights, taps.ins["o"], position=recipe)
    ours = [
        (by_key.weight, lambda g: g.squeeze(-1)),
        (by_distance.weight, lambda g: g.flatten(0, 1)),
        by_distance.offset,
    ]
    theirs = [module.pos_bias_u, module.linear_pos.weight, module.pos_bias_v]
    same_gradients(q, k, v, taps.ins["o"], ours, theirs, position=recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinusoids_in_a_model_of_low_precision(dtype):
    """Models are cast as a whole. The published sinusoids are rounded then; rounded *frequencies* are other waves."""
    length = 1500
    delta = torch.arange(length - 1, -length, -1)[:, None]  # the published order: the earliest key first
    config = Wav2Vec2ConformerConfig(hidden_size=HIDDEN, max_source_positions=length)
    places = Wav2Vec2ConformerRelPositionalEmbedding(config).to(dtype)
    published = places(torch.zeros(1, length, HIDDEN, dtype=dtype))[0]
    exact = rg.Sinusoid(rg.Sinusoid.geometric(HIDDEN), order="sin_cos")(delta)
    model = nn.ModuleList([rg.recipes.transformer_xl(HEADS, DIM, order="sin_cos")]).to(dtype)
    within_budget(model[0][1].features(delta), published, exact, "sinusoids")
