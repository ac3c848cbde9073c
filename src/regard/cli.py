"""The command `regard`. Arguments are read before torch is imported, so that help and mistakes answer at once.

    regard look [TEXT | FILE | -] [--model NAME_OR_PATH] [--layer L] [--head H] [--out FILE] [--save TRACE] [--json]
    regard explore [TRACE] [--port P] [--device D] [--no-browser]
    regard lesson [NAME]
    regard doctor [--json]
    regard --version

All but explore take --language en|zh and --no-color. What went wrong is one sentence on standard error, exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, NoReturn

from . import __version__
from .lessons import LANGUAGES, PARTS

if TYPE_CHECKING:
    from rich.console import Console

#: columns the pages are laid out for: a wider terminal is not filled, a narrower one stacks the pictures
WIDTH = 100
#: the lesson that is all of them
ALL = "all"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"regard: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = parser().parse_args(arguments)
    if given.command is None:
        print("regard: expected a command, such as: regard look", file=sys.stderr)
        return 2
    try:
        {"look": look, "explore": explore, "lesson": lesson, "doctor": doctor}[given.command](given)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return 130
    except (BrokenPipeError, SystemExit):  # the reader has seen enough, as `head` does; rich makes it the second
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, MemoryError, ImportError) as error:
        print(f"regard: {' '.join(str(error).split()) or 'not enough memory'}", file=sys.stderr)
        return 2


def parser() -> Parser:
    result = Parser(prog="regard", description="Attention you can look into: a lazy attention matrix for PyTorch.")
    result.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    look = commands.add_parser(
        "look",
        help="what a model's heads look at in a text",
        description="What each head does, the strongest links in the text, the entropy of every layer, and a heat map.",
    )
    look.add_argument(
        "text", nargs="?", metavar="TEXT|FILE|-", help="a text, a file with one, a saved trace, or - for standard input"
    )
    look.add_argument(
        "--model", default="tiny", metavar="NAME|FOLDER",
        help="tiny (comes with regard), minilm, or a folder in Hugging Face's format; nothing is downloaded",
    )  # fmt: skip
    look.add_argument("--layer", type=_number, metavar="L", help="show this layer, from 0")
    look.add_argument("--head", type=_number, metavar="H", help="show this head, from 0")
    look.add_argument("--out", metavar="FILE", help="also write a .png, .svg, .pdf, .html or .json")
    look.add_argument("--save", metavar="TRACE", help="save what was recorded, to look at again")
    look.add_argument("--json", action="store_true", help="print JSON for programs")

    explore = commands.add_parser(
        "explore",
        help="look at any A in the browser, at any length",
        description="A page on this machine: the map of every head, zoomed into like a map of the world.",
    )
    explore.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a saved trace, or a file with q and k (.npz, .safetensors)"
    )
    explore.add_argument("--port", type=_number, default=0, metavar="P", help="listen here (a free port unless given)")
    explore.add_argument("--device", metavar="D", help="compute there: cpu, cuda, cuda:1 ...")
    explore.add_argument("--no-browser", action="store_true", help="only say the address")

    lesson = commands.add_parser(
        "lesson",
        help="attention step by step, with every number computed",
        description=f"A lesson in the terminal; without a name, a list of them. Lessons: {', '.join(PARTS)}, {ALL}.",
    )
    lesson.add_argument("name", nargs="?", type=_one_of((*PARTS, ALL)), metavar="NAME")

    doctor = commands.add_parser(
        "doctor",
        help="what is usable on this machine, and why not",
        description="Tries every engine, the model that comes with regard, and what pictures need.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON for programs")

    for command in (look, lesson, doctor):
        command.add_argument("--language", type=_one_of(LANGUAGES), default="en", metavar="|".join(LANGUAGES))
        command.add_argument("--no-color", action="store_true", help="shades instead of colours (as with NO_COLOR set)")
    return result


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, found {value!r}")
        return value

    return check


def _number(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {value!r}")
    return int(value)


def look(given: argparse.Namespace) -> None:
    """What a model looks at in a text."""
    from .look import Request
    from .look import look as run

    request = Request(
        given.text, given.model, given.layer, given.head, given.out, given.save, given.json, given.language
    )
    run(request, _console(given))


def explore(given: argparse.Namespace) -> None:
    """The explorer, until it is interrupted."""
    from .views.server import serve

    serve(given.trace, port=given.port, open_browser=not given.no_browser, device=given.device)


def lesson(given: argparse.Namespace) -> None:
    """One lesson, all of them, or a list."""
    from .lessons import tour

    if given.name is None:
        tour.contents(_console(given), given.language)
    else:
        tour.show(_console(given), given.language, None if given.name == ALL else given.name)


def doctor(given: argparse.Namespace) -> None:
    """What is usable on this machine."""
    from .look.doctor import doctor as run

    run(_console(given), given.language, given.json)


def _console(given: argparse.Namespace) -> Console:
    from rich.console import Console

    _never_fail_to_encode(sys.stdout)
    console = Console(no_color=True if given.no_color else None, highlight=False)
    # A pipe has no width of its own: it gets the width the pages are laid out for, unless COLUMNS says otherwise.
    if console.is_terminal or "COLUMNS" in os.environ:
        console.width = min(console.width, WIDTH)
    else:
        console.width = WIDTH
    return console


def _never_fail_to_encode(stream: IO[str]) -> None:
    """Characters the terminal cannot show become question marks, not an error."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
