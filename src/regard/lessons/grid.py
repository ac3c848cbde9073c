"""M4, relative position on grids: a grid is not a matrix, δ has two parts, and flat distance is the wrong idea."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..models import digits
from ..views.terminal import table
from . import inputs
from .digit import digit
from .drawing import block as slanted
from .drawing import board
from .matrix import by
from .page import Page, Words
from .vectors import head
from .waves import nothing

SIDE = 6
#: the cell whose row of A is laid out on the grid
CELL = (2, 3)
SHAPE = (2, 3)
RIGHT = (0, -1)
FLAT = -1
#: the pair of the drawing: queries and keys are numbered from 1
PAIR = (4, 5)
SLOPE = 1.0
#: the question's grid
ASKED = (3, 4)

TRY = """\
import torch, regard as rg
h, w = 3, 3
rule = torch.zeros(2 * h - 1, 2 * w - 1)  # a number for each δ; none is at (h - 1, w - 1)
rule[h - 1 + 1, w - 1 + 2] = rule[h - 1 - 2, w - 1 + 1] = 5.0  # (1, 2) and (-2, 1)
q = torch.zeros(1, 1, h * w, 1)
term = rg.Static(rg.Cells(h, w), readout=rule.flatten()[None])
A = rg.attention(q, q, position=term, geometry=rg.Grid(h, w))
print(A.dense()[0, 0].round(decimals=2))
print(A.profile()[0, 0].round(decimals=2))"""
#: the board a rule is drawn for, how strong a drawn δ is, and the strongest it may be
DRAWN, STRONG, STRONGEST = (3, 3), 5.0, 10.0
#: what is drawn at first: two knight's moves (decomposed: what lies one above, in the same column)
KNIGHTS = ((1, 2), (-2, 1))
SLOPES = (0.0, 3.0)
#: the pixel that asks at first
PIXEL = 27
#: where the words of a small page stand: (line, column), in any unit
LAYOUT = ((0.0, 0.0), (0.0, 4.5), (2.0, 0.5), (2.0, 6.0))


class Sizes(NamedTuple):
    """Six tokens on a line, and six by six cells on a grid."""

    line_shape: tuple[int, ...]
    grid_shape: tuple[int, ...]
    line: list[list[float]]  # A of the line
    row: list[list[float]]  # the row of CELL in the grid's A, laid out on the grid
    query: int  # the index of CELL


class Neighbour(NamedTuple):
    """ "Look one cell to the right", on the grid and by flat distance. Pairs are numbered from 1."""

    places: list[tuple[int, ...]]
    grid: list[tuple[int, int]]
    flat: list[tuple[int, int]]
    visible: dict[str, list[list[bool]]]
    weights: dict[str, list[list[float]]]
    profile: list[list[float]]  # mass per δ: [2h - 1, 2w - 1], the smallest first


class Kind(NamedTuple):
    """A geometry and a term on it."""

    name: str
    geometry: str
    numbers: int  # learned or fixed numbers in the term
    shape: tuple[int, ...]  # of A


def nearby(axes: int, slope: float = SLOPE) -> rg.Static:
    """The nearer the brighter: minus the distance, on one axis or on two."""
    return rg.Static(rg.Slope(axes), readout=torch.full((1, 1), slope, dtype=torch.float64))


def line_matrix(slope: float = SLOPE) -> rg.AttentionMatrix:
    """A of SIDE tokens on a line, as a lazy value: 6 x 6."""
    q = nothing(SIDE)
    return rg.attention(q, q, position=nearby(1, slope))[0, 0]


def grid_matrix(slope: float = SLOPE) -> rg.AttentionMatrix:
    """A of the SIDE x SIDE grid, as a lazy value: 36 x 36."""
    q = nothing(SIDE * SIDE)
    return rg.attention(q, q, position=nearby(2, slope), geometry=rg.Grid(SIDE, SIDE))[0, 0]


def sizes() -> Sizes:
    line, grid = line_matrix(), grid_matrix()
    query = CELL[0] * SIDE + CELL[1]
    row = grid[query, :].unflatten(-1, (SIDE, SIDE))
    return Sizes(tuple(line.shape), tuple(grid.shape), line.dense().tolist(), row.tolist(), query)


def neighbour(delta: tuple[int, int] = RIGHT) -> Neighbour:
    """A rule over δ, and over the flat distance that δ has in the middle of the grid."""
    geometry = rg.Grid(*SHAPE)
    q = nothing(geometry.size())
    matrices = {
        "grid": rg.attention(q, q, mask=rg.offset(*delta), geometry=geometry)[0, 0],
        "flat": rg.attention(q, q, mask=rg.offset(flat_of(delta)))[0, 0],
    }
    seen = {name: A.logits.dense() > -torch.inf for name, A in matrices.items()}
    pairs = {name: [(i + 1, j + 1) for i, j in x.nonzero().tolist()] for name, x in seen.items()}
    return Neighbour(
        [tuple(p) for p in geometry.coordinates(torch.arange(geometry.size())).tolist()], pairs["grid"], pairs["flat"],
        {name: x.tolist() for name, x in seen.items()}, {name: A.dense().tolist() for name, A in matrices.items()},
        matrices["grid"].profile().tolist(),
    )  # fmt: skip


def flat_of(delta: tuple[int, int]) -> int:
    """How far apart in the flat sequence two cells are, a δ apart, if no line ends between them."""
    return delta[0] * SHAPE[1] + delta[1]


def kinds() -> list[Kind]:
    """What else can be said about δ: tables, decomposed tables, three axes, tokens without a place, any coordinates."""
    points = rg.Points(torch.tensor(LAYOUT, dtype=torch.float64))
    cases: dict[str, tuple[Any, Any]] = {
        "swin": (rg.Grid(*SHAPE), rg.recipes.swin(1, SHAPE)),
        "sam": (rg.Grid(*SHAPE), rg.recipes.sam(4, SHAPE)),
        "beit": (rg.Grid(*SHAPE, unplaced=1), rg.recipes.beit(1, SHAPE)),
        "video": (rg.Grid(2, *SHAPE), rg.Static(rg.Cells(2, *SHAPE), 1)),
        "layout": (points, nearby(2)),
    }
    found = []
    for name, (geometry, term) in cases.items():
        x = head(torch.zeros(geometry.size(), 4))
        x = x.double() if name == "layout" else x
        A = rg.attention(x, x, position=term, geometry=geometry)[0, 0]
        found.append(Kind(name, repr(geometry), _numbers(term), tuple(A.dense().shape)))
    return found


def drawn(kind: str, cells: list[list[float]], rows: list[float], columns: list[float]) -> dict[str, Any]:
    """A of a drawn rule: one number a δ, or one for each of its two parts, added up."""
    geometry, q = rg.Grid(*DRAWN), nothing(math.prod(DRAWN))

    def part(axis: int, given: list[float]) -> rg.Static:
        feature = rg.OnAxis(axis, rg.Clipped(DRAWN[axis] - 1))
        return rg.Static(feature, readout=torch.tensor([given], dtype=q.dtype))

    whole = rg.Static(rg.Cells(*DRAWN), readout=torch.tensor(cells, dtype=q.dtype).flatten()[None])
    term = whole if kind == "cells" else part(0, rows) + part(1, columns)
    A = rg.attention(q, q, position=term, geometry=geometry)[0, 0]
    middle = math.prod(DRAWN) // 2
    deltas = torch.cartesian_prod(*(torch.arange(1 - n, n) for n in DRAWN))
    table = torch.tensor(cells) if kind == "cells" else torch.tensor(rows)[:, None] + torch.tensor(columns)
    return {
        "table": table.tolist(), "weights": A.dense().tolist(), "profile": A.profile().tolist(), "middle": middle,
        "numbers": _numbers(term), "deltas": deltas.unflatten(0, table.shape).tolist(),
    }  # fmt: skip


def play(
    query: Any = CELL[0] * SIDE + CELL[1], key: Any = CELL[0] * SIDE + CELL[1] + 1, slope: Any = SLOPE, delta: Any = RIGHT,
    kind: Any = "cells", rule: Any = None, rows: Any = None, columns: Any = None,
    number: Any = 3, layer: Any = 0, head: Any = 0, pixel: Any = PIXEL,
) -> dict[str, Any]:  # fmt: skip
    """6 x 6 twice; a rule on 2 x 3 by δ and by flat distance; a rule that is drawn; a digit, and what its pixels look at."""
    cells, (h, w), wide = SIDE * SIDE, SHAPE, tuple(2 * n - 1 for n in DRAWN)
    q, k = inputs.whole("query", query, 0, cells - 1), inputs.whole("key", key, 0, cells - 1)
    steep = inputs.number("slope", slope, *SLOPES)
    if not isinstance(delta, (list, tuple)) or len(delta) != 2:
        raise inputs.Refused("delta", "two whole numbers", f"{delta!r:.60}", "两个整数")
    apart = inputs.whole("delta[0]", delta[0], 1 - h, h - 1), inputs.whole("delta[1]", delta[1], 1 - w, w - 1)
    of = inputs.choice("kind", kind, ("cells", "axes"))
    knights = [
        [STRONG * ((a, b) in KNIGHTS) for b in range(1 - DRAWN[1], DRAWN[1])] for a in range(1 - DRAWN[0], DRAWN[0])
    ]
    lit = inputs.matrix("rule", knights if rule is None else rule, 0.0, STRONGEST, (wide[0], wide[1]))
    first = [STRONG * (n == DRAWN[0]) for n in range(wide[0])], [STRONG * (n == DRAWN[1] - 1) for n in range(wide[1])]
    down = inputs.numbers("rows", first[0] if rows is None else rows, 0.0, STRONGEST, (wide[0], wide[0]))
    across = inputs.numbers("columns", first[1] if columns is None else columns, 0.0, STRONGEST, (wide[1], wide[1]))
    which = inputs.whole("number", number, 0, 9)
    place = (
        inputs.whole("layer", layer, 0, digits.LAYERS - 1), inputs.whole("head", head, 0, digits.HEADS - 1),
        inputs.whole("pixel", pixel, 0, digits.SIDE**2 - 1),
    )  # fmt: skip
    line, A, found = line_matrix(steep), grid_matrix(steep), neighbour(apart)
    return {
        "inputs": {
            "query": q, "key": k, "slope": steep, "delta": list(apart), "kind": of, "rule": lit, "rows": down,
            "columns": across, "number": which, "layer": place[0], "head": place[1], "pixel": place[2],
        },
        "bounds": {
            "slope": [*SLOPES, 0.1], "kind": ["cells", "axes"], "number": list(range(10)), "strong": STRONG,
            "layer": list(range(digits.LAYERS)), "head": list(range(digits.HEADS)),
        },
        "side": SIDE, "line": line.dense().tolist(), "line_shape": by(tuple(line.shape)),
        "line_pairs": math.prod(line.shape), "grid": A.dense().tolist(), "grid_shape": by(tuple(A.shape)),
        "grid_pairs": math.prod(A.shape), "profile": A.profile().tolist(),
        "shape": list(SHAPE), "flat": flat_of(apart), "places": [list(each) for each in found.places],
        "pairs": inputs.plain(
            {"grid": found.grid, "flat": found.flat, "wrong": [p for p in found.flat if p not in found.grid]}
        ),
        "visible": found.visible, "weights": found.weights,
        "drawn": drawn(of, lit, down, across), "board": list(DRAWN),
        "digit": digit(which, *place), "digit_side": digits.SIDE, "digit_about": digits.about(),
    }  # fmt: skip


def uses() -> Counter[tuple[int, ...]]:
    """How many pairs of the question's grid have each displacement."""
    geometry = rg.Grid(*ASKED)
    place = geometry.coordinates(torch.arange(geometry.size()))
    return Counter(map(tuple, (place[:, None] - place).flatten(0, 1).tolist()))


def _numbers(term: Any) -> int:
    tensors: list[Tensor] = [*term.parameters(), *term.buffers()]
    return sum(t.numel() for t in tensors)


WORDS: Words = {
    "en": {
        "title": "Relative position on a grid",
        "shows": "On a grid a displacement has two parts, and counting along the flat sequence is the wrong idea.",
        "alike": "Two pictures of {side} x {side} that look alike and are not. Left: a matrix, A of {side} tokens, {line} pairs; a cell is a pair. Middle: a "
        "grid of {cells} positions; a cell is a token, and its brightness is how much the query at {cell} looks at it. Right: the grid's A is {shape}, "
        "{pairs} pairs; the middle picture is its row {query}, laid out on the grid.",
        "matrix": "A of {side} tokens",
        "laid": "row {query}, on the grid",
        "laid_axes": "rows and columns of the grid",
        "whole": "A of the {side} x {side} grid",
        "block": "the grid as a block",
        "places": "A {h} x {w} grid, row by row: {places}. δ = q - k has two parts.",
        "rule": "“Look one cell to the right” is δ = {delta}: it lights {pairs}. Cells {edge} have no right neighbour. The flat rule Δ = {flat} also "
        "lights {wrong}, from the end of one line to the start of the next. A grid is block-Toeplitz: flat distance is the wrong idea.",
        "drawn": "q = {q}, k = {k}, δ = {delta}: cell ({q},{k}) of A",
        "grid": "δ = {delta} on the grid",
        "flat": "Δ = {delta} on the flat line",
        "mass": "mass per δ",
        "mass_axes": "rows: δ1, columns: δ2",
        "kinds": "Other terms and places:",
        "name": "as in",
        "geometry": "geometry",
        "numbers": "numbers in the term",
        "swin": "Swin: one number a δ",
        "sam": "SAM: q·R_row + q·R_column",
        "beit": "BEiT: with a class token",
        "video": "video: three axes",
        "layout": "words on a page",
        "try": "Draw a rule on the table of δ, here two knight's moves, and see A and the mass per δ. A bright δ of the table is bright in A wherever the board has room for it.",
        "question": "On a {h} x {w} grid, how many different δ are there, and how many pairs?",
        "answer": "{deltas} displacements (2·{h}-1 times 2·{w}-1), and {pairs} pairs: {h}·{w} cells, squared. So a table over δ has few numbers, and each of them is "
        "used by many pairs: δ = (0,0) by {cells}, the farthest by one.",
        "next": "W_Q and W_K are learned: watch it happen. `regard lesson learning`. A trained grid: `examples/digits.py` reads 8 x 8 images with such a table.",
        "play_alike": "A grid is not a matrix",
        "play_alike_note": "Point at a cell of any picture, or use the arrow keys: the key goes there. On the grid a click, or Shift with the arrow keys, moves the query. Query orange, key green, δ red.",
        "play_slope": "how fast weight falls with distance",
        "play_line_title": "a matrix: A of {side} tokens, {shape}; a cell is a pair ({pairs} pairs)",
        "play_board_title": "a grid of {side} x {side} tokens; a cell is a token, its brightness the query's weight on it. Beside it, mass per δ",
        "play_whole_title": "A of that grid: {shape}; a cell is a pair ({pairs} pairs)",
        "play_pair": "query {q} at {qc}, key {k} at {kc}: δ = {delta}, weight {weight}, row {q} and column {k} of A",
        "play_same": "The same spot in both pictures, {cell}: in the matrix it is a pair, “query {r} looks at key {c}”, weight {line}. On the grid it is one token, number {k}, and query {q} gives it {grid}.",
        "play_rule": "Why flat distance is wrong",
        "play_deltas": "choose a δ (rows: δ1, columns: δ2)",
        "play_by_grid": "δ = {delta} on the grid: {pairs}",
        "play_by_flat": "Δ = {delta} on the flat line: {pairs}",
        "play_wrong": "The flat rule also lights {wrong}: from the end of one line to the start of the next.",
        "play_fine": "Here the flat rule lights the same pairs.",
        "play_none": "none",
        "play_draw": "Draw a rule",
        "play_kind": "the table of δ is",
        "play_kind_cells": "one number a δ",
        "play_kind_axes": "decomposed: rows + columns",
        "play_draw_note": "Click a δ, or go there with the arrow keys and press Enter: it becomes bright or dark. Decomposed, its whole row and column do: {numbers} numbers instead of {all}.",
        "play_draw_note_cells": "Click a δ, or go there with the arrow keys and press Enter: it becomes bright or dark. The table has {numbers} numbers.",
        "play_table": "table of δ = q - k",
        "play_A": "A: rows are queries, columns are keys",
        "play_on_board": "what cell {n} looks at, on the board",
        "play_clear": "Clear",
        "play_digit": "A digit and its 64 cells",
        "play_number": "image",
        "play_layer": "layer",
        "play_head": "head",
        "play_digit_note": "A small model, trained on {trained} handwritten digits, sees only the brightness of each pixel and, for each pair, δ. It reads {right} of {held} others right. Click a pixel, or press Shift with the arrow keys: that is the query, and the colour over the others is its weight on them. A is {shape}.",
        "play_pixels": "pixel {cell} looks at",
        "play_received": "what all pixels together look at",
        "play_learned": "learned number of each δ in this head",
        "play_reads": "what the model reads, probability",
        "play_source": "Images: {data}.",
        "play_told": "Query {q}, key {k}, δ = {delta}, weight {weight}.",
        "play_told_pixel": "Pixel {cell} looks most at {top}.",
    },
    "zh": {
        "title": "网格上的相对位置",
        "shows": "在网格上，位移有两个分量；沿展平的序列数距离是错的。",
        "alike": "两张 {side} x {side} 的图，看起来一样，其实不同。左：矩阵，{side} 个词元的 A，{line} 对；一格是一对。中：{cells} 个位置的网格；一格是一个词元，亮度是 {cell} 处的查"
        "询看它多少。右：这个网格的 A 是 {shape}，{pairs} 对；中间的图就是它的第 {query} 行，按网格排开。",
        "matrix": "{side} 个词元的 A",
        "laid": "第 {query} 行，排在网格上",
        "laid_axes": "网格的行和列",
        "whole": "{side} x {side} 网格的 A",
        "block": "画成立体的网格",
        "places": "{h} x {w} 的网格，按行编号：{places}。δ = q - k 有两个分量。",
        "rule": "“看右边一格”就是 δ = {delta}：点亮 {pairs}。第 {edge} 格没有右邻。展平后的规则 Δ = {flat} 还会点亮 {wrong}，从一行的末尾到下一行的开头。网格是分块 Toeplitz 的：用"
        "展平的距离是错的。",
        "drawn": "q = {q}，k = {k}，δ = {delta}：A 的 ({q},{k})",
        "grid": "网格上 δ = {delta}",
        "flat": "展平后 Δ = {delta}",
        "mass": "每个 δ 的质量",
        "mass_axes": "行：δ1，列：δ2",
        "kinds": "其他的项和位置：",
        "name": "例如",
        "geometry": "几何",
        "numbers": "项中数的个数",
        "swin": "Swin：每个 δ 一个数",
        "sam": "SAM：q·R_行 + q·R_列",
        "beit": "BEiT：带类别词元",
        "video": "视频：三个轴",
        "layout": "页面上的词",
        "try": "在 δ 的表上画一条规则，这里是两种马步，看 A 和每个 δ 的质量。表中亮的 δ，棋盘上凡有地方走的格子，在 A 里都亮。",
        "question": "{h} x {w} 的网格上有多少种不同的 δ？有多少对？",
        "answer": "{deltas} 种位移（2·{h}-1 乘 2·{w}-1），{pairs} 对：{h}·{w} 格的平方。所以 δ 的表只有少数几个数，每个数由许多对共用：δ = (0,0) 有 {cells} 对，最远的只有一对。",
        "next": "W_Q 和 W_K 是学出来的：看它怎样发生。`regard lesson learning`。训练好的网格：`examples/digits.py` 用这样的表读 8 x 8 的图像。",
        "play_alike": "网格不是矩阵",
        "play_alike_note": "指向任何一张图的一格，或用方向键：键移到那里。在网格上点一下，或按住 Shift 用方向键，移动的是查询。查询橙色，键绿色，δ 红色。",
        "play_slope": "权重随距离下降多快",
        "play_line_title": "矩阵：{side} 个词元的 A，{shape}；一格是一对（{pairs} 对）",
        "play_board_title": "{side} x {side} 个词元的网格；一格是一个词元，亮度是查询给它的权重。旁边是每个 δ 的质量",
        "play_whole_title": "这个网格的 A：{shape}；一格是一对（{pairs} 对）",
        "play_pair": "查询 {q} 在 {qc}，键 {k} 在 {kc}：δ = {delta}，权重 {weight}，A 的第 {q} 行、第 {k} 列",
        "play_same": "两张图上的同一处 {cell}：在矩阵里它是一对，“查询 {r} 看键 {c}”，权重 {line}。在网格上它是一个词元，第 {k} 号，查询 {q} 给它 {grid}。",
        "play_rule": "为什么展平的距离是错的",
        "play_deltas": "选一个 δ（行：δ1，列：δ2）",
        "play_by_grid": "网格上 δ = {delta}：{pairs}",
        "play_by_flat": "展平后 Δ = {delta}：{pairs}",
        "play_wrong": "展平后的规则还点亮了 {wrong}：从一行的末尾到下一行的开头。",
        "play_fine": "这里展平后的规则点亮的是同样的对。",
        "play_none": "没有",
        "play_draw": "画一条规则",
        "play_kind": "δ 的表是",
        "play_kind_cells": "每个 δ 一个数",
        "play_kind_axes": "分解：行 + 列",
        "play_draw_note": "点一个 δ，或用方向键走过去按回车：它变亮或变暗。分解时，整行和整列都变：只要 {numbers} 个数，而不是 {all} 个。",
        "play_draw_note_cells": "点一个 δ，或用方向键走过去按回车：它变亮或变暗。这张表有 {numbers} 个数。",
        "play_table": "δ = q - k 的表",
        "play_A": "A：行是查询，列是键",
        "play_on_board": "第 {n} 格看什么，画在棋盘上",
        "play_clear": "清空",
        "play_digit": "一个数字和它的 64 格",
        "play_number": "图像",
        "play_layer": "层",
        "play_head": "头",
        "play_digit_note": "一个小模型，用 {trained} 个手写数字训练，只看得到每个像素的亮度，以及每一对的 δ。另外 {held} 个数字，它读对 {right}。点一个像素，或按住 Shift 用方向键：它就是查询，盖在其他像素上的颜色是它给它们的权重。A 是 {shape}。",
        "play_pixels": "像素 {cell} 在看",
        "play_received": "所有像素合起来在看什么",
        "play_learned": "这个头学到的每个 δ 的数",
        "play_reads": "模型读成什么，概率",
        "play_source": "图像来源：{data}。",
        "play_told": "查询 {q}，键 {k}，δ = {delta}，权重 {weight}。",
        "play_told_pixel": "像素 {cell} 看得最多的是 {top}。",
    },
}


def show(page: Page) -> None:
    page.open()
    found, cells = sizes(), SIDE * SIDE
    page.say(
        "alike", side=SIDE, line=found.line_shape[0] * found.line_shape[1], cells=cells, cell=CELL,
        shape=by(found.grid_shape), pairs=found.grid_shape[0] * found.grid_shape[1], query=found.query,
    )  # fmt: skip
    places = [str(n) for n in range(SIDE)]
    page.show(
        page.map(found.line, rows=places, columns=places, title=page("matrix", side=SIDE)),
        page.map(found.row, rows=places, columns=places, title=page("laid", query=found.query), axes=page("laid_axes")),
        page.picture(grid_matrix(), cells, title=page("whole", side=SIDE), scale="linear", mark=found.query),
    )
    rule = neighbour()
    listed = page.listed(f"{n}→{p}".replace(" ", "") for n, p in enumerate(rule.places, 1))
    page.say("places", h=SHAPE[0], w=SHAPE[1], places=listed)
    edge = [n for n in range(1, len(rule.places) + 1) if n not in {q for q, _ in rule.grid}]
    page.say(
        "rule", delta=_tight(RIGHT), pairs=_pairs(rule.grid), edge=page.listed(edge), flat=FLAT,
        wrong=_pairs([p for p in rule.flat if p not in rule.grid]),
    )  # fmt: skip
    names = [str(n) for n in range(1, len(rule.places) + 1)]
    maps = [
        page.map(
            rule.weights[name], visible=rule.visible[name], rows=names, columns=names, values="g",
            title=page(name, delta=_tight(RIGHT) if name == "grid" else FLAT),
        )
        for name in ("grid", "flat")
    ]  # fmt: skip
    h, w = SHAPE
    mass = page.map(
        rule.profile, rows=map(str, range(1 - h, h)), columns=map(str, range(1 - w, w)), values="g",
        title=page("mass"), axes=page("mass_axes"),
    )  # fmt: skip
    q, k = (rule.places[n - 1] for n in PAIR)
    delta = (q[0] - k[0], q[1] - k[1])
    page.show(*maps, mass)
    drawing = page("drawn", q=PAIR[0], k=PAIR[1], delta=_tight(delta))
    page.show(
        table([drawing], [[board(SHAPE, (q[0], q[1]), (k[0], k[1]))]]),
        table([page("block")], [[slanted((SIDE, SIDE), CELL, (CELL[0] - delta[0], CELL[1] - delta[1]))]]),
    )
    page.say("kinds")
    rows = [[page(x.name), x.geometry, x.numbers, by(x.shape)] for x in kinds()]
    page.show(table([page("name"), page("geometry"), page("numbers"), "A"], rows))
    used = uses()
    page.close(
        TRY,
        {
            "h": ASKED[0], "w": ASKED[1], "deltas": len(used), "pairs": sum(used.values()), "cells": used[(0, 0)],
        },
        h=ASKED[0],
        w=ASKED[1],
    )  # fmt: skip


def _pairs(pairs: list[tuple[int, int]]) -> str:
    return " ".join(map(_tight, pairs))


def _tight(pair: tuple[int, ...]) -> str:
    return f"({','.join(map(str, pair))})"
