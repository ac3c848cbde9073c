"""The command `regard`. Arguments are read before torch is imported, so that help and mistakes answer at once.

    regard look [--language en|zh] [--only PART] [--no-color]
    regard --version

What went wrong is one sentence on standard error, with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import IO, NoReturn

from . import __version__
from .lessons import LANGUAGES, PARTS

#: columns the lessons are laid out for: a wider terminal is not filled, a narrower one stacks the pictures
WIDTH = 100


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
        return look(given)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 2


def parser() -> Parser:
    result = Parser(prog="regard", description="Attention you can look into: a lazy attention matrix for PyTorch.")
    result.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    look = commands.add_parser(
        "look",
        help="a tour of the attention matrix, with every number computed",
        description=f"A tour of the attention matrix in the terminal. Parts: {', '.join(PARTS)}.",
    )
    look.add_argument("--language", type=_one_of(LANGUAGES), default="en", metavar="|".join(LANGUAGES))
    look.add_argument("--only", type=_one_of(PARTS), metavar="PART", help="show one part")
    look.add_argument("--no-color", action="store_true", help="shades instead of colours (as with NO_COLOR set)")
    return result


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, found {value!r}")
        return value

    return check


def look(given: argparse.Namespace) -> int:
    """The tour, on standard output."""
    from rich.console import Console

    from .lessons import tour

    _never_fail_to_encode(sys.stdout)
    console = Console(no_color=True if given.no_color else None, highlight=False)
    # A pipe has no width of its own: it gets the width the pages are laid out for.
    console.width = WIDTH if not console.is_terminal else min(console.width, WIDTH)
    tour.show(console, given.language, given.only)
    return 0


def _never_fail_to_encode(stream: IO[str]) -> None:
    """Characters the terminal cannot show become question marks, not an error."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
