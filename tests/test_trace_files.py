"""Files of traces: what is saved comes back; what is damaged or foreign is refused in a sentence, and not executed."""

from __future__ import annotations

import json
import pickle
import random
import struct
import time
import zlib

import pytest
import safetensors
import torch

import regard as rg
from regard.trace import Trace, files, is_trace, record

TEXT = "小沈阳江西演唱会邀请了，the cat sat, the cat sat"


@pytest.fixture(scope="module")
def trace():
    model, tokenizer = rg.models.load("tiny")
    with torch.no_grad(), record(model, tokenizer=tokenizer, layers=[0, 2], values=True) as found:
        model(torch.tensor([tokenizer.encode(TEXT)]))
    return found


@pytest.fixture(scope="module")
def saved(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "text.trace"
    trace.save(path)
    return path


def answers(trace: Trace) -> list:
    """All a trace says, as bits."""
    found: list = [str(trace.looks), trace.labels(), trace.notes, trace.tokens().tolist()]
    for look, A in trace:
        found += [A.logits.dense().numpy().tobytes(), A.dense().numpy().tobytes(), A.lse.numpy().tobytes()]
        found.append(trace.values(look.layer).numpy().tobytes())
    return found


def test_a_saved_trace_says_the_same_bit_by_bit(trace, saved):
    opened = Trace.open(saved)
    assert answers(opened) == answers(trace)
    assert str(opened) == str(trace)
    assert opened[2, 5].shape == (len(opened.labels()),) * 2
    assert opened.statistics().rows == trace.statistics().rows


def test_others_can_read_the_file(trace, saved):
    with safetensors.safe_open(saved, "pt") as file:
        names = [name for name in file.keys() if name.startswith("q.")]
        assert torch.equal(file.get_tensor(names[0]), trace[0]._description.q)
        said = json.loads(file.metadata()[files.DOCUMENT])
    assert said["version"] == 1 and [look["layer"] for look in said["looks"]] == [0, 2]


def test_tensors_of_any_kind_begin_where_they_begin_in_memory(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
    given = {f"{n}": (torch.randn(n, 3) * 5).to(kinds[n]) for n in range(len(kinds))} | {"one": torch.tensor(2.5)}
    files.write(tmp_path / "x", {"a": 1}, given)
    found = files.Mapped(tmp_path / "x")
    assert found.document == {"a": 1} and list(found) == list(given)
    for name, x in given.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x)
        assert found[name].data_ptr() % files.ALIGN == 0 or not x.numel()
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), x) for name, x in given.items())


def test_it_is_mapped_and_not_read(saved, monkeypatch):
    touched = []
    real = files.sum_of
    monkeypatch.setattr(files, "sum_of", lambda data: touched.append(len(data)) or real(data))
    opened = Trace.open(saved)
    assert len(opened) == 2 and opened.looks[1].q_len == len(opened.labels()) and not touched
    opened[2][0, 3, 4:6, :5]
    assert 0 < len(touched) <= 6  # q, k, lse and the position table of that layer
    before = len(touched)
    opened[2][0, 1, :3, :5]
    assert len(touched) == before


def test_a_part_of_a_trace_is_saved_with_its_own_tensors_only(trace, saved, tmp_path):
    trace.only(layers=[2]).save(tmp_path / "part.trace")
    part = Trace.open(tmp_path / "part.trace")
    assert [look.layer for look in part.looks] == [2]
    assert torch.equal(part[2, 1].dense(), trace[2, 1].dense())
    assert (tmp_path / "part.trace").stat().st_size < 0.7 * saved.stat().st_size


def test_saving_is_all_or_nothing(trace, tmp_path, monkeypatch):
    path = tmp_path / "x.trace"
    trace.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(files, "raw", lambda x: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        trace.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.trace"]


def test_a_trace_can_be_saved_where_it_was_opened(saved, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(saved.read_bytes())
    opened = Trace.open(path)
    expected = answers(opened)
    opened.save(path)
    assert answers(Trace.open(path)) == expected == answers(opened)


# What is no trace


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def document(said: object, **entries: object) -> bytes:
    text = json.dumps(said)
    notes = {files.DOCUMENT: text, files.SUM: f"{zlib.crc32(text.encode()):08x}"}
    return header({"__metadata__": notes, **entries})


EMPTY = {"format": "regard.trace", "version": 1, "looks": [], "sequences": [], "notes": [], "tensors": {}}
FOREIGN = {
    "nothing": b"",
    "a few bytes": b"abc",
    "text": "小沈阳江西演唱会邀请了，".encode() * 40,
    "zeros": bytes(4096),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "a pickle": pickle.dumps({"a": [1, 2, 3]}, 2) * 20,
    "a header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "no JSON": struct.pack("<Q", 8) + b"not json",
    "a list": header([]),  # type: ignore[arg-type]
    "safetensors without a trace": header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "a nest": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a nest in the document": header({"__metadata__": {files.DOCUMENT: "[" * 100_000, files.SUM: "0"}}),
    "a name twice": struct.pack("<Q", 19) + b'{"a":{}, "a": {}}  ',
    "no number": struct.pack("<Q", 9) + b'{"a":NaN}',
    "a wrong sum": header({"__metadata__": {files.DOCUMENT: "{}", files.SUM: "00000000"}}),
    "a document that is a list": document([]),
    "another version": document(EMPTY | {"version": 2}),
    "no version": document({k: v for k, v in EMPTY.items() if k != "version"}),
    "another format": document(EMPTY | {"format": "x"}),
    "looks that are none": document(EMPTY | {"looks": [{}]}),
    "notes that are none": document(EMPTY | {"notes": [1]}),
    "a tensor that is missing": document(EMPTY | {"tensors": {"q": ["F32", [1], "00000000"]}}),
    "a tensor nobody knows": document(EMPTY, q={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a dtype that is a list": document(EMPTY, q={"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]}),
    "a negative offset": document(EMPTY, q={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}),
    "an offset beyond the end": document(EMPTY, q={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}),
    "tensors on top of each other": document(
        EMPTY | {"tensors": {name: ["U8", [4], "00000000"] for name in "ab"}},
        **{name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"},
    )
    + bytes(4),
    "a lone surrogate": header({"__metadata__": {files.DOCUMENT: "\ud800", files.SUM: "0"}}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_trace_is_refused_in_a_sentence(name, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(FOREIGN[name])
    with pytest.raises(ValueError, match="expected a trace as regard saves it, found") as error:
        Trace.open(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_the_empty_document_is_what_those_were_made_from(tmp_path):
    (tmp_path / "x.trace").write_bytes(document(EMPTY))
    assert len(Trace.open(tmp_path / "x.trace")) == 0


def test_a_missing_file_is_just_that(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.open(tmp_path / "nowhere.trace")
    assert not is_trace(tmp_path / "nowhere.trace") and not is_trace(tmp_path)


def test_traces_are_known_by_their_beginning(saved, tmp_path):
    (tmp_path / "x").write_bytes(FOREIGN["safetensors without a trace"])
    assert is_trace(saved) and not is_trace(tmp_path / "x")


def edited(saved, change) -> bytes:
    """A file whose document was changed by someone who knows how to write its sums."""
    data = saved.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    said = json.loads(entries["__metadata__"][files.DOCUMENT])
    change(said)
    text = json.dumps(said)
    entries["__metadata__"] = {files.DOCUMENT: text, files.SUM: f"{zlib.crc32(text.encode()):08x}"}
    made = json.dumps(entries).encode()
    made += b" " * (-(8 + len(made)) % files.ALIGN)
    return struct.pack("<Q", len(made)) + made + data[8 + length :]


FORGED = {
    "a class": lambda s: s["looks"][0]["description"]["terms"][0].update({"is": "posix.system"}),
    "an own object": lambda s: s["looks"][0]["description"].update({"mask": {"is": "own", "object": 0}}),
    "q for k": lambda s: s["looks"][0].update({"q": s["looks"][0]["lse"]}),
    "a tensor of another look": lambda s: s["looks"][0].update({"lse": s["sequences"][0]["ids"]}),
    "no such tensor": lambda s: s["looks"][0].update({"k": "nothing"}),
    "heads twice": lambda s: s["looks"][0].update({"heads": [0] * 8}),
    "too few heads": lambda s: s["looks"][0].update({"heads": [0]}),
    "a layer that is text": lambda s: s["looks"][0].update({"layer": "0"}),
    "a kind of its own": lambda s: s["looks"][0].update({"kind": "both"}),
    "sequences that are not there": lambda s: s["looks"][0].update({"tokens": [7, 7]}),
    "labels too few": lambda s: s["sequences"][0]["labels"][0].pop(),
    "labels that are numbers": lambda s: s["sequences"][0].update({"labels": [[1]]}),
    "a readout of another shape": lambda s: s["looks"][0]["description"]["terms"][0].update(
        {"readout": {"tensor": s["looks"][0]["k"]}}
    ),
    "a nest": lambda s: s["looks"][0]["description"].update({"mask": nest(60)}),
}


def nest(depth: int) -> dict:
    found: dict = {"is": "_Causal"}
    for _ in range(depth):
        found = {"is": "_Not", "part": found}
    return found


def test_an_edit_that_changes_nothing_is_read(saved, tmp_path, trace):
    (tmp_path / "x").write_bytes(edited(saved, lambda said: None))
    assert answers(Trace.open(tmp_path / "x")) == answers(trace)


@pytest.mark.parametrize("name", FORGED)
def test_forged_documents_are_refused(saved, tmp_path, name):
    path = tmp_path / "x.trace"
    path.write_bytes(edited(saved, FORGED[name]))
    with pytest.raises(ValueError, match="expected a trace as regard saves it, found"):
        answers(Trace.open(path))


def test_an_altered_tensor_is_found_when_it_is_touched(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    data[-200] ^= 1
    path = tmp_path / "x.trace"
    path.write_bytes(data)
    opened = Trace.open(path)
    with pytest.raises(ValueError, match=r"with the sum \w+ where '\w+' is written: altered"):
        answers(opened)


def test_a_file_that_shrinks_after_it_was_opened(saved, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(saved.read_bytes())
    opened = Trace.open(path)
    with open(path, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ValueError, match="that it has been changed since it was opened"):
        opened[2][0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere_gives_an_error_or_the_same_numbers(saved, tmp_path, trace, seed):
    """Bytes flipped, cut off, repeated, or put in, at random places: never another exception, never other numbers."""
    draw, whole, expected = random.Random(seed), saved.read_bytes(), answers(trace)
    (length,) = struct.unpack("<Q", whole[:8])
    path = tmp_path / "x.trace"
    refused = 0
    for n in range(60):
        data = bytearray(whole)
        at = draw.randrange(8) if n % 6 == 0 else draw.randrange(8 + length if n % 2 else len(data))
        how = draw.randrange(5)
        if how <= 1:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 2:
            del data[at:]
        elif how == 3:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        else:
            data[at : at + draw.randrange(1, 40)] = bytes(draw.randrange(256) for _ in range(draw.randrange(40)))
        path.write_bytes(data)
        try:
            assert answers(Trace.open(path)) == expected
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 30


def test_a_long_trace_opens_at_once(tmp_path):
    """Opening does not grow with the length, and a tile is exact. (The full size is in benchmarks/trace.py.)"""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(rg.nn.Attention(32, 2, position="t5", mask=rg.causal) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    x, model = torch.randn(1, 6000, 32), Model()
    with torch.no_grad(), record(model) as trace:
        model(x)
    trace.save(tmp_path / "long.trace")
    began = time.perf_counter()
    opened = Trace.open(tmp_path / "long.trace")
    assert time.perf_counter() - began < 1.0
    rows, cols = slice(5000, 5256), slice(4900, 5156)
    for layer in range(3):
        tile = opened[layer, 1].block(rows, cols)
        assert torch.equal(tile, trace[layer, 1].block(rows, cols))
        logits = trace[layer, 1].logits[5000:5256]
        torch.testing.assert_close(tile, logits.double().softmax(-1)[:, cols].float())
