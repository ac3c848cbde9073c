"""Models that know eager attention only and have no relative term: BERT's kin, GPT-J, CodeGen and GPT-Neo."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checking import check_model
from sequences import LENGTH, SIZES, STILL, WORDS, of, padding, sound, tokens

from regard.huggingface import enable

TEXT = {**SIZES, **STILL, "vocab_size": WORDS, "max_position_embeddings": 64}
GPT = {
    "vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_inner": 48,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
NEO = {
    "vocab_size": WORDS, "max_position_embeddings": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "intermediate_size": 48, "window_size": 5, "attention_types": [[["global", "local"], 1]],
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS = {
    "MegatronBERT": of("MegatronBertModel", "MegatronBertConfig", **TEXT),
    "RemBERT": of("RemBertModel", "RemBertConfig", **TEXT, input_embedding_size=16, classifier_dropout_prob=0.0),
    "RoFormer": of("RoFormerModel", "RoFormerConfig", **TEXT),
    "RoFormer, values too": of("RoFormerModel", "RoFormerConfig", **TEXT, rotary_value=True),
    "TAPAS": of("TapasModel", "TapasConfig", **{**TEXT, "type_vocab_sizes": [3, 9, 9, 2, 9, 9, 9]}),
    "GPT-J": of("GPTJModel", "GPTJConfig", **GPT),
    "CodeGen": of("CodeGenModel", "CodeGenConfig", **GPT),
    "GPT-Neo": of("GPTNeoModel", "GPTNeoConfig", **NEO),
}


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_text(name, side):
    real = None if side is None else padding(side)
    inputs = {"input_ids": tokens()} | ({} if real is None else {"attention_mask": real})
    check_model(MODELS[name], inputs, valid=None if real is None else real.bool(), layers=2)


def test_characters():
    """CANINE: a mask of pairs, local attention in chunks, and attention from few to many."""
    make = of(
        "CanineModel", "CanineConfig", **{**TEXT, "num_hash_functions": 2, "num_hash_buckets": 50},
        local_transformer_stride=8, downsampling_rate=4, upsampling_kernel_size=3,
    )  # fmt: skip
    check_model(make, {"input_ids": tokens()}, layers=4)
    # a chunk of padding sees nothing: the model takes the mean of what is hidden, and what is real does not see it
    real = padding("right")
    inputs = {"input_ids": tokens(), "attention_mask": real}
    check_model(make, inputs, valid=real.bool(), attentions=False, layers=4)


def test_images_and_words():
    patches = {"image_size": 16, "patch_size": 8}
    vilt = of("ViltModel", "ViltConfig", **TEXT, **patches, max_image_length=-1)
    seen = {"pixel_values": sound(2, 3, 16, 16), "pixel_mask": torch.ones(2, 16, 16, dtype=torch.long)}
    check_model(vilt, {"input_ids": tokens(), "attention_mask": padding("right"), **seen}, layers=2)
    visual = of("VisualBertModel", "VisualBertConfig", **TEXT, visual_embedding_dim=12)
    embeds = {"visual_embeds": sound(2, 5, 12), "visual_attention_mask": torch.ones(2, 5)}
    check_model(visual, {"input_ids": tokens(), "attention_mask": padding("right").float(), **embeds}, layers=2)
    flava = of("FlavaImageModel", "FlavaImageConfig", **{**SIZES, **STILL}, **patches)
    check_model(flava, {"pixel_values": sound(2, 3, 16, 16)}, layers=2)


def test_lxmert():
    """Words, regions of an image, and each at the other."""
    make = of(
        "LxmertModel", "LxmertConfig", vocab_size=WORDS, hidden_size=32, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=12, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = {"input_ids": tokens(), "visual_feats": sound(2, 7, 12), "visual_pos": sound(2, 7, 4)}
    check_model(make, {**inputs, "attention_mask": padding("right")}, layers=5)


def test_mobilevit():
    make = of(
        "MobileViTModel", "MobileViTConfig", None, num_channels=3, image_size=32, patch_size=2,
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 12, 16, 16, 16, 24], num_attention_heads=4, mlp_ratio=2.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    check_model(make, {"pixel_values": sound(2, 3, 64, 64)}, attentions=False, layers=9)


def test_blip():
    """Words that look at an image, and the image at itself."""
    text = of("BlipTextModel", "BlipTextConfig", **TEXT, encoder_hidden_size=32, is_decoder=True, projection_dim=16)
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "encoder_hidden_states": sound(2, 6, 32)}
    inputs |= {"encoder_attention_mask": torch.ones(2, 6), "is_decoder": True, "use_cache": False}
    check_model(text, inputs, valid=padding("right").bool(), layers=4)
    image = of("BlipVisionModel", "BlipVisionConfig", **SIZES, image_size=16, patch_size=4)
    check_model(image, {"pixel_values": sound(2, 3, 16, 16)}, layers=2)


def test_git():
    make = of("GitModel", "GitConfig", **TEXT, vision_config={**SIZES, "image_size": 16, "patch_size": 8})
    inputs = {"input_ids": tokens(), "pixel_values": sound(2, 3, 16, 16), "use_cache": False}
    check_model(make, {**inputs, "attention_mask": padding("right")}, layers=4)


def test_frames():
    make = of(
        "TimesformerModel", "TimesformerConfig", None, **SIZES, **STILL, image_size=16, patch_size=8, num_frames=3,
        drop_path_rate=0,
    )  # fmt: skip
    check_model(make, {"pixel_values": sound(2, 3, 3, 16, 16)}, attentions=False, layers=4)


def test_xglm(monkeypatch):
    make = of(
        "XGLMModel", "XGLMConfig", vocab_size=WORDS, max_position_embeddings=64, d_model=32, ffn_dim=48, num_layers=2,
        attention_heads=4, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    monkeypatch.setattr(torch, "full", partial(torch.full, dtype=torch.float64))  # its lowest number is no float32
    for side in ("right", "left"):
        inputs = {"input_ids": tokens(), "attention_mask": padding(side), "use_cache": False}
        check_model(make, inputs, valid=padding(side).bool(), layers=2)


MVP = {
    "vocab_size": WORDS, "max_position_embeddings": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "dropout": 0.0, "prompt_length": 3, "prompt_mid_dim": 8,
}  # fmt: skip


def test_mvp():
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "decoder_input_ids": tokens(17)}
    check_model(of("MvpModel", "MvpConfig", **MVP), {**inputs, "use_cache": False}, layers=5)
    model = of("MvpModel", "MvpConfig", **MVP, use_prompt=True)()
    enable(model)
    with pytest.raises(NotImplementedError, match="attn_prompt: MVP's prompts"):
        model(**inputs)


def test_trocr():
    make = of(
        "TrOCRForCausalLM", "TrOCRConfig", vocab_size=WORDS, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0, cross_attention_hidden_size=24,
    )  # fmt: skip
    inputs = {"input_ids": tokens(), "encoder_hidden_states": sound(2, 9, 24), "use_cache": False}
    check_model(make, inputs, layers=4)


@pytest.mark.parametrize("kind, sizes", [("GPTJ", GPT), ("CodeGen", GPT), ("GPTNeo", NEO)])
def test_written_with_a_cache(kind, sizes):
    model = of(f"{kind}ForCausalLM", f"{kind}Config", **sizes)().eval()
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": padding("left")}
    model.generation_config.eos_token_id = None
    want = model.generate(tokens(), no_repeat_ngram_size=1, **how)
    enable(model)
    assert torch.equal(model.generate(tokens(), no_repeat_ngram_size=1, **how), want)
    assert want.shape == (2, LENGTH + 12)


def test_a_decoder_of_tapas_is_refused():
    with pytest.raises(NotImplementedError, match="as a decoder it hands on its cache too"):
        enable(of("TapasModel", "TapasConfig", **TEXT, is_decoder=True)())
