"""Models of sequences whose relative term is built densely, or that know eager attention only, run by adapters.

Every model is small, with random weights large enough for every part of the score to show. `check_model` compares
outputs, gradients of every parameter and rows of A with the model's own eager attention, whose float64 is the oracle.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from checking import check_model
from sequences import (
    CONVOLUTIONS,
    LENGTH,
    SIZES,
    SPEECH,
    STILL,
    T5,
    WORDS,
    like_sdpa,
    no_casts,
    of,
    padding,
    shaken,
    sound,
    tokens,
    transformers,
)
from support import Largest, within_budget
from torch import Tensor, nn

import regard as rg
from regard.huggingface import disable, enable
from regard.huggingface.adapter import is_swapped


def deberta(kind: str = "DebertaV2", **more):
    given = {
        **SIZES, **STILL, "vocab_size": WORDS, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 20, "type_vocab_size": 0, **more,
    }  # fmt: skip
    return of(f"{kind}Model", f"{kind}Config", **given)


def wav2vec2_bert(kind: str | None):
    return of(
        "Wav2Vec2BertModel", "Wav2Vec2BertConfig", **SIZES, **SPEECH, feature_projection_input_dim=20,
        conformer_conv_dropout=0.0, position_embeddings_type=kind, left_max_position_embeddings=7,
        right_max_position_embeddings=3, max_source_positions=64,
    )  # fmt: skip


def conformer(kind: str):
    return of(
        "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", **SIZES, **SPEECH, **CONVOLUTIONS,
        conformer_conv_dropout=0.0, position_embeddings_type=kind, max_source_positions=64,
    )  # fmt: skip


def parakeet(**more):
    return of(
        "ParakeetEncoder", "ParakeetEncoderConfig", **SIZES, num_mel_bins=16, subsampling_conv_channels=8,
        subsampling_factor=4, conv_kernel_size=5, dropout=0.0, dropout_positions=0.0, layerdrop=0.0,
        activation_dropout=0.0, attention_dropout=0.0, **more,
    )  # fmt: skip


mpnet = of("MPNetModel", "MPNetConfig", **SIZES, **STILL, vocab_size=WORDS)
bloom = of(
    "BloomModel", "BloomConfig", vocab_size=WORDS, hidden_size=48, n_head=6, n_layer=2, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
mpt = of("MptModel", "MptConfig", vocab_size=WORDS, d_model=48, n_heads=6, n_layers=2, max_seq_len=64)
wavlm = of("WavLMModel", "WavLMConfig", **SIZES, **SPEECH, **CONVOLUTIONS, num_buckets=8, max_bucket_distance=20)
sew_d = of(
    "SEWDModel", "SEWDConfig", **SIZES, **SPEECH, **CONVOLUTIONS, relative_attention=True, position_buckets=8,
    max_relative_positions=20, squeeze_factor=1,
)  # fmt: skip


def t5(kind: str = "T5", what: str = "Model", **more):
    return of(f"{kind}{what}", f"{kind}Config", **{**T5, **more})


TEXT = {
    "MPNet": mpnet,
    "DeBERTa v2": deberta(position_buckets=8, norm_rel_ebd="layer_norm", position_biased_input=False),
    "DeBERTa v3, shared keys, convolution": deberta(position_buckets=8, share_att_key=True, conv_kernel_size=3),
    "DeBERTa v2, no buckets, c2p only": deberta(position_buckets=-1, pos_att_type=["c2p"]),
    "DeBERTa v1": deberta("Deberta"),
    "Bloom": bloom,
    "MPT": mpt,
}
#: a module that makes the bias for its layers counts as one
LAYERS = {name: 3 for name in TEXT}


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("name", TEXT)
def test_text(name, side):
    real = None if side is None else padding(side)
    inputs = {"input_ids": tokens()} if real is None else {"input_ids": tokens(), "attention_mask": real}
    with no_casts():
        check_model(TEXT[name], inputs, valid=None if real is None else real.bool(), layers=LAYERS[name])


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
def test_t5(kind, side):
    """Encoder, decoder and cross-attention; the table of the first layer gets the gradients of all."""
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(17, seed=5)}
    if side is not None:
        inputs["attention_mask"] = padding(side)
    check_model(t5(kind), inputs, layers=6)


@pytest.mark.parametrize(
    "make", [mpnet, deberta(position_buckets=8), bloom, t5(what="EncoderModel"), t5("UMT5", "EncoderModel")]
)
def test_training(make):
    """In training mode, with every dropout at 0."""
    check_model(make, {"input_ids": tokens()}, train=True)


@pytest.mark.parametrize("make", [mpnet, deberta(position_buckets=8), bloom, t5(what="EncoderModel")])
def test_half_precision(make):
    check_model(make, {"input_ids": tokens()}, dtype=torch.bfloat16)


def test_bloom_counts_places_by_its_mask():
    """Holes between real tokens move the places of those that follow."""
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[0, 10:14], real[1, 3], real[1, 30:] = 0, 0, 0
    with no_casts():
        check_model(bloom, {"input_ids": tokens(), "attention_mask": real}, valid=real.bool())


def test_a_mask_of_pairs():
    """A mask [batch, length, length] that the user brings is no padding."""
    seen = (torch.rand(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6)) < 0.5).long()
    seen |= torch.eye(LENGTH, dtype=torch.long)
    model = deberta(position_buckets=8, position_biased_input=False)()
    model = model.encoder.eval()
    x = sound(2, LENGTH, 32)
    exact = model.double()(x.double(), seen)[0]
    plain = model.float()(x, seen)[0]
    enable(model)
    within_budget(model(x, seen)[0], plain, exact)


# Speech


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["relative_key", "relative", "rotary", None])
def test_wav2vec2_bert(kind, padded):
    inputs = {"input_features": sound(2, LENGTH, 20)}
    if padded:
        inputs["attention_mask"] = padding("right")
    check_model(wav2vec2_bert(kind), inputs, layers=2)


@pytest.mark.parametrize("kind", ["relative", "rotary"])
def test_wav2vec2_conformer(kind):
    check_model(conformer(kind), {"input_values": sound(2, 2000)}, layers=2)


@pytest.mark.parametrize("heads", [4, 2])
def test_parakeet(heads):
    check_model(parakeet(num_key_value_heads=heads), {"input_features": sound(2, 160, 16)}, layers=2)


def test_parakeet_with_padding():
    """Its eager attention gives NaN for padded queries, and in the next layer for all."""
    seen = torch.ones(2, 160, dtype=torch.long)
    seen[1, 100:] = 0
    real = torch.arange(40) < torch.tensor([40, 25])[:, None]
    like_sdpa(parakeet(), {"input_features": sound(2, 160, 16), "attention_mask": seen}, real)


def test_wavlm():
    inputs = {"input_values": sound(2, 2000)}
    check_model(wavlm, inputs, layers=2, attentions=False)
    model = wavlm().eval()
    theirs = model(**inputs, output_attentions=True).attentions
    enable(model)
    ours = model(**inputs, output_attentions=True).attentions
    for A, mean in zip(ours, theirs, strict=True):  # the model gives the mean of its heads, once a head
        assert torch.allclose(A.dense().mean(1, keepdim=True).expand_as(mean), mean, atol=1e-5)


@pytest.mark.parametrize("kind", ["SwitchTransformers", "Pop2Piano"])
def test_more_of_t5(kind):
    """The same attention in other models: a mixture of experts, and music."""
    more = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2} if kind[0] == "S" else {}
    if kind == "Pop2Piano":
        make = of("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", **{**T5, **more})
    else:
        make = t5(kind, **more)
    enabled = enable(make())
    assert len(enabled.layers) >= 6 and all("SharedBias" in layer.how for layer in enabled.layers)
    inputs = {"decoder_input_ids": tokens(17, seed=5), "attention_mask": padding("right")}
    inputs["inputs_embeds" if kind == "Pop2Piano" else "input_ids"] = (
        sound(2, LENGTH, 32) if kind == "Pop2Piano" else tokens()
    )
    with no_casts():
        check_model(make, inputs, attentions=kind == "Pop2Piano", gradients=kind == "Pop2Piano")


def test_pix2struct():
    made = of(
        "Pix2StructTextModel", "Pix2StructTextConfig", vocab_size=WORDS, hidden_size=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        initializer_range=0.02,
    )  # fmt: skip
    check_model(made, {"input_ids": tokens(), "encoder_hidden_states": sound(2, 9, 32)}, layers=4)


@pytest.mark.parametrize("padded", [False, True])
def test_speech_t5(padded):
    """Relative keys in the encoder, none in the decoder."""
    make = of(
        "SpeechT5Model", "SpeechT5Config", hidden_size=32, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        positional_dropout=0.0, encoder_max_relative_position=12,
    )  # fmt: skip
    inputs = {"input_values": sound(2, LENGTH, 32), "decoder_input_values": sound(2, 17, 32)}
    if padded:
        inputs["attention_mask"] = padding("right")
    check_model(make, inputs, layers=7)


def test_vits():
    """Relative values as well as keys; longer and shorter than the window."""
    make = of(
        "VitsModel", "VitsConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        window_size=4, ffn_dim=48, flow_size=32, spectrogram_bins=9, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip

    def encoder() -> nn.Module:
        return make().text_encoder

    for length in (LENGTH, 3):
        seen = torch.ones(2, length, dtype=torch.long)
        seen[1, length - 1 :] = 0
        inputs = {"input_ids": tokens(length), "attention_mask": seen, "padding_mask": seen[..., None].float()}
        check_model(encoder, inputs, layers=2)
    model = encoder().train()
    model.encoder.layers[0].attention.dropout = 0.1
    enable(model)
    with pytest.raises(NotImplementedError, match="training: VITS"):
        model(**inputs)


def test_fastspeech2_conformer():
    make = of(
        "FastSpeech2ConformerModel", "FastSpeech2ConformerConfig", hidden_size=32, vocab_size=WORDS, num_mel_bins=8,
        encoder_num_attention_heads=4, encoder_layers=2, encoder_linear_units=48, decoder_layers=2,
        decoder_linear_units=48, decoder_num_attention_heads=4,
    )  # fmt: skip

    def encoder() -> nn.Module:
        return make().encoder

    seen = padding("right")[:, None]
    check_model(
        encoder, {"input_tensor": tokens(), "attention_mask": seen, "return_dict": True}, valid=seen[:, 0].bool(),
        layers=2,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["", "v2"])
def test_seamless(version):
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

    kind = {"": SeamlessM4TSpeechEncoder, "v2": SeamlessM4Tv2SpeechEncoder}[version]

    def make() -> nn.Module:
        config = getattr(transformers, f"SeamlessM4T{version}Config")(
            hidden_size=32, feature_projection_input_dim=20, speech_encoder_layers=2, speech_encoder_attention_heads=4,
            speech_encoder_intermediate_size=48, speech_encoder_dropout=0.0, speech_encoder_layerdrop=0.0,
            adaptor_dropout=0.0, max_source_positions=64, attn_implementation="eager",
        )  # fmt: skip
        return shaken(kind(config))

    inputs = {"input_features": sound(2, LENGTH, 20), "attention_mask": padding("right")}
    if version == "":
        enabled = check_model(make, inputs)
        assert any("Conformer" in layer.how for layer in enabled.layers)
    else:  # in eager attention it adds its mask of booleans to the logits, as ones and zeros
        like_sdpa(make, inputs, torch.tensor([[True], [True]]).expand(2, 6))
        like_sdpa(lambda: chunked(make()), inputs, torch.tensor([[True], [True]]).expand(2, 6))


def chunked(model: nn.Module) -> nn.Module:
    model.config.speech_encoder_chunk_size, model.config.speech_encoder_left_chunk_num = 16, 1
    return model


@pytest.mark.parametrize(
    "architecture",
    [{"multi_query": True}, {"multi_query": False, "num_kv_heads": 4}, {"new_decoder_architecture": True}],
)
@pytest.mark.parametrize("side", [None, "left"])
def test_falcon(architecture, side):
    settings = {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False,
        "bias": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_kv_heads": 2, **architecture,
    }  # fmt: skip
    inputs = {"input_ids": tokens()} if side is None else {"input_ids": tokens(), "attention_mask": padding(side)}
    valid = None if side is None else padding(side).bool()
    check_model(of("FalconModel", "FalconConfig", **settings), inputs, valid=valid, layers=2)
    with pytest.raises(NotImplementedError, match="ALiBi into a dense mask"):
        enable(of("FalconModel", "FalconConfig", **{**settings, "alibi": True})())


def test_sew_d():
    check_model(sew_d, {"input_values": sound(2, 2000)}, layers=3)


# What is made on the way


LONG = 256


@pytest.mark.parametrize(
    "make, inputs",
    [
        (mpnet, {"input_ids": tokens(LONG, 1)}),
        (deberta(position_buckets=8), {"input_ids": tokens(LONG, 1), "attention_mask": padding("left", LONG)[1:]}),
        (deberta("Deberta"), {"input_ids": tokens(LONG, 1)}),
        (bloom, {"input_ids": tokens(LONG, 1), "attention_mask": padding("left", LONG)[1:]}),
        (mpt, {"input_ids": tokens(LONG, 1)}),
        (
            t5(),
            {
                "input_ids": tokens(LONG, 1),
                "decoder_input_ids": tokens(LONG, 1),
                "attention_mask": padding("left", LONG)[1:],
            },
        ),
        (t5("UMT5"), {"input_ids": tokens(LONG, 1), "decoder_input_ids": tokens(LONG, 1)}),
        (wav2vec2_bert("relative_key"), {"input_features": sound(1, LONG, 20)}),
        (wav2vec2_bert("relative"), {"input_features": sound(1, LONG, 20)}),
        (parakeet(), {"input_features": sound(1, 4 * LONG, 16)}),
        (wavlm, {"input_values": sound(1, 40 * LONG + 100)}),
    ],
)
def test_nothing_dense(make, inputs):
    """No adapter, and no mask, makes anything of length x length."""
    model = make().eval()
    enable(model)
    with torch.no_grad(), patch.object(rg.AttentionMatrix, "__matmul__", lambda A, v: _mixed(A, v)):
        with Largest() as seen:
            model(**inputs)
    assert seen.numbers < LONG * LONG, f"{seen.numbers} numbers"


def _mixed(A: rg.AttentionMatrix, v: Tensor) -> Tensor:
    """Anything of the right shape: what happens inside the engines is their own affair."""
    return v.new_zeros(*A.shape[:3], v.shape[-1])


# Decoding


def written(model: nn.Module, inputs: dict, **how) -> Tensor:
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # every run as long as the others
    # a random model would say the same word for ever: no word twice, so that each step depends on those before
    return model.generate(**inputs, max_new_tokens=24, do_sample=False, no_repeat_ngram_size=1, **how)


@pytest.mark.parametrize(
    "how", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str
)
@pytest.mark.parametrize(
    "make",
    [
        t5(what="ForConditionalGeneration"),
        t5("UMT5", "ForConditionalGeneration"),
        of("BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=48, n_head=6, n_layer=2),
        of("MptForCausalLM", "MptConfig", vocab_size=WORDS, d_model=48, n_heads=6, n_layers=2, max_seq_len=128),
    ],
)
def test_generate(make, how):
    """The same tokens as eager attention, step by step, with padding on the left and every cache; then the logits."""
    model = make().eval()
    inputs = {"input_ids": tokens(9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][1, :4] = 0
    theirs = written(model, inputs, **how)
    enable(model)
    ours = written(model, inputs, **how)
    assert len(set(theirs[0].tolist())) >= 24
    assert torch.equal(ours, theirs)


def test_a_cache_step_by_step():
    """T5's decoder, some tokens at a time, gives what it gives at once: a query stands where it stands in the text."""
    model = t5()().eval().double()
    inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
    text = tokens(30, seed=5)
    enable(model)
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=text, use_cache=False).last_hidden_state
        memory = model.encoder(**inputs)
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        for at in range(0, 30, 3):
            step = model(
                encoder_outputs=memory, attention_mask=inputs["attention_mask"], decoder_input_ids=text[:, at : at + 3],
                past_key_values=cache, output_attentions=True,
            )  # fmt: skip
            assert torch.allclose(step.last_hidden_state, whole[:, at : at + 3], atol=1e-9)
            assert step.decoder_attentions[0].shape == (2, 4, 3, at + 3)
            assert step.cross_attentions[0].shape == (2, 4, 3, LENGTH)
        # with a mask of pairs that the user brings, only the cache says where the queries stand
        cache.crop(27)
        seen = torch.ones(30, 30, dtype=torch.bool).tril()[None, None, 27:].expand(2, -1, -1, -1)
        step = model(
            encoder_outputs=memory, attention_mask=inputs["attention_mask"], decoder_input_ids=text[:, 27:],
            past_key_values=cache, decoder_attention_mask=seen,
        )  # fmt: skip
        assert torch.allclose(step.last_hidden_state, whole[:, 27:], atol=1e-9)


# Around it


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """Layers computed again in the backward pass: the shared table still gets the gradients of all of them."""
    inputs = {"inputs_embeds": sound(2, LENGTH, 32).requires_grad_()}
    found = {}
    for name in ("kept", "again"):
        model = t5(what="EncoderModel")().train()
        if name == "again":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        enable(model)
        model(**inputs).last_hidden_state.sin().sum().backward()
        found[name] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert any("relative_attention_bias" in key for key in found["kept"])
    assert found["kept"].keys() == found["again"].keys()
    for key, grad in found["kept"].items():
        assert torch.allclose(grad, found["again"][key], rtol=1e-4, atol=1e-5 * float(grad.abs().max())), key


def test_compiled():
    """In one graph, and another length in the same."""
    model = t5(what="EncoderModel", num_layers=1)().eval()
    enable(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for length in (LENGTH, 33):
            inputs = {"input_ids": tokens(length), "attention_mask": padding("right", length)}
            eager = model(**inputs).last_hidden_state
            found = compiled(**inputs).last_hidden_state
            assert torch.allclose(found, eager, atol=1e-5 * float(eager.abs().max()))


def test_refusals():
    talking = deberta("Deberta", talking_head=True)()
    with pytest.raises(NotImplementedError, match=r"encoder\.layer\.0\.attention\.self.*talking heads"):
        enable(talking)
    assert type(talking.encoder).__module__.startswith("transformers")
    assert not any(is_swapped(m) for m in talking.modules())

    model = t5()().eval()
    enable(model)
    layer = model.encoder.block[0].layer[0].SelfAttention
    with pytest.raises(TypeError, match=r"position_bias: .* found a tensor \[1, 4, 5, 5\]"):
        layer(sound(1, 5, 32), position_bias=torch.zeros(1, 4, 5, 5))
    disable(model)
    assert layer(sound(1, 5, 32), position_bias=torch.zeros(1, 4, 5, 5))[0].shape == (1, 5, 32)
