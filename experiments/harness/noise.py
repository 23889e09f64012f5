"""Differences between arms beside the noise: the spread between seeds, pooled over all arms, and Student's t."""

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
"""Seeds of an arm that are enough to know its own spread."""
LEVEL = 0.05
"""Two-sided: how often a difference of nothing is taken for one."""


@dataclass(frozen=True)
class Noise:
    """The standard deviation between seeds of one arm; NaN without freedom, where no arm was run twice."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Difference:
    """Means of two sets of rows and how far apart they are."""

    left: float
    right: float
    value: float
    """left - right."""
    error: float
    """Its standard error; NaN where no arm was run twice."""
    freedom: int

    def __str__(self) -> str:
        error = f" ± {number(self.error)}" if not math.isnan(self.error) else ", one seed each"
        return f"{number(self.left)} against {number(self.right)} ({self.value:+.3g}{error})"


def pooled(rows: Sequence[Row], metric: str) -> Noise:
    """The standard deviation of `metric` between seeds, pooled over groups of rows that differ in the seed alone.

    Two or three seeds of one arm say little of its spread; all arms together say more, if it is alike.
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
    """Return the names that tell rows apart beside the seed: words, and numbers that are equal for all seeds of an arm.

    Of one seed alone every number is; there whole numbers tell rows apart, and the others are what was measured.
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
    """The difference of the means of two sets of rows; None where one is empty.

    With `OWN` rows on each side the noise is their own (Welch), since arms may differ in it; with fewer the pooled one.
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
    """By how much a claim is borne out (below zero: the other way), and its standard error (NaN: not known)."""

    value: float
    error: float
    freedom: int

    def beyond(self, level: float) -> int:
        """1 above zero beyond the noise, -1 below, 0 neither; a value that is not finite is below."""
        if not math.isfinite(self.value):
            return -1
        if math.isnan(self.error) or not self.value:
            return 0
        limit = quantile(1 - level / 2, self.freedom) * self.error
        return 0 if abs(self.value) <= limit else int(math.copysign(1, self.value))


def judge(margins: Sequence[Margin]) -> str:
    """`HOLDS` where every margin is above zero beyond the noise, `FAILS` where one is below, else `NOISE`.

    Of many margins one is below by chance sooner than of one: the level is divided by their number there.
    """
    if any(margin.beyond(LEVEL / len(margins)) < 0 for margin in margins):
        return FAILS
    return HOLDS if margins and all(margin.beyond(LEVEL) > 0 for margin in margins) else NOISE


def quantile(p: float, freedom: int) -> float:
    """Student's t: exact for one and two degrees of freedom, else Cornish and Fisher's expansion (within 1 %)."""
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
    """The rows that have these labels; a list of values is a choice of them."""

    def has(row: Row, name: str, value: Any) -> bool:
        return row.get(name) in value if isinstance(value, list) else row.get(name) == value

    return [row for row in rows if all(has(row, name, value) for name, value in labels.items())]


def number(value: float) -> str:
    """A number with the digits that a reader needs."""
    if value == 0 or (isinstance(value, int) and abs(value) < 10_000):
        return str(value)
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"
