"""What people do with models goes on working with regard enabled: generating, training, compiling, saving, copying."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")

import small
import transformers
from checking import InFloat64, check_model, results
from small import DECODERS, padding, picture, sound, tokens
from support import all_within_budget, within_budget

from regard import AttentionMatrix
from regard.huggingface import disable, enable, masks


def written(model, cache=None, **inputs):
    """What a model writes, the likeliest token each time."""
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(**inputs, **how, **({} if cache is None else {"cache_implementation": cache}))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_generate_token_by_token(make, cache):
    if (make, cache) == (small.llama4, "static"):
        pytest.skip("transformers 5.17 itself cannot: create_chunked_causal_mask knows no block_sequence_ids")
    model = make()
    inputs = {"input_ids": tokens(), "attention_mask": padding("left")}
    plain = written(model, cache, **inputs)
    with enable(model):
        assert torch.equal(written(model, cache, **inputs), plain)
    assert torch.equal(written(model, cache, **inputs), plain)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_with_cross_attention(cache):
    model = small.bart()
    inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
    plain = written(model, cache, **inputs)
    with enable(model):
        assert torch.equal(written(model, cache, **inputs), plain)


def test_generate_from_speech():
    model = small.whisper()
    inputs = {"input_features": sound()}
    plain = written(model, **inputs)
    with enable(model):
        assert torch.equal(written(model, **inputs), plain)


def test_decoding_in_chunks_is_the_whole():
    """Queries that start in the middle of the sequence, against keys of all of it."""
    model = small.mistral().double()
    with torch.no_grad(), enable(model):
        whole = model(tokens()).logits
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in tokens().split(4, dim=1)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-12


@pytest.mark.parametrize("make", [small.llama, small.mistral])
def test_packed_sequences_by_their_positions(make):
    positions = torch.cat([torch.arange(4), torch.arange(5), torch.arange(2)])[None]
    inputs = {"input_ids": tokens(batch=1), "position_ids": positions, "use_cache": False}
    check_model(make, inputs)
    model = make()
    with enable(model), torch.no_grad():
        A = model(**inputs, output_attentions=True).attentions[0]
    assert "documents" in repr(A) and "dense" not in str(A._description.mask)
    assert A[0, 0, 4, :4].abs().max() == 0 and A[0, 0, 4, 4] == 1  # the second sequence does not see the first


def test_packed_sequences_by_their_bounds():
    """cu_seq_lens says the same as positions that start again."""
    model = small.llama().double()
    bounds = torch.tensor([0, 4, 9, 11], dtype=torch.int32)
    with torch.no_grad(), enable(model):
        positions = torch.cat([torch.arange(4), torch.arange(5), torch.arange(2)])[None]
        want = model(tokens(batch=1), position_ids=positions, use_cache=False).logits
        ones = torch.ones(1, 11, dtype=torch.long)  # with a mask given, positions are not looked at for packing
        how = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "attention_mask": ones, "position_ids": positions}
        assert torch.equal(model(tokens(batch=1), **how).logits, want)


@pytest.mark.parametrize("kind", ["boolean", "additive", "a bias for each pair"])
def test_masks_of_ones_own(kind):
    """A 4-D mask goes through transformers as it is."""
    seen = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(6)) < 0.6
    seen |= torch.eye(11, dtype=torch.bool)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if kind == "a bias for each pair":
        mask = mask + torch.randn(2, 1, 11, 11, generator=torch.Generator().manual_seed(7))
    plain, exact, model = small.llama(), small.llama().double(), small.llama()
    want = exact(tokens(), attention_mask=mask.double()).logits
    near = plain(tokens(), attention_mask=mask).logits
    with enable(model):
        found = model(tokens(), attention_mask=seen if kind == "boolean" else mask).logits
    within_budget(found, near, want)


def test_gradient_of_a_dense_bias():
    from regard.huggingface.interface import attend

    module = torch.nn.Identity()
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64).unbind()
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    found = attend(module, q, k, v, None, position_bias=bias)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
    assert (found - want).abs().max() < 1e-12
    weigh = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((x * weigh).sum(), bias)[0] for x in (found, want))
    assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("make", [small.bert, small.llama, small.gpt_oss])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(make, dtype):
    seen = padding("right")
    inputs = {"input_ids": tokens(), "attention_mask": seen}
    check_model(make, inputs, valid=seen.bool(), dtype=dtype, gradients=dtype == torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = small.llama().train()
    inputs = {"input_ids": tokens(), "attention_mask": padding("left")}
    with enable(model):
        want = results(model, inputs, torch.float32, padding("left").bool(), True, False)["gradients"]
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = results(model, inputs, torch.float32, padding("left").bool(), True, False)["gradients"]
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_dropout_acts_while_training_only():
    model = small.bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    with enable(model), torch.no_grad():
        still = model(tokens()).last_hidden_state
        assert torch.equal(still, model(tokens()).last_hidden_state)
        model.train()
        assert not torch.equal(still, model(tokens()).last_hidden_state)


@pytest.mark.parametrize("make", [small.bert, small.gpt2, small.llama, small.mistral, small.gemma2, small.vit])
def test_compiles_as_one_graph(make):
    model = make()
    inputs = (
        {"pixel_values": picture()} if make is small.vit else {"input_ids": tokens(), "attention_mask": padding("left")}
    )
    valid = None if make is small.vit else padding("left").bool()
    near = results(model, inputs, torch.float32, valid, True, False)
    with InFloat64():
        want = results(make().double(), inputs, torch.float64, valid, True, False)
    enable(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    found = results(model, inputs, torch.float32, valid, True, False)
    for kind in want:
        all_within_budget(found[kind], near[kind], want[kind])


@pytest.mark.parametrize("make", [small.llama, small.mistral])
def test_compiled_steps_with_a_static_cache(make):
    """One graph for every step: the place of the query is a tensor, and the cache counts on in it."""
    model, plain, exact = make(), make(), make().double()
    texts = tokens(13)
    enable(model)
    caches = [transformers.StaticCache(config=m.config, max_cache_len=16) for m in (model, plain, exact)]
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counted)
    with torch.no_grad():
        for m, cache in zip((model, plain, exact), caches, strict=True):
            with InFloat64() if m is exact else nullcontext():
                m(texts[:, :9], past_key_values=cache)
        for at in range(9, 13):
            found = step(texts[:, at : at + 1], past_key_values=caches[0]).logits
            want = plain(texts[:, at : at + 1], past_key_values=caches[1]).logits
            with InFloat64():
                right = exact(texts[:, at : at + 1], past_key_values=caches[2]).logits
            within_budget(found, want, right)
    assert counted.frame_count <= 2  # once for all steps; a second time where lengths became dynamic


def test_a_compiled_graph_describes_packed_sequences():
    """Without a mask transformers looks for packed sequences in every compiled graph: that must not become N x N."""
    model = small.llama()
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    enable(model)
    with torch.no_grad():
        want = model(tokens(batch=1), position_ids=positions, use_cache=False).logits
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend=keep)(
            tokens(batch=1), position_ids=positions, use_cache=False
        ).logits
    assert torch.equal(found, want)
    shapes = [
        node.meta["example_value"].shape
        for node in graphs[0].graph.nodes
        if "example_value" in node.meta and isinstance(node.meta["example_value"], torch.Tensor)
    ]
    assert not [shape for shape in shapes if tuple(shape[-2:]) == (11, 11)]


def test_saved_while_enabled(tmp_path):
    model = small.llama()
    with enable(model):
        model.save_pretrained(tmp_path)
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "regard" not in (tmp_path / "config.json").read_text()
    assert found.config._attn_implementation != "regard"
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [small.bert, small.t5])
def test_copies_of_an_enabled_model(make, copied):
    model = make()
    inputs = {"input_ids": tokens()} | ({"decoder_input_ids": tokens(7)} if make is small.t5 else {})
    with torch.no_grad():
        plain = model(**inputs)[0]
        enable(model)
        ours = model(**inputs)[0]
        other = copied(model)
        disable(model)
        assert torch.equal(other(**inputs)[0], ours)  # the copy is still enabled
        assert torch.equal(model(**inputs)[0], plain)
        disable(other)
        assert torch.equal(other(**inputs)[0], plain)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]


def test_saved_whole_and_loaded():
    model = small.t5()
    enable(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=False)
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(7)}
    with torch.no_grad():
        assert torch.equal(found(**inputs)[0], model(**inputs)[0])


def test_attentions_are_lazy_matrices():
    model = small.whisper()
    with enable(model), torch.no_grad():
        made = model(input_features=sound(), decoder_input_ids=tokens(7), output_attentions=True)
        for name, count, shape in (
            ("encoder_attentions", 1, (2, 4, 10, 10)),
            ("decoder_attentions", 2, (2, 4, 7, 7)),
            ("cross_attentions", 2, (2, 4, 7, 10)),
        ):
            given = getattr(made, name)
            assert isinstance(given, tuple) and len(given) == count
            assert all(isinstance(A, AttentionMatrix) and A.shape == shape for A in given)
        as_tuple = model(input_features=sound(), decoder_input_ids=tokens(7), output_attentions=True, return_dict=False)
        assert any(isinstance(x, tuple) and isinstance(x[0], AttentionMatrix) for x in as_tuple)
    model = small.bart()
    with enable(model), torch.no_grad():
        how = {
            "max_new_tokens": 3,
            "min_new_tokens": 3,
            "do_sample": False,
            "output_attentions": True,
            "return_dict_in_generate": True,
        }
        step = model.generate(tokens(), **how)
    shapes = [[A.shape for A in layers] for layers in step.decoder_attentions]
    assert shapes == [[(2, 4, 1, n)] * 2 for n in (1, 2, 3)]


def test_nothing_is_asked_for_every_pair(caplog, monkeypatch):
    """No model here needs a mask of N x N, and the log does not tell of one."""
    monkeypatch.setattr(masks, "_said", set())  # what was said before is said again
    with caplog.at_level(logging.WARNING, logger="regard"), torch.no_grad():
        for make in DECODERS:
            with enable(make()) as enabled:
                made = enabled.model(tokens(), attention_mask=padding("left"), output_attentions=True)
                for A in made.attentions:
                    assert not [x for x in A._description.mask.tensors() if x.shape[-2:] == (11, 11)]
    assert not [record for record in caplog.records if "every pair" in record.getMessage()]
