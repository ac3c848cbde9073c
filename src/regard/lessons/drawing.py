"""A grid of cells drawn with lines: flat, with the arrow from a query to a key, and slanted, as a block.

The query's cell is orange and says q, the key's is green and says k, the arrow is red; without colour the letters remain.
"""

from __future__ import annotations

from rich.text import Text

Cell = tuple[int, int]

QUERY, KEY, ARROW = "black on #e69f00", "black on #009e73", "bold #c00000"
#: display columns inside a flat cell
WIDE = 6


class Canvas:
    """Characters and their styles, by row and column."""

    def __init__(self, rows: int, columns: int):
        self.characters = [[" "] * columns for _ in range(rows)]
        self.styles = [[""] * columns for _ in range(rows)]

    def write(self, row: int, column: int, text: str, style: str = "") -> None:
        for at, character in enumerate(text, column):
            self.characters[row][at] = character
            self.styles[row][at] = style or self.styles[row][at]

    def over(self, row: int, column: int, character: str, style: str) -> None:
        """Write, unless a letter or digit stands there."""
        if not self.characters[row][column].isalnum():
            self.characters[row][column], background = character, self.styles[row][column].partition(" on ")[2]
            self.styles[row][column] = f"{style} on {background}" if background else style

    def text(self) -> Text:
        lines = []
        for characters, styles in zip(self.characters, self.styles, strict=True):
            lines.append(Text.assemble(*zip(characters, styles, strict=True)))
        return Text("\n").join(lines)


def board(shape: Cell, query: Cell, key: Cell) -> Text:
    """The grid from above: cells numbered from 1, row-major, and the way from the query to the key."""
    rows, columns = shape
    canvas = Canvas(2 * rows + 1, (WIDE + 1) * columns + 1)
    for row in range(2 * rows + 1):
        ends = "┌┬┐" if row == 0 else "└┴┘" if row == 2 * rows else "├┼┤"
        if row % 2 == 0:
            canvas.write(row, 0, ends[0] + ends[1].join(["─" * WIDE] * columns) + ends[2])
        else:
            canvas.write(row, 0, "│" + "│".join([" " * WIDE] * columns) + "│")
    for i in range(rows):
        for j in range(columns):
            number = f"{i * columns + j + 1}" + ("q" if (i, j) == query else "k" if (i, j) == key else "")
            style = QUERY if (i, j) == query else KEY if (i, j) == key else ""
            canvas.write(2 * i + 1, (WIDE + 1) * j + 1, f" {number}".ljust(WIDE), style)
    _arrow(canvas, query, key)
    return canvas.text()


def _arrow(canvas: Canvas, query: Cell, key: Cell) -> None:
    """Along the query's row first, then along the key's column. Its ends are free of numbers."""
    row, column = 2 * query[0] + 1, (WIDE + 1) * query[1] + WIDE - 1
    down, goal = 2 * key[0] + 1, (WIDE + 1) * key[1] + WIDE - 1
    if column != goal and row == down:  # stop before the key's number, where the arrow comes from the left
        goal = (WIDE + 1) * key[1] + 1 if goal > column else goal
    step = 1 if goal > column else -1
    if step < 0 and column != goal:  # leave on the side it goes to
        column = (WIDE + 1) * query[1] + 1
    for x in range(column, goal, step):
        canvas.over(row, x, "─", ARROW)
    if row == down:
        canvas.over(row, goal, "►" if step > 0 else "◄", ARROW)
        return
    turn = 1 if down > row else -1
    if column != goal:
        canvas.over(row, goal, {(1, 1): "┐", (1, -1): "┘", (-1, 1): "┌", (-1, -1): "└"}[step, turn], ARROW)
    for y in range(row + turn, down, turn):
        canvas.over(y, goal, "│", ARROW)
    canvas.over(down, goal, "▼" if turn > 0 else "▲", ARROW)


def block(shape: Cell, query: Cell, key: Cell) -> Text:
    """The grid in perspective, as a block seen from the front and above: the last row is the nearest."""
    rows, columns = shape
    canvas = Canvas(rows + 2, 3 * columns + rows + 3)
    canvas.write(0, rows + 1, "_" * (3 * columns - 1))
    for i in range(rows):
        left = rows - i
        canvas.write(i + 1, left, "/" + "__/" * columns)
        for j, cell in ((c[1], c) for c in (query, key) if c[0] == i):
            canvas.write(i + 1, left + 1 + 3 * j, "q_" if cell == query else "k_", QUERY if cell == query else KEY)
        if i:
            canvas.write(i + 1, left + 3 * columns + 1, "/")
    canvas.write(rows + 1, 1, "|" + "__|" * columns + "/")
    return canvas.text()
