"""T5, DeBERTa (v1, v2 and v3), BLOOM and XLNet against our recipes t5, deberta, alibi and transformer_xl."""

from __future__ import annotations

import math

import pytest
import torch
from published import Taps, agree, load, randomise, same_gradients, split, wide
from support import within_budget

import regard as rg

pytest.importorskip("transformers", reason="the published models are the reference here")

from transformers import BloomConfig, DebertaConfig, DebertaV2Config, T5Config, XLNetConfig
from transformers.cache_utils import DynamicCache
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.deberta import modeling_deberta as deberta_v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta_v2
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

HEADS, DIM, HIDDEN = 4, 8, 32
BATCH = 2


# T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count, max_distance", [(32, 128), (8, 20), (4, 5), (64, 1000), (33, 128)])
def test_t5_buckets(count, max_distance, bidirectional):
    delta = torch.arange(-2 * max_distance, 2 * max_distance + 1)
    published = T5Attention._relative_position_bucket(-delta, bidirectional, count, max_distance)
    assert torch.equal(rg.Buckets(count, max_distance, bidirectional).index(delta[:, None]), published)


def t5_stack(decoder: bool) -> T5Stack:
    config = T5Config(
        vocab_size=11, d_model=HIDDEN, d_kv=DIM, d_ff=16, num_layers=2, num_heads=HEADS, is_decoder=decoder,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, is_encoder_decoder=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return randomise(T5Stack(config), 0.3)


def t5_layers(stack: T5Stack) -> list[tuple[T5Attention, Taps]]:
    attentions = [block.layer[0].SelfAttention for block in stack.block]
    return [(a, Taps(q=a.q, k=a.k, v=a.v, o=a.o)) for a in attentions]


def t5_recipe(stack: T5Stack, decoder: bool) -> rg.Static:
    recipe = rg.recipes.t5(HEADS, buckets=8, max_distance=20, bidirectional=not decoder).double()
    load(recipe.readout, stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.T)
    return recipe


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("length", [5, 50])  # shorter and longer than max_distance
def test_t5(decoder, length):
    stack = t5_stack(decoder)
    layers = t5_layers(stack)
    seen = stack(inputs_embeds=torch.randn(BATCH, length, HIDDEN).double(), output_attentions=True, use_cache=False)
    recipe = t5_recipe(stack, decoder)
    # T5 does not scale q·k, and only layer 0 owns a bias: every layer above uses the same one
    how = {"scale": 1.0, "position": recipe, "mask": rg.causal if decoder else None}
    for (_, taps), weights in zip(layers, seen.attentions, strict=True):
        q, k, v = (split(taps.outs[name], HEADS) for name in "qkv")
        agree(q, k, v, weights, taps.ins["o"], **how)
    _, taps = layers[0]
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")
    table = layers[0][0].relative_attention_bias.weight
    same_gradients(q, k, v, taps.ins["o"], [(recipe.readout, lambda g: g.T)], [table], **how)


def test_t5_with_a_cache():
    """Five queries after 25 cached tokens: a query's position is its place in the whole sequence."""
    stack, past, new = t5_stack(decoder=True), 25, 5
    layers = t5_layers(stack)
    x, cache = torch.randn(BATCH, past + new, HIDDEN).double(), DynamicCache()
    stack(inputs_embeds=x[:, :past], past_key_values=cache, use_cache=True)
    seen = stack(inputs_embeds=x[:, past:], past_key_values=cache, use_cache=True, output_attentions=True)
    for number, ((_, taps), weights) in enumerate(zip(layers, seen.attentions, strict=True)):
        k, v = cache.layers[number].keys, cache.layers[number].values
        how = {"scale": 1.0, "position": t5_recipe(stack, True), "mask": rg.causal, "q_start": past}
        agree(split(taps.outs["q"], HEADS), k, v, weights, taps.ins["o"], **how)


# DeBERTa


@pytest.mark.parametrize(
    "count, max_position", [(256, 512), (32, 128), (8, 20), (8, 23), (6, 5), (64, 512), (512, 1024)]
)
def test_deberta_buckets(count, max_position):
    """Also the one displacement, 1 - max_position, at which the published logarithms meet exactly."""
    delta = torch.arange(-2 * max_position, 2 * max_position + 1)
    published = deberta_v2.make_log_bucket_position(delta, count, max_position).long() + count
    assert torch.equal(rg.LogBuckets(count, max_position).index(delta[:, None]), published.clamp(0, 2 * count - 1))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("buckets, span", [(8, 20), (8, 23), (-1, 12)])
@pytest.mark.parametrize("length", [5, 50])  # within the exact buckets, and longer than the span
def test_deberta_v2(buckets, span, shared, length):
    config = DebertaV2Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=buckets, max_relative_positions=span, share_att_key=shared,
    )  # fmt: skip
    module = randomise(deberta_v2.DisentangledSelfAttention(config), 0.3)
    # Without buckets (-1) every displacement within max_relative_positions is an entry of its own
    count, max_position = (buckets, span) if buckets > 0 else (span, None)
    embeddings = torch.randn(2 * count, HIDDEN, dtype=torch.float64, requires_grad=True)
    taps = Taps(q=module.query_proj, k=module.key_proj, v=module.value_proj)
    x = torch.randn(BATCH, length, HIDDEN).double()
    relative = deberta_v2.build_relative_position(x, x, bucket_size=buckets, max_position=span)
    # With a shared key the projections run again, on the embeddings, so q and k are taken on the way
    project = (module.key_proj, module.query_proj) if shared else (module.pos_key_proj, module.pos_query_proj)
    q, k = (split(p(x), HEADS) for p in (module.query_proj, module.key_proj))
    everyone = torch.ones(BATCH, 1, length, length)
    context, weights = module(x, everyone, True, relative_pos=relative, rel_embeddings=embeddings)
    # The published scale is a square root rounded to float32, even in a float64 model
    scale = 1 / deberta_v2.scaled_size_sqrt(q, 3).item()
    assert math.isclose(scale, 1 / math.sqrt(3 * DIM), rel_tol=torch.finfo(torch.float32).eps)
    keys, queries = (split(p(embeddings)[None], HEADS)[0] for p in project)
    recipe = rg.recipes.deberta(
        HEADS, DIM, buckets=count, max_position=max_position, keys=keys, queries=queries, scale=scale
    )
    how = {"scale": scale, "position": recipe}
    v = split(taps.outs["v"], HEADS)
    agree(q, k, v, weights, context, **how)
    # Tables made from other parameters carry the gradient on to them; what a shared key gets, it gets from both uses.
    # The bias of pos_key_proj is left out: it adds the same to a whole row, so its gradient is zero but for rounding
    learned = [embeddings, project[0].weight, project[1].weight, project[1].bias]
    same_gradients(q, k, v, context, learned, learned, **how)


def test_deberta_v2_content_to_position_only():
    """One of the two terms alone is an index into the recipe; the published scale counts the terms."""
    config = DebertaV2Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p"],
        position_buckets=8, max_relative_positions=20,
    )  # fmt: skip
    module = randomise(deberta_v2.DisentangledSelfAttention(config), 0.3)
    embeddings, x = torch.randn(16, HIDDEN).double(), torch.randn(BATCH, 30, HIDDEN).double()
    context, weights = module(x, torch.ones(BATCH, 1, 30, 30), True, rel_embeddings=embeddings)
    q, k, v = (split(p(x), HEADS) for p in (module.query_proj, module.key_proj, module.value_proj))
    keys = split(module.pos_key_proj(embeddings)[None], HEADS)[0]
    scale = 1 / math.sqrt(2 * DIM)
    recipe = rg.recipes.deberta(HEADS, DIM, buckets=8, max_position=20, keys=keys, queries=keys, scale=scale)
    agree(q, k, v, weights, context, scale=scale, position=recipe[0])


@pytest.mark.parametrize("length", [5, 40])
def test_deberta_v1(length):
    """v1 has no buckets. For a text shorter than its span it cuts the middle out of its table: the same entries."""
    span = 12
    config = DebertaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=span,
    )  # fmt: skip
    module = randomise(deberta_v1.DisentangledSelfAttention(config), 0.3)
    embeddings, x = torch.randn(2 * span, HIDDEN).double(), torch.randn(BATCH, length, HIDDEN).double()
    relative = deberta_v1.build_relative_position(x, x)
    everyone = torch.ones(BATCH, 1, length, length)
    context, weights = module(x, everyone, True, relative_pos=relative, rel_embeddings=embeddings)
    # One projection makes q, k and v, head by head; the key has no bias
    q, k, v = split(module.in_proj(x), HEADS).chunk(3, dim=-1)
    q, v = (y + split(bias[None, None], HEADS) for y, bias in ((q, module.q_bias), (v, module.v_bias)))
    keys, queries = (split(p(embeddings)[None], HEADS)[0] for p in (module.pos_proj, module.pos_q_proj))
    scale = 1 / deberta_v1.scaled_size_sqrt(q, 3).item()
    recipe = rg.recipes.deberta(HEADS, DIM, buckets=span, max_position=None, keys=keys, queries=queries, scale=scale)
    agree(q, k, v, weights, context, scale=scale, position=recipe)


# BLOOM


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16, 20, 112])
def test_alibi_slopes(heads):
    """BLOOM takes its powers in float32; ours are as near the exact ones. The large model has 112 heads."""
    published = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    power = 2 ** int(math.log2(heads))
    exact = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    exact += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    ours = rg.recipes.alibi(heads).readout[:, 0]
    within_budget(ours, published, torch.tensor(exact, dtype=torch.float64), "slopes")


@pytest.mark.parametrize("heads", [4, 6, 8])  # their slopes are exact in float32
@pytest.mark.parametrize("padded", [0, 5])
@pytest.mark.parametrize("length", [7, 60])
def test_bloom(heads, padded, length):
    """BLOOM adds slope times the key's position, not distance: another logit, the same weights in every row."""
    config = BloomConfig(hidden_size=heads * DIM, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0)
    module = randomise(BloomAttention(config, layer_idx=0), 0.2)
    taps = Taps(qkv=module.query_key_value, o=module.dense)
    x = torch.randn(BATCH, length, heads * DIM).double()
    real = torch.ones(BATCH, length, dtype=torch.long)
    real[1, :padded] = 0  # on the left, where positions then count from the first real token
    visible = torch.ones(length, length).tril().bool() & real[:, None, None].bool()
    barrier = torch.zeros(visible.shape).double().masked_fill(~visible, torch.finfo(torch.float64).min)
    alibi = build_alibi_tensor(real, heads, torch.float64)
    with wide():
        _, weights = module(x, torch.zeros_like(x), alibi, barrier)
    q, k, v = module._reshape(taps.outs["qkv"])
    rows = real.bool()  # a padded query sees nothing: zeros here, an even share of everything there
    mask = rg.causal if not padded else rg.causal & rg.documents(real - 1)
    agree(q, k, v, weights, taps.ins["o"], rows, position=rg.recipes.alibi(heads), mask=mask)


# XLNet: Transformer-XL's own order, all sines first


@pytest.mark.parametrize("remembered", [0, 9])
@pytest.mark.parametrize("length", [6, 40])
def test_xlnet(remembered, length):
    config = XLNetConfig(vocab_size=11, d_model=HIDDEN, n_head=HEADS, n_layer=1, d_inner=16, dropout=0.0)
    module = randomise(XLNetRelativeAttention(config), 0.3)
    x = torch.randn(length, BATCH, HIDDEN).double()  # time first, as XLNet has it
    memory = torch.randn(remembered, BATCH, HIDDEN).double() if remembered else None
    seen = {}
    core = module.rel_attn_core

    def spy(*args, **kwargs):
        seen["heads"], seen["out"] = args[:3], core(*args, **kwargs)
        return seen["out"]

    module.rel_attn_core = spy
    with wide():
        places = XLNetModel(config).relative_positional_encoding(length, remembered + length, bsz=BATCH)
        module(x, None, None, None, places, None, mems=memory, output_attentions=True)
    q, k, v = (y.permute(1, 2, 0, 3) for y in seen["heads"])  # [batch, heads, length, dim]
    out, weights = seen["out"]
    recipe = rg.recipes.transformer_xl(HEADS, DIM).double()
    by_key, by_distance = recipe
    load(by_key.weight, module.r_w_bias[..., None])
    load(by_distance.weight, module.r.permute(1, 2, 0))
    load(by_distance.offset, module.r_r_bias)
    # Memory stands before the text: the first query's place is its length
    agree(q, k, v, weights.permute(2, 3, 0, 1), out.transpose(0, 1).flatten(-2), position=recipe, q_start=remembered)
