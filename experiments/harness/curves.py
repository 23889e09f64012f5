"""Curves over sizes: means over seeds, fitted exponents, and where a ratio crosses one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.noise import Row, select


def means(rows: Sequence[Row], by: str, value: str, **labels: Any) -> dict[Any, float]:
    """Return the mean of `value` over rows with the given labels, for each value of the label `by`, sorted."""
    chosen = [row for row in select(rows, labels) if row[value] is not None]
    return {
        key: statistics.mean(row[value] for row in select(chosen, {by: key})) for key in sorted({r[by] for r in chosen})
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log `values` over log `sizes`."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(y) for y in values]).slope


def crossover(ratios: Mapping[int, float]) -> str:
    """Return the size above which the ratio stays above one (log-log interpolation), or a bound on it, as text."""
    sizes = sorted(ratios)
    below = [size for size in sizes if ratios[size] < 1]
    if not below:
        return f"{sizes[0]:,} or less"
    if below[-1] == sizes[-1]:
        return f"no length up to {sizes[-1]:,}"
    a, b = below[-1], sizes[sizes.index(below[-1]) + 1]
    part = -math.log(ratios[a]) / (math.log(ratios[b]) - math.log(ratios[a]))
    return f"{math.exp(math.log(a) + part * math.log(b / a)):,.0f}"
