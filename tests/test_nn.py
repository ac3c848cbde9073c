"""Layers and models: they compute what they say, learn with every part, save, load, compile, and hand back their A."""

from __future__ import annotations

import copy
import importlib.util
import json
import math

import pytest
import safetensors
import torch
from documents import ROOT
from support import all_within_budget, within_budget
from torch import nn

import regard as rg
import regard.nn
from regard.nn import Attention, Block, Decoder, Encoder, EncoderDecoder, Recipe, load

CASES = {
    "plain": {},
    "causal": {"mask": rg.causal},
    "grouped": {"kv_heads": 2, "mask": rg.causal},
    "multi-query": {"kv_heads": 1},
    "sizes": {"head_dim": 6, "v_dim": 5},
    "no bias": {"bias": False},
    "window": {"mask": rg.window(2, 1)},
    "cosine": {"score": rg.Cosine(), "scale": 3.0},
    "softcap and sink": {"softcap": 2.0, "sink": True},
    "grid": {"geometry": rg.Grid(3, 3), "position": Recipe("swin", window=(3, 3))},
    "t5": {"position": "t5", "mask": rg.causal},
    "two terms": {"position": Recipe("alibi") + Recipe("shaw", clip=2)},
}


def fresh(module: nn.Module, std: float = 0.4) -> nn.Module:
    """Every parameter random, so that none hides at 0 or 1."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], heads, -1).permute(0, 2, 1, 3)


def by_hand(layer: Attention, x: torch.Tensor, memory: torch.Tensor | None = None, mask=None) -> torch.Tensor:
    """W_O · concat over heads of (A V), with A dense and every projection written out."""
    memory = x if memory is None else memory
    q = split(x @ layer.query.weight.mT + (0 if layer.query.bias is None else layer.query.bias), layer.heads)
    k = split(memory @ layer.key.weight.mT + (0 if layer.key.bias is None else layer.key.bias), layer.kv_heads)
    v = split(memory @ layer.value.weight.mT + (0 if layer.value.bias is None else layer.value.bias), layer.kv_heads)
    A = rg.attention(
        q, k, score=layer.score, scale=layer.scale, position=layer.position, mask=layer.mask if mask is None else mask,
        geometry=layer.geometry, q_start=0, softcap=layer.softcap, sink=layer.sink, engine="reference",
    ).dense()  # fmt: skip
    v = v.repeat_interleave(layer.heads // layer.kv_heads, 1)
    y = (A.to(v.dtype) @ v).permute(0, 2, 1, 3).flatten(-2)
    return y @ layer.output.weight.mT + (0 if layer.output.bias is None else layer.output.bias)


def judge(found: dict, plain: dict, exact: dict) -> None:
    """The output by itself, the gradients together: on a small problem plain PyTorch may be right by luck."""
    for names in (["y"], [name for name in exact if name != "y"]):
        all_within_budget(*({name: each[name] for name in names} for each in (found, plain, exact)))


def results(layer: nn.Module, run, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, and the gradient of x and of every parameter, for a loss that weighs all outputs differently."""
    x = x.detach().clone().requires_grad_()
    y = run(layer, x)
    weigh = torch.arange(y.numel(), dtype=torch.float64).sin().reshape(y.shape)
    grads = torch.autograd.grad((y * weigh.to(y.dtype)).sum(), [x, *layer.parameters()])
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"y": y, **{f"gradient of {n}": g for n, g in zip(names, grads, strict=True)}}


@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradients_are_the_equation(case):
    layer, x = fresh(Attention(8, 4, **CASES[case])), torch.randn(2, 9, 8)
    wide = copy.deepcopy(layer).double()
    found = results(layer, lambda m, x: m(x), x)
    judge(found, results(layer, by_hand, x), results(wide, by_hand, x.double()))
    assert all(float(g.detach().abs().max()) > 0 for name, g in found.items() if name != "gradient of key.bias")


def test_cross_attention_looks_at_the_memory():
    layer = fresh(Attention(8, 4, memory_dim=6, position=Recipe("table", clip=3)))
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 6)
    wide = copy.deepcopy(layer).double()
    run = lambda m, x: m(x, memory.to(x.dtype))  # noqa: E731
    hand = lambda m, x: by_hand(m, x, memory.to(x.dtype))  # noqa: E731
    judge(results(layer, run, x), results(layer, hand, x), results(wide, hand, x.double()))
    y, A = layer(x, memory, look=True)
    assert A.shape == (2, 4, 5, 7)
    assert torch.equal(layer(x, layer.remember(memory)), y)


def test_a_call_adds_its_mask_to_the_layers():
    layer, x = fresh(Attention(8, 2, mask=rg.causal)).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    _, A = layer(x, mask=rg.documents(ids), look=True)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    assert torch.equal(A.dense() > 0, ((i >= j) & (ids[:, None] == ids)).expand(2, 2, 6, 6))


def test_a_chunk_knows_its_place():
    layer, x = fresh(Attention(8, 2, position="alibi")).double(), torch.randn(1, 6, 8, dtype=torch.float64)
    whole = layer(x, x)
    part = layer(x[:, 4:], x, start=4)
    assert torch.allclose(part, whole[:, 4:], rtol=0, atol=1e-13)
    assert not torch.allclose(layer(x[:, 4:], x, start=3), whole[:, 4:], rtol=0, atol=1e-6)


def block_by_hand(block: Block, x: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    def norm(layer, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + layer.eps).sqrt()
        return x * layer.weight + layer.bias

    def feed(x):
        hidden = x @ block.feed_forward.up.weight.mT + block.feed_forward.up.bias
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        return hidden @ block.feed_forward.down.weight.mT + block.feed_forward.down.bias

    parts = [(lambda x: by_hand(block.attention, x), block.attention_norm)]
    if memory is not None:
        parts.append((lambda x: by_hand(block.cross, x, memory.to(x.dtype)), block.cross_norm))
    parts.append((feed, block.feed_forward_norm))
    for part, layer in parts:
        x = x + part(norm(layer, x)) if block.norm == "pre" else norm(layer, x + part(x))
    return x


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_its_parts(norm, cross):
    block = fresh(Block(8, 2, norm=norm, cross=cross, memory_dim=6 if cross else None, mask=rg.causal, position="t5"))
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 6) if cross else None
    wide = copy.deepcopy(block).double()
    run = lambda m, x: m(x, None if memory is None else memory.to(x.dtype))  # noqa: E731
    hand = lambda m, x: block_by_hand(m, x, memory)  # noqa: E731
    judge(results(block, run, x), results(block, hand, x), results(wide, hand, x.double()))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "swiglu"])
def test_feed_forward_activations(activation):
    part = fresh(rg.nn.FeedForward(4, 6, activation=activation)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    up = x @ part.up.weight.mT + part.up.bias
    if activation == "swiglu":
        gate = x @ part.gate.weight.mT + part.gate.bias
        hidden = gate * torch.sigmoid(gate) * up
    else:
        cube = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        hidden = {
            "relu": up.clamp(min=0),
            "gelu": 0.5 * up * (1 + torch.erf(up / math.sqrt(2))),
            "gelu_tanh": 0.5 * up * (1 + torch.tanh(cube)),
        }[activation]
    assert torch.allclose(part(x), hidden @ part.down.weight.mT + part.down.bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outputs", [300, 301, 302])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 2), (5,)])
def test_few_rows_are_multiplied_in_parts(rows, outputs, monkeypatch):
    """With three cores: cut where it pays, and the same product either way."""
    parts = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "bmm", lambda a, b: parts.append(len(a)) or bmm(a, b))
    layer, x = regard.nn.layers.Linear(240, outputs), torch.randn(*rows, 240)
    for bias in (layer.bias, None):
        layer.bias = bias
        with torch.no_grad():
            found, plain = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
            wide = None if bias is None else bias.double()
            within_budget(found, plain, nn.functional.linear(x.double(), layer.weight.double(), wide))
        assert found.is_contiguous() and layer(x).requires_grad
    assert parts == ([3, 3] if math.prod(rows) <= 4 else [])


# models


def test_a_decoder_is_embedding_blocks_norm_and_output():
    model = fresh(Decoder(11, 8, 2, 2, position="alibi", absolute="learned", length=9)).double().eval()
    tokens = torch.randint(11, (2, 7))
    x = model.embedding.weight[tokens] + model.places.table.weight[:7]
    for block in model.blocks:
        x = block_by_hand(block, x, None)
    x = nn.functional.layer_norm(x, (8,), model.norm.weight, model.norm.bias)
    assert torch.allclose(model(tokens), x @ model.embedding.weight.mT, rtol=1e-12, atol=1e-12)
    assert torch.allclose(model(tokens, last=True), model(tokens)[:, -1], rtol=1e-12, atol=1e-12)
    some = model(tokens, lengths=[3, 7], last=True)
    assert torch.allclose(some, model(tokens)[[0, 1], [2, 6]], rtol=1e-12, atol=1e-12)


def test_sinusoids_are_the_published_ones():
    model = Decoder(11, 8, 1, 2, absolute="sinusoidal")
    place = model.places(3, 2, torch.device("cpu"))  # places 3 and 4
    for n, at in enumerate((3, 4)):
        for i in range(4):
            angle = at / 10000 ** (2 * i / 8)
            assert place[0, n, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)])


def sees(model: Decoder, length: int) -> torch.Tensor:
    """Which logits depend on which tokens: [length, length], by the gradient."""
    tokens = torch.randint(model.vocabulary, (1, length))
    x = model.embedding(tokens).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda *_: x)
    logits = model(tokens)
    weigh = torch.randn(model.vocabulary)
    rows = [torch.autograd.grad((logits[0, t] * weigh).sum(), x, retain_graph=True)[0][0] for t in range(length)]
    return torch.stack(rows).abs().amax(-1) > 0


def test_the_future_is_never_seen_and_all_of_the_past_is():
    i, j = torch.arange(7)[:, None], torch.arange(7)
    assert torch.equal(sees(fresh(Decoder(11, 8, 2, 2, position="t5", tied=False)), 7), i >= j)
    one = fresh(Decoder(11, 8, 1, 2, window=2, tied=False))
    assert torch.equal(sees(one, 7), (i >= j) & (i - j <= 2))
    two = fresh(Decoder(11, 8, 2, 2, window=[2, 1], tied=False))
    assert torch.equal(sees(two, 7), (i >= j) & (i - j <= 3)), "windows add up over layers"


def test_a_wrong_mask_is_noticed():
    model = fresh(Decoder(11, 8, 2, 2, tied=False))
    model.blocks[1].attention.mask = None
    i, j = torch.arange(7)[:, None], torch.arange(7)
    assert not torch.equal(sees(model, 7), i >= j)


def learns(model: Decoder, steps: int = 150) -> float:
    """The loss after learning to repeat the token before the last one, which takes W_Q, W_K, W_V and W_O."""
    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(8, (16, 12))
        loss = nn.functional.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not still, f"never learned: {still}"
    return loss.item()


def small() -> Decoder:
    return Decoder(8, 16, 1, 2, position=Recipe("table", clip=3), tied=False, bias=False)


def test_training_moves_every_parameter_and_solves_the_task():
    model, tokens = small(), torch.randint(8, (4, 12))
    before = model(tokens, look=True)[1].decoder[0].previous_share()
    assert learns(model) < 0.1 < math.log(8)
    after = model(tokens, look=True)[1].decoder[0].previous_share()
    assert bool((after > before + 0.2).all()), "both heads look more at the token before"


@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
def test_a_frozen_projection_is_noticed(name):
    model = small()
    getattr(model.blocks[0].attention, name).weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=rf"never learned: .*{name}"):
        learns(model, steps=2)


def test_without_its_position_the_task_is_not_learned():
    model = Decoder(8, 16, 1, 2, tied=False, bias=False)
    assert learns(model, steps=60) > 0.5


def test_an_encoder_reads_both_ways_and_not_the_padding():
    model = fresh(Encoder(11, 8, 2, 2, position="t5")).double().eval()
    tokens = torch.randint(11, (2, 6))
    alone = model(tokens[1:, :4])
    padded, looks = model(tokens, lengths=[6, 4], look=True)
    assert torch.allclose(padded[1:, :4], alone, rtol=1e-12, atol=1e-12)
    assert len(looks.encoder) == 2 and bool((looks.encoder[0][1, :, :4, 4:] == 0).all())
    assert bool((looks.encoder[0][0].dense() > 0).all())


def test_an_encoder_may_take_vectors_on_a_grid():
    model = Encoder(None, 8, 2, 2, position=Recipe("sam", grid=(2, 3)), geometry=rg.Grid(2, 3))
    assert model(torch.randn(2, 6, 8)).shape == (2, 6, 8)
    with pytest.raises(ValueError, match=r"x: expected vectors \[batch, length, 8\]"):
        model(torch.randint(5, (2, 6)))


def test_an_encoder_decoder_hands_back_every_matrix():
    model = EncoderDecoder(Encoder(11, 8, 2, 2), Decoder(13, 8, 3, 2, memory_dim=8, position="alibi")).double().eval()
    source, target = torch.randint(11, (2, 5)), torch.randint(13, (2, 4))
    logits, looks = model(source, target, source_lengths=[5, 2], look=True)
    assert logits.shape == (2, 4, 13)
    assert [len(x) for x in looks] == [2, 3, 3]
    assert looks.cross[1].shape == (2, 2, 4, 5) and bool((looks.cross[1][1, :, :, 2:] == 0).all())
    alone = model(source[1:, :2], target[1:])
    assert torch.allclose(logits[1:], alone, rtol=1e-12, atol=1e-12)
    read = model.encode(source, [5, 2])
    assert torch.allclose(model.decoder(target, **read), logits, rtol=1e-12, atol=1e-12)


def test_looking_costs_nothing_until_asked(monkeypatch):
    model = Decoder(11, 8, 2, 2)
    _, looks = model(torch.randint(11, (1, 5)), look=True)
    monkeypatch.setattr("regard.engines.tiled.reduce", None)
    assert [A.shape for A in looks.decoder] == [(1, 2, 5, 5)] * 2


def test_dropout_acts_while_training_only():
    x, tokens = torch.randn(1, 5, 8), torch.randint(11, (1, 5))
    model = Decoder(11, 8, 1, 2, dropout=0.5)
    parts = {
        "weights": (Attention(8, 2, dropout=0.5), x),
        "what a part adds": (Block(8, 2, dropout=0.5), x),
        "weights in a block": (fresh(Block(8, 2, attention_dropout=0.5)), x),
        "embedding": (lambda tokens: model.embed(tokens, 0, 5), tokens),
        "all": (model, tokens),
    }
    for name, (part, given) in parts.items():
        assert not torch.equal(part(given), part(given)), name
        (model if name == "embedding" else part).eval()
        assert torch.equal(part(given), part(given)), name
        model.train()


def test_gpt2s_weights_give_gpt2s_logits_and_the_benchmark_runs():
    """`benchmarks/decode.py` on a small model: the same weights, the same logits, a table of every contender."""
    pytest.importorskip("transformers", reason="GPT-2 itself is in transformers")
    path = ROOT / "benchmarks" / "decode.py"
    spec = importlib.util.spec_from_file_location("decode", path)
    decode = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(decode)
    peer = decode.gpt2(32, 2, 4, 60)
    model, tokens = decode.ours(peer), torch.randint(60, (2, 9))
    exact = copy.deepcopy(peer).double()(tokens).logits
    within_budget(model(tokens), peer(tokens).logits, exact)
    assert float((copy.deepcopy(model).double()(tokens) - exact).detach().abs().max()) <= 1e-12
    with torch.no_grad():
        results = decode.measure([5], 1, 1, (32, 2, 4, 60))
    assert len(results["rows"][0]["milliseconds"]) == 9 and "**ours / GPT-2" in decode.table(results)


# positions

TOKENS = torch.zeros(1, 4, dtype=torch.long)


def test_each_layer_makes_its_own_term_unless_it_is_shared():
    own = Decoder(11, 8, 2, 2, position=Recipe("t5"))
    shared = Decoder(11, 8, 2, 2, position=Recipe("t5", shared=True))
    given = Decoder(11, 8, 2, 2, position=rg.recipes.t5(2))
    for model, count in ((own, 2), (shared, 1), (given, 1)):
        assert len({id(a.position) for a in model.attentions}) == count
        assert sum("readout" in name for name, _ in model.named_parameters()) == count
    mixed = Decoder(11, 8, 3, 2, position=["alibi", None, lambda heads, dim: rg.recipes.shaw(dim, 2)])
    assert [type(a.position).__name__ for a in mixed.attentions] == ["Static", "NoneType", "FromQuery"]


def test_a_recipe_says_what_it_is():
    both = Recipe("alibi") + Recipe("shaw", clip=4)
    assert repr(both) == "Recipe('alibi') + Recipe('shaw', clip=4)"
    assert both == Recipe("alibi") + Recipe("shaw", clip=4) != Recipe("alibi")
    assert repr(Recipe("t5", shared=True, buckets=8)) == "Recipe('t5', buckets=8, shared=True)"


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Recipe("t6"), "position: expected one of alibi, .* found 't6'"),
        (lambda: Recipe("t5", heads=3), "position: t5 gets its heads from the layer"),
        (lambda: Recipe("shaw"), "position: shaw: missing a required argument: 'clip'"),
        (lambda: Recipe("t5", clip=3), "position: t5: got an unexpected keyword argument 'clip'"),
        (lambda: Recipe("t5", shared=True) + Recipe("alibi"), "shared between layers and the other is not"),
        (lambda: Attention(8, 2, position=3), "position: expected a term, a name, a Recipe or a function"),
        (lambda: Attention(8, 2, position=lambda h, d: 3), "position: expected the function to make a term, found int"),
        (lambda: Attention(8, 3), "heads: expected a divisor of dim"),
        (lambda: Attention(8, 4, kv_heads=3), r"kv_heads: expected a divisor of heads \(4\), found 3"),
        (lambda: Attention(8, 0), "heads: expected a positive number, found 0"),
        (lambda: Block(8, 2, norm="mid"), "norm: expected 'pre' or 'post', found 'mid'"),
        (lambda: Block(8, 2, activation="tanh"), "activation: expected one of gelu"),
        (lambda: Decoder(9, 8, 2, 2, position=["t5"]), "position: expected one for each of the 2 layers, found 1"),
        (lambda: Decoder(9, 8, 2, 2, window=[1, 2, 3]), "window: expected one for each of the 2 layers, found 3"),
        (lambda: Decoder(9, 8, 2, 2, absolute="learned"), "length: learned absolute positions need"),
        (lambda: Decoder(9, 8, 2, 2, absolute="both"), "absolute: expected 'learned', 'sinusoidal' or None"),
        (lambda: Decoder(9, 8, 1, 2, absolute="learned", length=3)(TOKENS), "has 3 learned .* found 4"),
        (lambda: Decoder(9, 8, 1, 2)(torch.zeros(1, 4)), "tokens: expected whole numbers"),
        (lambda: Decoder(9, 8, 1, 2)(TOKENS, lengths=[5]), "lengths: expected 1 numbers from 0 to 4"),
        (lambda: EncoderDecoder(Encoder(9, 8, 1, 2), Decoder(9, 8, 1, 2)), "decoder: .* made with memory_dim=8"),
        (lambda: Block(8, 2, cross=True)(torch.zeros(1, 2, 8)), "memory: this block has cross-attention"),
        (lambda: Block(8, 2)(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)), "memory: this block was made without"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()


# files, dtypes, compilers


MODELS = {
    "decoder": lambda: Decoder(11, 8, 2, 2, position=Recipe("t5", shared=True, buckets=8), window=[3, None]),
    "sum": lambda: Decoder(
        11, 8, 2, 2, position=Recipe("alibi") + Recipe("shaw", clip=(3, 1)), score=rg.Euclidean(2.0)
    ),
    "per layer": lambda: Decoder(11, 8, 2, 2, position=["rotary", Recipe("deberta", buckets=4)], tied=False),
    "absolute": lambda: Decoder(11, 8, 2, 2, absolute="learned", length=16, norm="post", activation="swiglu"),
    "encoder": lambda: Encoder(
        11,
        8,
        2,
        2,
        position=Recipe("swin", window=(2, 3)),
        geometry=rg.Grid(2, 3),
        mask=[None, rg.window((1, 1), (1, 1))],
    ),
    "both": lambda: EncoderDecoder(
        Encoder(11, 8, 2, 2, position=Recipe("t5", shared=True)), Decoder(11, 8, 1, 2, memory_dim=8, sink=True)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_comes_back_from_its_file(kind, dtype, tmp_path):
    model = fresh(MODELS[kind]()).to(dtype).eval()
    given = [torch.randint(11, (2, 6))] * (2 if kind == "both" else 1)
    model.save(tmp_path / "m.safetensors", origin="a test")
    again = type(model).load(tmp_path / "m.safetensors")
    assert torch.equal(again(*given), model(*given)) and not again.training
    assert again.configuration == model.configuration
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        header = file.metadata()
    assert header["origin"] == "a test" and json.loads(header["regard"])["model"] == type(model).__name__


def test_a_term_of_ones_own_is_asked_for_again(tmp_path):
    make = lambda heads, dim: rg.Static(rg.Clipped(2), heads)  # noqa: E731
    model = fresh(Decoder(11, 8, 2, 2, position=make)).eval()
    model.save(tmp_path / "m")
    with pytest.raises(
        ValueError, match=r"position: the model was made with a function of its own.*load it with position=..."
    ):
        load(tmp_path / "m")
    tokens = torch.randint(11, (1, 6))
    assert torch.equal(load(tmp_path / "m", position=make)(tokens), model(tokens))
    with pytest.raises(TypeError, match="path: expected Encoder, found Decoder"):
        Encoder.load(tmp_path / "m", position=make)


def test_a_file_of_someone_elses(tmp_path):
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "m")
    with pytest.raises(ValueError, match="was not written by save"):
        load(tmp_path / "m")


def test_names_in_the_state_are_readable():
    names = set(Decoder(11, 8, 1, 2, position="t5").state_dict())
    assert {f"blocks.0.attention.{p}.weight" for p in ("query", "key", "value", "output")} <= names
    assert "blocks.0.attention.position.readout" in names and "embedding.weight" in names


def test_training_step_compiles_with_fullgraph():
    torch._dynamo.reset()
    model = Decoder(11, 8, 1, 2, position=Recipe("t5") + Recipe("shaw", clip=3), absolute="sinusoidal", window=4)
    tokens = torch.randint(11, (2, 9))
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        grads.append({"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}})
    wide = copy.deepcopy(model).double()
    wide.zero_grad()
    loss = nn.functional.cross_entropy(wide(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    exact = {"loss": loss.detach(), **{name: p.grad for name, p in wide.named_parameters()}}
    all_within_budget(grads[1], grads[0], exact)
    torch._dynamo.reset()


def test_autocast_lowers_the_products_and_keeps_the_weights():
    model = Decoder(11, 8, 2, 2, position="t5")
    tokens = torch.randint(11, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, looks = model(tokens, look=True)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    assert looks.decoder[0].dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    wide = copy.deepcopy(model).double()
    low = copy.deepcopy(model).bfloat16()
    within_budget(logits, low(tokens), wide(tokens))
