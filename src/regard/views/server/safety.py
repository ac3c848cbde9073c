"""What a server on one's own machine must refuse: other sites' pages, other names for this host, bodies without end.

A page from anywhere can make a browser ask 127.0.0.1. So a request must name this host and port in Host (a foreign name
that resolves to us is refused: DNS rebinding), and must come from our own page if it says where it comes from (Origin,
Sec-Fetch-Site). A POST must say so. Answers tell the browser to load nothing from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

NAMES = ("localhost", "127.0.0.1", "[::1]")

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "font-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application that only lets our own requests through to another."""

    def __init__(self, app: Callable, port: Callable[[], int]):
        self.app, self.port = app, port

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reason = refused(scope["method"], headers, self.port())
        if reason is not None:
            body = json.dumps({"error": reason}).encode()
            await send(
                {"type": "http.response.start", "status": 403, "headers": _raw({"content-type": "application/json"})}
            )
            await send({"type": "http.response.body", "body": body})
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_raw({})]}
            await send(message)

        await self.app(scope, receive, guarded)


def _raw(more: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in {**HEADERS, **more}.items()]


def refused(method: str, headers: dict[str, str], port: int) -> str | None:
    """Why a request is none of ours; None if it is."""
    ours = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set())
    host, origin, site = (headers.get(name) for name in ("host", "origin", "sec-fetch-site"))
    if host is None or host.lower() not in ours:
        return f"Host: expected localhost:{port}, found {host!r:.80}"
    if origin is not None and origin.lower() not in {f"http://{name}" for name in ours}:
        return f"Origin: expected this server's own page, found {origin!r:.80}"
    if site is not None and site not in ("same-origin", "none"):
        return f"Sec-Fetch-Site: expected same-origin, found {site!r:.80}"
    if method not in ("GET", "HEAD", "POST"):
        return f"method: expected GET, HEAD or POST, found {method!r:.20}"
    if method == "POST" and origin is None and site != "same-origin":
        return "Origin: a POST must say that it comes from this server's own page, found nothing"
    return None
