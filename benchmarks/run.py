"""Measure a suite, and write its results as JSON and as a Markdown table.

    python benchmarks/run.py cpu|gpu [--case NAME ...] [--length N] [--repeat R] [--quick] [--peers NAME ...]

Results are written after each case. A case that is not measured keeps its last figures, and so does a peer: each
figure carries its date, and its ratio is to plain SDPA of its own run. Memory and error are of the longest length of
a case. `--quick` measures time only, in few rounds, without peers. `--table` writes the Markdown anew from the JSON and
measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import measure
import torch
from cases import SUITES, WORDS, Case
from report import table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PEERS = ("bias", "ready", "eager", "flex")
RESULTS = Path(__file__).parent / "results"


def machine(device: str) -> dict[str, str]:
    """What it ran on, in words that name no host."""
    cpu = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        cpu = found[1].strip() if found else cpu
    except OSError:
        pass
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words = {
        "processor": f"{cpu}, {os.cpu_count()} cores, {gib:.0f} GiB",
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        words["GPU"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} multiprocessors"
        words["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        try:
            import triton

            words["triton"] = triton.__version__
        except ImportError:
            words["triton"] = "not installed"
    return words


def about(case: Case) -> dict[str, Any]:
    """A case as the table shows it."""
    what = ", ".join(case.asks) + " of A with " if case.asks else ""
    return {
        "name": case.name,
        "what": what + WORDS[case.term] + (", causal" if case.causal else ""),
        "shape": case.shape,
        "summaries": list(case.asks),
        "targets": {"forward": case.forward, "training": case.training, "memory": case.memory},
    }


def measured(case: Case, before: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Everything of a case: new figures in place of those before, peers that were not asked for as they were."""
    found: dict[str, Any] = {"case": about(case), "time": {}}
    peers = set(given.peers)
    for mode in case.passes:
        old = before.get("time", {}).get(mode, {})
        found["time"][mode] = old | measure.times(case, mode, given.repeat, peers)
    found["memory"], found["errors"] = before.get("memory", {}), before.get("errors", {})
    longest = case == max((c for c in SUITES[given.suite] if c.name == case.name), key=lambda c: c.length)
    if longest and not given.quick:
        found["errors"] = measure.errors(case)
        if given.memory:
            new = measure.memory(case, peers)
            found["memory"] = {mode: found["memory"].get(mode, {}) | figures for mode, figures in new.items()}
    return found


def chosen(given: argparse.Namespace) -> list[Case]:
    cases = SUITES[given.suite]
    known = {case.name for case in cases}
    if missing := set(given.case or ()) - known:
        raise SystemExit(f"--case: expected some of {', '.join(sorted(known))}, found {', '.join(sorted(missing))}")
    cases = [c for c in cases if (not given.case or c.name in given.case) and given.length in (None, c.length)]
    if not cases:
        raise SystemExit(f"--length: no case of the suite {given.suite} has {given.length} tokens")
    return cases


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--length", type=int, help="only this length")
    parser.add_argument("--repeat", type=int, default=10, help="rounds at the most, of which the best counts")
    parser.add_argument("--quick", action="store_true", help="time only, three rounds, no peers")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which; none: --peers")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="keep the memory figures as they are")
    parser.add_argument("--table", action="store_true", help="write the Markdown from the JSON, measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(words)
    if given.repeat < 1:
        parser.error(f"--repeat: expected a positive number, found {given.repeat}")
    if given.quick:
        given.repeat, given.peers = min(given.repeat, 3), []
    return given


def main(words: list[str] | None = None) -> None:
    given = arguments(words)
    store = given.out / f"{given.suite}.json"
    results: dict[str, Any] = {"suite": given.suite, "machine": {}, "date": "", "cases": {}}
    for place in (store, RESULTS / store.name):  # an empty folder begins with the figures that are kept
        if place.is_file():
            results = json.loads(place.read_text(encoding="utf-8"))
            break
    if not given.table:
        device = SUITES[given.suite][0].device
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("gpu: expected a CUDA device, found none")
        results |= {"machine": machine(device), "date": measure.day()}
        _measure_all(chosen(given), results, store, given)
    _write(results, store)
    Console().print(f"{len(results['cases'])} cases in {store.name} and {store.with_suffix('.md').name}")


def _measure_all(cases: list[Case], results: dict[str, Any], store: Path, given: argparse.Namespace) -> None:
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, failed = Console(), []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.key)
            try:
                result = measured(case, results["cases"].get(case.key, {}), given)
            except Exception as error:  # the other cases are still to be measured
                failed.append(case.key)
                progress.advance(task)
                progress.print(f"{case.key:24} {measure.reason(error)}", highlight=False, soft_wrap=True)
                continue
            results["cases"][case.key] = result
            _write(results, store)
            progress.advance(task)
            progress.print(_line(case, result), highlight=False, soft_wrap=True)
    if failed:
        _write(results, store)
        raise SystemExit(f"not measured, their last figures are kept: {', '.join(failed)}")


def _line(case: Case, result: dict[str, Any]) -> str:
    parts = []
    for mode, found in result["time"].items():
        target = result["case"]["targets"].get(mode)
        ratio, limit = found["ours"]["ratio"], f" (<= {target:g})" if target else ""
        parts.append(f"{mode} {found['plain']['ms']:.2f} ms, ours x{ratio:.2f}{limit}")
        parts += [f"{name} x{x['ratio']:.2f}" for name, x in found.items() if name in PEERS and "ratio" in x]
    return f"{case.key:24} " + ", ".join(parts)


def _write(results: dict[str, Any], store: Path) -> None:
    """In the suite's order, whatever was measured last."""
    order = [case.key for case in SUITES[results["suite"]]]
    results["cases"] = {key: results["cases"][key] for key in order if key in results["cases"]}
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    store.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
