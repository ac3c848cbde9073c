"""The explorer's scripts put together, for places that cannot import them one by one: a file on disk, a notebook."""

from __future__ import annotations

import re
from importlib.resources import files

#: what the map needs, and what the page around it needs, in the order in which one needs the other
MAP = ("colour.js", "dom.js", "words.js", "view.js", "map.js")
PAGE = (*MAP, "server.js", "charts.js", "panels.js", "overview.js", "tokens.js")


def text(name: str) -> str:
    """A file of the explorer."""
    return files(__package__).joinpath("web").joinpath(name).read_text(encoding="utf-8")


def scripts(names: tuple[str, ...], last: str) -> str:
    """Modules one after the other, and `last`, which uses them. What it exports stays exported."""
    parts = [f'modules["{name}"] = (() => {{\n{_plain(text(name))}\n}})();' for name in names]
    return "\n".join(["const modules = {};", *parts, _imports(text(last))])


def _imports(script: str) -> str:
    return re.sub(r'^import \{([^}]*)\} from "\./([\w.]+)";$', r'const {\1} = modules["\2"];', script, flags=re.M)


def _plain(script: str) -> str:
    """A module as the body of a function that returns what it exports."""
    made = re.findall(r"^export (?:async )?(?:const|class|function) (\w+)", script, flags=re.M)
    return f"{re.sub(r'^export ', '', _imports(script), flags=re.M)}\nreturn {{ {', '.join(made)} }};"
