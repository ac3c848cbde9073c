"""Tables of what was found: rows for programs, aligned lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len


class Table(Sequence[dict[str, Any]]):
    """Rows as dictionaries of plain data (for JSON); printed, a table."""

    def __init__(self, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()):
        self.rows, self.notes = list(rows), tuple(notes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join([lines(self.rows), *self.notes])

    def __repr__(self) -> str:
        return str(self)


def lines(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under their names, numbers to the right, words to the left. What no row has is left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    cells = [[_cell(row[name]) for name in names] for row in rows]
    right = [all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names]
    shown = [names, *cells]
    widths = [max(cell_len(line[n]) for line in shown) for n in range(len(names))]
    return "\n".join(
        "  ".join(
            " " * (width - cell_len(cell)) + cell if number else cell + " " * (width - cell_len(cell))
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in shown
    )


def _cell(x: Any) -> str:
    return "" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)
