"""What the pictures of the later lessons answer: the public API's numbers, the mission's, and plain PyTorch's."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch

import regard as rg
from regard import subjects
from regard.lessons import cache, grid, heads, learning, line, minilm, real, sentence
from regard.lessons.vectors import draw, embed, weight
from regard.models import digits


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def sums_to_one(rows) -> bool:
    return torch.allclose(tensor(rows).sum(-1), torch.ones(()).double(), atol=1e-5)


# Heads


@pytest.mark.parametrize("count", (1, 3))
def test_heads_are_put_together_by_w_o(count):
    answer = heads.play(heads=count)
    assert len(answer["weights"]) == count and all(map(sums_to_one, answer["weights"]))
    outputs = tensor(answer["outputs"])  # [heads, tokens, v_dim]
    concat = torch.cat(list(outputs), -1)
    assert torch.equal(concat, tensor(answer["concat"]))
    mixed = concat @ weight("W_O", count * answer["v_dim"], heads.MODEL_DIM)
    torch.testing.assert_close(tensor(answer["mixed"]), mixed)
    assert answer["shapes"]["W_O"] == f"{count * answer['v_dim']} x {heads.MODEL_DIM}"


def test_a_block_is_two_residual_branches():
    stages = {stage["name"]: tensor(stage["rows"]) for stage in heads.play()["block"]}
    torch.testing.assert_close(stages["residual_1"], stages["x"] + stages["attention"])
    torch.testing.assert_close(stages["residual_2"], stages["residual_1"] + stages["feed_forward"])
    for before, after in (("x", "norm_1"), ("residual_1", "norm_2")):
        x = stages[before]
        wanted = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(stages[after], wanted)
    assert stages["residual_2"].shape == stages["x"].shape


def test_who_looks_at_whom():
    answer = heads.play()
    assert answer["rows"] == ["你", "好"] and answer["kinds"]["cross"]["columns"] == ["Hello", "World"]
    w_q, w_k = (weight(name, heads.CROSS_DIM, heads.HEAD_DIM) for name in ("W_Q", "W_K"))
    q, k = embed("你好", heads.CROSS_DIM) @ w_q, embed(["Hello", "World"], heads.CROSS_DIM) @ w_k
    torch.testing.assert_close(tensor(answer["kinds"]["cross"]["weights"]), (q @ k.T / heads.HEAD_DIM**0.5).softmax(-1))
    other = heads.play(asking="a b c", asked="你好吗？")
    assert other["kinds"]["self"]["shape"] == "3 x 3" and other["kinds"]["cross"]["shape"] == "3 x 4"
    assert other["kinds"]["cross"]["output"] == f"3 x {heads.HEAD_DIM}"
    with pytest.raises(ValueError, match="asked: expected at most 12 tokens, found 13"):
        heads.play(asked="abcdefghijklm")


def test_the_signal_is_the_jacobian_s_norm():
    """Against PyTorch's own Jacobian, one sequence after the other."""
    x = [draw(f"sequence {n}", heads.LENGTH, heads.WIDTH) for n in range(heads.SEQUENCES)]
    for model, found in zip((heads.rnn, lambda y: heads.attend(y[None])[0]), heads.signals(), strict=True):
        every = [torch.autograd.functional.jacobian(model, y).movedim(1, 0).flatten(1).norm(dim=-1) for y in x]
        torch.testing.assert_close(tensor(found), torch.stack(every).mean(0).flip(0)[1:], rtol=1e-6, atol=0)


def test_the_rnn_fades_with_the_distance_and_not_with_a_large_w():
    near, far = heads.play(distance=1)["far"], heads.play(distance=40)["far"]
    assert near["rnn_share"] == 1.0 and far["rnn_share"] < 1e-6
    assert (near["verdict"], far["verdict"], heads.play(radius=3.0, distance=40)["far"]["verdict"]) == (
        "once",
        "fades",
        "grows",
    )
    assert far["rnn_steps"] == 40 and far["attention_steps"] == 1 and 0.1 < far["attention_share"] < 10
    answer = heads.play(distance=3)
    assert answer["rnn"][2] == pytest.approx(math.log10(answer["far"]["rnn"]))
    small, large = (heads.play(distance=30, radius=r)["far"]["rnn"] for r in (0.6, 1.4))
    assert small < far["rnn"] * 1e3 and large > 1e6 * small
    assert "tanh(h @ w + row @ u)" in answer["code"]["rnn"] and "rg.attention" in answer["code"]["attention"]


# Cache


def test_pairs_are_the_mission_s_and_the_formulas():
    assert cache.play()["pairs"] == {"unmasked": 1496, "causal": 816, "cached": 136}
    for n in (1, 5, 23):
        found = cache.play(length=n)["pairs"]
        assert found["cached"] == n * (n + 1) // 2 and found["unmasked"] == sum(t * t for t in range(1, n + 1))
        assert found["causal"] == sum(t * (t + 1) // 2 for t in range(1, n + 1))


def test_writing_step_by_step_is_writing_at_once():
    model, tokenizer = rg.models.load("tiny")
    prompt = tokenizer.encode(cache.PROMPT)
    whole = rg.generate.generate(model, [prompt], most=5)[0]
    answer = cache.play(step=5)
    assert [step["text"] for step in answer["steps"]] == [tokenizer.labels([token])[0] for token in whole]
    assert [step["queries"] for step in answer["steps"]] == [len(prompt), 1, 1, 1, 1]
    assert [step["held"] for step in answer["steps"]] == [len(prompt) + n for n in range(5)]
    assert answer["tokens"] == tokenizer.labels(prompt + whole[:-1])
    last = answer["steps"][-1]
    assert len(last["row"]) == last["held"] and sum(last["row"]) == pytest.approx(1, abs=1e-4)
    with torch.no_grad():
        _, looks = model(torch.tensor([prompt + whole[:-1]]), look=True)
    assert last["row"] == pytest.approx(looks.decoder[answer["layer"]][0, answer["head"]][-1, :].tolist(), abs=1e-4)
    block = model.blocks[0].attention
    assert last["numbers"] == 2 * len(model.blocks) * block.kv_heads * block.head_dim * last["held"]
    assert cache.play(step=0)["steps"] == [] and len(cache.play(step=2)["steps"]) == 2


def test_another_prompt_begins_anew_and_the_first_is_found_again():
    first = cache.play(step=3)
    assert cache.play(prompt="key, value, key, va", step=2)["steps"][0]["text"] == "l"
    assert cache.play(step=3) == first


def test_q_and_k_are_alike_until_v_enters():
    found = {what: cache.play(change=what, place=3)["changed"] for what in "qkv"}
    moved = {what: tensor(each["scores"]) > 0 for what, each in found.items()}
    assert moved["q"].any(-1).tolist() == [False, False, False, True, False, False]
    assert moved["k"].any(0).tolist() == moved["q"].any(-1).tolist() and not moved["v"].any()
    assert [found[what]["moved"] for what in "qkv"] == [1, 3, 3]
    assert [x > 0 for x in found["k"]["rows"]] == [False] * 3 + [True] * 3
    assert cache.play()["reads"] == {"q": 0, "k": 15, "v": 15}


# Line


def test_the_rule_and_its_mirror():
    answer = line.play()
    assert answer["pairs"] == [[1, 3], [2, 4], [3, 5], [4, 6]] and answer["empty"] == [5, 6]
    assert round(answer["rule"]["soft"][0][2], 4) == 0.3522 and round(answer["rule"]["soft"][0][0], 4) == 0.1296
    assert answer["rule"]["hard"][4] == [0.0] * 6 and answer["rule"]["toeplitz"]["hard"] == pytest.approx(1)
    turned = line.play(delta=2)
    assert turned["pairs"] == [[3, 1], [4, 2], [5, 3], [6, 4]] and turned["empty"] == [1, 2]


def test_waves_of_any_period():
    answer = line.play()
    assert [round(x, 9) for x in answer["f"]] == [-1, -1.5, 0.5, 2, 0.5, -1.5, -1]
    assert [round(x, 9) for x in answer["F"][0]] == [2, 0.5, -1.5, -1]
    assert answer["omegas"] == pytest.approx([math.pi / 2, math.pi / 3]) and answer["F_spread"] < 1e-12
    periods, v = [5, 9], [0.5, -1.0, 0.3, 2.0]
    other = line.play(periods=periods, v=v)
    for d, value in zip(other["far"], other["curve"], strict=True):
        a, b = (2 * math.pi * d / n for n in periods)
        assert value == pytest.approx(0.5 * math.cos(a) - math.sin(a) + 0.3 * math.cos(b) + 2 * math.sin(b), abs=1e-9)
    for i, j in itertools.product(range(line.PLACES), repeat=2):
        assert other["F"][i][j] == pytest.approx(other["curve"][i - j + line.FAR], abs=1e-9)
    parts = {name: tensor(x) for name, x in other["parts"].items()}
    total = parts.pop("sum")
    torch.testing.assert_close(sum(parts.values()), total)


def test_content_chooses_among_the_waves():
    even = line.play(low=[False] * 4)
    torch.testing.assert_close(tensor(even["content"]), tensor(even["F"]))
    mixed = line.play()
    assert mixed["content_spread"] > 0.5
    torch.testing.assert_close(tensor(mixed["content"]), tensor(line.from_content(line.MIXED)))
    swap = [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    found = line.play(side="key", weight=swap, v=[1, 0, 0, 0], low=[False] * 4)
    assert found["content"][0] == pytest.approx([math.cos(math.pi / 3 * d) for d in (0, -1, -2, -3)])


def test_v_is_found_from_data_step_by_step():
    hidden = [0.5, -0.5, 1.0, 0.2]
    states = list(line.stream(v=hidden))
    assert [state["step"] for state in states] == list(range(line.STEPS + 1))
    assert states[-1]["v"] == pytest.approx(hidden, abs=0.02) and states[-1]["loss"] < 1e-4 * states[0]["loss"]
    assert states[-1]["curve"] == pytest.approx(states[-1]["true"], abs=0.05)
    with pytest.raises(ValueError, match=r"periods\[1\]: expected a whole number from 2 to 24, found 1"):
        line.stream(periods=[4, 1])  # before the first state is asked for


# Grid


def test_six_by_six_twice():
    answer = grid.play()
    assert (answer["line_pairs"], answer["grid_pairs"]) == (36, 1296) and answer["grid_shape"] == "36 x 36"
    assert sums_to_one(answer["line"]) and sums_to_one(answer["grid"])
    q, k = divmod(answer["inputs"]["query"], 6), divmod(answer["inputs"]["key"], 6)
    assert (q[0] - k[0], q[1] - k[1]) == (0, -1)
    flat = grid.play(slope=0.0)
    assert flat["grid"][0][0] == pytest.approx(1 / 36) and flat["line"][0][0] == pytest.approx(1 / 6)


def test_flat_distance_lights_pairs_across_the_edge():
    answer = grid.play()
    assert answer["pairs"]["grid"] == [[1, 2], [2, 3], [4, 5], [5, 6]] and answer["pairs"]["wrong"] == [[3, 4]]
    assert answer["flat"] == -1
    down = grid.play(delta=[-1, 0])
    assert down["pairs"]["grid"] == [[1, 4], [2, 5], [3, 6]] and down["pairs"]["wrong"] == [] and down["flat"] == -3
    assert grid.play(delta=[1, -1])["pairs"]["wrong"] == [[3, 1], [6, 4]]


def test_a_drawn_rule_is_bright_wherever_there_is_room():
    found = grid.play()["drawn"]
    assert found["numbers"] == 25 and sums_to_one(found["weights"])
    place = [divmod(n, 3) for n in range(9)]
    for (i, q), (j, k) in itertools.product(enumerate(place), repeat=2):
        delta = (q[0] - k[0], q[1] - k[1])
        assert (found["weights"][i][j] > 0.3) == (delta in grid.KNIGHTS)
    axes = grid.play(kind="axes")["drawn"]
    assert axes["numbers"] == 10 and axes["table"][3] == [5, 5, 10, 5, 5]
    rows, columns = torch.zeros(5).double(), torch.zeros(5).double()
    rows[3], columns[2] = 5, 5
    logits = tensor([[rows[q[0] - k[0] + 2] + columns[q[1] - k[1] + 2] for k in place] for q in place])
    torch.testing.assert_close(tensor(axes["weights"]), logits.softmax(-1))


def test_the_digit_is_the_trained_model_s():
    model, images = digits.load()
    for number, layer, head, pixel in ((3, 0, 0, 27), (8, 1, 2, 40)):
        found = grid.play(number=number, layer=layer, head=head, pixel=pixel)["digit"]
        with torch.no_grad():
            logits, looks = model(images[number : number + 1], look=True)
        A = looks.encoder[layer][0, head]
        assert tensor(found["weights"]).flatten().tolist() == pytest.approx(A[pixel, :].tolist(), abs=1e-5)
        assert found["probabilities"] == pytest.approx(logits[0].softmax(-1).tolist(), abs=1e-5)
        assert max(range(10), key=found["probabilities"].__getitem__) == number
        row, column = found["top"][0]["cell"]
        assert found["weights"][row][column] == max(max(r) for r in found["weights"])
        assert sum(map(sum, found["received"])) == pytest.approx(64, abs=1e-2)
        assert len(found["learned"]) == len(found["learned"][0]) == 15


# Learning


def test_training_is_streamed_and_bounded():
    states = list(itertools.islice(learning.stream(steps=10), 99))
    assert [state["step"] for state in states] == list(range(11))
    assert states[0] == learning.play()["first"]
    assert states[0]["share"] == pytest.approx(states[0]["previous"])
    far = learning.train_left(report=(10,))[0]
    assert states[10]["previous"] == far.previous and states[10]["readout"] == far.readout
    with pytest.raises(ValueError, match="steps: expected a whole number from 10 to 400, found 5000"):
        learning.stream(steps=5000)
    with pytest.raises(ValueError, match="rate: expected one of "):
        learning.stream(rate=7.0)


def test_characters_find_their_words():
    states = list(learning.stream(task="words", rate=0.03, steps=60))
    answer = learning.play(task="words")
    assert answer["goal"] == [1, 3, 0, 2] and answer["even"] == pytest.approx(math.log(4))
    assert states[-1]["loss"] < 0.05 * states[0]["loss"] and states[-1]["entropy"] < states[0]["entropy"]
    assert states[-1]["share"] > 0.9
    assert states[-1]["share"] == pytest.approx(sum(states[-1]["weights"][i][answer["goal"][i]] for i in range(4)) / 4)


# Sentence and real models


def test_a_reader_s_own_sentence():
    answer = sentence.play()
    A = sentence.matrices()["causal"]
    torch.testing.assert_close(tensor(answer["weights"]), A.dense())
    assert answer["bytes"] == 36 and len(answer["labels"]) == 12
    why = answer["explain"]
    assert sum(why["parts"].values()) == pytest.approx(why["logit"])
    i, j = answer["inputs"]["query"], answer["inputs"]["key"]
    assert why["weight"] == pytest.approx(math.exp(why["logit"] - why["lse"])) == answer["weights"][i][j]
    assert answer["row"]["keys"][0][1] == max(answer["weights"][i])
    other = sentence.play(text="abcab", part="content", query=4, key=0)
    assert other["shape"] == "5 x 5" and other["weights"][0] == other["weights"][3]  # the same letter looks alike
    hidden = sentence.play(query=0, key=5)
    assert hidden["explain"]["weight"] == 0 and hidden["explain"]["logit"] is None and not hidden["visible"][0][5]
    with pytest.raises(ValueError, match="query: expected a whole number from 0 to 4, found 9"):
        sentence.play(text="abcab", query=9)


def test_the_embedded_model_on_a_reader_s_text():
    answer = real.play()
    assert answer["labels"][:6] == list("小沈阳江西演") and answer["shape"] == "14 x 14"
    assert [g[0] for g in answer["guesses"]] == [g.character for g in real.guesses()]
    assert sums_to_one(answer["weights"]) and answer["does"] == "previous token"
    assert sum(count for _, count in answer["kinds"]) == 48 == sum(map(len, answer["heads"]))
    before = tensor(answer["weights"]).diagonal(-1).mean()
    assert float(before) == pytest.approx(answer["previous"], abs=1e-5)
    model, tokenizer = rg.models.load("tiny")
    with torch.no_grad():
        _, looks = model(torch.tensor([tokenizer.encode("a rose is a rose")]), look=True)
    other = real.play(text="a rose is a rose", layer=4, head=7)
    torch.testing.assert_close(tensor(other["weights"]).float(), looks.decoder[4][0, 7].dense(), atol=1e-5, rtol=1e-3)
    with pytest.raises(ValueError, match="text: expected at most 64 tokens, found 100"):
        real.play(text="x" * 100)
    assert real.play(language="zh")["does"] != answer["does"]


@pytest.mark.skipif(
    importlib.util.find_spec(subjects.FOLDER[0]) is None or importlib.util.find_spec("transformers") is None,
    reason=f"needs transformers and the package {subjects.PACKAGE}",
)
def test_minilm_is_transformers_minilm():
    """The same tokens, vectors and weights as the published code gives, for a text with unknown characters in it."""
    text = "The cat sat on 小沈阳's mat because it was tired."
    ours, theirs = minilm.open_minilm(text), subjects.open_model(subjects.MINILM, text)
    with torch.no_grad():
        torch.testing.assert_close(ours.run(), theirs.run().last_hidden_state)
    traces = []
    for each in (ours, theirs):
        with rg.record(each.model, tokenizer=each.tokenizer) as trace:
            each.read()
        traces.append(trace)
    assert traces[0].labels() == traces[1].labels()
    assert subjects.unknown_characters(ours.tokenizer, text) == subjects.unknown_characters(theirs.tokenizer, text)
    for layer, head in itertools.product(range(6), range(12)):
        torch.testing.assert_close(traces[0][layer, head].dense(), traces[1][layer, head].dense())
    assert real.play(model="minilm", text=text)["unknown"] == "沈阳"


@pytest.mark.skipif(importlib.util.find_spec(subjects.FOLDER[0]) is None, reason=f"needs {subjects.PACKAGE}")
def test_a_text_too_long_for_minilm_is_refused():
    with pytest.raises(ValueError, match="at most 512 tokens, for so many positions has MiniLM, found 602"):
        minilm.open_minilm("no " * 600)


def test_without_minilm_the_picture_says_what_is_missing(monkeypatch):
    real.recorded.cache_clear()
    monkeypatch.setattr(subjects, "FOLDER", ("no_such_package", "model"))
    answer = real.play(model="minilm")
    assert answer["missing"] == "its weights are not installed" and answer["package"] == subjects.PACKAGE
    assert set(answer["inputs"]) == {"model", "text"}
