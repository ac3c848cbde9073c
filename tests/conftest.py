"""Fixtures for all tests: a fixed seed, and uninitialised buffers that start as NaN."""

from __future__ import annotations

import pytest
import torch
from support import poisoned_buffers


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with poisoned_buffers():
        yield
