"""The lessons' routes: what is served, what is refused, and streams that run alone and stop when nobody reads."""

from __future__ import annotations

import itertools
import json
import threading

import httpx
import pytest
from asking import until

pytest.importorskip("uvicorn", reason="needs the explorer's extra (pip install 'regard[explore]')")

from regard.lessons import PARTS, pages, softmax
from regard.views.server import Server
from regard.views.server.lessons import QUESTION


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    origin = server.url.rstrip("/")
    with httpx.Client(base_url=server.url, headers={"Origin": origin}, timeout=60, trust_env=False) as client:
        yield client


def test_pages_are_served_for_lessons_there_are(http):
    for path in ("/lessons", *(f"/lessons/{name}" for name in PARTS)):
        answer = http.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    missing = http.get("/lessons/nothing")
    assert missing.status_code == 404 and "no lesson 'nothing'" in missing.json()["error"]


def test_a_lesson_and_the_list_are_what_the_package_says(http):
    assert http.get("/api/lessons?lang=zh").json() == pages.listed("zh")
    assert http.get("/api/lesson/lookup?lang=zh").json() == json.loads(json.dumps(pages.told("lookup", "zh")))
    assert http.get("/api/lesson/nothing").status_code == 404
    wrong = http.get("/api/lesson/lookup?lang=fr")
    assert wrong.status_code == 400 and "language: expected one of en, zh, found 'fr'" in wrong.json()["error"]


def test_a_picture_is_computed_for_its_inputs(http):
    answer = http.post("/api/lesson/softmax/play", json={"logits": [1, 2, 3]})
    assert answer.json()["weights"] == softmax.play(logits=[1, 2, 3])["weights"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"factor": 99}', "factor: expected a number from 0 to 5, found 99"),
        (b'{"nonsense": 1}', "inputs: softmax takes logits, factor, dim, found 'nonsense'"),
        (b'{"language": "zh"}', "inputs: softmax takes"),
        (b"[1]", "body: expected an object"),
        (b"{", "body: expected JSON"),
        (b'{"factor": "' + b"9" * QUESTION + b'"}', "body: more than 65,536 bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, body, said):
    answer = http.post("/api/lesson/softmax/play", content=body)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_only_the_own_page_may_ask(server):
    body = {"logits": [1, 2, 3]}
    for headers in ({}, {"Origin": "http://elsewhere.example"}):
        answer = httpx.post(server.url + "api/lesson/softmax/play", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 403


def test_a_stream_comes_state_by_state_and_alone(http, server, monkeypatch):
    """The stream waits after its first state, so it is under way when another is asked for."""
    go = threading.Event()

    def stream(count: int = 3):
        yield {"state": 0}
        go.wait(60)
        yield from ({"state": n} for n in range(1, count))

    monkeypatch.setattr(softmax, "stream", stream, raising=False)
    with http.stream("POST", "/api/lesson/softmax/stream", json={"count": 4}) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"state": 0}
        second = http.post("/api/lesson/softmax/stream", json={})
        assert "only one runs at a time" in json.loads(second.text)["error"]
        go.set()
        assert [json.loads(line)["state"] for line in lines] == [1, 2, 3]
    wrong = http.post("/api/lesson/softmax/stream", json={"nonsense": 1})
    assert wrong.status_code == 400 and "inputs: softmax takes count" in wrong.json()["error"]


def test_a_stream_that_nobody_reads_stops(http, monkeypatch):
    ended, told = threading.Event(), []

    def stream():
        try:
            for n in itertools.count():
                told.append(n)
                yield {"state": n, "much": "x" * 1000}
        finally:
            ended.set()

    monkeypatch.setattr(softmax, "stream", stream, raising=False)
    with http.stream("POST", "/api/lesson/softmax/stream", json={}) as answer:
        next(answer.iter_lines())
    assert ended.wait(60), "it went on without a reader"
    monkeypatch.setattr(softmax, "stream", lambda: (each for each in [{"state": "free"}]), raising=False)
    until(lambda: "free" in http.post("/api/lesson/softmax/stream", json={}).text)


def test_what_goes_wrong_in_a_stream_is_a_line_of_it(http, monkeypatch):
    def stream(count: int = 1):
        if count > 0:
            raise ValueError(f"count: expected 0, found {count}")
        yield {}

    monkeypatch.setattr(softmax, "stream", stream, raising=False)
    answer = http.post("/api/lesson/softmax/stream", json={"count": 2})
    assert json.loads(answer.text) == {"error": "count: expected 0, found 2"}

    def broken():
        yield {"state": 0}
        raise RuntimeError("a bug")

    monkeypatch.setattr(softmax, "stream", broken, raising=False)
    lines = http.post("/api/lesson/softmax/stream", json={}).text.splitlines()
    assert [json.loads(line) for line in lines] == [{"state": 0}, {"error": "the server failed: RuntimeError"}]
    for _ in range(50):  # and the next one may run at once, whatever has become of this
        assert '"state": 0' in http.post("/api/lesson/softmax/stream", json={}).text
