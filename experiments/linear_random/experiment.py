"""Time and memory of linear attention, and of softmax attention with and without fusion, over the length."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.config import OpsConfig
from benchmarks.operators import our_cases, sdpa, unfused
from benchmarks.ops import rows_of_length
from experiments.harness.curves import crossover, exponent, means
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit

LINEAR, SOFTMAX, FUSED = "linear, in chunks", "softmax, unfused", "softmax, fused"
FORMS = {"sdpa": FUSED, "unfused": SOFTMAX, "linear": LINEAR}
FITTED = 3
"""Number of longest lengths that an exponent is fitted to."""


def run(unit: Unit) -> list[dict[str, Any]]:
    """Time all passes of all operators in turns at each length, softmax without fusion up to the length `longest`."""
    config, rows = OpsConfig.from_dict(unit.settings["bench"]), list[dict[str, Any]]()
    found = []
    for T in config.tokens:
        plain = [unfused()] if unit.settings["longest"] >= T else []
        found += rows_of_length(config, [sdpa(), *plain, *our_cases(config.mechanisms, [None])], [], T, late=False)
    for row in found:
        if row["status"] != "ok":
            raise RuntimeError(f"{row['label']}, {row['tokens']} tokens: {row['status']}: {row['message']}")
        rows.append({"form": FORMS[row["name"]], "pass": row["pass"], "tokens": row["tokens"]})
        rows[-1] |= {"ms": 1e3 * row["median_s"], "p20_ms": 1e3 * row["p20_s"], "p80_ms": 1e3 * row["p80_s"]}
        rows[-1] |= {"times_faster": row["times_faster"]}
        rows[-1]["peak_mib"] = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    return rows


def mean(rows: list[dict[str, Any]], form: str, which: str, name: str = "ms") -> dict[int, float]:
    """Return the mean of a column over the seeds, by length."""
    return means(rows, "tokens", name, form=form, **{"pass": which})


def passes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the measured passes."""
    return list(dict.fromkeys(row["pass"] for row in rows))


def exponents(rows: list[dict[str, Any]], form: str, order: float, name: str = "ms") -> tuple[str, str] | None:
    """Check that the slope over the longest lengths is within 0.25 of `order` in each pass with the figure `name`."""
    shown, holds = [], True
    for which in passes(rows):
        values = list(mean(rows, form, which, name).items())[-FITTED:]
        if len(values) < FITTED:
            continue
        slope = exponent(*zip(*values, strict=True))
        holds = holds and abs(slope - order) <= 0.25
        shown.append(f"{which}: T^{slope:.2f} ({values[0][0]:,} to {values[-1][0]:,})")
    return ((HOLDS if holds else FAILS), "; ".join(shown)) if shown else None


claim_linear_is_linear = partial(exponents, form=LINEAR, order=1)
claim_softmax_is_quadratic = partial(exponents, form=SOFTMAX, order=2)
claim_fused_is_quadratic = partial(exponents, form=FUSED, order=2)
claim_linear_memory = partial(exponents, form=LINEAR, order=1, name="peak_mib")
claim_softmax_memory = partial(exponents, form=SOFTMAX, order=2, name="peak_mib")
claim_fused_memory = partial(exponents, form=FUSED, order=1, name="peak_mib")


def claim_faster(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare each pass at the longest common length, and find the length from which linear attention is faster."""
    shown, holds = [], True
    for which in passes(rows):
        faster = mean(rows, LINEAR, which, "times_faster")
        if not faster:
            return None
        T = max(faster)
        holds = holds and faster[T] > 1
        shown.append(f"{which}: {faster[T]:.1f} times at {T:,}, faster from {crossover(faster)}")
    return (HOLDS if holds else FAILS), "; ".join(shown)
