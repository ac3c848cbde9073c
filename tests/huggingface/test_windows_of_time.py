"""Models of sequences that look back so far and no farther: LongT5's encoder, Inkling, and Nemotron's streams."""

from __future__ import annotations

import pytest
import torch
from checking import check_model
from sequences import LENGTH, SIZES, T5, WORDS, like_sdpa, of, padding, sound, tokens
from torch import Tensor
from transformers import DynamicCache

from regard.huggingface import enable
from regard.huggingface.masks import Described
from regard.masks import causal, window


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_longt5(side):
    """Its blocks of three are a window; padded queries have outputs of their own, and are left out."""
    make = of("LongT5EncoderModel", "LongT5Config", None, **T5, local_radius=6, encoder_attention_type="local")
    real = None if side is None else padding(side)
    inputs = {"input_ids": tokens()} | ({} if real is None else {"attention_mask": real})
    check_model(make, inputs, valid=None if real is None else real.bool(), attentions=False, layers=2)


def test_longt5_looks_no_farther_than_its_radius():
    make = of("LongT5EncoderModel", "LongT5Config", None, **T5, local_radius=6, encoder_attention_type="local")
    model = make().eval()
    enable(model)
    away = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    for A in model(tokens(), output_attentions=True).attentions:
        assert torch.equal(A.dense() > 0, (away <= 6).expand(2, 4, -1, -1))


def test_longt5_with_its_decoder():
    make = of(
        "LongT5ForConditionalGeneration", "LongT5Config", None, **T5, local_radius=6, encoder_attention_type="local"
    )
    check_model(make, {"input_ids": tokens(), "decoder_input_ids": tokens(17)}, attentions=False, layers=6)


def test_longt5_with_global_tokens_is_refused():
    make = of("LongT5EncoderModel", "LongT5Config", None, **T5, encoder_attention_type="transient-global")
    with pytest.raises(NotImplementedError, match=r"TransientGlobalSelfAttention.*side tokens"):
        enable(make())


INKLING = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4,
    "sliding_window_size": 7, "rel_extent": 12, "log_scaling_n_floor": 10, "intermediate_size": 48,
    "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_inkling(side):
    """A bias for each query and distance, in a window and beyond; grouped heads, and a scale that grows with length."""
    real = None if side is None else padding(side)
    inputs = {"input_ids": tokens(), "use_cache": False} | ({} if real is None else {"attention_mask": real})
    make = of("InklingTextModel", "InklingTextConfig", **INKLING)
    check_model(make, inputs, valid=None if real is None else real.bool(), layers=4)


def test_inkling_step_by_step():
    """A prompt, and then a token at a time: the caches of the windows drop keys."""
    model = of("InklingTextModel", "InklingTextConfig", **INKLING)().eval()

    def stepped() -> Tensor:
        made = [model(tokens()[:, :25])]
        for at in range(25, 32):
            made.append(model(tokens()[:, at : at + 1], past_key_values=made[-1].past_key_values))
        return torch.cat([x.last_hidden_state for x in made], dim=1)

    with torch.no_grad():
        want = stepped()
        enable(model)
        found = stepped()
    assert torch.allclose(found, want, atol=1e-5 * float(want.abs().max()))


def nemotron():
    return of(
        "NemotronAsrStreamingEncoder", "NemotronAsrStreamingEncoderConfig", {"attn_implementation": "sdpa"}, **SIZES,
        num_mel_bins=80, subsampling_conv_channels=8, conv_kernel_size=3, max_position_embeddings=100, dropout=0.0,
        dropout_positions=0.0, layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_nemotron(padded):
    """Its eager attention takes a mask the wrong way round, and gives NaN: the oracle is its sdpa."""
    inputs: dict = {"input_features": sound(2, 200, 80)}
    real = torch.ones(2, 26, dtype=torch.bool)
    if padded:
        inputs["attention_mask"] = (torch.arange(200) < torch.tensor([200, 120])[:, None]).long()
        real = torch.arange(26) < torch.tensor([26, 15])[:, None]
    like_sdpa(looking_ahead(2), inputs, real)


def looking_ahead(frames: int):
    def make():
        model = nemotron()()
        model.config.default_num_lookahead_tokens = frames
        return model

    return make


def test_nemotron_in_pieces():
    """A stream with its caches: the same as the model's own, piece by piece."""
    model = looking_ahead(1)().eval()
    sounds = sound(1, 160, 80).split([89, 71], dim=1)

    def streamed() -> Tensor:
        made = model(input_features=sounds[0], use_cache=True)
        more = model(
            input_features=sounds[1], use_cache=True, past_key_values=made.past_key_values,
            padding_cache=made.padding_cache,
        )  # fmt: skip
        return torch.cat([made.last_hidden_state, more.last_hidden_state], dim=1)

    with torch.no_grad():
        want = streamed()
        enable(model)
        found = streamed()
    assert torch.allclose(found, want, atol=1e-5 * float(want.abs().max()))


def test_nemotron_without_a_mask():
    """A layer by itself, whose queries come after those that its cache holds."""
    layer = nemotron()().layers[0].self_attn.eval()
    config = layer.config
    config._attn_implementation = "sdpa"
    x, places = sound(1, 9, 32), sound(1, 17, 32)

    def stepped() -> Tensor:
        cache = DynamicCache()
        layer(x[:, :5], places[:, 4:13], past_key_values=cache)
        return layer(x[:, 5:], places, past_key_values=cache)[0]

    with torch.no_grad():
        want = stepped()
        enable(layer)
        found = stepped()
    assert torch.allclose(found, want, atol=1e-5 * float(want.abs().max()))


def test_who_sees_nothing_can_be_asked_of_a_description():
    """torch.all(~mask, dim=-1), as for a tensor; any other question of what is hidden is refused."""
    mask = Described(causal & ~window(2), 0, 0, (2, 6, 6), torch.device("cpu"))
    assert torch.equal(torch.all(~mask, dim=-1), torch.all(~mask.dense(), dim=-1))
    assert torch.all(~mask, dim=-1)[0, 0].tolist() == [True] * 3 + [False] * 3
    with pytest.raises(TypeError, match="any of what is hidden"):
        torch.any(~mask, dim=-1)
    with pytest.raises(TypeError, match="all of what is hidden"):
        torch.all(~mask)
