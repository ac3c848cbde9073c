"""Maps that a device computes: few large steps, cells that stay there, and a sample while kernels are compiled.

There is no device here: the CPU stands for one, and windows that kernels would be compiled for are counted.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from asking import Asked, matrix, until
from support import within_budget
from test_atlas import K_LEN, Q_LEN, every_tile_is_right, finish, head, stored

import regard as rg
from regard.summaries import Entropy, Heatmap, LogSumExp, Profile, Received
from regard.views import atlas as atlas_module
from regard.views import cells as cells_module
from regard.views import pools as pools_module
from regard.views import sums as sums_module
from regard.views.atlas import Atlas
from regard.views.cells import Sampled, alike, plainly
from regard.views.pools import Cancelled, Pools
from regard.views.server import Server
from regard.views.server import maps as maps_module
from regard.views.server import sources as sources_module
from regard.views.server.sources import Source
from regard.views.server.work import Work

FUSED = (Heatmap, LogSumExp, Entropy, Received, Profile)


class Device:
    """What was asked of A, as (rows, columns), by kernels and by plain operations."""

    def __init__(self) -> None:
        self.fused: list[tuple[slice, slice]] = []
        self.plain: list[tuple[slice, slice]] = []
        self.kinds: list[rg.Summary] = []
        self.compiling = threading.Event()  # while it is cleared, kernels are not ready
        self.compiling.set()

    def asked(self, rows: slice, cols: slice, summaries: tuple) -> None:
        self.kinds += summaries
        own = any(type(each) in FUSED and getattr(each, "of", "weights") == "weights" for each in summaries)
        (self.fused if own else self.plain).append((rows, cols))
        if own:
            assert self.compiling.wait(60)


def kind_of(A: rg.AttentionMatrix, rows: int, cols: int, *given: rg.Summary) -> tuple:
    """As if there were kernels."""
    return rows, cols, *(f"{type(x).__name__} {sorted(vars(x).items(), key=str)}" for x in given)


@pytest.fixture
def device(monkeypatch) -> Device:
    """The CPU as a device whose steps are 200 rows, and that knows no kernel yet."""
    made = Device()
    for module in (pools_module, atlas_module, sums_module):
        monkeypatch.setattr(module, "on_device", lambda A: True)
    for module in (pools_module, atlas_module):
        monkeypatch.setattr(module, "kind_of", kind_of)
    monkeypatch.setattr(maps_module, "elsewhere", lambda device: device is not None)
    monkeypatch.setattr(cells_module, "_known", set())
    monkeypatch.setattr(pools_module, "STEP_DEVICE", 200 * K_LEN)
    monkeypatch.setattr(pools_module, "FIRST", 6)
    monkeypatch.setattr(atlas_module, "FEW", 1 << 12)
    window = rg.AttentionMatrix.window

    def watched(self, rows, cols, *summaries, lse=None):
        made.asked(rows, cols, summaries)
        return window(self, rows, cols, *summaries, lse=lse)

    monkeypatch.setattr(rg.AttentionMatrix, "window", watched)
    return made


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", ["weights", "logits"])
@pytest.mark.parametrize("begin", ["preview", "kernels"])
def test_every_tile_of_every_level_is_that_of_the_stored_matrix(device, what, first, begin):
    atlas = Atlas(head())
    atlas.pools(what)
    atlas.levels = [1, 2, 4, 32, 64, 128]
    if begin == "preview":  # what it leaves in cells, and beside them, must be gone in the end
        assert not atlas.tile(64, 0, 0, what=what, first=first).exact
    finish(atlas)
    assert atlas.finished and atlas.pools(what).exact
    every_tile_is_right(atlas, what, first)


def test_a_first_picture_needs_no_kernel(device):
    atlas = Atlas(head())
    atlas.levels = [1, 32, 64]
    tile = atlas.tile(32, 0, 0)
    without = atlas.tile(32, 0, 0, first=False)
    assert not device.fused and not tile.exact and atlas.progress == 0
    plain, exact = (stored(head(dtype=x), "weights", True)[0] for x in (torch.float32, torch.float64))
    at = [n * 22 // 6 for n in range(6)]  # 22 rows of cells, six of which have a sample: sixteen rows in their middle
    assert atlas.weights.previewed.nonzero().flatten().tolist() == at
    shown, by_torch, right = [], [], []
    for found, skip in ((tile, 0), (without, 1)):
        for n in at:
            rows = slice(32 * n + 8, 32 * n + 24) if n < 21 else slice(678, 694)  # the last cells are 28 rows high
            shown += [found.mean[n, 0], found.max[n, 0]]
            for total, x in ((by_torch, plain), (right, exact)):
                total += [x[rows, skip:32].mean(), x[rows, skip:32].max()]
    within_budget(*(torch.stack(x) for x in (shown, by_torch, right)))
    assert torch.equal(tile.mean[1].nan_to_num(), tile.mean[0].nan_to_num())  # the nearest stands for others
    assert float(atlas.weights.largest) == pytest.approx(float(tile.max.nan_to_num().max()), rel=1e-6)
    finish(atlas)
    assert device.fused and atlas.tile(32, 0, 0).exact
    assert not torch.equal(atlas.tile(32, 0, 0).mean.nan_to_num(), tile.mean.nan_to_num())


def test_with_its_kernels_there_a_sample_is_made_of_steps(device):
    one = Atlas(head())
    while one.prepare():
        pass
    asked = len(device.fused)
    two = Atlas(head())  # the same kinds of windows: nothing is prepared again
    assert two.weights.ready and not two.prepare() and len(device.fused) == asked
    tile = two.tile(two.levels[-1], 0, 0)
    assert not tile.exact or two.exact
    assert not two.weights.previewed.any() and two.weights.done > 0
    finish(two)
    whole = [rows for rows, cols in device.fused[asked:] if cols == slice(None)]
    steps = sorted((rows.start, rows.stop) for rows in whole)[: len(two.weights.order)]
    assert len(two.weights.order) == 4 and all(last - first <= 200 for first, last in steps)


def test_steps_are_whole_cells_and_no_row_is_taken_in_twice(device, monkeypatch):
    atlas, seen, lock = Atlas(head()), [], threading.Lock()
    deposit = Pools._deposit

    def counting(self, rows, found):
        with lock:
            assert rows.start % self.size == 0 and (rows.stop % self.size == 0 or rows.stop == Q_LEN)
            seen.extend(range(rows.start, rows.stop))
        deposit(self, rows, found)

    monkeypatch.setattr(Pools, "_deposit", counting)
    threads = [threading.Thread(target=finish, args=(atlas,)) for _ in range(2)]
    threads += [threading.Thread(target=atlas.tile, args=(1, row, 0)) for row in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(Q_LEN)) and atlas.exact


def test_what_is_zoomed_into_does_not_wait_for_the_compiler(device):
    device.compiling.clear()
    atlas = Atlas(head())
    passing = threading.Thread(target=finish, args=(atlas,))
    passing.start()
    until(lambda: device.fused)  # a kernel is being compiled
    assert atlas.weights.previewed.any()  # there was something to show before
    tile = atlas.tile(1, 1, 0)
    assert tile.exact and len(device.fused) == 1 and passing.is_alive()
    wanted, plain = (stored(head(dtype=x), "weights", True)[0] for x in (torch.float64, torch.float32))
    at = slice(256, 512), slice(0, 256)
    within_budget(tile.mean, plain[at], wanted[at])
    device.compiling.set()
    passing.join()
    assert atlas.exact


def test_without_kernels_steps_are_small_and_nothing_is_prepared(device, monkeypatch):
    monkeypatch.setattr(pools_module, "STEP", pools_module.SLOWER * 64 * 700)
    q, k = torch.randn(2, 1, 1, 700, 8).unbind()
    atlas = Atlas(rg.attention(q, k, engine="tiled")[0, 0])
    atlas.levels = [1, 32]
    assert atlas.weights.step_units == 2 and atlas.weights.ready and not atlas.weights.lengths()
    assert not atlas.tile(32, 0, 0).exact and not device.fused  # a sample, as ever
    finish(atlas)
    assert atlas.tile(32, 0, 0).exact and {
        rows.stop - rows.start for rows, cols in device.fused if cols == slice(None)
    } <= {32, 64, 28, 60}


def test_what_rows_give_beside_cells_is_what_the_matrix_gives(device):
    A, exact, atlas = head(), head(dtype=torch.float64), Atlas(head())
    finish(atlas)
    assert atlas.finished and not any(isinstance(each, (Received, Entropy)) for each in device.kinds)
    assert not atlas.sums.exact and not atlas.finished  # they begin when they are asked for
    finish(atlas)
    entropy, known = atlas.entropy()
    assert bool(known.all()) and atlas.bytes() > 0
    with torch.no_grad():
        for name, found, plain, right in (
            ("lse", atlas.lse, A.lse, exact.lse),
            ("entropy", entropy, A.entropy(), exact.entropy()),
            ("received", atlas.sums.received, A.received(), exact.received()),
            ("profile", atlas.sums.profile, A.profile(), exact.profile()),
        ):
            within_budget(found.to(plain.dtype), plain, right, name)


def test_a_preview_that_nobody_waits_for_is_left(device):
    atlas = Atlas(head())
    atlas.levels = [1, 32]
    with pytest.raises(Cancelled):
        atlas.tile(32, 0, 0, stop=lambda: True)
    assert not device.plain and not atlas.weights.previewed.any()


def test_a_sample_of_a_window_without_the_first_key():
    """Rows that do not see the first cells, so that strips begin within one."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 100, 8).unbind()
    A, exact = (rg.attention(x, y, mask=rg.window(10, 0))[0, 0] for x, y in ((q, k), (q.double(), k.double())))
    for rows in (slice(0, 16), slice(12, 28), slice(80, 96)):
        (found,) = A.window(rows, slice(None), Sampled(cell=32))
        plain, right = (x.dense()[rows, 1:32] for x in (A, exact))
        within_budget(found.first_sum.flatten(), plain.sum().view(1), right.sum().view(1))
        within_budget(found.first_max.flatten(), plain.max().view(1), right.max().view(1))
        assert int(found.first_count) == int((right > 0).sum())


def test_steps_and_runs_of_many_rows_are_one_kind_to_the_compiler():
    assert alike(67_584) == alike(53_824) == alike(1_000_000)
    assert len({alike(n) for n in (1, 16, 256, 1000, 1023, 67_585, 67_584)}) == 7


def test_plainly_is_the_same_summary_of_another_class():
    heat = Heatmap(cell=16)
    made = plainly(heat)
    assert type(made) is not Heatmap and isinstance(made, Heatmap) and made.size == 16 and type(heat) is Heatmap
    assert type(made) is type(plainly(Heatmap(cell=4)))


def test_a_pass_that_goes_alone_leaves_a_worker_to_who_waits():
    work, begun, go_on = Work(workers=2), [], threading.Event()

    class Slow:
        def __init__(self, alone: bool) -> None:
            self.alone = alone

        def step(self) -> bool:
            begun.append(self)
            assert go_on.wait(60)
            return False

    try:
        one, two, open_to_all = Slow(True), Slow(True), Slow(False)
        work.follow(one)
        until(lambda: begun == [one])
        work.follow(two)
        assert work.join("job", lambda stop: 7).future.result(10) == 7  # the other worker is there
        assert begun == [one]
        work.follow(open_to_all)
        until(lambda: begun == [one, open_to_all])
        go_on.set()
        until(lambda: two in begun)
    finally:
        go_on.set()
        work.close()


def test_a_source_is_prepared_when_it_is_opened_and_shown_before_that(device, monkeypatch):
    monkeypatch.setattr(pools_module, "STEP_DEVICE", 2000 * 9000)
    device.compiling.clear()
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 9000, 8).unbind()
    A = rg.attention(q, k, mask=rg.causal)
    with Server(A, device="cpu") as server:
        asked, at = Asked(server), "/1/0/0"
        until(lambda: device.fused)  # a kernel is being compiled, and nobody has asked for anything
        assert asked.json("/api/source/1")["prepared"] is False
        top = asked.json(f"/api/map{at}")["levels"][-1]
        sampled, _, told = asked.tile(f"/api/tile{at}?cell={top}&row=0&col=0")
        assert not told["flags"] & 1 and not sampled[:, 0].isnan().any()
        fine, _, told = asked.tile(f"/api/tile{at}?cell=1&row=30&col=0")
        assert told["flags"] & 1 and len(device.fused) == 1
        within_budget(fine[0], A[0, 0, 7680, :256], A.to(torch.float64)[0, 0, 7680, :256])
        assert asked.json("/api/source/1")["prepared"] is False
        device.compiling.set()
        asked.exact(at)
        until(lambda: asked.json("/api/source/1")["prepared"])
        exact, _, told = asked.tile(f"/api/tile{at}?cell={top}&row=0&col=0")
        assert told["flags"] & 1
        heat, right = (x[0, 0].summarize(Heatmap(cell=top))[0].mean[100, :90] for x in (A, A.to(torch.float64)))
        within_budget(exact[100, :90], heat.float(), right)


def test_a_source_on_the_cpu_has_nothing_to_prepare():
    with Server(matrix()[0]) as server:
        assert Asked(server).json("/api/source/1")["prepared"] is True


def recorded(path: Path) -> Path:
    """A trace in a file, of a layer that multiplied: its log-sum-exp was recorded with it."""
    torch.manual_seed(0)
    model = rg.nn.Decoder(40, 16, 1, 2, position="t5").eval()
    with rg.record(model) as trace, torch.no_grad():
        model(torch.randint(40, (1, 50)))
    trace.save(path)
    return path


def test_a_log_sum_exp_that_was_recorded_goes_along(tmp_path):
    path = recorded(tmp_path / "a.trace")
    held = sources_module.opened(path, "a").trace
    source = Source("1", "a", "file")
    source.fill(held, device=torch.device("cpu"))
    for n in (0, 1):
        A, known = source.seen[0].matrix(n), held[0, n].remembered
        assert known is not None and torch.equal(A.remembered, known)
        assert torch.equal(A.dense(), held[0, n].dense())


def test_pages_of_a_file_are_let_go_when_q_and_k_have_been_moved(tmp_path):
    source = Source("1", "a", "file")
    source.fill(sources_module.opened(recorded(tmp_path / "a.trace"), "a").trace)
    seen = source.seen[0]
    mapped, whole = seen.trace._tensors._touched, seen.trace[0]
    assert sorted(x.shape[-1] for x in mapped.values() if x.dim() == 4) == [8, 8]  # q and k
    assert seen._moved(whole, torch.device("meta")).device.type == "meta"  # it holds shapes alone, and is elsewhere
    assert not any(x.dim() == 4 for x in mapped.values()) and not seen.trace._ready
    assert torch.equal(seen.matrix().dense(force=True), whole[0].dense(force=True))  # they can be mapped again
