"""What traces say of all heads at once: statistics, rollout, comparison. Each against the same by hand, dense."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from descriptions import cases
from hypothesis import HealthCheck, given, settings
from support import Largest
from torch import nn

import regard as rg
from regard.trace import Trace, record, statistics
from regard.trace.shares import Shares, applies

COLUMNS = ["self", "previous", "induction", "first", "toeplitz", "entropy", "spread"]


@pytest.fixture(scope="module")
def tiny():
    return rg.models.load("tiny")


@torch.no_grad()
def traced(tiny, text: str, **how) -> Trace:
    with record(tiny.model, tokenizer=tiny.tokenizer, **how) as trace:
        tiny.model(torch.tensor([tiny.tokenizer.encode(text)]))
    return trace


@pytest.fixture(scope="module")
def trace(tiny):
    return traced(tiny, "the cat sat on the mat, the cat sat")


def test_statistics_are_those_of_each_A(trace):
    table = trace.statistics()
    assert len(table) == 48 and [row["layer"] for row in table] == sorted(row["layer"] for row in table)
    ids = trace.tokens()
    for row in (table[0], table[21], table[47]):
        A = trace[row["layer"], row["head"]]
        found = {
            "self": A.self_share(), "previous": A.previous_share(), "first": A.first_key_share(),
            "induction": A.induction_share(ids), "toeplitz": A.toeplitz_share(), "entropy": A.entropy().mean(),
        }  # fmt: skip
        for name, x in found.items():
            assert row[name] == pytest.approx(float(x), abs=1e-6), name
        seen = torch.arange(1, len(ids[0]) + 1).log()
        assert row["spread"] == pytest.approx(float((A.entropy()[1:] / seen[1:]).mean()), abs=1e-6)


def test_statistics_are_plain_data_and_a_readable_table(trace):
    table = trace.statistics(progress=False)
    assert json.loads(json.dumps(table.rows)) == table.rows
    lines = str(table).splitlines()
    assert len(lines) == 49 and lines[0].split() == ["layer", "head", "stack", "kind", "does", *COLUMNS]
    assert lines[1].split()[:4] == ["0", "0", "decoder", "self"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(geometries=("line",)))
def test_shares_of_few_pairs_are_those_of_a_whole_pass(case):
    """Whatever the terms, masks and starts: the pairs that are read say what the summaries say."""
    with torch.no_grad():
        A = replace(case, dropout=0.0).build(torch.float64).matrix()
        if not applies(A):
            return
        batch, _, q_len, k_len = A.shape
        ids = torch.arange(q_len).remainder(3).expand(batch, -1)
        real = torch.arange(q_len).remainder(4).ne(1).expand(batch, -1)
        only = rg.dense(real[:, None, :, None])
        few = Shares(A, real)
        found = [*few.near(0, 1), few.first(), few.room().expand(A.shape[:3])]
        start = A._description.k_start
        first = rg.dense(torch.arange(k_len)[None] == 0) if isinstance(start, torch.Tensor) else rg.keys(start)
        pairs = [rg.offset(0), rg.offset(1), first]
        want = [*A.summarize(*(rg.Share(mask & only) for mask in pairs)), A.summarize(statistics.Room())[0]]
        if q_len == k_len:
            found.append(few.induction(ids))
            want.append(A.share(rg.induction(ids) & only if same_place(A) else in_order(ids) & only))
        if A._description.sink is not None:
            found.append(Shares(A).sink())
            want.append(A.sink_share())
        for row in range(batch):  # the same of one row of the batch
            alone = Shares(A[row : row + 1], real[row : row + 1], row)
            found += [*alone.near(0, 1), alone.room().expand(1, *A.shape[1:3])]
            want += [x[row : row + 1] for x in (want[0], want[1], want[3])]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def same_place(A: rg.AttentionMatrix) -> bool:
    d = A._description
    return isinstance(d.q_start, int) and d.q_start == d.k_start


def in_order(ids: torch.Tensor) -> rg.masks.Mask:
    """Induction by index rather than by place: for queries and keys that begin at different places."""
    before = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], dim=1)
    pairs = ids[:, :, None] == before[:, None, :]
    return rg.dense((pairs & torch.ones_like(pairs).tril())[:, None])


def test_the_heads_that_are_known_have_their_names(trace):
    does = {(row["layer"], row["head"]): row["does"] for row in trace.statistics()}
    assert does[1, 3] == "previous token" and does[2, 0] == "induction" and does[3, 1] == "self"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"previous": 0.6, "self": 0.3, "spread": 0.5}, "previous token"),
        ({"previous": 0.55, "self": 0.6, "spread": 0.5}, "self"),
        ({"induction": 0.45, "spread": 0.9}, "induction"),
        ({"first": 0.5, "spread": 0.2}, "first key"),
        ({"sink": 0.7, "first": 0.6, "spread": 0.2}, "sink"),
        ({"toeplitz": 0.9, "spread": 0.95}, "wide"),
        ({"toeplitz": 0.5, "spread": 0.5}, "by distance"),
        ({"toeplitz": 0.1, "spread": 0.25}, "sharp"),
        ({"toeplitz": 0.1, "spread": 0.26, "self": 0.49, "induction": None}, "mixed"),
    ],
)
def test_words(numbers, expected):
    assert statistics.word(numbers) == expected


def test_progress_is_told(tiny):
    told = []
    traced(tiny, "the cat sat " * 40, layers=[0, 1]).statistics(progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] and len(told) > 3
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_without_a_token_that_comes_again_nothing_is_induced(tiny):
    assert all(row["induction"] is None for row in traced(tiny, "abcdef").statistics())


@torch.no_grad()
def test_padding_does_not_count():
    torch.manual_seed(0)
    model = rg.nn.Encoder(30, 16, 1, 2, position="t5").eval()
    short, pad = torch.randint(30, (1, 6)), torch.zeros(1, 3, dtype=torch.long)
    with record(model) as alone:
        model(short)
    with record(model) as padded:
        model(torch.cat([short, pad], dim=1), lengths=[6])
    for a, b in zip(alone.statistics(), padded.statistics(), strict=True):
        for name in ("self", "previous", "first", "entropy", "spread"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name


@torch.no_grad()
def test_cross_attention_has_no_diagonal():
    encoder, decoder = rg.nn.Encoder(30, 16, 1, 2), rg.nn.Decoder(30, 16, 1, 2, memory_dim=16)
    model = rg.nn.EncoderDecoder(encoder, decoder).eval()
    with record(model) as trace:
        model(torch.randint(30, (1, 5)), torch.randint(30, (1, 5)))
    rows = trace.statistics().rows
    assert [(row["stack"], row["kind"]) for row in rows[::2]] == [
        ("encoder", "self"), ("decoder", "self"), ("decoder", "cross"),
    ]  # fmt: skip
    assert rows[-1]["self"] is None is rows[-1]["previous"] and rows[-1]["first"] > 0


# Rollout


def by_hand(trace: Trace) -> torch.Tensor:
    found = torch.eye(trace.looks[0].q_len)
    for look, A in trace:
        mean = A.dense()[0].mean(0)
        found = (mean + torch.eye(look.q_len)) / 2 @ found
    return found


def test_rollout_is_the_product_of_the_layers(trace):
    expected = by_hand(trace)
    torch.testing.assert_close(trace.rollout()[0], expected)
    torch.testing.assert_close(trace.rollout([4, 9, -1])[0], expected[[4, 9, -1]])
    assert torch.allclose(trace.rollout().sum(-1), torch.ones(()))


def test_rollout_goes_by_strips(trace, monkeypatch):
    monkeypatch.setattr("regard.trace.rollout.STRIP", 8 * 35 * 3)  # three rows at a time
    torch.testing.assert_close(trace.rollout()[0], by_hand(trace))


@torch.no_grad()
def test_rollout_of_a_long_text_by_rows():
    torch.manual_seed(0)
    model = rg.nn.Decoder(30, 16, 2, 2, position="t5").eval()
    tokens = torch.randint(30, (1, 5000))
    with record(model) as trace:
        model(tokens)
    with pytest.raises(ValueError, match=r"rollout: of all 5000 queries it would be 25,000,000 numbers; name some"):
        trace.rollout()
    with Largest() as seen:
        rows = trace.rollout([4999])
    assert seen.numbers <= 3 * (1 << 22) and rows.shape == (1, 1, 5000)
    one, two = (trace[n].block(slice(4999, 5000), slice(None))[0].mean(0)[0] for n in (0, 1))
    mean = torch.zeros(5000)
    for first in range(0, 5000, 500):
        mean += two[first : first + 500] @ trace[0].block(slice(first, first + 500), slice(None))[0].mean(0)
    last = torch.zeros(5000)
    last[-1] = 1
    torch.testing.assert_close(rows[0, 0], ((last + two) / 2 + (one + mean) / 2) / 2, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_a_sink_and_empty_rows_keep_rollout_whole():
    layer = rg.nn.Attention(8, 2, sink=True, mask=rg.window(-1, 2))  # the last query sees nothing
    layer.sink.fill_(1.0)
    model = nn.Sequential(layer)
    with record(model) as trace:
        model(torch.randn(1, 5, 8))
    found = trace.rollout()[0]
    assert torch.allclose(found.sum(-1), torch.ones(())) and found[-1, -1] == 1


def test_rollout_says_what_it_needs(tiny):
    with pytest.raises(ValueError, match=r"rollout: expected every layer from 0 on, found \[1, 2\]"):
        traced(tiny, "abc", layers=[1, 2]).rollout()


# Comparison


def test_comparison_is_the_distance_of_rows(trace, tiny, monkeypatch):
    other = traced(tiny, "the dog sat on the mat, the dog ran")
    monkeypatch.setattr("regard.trace.comparing.STRIP", 8 * 35 * 4)
    table = trace.compare(other)
    assert len(table) == 48
    for row in (table[0], table[30]):
        a, b = (t[row["layer"], row["head"]].dense().double() for t in (trace, other))
        apart = (a - b).abs().sum(-1) / 2
        middle = (a + b) / 2
        js = (torch.xlogy(a, a / middle).nan_to_num() + torch.xlogy(b, b / middle).nan_to_num()).sum(-1) / 2
        assert row["distance"] == pytest.approx(float(apart.mean()), abs=1e-7)
        assert (row["largest"], row["at"]) == (pytest.approx(float(apart.max())), int(apart.argmax()))
        assert row["divergence"] == pytest.approx(float(js.mean()), abs=1e-7)
    assert all(row["distance"] == 0 == row["divergence"] for row in trace.compare(trace))


@torch.no_grad()
def test_a_sink_counts_as_a_key():
    layer = rg.nn.Attention(8, 1, sink=True)
    model, x = nn.Sequential(layer), torch.randn(1, 4, 8)
    traces = []
    for sink in (-30.0, 30.0):
        layer.sink.fill_(sink)
        with record(model) as trace:
            model(x)
        traces.append(trace)
    assert traces[0].compare(traces[1])[0]["distance"] == pytest.approx(1.0, abs=1e-6)


def test_traces_of_other_shapes_are_refused_by_name(trace, tiny):
    with pytest.raises(ValueError, match=r"compare: layer 0 \(decoder, self\) has 1 rows, .* 35 x 35, .* 3 x 3"):
        trace.compare(traced(tiny, "abc"))
    with pytest.raises(ValueError, match=r"compare: layer 1 \(decoder, self\) is not in the other trace"):
        trace.compare(trace.only(layers=[0]))
    with pytest.raises(ValueError, match=r"compare: layer 1 \(decoder, self\) is not in this trace"):
        trace.only(layers=[0]).compare(trace)
