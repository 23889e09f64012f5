"""Compare differences between arms with the noise: the spread between seeds, pooled over arms, and Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

Row = dict[str, Any]
HOLDS, FAILS, NOISE = "holds", "does not hold", "no difference beyond the noise"
OWN = 4
"""Rows per side from which its own spread is used instead of the pooled one."""
LEVEL = 0.05
"""Two-sided significance level."""


@dataclass(frozen=True)
class Noise:
    """Standard deviation between seeds and its degrees of freedom; NaN and 0 if no arm ran twice."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Difference:
    """The means of two sets of rows, `value` = left - right, and its standard error (NaN if no arm ran twice)."""

    left: float
    right: float
    value: float
    error: float
    freedom: int

    def __str__(self) -> str:
        error = f" ± {number(self.error)}" if not math.isnan(self.error) else ", one seed each"
        return f"{number(self.left)} against {number(self.right)} ({self.value:+.3g}{error})"


def pooled(rows: Sequence[Row], metric: str) -> Noise:
    """Return the standard deviation of `metric` between seeds, pooled over groups of rows that differ only in the seed.

    Two or three seeds estimate the spread of one arm badly; pooling helps if all arms have a similar spread.
    """
    known = [row for row in rows if _is_number(row.get(metric))]
    names = _labels(known, metric)
    groups: dict[str, list[float]] = {}
    for row in known:
        groups.setdefault(str([row.get(name) for name in names]), []).append(row[metric])
    freedom = sum(len(values) - 1 for values in groups.values())
    if not freedom:
        return Noise(math.nan, 0)
    squares = sum((v - statistics.mean(values)) ** 2 for values in groups.values() for v in values)
    return Noise(math.sqrt(squares / freedom), freedom)


def _labels(rows: Sequence[Row], metric: str) -> list[str]:
    """Return the columns that identify a row apart from its seed: texts, and numbers equal for all seeds of an arm.

    If each arm has one seed, integers identify a row and floats are measurements.
    """
    names = sorted({name for row in rows for name in row} - {metric, "seed"})
    return [name for name in names if _is_label(rows, name)]


def _is_label(rows: Sequence[Row], name: str) -> bool:
    values = [row.get(name) for row in rows]
    if not any(_is_number(value) for value in values):
        return True
    found: dict[Any, dict[Any, set[Any]]] = {}
    for row, value in zip(rows, values, strict=True):
        found.setdefault(row.get("arm"), {}).setdefault(row.get("seed"), set()).add(value)
    if all(len(seeds) == 1 for seeds in found.values()):
        return not any(isinstance(value, float) for value in values)
    return all(len({frozenset(seen) for seen in seeds.values()}) == 1 for seeds in found.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def difference(left: Sequence[Row], right: Sequence[Row], metric: str, noise: Noise) -> Difference | None:
    """Return the difference between the means of two sets of rows, or None if one is empty.

    With at least `OWN` rows on each side, use their own variances (Welch), which may differ; else the pooled noise.
    """
    if not left or not right:
        return None
    a, b = (statistics.mean(row[metric] for row in side) for side in (left, right))
    if min(len(left), len(right)) >= OWN:
        parts = [(statistics.variance(row[metric] for row in side) / len(side), len(side)) for side in (left, right)]
        square = sum(part for part, _ in parts)
        spread = sum(part**2 / (count - 1) for part, count in parts)
        freedom = int(square**2 / spread) if spread else len(left) + len(right) - 2
        return Difference(a, b, a - b, math.sqrt(square), freedom)
    error = noise.deviation * math.sqrt(1 / len(left) + 1 / len(right))
    return Difference(a, b, a - b, error, noise.freedom)


@dataclass(frozen=True)
class Margin:
    """The difference in the claimed direction (negative: against the claim) and its standard error (NaN: unknown)."""

    value: float
    error: float
    freedom: int

    def beyond(self, level: float) -> int:
        """Return 1 or -1 if the value is above or below zero beyond the noise, else 0; -1 if it is not finite."""
        if not math.isfinite(self.value):
            return -1
        if math.isnan(self.error) or not self.value:
            return 0
        limit = quantile(1 - level / 2, self.freedom) * self.error
        return 0 if abs(self.value) <= limit else int(math.copysign(1, self.value))


def judge(margins: Sequence[Margin]) -> str:
    """Return `HOLDS` if every margin is above zero beyond the noise, `FAILS` if any is below, else `NOISE`.

    One of many margins is more likely to be below by chance, so that test divides the level by their number.
    """
    if any(margin.beyond(LEVEL / len(margins)) < 0 for margin in margins):
        return FAILS
    return HOLDS if margins and all(margin.beyond(LEVEL) > 0 for margin in margins) else NOISE


def quantile(p: float, freedom: int) -> float:
    """Return a quantile of Student's t: exact for 1 and 2 degrees of freedom, else by Cornish-Fisher (within 1 %)."""
    if freedom < 1:
        return math.inf
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def select(rows: Iterable[Row], labels: Mapping[str, Any]) -> list[Row]:
    """Return the rows with these labels; a list of values matches any of them."""

    def has(row: Row, name: str, value: Any) -> bool:
        return row.get(name) in value if isinstance(value, list) else row.get(name) == value

    return [row for row in rows if all(has(row, name, value) for name, value in labels.items())]


def number(value: float) -> str:
    """Format a number with about four significant digits."""
    if value == 0 or (isinstance(value, int) and abs(value) < 10_000):
        return str(value)
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"
