"""The calls that go up: `A.show()` and `trace.to_html()` ask for a view by name, the explorer for its lessons.

Imports point down everywhere else. Views know what they show; what is shown knows only that there are views.
"""

from __future__ import annotations

import importlib
from typing import Any


def view(name: str) -> Any:
    """A module of `regard.views`."""
    return importlib.import_module(f"regard.views.{name}")


def lessons() -> Any:
    """`regard.lessons.pages`: the lessons as the explorer shows them."""
    return importlib.import_module("regard.lessons.pages")
