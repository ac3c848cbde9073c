"""Recording models of transformers: enabled for the length of the `with`, and equal to what eager attention stores."""

from __future__ import annotations

import pytest
import torch

from regard.trace import Trace, record

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
WRITE = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def small(name: str, **more):
    torch.manual_seed(0)
    config = {**SIZES, **more}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).eval()
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def eager(model, **inputs):
    """The weights that the model's own eager attention stores."""
    before = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in before:
            before[id(config)] = (config, config._attn_implementation_internal)
            config._attn_implementation_internal = "eager"
    found = model(**inputs, output_attentions=True)
    for config, name in before.values():
        config._attn_implementation_internal = name
    return found


def close(trace: Trace, expected) -> None:
    assert len(trace) == len(expected)
    for n, weights in enumerate(expected):
        torch.testing.assert_close(trace[n].dense(), weights)


@torch.no_grad()
def test_bert_and_its_padding():
    model, tokens = small("BertModel"), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    plain = model(tokens, attention_mask=mask).last_hidden_state
    with record(model) as trace:
        out = model(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out, plain)
    assert torch.equal(model(tokens, attention_mask=mask).last_hidden_state, plain)  # as it was
    close(trace, eager(model, input_ids=tokens, attention_mask=mask).attentions)
    assert {(look.stack, look.kind) for look in trace.looks} == {("encoder", "self")}
    alone = record_of(model, input_ids=tokens[1:, :6])
    for a, b in zip(alone.statistics(), trace.row(1).statistics(), strict=True):
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-5)
        assert a["previous"] == pytest.approx(b["previous"], abs=1e-5)


@torch.no_grad()
def record_of(model, **inputs) -> Trace:
    with record(model) as trace:
        model(**inputs)
    return trace


GENERATING = {
    "gpt2": lambda: small("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda: small("LlamaForCausalLM", num_key_value_heads=2),
    "window": lambda: small("MistralForCausalLM", num_key_value_heads=2, sliding_window=5),
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_is_one_look_a_layer(name, cache):
    model = GENERATING[name]()
    with record(model) as trace:
        out = model.generate(ids(1, 9), cache_implementation=cache, **WRITE)
    assert torch.equal(trace.tokens(), out[:, :-1]) and not trace.notes
    close(trace, eager(model, input_ids=out[:, :-1]).attentions)


def test_generation_with_padding_on_the_left():
    model = GENERATING["llama"]()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with record(model) as trace:
        out = model.generate(ids(2, 9), attention_mask=mask, **WRITE)
    assert not trace.notes
    longer = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
    places = (longer.cumsum(-1) - 1).clamp(min=0)
    expected = eager(model, input_ids=out[:, :-1], attention_mask=longer, position_ids=places).attentions
    for n, weights in enumerate(expected):
        found = trace[n].dense()
        torch.testing.assert_close(found[0], weights[0])
        torch.testing.assert_close(found[1, :, 4:], weights[1, :, 4:])


def test_beams_are_passes_of_their_own():
    model = GENERATING["gpt2"]()
    with record(model) as trace:
        model.generate(ids(1, 9), num_beams=3, **WRITE)
    assert "rows that were reordered" in trace.notes[0] and {look.batch for look in trace.looks} == {3}
    for look, A in trace:
        assert torch.allclose(A.dense().sum(-1), torch.ones(())), look
    rows = sum(look.q_len for look in trace.looks if look.layer == 0)
    assert rows == 9 + 5


def test_t5_through_generation():
    model = small(
        "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    source = ids(1, 7)
    with record(model) as trace:
        out = model.generate(source, **WRITE)
    target = out[:, :-1]
    found = eager(model, input_ids=source, decoder_input_ids=target)
    close(trace.encoder, found.encoder_attentions)
    close(trace.decoder, found.decoder_attentions)
    close(trace.cross, found.cross_attentions)
    assert torch.equal(trace.cross.tokens("k"), source) and torch.equal(trace.decoder.tokens(), target)
    tables = {
        x["tensor"] for said in trace._document["looks"] for t in said["description"]["terms"] for x in [t["readout"]]
    }
    assert len(tables) == 2  # one for each stack, whatever the number of layers


@torch.no_grad()
def test_padding_of_the_source_is_not_that_of_the_target():
    model = small("T5Model", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    source, target, mask = ids(1, 7), ids(1, 4), torch.ones(1, 7, dtype=torch.long)
    mask[0, 5:] = 0
    trace = record_of(model, input_ids=source, decoder_input_ids=target, attention_mask=mask)
    real = {stack: trace.only(stack=stack, kind="self")._sequence("q", "real") for stack in ("encoder", "decoder")}
    assert trace._tensors[real["encoder"]].tolist() == [[True] * 5 + [False] * 2] and real["decoder"] is None
    assert torch.equal(trace.encoder.tokens(), source) and torch.equal(trace.cross.tokens("q"), target)


@torch.no_grad()
def test_whisper_and_clip_name_their_stacks():
    whisper = small(
        "WhisperModel", d_model=32, num_hidden_layers=1, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=15, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    trace = record_of(whisper, input_features=torch.randn(1, 8, 30), decoder_input_ids=ids(1, 4))
    assert [(look.stack, look.kind, look.q_len, look.k_len) for look in trace.looks] == [
        ("encoder", "self", 15, 15), ("decoder", "self", 4, 4), ("decoder", "cross", 4, 15),
    ]  # fmt: skip
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**part, "vocab_size": 60, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**part, "image_size": 8, "patch_size": 4},
    )
    clip = transformers.CLIPModel(config).eval()
    trace = record_of(clip, input_ids=ids(1, 4), pixel_values=torch.randn(1, 3, 8, 8))
    assert {look.stack for look in trace.looks} == {"text_model", "vision_model"}
    assert trace.only(stack="vision_model").tokens() is None


@torch.no_grad()
def test_albert_has_a_layer_for_each_time_its_module_is_used(tmp_path):
    model = small("AlbertModel", embedding_size=16)
    tokens = ids(1, 6)
    trace = record_of(model, input_ids=tokens)
    assert [look.layer for look in trace.looks] == [0, 1]
    close(trace, eager(model, input_ids=tokens).attentions)


@torch.no_grad()
def test_what_was_enabled_stays_enabled():
    from regard.huggingface import enable

    model = small("BertModel")
    made = enable(model)
    record_of(model, input_ids=ids(1, 5))
    assert model.config._attn_implementation_internal == "regard"
    made.disable()


@torch.no_grad()
def test_a_trace_of_transformers_is_saved_and_opened(tmp_path):
    model, tokens = small("LlamaForCausalLM", num_key_value_heads=2), ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    trace = record_of(model, input_ids=tokens, attention_mask=mask)
    trace.save(tmp_path / "x.trace")
    opened = Trace.open(tmp_path / "x.trace")
    for n in range(2):
        assert torch.equal(opened[n].dense(), trace[n].dense())
        assert torch.equal(opened[n].logits.dense(), trace[n].logits.dense())
