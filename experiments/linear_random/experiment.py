"""Time and memory of linear attention, and of softmax attention with and without fusion, over the length."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.config import ModelConfig, OpsConfig
from benchmarks.model import measure_model
from benchmarks.operators import our_cases, sdpa, unfused
from benchmarks.ops import rows_of_length
from experiments.harness.curves import crossover, exponent, means
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit

LINEAR, SOFTMAX, FUSED = "linear, in chunks", "softmax, unfused", "softmax, fused"
FORMS = {"sdpa": FUSED, "unfused": SOFTMAX, "linear": LINEAR}
MODELS = {"sdpa": "model, softmax", "linear": "model, linear"}
FITTED = 3
"""Number of longest lengths that an exponent is fitted to."""


def run(unit: Unit) -> list[dict[str, Any]]:
    """Time all passes of all operators, or steps and prefill of whole models (arm with `model`), in turns."""
    whole, rows = unit.settings.get("model"), list[dict[str, Any]]()
    found = measure_model(ModelConfig.from_dict(whole)).rows if whole else operators(unit.settings)
    for row in found:
        if row["status"] != "ok":
            raise RuntimeError(f"{row['label']}, {row['tokens']} tokens: {row['status']}: {row['message']}")
        rows.append({"form": (MODELS if whole else FORMS)[row["name"]], "pass": row["pass"], "tokens": row["tokens"]})
        rows[-1] |= {"ms": 1e3 * row["median_s"], "p20_ms": 1e3 * row["p20_s"], "p80_ms": 1e3 * row["p80_s"]}
        rows[-1] |= {"times_faster": row["times_faster"]}
        rows[-1]["peak_mib"] = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    return rows


def operators(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of operators, of softmax without fusion up to the length `longest`."""
    config, found = OpsConfig.from_dict(settings["bench"]), list[dict[str, Any]]()
    for T in config.tokens:
        plain = [unfused()] if settings["longest"] >= T else []
        found += rows_of_length(config, [sdpa(), *plain, *our_cases(config.mechanisms, [None])], [], T, late=False)
    return found


def mean(rows: list[dict[str, Any]], form: str, which: str, name: str = "ms") -> dict[int, float]:
    """Return the mean of a column over the seeds, by length."""
    return means(rows, "tokens", name, form=form, **{"pass": which})


def passes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the measured passes of operators."""
    return list(dict.fromkeys(row["pass"] for row in rows if row["form"] in FORMS.values()))


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


def faster_than(rows: list[dict[str, Any]], form: str, which: list[str] | None = None) -> tuple[str, str] | None:
    """Compare each pass at the longest common length, and find the length from which linear attention is faster."""
    shown, holds = [], True
    for name in which or passes(rows):
        faster = mean(rows, form, name, "times_faster")
        if not faster:
            return None
        T = max(faster)
        holds = holds and faster[T] > 1
        shown.append(f"{name}: {faster[T]:.1f} times at {T:,}, faster from {crossover(faster)}")
    return (HOLDS if holds else FAILS), "; ".join(shown)


claim_faster = partial(faster_than, form=LINEAR)
claim_model_faster = partial(faster_than, form=MODELS["linear"], which=["step", "prefill"])
