"""The calls that go up: `A.show()` and `trace.to_html()` ask for a view by name, when they are made.

Imports point down everywhere else. Views know what they show; what is shown knows only that there are views.
"""

from __future__ import annotations

import importlib
from typing import Any


def view(name: str) -> Any:
    """A module of `regard.views`."""
    return importlib.import_module(f"regard.views.{name}")
