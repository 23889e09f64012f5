"""Time and peak memory of a training step at each query size, in float32."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from experiments.harness.curves import means
from experiments.harness.noise import FAILS, HOLDS, UNRESOLVED
from experiments.harness.units import Unit
from subquad.training import RunResult

REPEATS = {"smoke": 3}


def measure(result: RunResult, unit: Unit) -> dict[str, Any]:
    """Time loss and gradients of one batch, without the optimiser, and measure their peak memory."""
    model, batch = result.model.model, result.config.batch
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    numbers_BT = torch.randint(result.config.model.vocab_size, (batch.size, batch.length + 1), generator=generator)
    tokens_BT, labels_BT = (x.contiguous().to(device) for x in (numbers_BT[:, :-1], numbers_BT[:, 1:]))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> object:
        return torch.autograd.grad(model.loss(tokens_BT, labels_BT), parameters, allow_unused=True)

    model.train()
    seconds = []
    for _ in range(REPEATS.get(unit.scale, 25) + 1):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    low, *_, high = statistics.quantiles(seconds[1:], n=5, method="inclusive")
    return {
        "float32_ms": 1e3 * statistics.median(seconds[1:]),
        "float32_p20_ms": 1e3 * low,
        "float32_p80_ms": 1e3 * high,
        "peak_mib": peak_bytes(step, device) / 2**20,
    }


def claim_time(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that each size's slow repeats (80th percentile) are faster than the next size's fast ones (20th)."""
    middle, fast, slow = (means(rows, "query_size", f"float32{part}_ms") for part in ("", "_p20", "_p80"))
    if len(middle) < 2:
        return None
    shown = ", ".join(f"{size}: {ms:.3g} ms" for size, ms in middle.items())
    pairs = list(pairwise(middle))
    if any(fast[a] > slow[b] for a, b in pairs):
        return FAILS, shown
    return (HOLDS if all(slow[a] < fast[b] for a, b in pairs) else UNRESOLVED), shown


def claim_in_proportion(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that time and memory relative to the largest query size are at most 25 % above the ratio of the sizes."""
    seconds, memory = (means(rows, "query_size", name) for name in ("float32_ms", "peak_mib"))
    if len(seconds) < 2:
        return None
    shown, holds, largest = [], True, max(seconds)
    for size in list(seconds)[:-1]:
        ratios = [of[size] / of[largest] for of in (seconds, memory)]
        part = size / largest
        shown.append(f"{size} of {largest} ({part:.3f}): time {ratios[0]:.2f}, memory {ratios[1]:.2f}")
        holds = holds and all(ratio <= 1.25 * part for ratio in ratios)
    return (HOLDS if holds else FAILS), "; ".join(shown)
