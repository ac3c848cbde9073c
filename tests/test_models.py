"""The models that come with regard: any text goes in, they open offline, and their heads do what the page says."""

from __future__ import annotations

import json
import socket
from importlib.resources import files

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard import models
from regard.models.tokenizer import BYTES, Tokenizer
from regard.nn import Decoder

#: written for these tests, so no model has read them
ENGLISH = (
    "When the harbour master asked for the list of ships, the clerk could not find it, because the list was lying "
    "under the tide tables on the other desk. A message had to be sent to the lighthouse, where a copy of every list "
    "is kept, and the answer came back before the evening boat had left the pier."
)
CHINESE = (
    "港口的值班员要查看今天的船只列表，但是文件不在原来的位置，因为有人把它放在另一张桌子上的潮汐表下面。"
    "他给灯塔发送了一条消息，那里保存着所有列表的副本，结果在傍晚的船离开之前就收到了回答。"
)
#: strict: the day a model meets it, this mark must go
SENTENCE = "小沈阳江西演唱会邀请了，"


@pytest.fixture(scope="module")
def tiny() -> models.Loaded:
    return models.load("tiny")


def ids_of(tiny: models.Loaded, text: str) -> torch.Tensor:
    return torch.tensor([tiny.tokenizer.encode(text)])


@given(st.text())
def test_every_text_comes_back(text):
    tokenizer = Tokenizer("小阳，é")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.labels(ids)) == len(ids)
    assert all(tokenizer.labels(ids)) and all(label.isprintable() for label in tokenizer.labels(ids))


@given(st.lists(st.integers(0, BYTES + 3)))
def test_every_row_of_ids_has_a_text_and_labels(ids):
    tokenizer = Tokenizer("小阳，é")
    assert isinstance(tokenizer.decode(ids), str)
    assert len(tokenizer.labels(ids)) == len(ids)


def test_labels_name_characters_and_their_pieces():
    tokenizer = Tokenizer("小阳，")
    ids = tokenizer.encode("小沈 a\n阳")
    assert ids[0] == BYTES and ids[1:4] == list("沈".encode())
    assert tokenizer.labels(ids) == ["小", "沈1/3", "沈2/3", "沈3/3", "␣", "a", "↵", "阳"]
    assert tokenizer.labels(ids[:3]) == ["小", "<E6>", "<B2>"]  # cut in the middle of a character
    assert tokenizer.decode(ids[:3]) == "小\ufffd\ufffd"


def test_tokenizer_learns_the_commonest_characters():
    tokenizer = Tokenizer.learn("阳阳小 abc 小小é", BYTES + 2)
    assert tokenizer.characters == "小阳" and len(tokenizer) == BYTES + 2


def test_tokenizer_says_what_is_wrong():
    with pytest.raises(ValueError, match="characters: expected each once, found '小'"):
        Tokenizer("小阳小")
    with pytest.raises(ValueError, match="characters: expected none of ASCII"):
        Tokenizer("小a")
    with pytest.raises(ValueError, match="size: expected at least 256"):
        Tokenizer.learn("小", 12)
    with pytest.raises(ValueError, match=r"text: .* surrogate '\\ud800' at place 1"):
        Tokenizer("小").encode("a\ud800")
    with pytest.raises(ValueError, match="ids: expected 0 to 256, found 300 at place 1"):
        Tokenizer("小").decode([1, 300])


def test_load_needs_no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("load opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    model, tokenizer = models.load()
    assert isinstance(model, Decoder) and not model.training
    assert model.vocabulary == len(tokenizer) and model.places is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in models.load(dtype=torch.float64).model.parameters()} == {torch.float64}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="name: expected one of tiny, found 'large'"):
        models.load("large")


def test_file_is_safetensors_of_at_most_three_megabytes():
    raw = files(models).joinpath("tiny.safetensors").read_bytes()
    assert len(raw) <= 3_000_000
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "regard" in header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} == {"F16"}


def test_the_sentence_is_read(tiny):
    ids = ids_of(tiny, SENTENCE)
    logits, looks = tiny.model(ids, look=True)
    assert logits.shape == (1, ids.shape[1], len(tiny.tokenizer)) and bool(torch.isfinite(logits).all())
    assert len(looks.decoder) == tiny.model.layers
    weights = looks.decoder[0][0, 0].dense()
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))
    assert list(dict.fromkeys(label[0] for label in tiny.tokenizer.labels(ids[0].tolist()))) == list(SENTENCE)


def test_no_length_is_too_long(tiny):
    logits = tiny.model(ids_of(tiny, ENGLISH * 6), last=True)
    assert bool(torch.isfinite(logits).all())


def loss_of(tiny: models.Loaded, ids: torch.Tensor, mask: rg.masks.Mask | None = None) -> float:
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(tiny.model(ids, mask=mask)[0, :-1], ids[0, 1:]).item()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_attention_is_worth_something_on_unseen_text(tiny, text):
    ids = ids_of(tiny, text)
    found = loss_of(tiny, ids)
    alone = loss_of(tiny, ids, rg.offset(0))
    assert found < alone - 0.5
    assert loss_of(tiny, ids.flip(-1)) > found + 1  # it knows which way text runs
    again = loss_of(tiny, torch.cat([ids, ids], -1))
    assert again < 0.75 * found  # the second time it copies


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_some_head_looks_at_the_previous_token(tiny, text):
    with torch.no_grad():
        _, looks = tiny.model(ids_of(tiny, text), look=True)
    assert max(A.summarize(rg.PreviousShare())[0].max().item() for A in looks.decoder) >= 0.8


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_some_head_looks_at_what_followed_the_last_time(tiny, text):
    ids = ids_of(tiny, text)
    twice = torch.cat([ids, ids], -1)
    with torch.no_grad():
        _, looks = tiny.model(twice, look=True)
    share = rg.Share(rg.induction(twice))
    assert max(A.summarize(share)[0].max().item() for A in looks.decoder) >= 0.5


@pytest.mark.parametrize("language", ["en", "zh"])
def test_some_head_looked_at_the_previous_token_of_the_held_out_text(language):
    assert max(map(max, models.about("tiny")["held_out"]["shares"][language]["previous"])) >= 0.8


def test_the_page_says_what_was_measured():
    page = models.about("tiny")
    held = page["held_out"]
    for language in ("en", "zh"):
        for other in ("bigram", "trained alone", "attention removed"):
            assert held["tiny"][language] < held[other][language]
        assert max(map(max, held["shares"][language]["induction"])) >= 0.5
    readme = files(models).joinpath("README.md").read_text(encoding="utf-8")
    for source in page["corpus"]:
        assert source["package"] in readme and source["version"] in readme and source["licence"] in readme
    for kind in ("tiny", "bigram", "trained alone", "attention removed"):
        for language in ("en", "zh"):
            assert f"{held[kind][language]:.2f}" in readme
