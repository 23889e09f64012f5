"""Causal Latte over the number of latents at one length, compared with attention in three forms."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.config import OpsConfig
from benchmarks.operators import our_cases, sdpa, unfused
from benchmarks.ops import rows_of_length
from experiments.harness.curves import means
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit

LATTE, SCAN = "latte", "latte, token by token"
FUSED, UNFUSED, CHUNKS = "attention, fused", "attention, unfused", "attention, Rabe-Staats"
FORMS = {("sdpa", False): FUSED, ("unfused", False): UNFUSED, ("full", True): CHUNKS}
FORMS |= {("full", False): "attention, our tiles"}
FORMS |= {("latte", False): LATTE, ("latte", True): SCAN}


def run(unit: Unit) -> list[dict[str, Any]]:
    """Time all operators in turns in one process."""
    s = unit.settings
    config = OpsConfig.from_dict({**s["bench"], "latents": [n // s["bench"]["heads"] for n in s["latents"]]})
    rows, cases = [], [sdpa(), unfused(), *our_cases(config.mechanisms, config.backends)]
    for row in rows_of_length(config, cases, [], config.tokens[0], late=False):
        if row["status"] != "ok":
            raise RuntimeError(f"{row['label']}, {row['latents']} latents: {row['status']}: {row['message']}")
        label = {"form": FORMS[row["name"], row["backend"] == "sequential"], "pass": row["pass"]}
        label["latents"] = (row["latents"] or 0) * row["heads"]
        label["tokens"] = row["tokens"]
        times = {"ms": row["median_s"], "p20_ms": row["p20_s"], "p80_ms": row["p80_s"]}
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        rows.append({**label, **{name: 1e3 * t for name, t in times.items()}})
        rows[-1] |= {"times_faster": row["times_faster"], "peak_mib": peak}
    return rows


def mean(rows: list[dict[str, Any]], form: str, which: str, name: str) -> dict[int, float]:
    """Return the mean of a column over the seeds, by number of latents (0: attention)."""
    return means(rows, "latents", name, form=form, **{"pass": which})


def compared(rows: list[dict[str, Any]], other: str, name: str, latte: str = LATTE) -> dict[str, dict[int, float]]:
    """Return the other operator's time or memory relative to Latte's, by pass and number of latents."""
    found = {}
    for which in dict.fromkeys(row["pass"] for row in rows):
        base = mean(rows, other, which, name)
        if base:
            found[which] = {n: base[0] / value for n, value in mean(rows, latte, which, name).items()}
    return found


def shown(ratios: dict[str, dict[int, float]]) -> str:
    """Format the ratios of each pass."""
    return "; ".join(
        f"{which.replace('_', ' + ')}: " + ", ".join(f"L {n}: {ratio:.2f}" for n, ratio in by.items())
        for which, by in ratios.items()
    )


def claim_beats_rabe_staats(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare with Rabe and Staats's attention at every number of latents, forward and backward."""
    ratios = compared(rows, CHUNKS, "ms")
    faster = [ratio > 1 for by in ratios.values() for ratio in by.values()]
    return ((HOLDS if all(faster) else FAILS), f"times faster, {shown(ratios)}") if faster else None


def slower(rows: list[dict[str, Any]], latte: str, than: str) -> tuple[str, str] | None:
    """Check that a form of Latte with the most latents is slower than one of attention in each pass."""
    ratios = compared(rows, than, "ms", latte)
    found = [by[max(by)] < 1 for by in ratios.values()]
    return ((HOLDS if all(found) else FAILS), f"times faster, {shown(ratios)}") if found else None


claim_scan_slower_than_standard = partial(slower, latte=SCAN, than=UNFUSED)
claim_scan_slower_than_fused = partial(slower, latte=SCAN, than=FUSED)
claim_slower_than_standard = partial(slower, latte=LATTE, than=UNFUSED)
claim_slower_than_fused = partial(slower, latte=LATTE, than=FUSED)


def claim_grows_with_latents(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that time and memory grow from the fewest to the most latents, at most in proportion."""
    parts, holds = [], True
    for which in dict.fromkeys(row["pass"] for row in rows):
        for name, noun in (("ms", "time"), ("peak_mib", "memory")):
            values = mean(rows, LATTE, which, name)
            if len(values) < 2:
                return None
            fewest, most = min(values), max(values)
            ratio = values[most] / values[fewest]
            parts.append(f"{which.replace('_', ' + ')}: {noun} x {ratio:.2f}")
            holds = holds and 1 < ratio <= 1.25 * most / fewest
    return (HOLDS if holds else FAILS), f"{'; '.join(parts)} (L {fewest} to {most})"


def claim_memory(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare the peak memory of Rabe and Staats's attention with Latte's in each pass."""
    ratios = compared(rows, CHUNKS, "peak_mib")
    less = [ratio > 1 for by in ratios.values() for ratio in by.values()]
    return ((HOLDS if all(less) else FAILS), f"times less, {shown(ratios)}") if less else None
