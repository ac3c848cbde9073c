"""Models that ask whether two tokens are in one segment: XLNet, Funnel and CPM-Ant."""

from __future__ import annotations

import pytest
import torch
from checking import check_model
from sequences import LENGTH, WORDS, of, padding, tokens
from torch import Tensor

from regard.huggingface import enable
from regard.huggingface.segments import segments_of
from regard.trace import Trace, record

XLNET = {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}
FUNNEL = {
    "vocab_size": WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8,
    "d_inner": 48, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
CPM_ANT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48,
    "num_hidden_layers": 2, "dropout_p": 0.0, "position_bias_num_buckets": 8, "position_bias_max_distance": 20,
    "prompt_types": 4, "prompt_length": 5, "segment_types": 3,
}  # fmt: skip


def xlnet(**more):
    return of("XLNetModel", "XLNetConfig", None, **{**XLNET, **more})


def sentences(first: int) -> Tensor:
    """Two sentences of different lengths; the token in place `first` is of a third kind."""
    types = torch.zeros(2, LENGTH, dtype=torch.long)
    types[0, 13:], types[1, 20:30] = 1, 1
    types[:, first] = 2
    return types


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("types", [False, True])
def test_xlnet(types, side):
    inputs = {"input_ids": tokens(), "use_mems": False}
    inputs |= {"token_type_ids": sentences(-1)} if types else {}
    inputs |= {"attention_mask": padding(side).float()} if side else {}
    check_model(xlnet(), inputs, layers=2)


@pytest.mark.parametrize("more", [{"attn_type": "uni"}, {"clamp_len": 7}], ids=["one way", "clamped"])
def test_xlnet_otherwise(more):
    check_model(xlnet(**more), {"input_ids": tokens(), "use_mems": False}, layers=2)


def test_xlnet_with_two_streams_and_memories():
    """What predicts a token must not see it; keys of an earlier part come first, in segment 0."""
    hidden, wanted = torch.zeros(2, LENGTH, LENGTH), torch.zeros(2, 1, LENGTH)
    hidden[:, :, -1], wanted[:, 0, -1] = 1, 1
    make = xlnet(mem_len=9)
    with torch.no_grad():
        mems = make().eval()(tokens(9), use_mems=True).mems
    types = sentences(-1)
    inputs = {"input_ids": tokens(), "perm_mask": hidden, "target_mapping": wanted, "mems": list(mems)}
    check_model(make, {**inputs, "token_type_ids": types, "use_mems": True}, layers=2)
    types[1] = 1  # nobody in the memories' segment
    check_model(make, {**inputs, "token_type_ids": types, "use_mems": True}, layers=2)


def test_xlnet_writes_the_same():
    model = of("XLNetLMHeadModel", "XLNetConfig", None, **XLNET, mem_len=20)().eval()
    how = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(tokens(7), **how)
    enable(model)
    assert torch.equal(model.generate(tokens(7), **how), want)


def test_xlnet_read_backwards_is_refused():
    model = xlnet(bi_data=True)().eval()
    enable(model)
    with pytest.raises(NotImplementedError, match="bi_data: half of the batch"):
        model(tokens())


def test_segments_are_the_pairs():
    """Any number of segments, and keys before the queries whose segment no query is in."""
    ids = torch.randint(4, (5, 3), generator=torch.Generator().manual_seed(0))  # [q_len, batch]
    keys = torch.cat([torch.tensor([[7, 0, 9]] * 2), ids])
    same = ids[:, None] == keys[None]  # [q_len, k_len, batch]
    own, ones = segments_of(torch.stack([same, ~same], dim=-1).float())
    assert torch.equal((own[:, :, None] & ones[:, None]).any(-1), same.permute(2, 0, 1))
    assert (ones.sum(-1) == 1).all() and (own.sum(-1) == 1).all()


@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize(
    "more", [{}, {"separate_cls": False}, {"pool_q_only": False}, {"truncate_seq": False}], ids=str
)
def test_funnel(more, side):
    inputs = {"input_ids": tokens(), "token_type_ids": sentences(0)}
    inputs |= {"attention_mask": padding(side)} if side else {}
    enabled = check_model(of("FunnelModel", "FunnelConfig", None, **FUNNEL, **more), inputs)
    assert sorted(layer.adapter.__name__ for layer in enabled.layers) == ["Funnel"] * 3 + ["FunnelTypes"] * 2


def test_funnel_with_more_kinds_of_tokens():
    types = sentences(0)
    types[0, 30:], types[1, 5:9] = 7, 3
    inputs = {"input_ids": tokens(), "token_type_ids": types}
    check_model(of("FunnelBaseModel", "FunnelConfig", None, **FUNNEL), inputs)


def test_funnel_factorized_is_refused():
    model = of("FunnelModel", "FunnelConfig", None, **FUNNEL, attention_type="factorized")()
    with pytest.raises(NotImplementedError, match="attention_type is 'factorized'"):
        enable(model)


@pytest.mark.parametrize("padded", [False, True])
def test_cpm_ant(padded):
    """Prompts are one segment and the text another; padding on the left is in the prompts'."""
    ids = tokens()
    if padded:
        ids[1, :11] = 0
    check_model(of("CpmAntModel", "CpmAntConfig", None, **CPM_ANT), {"input_ids": ids, "use_cache": False}, layers=3)


def test_cpm_ant_writes_the_same():
    model = of("CpmAntForCausalLM", "CpmAntConfig", None, **CPM_ANT)().eval()
    how = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(tokens(), **how)
    enable(model)
    assert torch.equal(model.generate(tokens(), **how), want)
    bias = model.cpmant.position_bias(*torch.zeros(4, 1, 3, dtype=torch.long).unbind())
    with pytest.raises(TypeError, match=r"only queries can be taken"):
        bias[:, 0]


@pytest.mark.parametrize("name", ["XLNet", "Funnel", "CpmAnt"])
def test_recorded_and_opened_again(name, tmp_path):
    """Segments behind q and k, tokens without a place, and points travel in a trace."""
    sizes = {"XLNet": XLNET, "Funnel": FUNNEL, "CpmAnt": CPM_ANT}[name]
    model = of(f"{name}Model", f"{name}Config", None, **sizes)().eval()
    inputs = {"input_ids": tokens()} | ({} if name == "CpmAnt" else {"token_type_ids": sentences(0)})
    with torch.no_grad(), record(model) as trace:
        weights = model(**inputs, output_attentions=True).attentions
    trace.save(tmp_path / "x.trace")
    kept = Trace.open(tmp_path / "x.trace")
    assert len(kept) == len(weights)
    for (_, A), B in zip(kept, weights, strict=True):
        want = B if isinstance(B, Tensor) else B.dense()  # CPM-Ant cuts its prompts off, and so makes a tensor of A
        assert torch.allclose(A.dense()[..., -want.shape[-2] :, -want.shape[-1] :], want, atol=1e-5)
