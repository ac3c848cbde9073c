"""Time, memory and error of a case.

Time: ours and plain SDPA take turns, so that a drifting clock hits both, and each keeps its best. Peers follow, in
fewer rounds where they are slow. On a GPU plain SDPA and SDPA with a bias are tried in every backend, and the fastest
counts.
Memory: on CPU the high-water mark of a fresh process above what it had with its inputs; on a GPU the allocator's.
Error: against the definition in float64 on a small shape, beside plain PyTorch's in the same dtype.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import today
import torch
from cases import Case
from setting import Setting, Way
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: seconds: a timed sample lasts so long at the least, a race so long at the least and at the most, a peer's at the most
SAMPLE, LEAST, MOST, PEER = 0.02, 1.0, 12.0, 3.0
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def times(case: Case, mode: str, repeat: int, peers: set[str]) -> dict[str, dict[str, Any]]:
    """Milliseconds of each contender in one pass ("forward" or "training"), and their ratios to plain SDPA."""
    s = Setting(case)
    clock = Clock(s.device, repeat)
    with torch.set_grad_enabled(mode == "training"):
        base = _fastest(clock, _choices(s, s.plain(), mode))
        taken = clock.race({"plain": base.way, "ours": _pass(s, s.ours(), mode)})
        plain = taken.pop("plain")
        found = {"plain": figure(plain, plain, base.backend), "ours": figure(taken["ours"], plain)}
        for name, peer in today.ways(s).items():
            if name not in peers or (name == "ready" and mode == "training"):
                continue
            try:
                found[name] = _peer(s, clock, base, name, peer, mode)
            except Exception as error:  # whatever a peer raises is its answer
                found[name] = {"why": reason(error), "date": day()}
            _empty(s.device)
    return found


def _peer(s: Setting, clock: Clock, base: Choice, name: str, peer: Way | str, mode: str) -> dict[str, Any]:
    """A peer against plain SDPA, in a race of their own."""
    if isinstance(peer, str):
        return {"why": peer, "date": day()}
    if name == "flex":
        best = _first(s, mode)
    else:
        best = _fastest(clock, _choices(s, peer, mode)) if name in ("bias", "ready") else Choice(_pass(s, peer, mode))
    taken = clock.race({"plain": base.way, name: best.way}, PEER)
    return figure(taken[name], taken["plain"], best.backend)


def _pass(s: Setting, way: Way, mode: str) -> Way:
    return s.train(way) if mode == "training" else way


class Choice:
    """One way in one backend of SDPA."""

    def __init__(self, way: Way, backend: str = ""):
        self.backend = backend
        self._way = way

    def way(self) -> Any:
        with backend_of(self.backend):
            return self._way()


def _choices(s: Setting, way: Way, mode: str) -> list[Choice]:
    names = list(BACKENDS) if s.device.type == "cuda" else [""]
    return [Choice(_pass(s, way, mode), name) for name in names]


@contextlib.contextmanager
def backend_of(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    with sdpa_kernel([getattr(SDPBackend, BACKENDS[name])]):
        yield


def _first(s: Setting, mode: str) -> Choice:
    """FlexAttention with the first of its options that compiles."""
    import flex

    errors: list[Exception] = []
    for options in flex.OPTIONS:
        found = flex.way(s, options=options)
        assert not isinstance(found, str)
        choice = Choice(_pass(s, found, mode))
        try:
            choice.way()
            return choice
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _fastest(clock: Clock, choices: list[Choice]) -> Choice:
    """The fastest of the backends that take it."""
    if len(choices) == 1:
        return choices[0]
    taken, last = {}, None
    for choice in choices:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a backend that refuses warns why, and raises
                taken[choice] = clock.once(choice.way)
        except Exception as error:  # a backend refuses by raising
            last = error
    if not taken:
        raise RuntimeError(reason(last) if last else "no backend")
    return min(taken, key=lambda choice: taken[choice])


class Clock:
    """Times calls on a device, several at a time where one is short."""

    def __init__(self, device: torch.device, repeat: int):
        self.cuda, self.repeat = device.type == "cuda", repeat

    def race(self, ways: dict[str, Way], most: float = MOST) -> dict[str, float]:
        """Seconds of one call of each, the best of several rounds in which they take turns."""
        first = {name: self.once(way) for name, way in ways.items()}
        calls = {name: max(1, math.ceil(SAMPLE / seconds)) for name, seconds in first.items()}
        round_ = sum(first[name] * calls[name] for name in ways)
        best = dict(first)
        rounds = max(self.repeat, int(LEAST * self.repeat / 10 / round_))  # short calls are noisy, and cheap to repeat
        for _ in range(max(1, min(rounds, int(most / round_)))):
            for name, way in ways.items():
                best[name] = min(best[name], self.sample(way, calls[name]))
        return best

    def once(self, way: Way) -> float:
        """Seconds of one call, after a first one that compiles, allocates and warms up."""
        if self.sample(way, 1) < 1.0:
            self.sample(way, 1)
        return self.sample(way, 1)

    def sample(self, way: Way, calls: int) -> float:
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(calls):
                way()
            return (time.perf_counter() - began) / calls
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            way()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1000 / calls


def figure(seconds: float, plain: float, backend: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {"ms": round(seconds * 1000, 4), "ratio": round(seconds / plain, 3), "date": day()}
    return made | ({"backend": backend} if backend else {})


def day() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def reason(error: BaseException) -> str:
    """The first line of an error without paths, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return re.sub(r"\S*/\S+", "...", f"{type(error).__name__}: {lines[0]}")[:160]


# memory


def memory(case: Case, peers: set[str]) -> dict[str, dict[str, Any]]:
    """Peak MiB of each contender above its inputs, by pass and name."""
    measured: dict[str, dict[str, Any]] = {mode: {} for mode in case.passes}
    for name in ("plain", "ours", *sorted(peers)):
        found = _on_gpu(case, name) if case.device == "cuda" else _in_a_process(case, name)
        for mode, figures in found.items():
            measured[mode][name] = figures | {"date": day()}
    return measured


def _contender(s: Setting, name: str) -> Way | str | None:
    if name in ("plain", "ours"):
        return s.plain() if name == "plain" else s.ours()
    return today.ways(s).get(name)


def _modes(case: Case, name: str) -> list[str]:
    return [mode for mode in case.passes if (name, mode) != ("ready", "training")]


def peaks(case: Case, name: str) -> dict[str, dict[str, Any]]:
    """One call of one contender in each pass: its peak above what was there before. On CPU, for a fresh process."""
    tiny = Setting(case.small(128))
    s = Setting(case)
    way, small = _contender(s, name), _contender(tiny, name)
    if way is None or isinstance(way, str):
        return {mode: {"why": way} for mode in _modes(case, name)} if way else {}
    for mode in _modes(case, name):  # the libraries' own buffers, and whatever is loaded at first use
        if callable(small):
            with torch.set_grad_enabled(mode == "training"):
                _pass(tiny, small, mode)()
    before, found = _high_water(reset=True), {}
    for mode in _modes(case, name):
        with torch.set_grad_enabled(mode == "training"):
            _high_water(reset=True)
            _pass(s, way, mode)()
            found[mode] = {"MiB": round(_high_water() - before, 1)}
    return found


def _in_a_process(case: Case, name: str) -> dict[str, dict[str, Any]]:
    asked = json.dumps({"case": asdict(case), "name": name})
    done = subprocess.run([sys.executable, str(Path(__file__)), asked], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {mode: {"why": re.sub(r"\S*/\S+", "...", last)[:160]} for mode in _modes(case, name)}
    return json.loads(done.stdout.splitlines()[-1])


def _high_water(reset: bool = False) -> float:
    """The most MiB this process has had resident, since its start or (on Linux) since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def _on_gpu(case: Case, name: str) -> dict[str, dict[str, Any]]:
    s = Setting(case)
    way = _contender(s, name)
    if way is None or isinstance(way, str):
        return {mode: {"why": way} for mode in _modes(case, name)} if way else {}
    found = {}
    for mode in _modes(case, name):
        least, last = math.inf, ""
        choices = _choices(s, way, mode) if name in ("plain", "bias", "ready") else [Choice(_pass(s, way, mode))]
        with torch.set_grad_enabled(mode == "training"):
            for choice in choices:  # the least of the backends: a user may choose it for its memory
                try:
                    least = min(least, _allocated((_first(s, mode) if name == "flex" else choice).way))
                except Exception as error:
                    last = reason(error)
                _empty(s.device)
        found[mode] = {"MiB": round(least, 1)} if least < math.inf else {"why": last}
    return found


def _allocated(way: Way) -> float:
    way()  # compiled, tuned, and what it keeps is kept
    torch.cuda.synchronize()
    _empty(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# error


def errors(case: Case, length: int = 384) -> dict[str, dict[str, float]]:
    """Largest error of ours and of plain PyTorch in the same dtype, against float64, on a small shape."""
    s = Setting(case.small(length))
    exact = double(s)
    modes = ("forward",) if case.asks else case.passes
    found = {}
    for mode in modes:
        with torch.set_grad_enabled(mode == "training"):
            each = [
                tensors(_pass(x, x.ours(e), mode)()) for x, e in ((s, None), (s, "reference"), (exact, "reference"))
            ]
        ours, plain = (max(_distance(a, b) for a, b in zip(x, each[2], strict=True)) for x in each[:2])
        found[mode] = {"ours": ours, "plain": plain}
    return found


def double(s: Setting) -> Setting:
    """The same numbers, held in float64."""
    exact = copy.copy(s)
    exact.dtype = torch.float64
    for name in ("q", "k", "v", "d_out"):
        setattr(exact, name, getattr(s, name).detach().double().requires_grad_(name != "d_out"))
    exact.position = None if s.position is None else copy.deepcopy(s.position).double()
    return exact


def tensors(result: Any) -> list[Tensor]:
    """The real tensors of a result, in order: indices among equals may differ and are left out."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in tensors(part)]
    return []


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).abs().max())


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["case"] = {k: tuple(v) if isinstance(v, list) else v for k, v in given["case"].items()}
    print(json.dumps(peaks(Case(**given["case"]), given["name"])))
