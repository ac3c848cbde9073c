"""M4, relative position on grids: a grid is not a matrix, δ has two parts, and flat distance is the wrong idea."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

from ..views.terminal import table
from .drawing import block as slanted
from .drawing import board
from .line import nothing
from .matrix import by
from .page import Page, Words
from .vectors import head

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


def nearby(axes: int) -> rg.Static:
    """The nearer the brighter: minus the distance, on one axis or on two."""
    return rg.Static(rg.Slope(axes), readout=torch.full((1, 1), SLOPE, dtype=torch.float64))


def grid_matrix() -> rg.AttentionMatrix:
    """A of the SIDE x SIDE grid, as a lazy value: 36 x 36."""
    q = nothing(SIDE * SIDE)
    return rg.attention(q, q, position=nearby(2), geometry=rg.Grid(SIDE, SIDE))[0, 0]


def sizes() -> Sizes:
    q = nothing(SIDE)
    line, grid = rg.attention(q, q, position=nearby(1))[0, 0], grid_matrix()
    query = CELL[0] * SIDE + CELL[1]
    row = grid[query, :].unflatten(-1, (SIDE, SIDE))
    return Sizes(tuple(line.shape), tuple(grid.shape), line.dense().tolist(), row.tolist(), query)


def neighbour() -> Neighbour:
    geometry = rg.Grid(*SHAPE)
    q = nothing(geometry.size())
    matrices = {
        "grid": rg.attention(q, q, mask=rg.offset(*RIGHT), geometry=geometry)[0, 0],
        "flat": rg.attention(q, q, mask=rg.offset(FLAT))[0, 0],
    }
    seen = {name: A.logits.dense() > -torch.inf for name, A in matrices.items()}
    pairs = {name: [(i + 1, j + 1) for i, j in x.nonzero().tolist()] for name, x in seen.items()}
    return Neighbour(
        [tuple(p) for p in geometry.coordinates(torch.arange(geometry.size())).tolist()], pairs["grid"], pairs["flat"],
        {name: x.tolist() for name, x in seen.items()}, {name: A.dense().tolist() for name, A in matrices.items()},
        matrices["grid"].profile().tolist(),
    )  # fmt: skip


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
