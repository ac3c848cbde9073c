"""Caches: decoding step by step is the one-shot pass, whatever the term, the cache, and what was done to it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from support import within_budget

import regard as rg
from regard.cache import Cache, KVCache, PagedCache, PoolFull, WindowCache, allows, needs_whole, sees_ahead, sees_back
from regard.nn import Attention, Decoder

DIM, HEADS, KV_HEADS, HEAD_DIM, V_DIM, LENGTH, WINDOW = 12, 4, 2, 4, 3, 21, 6
GRID = rg.Grid(3, 7)
POINTS = rg.Points(torch.stack([torch.arange(21) * 5 % 7, torch.arange(21) * 3 % 4], -1))
OMEGA = [1.3, 0.4]

TERMS = {
    "none": lambda: None,
    "t5": lambda: rg.recipes.t5(HEADS, buckets=8, max_distance=9, bidirectional=False),
    "alibi": lambda: rg.recipes.alibi(HEADS),
    "table": lambda: rg.Static(rg.Table(3, clip=4, heads=HEADS), HEADS),
    "cells": lambda: rg.Static(rg.Cells(32), HEADS),
    "sinusoid": lambda: rg.Static(rg.Sinusoid(OMEGA, learn=True), HEADS),
    "network": lambda: rg.Static(rg.Network(HEADS, hidden=5, extent=4.0, bound=2.0)),
    "constant": lambda: rg.Static(rg.Constant(), HEADS),
    "shaw": lambda: rg.recipes.shaw(HEAD_DIM, 3),
    "xl": lambda: rg.recipes.transformer_xl(HEADS, HEAD_DIM),
    "deberta": lambda: rg.recipes.deberta(HEADS, HEAD_DIM, buckets=4, max_position=9),
    "key": lambda: rg.FromKey.learn(rg.Table(3, clip=5), HEAD_DIM, HEADS, offset=True),
    "rotary": lambda: rg.Rotary(),
    "sum": lambda: rg.recipes.alibi(HEADS) + rg.recipes.shaw(HEAD_DIM, 2) + rg.Rotary(),
}
PLACED = {
    "swin": (GRID, lambda: rg.recipes.swin(HEADS, (3, 7))),
    "sam": (GRID, lambda: rg.recipes.sam(HEAD_DIM, (3, 7))),
    "points": (POINTS, lambda: rg.FromQuery(rg.PerAxis(rg.Table(HEAD_DIM, clip=3), rg.Table(HEAD_DIM, clip=3)))),
}
CACHES = {
    "kv": lambda: KVCache(),
    "window": lambda: WindowCache(window=WINDOW),
    "window with slack": lambda: WindowCache(window=WINDOW, slack=3),
    "paged": lambda: PagedCache(pages=40, page_size=4),
}


def layer(term=None, geometry=None, **more) -> Attention:
    made = Attention(
        DIM, HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_dim=V_DIM, position=term, geometry=geometry,
        **{"mask": rg.window(WINDOW), "sink": True, **more},
    )  # fmt: skip
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.double().eval()


def decode(made: Attention, x: torch.Tensor, cache: Cache, sizes=(5, 1, 1, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)):
    """The output of x read in pieces."""
    out, at = [], 0
    with torch.no_grad():
        for size in sizes:
            out.append(made(x[:, at : at + size], cache=cache))
            at += size
    return torch.cat(out, 1)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    assert float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("term", [*TERMS, *PLACED])
def test_decoding_in_pieces_is_one_pass(term, cache):
    geometry, make = PLACED[term] if term in PLACED else (None, TERMS[term])
    made, x = layer(make(), geometry), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    with torch.no_grad():
        same(decode(made, x, CACHES[cache]()), made(x))


@pytest.mark.parametrize("mask", [rg.causal, rg.causal & rg.keys(2, 15), rg.causal & rg.nearest(3), rg.window(9, 0)])
@pytest.mark.parametrize("cache", ["kv", "paged"])
def test_other_masks(cache, mask):
    made, x = layer(rg.recipes.alibi(HEADS), mask=mask), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    with torch.no_grad():
        same(decode(made, x, CACHES[cache]()), made(x))


@pytest.mark.parametrize("options", [{"score": rg.Cosine()}, {"score": rg.Euclidean(2.0)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_other_scores(cache, options):
    made = layer(rg.recipes.t5(HEADS, buckets=8, max_distance=9), **options)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    with torch.no_grad():
        same(decode(made, x, CACHES[cache]()), made(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("term", ["t5", "xl", "deberta", "rotary", "sum"])
def test_lower_precision_stays_within_the_budget(term, cache, dtype):
    made = layer(TERMS[term]()).to(dtype)
    exact = copy.deepcopy(made).double()
    plain = copy.deepcopy(made)
    plain.engine = exact.engine = "reference"
    x = torch.randn(2, LENGTH, DIM).to(dtype)
    with torch.no_grad():
        within_budget(decode(made, x, CACHES[cache]()), plain(x), exact(x.double()))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("term", TERMS)
def test_rows_of_different_lengths(term, cache):
    """Three rows, padded on the right, each as if it were alone."""
    made = layer(TERMS[term]())
    x = torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    store = CACHES[cache]()
    pieces = [(9, [9, 4, 1]), (1, [1, 1, 1]), (1, [1, 0, 1]), (3, [2, 3, 0]), (1, [1, 1, 1]), (1, [1, 1, 1])]
    at, found = [0, 0, 0], [[], [], []]
    with torch.no_grad():
        for q_len, counts in pieces:
            new = torch.full((3, q_len, DIM), 7.0, dtype=torch.float64)
            for row, count in enumerate(counts):
                new[row, :count] = x[row, at[row] : at[row] + count]
            with store.step(3, q_len, counts) as step:
                y = made(new, cache=step.layer(0), start=step.start(x.device))
            for row, count in enumerate(counts):
                found[row].append(y[row, :count])
                at[row] += count
        assert store.lengths == at == [15, 10, 5]
        for row, length in enumerate(at):
            same(torch.cat(found[row])[None], made(x[row : row + 1, :length]))


def test_rows_of_different_lengths_without_a_causal_mask():
    """Places that a shorter row has not filled are hidden."""
    made, x = layer(mask=None, sink=False), torch.randn(2, 8, DIM, dtype=torch.float64)
    for store in (KVCache(), PagedCache(pages=9, page_size=4)):
        with torch.no_grad(), store.step(2, 8, [8, 3]) as step:
            y = made(x, cache=step.layer(0), start=0)
            same(y[:1], made(x[:1]))
            same(y[1:, :3], made(x[1:, :3]))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("term", ["t5", "shaw", "rotary"])
def test_after_crop_reorder_save_and_load(term, kind, tmp_path):
    made = layer(TERMS[term]())
    x = torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    y = torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    cache = CACHES[kind]()
    cut = 4 if kind == "window" else 10  # without slack, only before the ring has closed
    decode(made, x, cache, (cut if kind == "window" else 12,))
    cache.crop(cut if kind != "window" else 3)
    cut = cache.lengths[0]
    then = torch.cat([x[:, :cut], y[:, cut:]], 1)
    with torch.no_grad():
        whole = made(then)
    same(decode(made, then[:, cut : cut + 2], cache, (1, 1)), whole[:, cut : cut + 2])
    cache.reorder([2, 0, 2])
    assert cache.lengths == [cut + 2] * 3
    then, whole = then[[2, 0, 2]], whole[[2, 0, 2]]
    cache.save(tmp_path / "cache.safetensors")
    again = Cache.load(tmp_path / "cache.safetensors")
    assert type(again) is type(cache) and again.lengths == cache.lengths
    for store in (cache, again):
        same(decode(made, then[:, cut + 2 :], store, (1, 1, 4)), whole[:, cut + 2 : cut + 8])


def test_cropping_each_row_for_itself():
    made, x = layer(TERMS["t5"]()), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    for kind in ("kv", "paged", "window with slack"):
        cache = CACHES[kind]()
        decode(made, x, cache, (12,))
        cache.crop([12, 10])
        with torch.no_grad(), cache.step(2, 2) as step:
            new = torch.stack([x[0, 12:14], x[1, 10:12]])
            y = made(new, cache=step.layer(0), start=step.start(x.device))
            whole = made(x)
        same(y, torch.stack([whole[0, 12:14], whole[1, 10:12]]))


def test_a_fork_goes_its_own_way():
    made, x = layer(TERMS["sum"]()), torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    pool = PagedCache(pages=12, page_size=4)
    first = pool.add()
    decode(made, x[:1], pool.batch([first]), (6,))
    assert len(pool.spare) == 10
    others = [pool.fork(first), pool.fork(first)]
    assert len(pool.spare) == 10, "a fork takes no page"
    ids = [first, *others]
    then = torch.cat([x[:1, :6].expand(3, -1, -1), x[:, 6:]], 1)
    with torch.no_grad():
        whole = made(then)
    same(decode(made, then[:, 6:], pool.batch(ids), (1, 3)), whole[:, 6:10])
    pages = [pool.sequence(i).pages for i in ids]
    assert pages[0][0] == pages[1][0] == pages[2][0] and len({p[1] for p in pages}) == 3
    pool.free(first)
    same(decode(made, then[1:, 10:], pool.batch(others), (2,)), whole[1:, 10:12])
    for seq in others:
        pool.free(seq)
    assert sorted(pool.spare) == list(range(12)) and not any(pool.users)


def test_a_full_pool_says_so_and_loses_nothing():
    made, x = layer(TERMS["t5"]()), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    pool = PagedCache(pages=5, page_size=4)
    decode(made, x, pool, (8,))
    before = copy.deepcopy(pool.__dict__)
    with pytest.raises(PoolFull, match=r"needs 2 more pages of 4 tokens, 1 of 5 are free"):
        decode(made, x[:, 8:], pool, (1,))
    assert pool.lengths == [8, 8] and pool.spare == before["spare"] and pool.users == before["users"]
    assert torch.equal(pool.k[0], before["k"][0])
    pool.reorder([0])
    with torch.no_grad():
        same(decode(made, x[:1, 8:], pool, (4,)), made(x[:1])[:, 8:12])


def test_a_full_pool_refuses_new_rows_too():
    pool = PagedCache(pages=2, page_size=4)
    with pytest.raises(PoolFull):
        decode(layer(), torch.randn(3, 4, DIM, dtype=torch.float64), pool, (4,))
    assert not pool.sequences and not pool.lengths


@pytest.mark.parametrize("kind", CACHES)
def test_inference_mode_and_autocast(kind):
    made, x = layer(TERMS["sum"]()), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    with torch.inference_mode():
        same(decode(made, x, CACHES[kind]()), made(x))
        low, x = copy.deepcopy(made).float(), x.float()
        cache = CACHES[kind]()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = decode(low, x, cache)
        plain, exact = copy.deepcopy(low).bfloat16(), made
        plain.engine = exact.engine = "reference"
        within_budget(found, plain(x.bfloat16()), exact(x.double()))
        kept = cache.k if isinstance(cache, PagedCache) else [cache.stores[0].k]
        assert kept[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", CACHES)
def test_a_step_that_fails_is_not_taken(kind):
    made, x = layer(TERMS["t5"]()), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    cache = CACHES[kind]()
    decode(made, x, cache, (8,))  # pages of 4: the next token needs another
    free = list(cache.spare) if isinstance(cache, PagedCache) else None
    with pytest.raises(ZeroDivisionError), torch.no_grad(), cache.step(2, 1) as step:
        made(torch.full_like(x[:, 8:9], 3.0), cache=step.layer(0), start=8)
        raise ZeroDivisionError
    assert cache.lengths == [8, 8]
    assert free is None or sorted(free) == sorted(cache.spare)
    with torch.no_grad():
        same(decode(made, x[:, 8:], cache, (1, 1)), made(x)[:, 8:10])


def test_buffers_double_and_keep_what_they_held():
    cache, k = KVCache(), torch.randn(1, 1, 300, 2)
    sizes = set()
    for at in range(300):
        with cache.step(1, 1) as step:
            held = step.layer(0).put(k[:, :, at : at + 1], k[:, :, at : at + 1])
        sizes.add(cache.stores[0].k.shape[2])
        assert torch.equal(held.runs[0].k, k[:, :, : at + 1])
    assert sizes == {64, 128, 256, 512}


def test_a_ring_holds_its_window_and_gives_at_most_two_runs():
    cache, k = WindowCache(window=5), torch.randn(1, 1, 40, 2)
    for at in range(40):
        with cache.step(1, 1) as step:
            held = step.layer(0).put(k[:, :, at : at + 1], k[:, :, at : at + 1], reach=5)
        assert cache.stores[0].k.shape[2] == 6 and len(held.runs) <= 2
        low = max(0, at - 5)
        assert held.runs[0].start == low
        assert torch.equal(torch.cat([run.k for run in held.runs], 2), k[:, :, low : at + 1])
    assert len(held.runs) == 2
    assert all(
        run.k.untyped_storage().data_ptr() == cache.stores[0].k.untyped_storage().data_ptr() for run in held.runs
    )


def test_pages_in_a_row_are_not_copied():
    made, x = layer(TERMS["none"](), mask=rg.causal), torch.randn(1, 9, DIM, dtype=torch.float64)
    pool = PagedCache(pages=8, page_size=4)
    decode(made, x, pool, (8,))
    with torch.no_grad(), pool.step(1, 1) as step:
        held = step.layer(0).put(
            torch.zeros(1, KV_HEADS, 1, HEAD_DIM).double(), torch.zeros(1, KV_HEADS, 1, V_DIM).double()
        )
    assert held.runs[0].k.untyped_storage().data_ptr() == pool.k[0].untyped_storage().data_ptr()


def test_a_window_cache_refuses_what_it_has_forgotten():
    x = torch.randn(1, LENGTH, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"keeps 3 keys before a query, but the layer's mask lets it see 6 keys"):
        decode(layer(), x, WindowCache(window=3), (1,))
    with pytest.raises(ValueError, match=r"see all keys before it"):
        decode(layer(mask=rg.causal), x, WindowCache(window=3), (1,))
    cache = WindowCache(window=WINDOW, slack=2)
    decode(layer(), x, cache, (20,))
    with pytest.raises(ValueError, match=r"a query at 16 sees keys from 10 on, but row 0 has kept those from 11 on"):
        cache.crop(16)
    assert cache.lengths == [20]
    cache.crop(17)


def test_a_window_for_some_layers():
    torch.manual_seed(1)
    model = Decoder(17, 16, 3, 4, position="alibi", window=[4, None, 2]).double().eval()
    tokens, cache = torch.randint(17, (2, 30)), WindowCache(3, window=[4, None, 2])
    with torch.no_grad():
        found = torch.cat([model(tokens[:, at : at + 1], cache=cache) for at in range(30)], 1)
        same(found, model(tokens))
    assert [store.k.shape[2] for store in cache.stores] == [5, 64, 3]


def test_looking_while_decoding_stays_true():
    made, x = layer(TERMS["t5"]()), torch.randn(1, LENGTH, DIM, dtype=torch.float64)
    with torch.no_grad():
        _, whole = made(x, look=True)
    for kind in CACHES:
        cache, seen = CACHES[kind](), []
        with torch.no_grad():
            for at in range(12):
                seen.append(made(x[:, at : at + 1], cache=cache, look=True)[1])
        for at, A in enumerate(seen):  # all of them, after the cache has gone on
            first = at + 1 - A.shape[-1]
            same(A[0, :, 0], whole[0, :, at, first : at + 1])


def test_misuse_is_named():
    made, x = layer(), torch.randn(2, 3, DIM, dtype=torch.float64)
    cache = KVCache()
    with pytest.raises(ValueError, match="keeps no gradients"):
        made(x, cache=cache)
    decode(made, x, cache, (3,))
    with pytest.raises(ValueError, match=r"batch: the cache holds 2 rows, found 1"):
        decode(made, x[:1], cache, (1,))
    with pytest.raises(ValueError, match=r"start: a cache knows"):
        made(x, cache=cache, start=3)
    with pytest.raises(ValueError, match=r"length: expected at most the lengths \[3, 3\], one a row, found \[4, 4\]"):
        cache.crop(4)
    with pytest.raises(ValueError, match=r"rows: expected numbers from 0 to 1, found \[2\]"):
        cache.reorder([2])
    with pytest.raises(IndexError, match="made for 1 layers, found layer 1"), cache.step(2, 1) as step:
        step.layer(1)
    with pytest.raises(ValueError, match=r"it holds torch.float64 on cpu, found torch.float32"):
        decode(made.float(), x.float(), cache, (1,))
    with (
        pytest.raises(ValueError, match=r"counts: expected 2 numbers from 0 to 1, found \[1, 2\]"),
        cache.step(2, 1, [1, 2]),
    ):
        pass
    with pytest.raises(KeyError, match="sequence 5 is not in the cache"):
        PagedCache(pages=2).free(5)
    pool = PagedCache(pages=2)
    seq = pool.add()
    with pytest.raises(ValueError, match="in a batch once"):
        pool.batch([seq, seq])
    for wrong in ({"pages": 0}, {"pages": 1, "page_size": 0}):
        with pytest.raises(ValueError, match=r"page.*: expected a positive number, found 0"):
            PagedCache(**wrong)
    with pytest.raises(ValueError, match="window: expected a number >= 0, or one"):
        WindowCache(2, window=[1])


def test_a_file_that_holds_another_kind(tmp_path):
    cache = KVCache()
    decode(layer(), torch.randn(1, 3, DIM, dtype=torch.float64), cache, (3,))
    cache.save(tmp_path / "a")
    with pytest.raises(TypeError, match="expected a PagedCache, found a KVCache"):
        PagedCache.load(tmp_path / "a")


def test_bounds_of_masks():
    assert (sees_back(None), sees_back(rg.causal), sees_back(rg.causal & rg.window(3, 2))) == (None, None, 3)
    assert sees_back(rg.window(3) | rg.window(8)) == 8 and sees_back(rg.window(3) | rg.keys(0)) is None
    assert sees_ahead(None) and sees_ahead(rg.window(3, 1)) and not sees_ahead(rg.causal & rg.keys(0))
    assert sees_ahead(~rg.causal) and not sees_ahead(rg.offset(2) | rg.window(4))
    assert needs_whole(rg.causal & rg.nearest(2)) and needs_whole(rg.dense(torch.ones(2, 2) > 0))
    assert not needs_whole(rg.causal & rg.window(3))
    assert allows(rg.causal, 0, 9) and not allows(rg.causal, -1, 9)
    assert allows(rg.causal & rg.window(9), 0, 9) and not allows(rg.causal & rg.window(8), 0, 9)
    assert allows(rg.causal | rg.keys(0), 0, 9) and not allows(rg.keys(0), 0, 9)


# The paged cache under any order of events


class Pool(RuleBasedStateMachine):
    """Sequences that grow, fork, shrink and go, in any order, against a plain list of what each has written."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.wrote: dict[int, list[float]] = {}
        self.stamp = 0.0

    @initialize(target=sequences, pages=st.integers(40, 260), size=st.integers(1, 5), seed=st.integers(0, 99))
    def start(self, pages, size, seed):
        """A pool with 48 sequences of random lengths, or as many as it holds."""
        self.pool = PagedCache(2, pages=pages, page_size=size)
        lengths = torch.randint(0, 12, (48,), generator=torch.Generator().manual_seed(seed)).tolist()
        ids = [self.pool.add() for _ in lengths]
        self.wrote = {seq: [] for seq in ids}
        for seq, length in zip(ids, lengths, strict=True):
            self.put([seq], [length])
        return multiple(*ids)

    @rule(target=sequences, count=st.integers(1, 24))
    def add(self, count):
        made = []
        for _ in range(min(count, 64 - len(self.wrote))):
            seq = self.pool.add()
            self.wrote[seq] = []
            made.append(seq)
        return multiple(*made)

    @rule(ids=st.lists(sequences, min_size=1, max_size=12, unique=True), data=st.data())
    def write(self, ids, data):
        self.put(ids, [data.draw(st.integers(0, 9)) for _ in ids])

    def put(self, ids, counts):
        q_len = max([*counts, 1])
        new = torch.full((len(ids), 1, q_len, 1), -1.0)
        for row, count in enumerate(counts):
            for n in range(count):
                self.stamp += 1
                new[row, 0, n, 0] = self.stamp
        before = (list(self.pool.spare), list(self.pool.users), self.pool.lengths)
        needed = self.pool.wanted(ids, counts)
        try:
            with self.pool.batch(ids).step(len(ids), q_len, counts) as step:
                for layer in range(2):
                    held = step.layer(layer).put(new + layer * 1e6, -new)
                    self.compare(held, ids, new + layer * 1e6, counts, layer)
        except PoolFull:
            assert needed > len(before[0])
            assert before == (list(self.pool.spare), list(self.pool.users), self.pool.lengths), "nothing is lost"
            return
        for row, (seq, count) in enumerate(zip(ids, counts, strict=True)):
            self.wrote[seq] += new[row, 0, :count, 0].tolist()

    def compare(self, held, ids, new, counts, layer):
        (run,) = held.runs
        for row, seq in enumerate(ids):
            wanted = [x + layer * 1e6 for x in self.wrote[seq]] + new[row, 0, : counts[row], 0].tolist()
            found = run.k[row, 0, :, 0].tolist()
            assert found[: len(wanted)] == wanted, "its own tokens, in order"
            assert not any(found[len(wanted) :]), "and nobody else's"

    @rule(target=sequences, seq=sequences)
    def fork(self, seq):
        if len(self.wrote) >= 64:
            return multiple()
        made = self.pool.fork(seq)
        self.wrote[made] = list(self.wrote[seq])
        return made

    @rule(seq=consumes(sequences))
    def free(self, seq):
        self.pool.free(seq)
        del self.wrote[seq]

    @rule(seq=sequences, share=st.floats(0, 1))
    def crop(self, seq, share):
        kept = int(len(self.wrote[seq]) * share)
        self.pool.batch([seq]).crop(kept)
        del self.wrote[seq][kept:]

    @rule(target=sequences, ids=st.lists(sequences, min_size=1, max_size=4, unique=True), data=st.data())
    def beams(self, ids, data):
        """Rows taken again are forked; here none is dropped, so that hypothesis keeps its sequences."""
        extra = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=max(0, min(3, 64 - len(self.wrote)))))
        batch = self.pool.batch(ids)
        batch.reorder([*range(len(ids)), *extra])
        made = batch.ids[len(ids) :]
        for row, seq in zip(extra, made, strict=True):
            self.wrote[seq] = list(self.wrote[ids[row]])
        return multiple(*made)

    @rule()
    def save_and_load(self):
        tensors, plain = self.pool.state()
        again = PagedCache.__new__(PagedCache)
        again.restore({n: t.clone() for n, t in tensors.items()}, copy.deepcopy(plain))
        self.pool = again

    @invariant()
    def every_page_is_counted(self):
        if not hasattr(self, "pool"):
            return
        users = [0] * self.pool.pages
        for seq in self.pool.sequences.values():
            assert len(seq.pages) == -(-seq.length // self.pool.page_size), "no page too many, none too few"
            for page in seq.pages:
                users[page] += 1
        assert users == self.pool.users
        assert sorted(self.pool.spare) == [page for page, n in enumerate(users) if not n], "free exactly when unused"
        assert {seq: one.length for seq, one in self.pool.sequences.items()} == {
            s: len(w) for s, w in self.wrote.items()
        }

    @invariant()
    def everyone_reads_their_own(self):
        if not self.wrote or not hasattr(self, "pool") or self.pool.k[0] is None:
            return
        for layer in range(2):
            for seq, wrote in self.wrote.items():
                if self.pool.k[layer] is not None:
                    found = self.pool.k[layer][0, self.pool.slots(seq, 0, len(wrote)), 0].tolist()
                    assert found == [x + layer * 1e6 for x in wrote]

    def teardown(self):
        if hasattr(self, "pool"):
            for seq in list(self.wrote):
                self.pool.free(seq)
            assert sorted(self.pool.spare) == list(range(self.pool.pages)), "nothing leaks"


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
