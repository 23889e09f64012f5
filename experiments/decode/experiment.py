"""Time of one token after contexts of several lengths, and bytes of the state, for every causal mechanism."""

from __future__ import annotations

import math

from benchmarks.config import DecodeConfig
from benchmarks.decode import measure_decode
from experiments.harness.curves import means
from experiments.harness.noise import FAILS, HOLDS, Difference, Row, gain, pooled, select
from experiments.harness.units import Unit
from subquad.attention import mechanism, names

FLAT, GROWS = 1.1, 2.0
"""Largest ratio of a constant time, and smallest of a growing one, relative to the shortest context."""


def run(unit: Unit) -> list[Row]:
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


def longest(rows: list[Row]) -> list[Row]:
    """Return the rows after the longest context."""
    return select(rows, {"context": max(row["context"] for row in rows)})


def contexts(rows: list[Row]) -> str:
    """Return the shortest and the longest context as text."""
    sizes = [row["context"] for row in rows]
    return f"{min(sizes):,} to {max(sizes):,}"


def ratios(rows: list[Row], metric: str, limit: float, sign: float) -> dict[str, Difference]:
    """Return `sign * (ratio - limit)` of each mechanism, smallest ratio first, with the spread between runs, pooled."""
    limited = [{**row, "limit": limit} for row in rows]
    spread = pooled(limited, metric)
    of = {row["mechanism"]: select(limited, {"mechanism": row["mechanism"]}) for row in rows}
    found = {name: gain(some, metric, "limit", sign, spread) for name, some in of.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].left))


def shown(found: dict[str, Difference], digits: int = 2) -> str:
    """Return the ratios, with the reach of their intervals if there are several runs, as text."""
    reach = {name: one.interval()[1] - one.value for name, one in found.items()}
    known = {name: f" ± {size:.{digits}f}" if math.isfinite(size) else "" for name, size in reach.items()}
    return ", ".join(f"{name} {one.left:.{digits}f}{known[name]}" for name, one in found.items())


def claim_constant_is_flat(rows: list[Row]) -> tuple[list[Difference], str]:
    """Compare the time after the longest and the shortest context, for mechanisms with a constant state."""
    constant = [row for row in longest(rows) if not mechanism(row["mechanism"]).state_grows]
    found = ratios(constant, "of_shortest", FLAT, -1.0)
    return list(found.values()), f"{shown(found)} ({contexts(rows)})"


def claim_full_grows(rows: list[Row]) -> tuple[list[Difference], str]:
    """Compare the time after the longest and the shortest context, for mechanisms that keep every token."""
    growing = sorted({row["mechanism"] for row in rows if mechanism(row["mechanism"]).state_grows})
    found: dict[str, Difference] = {}
    for name in growing:  # not pooled: the spread of a ratio grows with it
        found |= ratios(select(longest(rows), {"mechanism": name}), "of_shortest", GROWS, 1.0)
    return [found["full"]], f"{shown(found)} ({contexts(rows)})"


def claim_recurrent_faster(rows: list[Row]) -> tuple[list[Difference], str]:
    """Compare linear attention and Latte with full attention after the longest context."""
    last = longest(rows)
    full = {row["seed"]: row["ms"] for row in select(last, {"mechanism": "full"})}
    faster = [
        {**row, "faster": full[row["seed"]] / row["ms"]} for row in select(last, {"mechanism": ["linear", "latte"]})
    ]
    found = ratios(faster, "faster", 1.0, 1.0)
    return list(found.values()), f"{shown(found, 1)} times as fast ({contexts(rows)})"


def claim_state_bytes(rows: list[Row]) -> tuple[str, str]:
    """Check that the states declared constant have the same bytes after every context."""
    same = True
    sizes = sorted({row["context"] for row in rows})
    for row in rows:
        if row["context"] == sizes[-1] and not mechanism(row["mechanism"]).state_grows:
            others = [r for r in rows if r["mechanism"] == row["mechanism"]]
            same = same and all(r["state_bytes"] == row["state_bytes"] for r in others)
    kib = ", ".join(f"{name} {n / 2**10:,.0f}" for name, n in means(longest(rows), "mechanism", "state_bytes").items())
    return (HOLDS if same else FAILS), f"KiB after {sizes[-1]:,} tokens: {kib}"
