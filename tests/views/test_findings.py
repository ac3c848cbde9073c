"""Findings: links are what position, key and an even share do not explain; the words exist in both languages."""

from __future__ import annotations

import itertools
import math
import string

import pytest
import torch
from support import within_budget

import regard as rg
from regard.trace import record
from regard.trace.statistics import word
from regard.views import findings
from regard.views.findings import Seen, around, excess, gather, links_of, see, strongest, telling
from regard.views.layout import neighbours
from regard.views.words import DOES, WORDS, says


def matrix(weights: torch.Tensor, causal: bool = False) -> rg.AttentionMatrix:
    """A of several heads that has (nearly) these weights: [heads, n, n]."""
    logits = weights.clamp(min=1e-9).log()[None]
    n = logits.shape[-1]
    mask = rg.causal if causal else None
    return rg.attention(logits, torch.eye(n).expand(1, logits.shape[1], n, n), scale=1.0, mask=mask)[0]


def previous(n: int) -> torch.Tensor:
    """A head that looks at the token before, nearly always."""
    weights = torch.full((n, n), 0.1 / (n - 1))
    weights[1:] += 0.9 * torch.eye(n)[:-1]
    return weights / weights.sum(-1, keepdim=True)


def test_a_rule_that_holds_everywhere_makes_no_link():
    n = 24
    resting = torch.full((n, n), 0.2 / n)
    resting[:, 3] += 0.8
    seen = see(matrix(torch.stack([previous(n), resting, torch.full((n, n), 1 / n)])))
    over, _ = excess(seen)
    assert float(over.max()) < 0.12
    assert max(telling(seen)) < 0.05


def test_an_exception_to_the_rule_is_the_first_link():
    n = 24
    weights = previous(n)
    weights[17] = 0.2 / n
    weights[17, 5] += 0.8
    seen = see(matrix(torch.stack([previous(n), weights])))
    found = strongest(links_of(seen, layer=4, heads=(2, 7)))
    assert found[0][:2] == (17, 5) and (found[0].layer, found[0].head) == (4, 7)
    assert found[0].weight == pytest.approx(0.8 + 0.2 / n, abs=1e-4) and found[0].expected < 0.1
    assert telling(seen)[1] > telling(seen)[0]


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_expected_is_what_the_others_do(causal):
    """Against the definition, written with loops."""
    n = 9
    A = matrix(torch.rand(2, n, n), causal)
    dense = A.dense().double()
    seen = see(A)
    over, expected = excess(seen, avoid=[4])
    for h in range(2):
        for i in range(n):
            for t in range(findings.TOP):
                j = int(seen.keys[h, i, t])
                if j < 0 or j in (i, 4) or i == 4:
                    assert over[h, i, t] == -1
                    continue
                rows = [r for r in range(n) if r != i and (not causal or j <= r)]
                by_key = sum(float(dense[h, r, j]) for r in rows) / max(1, len(rows))
                pairs = [(r, r - i + j) for r in range(n) if r != i and 0 <= r - i + j < n]
                by_place = sum(float(dense[h, r, c]) for r, c in pairs) / max(1, len(pairs))
                want = max(by_key, by_place, 1 / (i + 1 if causal else n))
                assert float(expected[h, i, t]) == pytest.approx(want, abs=1e-5)
                assert float(over[h, i, t]) == pytest.approx(float(dense[h, i, j]) - want, abs=1e-5)


def test_one_pass_sees_what_the_matrix_gives():
    logits = torch.rand(3, 20, 20).log()
    A = matrix(logits.exp(), causal=True)
    seen = see(A)
    assert isinstance(seen, Seen) and seen.pairs == 210
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    plain, exact = (x.masked_fill(hidden, -torch.inf).softmax(-1) for x in (logits, logits.double()))
    within_budget(seen.pooled, plain, exact)  # no more than SMALL tokens: a cell each
    within_budget(seen.entropy.float(), *(torch.special.entr(x).sum(-1).mean(-1) for x in (plain, exact)))
    assert torch.equal(seen.keys[:, 5:], plain.topk(findings.TOP).indices[:, 5:])


@pytest.fixture(scope="module")
def found() -> findings.Findings:
    model, tokenizer = rg.models.load("tiny")
    text = "look it up, look it up. A soft look-up asks every key; every key answers the query."
    with record(model, tokenizer=tokenizer) as trace, torch.no_grad():
        model(torch.tensor([tokenizer.encode(text)]))
    return gather(trace, model="tiny", text=text)


def test_the_window_is_around_the_strongest_link(found):
    n = len(found.rows)
    assert found.window(n) == (slice(0, n), slice(0, n))
    first = found.anchor
    assert (first.layer, first.head) == found.shown
    for size in (4, 10, 30):
        rows, cols = found.window(size)
        assert rows.start <= first.query < rows.stop and cols.start <= first.key < cols.stop
        assert rows.stop - rows.start == cols.stop - cols.start == size


def test_a_head_without_links_has_a_window_too(found):
    bare = findings.Findings(**{**vars(found), "links": [], "anchor": None})
    rows, cols = bare.window(10)
    top = found.matrix.topk(1)
    query = int(top.weights[1:, 0].argmax()) + 1
    assert rows.start <= query < rows.stop and cols.start <= int(top.indices[query, 0]) < cols.stop


def test_the_shown_head_tells_most(found):
    assert found.of(*found.shown).telling == max(head.telling for head in found.heads)
    assert found.of(*found.shown).does == "induction"


def test_progress_ends_at_the_whole(found):
    model, tokenizer = rg.models.load("tiny")
    with record(model, tokenizer=tokenizer) as trace, torch.no_grad():
        model(torch.tensor([tokenizer.encode("some words")]))
    told: list[tuple[int, int]] = []
    gather(trace, model="tiny", report=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] and len({total for _, total in told}) == 1


def test_json_has_no_number_that_json_lacks():
    assert findings.number(math.nan) is None and findings.number(math.inf) is None
    assert findings.number(1 / 3) == 0.333333


def test_around():
    assert around(0, 5, 10) == slice(0, 5) and around(9, 5, 10) == slice(5, 10) and around(5, 4, 10) == slice(3, 7)
    assert around(1, 20, 10) == slice(0, 10)


@pytest.mark.parametrize(
    ("labels", "at", "width", "want"),
    [
        (list("abcdefgh"), 4, 5, ("cd", "e", "fg")),
        (list("abcdefgh"), 0, 5, ("", "a", "bcde")),
        (["小", "沈", "阳", "江"], 1, 6, ("小", "沈", "阳")),
        (["the", "cat", "sat", "##ting", "."], 2, 14, ("cat ", "sat", "##ting")),
        (["a", "\n", "b"], 1, 9, ("a", "\\n", "b")),
        (["a-very-long-word-indeed"], 0, 8, ("", "a-very-…", "")),
    ],
)
def test_neighbours(labels, at, width, want):
    assert neighbours(labels, at, width) == want


# Words


def test_both_languages_say_the_same_things():
    places = {
        language: {
            key: sorted({name for _, name, _, _ in string.Formatter().parse(said) if name})
            for key, said in words.items()
        }
        for language, words in WORDS.items()
    }
    assert places["en"] == places["zh"]
    with pytest.raises(ValueError, match="language: expected one of en, zh, found 'fr'"):
        says("fr")


@pytest.mark.parametrize("language", list(WORDS))
def test_every_kind_of_head_has_its_name(language):
    columns = ("self", "previous", "induction", "first", "sink", "toeplitz", "spread")
    words = {word(dict(zip(columns, values, strict=True))) for values in itertools.product((0.0, 0.5, 1.0), repeat=7)}
    assert set(DOES[language]) == words
    letters = [letter for letter, _ in DOES[language].values()]
    assert len(set(letters)) == len(letters)
