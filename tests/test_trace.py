"""Recording models: what was recorded is what the model did, through steps, stacks, bounds and batches."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from support import within_budget
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard.cache import KVCache
from regard.generate import generate
from regard.trace import Trace, record
from regard.watching import _listeners

TEXT = "小沈阳江西演唱会邀请了，the cat sat, the cat sat"


@pytest.fixture(scope="module")
def tiny():
    return rg.models.load("tiny")


@pytest.fixture(scope="module")
def ids(tiny):
    return torch.tensor([tiny.tokenizer.encode(TEXT)])


def exact(A: rg.AttentionMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch's A in the same dtype, and in float64."""
    d = A._description
    made = []
    for dtype in (d.q.dtype, torch.float64):
        B = rg.attention(
            d.q.to(dtype), d.k.to(dtype), score=d.score, scale=d.scale, position=list(d.terms) or None, mask=d.mask,
            q_start=d.q_start, k_start=d.k_start, softcap=d.softcap, sink=d.sink, engine="reference",
        )  # fmt: skip
        made.append(B.dense())
    return made[0], made[1]


@torch.no_grad()
def test_it_records_what_the_model_did(tiny, ids):
    plain, looks = tiny.model(ids, look=True)
    with record(tiny.model, tokenizer=tiny.tokenizer) as trace:
        out = tiny.model(ids)
    assert torch.equal(out, plain)
    assert [look.layer for look in trace.looks] == list(range(6)) and trace.looks[0].path == "blocks.0.attention"
    for n, A in enumerate(looks.decoder):
        assert torch.equal(trace[n].logits.dense(), A.logits.dense())
        assert torch.equal(trace[n].dense(), A.dense()) and torch.equal(trace[n].lse, A.lse)
        assert torch.equal(trace[n, 3].dense(), trace[n].dense()[0, 3])
    assert trace.labels() == tiny.tokenizer.labels(ids[0].tolist()) == trace.labels("k")
    assert torch.equal(trace.tokens(), ids)


@torch.no_grad()
def test_the_log_sum_exp_comes_from_the_product(tiny, ids, monkeypatch):
    with record(tiny.model) as trace:
        tiny.model(ids)
    monkeypatch.setattr(rg.matrix.ops, "attend", lambda *_: pytest.fail("a second pass"))
    assert trace[2].lse.isfinite().all() and trace[2, 1].lse.isfinite().all() and trace.row(0)[2].lse.isfinite().all()


def test_in_inference_mode_it_is_computed_when_asked_for(tiny, ids):
    with torch.inference_mode(), record(tiny.model) as trace:
        tiny.model(ids)
    A = trace[1]
    assert not A._description.q.is_inference()
    assert torch.allclose(A.dense().sum(-1), torch.ones(()))
    assert A.lse.isfinite().all()


@torch.no_grad()
def test_nothing_is_left_behind(tiny, ids):
    before = {name: len(m._forward_pre_hooks) + len(m._forward_hooks) for name, m in tiny.model.named_modules()}
    with pytest.raises(RuntimeError, match="stop"), record(tiny.model):
        tiny.model(ids)
        raise RuntimeError("stop")
    assert not _listeners
    assert {n: len(m._forward_pre_hooks) + len(m._forward_hooks) for n, m in tiny.model.named_modules()} == before


@torch.no_grad()
def test_an_empty_recording_is_an_error(tiny, ids):
    with pytest.raises(RuntimeError, match="nothing was recorded"), record(nn.Linear(2, 2)):
        tiny.model(ids)  # another model's attention is not ours
    with pytest.raises(ValueError, match=r"layers: expected some of the model's 6 attention layers, found \[9\]"):
        with record(tiny.model, layers=[9]):
            tiny.model(ids)
    with pytest.raises(ValueError, match=r"heads: expected numbers from 0 to 7 \(blocks.0.attention\), found 8"):
        with record(tiny.model, heads=[8]):
            tiny.model(ids)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": [-1]}, "layers: expected numbers from 0 on, found -1"),
        ({"heads": ["a"]}, "heads: expected numbers from 0 on, found 'a'"),
        ({"dtype": torch.int32}, "dtype: expected a floating-point dtype"),
        ({"memory": -5}, "memory: expected a number of bytes, found -5"),
    ],
)
def test_arguments_are_checked(tiny, given, message):
    with pytest.raises((ValueError, TypeError), match=message), record(tiny.model, **given):
        pass


@torch.no_grad()
def test_layers_and_heads_keep_their_numbers(tiny, ids):
    with record(tiny.model) as whole:
        tiny.model(ids)
    with record(tiny.model, layers=[1, 4], heads=[6, 2]) as trace:
        tiny.model(ids)
    assert [(look.layer, look.heads) for look in trace.looks] == [(1, (2, 6)), (4, (2, 6))]
    for layer in (1, 4):
        for head in (2, 6):
            within_budget(trace[layer, head].dense(), whole[layer, head].dense(), whole[layer, head].dense().double())
    assert torch.equal(trace[-1, 6].dense(), trace[4, 6].dense())
    with pytest.raises(IndexError, match=r"head: expected one of those recorded \(2, 6\), found 1"):
        trace[1, 1]
    with pytest.raises(IndexError, match=r"layer: expected one of those recorded \(1, 4\), found 0"):
        trace[0]


@torch.no_grad()
def test_grouped_heads_can_be_chosen(ids):
    torch.manual_seed(0)
    model = rg.nn.Decoder(300, 32, 1, 4, kv_heads=2, position="t5", sink=True).eval()
    tokens = torch.randint(300, (1, 20))
    with record(model, heads=[1, 2, 3]) as trace:
        model(tokens)
    _, looks = model(tokens, look=True)
    for head in (1, 2, 3):
        A = looks.decoder[0][0, head]
        torch.testing.assert_close(trace[0, head].dense(), A.dense())


@torch.no_grad()
def test_rows_of_a_batch_are_chosen(tiny):
    tokens = torch.randint(97, 122, (3, 12))
    with record(tiny.model, tokenizer=tiny.tokenizer) as trace:
        tiny.model(tokens)
    assert trace[0].shape == (3, 8, 12, 12)
    with pytest.raises(IndexError, match=r"3 rows were recorded at once; choose one, as in trace.row\(0\)\[0, 1\]"):
        trace[0, 1]
    with pytest.raises(ValueError, match=r"trace.row\(0\).labels\(\)"):
        trace.labels()
    for row in range(3):
        assert torch.equal(trace.row(row)[2, 1].dense(), trace[2].dense()[row, 1])
        assert trace.row(row).labels() == [chr(n) for n in tokens[row].tolist()]
    with pytest.raises(IndexError, match="row: expected a row from 0 to 2, found 3"):
        trace.row(3)


@torch.no_grad()
def test_a_dtype_rounds_q_and_k_and_rows_still_add_up(tiny, ids):
    with record(tiny.model, dtype=torch.float16) as trace:
        tiny.model(ids)
    A = trace[3]
    assert A.dtype == torch.float16 == trace._tensors[trace._said(3)["k"]].dtype
    within_budget(A.dense(), *exact(A))


@torch.no_grad()
def test_values_are_kept_when_asked_for(tiny, ids):
    with record(tiny.model, values=True) as trace:
        tiny.model(ids)
    block = tiny.model.blocks[0]
    v = block.attention.remember(block.attention_norm(tiny.model.embed(ids, 0, ids.shape[1])))[1]
    assert torch.equal(trace.values(0), v)
    with record(tiny.model) as bare:
        tiny.model(ids)
    with pytest.raises(ValueError, match="values: none were recorded"):
        bare.values(0)


# Steps


@torch.no_grad()
@pytest.mark.parametrize("position", ["t5", "rotary", None])
def test_the_steps_of_a_generation_are_one_look(position):
    torch.manual_seed(1)
    model = rg.nn.Decoder(50, 32, 2, 4, kv_heads=2, position=position).eval()
    prompt = torch.randint(50, (2, 7))
    with record(model, values=True) as trace:
        new = generate(model, prompt, most=9)
    tokens = torch.cat([prompt, torch.tensor(new)[:, :-1]], dim=1)
    assert torch.equal(trace.tokens(), tokens) and len(trace) == 2 and not trace.notes
    _, looks = model(tokens, look=True)
    for n, A in enumerate(looks.decoder):
        assert trace[n].shape == A.shape
        torch.testing.assert_close(trace[n].dense(), A.dense())
        assert torch.allclose(trace[n].lse, A.lse, atol=1e-5)
        assert trace.values(n).shape == (2, 2, 15, 8)
        assert torch.equal(trace.row(1)[n, 2].dense(), trace[n].dense()[1, 2])


@torch.no_grad()
def test_chunks_of_a_prompt_are_one_look(tiny, ids):
    cache = KVCache(6)
    with record(tiny.model) as trace:
        for part in ids.split(11, dim=1):
            tiny.model(part, cache=cache)
    _, looks = tiny.model(ids, look=True)
    assert len(trace) == 6
    torch.testing.assert_close(trace[5].dense(), looks.decoder[5].dense())


@torch.no_grad()
def test_two_texts_are_two_passes(tiny, ids, caplog):
    with caplog.at_level(logging.INFO, "regard"), record(tiny.model, tokenizer=tiny.tokenizer) as trace:
        tiny.model(ids)
        tiny.model(ids[:, :5])
    assert len(trace) == 12 and trace.notes[0] == "blocks.0.attention: 2 passes, for there were another text"
    assert "another text" in caplog.text
    with pytest.raises(IndexError, match=r"layer: 2 has 2 looks, of run 0, 1; choose with trace.only\(run=...\)"):
        trace[2]
    assert trace.only(run=1)[2].shape == (1, 8, 5, 5)
    assert trace.only(run=1).labels() == trace.only(run=0).labels()[:5]


@torch.no_grad()
def test_reordered_rows_are_a_pass_of_their_own(tiny):
    tokens = torch.randint(97, 122, (2, 6))
    cache = KVCache(6)
    with record(tiny.model) as trace:
        tiny.model(tokens, cache=cache)
        cache.reorder([1, 0])
        tiny.model(torch.tensor([[100], [101]]), cache=cache)
    assert {look.run for look in trace.looks} == {0, 1}
    assert "rows that were reordered" in trace.notes[0]
    assert trace.only(run=1)[0].shape == (2, 8, 1, 7)


@torch.no_grad()
def test_rows_of_different_lengths_are_passes_of_their_own(tiny):
    with record(tiny.model) as trace:
        new = generate(tiny.model, [[97, 98, 99, 100], [101]], most=3)
    assert "rows of different lengths" in trace.notes[0] and max(look.run for look in trace.looks) == 2
    last = trace.only(run=2)
    _, looks = tiny.model(torch.tensor([[97, 98, 99, 100, *new[0][:-1]]]), look=True)
    torch.testing.assert_close(last.row(0)[5].dense()[:, :, -1], looks.decoder[5].dense()[:, :, -1])


@torch.no_grad()
def test_a_window_that_lets_go_of_keys_is_one_look_all_the_same():
    torch.manual_seed(0)
    model = rg.nn.Decoder(50, 32, 2, 4, position="t5", window=4).eval()
    tokens = torch.randint(50, (1, 12))
    cache = rg.cache.WindowCache(2, window=4)
    with record(model) as trace:
        for part in tokens.split([5, 1, 1, 1, 1, 1, 1, 1], dim=1):
            model(part, cache=cache)
    _, looks = model(tokens, look=True)
    assert len(trace) == 2 and trace[0].shape == (1, 4, 12, 12)
    torch.testing.assert_close(trace[1].dense(), looks.decoder[1].dense())


# Stacks


@pytest.fixture(scope="module")
def both():
    torch.manual_seed(0)
    encoder = rg.nn.Encoder(60, 32, 2, 4, position="t5")
    decoder = rg.nn.Decoder(60, 32, 2, 4, position="t5", memory_dim=32)
    return rg.nn.EncoderDecoder(encoder, decoder).eval()


@torch.no_grad()
def test_an_encoder_decoder_has_three_kinds_of_looks(both):
    source, target = torch.randint(60, (1, 9)), torch.randint(60, (1, 5))
    with record(both) as trace:
        both(source, target)
    _, looks = both(source, target, look=True)
    for part, found in ((trace.encoder, looks.encoder), (trace.decoder, looks.decoder), (trace.cross, looks.cross)):
        assert len(part) == 2
        for n, A in enumerate(found):
            torch.testing.assert_close(part[n].dense(), A.dense())
    assert {(look.stack, look.kind) for look in trace.cross.looks} == {("decoder", "cross")}
    assert torch.equal(trace.cross.tokens("k"), source) and torch.equal(trace.cross.tokens("q"), target)
    assert torch.equal(trace.encoder.tokens(), source) and torch.equal(trace.decoder.tokens("k"), target)
    with pytest.raises(IndexError, match="layer: 0 has 3 looks, of stack encoder, decoder; choose"):
        trace[0]
    with pytest.raises(ValueError, match="stack: expected one of decoder, encoder, found 'middle'"):
        trace.only(stack="middle")
    with pytest.raises(ValueError, match="several token sequences"):
        trace.tokens()


@torch.no_grad()
def test_an_encoder_decoder_that_writes(both):
    source = torch.randint(60, (1, 9))
    with record(both) as trace:
        new = generate(both.decoder, [[1, 2]], most=6, **both.encode(source))
    target = torch.tensor([[1, 2, *new[0][:-1]]])
    assert trace.cross[1].shape == (1, 4, 7, 9) and trace.decoder[1].shape == (1, 4, 7, 7)
    _, looks = both(source, target, look=True)
    torch.testing.assert_close(trace.cross[1].dense(), looks.cross[1].dense())
    torch.testing.assert_close(trace.decoder[1].dense(), looks.decoder[1].dense())
    assert torch.equal(trace.decoder.tokens(), target) and torch.equal(trace.cross.tokens("k"), source)


def test_layers_that_share_a_module_are_told_apart():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = rg.nn.Attention(16, 2)

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x)
            return x

    model, x = Again(), torch.randn(1, 6, 16)
    with torch.no_grad(), record(model) as trace:
        model(x)
    assert [look.layer for look in trace.looks] == [0, 1, 2]
    assert not torch.equal(trace[0].dense(), trace[2].dense())


def test_a_shared_table_is_kept_once(tmp_path):
    term = rg.recipes.t5(heads=2)
    model = nn.Sequential(*(rg.nn.Attention(16, 2, position=term) for _ in range(4)))
    with torch.no_grad(), record(model) as trace:
        model(torch.randn(1, 6, 16))
    tables = {said["description"]["terms"][0]["readout"]["tensor"] for said in trace._document["looks"]}
    assert len(tables) == 1
    with torch.no_grad():
        kept = trace[0].logits.dense()
        term.readout.mul_(2)  # the trace has its own
    assert torch.equal(trace[0].logits.dense(), kept)


def test_training_and_checkpoints_are_recorded_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = rg.nn.Attention(16, 2, position="t5", dropout=0.3)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    model, x = Model().train(), torch.randn(1, 6, 16, requires_grad=True)
    with record(model) as trace:
        model(x).sum().backward()
    assert len(trace) == 1 and not trace.notes
    with torch.no_grad():
        _, A = model.layer(x, look=True)
        torch.testing.assert_close(trace[0].dense(), A.dense())  # looking is never dropped
    assert model.layer.position.readout.grad is not None


def test_a_compiled_model_runs_eagerly(tiny, ids, caplog):
    compiled = torch.compile(tiny.model, backend="eager")
    with torch.no_grad(), caplog.at_level(logging.INFO, "regard"), record(compiled) as trace:
        compiled(ids)
    assert "it runs eagerly while it is recorded" in caplog.text
    assert trace.looks[0].path == "blocks.0.attention" and len(trace) == 6


# Memory


@torch.no_grad()
@pytest.mark.parametrize("memory", [0, 100_000])
def test_what_does_not_fit_goes_to_disk(tiny, tmp_path, memory):
    tokens = torch.randint(97, 122, (1, 300))
    with record(tiny.model) as whole:
        tiny.model(tokens)
    with record(tiny.model, memory=memory, folder=tmp_path / "spill") as trace:
        tiny.model(tokens)
    kept = trace._tensors
    assert kept.spilled and (kept.bytes <= memory or not [x for x in kept.here.values() if x.nbytes >= 1 << 16])
    for n in range(6):
        assert torch.equal(trace[n].dense(), whole[n].dense())
    trace.save(tmp_path / "x.trace")
    assert torch.equal(Trace.open(tmp_path / "x.trace")[3, 3].dense(), whole[3, 3].dense())
    assert list((tmp_path / "spill").iterdir())
    trace.close()
    assert not list((tmp_path / "spill").iterdir())


@torch.no_grad()
def test_a_forgotten_trace_leaves_nothing_on_disk(tiny, tmp_path):
    with record(tiny.model, memory=0, folder=tmp_path) as trace:
        generate(tiny.model, torch.randint(97, 122, (1, 200)), most=4)
    assert list(tmp_path.iterdir()) and len(trace) == 6
    part = trace.only(layers=[1])
    del trace
    gc.collect()
    assert part[1].shape == (1, 8, 203, 203)  # a part keeps the whole alive
    del part
    gc.collect()
    assert not list(tmp_path.iterdir())
