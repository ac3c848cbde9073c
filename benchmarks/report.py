"""The Markdown table of a suite, from its JSON alone."""

from __future__ import annotations

from typing import Any

PEERS = {"bias": "SDPA + bias", "ready": "SDPA, bias ready", "eager": "eager", "flex": "FlexAttention"}
PASSES = {"forward": "forward", "training": "forward + backward"}


def table(results: dict[str, Any]) -> str:
    """Time, memory and error, one section each, then why a peer has no figure."""
    cases = results["cases"].values()
    peers = [name for name in PEERS if any(name in times for c in cases for times in c["time"].values())]
    notes: list[str] = []
    parts = [
        f"# Benchmarks: {results['suite']}",
        _machine(results),
        "## Time",
        "Milliseconds of plain SDPA (same shape, dtype and mask, same run), and every other as a multiple of it. "
        "Summaries are over the plain product.",
        *_times(results, peers, notes),
        "## Peak memory above the inputs, MiB",
        *_memory(results, peers, notes),
        "## Largest error against float64, on a small shape",
        "Beside plain PyTorch's in the same dtype; at most twice it, plus a rounding, is allowed.",
        *_errors(results),
    ]
    if notes:
        parts += ["## Notes", "\n".join(f"{n}. {words}" for n, words in enumerate(notes, 1))]
    return "\n\n".join(parts) + "\n"


def _machine(results: dict[str, Any]) -> str:
    words = [f"{name}: {value}" for name, value in results["machine"].items()]
    met, missed = _score(results)
    return f"Measured {results['date']}. {'; '.join(words)}.\n\nTargets: {met} met, {missed} missed."


def _score(results: dict[str, Any]) -> tuple[int, int]:
    marks = []
    for case in results["cases"].values():
        marks += [_met(times["ours"].get("ratio"), case["case"]["targets"].get(p)) for p, times in case["time"].items()]
        marks += [_met(found.get("ours", {}).get("MiB"), _allowed(case, found)) for found in case["memory"].values()]
    return marks.count(True), marks.count(False)


def _met(found: float | None, target: float | None) -> bool | None:
    return None if found is None or target is None else found <= target


def _times(results: dict[str, Any], peers: list[str], notes: list[str]) -> list[str]:
    head = ["what", "shape", "pass", "plain, ms", "Regard", "target", "", *(PEERS[p] for p in peers)]
    rows = []
    for case in results["cases"].values():
        for name, times in case["time"].items():
            target = case["case"]["targets"].get(name)
            ours, plain = times["ours"], times["plain"]
            row = [case["case"]["what"], case["case"]["shape"], PASSES[name]]
            row += [_peer(plain, "ms", results["date"], notes)]
            row += [f"**{_ratio(ours['ratio'], target)}**", "" if target is None else f"{target:g}"]
            row += [_mark(_met(ours["ratio"], target))]
            row += [_peer(times.get(p), "ratio", results["date"], notes) for p in peers]
            rows.append(row)
    return _grid(head, rows)


def _ratio(found: float, target: float | None) -> str:
    """With as many digits as tell a miss."""
    words = f"{found:.2f}"
    return words if _met(found, target) in (None, _met(float(words), target)) else f"{found:.3f}"


def _memory(results: dict[str, Any], peers: list[str], notes: list[str]) -> list[str]:
    head = ["what", "shape", "pass", "plain", "Regard", "at most", "", *(PEERS[p] for p in peers)]
    rows = []
    for case in results["cases"].values():
        for name, found in case["memory"].items():
            if "ours" not in found:
                continue
            allowed, ours = _allowed(case, found), found["ours"].get("MiB")
            row = [case["case"]["what"], case["case"]["shape"], PASSES[name]]
            row += [_peer(found.get(x), "MiB", results["date"], notes) for x in ("plain", "ours")]
            row += ["" if allowed is None else f"{allowed:.0f}", _mark(_met(ours, allowed))]
            row += [_peer(found.get(p), "MiB", results["date"], notes) for p in peers]
            rows.append(row)
    return _grid(head, rows) if rows else ["Not measured."]


def _allowed(case: dict[str, Any], found: dict[str, Any]) -> float | None:
    """The target as MiB: so many times plain's, plus so many."""
    target, plain = case["case"]["targets"].get("memory"), found.get("plain", {}).get("MiB")
    return None if target is None or plain is None else target[0] * plain + target[1]


def _errors(results: dict[str, Any]) -> list[str]:
    rows = []
    for case in results["cases"].values():
        for name, error in case["errors"].items():
            row = [case["case"]["what"], case["case"]["shape"].split()[-1], PASSES[name]]
            rows.append([*row, f"{error['ours']:.1e}", f"{error['plain']:.1e}"])
    return _grid(["what", "dtype", "pass", "Regard", "plain PyTorch"], rows) if rows else ["Not measured."]


def _peer(found: dict[str, Any] | None, unit: str, today: str, notes: list[str]) -> str:
    """A figure, with its date when it is older than the run; or a note that says why there is none."""
    if not found:
        return ""
    if unit not in found:
        why = found.get("why", "not measured").replace("|", "\\|")
        if why not in notes:
            notes.append(why)
        return f"no ({notes.index(why) + 1})"
    words = f"{found[unit]:.2f}" if unit == "ratio" else _short(found[unit])
    words += f" ({found['backend']})" if found.get("backend") else ""
    return words if found.get("date") in (today, None) else f"{words}, {found['date']}"


def _mark(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: ""}[met]


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.3f}"


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["\n".join("| " + " | ".join(line) + " |" for line in lines)]
