"""Models of images (and CLAP, whose audio is one) on regard: windows, grids, and terms by row and column."""

from __future__ import annotations

import importlib

import pytest
import torch
from checking import check_model
from torch import Tensor, nn

import regard as rg
from regard.huggingface import enable
from regard.huggingface.grids import GridBias
from regard.huggingface.windows import regions
from regard.watching import listening

pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
SWIN = {"image_size": 24, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 3}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
BEIT = {**SIZES, "intermediate_size": 16, "image_size": 12, "patch_size": 2}
SAM = {
    **SIZES, "image_size": 20, "patch_size": 2, "window_size": 4, "global_attn_indexes": [1], "output_channels": 8,
}  # fmt: skip


def make(where: str, kind: str, spread: float = 0.3, /, attention: str = "eager", **settings) -> nn.Module:
    """A small model of transformers.models, with weights that leave no table at zero and no weight flat."""
    model_class = getattr(importlib.import_module(f"transformers.models.{where}"), kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings, attn_implementation=attention))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=spread)
    return model.eval()


class ByHead(nn.Module):
    """A model whose eager weights come as [batch x heads, q_len, k_len]: with an axis for the heads."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **given):
        out = self.model(**given)
        if "attentions" in out:
            heads = self.model.config.num_attention_heads
            out["attentions"] = tuple(
                A if not isinstance(A, Tensor) or A.dim() == 4 else A.unflatten(0, (-1, heads)) for A in out.attentions
            )
        return out


def pixels(*size: int, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(3))}


def used(enabled) -> set[str]:
    return {layer.adapter.__name__ for layer in enabled.layers if layer.adapter is not None}


# Windows


@pytest.mark.parametrize("size", [(24, 24), (22, 34)], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "where, kind, adapter",
    [
        ("swin", "SwinModel", "Windows"),
        ("swinv2", "Swinv2Model", "CosineWindows"),
        ("donut.modeling_donut_swin", "DonutSwinModel", "BareWindows"),
    ],
)
def test_windows(where, kind, adapter, size):
    """Every second block is shifted; on 22 x 34 there are windows that are partly padding."""
    enabled = check_model(lambda: make(where, kind, **SWIN, **STILL), pixels(*size))
    assert used(enabled) == {adapter}


def test_windows_of_maskformer():
    settings = {**SWIN, **STILL}
    enabled = check_model(
        lambda: make("maskformer.modeling_maskformer_swin", "MaskFormerSwinModel", **settings),
        {**pixels(24, 24), "output_hidden_states": True},
    )
    assert used(enabled) == {"BareWindows"}


def test_windows_of_swin2sr():
    settings = {**SWIN, **STILL, "image_size": 12, "patch_size": 1, "depths": [2, 1], "upscale": 2}
    enabled = check_model(lambda: make("swin2sr", "Swin2SRModel", **settings), pixels(12, 15))
    assert used(enabled) == {"CosineWindows"}


def test_windows_of_clap():
    settings = {
        "window_size": 4, "num_mel_bins": 16, "spec_size": 64, "hidden_size": 24, "depths": [2, 2],
        "num_attention_heads": [2, 3], "patch_embeds_hidden_size": 12, "projection_dim": 8, "num_hidden_layers": 2,
    }  # fmt: skip
    sound = torch.randn(2, 1, 256, 16, generator=torch.Generator().manual_seed(3))
    enabled = check_model(lambda: make("clap", "ClapAudioModel", **settings, **STILL), {"input_features": sound})
    assert used(enabled) == {"BareWindows"}


@pytest.mark.parametrize("window, shift, height, width", [(2, 1, 6, 4), (3, 1, 9, 6), (4, 2, 8, 8), (7, 3, 14, 21)])
def test_regions_are_the_mask(window, shift, height, width):
    """What the ids say is what the published mask says, window by window, image by image."""
    from transformers import SwinConfig
    from transformers.models.swin.modeling_swin import SwinLayer

    layer = SwinLayer(SwinConfig(embed_dim=4, window_size=window), 4, (height, width), 1, shift_size=shift)
    barrier = layer.get_attn_mask(height, width, torch.float32, torch.device("cpu"))
    rows = 2 * len(barrier)
    zeros = torch.zeros(rows, 1, window * window, 1)
    seen = rg.attention(zeros, zeros, mask=regions(barrier, rows)).dense() > 0
    assert torch.equal(seen[:, 0], (barrier == 0).repeat(2, 1, 1))
    assert bool((barrier != 0).any())
    assert regions(None, rows) is None


# Grids


@pytest.mark.parametrize("size", [(12, 12), (16, 10)], ids=["own", "resized"])
@pytest.mark.parametrize("own, shared", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize(
    "where, kind", [("beit", "BeitModel"), ("data2vec.modeling_data2vec_vision", "Data2VecVisionModel")]
)
def test_grids(where, kind, own, shared, size):
    settings = {**BEIT, **STILL, "use_relative_position_bias": own, "use_shared_relative_position_bias": shared}
    attention = {"beit": "Patches"}.get(where, "BarePatches")
    enabled = check_model(lambda: make(where, kind, **settings), pixels(*size))
    assert used(enabled) == {attention, *(["GridTable"] if own or shared else [])}


def test_beit_on_an_oblong():
    """A table made for 4 x 6 patches, which the published code reads as one for 6 x 4."""
    settings = {**BEIT, **STILL, "image_size": (8, 12), "use_relative_position_bias": True}
    check_model(lambda: make("beit", "BeitModel", **settings), pixels(8, 12))
    check_model(lambda: make("beit", "BeitModel", **settings), pixels(12, 8))


def test_beit_with_a_mask_of_tokens():
    settings = {**BEIT, **STILL, "use_relative_position_bias": True, "use_shared_relative_position_bias": True}
    seen = torch.ones(2, 37, dtype=torch.long)
    seen[1, 20:] = 0
    check_model(lambda: make("beit", "BeitModel", **settings), {**pixels(12, 12), "attention_mask": seen})


def test_biases_add_up():
    one, two = GridBias((torch.ones(1, 8),), (1, 3)), GridBias((torch.ones(1, 8),), (1, 3))
    assert (one + None) is one
    assert len((one + two).tables) == 2
    assert (one + two).position().readout.tolist() == [[2.0] * 8]
    masked = one + "mask"
    assert (masked + two).mask == (two + masked).mask == "mask"
    with pytest.raises(ValueError, match="attention_mask: found two masks"):
        masked + "another"
    with pytest.raises(ValueError, match=r"two grids, \(1, 3\) and \(3, 1\)"):
        one + GridBias((torch.ones(1, 8),), (3, 1))


# By row and column


@pytest.mark.parametrize(
    "where, kind, settings",
    [
        ("sam", "SamVisionModel", {"mlp_dim": 16}),
        ("sam_hq", "SamHQVisionModel", {"mlp_dim": 16}),
        ("got_ocr2.modeling_got_ocr2", "GotOcr2VisionEncoder", {"mlp_dim": 16}),
        ("sam", "SamVisionModel", {"mlp_dim": 16, "use_rel_pos": False}),
    ],
)
def test_by_row_and_column(where, kind, settings):
    """The first layer is in windows, of which some are padded (10 = 4 + 4 + 2), the second is global."""
    enabled = check_model(lambda: ByHead(configured(where, kind, **SAM, **settings)), pixels(20, 20))
    assert used(enabled) == {"Decomposed"}


def configured(where: str, kind: str, **settings) -> nn.Module:
    if kind == "GotOcr2VisionEncoder":  # its class names the configuration of the whole model
        from transformers.models.got_ocr2.configuration_got_ocr2 import GotOcr2VisionConfig
        from transformers.models.got_ocr2.modeling_got_ocr2 import GotOcr2VisionEncoder

        torch.manual_seed(0)
        model = GotOcr2VisionEncoder(GotOcr2VisionConfig(**settings, attn_implementation="eager"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        return model.eval()
    return make(where, kind, **settings)


@pytest.mark.parametrize("size", [(20, 20), (14, 22)], ids=["own", "resized"])
def test_vitdet(size):
    settings = {
        **SIZES, "mlp_ratio": 1, "image_size": 20, "patch_size": 2, "window_size": 4, "window_block_indices": [0],
        "use_relative_position_embeddings": True, "pretrain_image_size": 20,
    }  # fmt: skip
    enabled = check_model(lambda: make("vitdet", "VitDetModel", **settings), pixels(*size))
    assert used(enabled) == {"DecomposedIfAsked"}


def test_seggpt():
    settings = {
        **SIZES, "image_size": (16, 8), "patch_size": 2, "pretrain_image_size": 8, "mlp_dim": 16, "merge_index": 0,
        "intermediate_hidden_state_indices": [0, 1], "drop_path_rate": 0.0, "decoder_hidden_size": 8,
    }  # fmt: skip
    random = torch.Generator().manual_seed(3)
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    images = {name: torch.randn(2, 3, 8, 8, generator=random) for name in names}
    enabled = check_model(lambda: make("seggpt", "SegGptModel", **settings), images)
    assert used(enabled) == {"DecomposedIfAsked"}


# What all of them keep


@pytest.mark.parametrize(
    "where, kind, settings, size",
    [
        ("sam", "SamVisionModel", {**SAM, "mlp_dim": 16}, 20),
        (
            "data2vec.modeling_data2vec_vision",
            "Data2VecVisionModel",
            {**BEIT, **STILL, "use_relative_position_bias": True},
            12,
        ),
        ("beit", "BeitModel", {**BEIT, **STILL, "use_relative_position_bias": True}, 12),
        ("swin", "SwinModel", {**SWIN, **STILL}, 24),
    ],
)
def test_the_class_for_sdpa(where, kind, settings, size):
    """Made for SDPA, a model may have other classes; on regard it gives what it gave, and A besides."""
    model = make(where, kind, attention="sdpa", **settings).double()
    given = {name: x.double() for name, x in pixels(size, size).items()}
    before = model(**given)[0]
    with enable(model):
        found = model(**given, output_attentions=True)
        assert all(isinstance(A, rg.AttentionMatrix) for A in found.attentions)
        assert (found[0] - before).abs().max() <= 1e-12 * before.abs().max()
    assert torch.equal(model(**given)[0], before)


MADE = {
    "swin": ("swin", "SwinModel", {**SWIN, **STILL}, 24),
    "swinv2": ("swinv2", "Swinv2Model", {**SWIN, **STILL}, 24),
    "beit": ("beit", "BeitModel", {**BEIT, **STILL, "use_shared_relative_position_bias": True}, 12),
    "sam": ("sam", "SamVisionModel", {**SAM, "mlp_dim": 16}, 20),
}


@pytest.mark.parametrize("name", MADE)
def test_checkpoints_in_training(name):
    """Computed again on the way back, a layer finds the same bias: gradients are bit by bit the same."""
    where, kind, settings, size = MADE[name]
    model, given = make(where, kind, **settings).train(), pixels(size, size)
    with enable(model):
        model(**given)[0].sum().backward()
        plain = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(**given)[0].sum().backward()
    assert plain
    for key, parameter in model.named_parameters():
        assert key not in plain or torch.equal(parameter.grad, plain[key]), key


@pytest.mark.parametrize(
    "name, setting",
    [
        ("swin", "attention_probs_dropout_prob"),
        ("swinv2", "attention_probs_dropout_prob"),
        ("beit", "attention_probs_dropout_prob"),
        ("sam", "attention_dropout"),
    ],
)
def test_weights_are_dropped_in_training_only(name, setting):
    where, kind, settings, size = MADE[name]
    model, given = make(where, kind, **{**settings, setting: 0.4}), pixels(size, size)
    with enable(model), torch.no_grad():
        assert torch.equal(model(**given)[0], model(**given)[0])
        model.train()
        assert not torch.equal(model(**given)[0], model(**given)[0])


def test_half_precision():
    where, kind, settings, size = MADE["sam"]
    check_model(lambda: ByHead(make(where, kind, **settings)), pixels(size, size), dtype=torch.bfloat16)


def test_never_the_size_of_all_pairs():
    """SAM and BEiT on a grid of 20 x 20: nothing as large as [heads, pixels, pixels] is made outside the engine."""
    from support import Largest

    for name in ("sam", "beit"):
        where, kind, settings, _ = MADE[name]
        settings = (
            {**settings, "image_size": 40, "global_attn_indexes": [0, 1]}
            if name == "sam"
            else {**settings, "image_size": 40}
        )
        model = make(where, kind, **settings)
        with torch.no_grad(), enable(model), Largest() as largest:
            model(pixel_values=torch.randn(1, 3, 40, 40))
        assert largest.numbers < 3 * 400 * 400, name
        with torch.no_grad(), Largest() as largest:
            model(pixel_values=torch.randn(1, 3, 40, 40))
        assert largest.numbers >= 3 * 400 * 400, name


LEVIT = {
    "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 2, 1],
    "key_dim": [8, 8, 8], "attention_ratio": [2, 2, 2], "mlp_ratio": [2, 2, 2], "patch_size": 16,
    "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
}  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
def test_levit(train):
    """A grid of 4 x 4, and every second cell of it; heads whose values are longer than their keys."""

    def levit() -> nn.Module:
        model = make("levit", "LevitModel", **LEVIT)
        for module in model.modules():  # batch norms: noise has no scale to be divided by
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
        return model

    # in eval mode the model keeps its biases once it has looked them up, without their gradient
    enabled = check_model(levit, pixels(64, 64), train=train, gradients=train, attentions=False, layers=6)
    assert used(enabled) == {"Unsigned", "UnsignedSubsample"}


def test_levit_gives_weights_to_those_who_listen():
    model = make("levit", "LevitModel", **LEVIT)
    layer = model.encoder.stages[0].layers[0].module
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    parts = layer.queries_keys_values(x).view(2, 16, 2, -1).transpose(1, 2)
    q, k = parts[..., :8], parts[..., 8:16]
    want = (q @ k.mT * layer.scale + layer.get_attention_biases(x.device)).softmax(-1)
    enable(model)
    heard = []
    with listening(lambda module, A, v: heard.append(A)):
        layer(x)
    assert torch.allclose(heard[0].dense(), want, atol=1e-6)
