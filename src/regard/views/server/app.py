"""The explorer's HTTP answers. Every computation goes through the queue (work.py); see safety.py for what is refused.

A tile is binary, little-endian: eight uint32 (magic, version, rows, columns, flags, cell, first row, first column),
then float32 means and maxima of its cells, NaN where nothing is visible. Flags: 1 exact, 2 maxima are there, 4 the
first column follows once more, means and maxima, without the first key (tiles of column 0).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from ..atlas import KINDS, TILE, Atlas, Tile
from ..pools import Cancelled
from . import answers, images, sources
from .lessons import Lessons
from .maps import Maps
from .safety import Guard
from .sources import Sources
from .work import Cache, Stop, Work

MAGIC, VERSION = 0x52474152, 1
EXACT, MAXIMA, FIRST = 1, 2, 4
#: bytes of tiles that are kept; of a JSON body; labels told at a time
TILES, BODY, LABELS = 128 << 20, 8 << 20, 1 << 16
#: seconds between two looks at how far the passes are, for those who listen
BEAT = 0.3
WEB = Path(__file__).parents[1] / "web"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


class Explorer:
    """The application, with what it holds."""

    def __init__(self, held: Sources | None = None, *, workers: int = 2, tiles: int = TILES):
        self.sources = held or Sources()
        self.work = Work(workers)
        self.maps = Maps(self.sources, self.work)
        self.tiles = Cache(tiles)
        self.port = 0
        self.web = {path.name: path for path in WEB.iterdir() if path.suffix in TYPES} if WEB.is_dir() else {}
        one = "/{source}/{look:int}/{head:int}"
        routes = [
            Route("/", self.page), Route("/web/{name}", self.file),
            Route("/api/sources", self.list), Route("/api/record", self.record, methods=["POST"]),
            Route("/api/upload", self.upload, methods=["POST"]), Route("/api/source/{source}", self.source),
            Route("/api/labels/{source}/{look:int}", self.labels), Route("/api/overview/{source}", self.overview),
            Route("/api/map" + one, self.map), Route("/api/tile" + one, self.tile),
            Route("/api/rowmax" + one, self.peaks), Route("/api/cell" + one, self.cell),
            Route("/api/row" + one, self.row), Route("/api/column" + one, self.column),
            Route("/api/weights" + one, self.weights), Route("/api/profile" + one, self.profile),
            Route("/api/grid" + one, self.grid), Route("/api/image/{source}/{look:int}", self.image),
            Route("/api/events", self.events),
        ]  # fmt: skip
        routes += Lessons(self.work, self._compute, self._file, _json, answer).routes
        handlers: dict[Any, Callable] = {
            KeyError: _not_there, ValueError: _wrong, IndexError: _wrong, Cancelled: _gone, ClientDisconnect: _gone,
            404: _unknown, 405: _unknown, Exception: _failed,
        }  # fmt: skip
        self.inner = Starlette(routes=routes, exception_handlers=handlers)
        self.app = Guard(self.inner, lambda: self.port)

    def close(self) -> None:
        self.work.close()
        self.sources.close()

    # Pages

    async def page(self, request: Request) -> Response:
        return await self._file("index.html")

    async def file(self, request: Request) -> Response:
        return await self._file(request.path_params["name"])

    async def _file(self, name: str) -> Response:
        path = self.web.get(name)  # only names that were listed when the server began
        if path is None:
            raise KeyError(f"file: no file {name!r:.60} here")
        return FileResponse(path, media_type=TYPES[path.suffix])

    # Sources

    async def list(self, request: Request) -> Response:
        found = await run_in_threadpool(self.sources.told)
        return answer({"models": sources.models(), "sources": found, "limits": self.sources.limits})

    async def source(self, request: Request) -> Response:
        source = self.sources[request.path_params["source"]]
        told = await run_in_threadpool(source.told)
        prepared = self.maps.prepared(source.id)
        return answer({**told, "prepared": prepared, "labels": await run_in_threadpool(source.labels)})

    async def record(self, request: Request) -> Response:
        given = await _json(request, BODY)
        model, text = given.get("model"), given.get("text")
        names = [each["name"] for each in sources.models()]
        if model not in names:
            raise ValueError(f"model: expected one of {', '.join(names)}, found {model!r:.60}")
        most = self.sources.limits["text"]
        if not isinstance(text, str) or not text.strip() or len(text) > most:
            raise ValueError(f"text: expected a text of at most {most:,} characters")
        short = " ".join(text.split())
        shown = short if len(short) <= 40 else f"{short[:39]}…"
        source = self.sources.new(f"{shown} · {model}", model)
        self._make(source, lambda: sources.read(model, text))
        return answer({"id": source.id})

    async def upload(self, request: Request) -> Response:
        most, size = self.sources.limits["upload"], 0
        told = request.headers.get("content-length", "")
        if told.isdigit() and int(told) > most:
            return answer({"error": f"upload: {int(told):,} bytes, expected at most {most:,}"}, 413)
        name = os.path.basename(request.query_params.get("name", "").replace("\\", "/"))[:80] or "upload"
        source = self.sources.new(name, "file")
        path = self.sources.folder / f"{source.id}.upload"
        try:
            with path.open("wb") as file:
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise ValueError(f"upload: more than {most:,} bytes, which is the most there may be")
                    await run_in_threadpool(file.write, part)
        except (ValueError, ClientDisconnect) as error:
            path.unlink(missing_ok=True)
            source.state, source.error = "failed", str(error) or "upload: it ended before its end"
            if isinstance(error, ValueError):
                return answer({"error": str(error)}, 413)
            raise
        self._make(source, lambda: sources.opened(path, name))
        return answer({"id": source.id})

    def _make(self, source: sources.Source, how: Callable[[], Any]) -> None:
        """Fill a source by way of the queue; its client asks for it until it is ready."""

        def make(stop: Stop) -> None:
            self.sources.make(source, how)
            self.maps.begin(source.id)

        self.work.join(("make", source.id), make)

    async def labels(self, request: Request) -> Response:
        seen = self.maps.seen(request.path_params["source"], request.path_params["look"])
        side = request.query_params.get("side", "q")
        if side not in ("q", "k"):
            raise ValueError(f"side: expected 'q' or 'k', found {side!r:.20}")
        first, count = _whole(request, "from", 0), min(_whole(request, "count", 4096), LABELS)
        if first < 0 or count < 0:
            raise ValueError(f"from, count: expected numbers from 0 on, found {first} and {count}")
        found = await run_in_threadpool(seen.labels, side)
        return answer({"labels": None if found is None else found[first : first + count]})

    # Maps

    async def overview(self, request: Request) -> Response:
        number = request.path_params["source"]
        source = self.sources[number]
        if source.state != "ready":
            raise ValueError(f"source: {number} is {source.state}, expected ready")
        return answer(await self._compute(request, ("overview", number), lambda stop: self.maps.small(number, stop)))

    async def map(self, request: Request) -> Response:
        atlas = await self._atlas(request)
        pools = atlas.weights
        smallest = pools.smallest if pools.smallest < float("inf") else 0.0
        told = {
            "q_len": atlas.q_len, "k_len": atlas.k_len, "levels": atlas.levels, "tile": TILE, "base": atlas.base,
            "progress": pools.progress, "exact": pools.exact, "range": {"max": pools.largest, "min_positive": smallest},
            "passes": {what: atlas.pools(what).progress for what in KINDS if what in atlas.begun},
        }  # fmt: skip
        return answer(told)

    async def tile(self, request: Request) -> Response:
        at, atlas = _at(request), await self._atlas(request)
        cell, row, col = (_whole(request, name) for name in ("cell", "row", "col"))
        what = request.query_params.get("what", "weights")
        first = request.query_params.get("first", "1") != "0"
        key = ("tile", *at, what, cell, row, col, first)
        found = self.tiles.get(key)
        if found is None:
            found, exact = await self._compute(
                request, key, lambda stop: packed(atlas, cell, row, col, what, first, stop)
            )
            if exact:
                self.tiles.put(key, found)
            elif not atlas.finished:
                self.work.follow(atlas)
        exact = bool(struct.unpack_from("<I", found, 16)[0] & EXACT)
        return _binary(found, exact)

    async def peaks(self, request: Request) -> Response:
        at, atlas, cell = _at(request), await self._atlas(request), _whole(request, "cell", 1)
        *found, exact = await self._compute(request, ("peaks", *at, cell), lambda stop: atlas.peaks(cell, stop))
        return _binary(b"".join(_bytes(x) for x in found), exact)

    # One head

    async def cell(self, request: Request) -> Response:
        at, atlas, seen, i, j = await self._one(request, "i", "j")
        head = at[2]
        return answer(await self._compute(
            request, ("cell", *at, i, j), lambda stop: answers.cell(atlas, seen, head, i, j, stop)
        ))  # fmt: skip

    async def row(self, request: Request) -> Response:
        at, atlas, _, i = await self._one(request, "i")
        top = _whole(request, "top", 16)
        return answer(await self._compute(request, ("row", *at, i, top), lambda stop: answers.row(atlas, i, top)))

    async def column(self, request: Request) -> Response:
        at, atlas, _, j = await self._one(request, "j")
        top = _whole(request, "top", 16)
        return answer(await self._compute(request, ("column", *at, j, top), lambda stop: answers.column(atlas, j, top)))

    async def weights(self, request: Request) -> Response:
        at, atlas, _, i = await self._one(request, "i")
        first, asked = _whole(request, "from", 0), request.query_params
        count, cells = (_whole(request, name) if name in asked else None for name in ("count", "cells"))
        key = ("weights", *at, i, first, count, cells)
        found = await self._compute(request, key, lambda stop: answers.weights(atlas, i, first, count, cells, stop))
        return _binary(_bytes(found), True)

    async def profile(self, request: Request) -> Response:
        at, atlas = _at(request), await self._atlas(request)

        def compute(stop: Stop) -> dict[str, Any]:
            atlas.weights.sample(stop)
            if atlas.exact:  # only the sums are left: soon done
                atlas.sums.ensure(slice(0, atlas.q_len), stop)
            atlas.sums.sample(stop)
            return answers.profile(atlas, self.maps.shares(at, atlas, stop))

        return answer(await self._compute(request, ("profile", *at), compute))

    async def grid(self, request: Request) -> Response:
        at, atlas, seen, i = await self._one(request, "i")
        return answer(await self._compute(request, ("grid", *at, i), lambda stop: answers.grid(atlas, seen, i, stop)))

    async def image(self, request: Request) -> Response:
        seen = self.maps.seen(request.path_params["source"], request.path_params["look"])
        if seen.image is None:
            raise KeyError(f"image: source {request.path_params['source']} has none")
        return _binary(images.packed(seen.image), True)

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._beats(request), media_type="text/event-stream")

    async def _beats(self, request: Request) -> AsyncIterator[str]:
        """How far each open map is, whenever it has moved."""
        last: dict[str, float] = {}
        yield "retry: 1000\n\n"
        while not await request.is_disconnected():
            for key, atlas in self.maps.listed():
                name, progress = "/".join(map(str, key)), round(atlas.progress, 4)
                if last.get(name) != progress:
                    last[name] = progress
                    yield f"data: {json.dumps({'map': name, 'progress': progress})}\n\n"
            await asyncio.sleep(BEAT)

    # How it does it

    async def _atlas(self, request: Request) -> Atlas:
        return await run_in_threadpool(self.maps.open, *_at(request))

    async def _one(self, request: Request, *names: str) -> Any:
        at, atlas = _at(request), await self._atlas(request)
        return (at, atlas, self.maps.seen(*at[:2]), *(_whole(request, name) for name in names))

    async def _compute(self, request: Request, key: tuple, how: Callable[[Stop], Any]) -> Any:
        """Have the queue compute something, unless the client goes away."""
        job = self.work.join(key, how)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            return await self.work.wait(job, gone)
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def packed(atlas: Atlas, cell: int, row: int, col: int, what: str, first: bool, stop: Stop) -> tuple[bytes, bool]:
    """A tile as bytes, with its first column once more without the first key; and whether it is exact."""
    tile = atlas.tile(cell, row, col, what=what, first=first, stop=stop)
    parts = [tile.mean, tile.max]
    flags = MAXIMA | (EXACT if tile.exact else 0)
    if first and col == 0:
        rest = atlas.first_column(tile, what, stop)
        parts += rest
        flags |= FIRST
    head = struct.pack("<8I", MAGIC, VERSION, *tile.mean.shape, flags, tile.cell, tile.row, tile.col)
    return head + b"".join(_bytes(x) for x in parts), tile.exact


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().astype("<f4", copy=False).tobytes()


def _at(request: Request) -> tuple[str, int, int]:
    given = request.path_params
    return given["source"], given["look"], given["head"]


def _whole(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit() or len(text) > 12:
        raise ValueError(f"{name}: expected a whole number, found {text!r:.40}")
    return int(text)


async def _json(request: Request, most: int) -> dict[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ValueError(f"body: more than {most:,} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("body: expected JSON, found something else") from None
    if not isinstance(found, dict):
        raise ValueError(f"body: expected an object, found {type(found).__name__}")
    return found


def answer(told: Any, status: int = 200) -> Response:
    text = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, media_type="application/json")


def _binary(found: bytes, exact: bool) -> Response:
    state = {"X-Regard-State": "exact" if exact else "sample"}
    return Response(found, media_type="application/octet-stream", headers=state)


async def _not_there(request: Request, error: Exception) -> Response:
    return answer({"error": str(error.args[0] if error.args else error)}, 404)


async def _wrong(request: Request, error: Exception) -> Response:
    return answer({"error": str(error)}, 400)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unknown(request: Request, error: Any) -> Response:
    return answer({"error": f"{request.url.path!r:.80}: {error.detail}"}, error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return answer({"error": f"the server failed: {type(error).__name__}"}, 500)


__all__ = ["Explorer", "Tile", "packed"]
