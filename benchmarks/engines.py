"""Times the engines beside causal scaled_dot_product_attention in one process, forward and forward + backward.

    python benchmarks/engines.py [--tokens 1024,4096,16384] [--repeats 5]

B 1, H 8, 64 channels a head, float32. Repeats are interleaved; a ratio is that of the medians. Writes
benchmarks/results/engines_cpu.json with the hardware, versions and commit, and docs/engines-on-a-cpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compare_stdlib import commit, hardware
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import block_attention, gated_scan, running_softmax
from subquad.ops.patterns import Segments, Window
from subquad.testing import largest_allocation

ROOT = Path(__file__).resolve().parents[1]
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "llp, segment 256": lambda q, k, v: block_attention(q, k, v, Segments(size=128)),
    "window, 256 wide": lambda q, k, v: block_attention(q, k, v, Window(width=256)),
    "linear": lambda q, k, v: gated_scan(q, k, v, None, normalise=True, eps=1e-6).out,
    "latte, 64 latents a head": lambda q, k, v: running_softmax(q, k, v).out,
}


def inputs(name: str, tokens: int) -> list[Tensor]:
    """Queries, keys and values; positive features for the scan, normalised queries for the running softmax."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    if name == "linear":
        q, k = q.exp(), k.exp()
    if name.startswith("latte"):
        q = q.softmax(-1)
    return [x.requires_grad_() for x in (q, k, v)]


def forward(name: str, tensors: list[Tensor]) -> None:
    """Without a graph."""
    with torch.no_grad():
        CASES[name](*tensors)


def both(name: str, tensors: list[Tensor]) -> None:
    """With the gradients of all three."""
    out = CASES[name](*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def seconds(f: Callable[[], None]) -> float:
    """One call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def measure(tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row a case: median, 20th and 80th percentile of both times, and the largest tensor made on the way."""
    tensors = {name: inputs(name, tokens) for name in CASES}
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in CASES}
    for repeat in range(repeats + 1):
        for name in CASES:
            for what, run in (("forward", forward), ("both", both)):
                taken = seconds(lambda run=run, name=name: run(name, tensors[name]))
                if repeat:  # the first warms up
                    times[name][what].append(taken)
    rows = []
    for name in CASES:
        row: dict[str, Any] = {"name": name, "tokens": tokens}
        for what, taken in times[name].items():
            base = statistics.median(times["sdpa, causal"][what])
            cuts = statistics.quantiles(taken, n=5, method="inclusive")
            median = statistics.median(taken)
            row[what] = {"median_s": median, "p20_s": cuts[0], "p80_s": cuts[-1], "times_faster": base / median}
        row["largest_tensor_bytes"] = largest_allocation(lambda name=name: both(name, tensors[name]))
        rows.append(row)
        faster = [row[what]["times_faster"] for what in ("forward", "both")]
        sys.stdout.write(f"{tokens:6d}  {name:26s} {faster[0]:6.2f}x {faster[1]:6.2f}x\n")
    return rows


def page(results: dict[str, Any]) -> str:
    """The table in docs."""
    lines = [
        "# The engines on a CPU",
        "",
        f"`{results['command']}` on {results['hardware']}, torch {results['torch']}, float32, B 1, H 8, 64",
        f"channels a head; medians of {results['repeats']} interleaved repeats in one process, commit "
        f"{results['commit']}.",
        "Times are milliseconds, forward / forward + backward; the ratio is to causal `scaled_dot_product_attention`",
        "(below 1 is slower than it).",
        "",
        "| | " + " | ".join(f"T = {t:,}: ms | ratio" for t in results["tokens"]) + " |",
        "|---" * (1 + 2 * len(results["tokens"])) + "|",
    ]
    for name in CASES:
        cells = [name]
        for row in (r for r in results["rows"] if r["name"] == name):
            parts = row["forward"], row["both"]
            cells.append(" / ".join(f"{1e3 * part['median_s']:,.0f}" for part in parts))
            cells.append(" / ".join(f"{part['times_faster']:.1f}" for part in parts))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096,16384", help="lengths, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each")
    arguments = parser.parse_args()
    tokens = [int(part) for part in arguments.tokens.split(",")]
    rows = [row for length in tokens for row in measure(length, arguments.repeats)]
    results = {
        "command": "python benchmarks/engines.py",
        "hardware": hardware(),
        "torch": torch.__version__,
        "commit": commit(),
        "dtype": "float32",
        "repeats": arguments.repeats,
        "tokens": tokens,
        "rows": rows,
    }
    target = ROOT / "benchmarks" / "results" / "engines_cpu.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (ROOT / "docs" / "engines-on-a-cpu.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
