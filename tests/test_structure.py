"""The shape of the project: what is public, what an import costs, which way imports point, who names engines."""

from __future__ import annotations

import ast
import graphlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, text_of

import regard as rg
from regard.plan import ENGINES

PACKAGE = ROOT / "src" / "regard"

PUBLIC = """
    AttentionMatrix Plan Summary Trace attention recipes record
    Cosine Dot Euclidean InverseDistance
    Grid Line Points
    Buckets Cells Clipped Constant Feature LogBuckets Network OnAxis PerAxis Sinusoid Slope Table
    FromKey FromQuery Rotary Static Terms
    causal dense documents induction keys lengths nearest offset window
    Entropy FirstKeyShare Heatmap Mass PreviousShare Profile Received SelfShare Share SinkShare Toeplitz TopK
""".split()

#: A module imports from earlier lines only. `regard` is the public face, `__init__.py`. Plan finds engines by name when
#: it needs them, so neither imports the other.
ORDER = [
    {"scores", "geometry", "features", "masks", "normal", "progress", "indexing", "above"},
    {"position", "summaries", "slices"},
    {"calls"},
    {"recipes", "description"},
    {"tables", "engines.reference", "face"},
    {"lower"},
    {"engines.tiled"},
    {"engines.cpu", "engines.triton"},
    {"plan"},
    {"engines.ops"},
    {"matrix"},
    {"watching"},
    {"public"},
    {"regard"},
    {"cache"},
    {"generate"},
    {"nn"},
    {"models"},
    {"huggingface"},
    {"trace"},
    {"subjects"},
    {"views"},
    {"lessons"},
    {"look"},
    {"cli"},
    {"__main__"},
]

HEAVY = "triton transformers matplotlib starlette uvicorn anywidget IPython jinja2".split()


def module_of(path: Path) -> str:
    """plan for plan.py, views for views/__init__.py, regard for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "regard"


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def calls_by_name(tree: ast.Module) -> list[ast.Call]:
    """Imports that no reader of the source can follow: import_module(...) and __import__(...)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")]


def imports(name: str, tree: ast.Module, source: Path) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    package = ["regard", *source.relative_to(PACKAGE).parts[:-1]]
    folder = ".".join([*package[1:], ""])
    found = {m for m in SOURCES if folder and m.startswith(folder)} if calls_by_name(tree) else set()
    # What is imported for type checkers only is not imported: a folder's own files may name each other's types so, and
    # the public face says there where its names above the models come from.
    tests = [part for part in tree.body if ast.unparse(getattr(part, "test", part)) == "TYPE_CHECKING"]
    types = {id(node) for part in tests for node in ast.walk(part)}
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [".".join([*base, alias.name]) for alias in node.names]
        for target in targets:
            if target.split(".")[0] != "regard":
                continue
            inner = target.removeprefix("regard").lstrip(".")
            if id(node) in types and (name == "regard" or (folder and inner.startswith(folder))):
                continue
            while inner and inner not in SOURCES:  # a name in a module: the module itself
                inner = inner.rpartition(".")[0]
            found.add(inner or "regard")
    return found - {name}


GRAPH = {name: imports(name, tree, SOURCES[name]) for name, tree in TREES.items()}


def place(name: str) -> tuple[int, str]:
    """Where a module stands in ORDER, and the name it stands there under (its package's, perhaps)."""
    for level, names in enumerate(ORDER):
        for listed in names:
            if name == listed or name.startswith(f"{listed}."):
                return level, listed
    raise AssertionError(f"{name} has no place in ORDER")


def test_public_names_are_these():
    assert sorted(rg.__all__) == sorted(PUBLIC)
    assert all(hasattr(rg, name) for name in PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(rg, name)
    own = thing if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing) else type(thing)
    assert (own.__doc__ or "").strip(), f"{name} has no docstring"
    documents = [text_of("README.md"), *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    named = re.compile(rf"`[^`\n]*\b{name}\b[^`\n]*`|\\texttt{{{name}\b")
    assert any(named.search(text) for text in documents), f"{name} is in neither README.md nor docs/"


def test_methods_of_A_are_documented():
    tensors_have = {"dtype", "device"}  # and they mean the same here
    members = {name: value for name, value in vars(rg.AttentionMatrix).items() if not name.startswith("_")}
    assert not [name for name, value in members.items() if not value.__doc__ and name not in tensors_have]


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What `import torch` brings in a new process, what `import regard` adds to it, and in how much processor time."""
    code = """
import json, sys, time
import torch
before, began = set(sys.modules), time.process_time()
import regard
regard.attention  # the first public name brings the rest
print(json.dumps({"seconds": time.process_time() - began, "new": sorted(set(sys.modules) - before)}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_brings_nothing_heavy(fresh):
    roots = {name.partition(".")[0] for name in fresh["new"]}
    assert not roots & set(HEAVY)
    # the compiler's front end: a second by itself, and it imports triton where there is one
    assert not [name for name in fresh["new"] if name.startswith("torch._dynamo")]


def test_import_takes_well_under_a_second_more_than_torch(fresh):
    assert fresh["seconds"] < 1.0


def test_every_module_has_its_place():
    listed = {place(name)[1] for name in SOURCES if name != "engines"}
    assert listed == set().union(*ORDER), "ORDER names what is not there"


def test_imports_point_one_way():
    wrong = []
    for name, needed in GRAPH.items():
        if name == "engines":
            assert not needed, "engines/__init__.py imports nothing"
            continue
        level, group = place(name)
        for other in needed:
            other_level, other_group = place(other)
            if group != other_group and other_level >= level:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_imports_make_no_circle():
    list(graphlib.TopologicalSorter(GRAPH).static_order())


def test_only_plan_imports_by_name():
    """From other folders, that is: a folder may list its own modules, and then counts as importing all of them.

    The public face offers some modules by name, for whoever asks: it does not import them. `above` is the one way up.
    """
    for name, tree in TREES.items():
        for call in calls_by_name(tree) if name not in ("plan", "regard", "above") else ():
            own = ast.unparse(call.func).endswith("import_module") and len(call.args) == 2
            own = own and re.fullmatch(r"f'\.\{\w+\}', __package__", ", ".join(map(ast.unparse, call.args)))
            assert own and SOURCES[name].parent != PACKAGE, f"{name}, line {call.lineno}: {ast.unparse(call)}"


def test_only_plan_names_engines():
    named = []
    for name, tree in TREES.items():
        if name == "plan" or name.split(".")[0] == "engines":
            continue
        allowed = {"engines.ops"} if name == "matrix" else set()
        named += [f"{name} imports {m}" for m in GRAPH[name] if m.split(".")[0] == "engines" and m not in allowed]
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            # "cpu" alone is a device too
            if text in set(ENGINES) - {"cpu"} or any(f"engines.{engine}" in text for engine in ENGINES):
                named.append(f"{name}, line {node.lineno}: {text!r}")
    assert not named
    built = {name.split(".")[1] for name in SOURCES if name.startswith("engines.")} - {"ops"}
    assert built == set(ENGINES), "an engine that no plan can choose, or one that is not there"


def tracked() -> list[Path]:
    """Files of the project: those git would keep, or all but what is hidden or built where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    kept = ("src", "tests", "docs", "examples", "benchmarks")
    inside = [path for folder in kept for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [path for path in [*inside, *ROOT.glob("*.*")] if path.is_file()]


def test_files_fit_in_a_head():
    long = {}
    for path in tracked():
        if path.suffix in (".py", ".js", ".css", ".html", ".md"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > 600:
                long[str(path.relative_to(ROOT))] = lines
    assert not long


def test_no_paths_of_anyones_machine():
    folders = "home|root|Users|work|tmp|mnt|opt|private|var|srv"
    path_of = re.compile(rf"(?<![\w.~/:*}})\]-])/(?:{folders})/\w|(?<!\w)[A-Z]:\\\w")
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in path_of.finditer(text)]
    assert not found


def numbers(words: str) -> set[int]:
    """Equations cited by "eq. 3", "eq. 1 and 2", "eq. 19, 20" or "eq. 4 to 9"."""
    cited: set[int] = set()
    for first, rest in re.findall(r"\beq\. (\d+)((?:(?:,| and| to) \d+)*)", words):
        last = int(first)
        cited.add(last)
        for joint, number in re.findall(r"(,| and| to) (\d+)", rest):
            cited |= set(range(last, int(number) + 1)) if joint == " to" else {int(number)}
            last = int(number)
    return cited


def test_numbers_are_read_as_meant():
    assert numbers("(eq. 3) eq. 1 and 2, eq. 19, 20; maths.md, eq. 4 to 9.") == {1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 20}


def test_equations_of_the_code_and_of_the_maths_are_the_same():
    written = [int(n) for n in re.findall(r"^\*\*eq\. (\d+)\*\*$", text_of("docs/maths.md"), re.M)]
    assert written == list(range(1, len(written) + 1)), "in order, each once"
    cited = set().union(*(numbers(path.read_text(encoding="utf-8")) for path in SOURCES.values()))
    assert cited == set(written)
    assert numbers(text_of("docs/maths.md")) <= set(written)
