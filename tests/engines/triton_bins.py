"""Tables by bins, axes and borders of grids by the GPU engine, in Triton's interpreter. Run by `test_triton_bins.py`.

As with `triton_interpreted.py`, TRITON_INTERPRET=1 must be set before kernels are imported. Buffers start as NaN, so
that a number that no kernel writes shows, and every access is watched. The last tests change what a term is made of
between calls: nothing that is kept from call to call may be older than the call.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import watched
from support import all_within_budget, poisoned_buffers, within_budget

import regard as rg


@pytest.fixture(autouse=True)
def nothing_is_read_elsewhere():
    with watched(), poisoned_buffers():
        yield


HIGH, WIDE = 3, 8


class Odd(rg.features.OneHot):
    """Bins by parity of the displacement, one bin for all pairs without a place."""

    dim, axes = 3, 2

    def index(self, delta):
        return (delta[..., 0] + delta[..., 1]) % 2

    def unplaced_index(self):
        return 2, 2, 2


GRID = rg.Grid(HIGH, WIDE)
TERMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "one table for all heads": (lambda: rg.Static(rg.Cells(64), 1), None),
    "two tables": (lambda: rg.recipes.t5(2, buckets=8, max_distance=20) + rg.Static(rg.Cells(40), 2), None),
    "a table that ends where displacements do": (lambda: rg.Static(rg.Cells(HIGH * WIDE), 2), None),
    "a table of vectors, read out": (lambda: rg.Static(rg.Table(3, clip=5, heads=2), 2, scale=0.5), None),
    "shared on a grid": (lambda: rg.recipes.swin(1, (HIGH, WIDE)), GRID),
    "a larger table on a grid": (lambda: rg.recipes.swin(2, (HIGH + 1, WIDE + 2)), GRID),
    "bins that displacements share, on a grid": (lambda: rg.Static(Odd(), 2), GRID),
    "axes": (lambda: rg.recipes.sam(8, (HIGH, WIDE)), GRID),
    "axes, larger tables": (lambda: rg.recipes.sam(8, (HIGH + 2, WIDE + 1)), GRID),
    "axes of each head": (
        lambda: rg.FromQuery(rg.PerAxis(rg.Table(8, cells=(HIGH,), heads=2), rg.Table(8, cells=(WIDE,), heads=2))),
        GRID,
    ),
    "clipped axes": (lambda: rg.FromQuery(rg.PerAxis(rg.Table(8, clip=1), rg.Table(8, cells=(WIDE,)))), GRID),
    "waves on axes, through W": (
        lambda: rg.FromQuery.learn(rg.PerAxis(rg.Sinusoid([1.0, 0.3]), rg.Sinusoid([0.7, 0.2])), 8, 2),
        GRID,
    ),
    "class token": (lambda: rg.recipes.beit(2, (HIGH, WIDE)), rg.Grid(HIGH, WIDE, unplaced=1)),
    "three tokens without a place, a table that has nothing for them": (
        lambda: rg.recipes.swin(2, (HIGH, WIDE)),
        rg.Grid(HIGH, WIDE, unplaced=3),
    ),
    "seventeen, two tables": (
        lambda: rg.recipes.beit(2, (HIGH, WIDE)) + rg.recipes.beit(1, (HIGH + 1, WIDE)),
        rg.Grid(HIGH, WIDE, unplaced=17),
    ),
    "one bin for every pair without a place": (lambda: rg.Static(Odd(), 2), rg.Grid(HIGH, WIDE, unplaced=2)),
}


class Setting:
    """q, k, v and a term, from a fixed seed; `kv` says how many heads keys and values have."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, kv: tuple[int, int] = (2, 2), learn: bool = True):
        make, self.geometry = TERMS[name]
        torch.manual_seed(5)
        self.term = make()
        for p in self.term.parameters():
            p.data = torch.randn(p.shape)
            p.requires_grad_(learn)
        size = HIGH * WIDE if self.geometry is None else self.geometry.size()
        shapes = (2, 2, size, 8), (2, kv[0], size, 8), (2, kv[1], size, 5)
        self.given = [torch.randn(shape).to(dtype) for shape in shapes]
        self.d_out = torch.randn(2, 2, size, 5).to(dtype)

    def results(self, engine: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The product, the log-sum-exp that it leaves, and gradients of everything."""
        term = copy.deepcopy(self.term) if dtype is None else copy.deepcopy(self.term).to(dtype)
        q, k, v = (x.clone().to(dtype or x.dtype).requires_grad_() for x in self.given)
        A = rg.attention(q, k, position=term, geometry=self.geometry, engine=engine)
        out = A @ v
        learned = {name: p for name, p in term.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(out, [q, k, v, *learned.values()], self.d_out.to(out.dtype))
        names = ["q", "k", "v", *learned]
        return {"out": out, "lse": A.remembered} | {f"gradient of {n}": g for n, g in zip(names, grads, strict=True)}

    def compare(self) -> None:
        found, plain, exact = self.results("triton"), self.results("reference"), self.results("reference", torch.double)
        for kind in (True, False):
            names = [name for name in found if name.startswith("gradient") == kind]
            all_within_budget(*({name: x[name] for name in names} for x in (found, plain, exact)))


@pytest.mark.parametrize("name", TERMS)
def test_terms_equal_the_definition(name):
    Setting(name).compare()


@pytest.mark.parametrize("name", ["axes", "class token"])
def test_half_precision(name):
    Setting(name, torch.float16).compare()


@pytest.mark.parametrize("kv", [(1, 1), (1, 2)], ids=str)
def test_heads_that_share_keys_beside_a_class_token(kv):
    Setting("class token", kv=kv).compare()


@pytest.mark.parametrize("name", ["axes", "class token"])
def test_a_term_that_does_not_learn(name):
    Setting(name, learn=False).compare()


@pytest.mark.parametrize("name", ["class token", "axes"])
def test_gradients_have_the_same_bits_every_time(name):
    first, second = (Setting(name).results("triton") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["one table for all heads", "axes"])
def test_parameters_of_half_precision(name):
    """A model cast to half precision has its tables so too; their gradients come back so."""
    setting = Setting(name)
    setting.term.half()
    found = setting.results("triton")
    assert found["gradient of " + next(n for n, _ in setting.term.named_parameters())].dtype == torch.float16
    setting.compare()


@torch.no_grad()
def same(setting: Setting, **changed: Any) -> torch.Tensor:
    """The product by kernels, which is the definition's."""
    given, made = {"geometry": setting.geometry, **changed}, []
    for engine, dtype in (("triton", None), ("reference", None), ("reference", torch.double)):
        q, k, v = (x if dtype is None else x.to(dtype) for x in setting.given)
        term = setting.term if dtype is None else copy.deepcopy(setting.term).to(dtype)
        made.append(rg.attention(q, k, engine=engine, position=term, **given) @ v)
    within_budget(*made)
    return made[0]


CHANGES: dict[str, Callable[[torch.nn.Module, str], None]] = {
    "in place": lambda holder, name: getattr(holder, name).mul_(2),
    "in place, unseen by versions": lambda holder, name: getattr(holder, name).data.mul_(2),
    "its data replaced": lambda holder, name: setattr(getattr(holder, name), "data", getattr(holder, name) * 2),
    "replaced": lambda holder, name: setattr(holder, name, torch.nn.Parameter(getattr(holder, name) * 2)),
    "moved to another dtype": lambda holder, name: holder.half(),
    "laid out another way": lambda holder, name: setattr(
        getattr(holder, name), "data", (getattr(holder, name) * 2).mT.contiguous().mT
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["one table for all heads", "axes", "class token", "a larger table on a grid"])
def test_a_changed_parameter_is_seen(name, change):
    setting = Setting(name)
    before = same(setting)
    for holder in list(setting.term.modules()):
        for parameter, _ in list(holder.named_parameters(recurse=False)):
            with torch.no_grad():
                CHANGES[change](holder, parameter)
    assert not torch.equal(same(setting), before)


def test_other_shapes_masks_and_places_of_the_same_term():
    """What is kept by shape or by mask belongs to that shape and that mask."""
    setting = Setting("one table for all heads")
    size, found = HIGH * WIDE, []
    lengths = [rg.lengths(torch.tensor(n)) for n in ([5, size], [size, 7])]
    for mask in (None, rg.causal, rg.window(3, 1), rg.window(2, 2), *lengths, rg.causal & lengths[0]):
        found.append(same(setting, mask=mask))
    for start in (3, 4, torch.tensor([2, 9])):
        found.append(same(setting, q_start=start, mask=rg.window(5, 0)))
    for mask in (rg.causal, None):
        found.append(same(setting, mask=mask, softcap=2.0, sink=torch.ones(2)))
    assert all(not torch.equal(x, y) for n, x in enumerate(found) for y in found[:n])
    assert torch.equal(same(setting), found[0])
    setting.given = [x[:, :, :13] for x in setting.given]
    same(setting)
    setting.given = [x.half() for x in setting.given]
    q, k, v = setting.given
    assert (rg.attention(q, k, position=setting.term, engine="triton") @ v).dtype == torch.float16


def test_a_parameter_that_takes_the_place_of_one_that_did_not_learn():
    """Who wants a gradient is asked at every call."""
    setting = Setting("one table for all heads", learn=False)
    q, k, v = setting.given
    assert not (rg.attention(q, k, position=setting.term, engine="triton") @ v).requires_grad
    setting.term.readout = torch.nn.Parameter(setting.term.readout * 2)
    out = rg.attention(q, k, position=setting.term, engine="triton") @ v
    assert torch.autograd.grad(out, setting.term.readout, setting.d_out)[0].abs().max() > 0


def test_a_feature_replaced_in_a_term():
    setting = Setting("one table for all heads")
    before = same(setting)
    setting.term.features = rg.Clipped(64, 62)  # as many bins
    assert not torch.equal(same(setting), before)


def test_turned_around_and_sliced():
    """Tables by bins of a matrix turned around, of some heads, and on tiles that no kernel makes."""
    setting = Setting("shared on a grid")
    q, k, v = setting.given
    A, plain = (
        rg.attention(q, k, position=setting.term, geometry=GRID, engine=engine) for engine in ("triton", "reference")
    )
    torch.testing.assert_close(A.reversed() @ v, plain.reversed() @ v)
    torch.testing.assert_close(A[1, 1] @ v[1, 1], plain[1, 1] @ v[1, 1])
    torch.testing.assert_close(A[0, 1].dense(), plain[0, 1].dense())
    assert A[0, 1].explain(3, 4).parts == pytest.approx(plain[0, 1].explain(3, 4).parts, rel=1e-4)


def test_two_threads_at_once():
    """Interpreted kernels are not for two threads; what precedes them is."""
    settings = [Setting("one table for all heads"), Setting("shared on a grid")]
    expected, wrong = [same(setting) for setting in settings], []
    lock = threading.Lock()

    def work(which: int) -> None:
        try:
            for _ in range(2):
                q, k, v = settings[which].given
                A = rg.attention(
                    q, k, position=settings[which].term, geometry=settings[which].geometry, engine="triton"
                )
                problem = A._still
                with lock, torch.no_grad():
                    found = A.plan.module.forward(problem, v)[0]
                wrong.extend([which] if not torch.equal(found, expected[which]) else [])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
