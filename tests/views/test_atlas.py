"""The map of one head: every level against the weights themselves, a sample before the exact, no row twice."""

from __future__ import annotations

import threading

import pytest
import torch
from support import within_budget
from torch import Tensor

import regard as rg
from regard.views import atlas as atlas_module
from regard.views import pools as pools_module
from regard.views.atlas import TILE, Atlas
from regard.views.pools import Cancelled, Cells, Pools, bit_reversed, order_of

Q_LEN, K_LEN = 700, 900


def head(q_len: int = Q_LEN, k_len: int = K_LEN, dtype: torch.dtype = torch.float32, **kwargs) -> rg.AttentionMatrix:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, q_len, 8), torch.randn(1, 1, k_len, 8)
    given = {"position": rg.recipes.t5(heads=1), "mask": rg.causal, "q_start": k_len - q_len} | kwargs
    with torch.no_grad():
        given["position"].readout.normal_()
    given["position"] = given["position"].to(dtype)
    return rg.attention(q.to(dtype), k.to(dtype), **given)[0, 0]


def cells(x: Tensor, seen: Tensor, cell: int, least: float) -> tuple[Tensor, Tensor]:
    """Mean and maximum of the visible pairs, from stored matrices."""
    rows, cols = (-(-n // cell) for n in x.shape)
    x, seen = (
        torch.nn.functional.pad(y, (0, cols * cell - y.shape[1], 0, rows * cell - y.shape[0])) for y in (x, seen)
    )
    x, seen = (y.view(rows, cell, cols, cell).transpose(1, 2).flatten(2) for y in (x, seen))
    mean = torch.where(seen, x, 0.0).sum(-1) / seen.sum(-1)
    return mean, torch.where(seen, x, least).amax(-1).masked_fill(~seen.any(-1), torch.nan)


def stored(A: rg.AttentionMatrix, what: str, first: bool) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits = A.logits.dense(force=True)
        x = logits if what == "logits" else torch.exp(logits - logits.logsumexp(-1, keepdim=True))
    seen = logits > -torch.inf
    if not first:
        seen[:, 0] = False
    return x, seen


def finish(atlas: Atlas) -> None:
    while atlas.step():
        pass


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Steps of a few rows, so that a small A has a sample, gaps and an end."""
    monkeypatch.setattr(pools_module, "STEP", 96 * K_LEN)
    monkeypatch.setattr(pools_module, "FIRST", 8)


def every_tile_is_right(atlas: Atlas, what: str, first: bool) -> None:
    """All tiles of all levels are those of the stored matrix."""
    plain, exact = head(), head(dtype=torch.float64)
    least = 0.0 if what == "weights" else -torch.inf
    for cell in atlas.levels:
        wanted = cells(*stored(exact, what, first), cell, least)
        by_torch = cells(*stored(plain, what, first), cell, least)
        for row in range(-(-Q_LEN // (cell * TILE))):
            for col in range(-(-K_LEN // (cell * TILE))):
                tile = atlas.tile(cell, row, col, what=what, first=first)
                assert tile.exact
                at = slice(row * TILE, (row + 1) * TILE), slice(col * TILE, (col + 1) * TILE)
                for name, found, plain_x, exact_x in zip(("mean", "max"), tile[:2], by_torch, wanted, strict=True):
                    within_budget(found, plain_x[at], exact_x[at], f"{name} of {what} at {cell}")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", ["weights", "logits"])
def test_every_tile_of_every_level_is_that_of_the_stored_matrix(what, first):
    atlas = Atlas(head())
    atlas.pools(what)
    atlas.levels = [1, 2, 4, 8, 16, 32, 64, 128]  # beyond what a screen needs: merged more than once
    finish(atlas)
    every_tile_is_right(atlas, what, first)


def test_what_rows_give_beside_cells_is_what_the_matrix_gives():
    A, atlas = head(), Atlas(head())
    finish(atlas)
    exact = head(dtype=torch.float64)
    for name in ("lse", "entropy", "received", "profile"):
        found = atlas.weights if hasattr(atlas.weights, name) else atlas.sums
        x, y = getattr(A, name), getattr(exact, name)
        with torch.no_grad():
            plain, right = (z() if callable(z) else z for z in (x, y))
        within_budget(getattr(found, name).to(plain.dtype), plain, right, name)


def test_largest_weights_that_are_a_pass_of_their_own_are_the_same():
    """As on a device, where the cells' pass does not give them."""
    one, other = Atlas(head()), Atlas(head())
    other.weights.tops, other._peaks = False, None
    del other.weights.peaks
    finish(one)
    finish(other)
    assert other.finished and other.bytes() > 0
    first, rest, exact = other.peaks(1)
    assert not exact and not other.finished  # it begins when it is asked for, with a sample
    finish(other)
    first, rest, exact = other.peaks(1)
    assert exact and torch.equal(first, one.peaks(1)[0]) and torch.equal(rest, one.peaks(1)[1])


def test_a_sample_comes_first_and_says_so():
    atlas = Atlas(head())
    atlas.levels = [1, 32, 64]
    tile = atlas.tile(64, 0, 0)
    assert not tile.exact and 0 < atlas.progress < 1 and not atlas.exact
    finish(atlas)
    exact = atlas.tile(64, 0, 0)
    assert exact.exact and atlas.progress == 1 and atlas.exact
    # a sample of a cell's rows is close to all of them, and every row of cells has something to show
    shown = ~exact.mean.isnan() & ~tile.mean.isnan()
    assert shown.sum() > 0.9 * (~exact.mean.isnan()).sum()
    assert not torch.equal(tile.mean.nan_to_num(), exact.mean.nan_to_num())


def test_rows_in_sight_come_before_others(monkeypatch):
    monkeypatch.setattr(atlas_module, "TILE", 4)
    monkeypatch.setattr(pools_module, "FIRST", 2)
    atlas = Atlas(head())
    atlas.levels = [1, 32]
    assert not atlas.tile(32, 3, 0).exact  # queries 384 .. 511: four units of rows
    assert not atlas.weights.known(slice(384, 512))
    for _ in range(2):  # three units at a time, but for those of the sample
        atlas.step()
    assert atlas.weights.known(slice(384, 512)) and not atlas.exact
    assert atlas.tile(32, 3, 0).exact


def test_a_fine_tile_is_exact_at_once_and_takes_in_only_its_rows():
    atlas = Atlas(head())
    tile = atlas.tile(1, 1, 0)  # queries 256 .. 511
    assert tile.exact and tile.mean.shape == (256, 256)
    assert atlas.weights.done == 8  # 256 rows, 32 at a time
    assert (tile.row, tile.col, tile.cell) == (256, 0, 1)
    wanted, plain = stored(head(dtype=torch.float64), "weights", True)[0], stored(head(), "weights", True)[0]
    at = slice(256, 512), slice(0, 256)
    within_budget(tile.mean, plain[at], wanted[at])  # every one of these keys is visible


def test_a_log_sum_exp_that_is_known_already_needs_no_row():
    A = head()
    A @ torch.randn(K_LEN, 4)  # as a recording leaves it
    atlas = Atlas(A)
    tile = atlas.tile(2, 1, 0)
    assert tile.exact and atlas.weights.done == 0 and not atlas.exact
    wanted, plain = (cells(*stored(x, "weights", True), 2, 0.0)[0] for x in (head(dtype=torch.float64), head()))
    within_budget(tile.mean, plain[256:512, :256], wanted[256:512, :256])
    weights, known = atlas.column(5)
    within_budget(
        weights, stored(head(), "weights", True)[0][:, 5], stored(head(dtype=torch.float64), "weights", True)[0][:, 5]
    )
    assert bool(known.all())


def test_rows_that_are_not_done_are_not_known_to_a_column():
    atlas = Atlas(head())
    atlas.tile(1, 1, 0)  # queries 256 .. 511
    known = atlas.column(5)[1]
    assert known[256:512].all() and not known[:256].any() and not known[512:].any()


def test_no_row_is_taken_in_twice_by_several_threads(monkeypatch):
    atlas, seen, lock = Atlas(head()), [], threading.Lock()
    deposit = Pools._deposit

    def counting(self, rows, found):
        with lock:
            seen.extend(range(rows.start, rows.stop))
        deposit(self, rows, found)

    monkeypatch.setattr(Pools, "_deposit", counting)
    threads = [threading.Thread(target=finish, args=(atlas,)) for _ in range(3)]
    threads.append(threading.Thread(target=atlas.tile, args=(1, 2, 0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(Q_LEN)) and atlas.exact


def test_rows_whose_pass_failed_are_there_to_be_claimed_again(monkeypatch):
    atlas = Atlas(head())
    with monkeypatch.context() as broken:
        broken.setattr(Pools, "_deposit", lambda *given: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            atlas.step()
    assert atlas.progress == 0
    finish(atlas)
    assert atlas.exact


def test_what_nobody_waits_for_is_left():
    with pytest.raises(Cancelled):
        Atlas(head()).tile(1, 0, 0, stop=lambda: True)


@pytest.mark.parametrize(
    ("given", "says"),
    [((3, 0, 0), "cell: expected one of"), ((1, 99, 0), "row: expected a tile from 0 to 2"), ((1, 0, -1), "col: ")],
)
def test_tiles_that_are_not_there_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Atlas(head()).tile(*given)


def test_an_atlas_is_of_one_head():
    A = rg.attention(torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"A\[0, 3\]"):
        Atlas(A)


def test_pools_of_several_heads_are_each_heads_heat_map():
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 3, 500, 8).unbind()
    A = rg.attention(q, k, mask=rg.causal)[0]
    pools = Pools(A, 32 * 2)
    while pools.step():
        pass
    dense = rg.attention(q.double(), k.double(), mask=rg.causal)[0].dense(force=True)
    for n in range(3):
        wanted = cells(dense[n], dense[n] > 0, 64, 0.0)
        plain = cells(A.dense(force=True)[n], dense[n] > 0, 64, 0.0)
        for found, x, y in zip(Cells(*(c[n] for c in pools.cells)).shown(), plain, wanted, strict=True):
            within_budget(found, x, y)


@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (70, 5), (33, 31)])
def test_small_and_lopsided_matrices(shape):
    q_len, k_len = shape
    A = head(q_len, k_len, mask=None, q_start=0)
    atlas = Atlas(A)
    tile = atlas.tile(1, 0, 0)
    assert tile.exact and tile.mean.shape == shape
    assert torch.allclose(tile.mean.sum(-1), torch.ones(q_len))
    finish(atlas)
    assert atlas.exact


@pytest.mark.parametrize("thin", [0, 256])
@pytest.mark.parametrize("units", [0, 1, 2, 255, 256, 257, 3125])
def test_the_order_of_rows_leaves_none_out(units, thin):
    order = order_of(units, 8, thin)
    assert sorted(n for run in order for n in run) == list(range(units))
    assert all(len(run) <= 8 for run in order)


def test_bit_reversed_order():
    assert list(bit_reversed(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(bit_reversed(11)) == list(range(11))
