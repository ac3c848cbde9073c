"""What the explorer's server refuses: other hosts and sites, other files, bodies without end, wrong questions."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from asking import MAP

from regard.views.server.safety import refused


def test_only_the_loopback_address_listens(asked):
    assert asked.server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_other_names_for_this_host_are_refused(asked, host):
    answer = asked.http.get("/api/sources", headers={"Host": host})
    assert answer.status_code in (400, 403) and (answer.status_code == 400 or "Host" in answer.json()["error"])


def test_our_own_names_are_taken(asked):
    for name in ("localhost", "127.0.0.1", "[::1]"):
        answer = asked.http.get("/api/sources", headers={"Host": f"{name}:{asked.server.port}"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_sites_pages_are_refused(asked, headers):
    for method, path in (("GET", "/api/sources"), ("POST", "/api/record")):
        answer = asked.http.request(method, path, headers=headers, json={"model": "tiny", "text": "x"})
        assert answer.status_code == 403 and "error" in answer.json()


def test_a_post_must_say_where_it_comes_from(asked):
    port = asked.server.port
    with httpx.Client(base_url=asked.server.url, trust_env=False) as plain:
        before = len(asked.json("/api/sources")["sources"])
        assert plain.post("/api/record", json={"model": "tiny", "text": "x"}).status_code == 403
        assert plain.post("/api/upload?name=x", content=b"x").status_code == 403
        assert len(asked.json("/api/sources")["sources"]) == before
        assert plain.get("/api/sources").status_code == 200
    host = {"host": f"localhost:{port}"}
    assert refused("POST", {**host, "sec-fetch-site": "same-origin"}, port) is None
    assert refused("PUT", host, port) is not None and refused("GET", {}, port) is not None


@pytest.mark.parametrize(
    "path",
    ["/web/..%2f..%2fatlas.py", "/web/%2e%2e/atlas.py", "/web/../server/app.py", "/web//etc/passwd", "/web/map.js%00",
     "/api/source/..%2f..", "/api/source/%2fetc%2fpasswd", "/etc/passwd"],
)  # fmt: skip
def test_no_path_reaches_the_file_system(asked, path):
    sent = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{asked.server.port}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", asked.server.port)) as plain:
        plain.sendall(sent.encode())
        answer = b""
        while part := plain.recv(65536):
            answer += part
    assert answer.split()[1] in (b"404", b"400"), answer[:200]
    assert b"import" not in answer and b"root:" not in answer


def test_uploads_are_bounded(asked, monkeypatch):
    kept = set(asked.server.explorer.sources.folder.iterdir())
    monkeypatch.setitem(asked.server.explorer.sources.limits, "upload", 1000)
    assert asked.http.post("/api/upload?name=x", content=bytes(2000)).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(100)

    assert asked.http.post("/api/upload?name=x", content=endless()).status_code == 413
    assert set(asked.server.explorer.sources.folder.iterdir()) == kept  # nothing of them stays


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/source/99", 404, "source: no source"), ("/api/map/1/9/0", 404, "look: expected"),
        ("/api/map/1/0/9", 404, "head: expected one of [0, 1], found 9"),
        (f"/api/tile{MAP}?cell=1&row=0", 400, "col: expected"), (f"/api/tile{MAP}?cell=x&row=0&col=0", 400, "cell"),
        (f"/api/tile{MAP}?cell=1&row=9&col=0", 400, "row: expected a tile from 0 to 1"),
        (f"/api/tile{MAP}?cell=1&row=0&col=0&what=lies", 400, "what: expected one of weights, logits"),
        (f"/api/cell{MAP}?i=0&j=9999", 400, "j: expected a number from 0 to 419"),
        (f"/api/row{MAP}?i=0&top=0", 400, "top"),
        (f"/api/grid{MAP}?i=0", 400, "grid"), ("/api/labels/1/0?side=z", 400, "side"), ("/api/nothing", 404, "nothing"),
        (f"/api/weights{MAP}?i=99999999999999999999", 400, "i: expected a whole number"),
    ],
)  # fmt: skip
def test_wrong_questions_are_answered_with_a_sentence(asked, path, status, says):
    assert says in asked.json(path, status)["error"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": "tiny"}', b'{"model": "tiny", "text": "  "}', b"[" * 100000]
)
def test_wrong_bodies_are_answered_with_a_sentence(asked, body):
    answer = asked.http.post("/api/record", content=body)
    assert answer.status_code == 400 and ":" in answer.json()["error"]
