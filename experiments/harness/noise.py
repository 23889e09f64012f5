"""The verdict arithmetic: differences between arms with the errors of seeds and of the held-out text.

The spread between seeds is pooled over the arms measured on one text; an arm whose own standard deviation is more than
twice that of the others is compared by Welch's t. (With three seeds a ratio of two comes by chance in 2 % of arms; a
variance of twice the pooled one in 14 %.) The error of the text comes from the same blocks of it for both arms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from scipy.special import stdtrit

Row = dict[str, Any]
HOLDS, FAILS = "holds", "does not hold"
SAME, UNRESOLVED, INDICATION = "no difference", "not resolved", "indication"
SEEDS = 3
"""Seeds needed on each side of a comparison."""
APART = 2.0
"""Ratio of an arm's standard deviation to that of the others from which they are not pooled."""
LEVEL = 0.05
"""Two-sided significance level."""
EXACT = 10**9
"""Degrees of freedom of a number without noise."""
BLOCKS = {"bits_per_byte": "loss"}
"""Metrics proportional to another one, whose blocks (the column `METRIC_blocks`) stand for theirs."""


@dataclass(frozen=True)
class Noise:
    """Standard deviation between seeds, pooled over arms, and its degrees of freedom; NaN and 0 if no arm ran twice."""

    deviation: float
    freedom: int
    labels: tuple[str, ...] = ()
    """Columns that identify an arm."""
    apart: frozenset[str] = frozenset()
    """Arms with a spread of their own, which are not pooled."""


@dataclass(frozen=True)
class Difference:
    """A difference with its standard error (NaN: unknown), and the means of its sides."""

    value: float
    error: float
    freedom: int
    seeds: int = 0
    """Fewest seeds of a side."""
    complete: bool = False
    """Whether the error includes that of the held-out text."""
    left: float = math.nan
    right: float = math.nan

    def toward(self, sign: float, shift: float = 0.0) -> Self:
        """Return `shift + sign * value`: positive if it confirms a claim."""
        return replace(self, value=shift + sign * self.value)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the bounds that cover the true value with probability 1 - level; infinite if the error is unknown."""
        if math.isnan(self.error):
            return -math.inf, math.inf
        reach = quantile(1 - level / 2, self.freedom) * self.error if self.error else 0.0
        return self.value - reach, self.value + reach

    def bounds(self) -> tuple[float, float, float]:
        """Return the interval with the value in its middle."""
        low, high = self.interval()
        return low, self.value, high

    def sign(self, level: float = LEVEL, margin: float = 0.0) -> int:
        """Return 1 or -1 if the interval is above or below zero, 0 if neither or if it lies within the margin.

        A value that is not finite, of a training that diverged, is below.
        """
        if not math.isfinite(self.value):
            return -1
        low, high = self.interval(level)
        return 0 if -margin < low and high < margin else int(low > 0) - int(high < 0)

    def __str__(self) -> str:
        low, high = self.interval()
        range_ = ", one seed" if math.isnan(self.error) else f", {low:+.3g} to {high:+.3g}"
        return f"{number(self.left)} against {number(self.right)} ({self.value:+.3g}{range_})"


def pooled(rows: Sequence[Row], metric: str) -> Noise:
    """Return the standard deviation of `metric` between seeds, pooled over groups of rows that differ only in the seed.

    Two or three seeds estimate the spread of one arm badly; pooling helps if all arms have a similar spread. A group
    whose own is more than `APART` times that of the others is left out, and so are values that are not finite.
    """
    known = [row for row in rows if _is_number(row.get(metric)) and math.isfinite(row[metric])]
    labels = _labels(known, metric)
    groups: dict[str, list[float]] = {}
    for row in known:
        groups.setdefault(_key(row, labels), []).append(row[metric])
    several = {key: (len(values) - 1, statistics.variance(values)) for key, values in groups.items() if values[1:]}
    apart = frozenset(
        key
        for key, (_, variance) in several.items()
        if len(several) > 1
        and math.sqrt(variance) > APART * _pool([other for name, other in several.items() if name != key])[0]
    )
    return Noise(*_pool([one for key, one in several.items() if key not in apart]), labels, apart)


def _pool(groups: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """Return the standard deviation and its degrees of freedom from those and the variance of each group."""
    freedom = sum(free for free, _ in groups)
    squares = sum(free * variance for free, variance in groups)
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def _key(row: Row, labels: Iterable[str]) -> str:
    return str([row.get(name) for name in labels])


def _labels(rows: Sequence[Row], metric: str) -> tuple[str, ...]:
    """Return the columns that identify a row apart from its seed: those with the same values for all seeds of an arm.

    A text can be a measurement too, as whether a run reached a plateau. If each arm has one seed, floats are
    measurements and all else identifies a row.
    """
    names = sorted({name for row in rows for name in row} - {metric, "seed"})
    return tuple(name for name in names if _is_label(rows, name))


def _is_label(rows: Sequence[Row], name: str) -> bool:
    values = [row.get(name) for row in rows]
    if any(isinstance(value, list) for value in values):
        return False
    found: dict[Any, dict[Any, set[Any]]] = {}
    for row, value in zip(rows, values, strict=True):
        found.setdefault(row.get("arm"), {}).setdefault(row.get("seed"), set()).add(value)
    if all(len(seeds) == 1 for seeds in found.values()):
        return not any(isinstance(value, float) for value in values)
    return all(len({frozenset(seen) for seen in seeds.values()}) == 1 for seeds in found.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(rows: Sequence[Row], left: Mapping[str, Any], right: Mapping[str, Any], metric: str) -> Difference | None:
    """Return the difference of the rows with the labels `left` and `right`, or None if one side has none.

    The spread between seeds is that of the `rows` measured on the same text.
    """
    sides = select(rows, left), select(rows, right)
    if not all(sides):
        return None
    texts = {row.get("text") for side in sides for row in side}
    return difference(*sides, metric, pooled([row for row in rows if row.get("text") in texts], metric))


def difference(left: Sequence[Row], right: Sequence[Row], metric: str, noise: Noise) -> Difference | None:
    """Return the difference between the means of two sets of rows, or None if one is empty.

    The squares of the errors of seeds and text add; their degrees of freedom follow from Welch and Satterthwaite.
    """
    sides = (left, right)
    if not left or not right:
        return None
    a, b = (statistics.mean(row[metric] for row in side) for side in sides)
    parts = _seeds_error(sides, metric, noise)
    text = text_error(left, right, metric)
    if text is not None:
        parts.append((text[0] ** 2, text[1]))
    square = sum(part for part, _ in parts)
    seeds = min(len({row.get("seed") for row in side}) for side in sides)
    return Difference(a - b, math.sqrt(square), _freedom(parts), seeds, text is not None, a, b)


def _seeds_error(sides: Sequence[Sequence[Row]], metric: str, noise: Noise) -> list[tuple[float, int]]:
    """Return the squared error that seeds cause in a mean or a difference of means, in parts with their freedom."""
    if noise.apart.intersection(_key(row, noise.labels) for side in sides for row in side):
        enough = all(len(side) > 1 for side in sides)
        return [
            (statistics.variance(row[metric] for row in side) / len(side) if enough else math.nan, len(side) - 1)
            for side in sides
        ]
    return [(noise.deviation**2 * sum(1 / len(side) for side in sides), noise.freedom)]


def _freedom(parts: Sequence[tuple[float, int]]) -> int:
    """Return the degrees of freedom of a sum of variances (Welch and Satterthwaite), rounded down."""
    spread = sum(square**2 / freedom for square, freedom in parts if square and freedom)
    square = sum(square for square, _ in parts)
    if math.isnan(square):
        return 0
    return int(square**2 / spread + 1e-9) if spread else sum(freedom for _, freedom in parts)


def text_error(left: Sequence[Row], right: Sequence[Row], metric: str) -> tuple[float, int] | None:
    """Return the standard error of the difference over blocks of held-out text, and its degrees of freedom.

    This is the limit of a paired bootstrap over blocks: the standard deviation of the blocks' differences, means over
    seeds, over the square root of their number. None if the sides were not measured on the same blocks.
    """
    sides = [_blocks(side, metric) for side in (left, right)]
    if sides[0] is None or sides[1] is None or left[0].get("text") != right[0].get("text"):
        return None
    return _mean_error([a - b for a, b in zip(*sides, strict=True)])


def _mean_error(values: Sequence[float]) -> tuple[float, int]:
    return statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1


def _blocks(rows: Sequence[Row], metric: str) -> list[float] | None:
    """Return the mean of `metric` over the rows for each block of the text; None without several, the same in all."""
    of = BLOCKS.get(metric, metric)
    if any(len(row.get(f"{of}_blocks", ())) < 2 for row in rows) or len({row.get("text") for row in rows}) > 1:
        return None
    ratios = [1.0 if of == metric else row[metric] / row[of] for row in rows]
    scaled = [[ratio * value for value in row[f"{of}_blocks"]] for ratio, row in zip(ratios, rows, strict=True)]
    return [statistics.mean(values) for values in zip(*scaled, strict=True)]


def gain(rows: Sequence[Row], metric: str, baseline: str, sign: float, noise: Noise) -> Difference:
    """Return the mean of `sign * (metric - baseline)`, two columns of the rows, with the errors of seeds and text."""
    values, bases = ([row[name] for row in rows] for name in (metric, baseline))
    parts, blocks = _seeds_error((rows,), metric, noise), _blocks(rows, metric)
    if blocks is not None:
        error, freedom = _mean_error(blocks)
        parts.append((error**2, freedom))
    left, right = statistics.mean(values), statistics.mean(bases)
    error, seeds = math.sqrt(sum(part for part, _ in parts)), len({row.get("seed") for row in rows})
    return Difference(sign * (left - right), error, _freedom(parts), seeds, blocks is not None, left, right)


def judge(found: Sequence[Difference], seeds: int = SEEDS, margin: float = 0.0) -> str:
    """Return `HOLDS` if every difference is above zero, `FAILS` if any is below, `SAME` if all lie within the margin.

    A clear difference with fewer than `seeds` seeds or an unknown error of the text is an `INDICATION`; everything else
    is `UNRESOLVED`. One of many differences is more likely to be below by chance, so that test divides the level by
    their number.
    """

    def sufficient(some: Sequence[Difference]) -> bool:
        return all(one.seeds >= seeds and one.complete for one in some)

    below = [one for one in found if one.sign(LEVEL / len(found), margin) < 0]
    if below:
        return FAILS if any(sufficient([one]) for one in below) else INDICATION
    if found and all(one.sign(LEVEL, margin) > 0 for one in found):
        return HOLDS if sufficient(found) else INDICATION
    within = found and all(-margin < low and high < margin for low, high in (one.interval() for one in found))
    return SAME if within and sufficient(found) else UNRESOLVED


def quantile(p: float, freedom: int) -> float:
    """Return a quantile of Student's t; infinite without a degree of freedom."""
    return float(stdtrit(freedom, p)) if freedom else math.inf


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
