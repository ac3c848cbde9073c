"""What the lessons' pictures show is what the API gives, and the mission's numbers are among it."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.lessons import LANGUAGES, errors, lookup, matrix, quiz, scores

# The soft look-up


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"way": "nearest"}, 45.5),
        ({"way": "inverse"}, 45.0769),
        ({"way": "gauss", "sigma": 2.0}, 45.4656),
        ({"way": "gauss", "sigma": 4.0}, 44.7110),
        ({"way": "dot"}, 48.0),
        ({"way": "upside_down"}, 41.375),
    ],
)
def test_look_up_plays_the_mission_s_numbers(given, answer):
    played = lookup.play(**given)
    assert round(played["result"], 4) == answer and played["results"][given["way"]] == played["result"]
    assert played["result"] == pytest.approx(sum(w * v for w, v in zip(played["weights"], lookup.VALUES, strict=True)))


def test_look_up_plays_fractions_and_an_exact_match():
    assert lookup.play()["fractions"] == ["1/13", "6/13", "6/13"]
    met = lookup.play(query=56.0)
    assert met["weights"] == [0.0, 1.0, 0.0] and met["result"] == 43.0
    assert lookup.play(way="upside_down")["farthest"] == 0


def test_look_up_plays_other_queries_and_values():
    played = lookup.play(query=53.0, way="gauss", sigma=3.0, values=[1.0, 2.0, 4.0])
    w = torch.tensor([math.exp(-((53.0 - key) ** 2) / 18) for key in lookup.KEYS])
    assert played["weights"] == pytest.approx((w / w.sum()).tolist())
    assert played["result"] == pytest.approx(float((w / w.sum()) @ torch.tensor([1.0, 2.0, 4.0])))
    at = played["places"].index(53.0)
    assert played["curve"][at] == pytest.approx(played["result"])
    assert lookup.play(way="nearest", nearest=3)["weights"] == lookup.play(way="inverse")["weights"]


# Scores


def test_scores_play_the_mission_s_numbers():
    king, invite = scores.play(data="king"), scores.play(data="invite")
    assert king["dots"] == [14, -14, 6] and [round(c, 4) for c in king["cosines"]] == [1.0, -1.0, 0.9258]
    assert [round(d, 2) for d in invite["dots"]] == [0.53, 0.66, 0.40] and invite["names"] == ["小", "沈", "阳"]
    plane = scores.play()
    assert [round(a) for a in plane["angles"]] == [0, 90, 180] and plane["reads"] == ["same", "right", "opposite"]
    assert king["reads"] == ["same", "opposite", "some"]


def test_scores_play_what_pytorch_gives():
    query, keys = [1.0, -2.0], [[0.5, 0.5], [3.0, 1.0], [-1.0, 2.0]]
    played = scores.play(query=query, keys=keys)
    q, k = torch.tensor(query, dtype=torch.float64), torch.tensor(keys, dtype=torch.float64)
    assert played["dots"] == pytest.approx((k @ q).tolist())
    assert played["cosines"] == pytest.approx(torch.cosine_similarity(k, q[None]).tolist())
    assert played["away"] == pytest.approx((k - q).norm(dim=-1).tolist())
    by = {each["name"]: each["weights"] for each in played["scores"]}
    assert by["Dot()"] == pytest.approx((k @ q / math.sqrt(2)).softmax(0).tolist())
    assert by["Euclidean(sigma=2.0)"] == pytest.approx((-(k - q).square().sum(-1) / 8).softmax(0).tolist())
    # the buttons put the first key in line with the query, at a right angle to it, opposite
    for name, cosine in (("same", 1.0), ("right", 0.0), ("opposite", -1.0)):
        turned = scores.play(query=query, keys=played["turned"][name])
        assert turned["cosines"][0] == pytest.approx(cosine, abs=1e-12) and turned["inputs"]["keys"][1:] == keys[1:]


def test_scores_say_their_costs_in_both_languages():
    for language in LANGUAGES:
        costs = [each["cost"] for each in scores.play(language=language)["scores"]]
        assert costs == [scores.WORDS[language][f"cost_{name}"] for name in scores.SCORES]


# The matrix


def test_the_matrix_plays_every_step():
    played = matrix.play()
    x, wq, wk, wv = (torch.tensor(played["inputs"][name]) for name in ("x", "w_q", "w_k", "w_v"))
    q, k, v = x @ wq, x @ wk, x @ wv
    logits = q @ k.T / 2 - 0.5 * (torch.arange(3)[:, None] - torch.arange(3)).abs()
    weights = logits.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).softmax(-1)
    assert played["shapes"]["y"] == "3 x 5" and played["shapes"]["q"] == "3 x 4"
    for name, expected in (
        ("q", q),
        ("v", v),
        ("scores", q @ k.T),
        ("logits", logits),
        ("weights", weights),
        ("y", weights @ v),
    ):
        torch.testing.assert_close(torch.tensor(played[name]), expected, rtol=1e-4, atol=1e-5)
    assert played["masked"][0][1] is None and played["sums"]["rows"] == pytest.approx([1, 1, 1])
    for i, j in ((1, 0), (2, 1), (0, 2)):
        assert sum(played["products"][i][j]) == pytest.approx(played["scores"][i][j])
        told = rg.attention(
            *(t.double()[None, None] for t in (q, k)),
            position=rg.Static(rg.Slope(), readout=torch.tensor([[0.5]])),
            mask=rg.causal,
        )
        told = told[0, 0].explain(i, j)
        assert played["weights"][i][j] == pytest.approx(told.weight, abs=1e-5) and played["lse"][i] == pytest.approx(
            told.lse, abs=1e-5
        )


def test_the_matrix_plays_other_sizes_and_parts_left_out():
    plain = matrix.play(dim=2, v_dim=1, scaled=False, position=False, mask="none")
    assert plain["shapes"]["q"] == "3 x 2" and plain["shapes"]["y"] == "3 x 1"
    assert plain["logits"] == plain["scores"] == plain["masked"] and plain["term"] == [[0.0] * 3] * 3
    torch.testing.assert_close(torch.tensor(plain["weights"]), torch.tensor(plain["scores"]).softmax(-1))


def test_the_matrix_plays_with_absolute_positions():
    """Pairs of cos and sin of place · 10000^(-2n/d), added to E."""
    played, plain = matrix.play(place=True), matrix.play()
    for t, row in enumerate(played["where"]):
        assert row == pytest.approx([math.cos(t), math.sin(t), math.cos(t / 100), math.sin(t / 100)], abs=1e-6)
    added = torch.tensor(plain["made"]) + torch.tensor(played["where"])
    torch.testing.assert_close(torch.tensor(played["made"]), added)
    torch.testing.assert_close(torch.tensor(played["q"]), added @ torch.tensor(played["inputs"]["w_q"]))


@pytest.mark.parametrize(("tie", "agree"), [("free", False), ("equal", True), ("double", True), ("symmetric", True)])
def test_the_matrix_plays_both_directions(tie, agree):
    played = matrix.play(tie=tie, mask="none", position=False)
    logits = torch.tensor(played["divided"])
    torch.testing.assert_close(torch.tensor(played["forth"]), logits.softmax(-1))
    torch.testing.assert_close(torch.tensor(played["back"]), logits.T.softmax(-1))
    assert (played["apart"] < 1e-9) is agree and (played["symmetric"] < 1e-9) is agree
    assert played["agree"] is agree


# Errors


@pytest.mark.parametrize("claim", errors.checks())
def test_every_claim_is_refuted_whatever_the_vectors(claim):
    for draws in (0, 1, 7) if claim in errors.DRAWN else (0,):
        played = errors.play(claim=claim, draws=draws)
        assert not played["holds"] and played["verdict"].startswith(errors.WORDS["en"]["no"])
        wide = len(played["evidence"]["header"])
        assert played["evidence"]["rows"] and all(len(row) == wide for row in played["evidence"]["rows"])


def test_the_evidence_is_what_was_checked():
    assert "verdict" not in errors.play()
    softmax = errors.play(claim="softmax", language="zh")
    assert [row[1] for row in softmax["evidence"]["rows"]] == [0.05, None, 0.94, 0.01]
    assert [round(row[2], 4) for row in softmax["evidence"]["rows"]] == [0.0055, 0.0, 0.9943, 0.0002]
    assert softmax["verdict"].startswith(errors.WORDS["zh"]["no"])
    weight = errors.play(claim="weight")["evidence"]["rows"]
    assert [round(row[2], 4) for row in weight] == [0.75, 0.125, 0.125] and [row[1] for row in weight] == [6, 1, 1]
    one, other = (errors.play(claim="column", draws=n)["evidence"]["rows"] for n in (0, 1))
    assert one != other and one[0][1] == pytest.approx(one[1][1]) and other[0][1] == pytest.approx(other[1][1])


# The quiz


def test_the_quiz_tells_only_what_was_answered():
    fresh = quiz.play()
    assert len(fresh["questions"]) == 8 and not any("answer" in each for each in fresh["questions"])
    answers = [quiz.RIGHT["rnn"], 2, quiz.THOUGHT, 0, 0, 0, 0, 0]
    for language in LANGUAGES:
        played = quiz.play(answers=answers, language=language)
        assert ["answer" in each for each in played["questions"]] == [True] * 3 + [False] * 5
        assert (played["score"], played["chosen"]) == (1, 2)
        assert "14" in played["questions"][1]["answer"] and played["questions"][1]["right"] == quiz.RIGHT["dot"]
    right = [quiz.RIGHT[name] for name in quiz.QUESTIONS]
    assert quiz.play(answers=right)["score"] == 8 and len(set(right)) == quiz.OPTIONS


def test_every_question_has_its_options():
    for words in quiz.WORDS.values():
        for name in quiz.QUESTIONS:
            assert len({words[f"play_option_{name}_{n + 1}"] for n in range(quiz.OPTIONS)}) == quiz.OPTIONS
