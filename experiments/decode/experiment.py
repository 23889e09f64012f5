"""Time of one token after contexts of several lengths, and bytes of the state, for every causal mechanism."""

from __future__ import annotations

from typing import Any

from benchmarks.config import DecodeConfig
from benchmarks.decode import measure_decode
from experiments.harness.curves import means
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit
from subquad.attention import mechanism, names

FLAT, GROWS = 1.1, 2.0
"""Largest ratio of a constant time, and smallest of a growing one, relative to the shortest context."""


def run(unit: Unit) -> list[dict[str, Any]]:
    """Time all mechanisms and contexts in turns in one process."""
    causal = [name for name in names() if "causal" in mechanism(name).forms]
    rows = []
    settings = {**unit.settings["bench"], "mechanisms": causal, "peers": "none"}
    for row in measure_decode(DecodeConfig.from_dict(settings)).rows:
        if row["form"] != "call":
            continue
        if row["status"] != "ok":
            raise RuntimeError(f"{row['label']} after {row['tokens']} tokens: {row['status']}: {row['message']}")
        rows.append({"mechanism": row["name"], "context": row["tokens"], "ms": 1e3 * row["median_s"]})
        rows[-1] |= {"p20_ms": 1e3 * row["p20_s"], "p80_ms": 1e3 * row["p80_s"], "of_shortest": row["of_shortest"]}
        rows[-1] |= {"state_bytes": row["state_bytes"], "prefill_tokens_per_s": row["prefill_tokens_per_s"]}
    return rows


def longest(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the mean of a column after the longest context, by mechanism."""
    return means(rows, "mechanism", name, context=max(row["context"] for row in rows))


def contexts(rows: list[dict[str, Any]]) -> str:
    """Return the shortest and the longest context as text."""
    sizes = [row["context"] for row in rows]
    return f"{min(sizes):,} to {max(sizes):,}"


def claim_constant_is_flat(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare the time after the longest and the shortest context, for mechanisms with a constant state."""
    ratios = {name: ratio for name, ratio in longest(rows, "of_shortest").items() if not mechanism(name).state_grows}
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    holds = all(ratio <= FLAT for ratio in ratios.values())
    return (HOLDS if holds else FAILS), f"{shown} ({contexts(rows)})"


def claim_full_grows(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare the time after the longest and the shortest context, for mechanisms that keep every token."""
    ratios = {name: ratio for name, ratio in longest(rows, "of_shortest").items() if mechanism(name).state_grows}
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return (HOLDS if ratios["full"] >= GROWS else FAILS), f"{shown} ({contexts(rows)})"


def claim_state_bytes(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that the states declared constant have the same bytes after every context."""
    same = True
    sizes = sorted({row["context"] for row in rows})
    for row in rows:
        if row["context"] == sizes[-1] and not mechanism(row["mechanism"]).state_grows:
            others = [r for r in rows if r["mechanism"] == row["mechanism"]]
            same = same and all(r["state_bytes"] == row["state_bytes"] for r in others)
    shown = ", ".join(f"{name} {n / 2**10:,.0f}" for name, n in longest(rows, "state_bytes").items())
    return (HOLDS if same else FAILS), f"KiB after {sizes[-1]:,} tokens: {shown}"


def claim_recurrent_faster(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare linear attention and Latte with full attention after the longest context."""
    ms = longest(rows, "ms")
    shown = ", ".join(f"{name} {ms['full'] / ms[name]:.1f} times faster" for name in ("linear", "latte"))
    holds = all(ms[name] < ms["full"] for name in ("linear", "latte"))
    return (HOLDS if holds else FAILS), f"{shown} ({contexts(rows)})"
