"""The compiled passes are built where they can be, kept, and missed with a reason; nothing depends on them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import regard as rg
from regard.engines.cpu import native

ASK = """
import torch, regard as rg
from regard.engines.cpu import native
torch.manual_seed(0)
q = torch.randn(1, 2, 70, 8)
A = rg.attention(q, q, position=rg.recipes.shaw(8, 4), mask=rg.causal)
print((A @ q).shape, native.library() is not None, native.missing())
print(A.plan)
"""


def ask(**environment: str) -> str:
    """What a fresh process says."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", ASK], env=surroundings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "environment, reason",
    [
        ({"REGARD_NATIVE": "0"}, "REGARD_NATIVE=0"),
        ({"CC": "", "PATH": ""}, "no C compiler"),
        ({"CC": "false"}, "false could not build them"),
    ],
    ids=["not wanted", "no compiler", "a compiler that fails"],
)
def test_without_them_there_is_a_reason_and_a_result(environment, reason, tmp_path):
    said = ask(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), **environment)
    assert "torch.Size([1, 2, 70, 8]) False" in said
    assert said.count(reason) == 2, said  # in missing(), and in the plan
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(native.library() is None, reason=f"no compiled passes here: {native.missing()}")
def test_they_are_built_once_and_kept(tmp_path):
    said = [ask(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert all("True None" in each and "note" not in each for each in said)
    (made,) = tmp_path.rglob("*.so")
    assert made.parent.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(native.library() is None, reason=f"no compiled passes here: {native.missing()}")
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    made, _ = native._load.__wrapped__()
    assert made is not None and not list((tmp_path / "regard").iterdir())


def test_threads_do_not_change_what_is_right():
    """Sums are shared out by thread; every number of threads stays within the budget of the definition."""
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind()
    term = rg.recipes.t5(2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            A = rg.attention(q, k, position=term)
            term.zero_grad()
            (A @ v).square().sum().backward()
            found.append([A.received(), A.profile(), *(p.grad.clone() for p in term.parameters())])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y)
