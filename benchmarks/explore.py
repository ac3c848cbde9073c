"""The explorer's server on one long head: first picture, exact overview, tiles, memory, and twenty clients at once.

    python benchmarks/explore.py [one|many] [--length 100000] [--seconds 60] [--out benchmarks/results]
    python benchmarks/explore.py one --device cuda --length 1000000      on a GPU; the figures go to explore-gpu

A is causal with a T5 bias, one head of 64 numbers, float32 (bfloat16 on a GPU), saved as a trace. The server runs in a
process of its own, opens the file, and is asked over HTTP on the loopback address by this process, on the same cores.

one   time of one forward pass (`A @ v`, both cores, best of two); then from the first request: the first picture, and
      when the overview is exact; then tiles at random places of every level, one at a time, none asked for twice. On a
      GPU there are two servers. The first is asked the moment it answers and has nothing compiled (Triton's cache is an
      empty folder): its figures are those of a cold machine. The second has the first one's kernels on disk, loads
      them when it opens the trace, and is asked after that, as the forward pass is timed after its first run
many  twenty clients, each with a window of its own, move for a minute: every move asks for the tiles that come into
      sight, and drops what is still on its way from before. How long tiles took, errors, and memory over time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

CLIENTS, HIGH, WIDE = 20, 3, 5  # tiles of a window of 1280 x 768
TARGETS = {
    "first picture, s": 2.0, "cold: first picture, s": 2.0, "exact overview / forward": 1.6,
    "tile p95, ms": 150.0, "memory, MiB": 1536.0, "errors": 0, "lost": 0, "many: p95, s": 1.5,
    "memory growth, MiB": 64.0,
}  # fmt: skip


def made(length: int, dim: int, device: str | None = None) -> Any:
    """A and v, on a device; in bfloat16 if it is a GPU."""
    import torch

    import regard as rg

    torch.manual_seed(0)
    kind = torch.float32 if device in (None, "cpu") else torch.bfloat16
    q, k, v = (torch.randn(1, 1, length, dim).to(device or "cpu", kind) for _ in range(3))
    position = rg.recipes.t5(heads=1)
    torch.nn.init.normal_(position.readout)
    position = position.requires_grad_(False).to(q.device)
    return rg.attention(q, k, position=position, mask=rg.causal), v


def forward(A: Any, v: Any) -> float:
    """Seconds of one product, the better of two; on a GPU the best of four, for the first compiles."""
    import torch

    times = []
    with torch.no_grad():
        for _ in range(2 if v.device.type == "cpu" else 4):
            began = time.perf_counter()
            A @ v
            if v.device.type != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return min(times)


def serve(path: str, device: str | None) -> None:
    """Be the server until standard input ends; then say what it took of the device."""
    import torch

    from regard.views.server import Server

    with Server(path, device=device) as server:
        print(server.port, flush=True)
        sys.stdin.read()
        taken = torch.cuda.max_memory_allocated() / 2**20 if device not in (None, "cpu") else 0.0
        print(json.dumps(taken), flush=True)


def bare(device: str) -> None:
    """What a process takes that does nothing but multiply two matrices on a device: PyTorch's own share, MiB."""
    import torch

    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    (x @ x).sum().item()
    print(json.dumps(resident("self", "VmHWM")))


def resident(process: int | str, what: str = "VmRSS") -> float:
    """MiB that are resident, or have been at the most (VmHWM)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(what)), 0) / 1024


class Client:
    """Keep-alive requests over one connection at a time: as light as can be, for it shares the server's cores."""

    def __init__(self, port: int):
        self.port, self.streams = port, None

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.streams is not None:
            try:
                return await self._get(path)
            except (OSError, EOFError):  # the server closed an idle connection: as browsers do, once more on a new one
                pass
        return await self._get(path)

    async def _get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        reader, writer = self.streams
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            return int(lines[0].split()[1]), headers, body
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up; what is still on its way is cancelled by that."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


class Running:
    """The server's process; `kernels` is where those that it compiles are kept."""

    def __init__(self, trace: Path, device: list[str], kernels: Path | None = None):
        command = [sys.executable, __file__, "--serve", str(trace), *device]
        where = os.environ | ({} if kernels is None else {"TRITON_CACHE_DIR": str(kernels)})
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.took = time.perf_counter() - began

    def memory(self, what: str = "VmRSS") -> float:
        return resident(self.process.pid, what)

    def close(self) -> float:
        """End it: MiB of the device that it took at the most."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        taken = json.loads(self.process.stdout.readline() or "0")
        self.process.wait(60)
        return taken


MAP = "1/0/0"


async def exact(client: Client, pause: float = 0.05) -> dict[str, Any]:
    """Until the overview is exact: what is said of the map."""
    while True:
        about = json.loads((await client.get(f"/api/map/{MAP}"))[2])
        if about["exact"]:
            return about
        await asyncio.sleep(pause)


async def prepared(port: int) -> float:
    """Seconds until a server has moved and loaded, or compiled, what its first map needs."""
    client, began = Client(port), time.perf_counter()
    while not json.loads((await client.get(f"/api/source/{MAP.split('/')[0]}"))[2])["prepared"]:
        await asyncio.sleep(0.01)
    client.close()
    return time.perf_counter() - began


async def overview(client: Client, pause: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the map, and seconds from the first request to the first picture and to the exact one."""
    began = time.perf_counter()
    about = json.loads((await client.get(f"/api/map/{MAP}"))[2])
    top = about["levels"][-1]
    status, headers, _ = await client.get(f"/api/tile/{MAP}?cell={top}&row=0&col=0")
    assert status == 200
    found = {"first picture, s": time.perf_counter() - began, "first picture is": headers["x-regard-state"]}
    about = await exact(client, pause)
    status, headers, _ = await client.get(f"/api/tile/{MAP}?cell={top}&row=0&col=0")
    assert status == 200 and headers["x-regard-state"] == "exact"
    return about, found | {"exact overview, s": time.perf_counter() - began}


async def cold(port: int) -> dict[str, Any]:
    """The same of a server that has to compile."""
    client = Client(port)
    _, found = await overview(client, 0.01)
    client.close()
    return {f"cold: {name}": x for name, x in found.items()}


async def one(port: int, tiles: int, pause: float) -> dict[str, Any]:
    client, chance = Client(port), random.Random(0)
    about, told = await overview(client, pause)
    found: dict[int, list[float]] = {}
    asked = set()
    while sum(map(len, found.values())) < tiles:
        cell = chance.choice(about["levels"])
        last = (about["q_len"] - 1) // (cell * about["tile"])
        row = chance.randint(0, last)
        at = cell, row, chance.randint(0, row)  # below the diagonal: above it there is nothing to compute
        if at in asked and last:
            continue
        asked.add(at)
        began = time.perf_counter()
        status, headers, body = await client.get(f"/api/tile/{MAP}?cell={at[0]}&row={at[1]}&col={at[2]}")
        found.setdefault(cell, []).append(1000 * (time.perf_counter() - began))
        assert status == 200 and headers["x-regard-state"] == "exact", (status, body[:200])
        assert struct.unpack_from("<I", body)[0] == 0x52474152
    client.close()
    every = [x for times in found.values() for x in times]
    return told | {
        "tile median, ms": statistics.median(every), "tile p95, ms": _high(every),
        "tile p95 by cell, ms": {str(cell): _high(times) for cell, times in sorted(found.items())},
    }  # fmt: skip


def _high(times: list[float]) -> float:
    """The 95th percentile."""
    return sorted(times)[max(0, -(-95 * len(times) // 100) - 1)]


class Panning:
    """One client: a window that moves, and the tiles it waits for."""

    def __init__(self, port: int, about: dict[str, Any], seed: int, until: float):
        self.port, self.about, self.chance, self.until = port, about, random.Random(seed), until
        self.times: list[float] = []
        self.asked = self.cancelled = self.errors = 0
        self.held: set[tuple[int, int, int]] = set()
        self.waiting: dict[tuple[int, int, int], asyncio.Task] = {}
        self.idle: list[Client] = []

    async def run(self) -> None:
        levels = self.about["levels"]
        while time.perf_counter() < self.until:
            cell = self.chance.choice(levels)
            last = (self.about["q_len"] - 1) // (cell * self.about["tile"])
            row, col = self.chance.randint(0, last), self.chance.randint(0, last)
            down, right = self.chance.choice([(0, 1), (1, 0), (1, 1), (0, -1), (-1, 0), (-1, -1)])
            for _ in range(self.chance.randint(3, 8)):  # some steps in one direction, then elsewhere
                self.see(cell, row, col, last)
                await asyncio.sleep(0.6 + 0.8 * self.chance.random())
                row, col = max(0, min(last, row + down)), max(0, min(last, col + right))
                if time.perf_counter() >= self.until:
                    break
        await asyncio.gather(*self.waiting.values(), return_exceptions=True)

    def see(self, cell: int, row: int, col: int, last: int) -> None:
        """Ask for the tiles in sight that are not there, and drop those that are out of it."""
        span = [(r, c) for r in range(row, min(row + HIGH, last + 1)) for c in range(col, min(col + WIDE, last + 1))]
        sight = {(cell, r, c) for r, c in span}
        for at, task in list(self.waiting.items()):
            if at not in sight and not task.done():
                task.cancel()
        for at in sight - self.held - set(self.waiting):
            self.waiting[at] = asyncio.create_task(self.fetch(at))
        self.held &= sight  # a browser keeps more; to ask again is harder

    async def fetch(self, at: tuple[int, int, int]) -> None:
        client = self.idle.pop() if self.idle else Client(self.port)
        began = time.perf_counter()
        self.asked += 1
        try:
            status, _, body = await client.get(f"/api/tile/{MAP}?cell={at[0]}&row={at[1]}&col={at[2]}")
            if status == 200 and len(body) > 32:
                self.times.append(time.perf_counter() - began)
                self.held.add(at)
            else:
                self.errors += 1
            self.idle.append(client)
        except asyncio.CancelledError:
            self.cancelled += 1
        except (OSError, EOFError):
            self.errors += 1
        finally:
            self.waiting.pop(at, None)


async def many(running: Running, seconds: float) -> dict[str, Any]:
    client = Client(running.port)
    about = await exact(client)
    until = time.perf_counter() + seconds
    clients = [Panning(running.port, about, seed, until) for seed in range(CLIENTS)]
    tasks = [asyncio.create_task(each.run()) for each in clients]
    memory = []
    while not all(task.done() for task in tasks):
        memory.append(running.memory())
        await asyncio.sleep(1.0)
    for task in tasks:
        task.result()
    times = [x for each in clients for x in each.times]
    asked, cancelled, errors = (
        sum(getattr(each, name) for each in clients) for name in ("asked", "cancelled", "errors")
    )
    settled = memory[len(memory) // 3 :]
    return {
        "clients": CLIENTS, "seconds": seconds, "tiles": len(times), "cancelled": cancelled, "errors": errors,
        "lost": asked - len(times) - cancelled - errors, "many: median, s": statistics.median(times),
        "many: p95, s": _high(times), "many: slowest, s": max(times),
        "memory growth, MiB": statistics.mean(settled[-5:]) - statistics.mean(settled[:5]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["one", "many", []], help="what to measure; both unless said")
    parser.add_argument("--length", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tiles", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--device", help="compute there: cuda")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--forward", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = ["--length", str(given.length), "--dim", str(given.dim)]
    where = [] if given.device is None else ["--device", given.device]
    if given.serve:
        serve(given.serve, given.device)
    elif given.bare:
        bare(given.device)
    elif given.save:
        from regard.views.server.sources import trace_of

        A, v = made(given.length, given.dim, given.device)
        trace_of(A).save(given.save)
        print(json.dumps(forward(A, v) if given.forward else None))
    else:
        measure(given, size, where)


def measure(given: argparse.Namespace, size: list[str], where: list[str]) -> None:
    import torch

    away = bool(where) and given.device != "cpu"
    path = given.out / ("explore-gpu.json" if away else "explore.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if away and torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    dtype = "bfloat16" if away else "float32"
    results |= {"length": given.length, "dim": given.dim, "dtype": dtype, "machine": machine}
    results["date"] = datetime.now(timezone.utc).date().isoformat()
    figures = results.setdefault("figures", {})
    parts = given.parts or ["one", "many"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "long.trace"
        command = [sys.executable, __file__, "--save", str(trace), *size, *where]
        command += ["--forward"] if "one" in parts else []
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        if "one" in parts:
            found: dict[str, Any] = figures.setdefault("one", {})
            found.clear()
            found["forward, s"] = json.loads(told.stdout)
            if away:
                one_on_device(found, trace, where, given.tiles, lambda: written(results, path))
            else:
                running = Running(trace, where)
                found |= asyncio.run(one(running.port, given.tiles, 0.05))
                found["exact overview / forward"] = found["exact overview, s"] / found["forward, s"]
                found["memory, MiB"] = running.memory("VmHWM")
                running.close()
        if "many" in parts:
            running = Running(trace, where)
            found = asyncio.run(many(running, given.seconds))
            figures["many"] = found | {"many: memory, MiB": running.memory("VmHWM")}
            running.close()
    print(written(results, path))


def one_on_device(
    found: dict[str, Any], trace: Path, where: list[str], tiles: int, write: Callable[[], Any]
) -> None:  # fmt: skip
    """Both servers; what is known is written as soon as it is, for all of it takes a minute, and time may be short."""
    kernels = trace.with_name("kernels")
    running = Running(trace, where, kernels)
    found |= {"cold: the server answers after, s": running.took} | asyncio.run(cold(running.port))
    write()
    command = [sys.executable, __file__, "--bare", *where]
    bare = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # while the kernels are compiled
    began = time.perf_counter()
    asyncio.run(prepared(running.port))
    print(f"compiled for {time.perf_counter() - began:.1f} s more", file=sys.stderr, flush=True)
    alone = json.loads(bare.communicate(timeout=60)[0])
    running.close()
    running = Running(trace, where, kernels)
    loaded = asyncio.run(prepared(running.port))
    found |= {"the server answers after, s": running.took, "and has its kernels after, s": running.took + loaded}
    found |= asyncio.run(one(running.port, tiles, 0.01))
    found["exact overview / forward"] = found["exact overview, s"] / found["forward, s"]
    found["memory, MiB"] = running.memory("VmHWM")
    found["of which files (libraries, the trace), MiB"] = running.memory("RssFile")
    found["memory of a process that only multiplies there, MiB"] = alone
    write()
    found["memory of the GPU, MiB"] = running.close()


def written(results: dict[str, Any], path: Path) -> str:
    """The figures as a file and as a table, which is given back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    path.with_suffix(".md").write_text(text)
    return text


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown, with their targets."""
    words = (
        f"One head of {results['length']:,} x {results['length']:,}, dim {results['dim']}, causal with a T5 bias, "
        f"{results.get('dtype', 'float32')}, from a trace. Made by `benchmarks/explore.py` on {results['date']}: "
        f"{results['machine']}. The clients share the server's cores."
    )
    rows = ["| | | target | |", "|---|---|---|---|"]
    for name, x in [pair for part in ("one", "many") for pair in results["figures"].get(part, {}).items()]:
        target = TARGETS.get(name)
        shown = f"{x:.3g}" if isinstance(x, float) else str(x)
        if isinstance(x, dict):
            shown = ", ".join(f"{cell}: {ms:.0f}" for cell, ms in x.items())
        met = "" if target is None else "met" if x <= target else "**missed**"
        rows.append(f"| {name} | {shown} | {'' if target is None else f'{target:g}'} | {met} |")
    return "\n\n".join(["# The explorer's server", words, "\n".join(rows)]) + "\n"


if __name__ == "__main__":
    main()
