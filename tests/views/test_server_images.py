"""Grids and the images on them, as the explorer's server takes and tells them; and what heads do, from some rows."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import torch
from asking import Asked, like, until
from safetensors.torch import save
from support import within_budget

import regard as rg
from regard.models import digits
from regard.views.server import Server, doing
from regard.views.server.answers import squares
from regard.views.server.images import PIXELS, picture, placed
from regard.views.server.sources import Seen, Source, read, trace_of


@pytest.fixture(scope="module")
def one():
    with Server() as server:
        yield Asked(server)


def dropped(one, **arrays):
    held = io.BytesIO()
    np.savez(held, **{name: np.asarray(x) for name, x in arrays.items()})
    number = one.http.post("/api/upload?name=x.npz", content=held.getvalue()).json()["id"]
    return until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)


def vectors(length: int) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    return dict(zip("qk", torch.randn(2, 1, length, 4).numpy(), strict=True))


@pytest.mark.parametrize(
    ("image", "grid", "wanted"),
    [
        (np.zeros((4, 6), np.uint8), None, [2, 3]),  # six tokens on an image of that shape
        (np.zeros((4, 6, 3), np.float32), (3, 2), [3, 2]),
        (np.zeros((32, 32, 4), np.uint8), None, [2, 2]),
    ],
)
def test_an_image_comes_with_its_grid(one, image, grid, wanted):
    length = wanted[0] * wanted[1] + (image.shape[0] == 32)  # a class token before the last
    told = dropped(one, **vectors(length), image=image, **({} if grid is None else {"grid": grid}))
    assert told["state"] == "ready", told["error"]
    geometry = told["looks"][0]["geometry"]
    assert geometry["k"] == wanted and geometry["image"] and geometry["unplaced"] == length - wanted[0] * wanted[1]
    sent = one.http.get(f"/api/image/{told['id']}/0").content
    rows, columns, channels = struct.unpack_from("<3I", sent)
    assert (rows, columns) == image.shape[:2] and channels in (1, 3) and len(sent) == 12 + rows * columns * channels


def test_an_image_is_the_bytes_that_were_given():
    x = torch.arange(24, dtype=torch.uint8).view(2, 4, 3)
    assert torch.equal(picture(x), x)
    assert torch.equal(picture(torch.tensor([[0.0, 0.5, 1.0]])), torch.tensor([[[0], [128], [255]]], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(4), "[rows, columns]"), (torch.zeros(2, 2, 5), "1, 3 or 4"),
        (torch.full((2, 2), 2.0), "from 0 to 1"), (torch.full((2, 2), torch.nan), "from 0 to 1"),
        (torch.zeros(2, 2, dtype=torch.int64), "bytes"),
        (torch.zeros(0, 4), "[rows, columns]"), (torch.zeros(1).expand(PIXELS // 4 + 1, 4), "pixels"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_in_a_sentence(x, says):
    with pytest.raises(ValueError, match="image: expected") as error:
        picture(x)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"image": np.zeros((5, 7), np.uint8)}, "grid: expected [rows, columns] with the image, for 6 keys"),
        ({"grid": [4, 4]}, "grid: expected rows x columns + unplaced = 6 keys, found 4 x 4"),
        ({"grid": [2, 2.5]}, "grid: expected 2 whole numbers"),
        ({"unplaced": 1}, "unplaced: expected a grid"),
        ({"image": np.array([[None]])}, "allow_pickle"),
    ],
)  # fmt: skip
def test_a_grid_that_does_not_fit_is_refused_in_a_sentence(one, arrays, says):
    told = dropped(one, **vectors(6), **arrays)
    assert told["state"] == "failed" and says in told["error"].replace("Object arrays cannot be loaded when ", ""), told


def test_a_safetensors_file_may_hold_an_image_too(one):
    body = save(
        {"q": torch.randn(1, 4, 2), "k": torch.randn(1, 4, 2), "image": torch.zeros(8, 8, 3, dtype=torch.uint8)}
    )
    number = one.http.post("/api/upload?name=x.safetensors", content=body).json()["id"]
    told = until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)
    assert told["state"] == "ready" and told["looks"][0]["geometry"]["k"] == [2, 2]


def test_a_grid_without_an_image_has_none(one):
    told = dropped(one, **vectors(7), grid=[2, 3])
    assert told["looks"][0]["geometry"]["unplaced"] == 1 and not told["looks"][0]["geometry"]["image"]
    assert "has none" in one.json(f"/api/image/{told['id']}/0", status=404)["error"]
    assert placed(7, None, None, None) is None


def test_the_digit_model_looks_at_the_digit_that_is_named(one):
    assert "digits" in [each["name"] for each in one.json("/api/sources")["models"]]
    number = one.http.post("/api/record", json={"model": "digits", "text": "7"}).json()["id"]
    told = until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)
    assert told["state"] == "ready", told["error"]
    assert [len(look["heads"]) for look in told["looks"]] == [4, 4] and told["looks"][0]["geometry"]["k"] == [8, 8]
    image = torch.frombuffer(bytearray(one.http.get(f"/api/image/{number}/0").content[12:]), dtype=torch.uint8)
    ink = digits.load().images[7]
    assert torch.equal(image, ((1 - ink) * 255).round().to(torch.uint8))
    A = read("digits", "7").trace[1, 2]
    same = like(A, A.to(torch.float64))
    same(torch.tensor(one.json(f"/api/grid/{number}/1/2?i=20")["weights"]), lambda A: A[20, :])
    number = one.http.post("/api/record", json={"model": "digits", "text": "seven"}).json()["id"]
    told = until(lambda: (found := one.json(f"/api/source/{number}"))["state"] != "recording" and found)
    assert told["state"] == "failed" and "a digit from 0 to 9" in told["error"]


def test_the_digit_model_reads_its_own_images():
    model, images = digits.load()
    with torch.no_grad():
        logits, looks = model(images, look=True)
    assert logits.argmax(-1).tolist() == list(range(10)) and looks.encoder[0].shape == (10, 4, 64, 64)
    assert torch.allclose(logits, model(images)) and digits.about()["right"] > 0.95


def test_a_large_grid_is_told_in_squares():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 150 * 20, 4)
    with Server(rg.attention(q, k, geometry=rg.Grid(150, 20))) as server:
        one = Asked(server)
        found, row = one.json("/api/grid/1/0/0?i=1234"), one.floats("/api/weights/1/0/0?i=1234")
    assert found["pool"] == 2 and found["cell"] == [61, 14]
    board = torch.tensor(found["weights"])
    assert torch.equal(board, squares(row.view(150, 20))[1].flatten())
    assert board[31 * 10 + 3].item() == pytest.approx(row.view(150, 20)[62:64, 6:8].sum().item())
    assert len(board) == 75 * 10 and board.sum().item() == pytest.approx(1, abs=1e-5)
    pool, cells = squares(torch.ones(150, 20))
    assert (pool, cells.shape, cells.unique().tolist()) == (2, (75, 10), [4.0])


# What heads do, where they are long


def seen_of(A: rg.AttentionMatrix, ids: torch.Tensor | None = None, monkeypatch=None) -> Seen:
    source = Source("1", "x", "trace")
    source.fill(trace_of(A))
    if ids is not None:
        monkeypatch.setattr(Seen, "ids", lambda self: ids)
    return source.seen[0]


@pytest.mark.parametrize("kind", ["line", "grid", "sink"])
def test_what_heads_do_is_what_statistics_say_once_every_row_is_in(kind, monkeypatch):
    torch.manual_seed(0)
    length = 360
    q, k = torch.randn(2, 1, 2, length, 8)
    how = {
        "line": {"position": rg.recipes.alibi(heads=2), "mask": rg.causal},
        "grid": {"geometry": rg.Grid(18, 20)},
        "sink": {"mask": rg.causal, "sink": torch.tensor([0.5, 3.0])},
    }[kind]
    A, exact = (rg.attention(q.to(x), k.to(x), **how) for x in (torch.float32, torch.float64))
    ids = torch.randint(0, 40, (length,)) if kind == "line" else None
    got = doing.Doing(seen_of(A, ids, monkeypatch))
    assert got.told() is None
    while got.step():
        pass
    wanted = trace_of(exact).statistics(progress=False).rows
    for n, row in enumerate(got.told()):
        assert row["of_rows"] == 1.0 and row["does"] == wanted[n]["does"]
        names = {name for name, x in row.items() if isinstance(x, float)} - {"of_rows", "induction"}
        assert {"first", "self", "previous", "entropy", "spread", "toeplitz"} <= names and ("sink" in names) == (
            kind == "sink"
        )
        plain = trace_of(A).statistics(progress=False).rows[n]
        for name in names:
            within_budget(
                *(
                    torch.tensor(x[name]).to(d)
                    for x, d in ((row, torch.float32), (plain, torch.float32), (wanted[n], torch.float64))
                )
            )
        if ids is not None:
            share = exact[0, n].induction_share(ids[None])
            within_budget(torch.tensor(row["induction"]).float(), A[0, n].induction_share(ids[None]).float(), share)


def test_what_long_heads_do_is_told_from_a_sample_and_says_so(monkeypatch):
    monkeypatch.setattr(doing, "ALL", 0)  # as if the head were too long ever to be looked at whole
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 20_000, 4)
    A = rg.attention(q, k, mask=rg.causal & rg.window(64, 0))
    with Server(A) as server:
        told = until(lambda: not (found := Asked(server).json("/api/overview/1"))["more"] and found)
    (head,) = told["heads"]
    assert 0 < head["of_rows"] < 0.2
    assert head["what"] == "wide" and head["stats"]["entropy"] == pytest.approx(A.entropy().mean().item(), rel=0.05)


def test_padding_does_not_count(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 4)
    A = rg.attention(q, k, mask=rg.causal)
    real = torch.arange(64) < 40
    monkeypatch.setattr(Seen, "real", lambda self: real)
    got = doing.Doing(seen_of(A))
    while got.step():
        pass
    (row,) = got.told()
    assert row["entropy"] == pytest.approx(A.entropy()[0, 0, :40].mean().item(), rel=1e-5)
    assert row["first"] == pytest.approx(A[0, 0, :40, 0].mean().item(), rel=1e-5)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="device: 'cuda:77' cannot be used"):
        Server(device="cuda:77")
    with pytest.raises(ValueError, match="device: 'nonsense' cannot be used"):
        Server(device="nonsense")


def test_a_trace_is_computed_on_the_device_that_is_given():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 4)
    A = rg.attention(q, k, mask=rg.causal)
    source = Source("1", "x", "trace")
    source.fill(trace_of(A, v), device=torch.device("cpu"))
    seen = source.seen[0]
    assert seen.matrix(1).device.type == "cpu" and torch.equal(seen.matrix(1)[7, :], A[0, 1, 7, :])
    assert seen.values() is seen.values()
