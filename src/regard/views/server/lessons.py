"""The explorer's lessons: their pages, their words, and what their pictures show for what a reader puts in.

Lessons lie above views, so they are asked for by name (`above.lessons`), when someone opens one. A lesson's words are
computed once a language and kept; what its picture shows is computed for every question, by the queue that serves the
maps too: the newest first, and dropped when nobody waits. A stream, which takes seconds, runs alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ... import above
from ..pools import Cancelled
from .work import Stop, Work

#: bytes of a question to a picture
QUESTION = 64 << 10
#: seconds after which a state that nobody takes asks whether anybody still waits
BEAT = 0.2
#: said to a second reader who lets a model learn
BUSY = {
    "en": "stream: another one is running, and only one runs at a time",
    "zh": "另一个训练正在进行，一次只能有一个",
}

Compute = Callable[[Request, tuple, Callable[[Stop], Any]], Awaitable[Any]]
Read = Callable[[Request, int], Awaitable[dict[str, Any]]]
Tell = Callable[..., Response]


class Lessons:
    """The routes under /lessons and /api/lesson."""

    def __init__(
        self, work: Work, compute: Compute, file: Callable[[str], Awaitable[Response]], read: Read, tell: Tell
    ):
        self.work, self.compute, self.file, self.read, self.tell = work, compute, file, read, tell
        self._told: dict[tuple[str, str], dict[str, Any]] = {}
        self._streaming = threading.Lock()

    @property
    def routes(self) -> list[Route]:
        one = "/api/lesson/{name}"
        return [
            Route("/lessons", self.page), Route("/lessons/{name}", self.page), Route("/api/lessons", self.list),
            Route(one, self.lesson), Route(one + "/play", self.play, methods=["POST"]),
            Route(one + "/stream", self.stream, methods=["POST"]),
        ]  # fmt: skip

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None and name not in above.lessons().PARTS:
            raise KeyError(f"lesson: no lesson {name!r:.60} here")
        return await self.file("lessons.html")

    async def list(self, request: Request) -> Response:
        return self.tell(above.lessons().listed(_language(request)))

    async def lesson(self, request: Request) -> Response:
        key = (request.path_params["name"], _language(request))
        if key not in self._told:
            self._told[key] = await self.compute(request, ("lesson", *key), lambda stop: above.lessons().told(*key))
        return self.tell(self._told[key])

    async def play(self, request: Request) -> Response:
        name, inputs, language = await self._asked(request)
        key = ("play", name, language, json.dumps(inputs, sort_keys=True))
        found = await self.compute(request, key, lambda stop: above.lessons().play(name, inputs, language))
        return self.tell(found)

    async def stream(self, request: Request) -> Response:
        name, inputs, language = await self._asked(request)
        states = above.lessons().stream(name, inputs, language)
        return StreamingResponse(self._lines(states, language), media_type="application/x-ndjson")

    async def _lines(self, states: Generator[dict[str, Any], None, None], language: str) -> AsyncIterator[str]:
        """A state a line, as it comes; what went wrong is a line too. It ends when the reader goes away."""
        if not self._streaming.acquire(blocking=False):
            yield _line({"error": BUSY[language]})
            return
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)  # nothing is computed far ahead of its reader
        begun: list[bool] = []

        def put(state: dict[str, Any] | None, stop: Stop) -> None:
            held = asyncio.run_coroutine_threadsafe(queue.put(state), loop)
            while not concurrent.futures.wait([held], BEAT).done:
                if stop():
                    held.cancel()
                    raise Cancelled

        def run(stop: Stop) -> None:
            begun.append(True)
            last: dict[str, Any] | None = None
            failed: Exception | None = None
            try:
                for state in states:
                    put(state, stop)
                    if stop():
                        raise Cancelled
            except Cancelled:
                raise
            except (ValueError, KeyError) as error:
                last = {"error": str(error.args[0] if error.args else error)}
            except Exception as error:
                last, failed = {"error": f"the server failed: {type(error).__name__}"}, error
            finally:
                states.close()
                self._streaming.release()
            put(last, stop)  # who has this may ask for the next one at once
            if failed is not None:
                raise failed

        job = self.work.join(("stream", id(states)), run)
        try:
            while (state := await queue.get()) is not None:
                yield _line(state)
                if "error" in state:
                    break
                await asyncio.sleep(0)  # or a reader who has gone is not noticed while states come quickly
        finally:
            self.work.leave(job)
            if job.future.cancelled() and not begun:
                self._streaming.release()

    async def _asked(self, request: Request) -> tuple[str, dict[str, Any], str]:
        return request.path_params["name"], await self.read(request, QUESTION), _language(request)


def _language(request: Request) -> str:
    return request.query_params.get("lang", "en")


def _line(state: dict[str, Any]) -> str:
    return json.dumps(state, ensure_ascii=False, allow_nan=False) + "\n"
