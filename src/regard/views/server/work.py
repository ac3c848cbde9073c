"""Who computes what, and when: one queue for all clients, newest request first, passes over whole maps behind it.

Each worker is one thread that computes with one core: two of them share the two cores better than one operation on
both. A pass that a device computes goes `alone` and leaves the other worker to who waits. Requests with the same key
are one computation, however many wait for it. What nobody waits for any more is not begun, and what runs is told to
stop. Results that stay true are kept, up to a number of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from ..pools import Cancelled

log = logging.getLogger("regard")

Stop = Callable[[], bool]


class Pass(Protocol):
    """Something that is done step by step while nobody waits for anything else. If `alone`, one at a time."""

    @property
    def alone(self) -> bool: ...

    def step(self) -> bool: ...


class Job:
    """One computation, and how many wait for it."""

    def __init__(self, key: Hashable, compute: Callable[[Stop], Any]):
        self.key, self.compute, self.waiting = key, compute, 0
        self.future: Future = Future()

    def abandoned(self) -> bool:
        return self.waiting <= 0


class Cache:
    """Bytes by key, those least recently asked for forgotten first."""

    def __init__(self, most: int):
        self.most, self.size = most, 0
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> bytes | None:
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: Hashable, value: bytes) -> None:
        with self._lock:
            self.size += len(value) - len(self._held.pop(key, b""))
            self._held[key] = value
            while self.size > self.most and self._held:
                self.size -= len(self._held.popitem(last=False)[1])

    def forget(self, about: Callable[[Hashable], bool]) -> None:
        """Drop what belongs to something that is gone."""
        with self._lock:
            for key in [key for key in self._held if about(key)]:
                self.size -= len(self._held.pop(key))


class Work:
    """The queue and its workers."""

    def __init__(self, workers: int = 2):
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()  # that wait to be begun; the last is the newest
        self._running: dict[Hashable, Job] = {}
        self._passes: list[Pass] = []  # the last is the most recently asked for
        self._ready = threading.Condition()
        self._closed = self._taken = False  # taken: a pass that goes alone is under way
        self.begun = self.dropped = 0  # computations that were begun, and that nobody waited for any more
        self._threads_before = torch.get_num_threads()
        self._workers = [threading.Thread(target=self._work, name=f"regard {n}", daemon=True) for n in range(workers)]
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._passes.clear()
            for job in (*self._jobs.values(), *self._running.values()):
                job.waiting = 0
            self._ready.notify_all()
        for worker in self._workers:
            worker.join()
        torch.set_num_threads(self._threads_before)

    def join(self, key: Hashable, compute: Callable[[Stop], Any]) -> Job:
        """Wait for a computation: the one of this key that is under way, or a new one before all others."""
        with self._ready:
            job = self._running.get(key) or self._jobs.pop(key, None)
            if job is None or (job.key in self._running and job.abandoned()):  # told to stop: too late to join
                job = Job(key, compute)
            if self._running.get(key) is not job:
                self._jobs[key] = job
                self._ready.notify()
            job.waiting += 1
            return job

    def leave(self, job: Job) -> None:
        """Wait no more. What nobody waits for is not begun."""
        with self._ready:
            job.waiting -= 1
            if job.abandoned() and self._jobs.get(job.key) is job:
                del self._jobs[job.key]
                self.dropped += 1
                job.future.cancel()

    async def wait(self, job: Job, gone: asyncio.Future | asyncio.Task) -> Any:
        """The result of a job that was joined; Cancelled if the client went away first."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future = loop.create_future()

        def tell(done: Future) -> None:
            def deliver() -> None:
                if not result.done():
                    result.set_result(None)

            with contextlib.suppress(RuntimeError):  # the server has stopped, and nobody waits
                loop.call_soon_threadsafe(deliver)

        job.future.add_done_callback(tell)
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done() or job.future.cancelled():
                raise Cancelled
            return job.future.result()
        finally:
            self.leave(job)

    def follow(self, each: Pass) -> None:
        """Do a pass when there is time, before those that were asked for earlier."""
        with self._ready:
            self._passes = [other for other in self._passes if other is not each] + [each]
            self._ready.notify_all()

    def unfollow(self, each: Pass) -> None:
        with self._ready:
            self._passes = [other for other in self._passes if other is not each]

    def _work(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self._ready:
                each = self._next()
                while not self._jobs and each is None and not self._closed:
                    self._ready.wait()
                    each = self._next()
                if self._closed:
                    return
                job = self._jobs.popitem()[1] if self._jobs else None
                if job is not None:
                    self._running[job.key] = job
                    self.begun += 1
                alone = job is None and each is not None and each.alone  # it may not be by the end of its step
                self._taken |= alone
            if job is not None:
                self._run(job)
            elif each is not None:
                self._advance(each, alone)

    def _next(self) -> Pass | None:
        """The pass that was asked for last, of those that may go on."""
        return next((each for each in reversed(self._passes) if not (each.alone and self._taken)), None)

    def _run(self, job: Job) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.compute(job.abandoned)
        except Cancelled as found:
            error = found
        except Exception as found:
            error = found
            if not isinstance(found, (ValueError, IndexError, KeyError)):
                log.exception("explorer: %s", job.key)
        with self._ready:
            if self._running.get(job.key) is job:
                del self._running[job.key]
            self.dropped += isinstance(error, Cancelled)
        if error is None:
            job.future.set_result(result)
        elif isinstance(error, Cancelled):
            job.future.cancel()
            job.future.set_running_or_notify_cancel()
        else:
            job.future.set_exception(error)

    def _advance(self, each: Pass, alone: bool) -> None:
        try:
            more = each.step()
        except Exception:
            log.exception("explorer: a pass over a map failed")
            more = False
        with self._ready:
            if alone:
                self._taken = False
            self._ready.notify_all()  # others may go on now that it does not go alone
        if not more:
            self.unfollow(each)
