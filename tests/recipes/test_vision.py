"""Swin, Swin v2, BEiT, SAM and ViTDet against our recipes swin, swin_v2, beit and sam."""

from __future__ import annotations

import math

import pytest
import torch
from published import Taps, agree, load, randomise, same_gradients, split, wide
from torch import Tensor, nn

import regard as rg

pytest.importorskip("transformers", reason="the published models are the reference here")

from transformers import BeitConfig, SamVisionConfig, SwinConfig, Swinv2Config, VitDetConfig
from transformers.models.beit.modeling_beit import BeitLayer, BeitRelativePositionBias
from transformers.models.sam.modeling_sam import SamVisionAttention
from transformers.models.swin.modeling_swin import SwinLayer, SwinRelativePositionBias
from transformers.models.swinv2.modeling_swinv2 import Swinv2Layer, Swinv2SelfAttention
from transformers.models.vitdet.modeling_vitdet import VitDetAttention

HEADS, DIM, HIDDEN = 3, 8, 24
BATCH = 2


def regions(barrier: Tensor) -> Tensor:
    """The region of each token of each shifted window, as ids, from the published mask [windows, length, length].

    The regions of a window see only themselves, so a region's first token names it.
    """
    return (barrier == 0).long().argmax(-1)


# Swin


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("shift", [0, 1])
def test_swin(window, shift):
    """Two images of 2 x 3 windows. Between regions Swin adds -100, not -inf: a weight of 1e-44, zero here."""
    config = SwinConfig(embed_dim=HIDDEN, window_size=window)
    config._attn_implementation = "eager"
    height, width = 2 * window, 3 * window
    layer = randomise(SwinLayer(config, HIDDEN, (height, width), HEADS, shift_size=shift), 0.3)
    module = layer.attention
    taps = Taps(q=module.q_proj, k=module.k_proj, v=module.v_proj, o=module.o_proj)
    with wide():
        _, weights = layer(torch.randn(BATCH, height * width, HIDDEN), (height, width))
    barrier = layer.get_attn_mask(height, width, torch.float64, torch.device("cpu"))
    assert (barrier is None) == (shift == 0)
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")  # a window is a batch row
    table = module.relative_position_bias.relative_position_bias_table
    recipe = rg.recipes.swin(HEADS, (window, window)).double()
    load(recipe.readout, table.T)
    masks = [None]
    if barrier is not None:
        ids = regions(barrier)
        assert ids.unique().numel() > 1, "no window has two regions"
        masks = [rg.documents(ids.repeat(BATCH, 1)), rg.dense((barrier == 0)[:, None].repeat(BATCH, 1, 1, 1))]
    for mask in masks:
        how = {"position": recipe, "geometry": rg.Grid(window, window), "mask": mask}
        agree(q, k, v, weights, taps.ins["o"], **how)
        same_gradients(q, k, v, taps.ins["o"], [(recipe.readout, lambda g: g.T)], [table], **how)


def test_swin_on_a_rectangle():
    """The published attention makes square windows only; its table of positions takes any."""
    module, window = randomise(SwinRelativePositionBias(HEADS, (2, 5))), (2, 5)
    recipe = rg.recipes.swin(HEADS, window).double()
    load(recipe.readout, module.relative_position_bias_table.T)
    bias_only(recipe, module(), rg.Grid(*window))


def bias_only(recipe: rg.Static, bias: Tensor, geometry: rg.Grid) -> None:
    """With q = 0 nothing but the bias [1, heads, length, length] is left."""
    x, v = torch.zeros(1, HEADS, geometry.size(), DIM).double(), torch.randn(1, HEADS, geometry.size(), DIM).double()
    weights = bias.softmax(-1)
    agree(x, x, v, weights, (weights @ v).transpose(1, 2).flatten(-2), position=recipe, geometry=geometry)


# Swin v2


def swin_v2_recipe(module: Swinv2SelfAttention, window, pretrained=None) -> rg.Static:
    first, _, second = module.continuous_position_bias_mlp
    recipe = rg.recipes.swin_v2(HEADS, window, hidden=first.out_features, pretrained=pretrained).double()
    load(recipe.features.weight1, first.weight)
    load(recipe.features.bias1, first.bias)
    load(recipe.features.weight2, second.weight)
    return recipe


@pytest.mark.parametrize(
    "window, pretrained", [((3, 3), None), ((2, 5), None), ((4, 4), (3, 3)), ((3, 3), (6, 6)), ((3, 3), (0, 0))]
)
def test_swin_v2(window, pretrained):
    with wide():  # the coordinates are a buffer, made in float32
        module = Swinv2SelfAttention(Swinv2Config(), HIDDEN, HEADS, window, pretrained or (0, 0))
    randomise(module, 0.3)
    with torch.no_grad():  # one temperature below the ceiling, one at it, one far above: 100 is the most there is
        module.logit_scale.copy_(torch.tensor([2.0, math.log(100), 9.0])[:, None, None])
    taps = Taps(q=module.query, k=module.key, v=module.value)
    length = window[0] * window[1]
    context, weights = module(torch.randn(BATCH, length, HIDDEN).double(), output_attentions=True)
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")
    recipe = swin_v2_recipe(module, window, pretrained)
    how = {
        "score": rg.Cosine(),
        "scale": module.logit_scale.clamp(max=math.log(100)).exp(),
        "position": recipe,
        "geometry": rg.Grid(*window),
    }
    agree(q, k, v, weights, context, **how)
    first, _, second = module.continuous_position_bias_mlp
    ours = [recipe.features.weight1, recipe.features.bias1, recipe.features.weight2, module.logit_scale]
    same_gradients(q, k, v, context, ours, [first.weight, first.bias, second.weight, module.logit_scale], **how)


def test_swin_v2_shifted():
    """The published code adds its mask of -100 twice; either way nothing is left between regions."""
    window, shift, height, width = 3, 1, 6, 9
    with wide():
        layer = Swinv2Layer(Swinv2Config(window_size=window), HIDDEN, (height, width), HEADS, shift_size=shift)
    module = randomise(layer, 0.3).attention.self
    taps = Taps(q=module.query, k=module.key, v=module.value, o=layer.attention.output.dense)
    _, weights = layer(torch.randn(BATCH, height * width, HIDDEN).double(), (height, width), output_attentions=True)
    q, k, v = (split(taps.outs[name], HEADS) for name in "qkv")
    ids = regions(layer.get_attn_mask(height, width, torch.float64))
    assert ids.unique().numel() > 1, "no window has two regions"
    agree(
        q, k, v, weights, taps.ins["o"], score=rg.Cosine(), scale=module.logit_scale.clamp(max=math.log(100)).exp(),
        position=swin_v2_recipe(module, (window, window)), geometry=rg.Grid(window, window),
        mask=rg.documents(ids.repeat(BATCH, 1)),
    )  # fmt: skip


# BEiT


@pytest.mark.parametrize("side", [2, 5])
def test_beit(side):
    config = BeitConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=16, image_size=2 * side, patch_size=2,
        use_relative_position_bias=True,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = randomise(BeitLayer(config), 0.3)
    module, seen = layer.attention, {}
    taps = Taps(q=module.q_proj, k=module.k_proj, v=module.v_proj, o=module.o_proj)
    module.register_forward_hook(lambda m, given, result: seen.update(weights=result[1]))
    with wide():
        layer(torch.randn(BATCH, side * side + 1, HIDDEN), resolution=(2 * side, 2 * side))
    q, k, v = (split(taps.outs[name], HEADS).detach() for name in "qkv")
    table = layer.relative_position_bias.relative_position_bias_table
    recipe = rg.recipes.beit(HEADS, (side, side)).double()
    load(recipe.readout, table.T)  # the last three: class token to patch, patch to class token, class token to itself
    how = {"position": recipe, "geometry": rg.Grid(side, side, unplaced=1)}
    agree(q, k, v, seen["weights"], taps.ins["o"], **how)
    same_gradients(q, k, v, taps.ins["o"], [(recipe.readout, lambda g: g.T)], [table], **how)


def test_beit_on_a_rectangle():
    """Against the published index. The published bias always resizes its table, and reads one of h x w as one of w x h:
    on a square nothing changes, on a rectangle it blends entries that are not neighbours.
    """
    table = torch.randn(3 * 9 + 3, HEADS).double()
    index = BeitRelativePositionBias.generate_relative_position_index((2, 5))
    recipe = rg.recipes.beit(HEADS, (2, 5)).double()
    load(recipe.readout, table.T)
    bias_only(recipe, table[index].permute(2, 0, 1)[None], rg.Grid(2, 5, unplaced=1))


# SAM and ViTDet


def sam_attention(grid: tuple[int, int]) -> nn.Module:
    """SAM makes square tables; with others in their place it runs on any grid."""
    config = SamVisionConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, image_size=2 * max(grid), patch_size=2, use_rel_pos=True
    )
    module = SamVisionAttention(config, window_size=0)
    module.rel_pos_h, module.rel_pos_w = (nn.Parameter(torch.empty(2 * n - 1, DIM)) for n in grid)
    return module


def vitdet_attention(grid: tuple[int, int]) -> nn.Module:
    config = VitDetConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, use_relative_position_embeddings=True)
    return VitDetAttention(config, grid)


def sam_heads(qkv: Tensor) -> Tensor:
    """q, k, v from [batch, height, width, 3 * heads * dim]."""
    return qkv.flatten(1, 2).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("make", [sam_attention, vitdet_attention])
@pytest.mark.parametrize("grid", [(2, 2), (3, 5), (6, 4)])
def test_sam(make, grid):
    module = randomise(make(grid), 0.3)
    taps = Taps(qkv=module.qkv, o=module.proj)
    with wide():
        _, weights = module(torch.randn(BATCH, *grid, HIDDEN), output_attentions=True)
    q, k, v = sam_heads(taps.outs["qkv"]).detach()
    recipe = rg.recipes.sam(DIM, grid).double()
    tables = [part.feature.values for part in recipe.features.parts]
    load(tables[0], module.rel_pos_h)
    load(tables[1], module.rel_pos_w)
    # q·k is divided by √dim, q·R is not: the default scale of attention, and the recipe's of 1
    how = {"position": recipe, "geometry": rg.Grid(*grid)}
    context = taps.ins["o"].flatten(1, 2)
    agree(q, k, v, weights.reshape(BATCH, HEADS, *weights.shape[-2:]), context, **how)
    same_gradients(q, k, v, context, tables, [module.rel_pos_h, module.rel_pos_w], **how)


def test_sam_on_another_grid():
    """On a grid that its tables were not made for SAM resizes them; the resized tables are the recipe's."""
    module, grid = randomise(sam_attention((4, 4)), 0.3), (3, 6)
    taps = Taps(qkv=module.qkv, o=module.proj)
    with wide():
        _, weights = module(torch.randn(BATCH, *grid, HIDDEN))
    q, k, v = sam_heads(taps.outs["qkv"])
    recipe = rg.recipes.sam(DIM, grid).double()
    for part, n, table in zip(recipe.features.parts, grid, (module.rel_pos_h, module.rel_pos_w), strict=True):
        rows = module.get_rel_pos(n, n, table)  # [n, n, dim], by query and key
        load(part.feature.values, torch.cat([rows[0].flip(0), rows[1:, 0]]))
    weights = weights.reshape(BATCH, HEADS, *weights.shape[-2:])
    agree(q, k, v, weights, taps.ins["o"].flatten(1, 2), position=recipe, geometry=rg.Grid(*grid))
