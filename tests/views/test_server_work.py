"""The explorer's queue: one computation for all who ask, newest first, none for nobody; twenty clients at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from asking import MAP, Asked, matrix, until
from support import within_budget

import regard as rg
from regard.views import pools
from regard.views.atlas import Atlas
from regard.views.pools import Cancelled
from regard.views.server import Server
from regard.views.server import app as app_module
from regard.views.server.work import Cache, Work


@pytest.fixture
def gate(monkeypatch) -> Iterator[tuple[threading.Event, list]]:
    """Tiles wait for an event, and are counted."""
    opened, begun = threading.Event(), []
    plain = app_module.packed

    def slow(atlas, cell, row, col, what, first, stop):
        begun.append((cell, row, col))
        while not opened.wait(0.01):
            if stop():
                raise Cancelled
        return plain(atlas, cell, row, col, what, first, stop)

    monkeypatch.setattr(app_module, "packed", slow)
    yield opened, begun
    opened.set()


def test_twenty_tabs_that_ask_for_one_tile_are_one_computation(gate):
    opened, begun = gate
    with Server(matrix()[0]) as server, ThreadPoolExecutor(20) as pool:
        one = Asked(server)
        path = f"/api/tile{MAP}?cell=1&row=0&col=0"
        answers = [pool.submit(one.http.get, path) for _ in range(20)]
        until(lambda: begun and next(iter(server.explorer.work._running.values())).waiting == 20)
        opened.set()
        bodies = {answer.result().content for answer in answers}
        assert len(bodies) == 1 and begun == [(1, 0, 0)]
        one.http.get(path)
        assert begun == [(1, 0, 0)]  # kept


def test_the_newest_request_comes_first_and_what_nobody_waits_for_is_not_computed(gate):
    opened, begun = gate
    with Server(matrix()[0]) as server, ThreadPoolExecutor(8) as pool:
        work, one = server.explorer.work, Asked(server)
        paths = [f"/api/tile{MAP}?cell=1&row={row}&col={col}" for row, col in ((0, 0), (0, 1), (1, 0), (1, 1))]
        busy = []
        for n, path in enumerate(paths[:2]):  # both workers
            busy.append(pool.submit(one.http.get, path))
            until(lambda n=n: len(begun) == n + 1)
        impatient = httpx.Client(base_url=server.url, timeout=0.5, trust_env=False)
        with pytest.raises(httpx.ReadTimeout):
            impatient.get(paths[2])
        impatient.close()
        until(lambda: work.dropped == 1)  # it left the queue without being begun
        assert not work._jobs
        waiting = []
        for n, path in enumerate((paths[3], f"/api/tile{MAP}?cell=2&row=0&col=0")):
            waiting.append(pool.submit(one.http.get, path))
            until(lambda n=n: len(work._jobs) == n + 1)
        opened.set()
        assert all(each.result().status_code == 200 for each in busy + waiting)
        assert (1, 1, 0) not in begun
        assert begun[2] == (2, 0, 0), "the newest first"


def test_what_runs_is_told_to_stop_when_everybody_left(gate):
    opened, begun = gate
    with Server(matrix()[0]) as server:
        impatient = httpx.Client(base_url=server.url, timeout=0.5, trust_env=False)
        with pytest.raises(httpx.ReadTimeout):
            impatient.get(f"/api/tile{MAP}?cell=1&row=0&col=0")
        impatient.close()
        until(lambda: server.explorer.work.dropped == 1 and not server.explorer.work._running)
        opened.set()
        assert Asked(server).http.get(f"/api/tile{MAP}?cell=1&row=0&col=0").status_code == 200


def test_a_sample_is_replaced_by_the_exact_tile(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 9000, 4).unbind()
    A = rg.attention(q, k, mask=rg.causal)
    monkeypatch.setattr(pools, "STEP", 64 * 9000)
    monkeypatch.setattr(pools, "FIRST", 8)
    hold = threading.Event()
    step = Atlas.step
    monkeypatch.setattr(Atlas, "step", lambda self: hold.is_set() and step(self))
    with Server(A) as server:
        one = Asked(server)
        path = "/api/tile/1/0/0?cell=64&row=0&col=0"
        sample, _, told = one.tile(path)
        assert not told["flags"] & 1 and one.json("/api/map/1/0/0")["progress"] < 0.2
        hold.set()
        one.exact("/1/0/0")
        exact, _, told = one.tile(path)
        assert told["flags"] & 1 and not torch.equal(sample.nan_to_num(), exact.nan_to_num())
        (pooled,) = A[0, 0].window(slice(None), slice(None), rg.Heatmap(cell=64))
        wanted = pooled.mean.masked_fill(pooled.count == 0, torch.nan)
        within_budget(exact, wanted, wanted.double())


def test_twenty_clients_at_once_lose_nothing(asked):
    asked.exact()
    paths = [
        f"/api/tile{MAP}?cell={cell}&row={row}&col={col}"
        for cell, row, col in ((1, 0, 0), (1, 1, 1), (1, 0, 1), (2, 0, 0))
    ]
    wanted = {path: asked.http.get(path).content for path in paths}

    def client(seed: int) -> int:
        with httpx.Client(base_url=asked.server.url, timeout=60, trust_env=False) as http:
            return sum(http.get(path).content == wanted[path] for path in (paths * 5)[seed % 4 :])

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(client, range(20)))
    assert found == [20 - n % 4 for n in range(20)]


def test_the_tile_cache_is_bounded():
    cache = Cache(1000)
    for n in range(100):
        cache.put(n, bytes(90))
        assert cache.size <= 1000
    assert cache.get(99) is not None and cache.get(0) is None
    cache.forget(lambda key: True)
    assert cache.size == 0


def test_maps_that_were_not_asked_for_lately_are_let_go():
    with Server(matrix()[0]) as server:
        one, maps = Asked(server), server.explorer.maps
        one.exact("/1/0/0")
        maps.kept = 1
        one.exact("/1/0/1")
        assert [key for key, _ in maps.listed()] == [("1", 0, 1)]
        one.exact("/1/0/0")


def test_closing_gives_the_threads_back():
    before = torch.get_num_threads()
    work = Work()
    work.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("port", [-1, 70000, "80", True])
def test_ports_that_are_none_are_refused(port):
    with pytest.raises(ValueError, match="port"):
        Server(port=port)


def test_a_port_that_is_taken_is_refused(asked):
    with pytest.raises(ValueError, match=r"port: .* cannot be used"):
        Server(port=asked.server.port)
