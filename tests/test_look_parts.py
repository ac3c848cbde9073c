"""`regard look` at an encoder-decoder: encoder, decoder, and the decoder's look at the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.look.parts import WORDS, WRITTEN
from regard.trace import Trace, record

transformers = pytest.importorskip("transformers", reason="folders are opened by transformers")

TEXT = "look it up 沈"
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 60,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
KINDS = ["encoder, self", "decoder, self", "decoder, cross"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A T5 that writes, the same without a head for words, and a BART; with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    top = tmp_path_factory.mktemp("models")
    start = {"decoder_start_token_id": 0, "vocab_size": len(alphabet)}
    kinds = {
        "t5": ("T5ForConditionalGeneration", {**T5, **start, "eos_token_id": None}),
        "headless": ("T5Model", {**T5, **start}),
        "bart": ("BartForConditionalGeneration", {**BART, **start}),
    }
    for name, (kind, sizes) in kinds.items():
        model_class = getattr(transformers, kind)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        model.save_pretrained(top / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(top / name)
    return {name: top / name for name in kinds}


def look(capsys, *words: str) -> str:
    assert main(["look", *words]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    return shown.out


def parts_of(found: dict) -> list[dict]:
    return [found, *found["parts"]]


@pytest.mark.parametrize("name, layers, heads", [("t5", (3, 2, 2), 4), ("bart", (1, 2, 2), None)])
def test_all_three_parts(capsys, folders, name, layers, heads):
    found = json.loads(look(capsys, TEXT, "--model", str(folders[name]), "--json"))
    parts = parts_of(found)
    assert [part["part"] for part in parts] == KINDS
    assert tuple(len(part["layers"]) for part in parts) == layers
    text, written = 14, len(parts[1]["queries"])
    assert [len(part["queries"]) for part in parts] == [text, written, written] and 1 <= written <= WRITTEN
    assert len(parts[2]["keys"]) == text and parts[2]["keys"] == parts[0]["queries"]
    assert parts[1]["queries"] == parts[2]["queries"]
    if heads:
        assert all(len(part["heads"]) == heads * count for part, count in zip(parts, layers, strict=True))
    assert parts[0]["notes"][-1].startswith(f"Its decoder wrote {written} tokens, at most {WRITTEN}: ")
    sees = [torch.tensor(part["shown"]["weights"]) for part in parts]
    assert float(sees[0].triu(1).max()) > 0 and (written < 2 or float(sees[1].triu(1).max()) == 0)
    for weights in sees:
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)), atol=1e-4, rtol=0)


def test_numbers_are_the_models(capsys, folders):
    """Weights of each part as the model's own eager attention gives them, for what it wrote."""
    chosen = ["--layer", "1", "--head", "2", "--json"]
    parts = parts_of(json.loads(look(capsys, TEXT, "--model", str(folders["t5"]), *chosen)))
    model = transformers.T5ForConditionalGeneration.from_pretrained(folders["t5"], attn_implementation="eager").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folders["t5"])(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=WRITTEN, do_sample=False)
        want = model(input_ids=ids, decoder_input_ids=made[:, :-1], output_attentions=True)
    for part, kind in zip(parts, ("encoder", "decoder", "cross"), strict=True):
        assert (part["shown"]["layer"], part["shown"]["head"], part["shown"]["asked"]) == (1, 2, True)
        weights = want[f"{kind}_attentions"][1][0, 2]
        torch.testing.assert_close(torch.tensor(part["shown"]["weights"]), weights, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_printed_under_headings(capsys, folders, language):
    page = look(capsys, TEXT, "--model", str(folders["t5"]), "--language", language, "--no-color")
    at = [page.index(WORDS[language][kind]) for kind in KINDS]
    assert at == sorted(at)
    assert page.index(WORDS[language]["written"].split("{")[0]) < at[0]
    for head in ("0", "1", "2", "3"):
        assert head in page[at[2] :]


def test_without_a_head_for_words(capsys, folders):
    parts = parts_of(json.loads(look(capsys, TEXT, "--model", str(folders["headless"]), "--json", "--language", "zh")))
    assert [part["part"] for part in parts] == KINDS
    assert parts[0]["notes"][-1] == WORDS["zh"]["again"]
    assert parts[1]["queries"][1:11] == parts[0]["queries"][:10]  # of 沈 the last byte is cut off


def test_a_head_that_only_one_part_has(capsys, folders):
    """T5's encoder has three layers and its decoder two."""
    parts = parts_of(json.loads(look(capsys, TEXT, "--model", str(folders["t5"]), "--layer", "2", "--json")))
    assert parts[0]["shown"]["layer"] == 2
    for part in parts[1:]:
        assert part["notes"] == ["There is no layer 2 in this part; shown is the head that says most."]
    assert main(["look", TEXT, "--model", str(folders["t5"]), "--layer", "9"]) == 2
    assert capsys.readouterr().err == "regard: --layer: expected one of 0, 1, 2, found 9\n"


def test_files(capsys, folders, tmp_path):
    """A page for each part, one file of numbers, and a trace that holds all."""
    out, numbers, kept = (tmp_path / name for name in ("a.html", "a.json", "a.trace"))
    said = look(capsys, TEXT, "--model", str(folders["bart"]), "--out", str(out), "--save", str(kept))
    for name in ("a.html", "a-decoder-self.html", "a-decoder-cross.html"):
        assert (tmp_path / name).stat().st_size > 1000 and name in said.replace("\n", "")
    look(capsys, TEXT, "--model", str(folders["bart"]), "--out", str(numbers))
    first = json.loads(numbers.read_text(encoding="utf-8"))
    again = json.loads(look(capsys, str(kept), "--json"))
    assert [part["part"] for part in parts_of(again)] == KINDS
    for one, two in zip(parts_of(first), parts_of(again), strict=True):
        assert one["shown"] == two["shown"] and one["heads"] == two["heads"]
    assert len(Trace.open(kept).cross) == 2


def test_another_run_is_left_out_and_said(capsys, folders, tmp_path):
    model = transformers.BartForConditionalGeneration.from_pretrained(folders["bart"]).eval()
    ids = torch.randint(5, 90, (2, 9))
    with record(model) as trace, torch.no_grad():
        for _ in range(2):
            model(input_ids=ids, decoder_input_ids=ids[:, :4])
    trace.save(tmp_path / "two.trace")
    found = json.loads(look(capsys, str(tmp_path / "two.trace"), "--json"))
    assert "it also holds: run 1; rows 1 to 1 of the batch" in found["notes"][0]


def test_a_folder_that_cannot_be_opened(capsys, folders, tmp_path):
    config = (folders["t5"] / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert main(["look", TEXT, "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"regard: --model: cannot open {str(tmp_path)!r}: ")
