"""Heat maps, pictures and bars in a terminal: the text they are made of, their colours, and what they refuse."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import regard as rg
from regard.views.terminal import MASKED, SHADES, bars, beside, colour, heatmap, pooled, shade, table

SENTENCE = "小沈阳江西演唱会邀请了，"


def plain(renderable, width: int = 100) -> list[str]:
    """What a console without colours prints, line by line, without trailing spaces."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def segments(renderable, width: int = 100) -> list[list]:
    """What a console with colours draws: the segments of each line, longer than nothing."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", no_color=False
    )  # fmt: skip
    return [[s for s in line if s.text] for line in console.render_lines(renderable, pad=False)]


def grounds(line: list) -> list[tuple[int, int, int]]:
    """The background of every cell of a line that has one."""
    return [tuple(s.style.bgcolor.triplet) for s in line if s.style and s.style.bgcolor is not None]


def matrix(length: int, **how) -> rg.AttentionMatrix:
    x = torch.randn(1, 1, length, 8, dtype=torch.float64)
    return rg.attention(x, x.flip(-1), **how)[0, 0]


class TestHeatmap:
    def test_the_text_of_a_small_matrix(self):
        found = plain(heatmap([[1.0, 0.0], [0.3, 0.7]], rows=["小", "ab"], columns=["小", "b"], title="two"))
        assert found == [
            "two",
            "   小b",
            "小 ██",
            "ab ▒▒▓▓",
            "   0   ░░▒▒▓▓██ 1",
            "   rows: queries",
            "   columns: keys",
        ]

    def test_cells_line_up_under_wide_labels(self):
        found = plain(heatmap(matrix(12, mask=rg.causal), rows=SENTENCE, columns=SENTENCE))
        assert found[0] == "   " + SENTENCE
        for i, line in enumerate(found[1:13]):
            label, cells = line[: len(SENTENCE[i])], line[len(SENTENCE[i]) :]
            assert label == SENTENCE[i]
            assert cell_len(label) == 2 and cells[0] == " "
            # the cell under column j begins at display column 3 + 2j
            assert cells[1:].count(MASKED) == 11 - i
            if i < 11:
                assert cell_len(line[: line.index(MASKED)]) == 3 + 2 * (i + 1)

    def test_labels_of_different_widths_are_aligned_by_display_width(self):
        found = plain(heatmap(torch.eye(3), rows=["a", "你好", "Hello"], columns=["a", "b", "c"]))
        starts = [cell_len(line[: line.index("█")]) for line in found[1:4]]
        assert starts == [6, 8, 10]

    def test_long_column_labels_are_read_downwards(self):
        found = plain(heatmap(torch.eye(3), rows=["x"] * 3, columns=["abc", "你好", "z"]))
        assert found[:3] == ["  a", "  b 你", "  c 好z"]

    def test_masked_cells_are_dots_and_zeros_are_not(self):
        A = rg.attention(*(torch.zeros(1, 1, 6, 1),) * 2, mask=rg.offset(-2))[0, 0]
        found = plain(heatmap(A, values="g"))
        assert found[1:7] == [
            "0 · · 1 · · ·",
            "1 · · · 1 · ·",
            "2 · · · · 1 ·",
            "3 · · · · · 1",
            "4" + " ·" * 6,
            "5" + " ·" * 6,
        ]
        assert f"{MASKED} masked" in "\n".join(found)
        assert MASKED not in "\n".join(plain(heatmap(torch.zeros(2, 2))))

    def test_logits_of_minus_infinity_are_masked(self):
        logits = matrix(4, mask=rg.causal).logits.dense()
        assert sum(line.count(MASKED) for line in plain(heatmap(logits))[1:5]) == 6

    def test_visible_says_which_cells_show(self):
        found = plain(heatmap([[0.5, 0.5]], visible=[[True, False]], values="percent"))
        assert found[1] == "0 50  ·"
        with pytest.raises(ValueError, match="visible: expected one a cell"):
            heatmap([[0.5, 0.5]], visible=[[True]])

    @pytest.mark.parametrize(
        ("values", "expected"),
        [("percent", "0 100   4   0"), (".2f", "0 1.00 0.04 0.00"), (".1f", "0 1.0 0.0 0.0")],
    )
    def test_numbers(self, values, expected):
        assert plain(heatmap([[1.0, 0.044, -0.0001]], values=values))[1] == expected

    def test_a_number_that_is_none_shows_as_a_question(self):
        assert plain(heatmap([[math.nan, 1.0]], values="g"))[1] == "0 ? 1"

    def test_control_characters_and_markup_in_labels_do_no_harm(self):
        found = plain(heatmap(torch.eye(2), rows=["\n", "[bold]"], columns=["a", "b"]))
        assert found[1].startswith("    \\n ") and found[2].startswith("[bold] ")

    def test_the_legend_holds_the_ends_of_the_scale(self):
        assert plain(heatmap([[0.25, 0.5]]))[2] == "  0   ░░▒▒▓▓██ 0.5"
        assert plain(heatmap([[-2.0, 0.5]]))[2] == "  -2   ░░▒▒▓▓██ 0.5"
        assert plain(heatmap([[0.25, 0.5]], high=1.0))[1:3] == ["0 ▒▒▓▓", "  0   ░░▒▒▓▓██ 1"]

    def test_a_view_may_say_something_else_on_its_axes(self):
        assert plain(heatmap(torch.eye(2), axes="rows: keys, columns: queries"))[-2:] == [
            "  rows: keys",
            "  columns: queries",
        ]

    def test_colours_are_those_of_the_weights(self):
        weights = [[0.0, 0.5], [1.0, 0.25]]
        lines = segments(heatmap(weights, rows="ab", columns="cd"))
        assert [grounds(lines[1]), grounds(lines[2])] == [[colour(x) for x in row] for row in weights]
        assert grounds(lines[3])[0] == colour(0.0) and grounds(lines[3])[-1] == colour(1.0)

    def test_a_masked_cell_has_no_colour(self):
        assert len(grounds(segments(heatmap(matrix(5, mask=rg.causal)))[1])) == 1

    def test_numbers_stand_out_from_their_ground(self):
        for ink, ground in (
            (s.style.color.triplet, s.style.bgcolor.triplet)
            for line in segments(heatmap([[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]], values=".1f"))
            for s in line
            if s.style and s.style.bgcolor is not None and s.text.strip()
        ):
            assert abs(lightness(ink) - lightness(ground)) > 0.3

    @pytest.mark.parametrize("how", [{"no_color": True}, {"color_system": "standard"}, {"color_system": None}])
    def test_shades_where_there_are_no_colours(self, how):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, **{"color_system": "truecolor", **how})
        console.print(heatmap([[0.0, 1.0]]))
        assert "██" in console.file.getvalue()

    @pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}])
    def test_shades_where_the_environment_asks_for_them(self, environment):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ=environment)
        console.print(heatmap([[0.0, 1.0]]))
        assert "██" in console.file.getvalue()

    def test_columns_that_do_not_fit_are_counted(self):
        found = plain(heatmap(torch.eye(30), columns=["x"] * 30), width=40)
        assert max(map(cell_len, found)) <= 40
        assert found[31].strip() == "+ 12 columns that do not fit"

    def test_what_it_refuses(self):
        x = torch.zeros(1, 2, 200, 1)
        with pytest.raises(ValueError, match="choose a batch row and a head first"):
            heatmap(rg.attention(x, x))
        with pytest.raises(ValueError, match="200 x 200 is too large"):
            heatmap(rg.attention(x, x)[0, 1])
        with pytest.raises(ValueError, match="rows: expected 2 labels, found 3"):
            heatmap(torch.eye(2), rows="abc")
        with pytest.raises(ValueError, match="two axes"):
            heatmap(torch.zeros(2, 2, 2))


class TestColours:
    def test_lightness_rises_all_the_way(self):
        steps = [lightness(colour(n / 64)) for n in range(65)]
        assert all(a < b for a, b in pairwise(steps))

    def test_what_lies_outside_takes_the_end(self):
        assert colour(-1.0) == colour(0.0) and colour(2.0) == colour(1.0)

    def test_shades_rise_too(self):
        found = [SHADES.index(shade(n / 64)) for n in range(65)]
        assert found == sorted(found) and set(found) == set(range(len(SHADES)))


def lightness(rgb) -> float:
    """Relative luminance, 0 to 1."""
    parts = [c / 255 for c in rgb]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) ** (1 / 2.2)


class TestPooled:
    def test_two_rows_of_cells_a_line_with_their_colours(self):
        A = matrix(40)
        mean = A.heatmap(8).mean
        lines = segments(pooled(A, 8, scale="linear"))
        assert len(lines) == 1 + 4 + 1 + 2  # numbers, half the rows, the legend, the axes
        for pair in range(4):
            blocks = [s for s in lines[1 + pair] if s.text == "▀"]
            upper = [tuple(s.style.color.triplet) for s in blocks]
            lower = [tuple(s.style.bgcolor.triplet) for s in blocks]
            for row, found in ((2 * pair, upper), (2 * pair + 1, lower)):
                assert found == [colour(float(x / mean.max())) for x in mean[row]]

    def test_max_and_the_logarithmic_scale(self):
        A = matrix(40)
        peak = A.heatmap(8).max
        blocks = [s for s in segments(pooled(A, 8, what="max"))[1] if s.text == "▀"]
        shares = [max(0.0, 1 + math.log10(float(x / peak.max())) / 4) for x in peak[0]]
        assert [tuple(s.style.color.triplet) for s in blocks] == [colour(x) for x in shares]

    def test_what_no_pair_of_is_visible_is_a_dot(self):
        found = plain(pooled(matrix(40, mask=rg.causal), 8))
        assert [line.count(MASKED) for line in found[1:5]] == [6, 4, 2, 0]

    def test_an_odd_row_is_the_upper_half(self):
        last = segments(pooled(matrix(9), 3))[2]
        assert [s.text for s in last if s.text in "▀▄"] == ["▀"] * 3
        assert not grounds(last)

    def test_a_query_can_be_marked(self):
        assert plain(pooled(matrix(40), 8, mark=21))[3].startswith("21 ")

    def test_what_it_refuses(self):
        with pytest.raises(ValueError, match="what: expected 'mean' or 'max'"):
            pooled(matrix(4), what="median")
        with pytest.raises(ValueError, match="scale: expected"):
            pooled(matrix(4), scale="square")
        with pytest.raises(ValueError, match="choose a batch row and a head first"):
            pooled(rg.attention(*(torch.zeros(1, 2, 4, 1),) * 2))


class TestBars:
    def test_lengths_are_proportional(self):
        found = plain(bars([16.0, 8.0, 1.0], ["一", "two", "three"], width=16))
        assert found == ["   一 16 " + "█" * 16, "  two  8 " + "█" * 8, "three  1 █"]
        assert plain(bars([1.0, 0.25], width=2))[1] == "0.25 ▌"

    def test_negative_values_go_to_the_other_side(self):
        assert plain(bars([2.0, -1.0], ["a", "b"], width=6)) == ["a  2   ████", "b -1 ██"]

    def test_upright(self):
        found = plain(bars([2.0, 1.0, 0.25], ["a", "b", "c"], height=2))
        assert found == ["2 █", "0 █ █ ▂", "  a b c"]
        with pytest.raises(ValueError, match="negative"):
            bars([-1.0], height=2)

    def test_all_zero(self):
        assert plain(bars([0.0, 0.0], ["a", "b"])) == ["a 0", "b 0"]


class TestLayout:
    def test_beside_where_it_fits_and_below_where_it_does_not(self):
        maps = [heatmap(torch.eye(2), title=name) for name in ("left", "right")]
        wide, narrow = plain(beside(*maps), width=80), plain(beside(*maps), width=30)
        assert "left" in wide[0] and "right" in wide[0]
        assert "right" not in narrow[0] and any(line.startswith("right") for line in narrow)

    def test_a_table_aligns_numbers_to_the_right(self):
        assert plain(table(["n", "word"], [["1.5", "a"], ["-12", "你好"]]))[2:] == ["1.5   a", "-12   你好"]

    def test_a_title_is_not_markup(self):
        assert plain(table(["n"], [["1"]], title="A[i, j]"))[0] == "A[i, j]"
