"""The lessons: the mission's numbers come out of the computations, and stand in the printed text, in both languages."""

from __future__ import annotations

import io
import math
import re
import string
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import regard as rg
from regard.lessons import (
    LANGUAGES,
    PARTS,
    cache,
    drawing,
    grid,
    learning,
    line,
    lookup,
    matrix,
    page,
    picture,
    scores,
    sentence,
    softmax,
    tour,
    vectors,
)

WIDTH = 100


def printed(language: str, only: str | None = None, width: int = WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    tour.show(console, language, only)
    return console.file.getvalue()


@pytest.fixture(scope="module", params=LANGUAGES)
def text(request) -> str:
    return printed(request.param)


def digits(values, places: int) -> list[float]:
    return [round(x, places) + 0.0 for x in values]


# The numbers, as computed


def test_look_up():
    found = {name: look.result for name, look in lookup.looks().items()}
    assert digits(found.values(), 4) == [45.5, 45.0769, 45.4656, 44.7110, 48.0, 41.375]
    assert list(map(lookup.as_fraction, lookup.look("inverse").weights)) == ["1/13", "6/13", "6/13"]
    assert lookup.look("inverse", 56.0).result == 43.0
    weights, answers = lookup.many()
    assert len(weights) == len(lookup.QUERIES) and round(answers[-1], 4) == 45.0769


def test_learning_lowers_the_loss_and_sharpens_a():
    states = learning.train()
    losses, entropies = [s.loss for s in states], [s.entropy for s in states]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.01 < 1.0 < losses[0]
    assert entropies == sorted(entropies, reverse=True)
    for character, row in zip(learning.CHARACTERS, states[-1].weights, strict=True):
        assert learning.ENGLISH[row.index(max(row))] == learning.MEANING[character] and max(row) > 0.95


def test_dot_products():
    assert [p.dot for p in scores.against(scores.KING, scores.AGAINST_KING)] == [14, -14, 6]
    assert digits((p.cosine for p in scores.against(scores.KING, scores.AGAINST_KING)), 4) == [1.0, -1.0, 0.9258]
    assert digits((p.dot for p in scores.against(scores.INVITE, scores.AGAINST_INVITE)), 4) == [0.53, 0.66, 0.40]


def test_softmax_of_the_row():
    assert digits(softmax.softmax(), 4) == [0.0055, 0.0000, 0.9943, 0.0002]


def test_a_gaussian_is_a_dot_product_and_a_bias():
    assert scores.rewrite() <= 4 * torch.finfo(torch.float64).eps


def test_scaling_keeps_entropy_and_gradient():
    sizes = [softmax.scaling(dim) for dim in softmax.DIMS]
    assert round(math.sqrt(sizes[-1].dim), 1) == 22.6
    for s in sizes:
        # 64 x 64 dots of 64 + 64 independent vectors: the spread is known to a few percent
        assert s.spread == pytest.approx(math.sqrt(s.dim), rel=0.1)
    raw, scaled = ([s.entropy[how] for s in sizes] for how in ("raw", "scaled"))
    assert raw == sorted(raw, reverse=True) and raw[-1] < 0.1 * scaled[-1]
    assert sizes[-1].gradient["raw"] < 0.05 * sizes[-1].gradient["scaled"]
    assert max(scaled) < 1.1 * min(scaled)


def test_scaling_measures_the_gradient_of_the_logits():
    """Against plain PyTorch: the gradient of softmax(logits) v in the logits."""
    q = vectors.draw("queries 8", 1, softmax.SAMPLE, 1, 8)[0, :, 0]
    k, v = vectors.draw("keys 8", 1, 1, softmax.SAMPLE, 8)[0, 0], vectors.draw("values", 1, 1, softmax.SAMPLE, 1)[0, 0]
    logits = (q @ k.T).requires_grad_()
    (logits.softmax(-1) @ v).sum().backward()
    assert f"{softmax.scaling(8).gradient['raw']:.3f}" == f"{float(logits.grad.norm(dim=-1).median()):.3f}"


def test_the_pipeline_has_the_shapes_of_its_sizes():
    steps = {s.symbol: s for s in matrix.pipeline().steps}
    tokens, heads = len(matrix.TOKENS), matrix.HEADS
    assert (tokens, matrix.DIM, matrix.V_DIM) == (3, 4, 5)
    assert steps["Q"].shape == steps["K"].shape == (heads, 3, 4)
    assert steps["A"].shape == (heads, 3, 3) and steps["A V"].shape == (heads, 3, 5)
    assert steps["concat"].shape == (3, heads * 5) and steps["Y"].shape == steps["X"].shape
    assert steps["X"].row == pytest.approx([a + b for a, b in zip(steps["E"].row, steps["P"].row, strict=True)])
    assert steps["÷ √d_k"].row == pytest.approx([x / 2 for x in steps["Q Kᵀ"].row])
    assert steps["mask"].row[2] == -math.inf and steps["A"].row[2] == 0
    assert matrix.pipeline().sums == pytest.approx([1.0] * 6)


def test_direction():
    shape, back, away, differences = matrix.direction()
    assert shape == back[::-1] == (3, 5) and away > 0.1
    assert [round(d, 12) == 0 for d in differences.values()] == [True, True, True, False]


def test_a_row_needs_its_own_query_and_all_keys():
    by_query, by_key = matrix.dependence()
    assert by_query == 0 and by_key > 0.01


def test_score_pairs_and_decoding():
    assert cache.LENGTH == 16
    assert cache.count() == (1496, 816, 136)
    decoding = cache.decode()
    assert decoding.right <= 1e-12 and decoding.misplaced > 0.1
    assert cache.future().causal == 0 and cache.future().unmasked > 0.01


def test_the_rule_two_to_the_right():
    rule = line.rule()
    ones = [(i + 1, j + 1) for i, row in enumerate(rule.score) for j, x in enumerate(row) if x]
    assert ones == [(1, 3), (2, 4), (3, 5), (4, 6)]
    for i in range(4):
        assert digits(rule.soft[i], 4) == [0.3522 if j == i + 2 else 0.1296 for j in range(6)]
    assert rule.soft[4] == rule.soft[5] == pytest.approx([1 / 6] * 6)
    assert rule.hard == rule.score and [any(row) for row in rule.visible] == [True] * 4 + [False] * 2
    assert rule.profile == [4.0 if d == -2 else 0.0 for d in range(-5, 6)]
    assert rule.toeplitz["hard"] == 1 > rule.toeplitz["soft"] > rule.toeplitz["content"]


F = [[2, 0.5, -1.5, -1], [0.5, 2, 0.5, -1.5], [-1.5, 0.5, 2, 0.5], [-1, -1.5, 0.5, 2]]


def test_relative_features():
    delta, R, f = line.features()
    assert delta == list(range(-3, 4)) and (len(R), len(R[0])) == (7, 4)
    assert digits(f, 12) == [-1, -1.5, 0.5, 2, 0.5, -1.5, -1]
    assert [digits(row, 12) for row in line.static()] == F
    assert [digits(row, 12) for row in line.from_content([line.READOUT] * 4)] == F
    assert [digits(row, 12) for row in line.from_content([line.READOUT] * 4, "key")] == F
    by_query, by_key = line.from_content(line.MIXED), line.from_content(line.MIXED, "key")
    assert digits(by_query[0], 12) == F[0] != digits(by_key[0], 12)


def test_four_parts_add_up_and_the_last_is_f():
    parts = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in line.four_parts().items()}
    whole = parts.pop("sum")
    torch.testing.assert_close(torch.stack(list(parts.values())).sum(0), whole)
    assert [digits(row, 12) for row in parts["position-position"].tolist()] == F


def test_grids():
    sizes = grid.sizes()
    assert sizes.line_shape == (6, 6) and sizes.grid_shape == (36, 36)
    assert math.prod(sizes.line_shape) == 36 and math.prod(sizes.grid_shape) == 1296
    i, j = grid.CELL
    assert sizes.row[i][j] == max(map(max, sizes.row))  # the query's own cell is the brightest
    found = grid.neighbour()
    assert found.places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert found.grid == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert found.flat == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert found.profile == [[0] * 5, [0, 4, 0, 0, 0], [0] * 5]
    assert {k.name: (k.numbers, k.shape) for k in grid.kinds()} == {
        "swin": (15, (6, 6)),  # (2·2-1)(2·3-1) displacements
        "sam": (32, (6, 6)),  # 3 + 5 vectors of 4
        "beit": (18, (7, 7)),  # three more, for the class token
        "video": (45, (12, 12)),
        "layout": (1, (4, 4)),
    }


def test_the_sentence():
    assert (len(sentence.SENTENCE), len(sentence.SENTENCE.encode())) == (12, 36)
    found = sentence.matrices()
    content, biased, causal = (found[name] for name in ("content", "position", "causal"))
    assert biased.self_share() > content.self_share()
    assert all(round(sum(row), 12) == 1 for row in causal.dense().tolist())
    assert torch.triu(causal.dense(), 1).abs().max() == 0
    bias = (biased.logits.dense() - content.logits.dense())[0]
    assert digits(bias[:8].tolist(), 9) == [round(sentence.FALL * d, 9) for d in range(8)]
    for row, weights in zip(sentence.rows(causal), causal.dense().tolist(), strict=True):
        best = max(range(12), key=weights.__getitem__)
        assert row.keys[0] == (sentence.SENTENCE[best], pytest.approx(weights[best]))


def test_vectors_depend_on_the_character_alone():
    a, b = vectors.embed("沈阳", 8), vectors.embed("阳沈", 8)
    assert torch.equal(a, b.flip(0)) and not torch.equal(a[0], a[1])
    torch.manual_seed(1)
    assert torch.equal(a, vectors.embed("沈阳", 8))


# The numbers, as printed

MISSION = """
    45.5 45.0769 45.4656 44.7110 48.0 41.375 1/13 6/13 14 -14 6 0.9258 0.53 0.66 0.4 0.0055 0.9943 0.0002 22.6
    1496 816 136 0.3522 0.1296 1/6 (1,3) (2,4) (3,5) (4,6) -1.500 2.000 0.500 -1.000 36 1296 (3,4) 12
    1→(0,0) 6→(1,2) (1,2) (2,3) (4,5) (5,6)
""".split()


@pytest.mark.parametrize("number", MISSION)
def test_the_tour_prints_the_missions_numbers(text, number):
    assert re.search(rf"(?<![\d.-]){re.escape(number)}(?![\d]|\.\d)", text)


def test_f_is_printed_row_by_row(text):
    for row in F:
        assert " ".join(f"{x:4.1f}" for x in row) in text


def test_the_sentence_is_printed_over_its_maps(text):
    assert text.count(sentence.SENTENCE) >= 4


def test_lines_fit(text):
    assert max(map(cell_len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_narrow_terminal_stacks_the_maps(language):
    lines = printed(language, "sentence", width=50).splitlines()
    assert max(map(cell_len, lines)) <= 50
    assert (
        max(line.count(sentence.SENTENCE) for line in lines)
        == 1
        < printed(language, "sentence").count(sentence.SENTENCE)
    )


def test_every_part_begins_with_what_it_shows(text):
    language = "zh" if "软查找" in text else "en"
    for number, part in enumerate(PARTS, 1):
        words = import_module(f"regard.lessons.{part}").WORDS[language]
        title = re.search(rf"^{number}  {re.escape(words['title'])} ─+\n\n(.+)$", text, re.M)
        assert title and words["shows"].startswith(title[1])


def test_the_same_every_time():
    assert printed("en") == printed("en")


def test_numbers_are_computed_when_shown(monkeypatch):
    monkeypatch.setattr(lookup, "VALUES", (40.0, 43.0, 68.0))
    assert "55.5" in printed("en", "lookup") and "45.5000" not in printed("en", "lookup")
    monkeypatch.setattr(cache, "LENGTH", 8)
    monkeypatch.setattr(cache, "data", lambda length=8: tuple(x[:, :, :length] for x in original()))
    monkeypatch.setattr(cache, "count", lambda length=8: count(length))
    assert " 204 " in printed("en", "cache")  # 1 + 4 + ... + 64


original, count = cache.data, cache.count


def test_only_one_part():
    found = printed("en", "cache")
    assert "KV cache" in found and "soft look-up" not in found
    with pytest.raises(ValueError, match="part: expected one of lookup, "):
        printed("en", "nothing")
    with pytest.raises(ValueError, match="language: expected one of en, zh"):
        printed("fr", "cache")


# The words


@pytest.mark.parametrize("part", [*PARTS, "tour"])
def test_both_languages_say_the_same_things(part):
    """The same sentences, with places for the same numbers."""
    words = import_module(f"regard.lessons.{part}").WORDS
    assert set(words) == set(LANGUAGES)
    places = {language: {key: fields(said) for key, said in words[language].items()} for language in words}
    assert places["en"] == places["zh"]
    foreign = {("tour", "shows"), ("tour", "which")}  # where the English page points to the Chinese one
    assert not any(re.search("[一-鿿]", s) for key, s in words["en"].items() if (part, key) not in foreign)


def fields(said: str) -> list[str]:
    return sorted({name for _, name, _, _ in string.Formatter().parse(said) if name})


@pytest.mark.parametrize("part", PARTS)
def test_sentences_hold_no_typed_in_decimals(part):
    """A number with a decimal point in the words would be typed in, not computed."""
    for words in import_module(f"regard.lessons.{part}").WORDS.values():
        for said in words.values():
            assert not re.search(r"\d\.\d", re.sub(r"\{[^}]*\}", "", said))


def test_lines_break_where_they_may():
    text = "查询（query）是我要找什么，键是每一项怎样介绍自己。用 `A[q, :]`，看一行。" * 3
    lines = [t.plain for t in page.broken(text, 30)]
    assert "".join(lines).replace(" ", "") == text.replace("`", "").replace(" ", "")
    assert all(cell_len(t) <= 30 for t in lines)
    assert not any(t[0] in page.CLOSING or t[-1] in page.OPENING for t in lines)
    code = page.broken("see `A[q, :]` there", 80)[0]
    assert code.plain == "see A[q, :] there"
    assert {code.plain[s.start : s.end] for s in code.spans if s.style == page.CODE} == {"A[q, :]"}


# Drawings and the picture


def test_the_board_shows_the_way_from_query_to_key():
    assert drawing.board((2, 3), (1, 0), (1, 1)).plain.splitlines() == [
        "┌──────┬──────┬──────┐",
        "│ 1    │ 2    │ 3    │",
        "├──────┼──────┼──────┤",
        "│ 4q ───►5k   │ 6    │",
        "└──────┴──────┴──────┘",
    ]
    assert "│ 7k ◄───8──────9q   │" in drawing.board((3, 3), (2, 2), (2, 0)).plain
    up = drawing.board((2, 2), (1, 1), (0, 0)).plain.splitlines()
    assert "▲" in up[1] and "└" in up[3]
    styles = {str(s.style) for s in drawing.board((2, 3), (1, 0), (1, 1)).spans}
    assert {drawing.QUERY, drawing.KEY} <= styles


def test_the_block_has_a_row_a_line():
    lines = drawing.block((6, 6), (2, 3), (2, 4)).plain.splitlines()
    assert len(lines) == 8 and "q_/k_" in lines[3]


def test_the_picture_links_to_nothing(tmp_path):
    target = tmp_path / "look.svg"
    assert picture.main([str(target)]) == 0
    svg = target.read_text(encoding="utf-8")
    assert len(svg.encode()) < 300_000
    assert re.findall(r"https?:", svg) == ["http:"] and 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert not re.search(r"url\(|@import|<script|<image|href", svg)
    assert all(f">{character}</text>" in svg for character in sentence.SENTENCE)
    assert picture.main([]) == 2


def test_the_picture_in_the_documents_is_such_a_picture():
    kept = Path(__file__).parents[2] / "docs" / "images" / "look.svg"
    svg = kept.read_text(encoding="utf-8")
    assert re.findall(r"https?:", svg) == ["http:"] and all(c in svg for c in sentence.SENTENCE)
    fresh = picture.svg(picture.scene())
    assert svg.splitlines()[0] == fresh.splitlines()[0]  # the same size: nothing was added to the scene since


def test_wide_characters_stand_in_the_middle_of_their_columns():
    svg = picture.svg(Text("a沈█"), width=4)
    assert f'<text x="{2 * picture.ACROSS}" y="14" text-anchor="middle"' in svg
    assert f'<rect x="{3 * picture.ACROSS}" y="0" width="{picture.ACROSS}" height="{picture.DOWN}"' in svg


def test_public_api_only():
    """Lessons and views reach A through the public names: nothing of a matrix that begins with an underscore."""
    root = Path(rg.__file__).parent
    for path in [*(root / "lessons").glob("*.py"), *(root / "views").glob("*.py")]:
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(?:A|M|long|soft|hard|rg|weights)\._[a-z]", source), path.name
        assert not re.search(r"from \.\.(?:engines|lower|plan|normal|description)", source), path.name
