"""One head of 32,768 tokens: the product and six summaries, with their time and the extra memory they took.

    python benchmarks/look.py [--length 32768] [--dim 64]

Each runs in a process of its own, so that its peak memory is its own. "Extra" is the peak resident memory above what
was resident when q, k and v existed. Beside it: plain attention by SDPA on the same q, k and v, in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time


def work(what: str, length: int, dim: int) -> dict[str, float]:
    """Do one thing once, and say how long it took and how much memory it had at most."""
    import torch

    import regard as rg

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, dim) for _ in range(3))
    A = rg.attention(q, k, position=rg.recipes.t5(heads=1), mask=rg.causal if "causal" in what else None)
    jobs = {
        "SDPA, plain": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        "A @ v": lambda: A @ v,
        "A @ v, causal": lambda: A @ v,
        "topk(8)": lambda: A.topk(8),
        "heatmap(512)": lambda: A.heatmap(512),
        "profile()": lambda: A.profile(),
        "received()": lambda: A.received(),
        "entropy()": lambda: A.entropy(),
        "all five summaries": lambda: A.summarize(
            rg.TopK(8), rg.Heatmap(512), rg.Profile(), rg.Received(), rg.Entropy()
        ),
        "product and all five": lambda: (
            A @ v,
            A.summarize(rg.TopK(8), rg.Heatmap(512), rg.Profile(), rg.Received(), rg.Entropy()),
        ),
    }
    with torch.no_grad():
        torch.randn(256, 256) @ torch.randn(256, 256)  # the libraries' own buffers
        rg.attention(q[..., :64, :], k[..., :64, :]).entropy()
        before, began = _peak(), time.perf_counter()
        jobs[what]()
        return {"seconds": time.perf_counter() - began, "extra MiB": _peak() - before}


JOBS = (
    "SDPA, plain", "A @ v", "A @ v, causal", "topk(8)", "heatmap(512)", "profile()", "received()", "entropy()",
    "all five summaries", "product and all five",
)  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(work(given.one, given.length, given.dim)))
        return
    import torch

    print(
        f"N = {given.length}, dim = {given.dim}, one head, float32, learned T5 bias; torch {torch.__version__}, ",
        end="",
    )
    print(f"{torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'':24}{'seconds':>10}{'x SDPA':>9}{'extra MiB':>12}")
    plain = None
    for what in JOBS:
        size = ["--length", str(given.length), "--dim", str(given.dim)]
        done = subprocess.run(
            [sys.executable, __file__, "--one", what, *size], capture_output=True, text=True, check=True
        )
        figures = json.loads(done.stdout)
        plain = plain or figures["seconds"]
        print(f"{what:24}{figures['seconds']:10.2f}{figures['seconds'] / plain:9.2f}{figures['extra MiB']:12.0f}")


if __name__ == "__main__":
    main()
