"""How fast the machine of a benchmark copies and multiplies."""

from __future__ import annotations

import torch

from benchmarks.timing import Run, Timing, clock_of, interleave

COPIED = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes: far beyond any cache."""
MULTIPLIED = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices."""


def ceilings(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second that a copy reads and writes, and FLOP a second of a matrix product, of the same run."""
    kind = torch.device(device).type
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    n = MULTIPLIED[kind]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    runs = {
        "copy": Run(lambda _: target.copy_(source)),
        "matmul": Run(lambda _: torch.mm(a, b, out=product)),
    }
    found = interleave(runs, clock=clock_of(device), repeats=5)
    times = {name: timing.median for name, timing in found.items() if isinstance(timing, Timing)}
    moved, done = 2 * source.nbytes, 2 * n**3
    return {
        **({"copy_bytes_per_s": moved / times["copy"]} if "copy" in times else {}),
        **({"matmul_flops_per_s": done / times["matmul"]} if "matmul" in times else {}),
    }
