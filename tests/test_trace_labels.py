"""Tokens as words: every tokenizer's pieces become readable, one label a token, cut characters put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from regard.trace import labels_of, record
from regard.trace.labels import byte_characters

tokenizers = pytest.importorskip("tokenizers", reason="transformers' tokenizers are not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = "小沈阳江西演唱会邀请了，"


def byte_level(*words: str):
    """A byte-level tokenizer: the 256 bytes, and merges that make these words' pieces."""
    letters = {byte: letter for letter, byte in byte_characters().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merges = []
    for word in words:
        spelled = [letters[byte] for byte in word.encode()]
        while len(spelled) > 1:
            a, b = spelled[:2]
            if (a, b) not in merges:
                merges.append((a, b))
                vocabulary.setdefault(a + b, len(vocabulary))
            spelled[:2] = [a + b]
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<|end|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")


def test_the_letters_of_bytes_are_those_tokenizers_use():
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert set(byte_characters()) == alphabet and sorted(byte_characters().values()) == list(range(256))


def test_byte_level_pieces_are_readable():
    tokenizer = byte_level(" cat", "小", "沈"[:1])
    ids = tokenizer(f"a cat\n{TEXT}<|end|>", add_special_tokens=False).input_ids
    labels = labels_of(tokenizer, ids)
    assert len(labels) == len(ids)
    assert labels[:4] == ["a", "␣cat", "↵", "小"]
    assert labels[4] == "沈" and labels[5:8] == ["阳1/3", "阳2/3", "阳3/3"]
    assert labels[-1] == "<|end|>"


def test_a_character_cut_in_two_unequal_pieces():
    letters = {byte: letter for letter, byte in byte_characters().items()}
    tokenizer = byte_level("阳")
    first, rest = "阳".encode()[:2], "阳".encode()[2:]
    pieces = ["".join(letters[b] for b in part) for part in (first, rest)]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert labels_of(tokenizer, ids) == ["阳1/2", "阳2/2"]
    assert labels_of(tokenizer, ids[:1]) == ["<E9><98>"]  # the rest is not there
    assert labels_of(tokenizer, [ids[0], ids[0], ids[1]]) == ["<E9><98>", "阳1/2", "阳2/2"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12), cut=st.integers(0, 20))
def test_every_token_of_any_text_has_a_label(text, cut):
    tokenizer = BYTES
    ids = tokenizer(text, add_special_tokens=False).input_ids[cut:]
    labels = labels_of(tokenizer, ids)
    assert len(labels) == len(ids) and all(labels)
    assert all(c.isprintable() for label in labels for c in label)


BYTES = byte_level(" the", "小", "邀请")


def test_sentencepiece_marks_and_bytes():
    class Pieces:
        all_special_tokens = ("</s>",)
        said = ("▁the", "▁", "小", "<0xE6>", "<0xB2>", "<0x88>", "ing", "</s>", "<0x0A>", "▁\u3000")

        def convert_ids_to_tokens(self, ids):
            return [self.said[n] for n in ids]

    assert labels_of(Pieces(), range(10)) == [
        "␣the", "␣", "小", "沈1/3", "沈2/3", "沈3/3", "ing", "</s>", "↵", "␣␣␣",
    ]  # fmt: skip


def test_wordpieces_keep_their_marks():
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "小": 3, "[CLS]": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", cls_token="[CLS]")
    assert labels_of(tokenizer, [4, 1, 2, 3, 0]) == ["[CLS]", "play", "##ing", "小", "[UNK]"]
    assert labels_of(tokenizer, [1, 99]) == ["play", "<99>"]


def test_regards_own_tokenizer_names_its_tokens():
    _, tokenizer = rg.models.load("tiny")
    ids = tokenizer.encode(TEXT)
    assert labels_of(tokenizer, ids) == tokenizer.labels(ids)
    with pytest.raises(TypeError, match=r"tokenizer: expected one of regard's or of transformers'.*found int"):
        labels_of(5, ids)


@torch.no_grad()
def test_labels_given_by_hand():
    model = rg.nn.Encoder(None, 16, 2, 2, position="t5").eval()
    x = torch.randn(2, 4, 16)
    with record(model) as trace:
        model(x)
    assert trace.row(1).labels() == ["0", "1", "2", "3"] and trace.tokens() is None
    with record(model, tokens=list("阳春白雪")) as trace:
        model(x)
    assert trace.row(0).labels() == list("阳春白雪") == trace.row(1).labels("k")
    with record(model, tokens={"encoder": [[1, 2, 1, 2], [5, 6, 7, 8]]}) as trace:
        model(x)
    assert trace.tokens().tolist() == [[1, 2, 1, 2], [5, 6, 7, 8]] and trace.row(1).labels() == ["5", "6", "7", "8"]
    with pytest.raises(ValueError, match=r"tokens: expected as many as the model looked with \(2 x 4\)"):
        with record(model, tokens=["a"]):
            model(x)
    with pytest.raises(TypeError, match="tokens: expected ids"):
        with record(model, tokens=[0.5] * 4):
            model(x)
