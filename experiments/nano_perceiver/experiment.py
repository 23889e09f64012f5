"""Time and peak memory of a training step at each query size, in float32."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from benchmarks.memory import peak_bytes
from experiments.harness.curves import means
from experiments.harness.noise import FAILS, HOLDS, UNRESOLVED, Row
from experiments.harness.units import Unit
from subquad.models.build import build_model
from subquad.models.config import DecoderConfig
from subquad.training import RunResult

TIMES = "times"
"""The arm that measures times and memory; the others measure losses."""
SIZES = (1, 16, 64, 128)
"""Query sizes of Perceiver AR; the plain decoder's is the whole window."""
REPEATS = {"smoke": 3}


def measure(result: RunResult, unit: Unit) -> list[Row]:
    """Return the query size; of the arm `TIMES` instead a row of each size, timed in turns, without a loss."""
    config, window = result.config.model, result.config.batch.length - 1
    if unit.arm != TIMES:
        return [{}]
    par = {"attention": "perceiver_ar", "dropout": config.dropout}
    configs = {
        size: config.replace(**par, options={"perceiver_ar": {"latents": size}}) for size in SIZES if size < window
    }
    steps = {
        size: step_of(own, result.config.batch.size, window, unit.device)
        for size, own in {**configs, window: config}.items()
    }
    seconds: dict[int, list[float]] = {size: [] for size in steps}
    for _ in range(REPEATS.get(unit.scale, 25) + 1):
        for size, step in steps.items():
            begin = time.perf_counter()
            step()
            if unit.device == "cuda":
                torch.cuda.synchronize()
            seconds[size].append(time.perf_counter() - begin)
    return [timed(size, seconds[size][1:], peak_bytes(step, unit.device)) for size, step in steps.items()]


def timed(size: int, seconds: list[float], peak: int) -> Row:
    """Return the row of a query size."""
    low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
    return {
        "query_size": size,
        "float32_ms": 1e3 * statistics.median(seconds),
        "float32_p20_ms": 1e3 * low,
        "float32_p80_ms": 1e3 * high,
        "peak_mib": peak / 2**20,
        **dict.fromkeys(("loss", "bits_per_byte", "predicted_tokens")),
    }


def step_of(config: DecoderConfig, batch: int, length: int, device: str) -> Callable[[], object]:
    """Return a training step on random tokens: loss and gradients, without the optimiser."""
    model = build_model(config).to(device).train()
    numbers_BT = torch.randint(config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    tokens_BT, labels_BT = (x.contiguous().to(device) for x in (numbers_BT[:, :-1], numbers_BT[:, 1:]))
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model.loss(tokens_BT, labels_BT), parameters, allow_unused=True)


def of_sizes(rows: list[Row], name: str) -> dict[int, float]:
    """Return the mean of a column of the timed rows, by query size."""
    return means([row for row in rows if row.get("float32_ms") is not None], "query_size", name)


def claim_time(rows: list[Row]) -> tuple[str, str] | None:
    """Check that each size's slow repeats (80th percentile) are faster than the next size's fast ones (20th)."""
    middle, fast, slow = (of_sizes(rows, f"float32{part}_ms") for part in ("", "_p20", "_p80"))
    if len(middle) < 2:
        return None
    shown = ", ".join(f"{size}: {ms:.3g} ms" for size, ms in middle.items())
    pairs = list(pairwise(middle))
    if any(fast[a] > slow[b] for a, b in pairs):
        return FAILS, shown
    return (HOLDS if all(slow[a] < fast[b] for a, b in pairs) else UNRESOLVED), shown


def claim_memory(rows: list[Row]) -> tuple[str, str] | None:
    """Check that each size needs less memory than the next."""
    memory = of_sizes(rows, "peak_mib")
    if len(memory) < 2:
        return None
    shown = ", ".join(f"{size}: {mib:.3g} MiB" for size, mib in memory.items())
    return (HOLDS if all(memory[a] < memory[b] for a, b in pairwise(memory)) else FAILS), shown


def claim_in_proportion(rows: list[Row]) -> tuple[str, str] | None:
    """Check that time and memory relative to the largest query size are at most 25 % above the ratio of the sizes."""
    seconds, memory = (of_sizes(rows, name) for name in ("float32_ms", "peak_mib"))
    if len(seconds) < 2:
        return None
    shown, holds, largest = [], True, max(seconds)
    for size in list(seconds)[:-1]:
        ratios = [of[size] / of[largest] for of in (seconds, memory)]
        part = size / largest
        shown.append(f"{size} of {largest} ({part:.3f}): time {ratios[0]:.2f}, memory {ratios[1]:.2f}")
        holds = holds and all(ratio <= 1.25 * part for ratio in ratios)
    return (HOLDS if holds else FAILS), "; ".join(shown)
