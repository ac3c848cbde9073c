"""Tables by bins, axes and borders by the GPU engine, in a process of its own with Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels"
)
@pytest.mark.parametrize("which", ["test_terms", "not test_terms"])
def test_bins_axes_and_borders_in_the_interpreter(which):
    paths = [HERE, HERE.parent, HERE.parents[1] / "src"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", which]
    done = subprocess.run(
        [*command, str(HERE / "triton_bins.py")], env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
