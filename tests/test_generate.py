"""Generating: each rule does what it says, rows end by themselves, and every cache writes the same."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.cache import KVCache, PagedCache, WindowCache
from regard.generate import choose, generate, stream
from regard.nn import Decoder, Encoder, EncoderDecoder

VOCABULARY, LAYERS, WINDOW = 13, 2, 6
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
CACHES = {
    "kv": lambda: KVCache(LAYERS),
    "window": lambda: WindowCache(LAYERS, window=WINDOW),
    "paged": lambda: PagedCache(LAYERS, pages=60, page_size=4),
}


@pytest.fixture
def model() -> Decoder:
    made = Decoder(VOCABULARY, 16, LAYERS, 4, position="t5", window=WINDOW, tied=False).double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # so that what it writes depends on what it read
    return made


def by_hand(model, prompt: list[int], most: int, stop=()) -> list[int]:
    """Greedy, without a cache: the whole sequence read again for every token."""
    tokens = list(prompt)
    for _ in range(most):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# rules


def draw(logits, count: int, **rules) -> torch.Tensor:
    """How often each token was drawn."""
    rows = torch.tensor(logits).expand(count, -1)
    return torch.bincount(choose(rows, generator=seeded(), **rules), minlength=len(logits)) / count


def test_temperature_zero_takes_the_largest_and_the_lower_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 5.0]])
    assert choose(logits, temperature=0).tolist() == [1, 0]


def test_shares_are_softmax_of_the_logits_over_the_temperature():
    logits, count = [0.0, 1.0, 2.0, -1.0], 100_000
    for temperature in (0.5, 1.0, 3.0):
        wanted = (torch.tensor(logits) / temperature).softmax(-1)
        error = (wanted * (1 - wanted) / count).sqrt()  # of a share, one standard deviation
        assert bool(((draw(logits, count, temperature=temperature) - wanted).abs() <= 4 * error).all())


def test_top_k_keeps_the_k_largest_with_their_ratios():
    logits, count = [0.0, 1.0, 2.0, 1.0, -3.0], 100_000
    found = draw(logits, count, top_k=2)
    wanted = torch.zeros(5)
    wanted[[1, 2]] = torch.tensor([1.0, 2.0]).softmax(-1)  # token 1 before its equal, 3
    assert bool(((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all())
    assert draw(logits, 50, top_k=1).tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(draw(logits, 500, top_k=99), draw(logits, 500))


def test_top_p_keeps_the_fewest_that_suffice():
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = shares.log().tolist()
    kept = {0.3: {1}, 0.5: {1}, 0.51: {1, 3}, 0.79: {1, 3}, 0.81: {1, 2, 3}, 0.96: {0, 1, 2, 3}, 1.0: {0, 1, 2, 3}}
    for top_p, wanted in kept.items():
        found = draw(logits, 20_000, top_p=top_p)
        assert set(found.nonzero().flatten().tolist()) == wanted, top_p
    found, two = draw(logits, 100_000, top_p=0.7), shares[[1, 3]] / shares[[1, 3]].sum()
    assert bool(((found[[1, 3]] - two).abs() <= 4 * (two * (1 - two) / 100_000).sqrt()).all())


def test_top_p_counts_after_temperature_and_top_k():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # hot: 0.4 and 0.3 become less unlike, and 0.5 needs two of them; of the best two alone, one has more than half
    assert set(draw(shares.log().tolist(), 5000, top_p=0.39).nonzero().flatten().tolist()) == {0}
    hot = draw(shares.log().tolist(), 5000, top_p=0.39, temperature=4.0)
    assert set(hot.nonzero().flatten().tolist()) == {0, 1}
    assert set(draw(shares.log().tolist(), 5000, top_p=0.55, top_k=2).nonzero().flatten().tolist()) == {0}
    assert set(draw(shares.log().tolist(), 5000, top_p=0.55).nonzero().flatten().tolist()) == {0, 1}


def test_the_same_seed_writes_the_same(model):
    first, second, other = (
        generate(model, PROMPTS, most=8, temperature=2.0, generator=seeded(seed)) for seed in (1, 1, 2)
    )
    assert first == second != other


@pytest.mark.parametrize(
    "rules",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}],
    ids=str,
)
def test_rules_that_make_no_sense_are_named(model, rules):
    name, value = next(iter(rules.items()))
    with pytest.raises(ValueError, match=rf"{name}: expected .* found {value}"):
        stream(model, PROMPTS, most=1, **rules)
    with pytest.raises(ValueError, match=rf"{name}: "):
        choose(torch.zeros(1, 3), **rules)


def test_nan_is_not_drawn_from():
    with pytest.raises(ValueError, match="logits: expected numbers, found NaN"):
        choose(torch.tensor([[0.0, float("nan")]]))


# writing


@pytest.mark.parametrize("cache", [None, *CACHES])
def test_greedy_writing_is_reading_everything_again(model, cache):
    made = None if cache is None else CACHES[cache]()
    found = generate(model, PROMPTS, most=15, cache=made)
    assert found == [by_hand(model, prompt, 15) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3, "the rows differ, or this shows nothing"
    if made is not None:
        assert made.lengths == [len(prompt) + 14 for prompt in PROMPTS], "all but the last token were read"


@pytest.mark.parametrize("cache", CACHES)
def test_rows_end_by_themselves(model, cache):
    free = [by_hand(model, prompt, 15) for prompt in PROMPTS]
    stop = {free[0][2]}
    wanted = [by_hand(model, prompt, 15, stop) for prompt in PROMPTS]
    assert len({len(row) for row in wanted}) > 1, "the rows end at different times, or this shows nothing"
    made = CACHES[cache]()
    assert generate(model, PROMPTS, most=15, stop=stop, cache=made) == wanted
    assert made.lengths == [len(p) + len(row) - 1 for p, row in zip(PROMPTS, wanted, strict=True)]


def test_streaming_gives_tokens_as_they_are_made(model):
    calls = []

    def counted(tokens, **given):
        calls.append(tokens.shape)
        return model(tokens, **given)

    counted.layers = LAYERS
    running = stream(counted, PROMPTS, most=6)
    assert calls == []
    first = next(running)
    assert calls == [(3, 5)]
    second = next(running)
    assert calls == [(3, 5), (3, 1)]
    whole = generate(model, PROMPTS, most=6)
    assert [first, second, *running] == [list(step) for step in zip(*whole, strict=True)]


def test_an_ended_row_streams_none(model):
    free = [by_hand(model, prompt, 15) for prompt in PROMPTS]
    steps = list(stream(model, PROMPTS, most=15, stop={free[0][2]}))
    wanted = [by_hand(model, prompt, 15, {free[0][2]}) for prompt in PROMPTS]
    assert steps == [[row[n] if n < len(row) else None for row in wanted] for n in range(max(map(len, wanted)))]


def test_writing_stops_when_every_row_has(model):
    free = by_hand(model, PROMPTS[0], 5)
    assert generate(model, PROMPTS[0], most=1000, stop={free[0]}) == [free[:1]]
    assert generate(model, PROMPTS, most=0) == [[], [], []]


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_continued(model, cache):
    whole = by_hand(model, PROMPTS[1], 10)
    made = CACHES[cache]()
    first = generate(model, PROMPTS[1], most=4, cache=made)[0]
    assert first + generate(model, first[-1:], most=6, cache=made)[0] == whole


def test_padding_may_stand_past_the_last_learned_place():
    model = Decoder(VOCABULARY, 16, 1, 4, absolute="learned", length=8).double().eval()
    tokens, cache = torch.randint(VOCABULARY, (2, 12)), KVCache()
    with torch.no_grad():
        model(tokens[:, :7], lengths=[7, 3], cache=cache)
        new = torch.stack([tokens[0, 7:12], tokens[1, 3:8]])
        found = model(new, lengths=[1, 5], cache=cache)
        assert torch.allclose(found[0, 0], model(tokens[:1, :8])[0, 7], rtol=0, atol=1e-12)
        assert torch.allclose(found[1], model(tokens[1:, :8])[0, 3:], rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="has 8 learned absolute positions, found 9"):
            model(new, lengths=[1, 0], cache=cache)
    assert cache.lengths == [8, 8]


def test_a_forked_prompt_is_read_once(model):
    pool = PagedCache(LAYERS, pages=60, page_size=4)
    prompt = pool.add()
    with torch.no_grad():
        model(torch.tensor([PROMPTS[1][:-1]]), cache=pool.batch([prompt]))
    beams = [prompt, pool.fork(prompt), pool.fork(prompt)]
    ends = [PROMPTS[1][-1], 2, 3]
    found = generate(model, [[end] for end in ends], most=7, cache=pool.batch(beams))
    assert found == [by_hand(model, [*PROMPTS[1][:-1], end], 7) for end in ends]


def test_an_encoder_is_read_once():
    encoder = Encoder(VOCABULARY, 16, 1, 4, position="t5")
    decoder = Decoder(VOCABULARY, 16, LAYERS, 4, memory_dim=16, position="alibi", tied=False)
    model = EncoderDecoder(encoder, decoder).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    source, lengths = torch.randint(VOCABULARY, (2, 7)), [7, 4]
    found = generate(model.decoder, [[1], [1]], most=8, **model.encode(source, lengths))
    for row, length in enumerate(lengths):
        tokens = [1]
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(source[row : row + 1, :length], torch.tensor([tokens]))[0, -1].argmax()))
        assert found[row] == tokens[1:]
    assert found[0] != found[1]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [[1.5]], [[-1]], [True]], ids=str)
def test_prompts_that_are_none_are_named(model, prompts):
    with pytest.raises(ValueError, match="prompts: expected"):
        generate(model, prompts, most=1)


def test_prompts_may_be_tensors(model):
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert generate(model, tokens, most=5) == generate(model, [[1, 2], [3, 4]], most=5)
    assert generate(model, torch.tensor([1, 2]), most=5) == generate(model, [[1, 2]], most=5)


def test_a_model_that_does_not_say_its_layers_needs_a_cache(model):
    def bare(tokens, **given):
        return model(tokens, **given)

    with pytest.raises(ValueError, match=r"give a cache, such as KVCache\(layers\)"):
        generate(bare, [1], most=1)
    assert generate(bare, [1], most=3, cache=KVCache(LAYERS)) == generate(model, [1], most=3)


def test_looking_is_lazy_and_names_the_term(model):
    _, looks = model(torch.tensor(PROMPTS[:1]), look=True)
    assert isinstance(looks.decoder[0], rg.AttentionMatrix) and "Buckets" in repr(looks.decoder[0])
