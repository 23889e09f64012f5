"""Claims of a paper, the paper's figures, and what our rows say of them: `expected.json` in an experiment's folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.config import Config
from subquad.reproduction.units import Row, function

FILE = "expected.json"
HOLDS, FAILS, NOISE = "holds", "does not hold", "no difference beyond the noise"
INCOMPARABLE, WAITING, NOT_RUN = "not comparable", "waiting for a GPU", "not run"
VERDICTS = (HOLDS, FAILS, NOISE, INCOMPARABLE, WAITING, NOT_RUN)
SIGMAS = 2.0
"""A difference counts from so many standard errors on."""


@dataclass(frozen=True, kw_only=True)
class Claim(Config):
    """One sentence of a paper that a measurement can bear out or not."""

    id: str
    says: str
    """The claim, in our words."""
    theirs: str
    """The paper's figures."""
    kind: Literal["lower", "higher", "equal", "function", "not comparable", "waiting"]
    """lower, higher: `metric` of the left rows against that of the right; equal: `metric` of the left rows is `value`;
    function: `claim_ID(rows)` of `experiment.py`; not comparable: never, for the reason `why`; waiting: for a GPU."""
    metric: str = "loss"
    pairs: list[list[dict[str, Any]]] = field(default_factory=list)
    """Pairs of labels, left and right; the claim is about all of them (equal: the left ones alone)."""
    where: dict[str, Any] = field(default_factory=dict)
    """Labels that all rows of the claim have."""
    value: float | None = None
    why: str = ""
    on_page: bool = True
    """Whether docs/findings.md has it; the experiment's own README.md has all."""

    def __post_init__(self) -> None:
        sides = {"lower": 2, "higher": 2, "equal": 1}.get(self.kind)
        if sides and (not self.pairs or any(len(pair) != sides for pair in self.pairs)):
            raise ValueError(f"claim {self.id!r} is {self.kind!r} and needs pairs of {sides} sets of labels")
        if self.kind == "equal" and self.value is None:
            raise ValueError(f"claim {self.id!r} needs the value that its rows should have")
        if self.kind in ("not comparable", "waiting") and not self.why:
            raise ValueError(f"claim {self.id!r} needs its reason, why")


@dataclass(frozen=True, kw_only=True)
class Expected(Config):
    """What a paper reports, in one table or figure."""

    paper: str
    """The paper's name in docs/findings.md."""
    title: str
    source: str
    """Paper, table or section."""
    comparable: str
    """What makes the figures comparable with ours, or not."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """The paper's figures, each with labels as our rows have."""
    claims: list[Claim] = field(default_factory=list)
    caption: str = ""
    """What the plot shows; with it the plot stands in docs/findings.md."""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim."""

    claim: Claim
    ours: str
    verdict: str


def read_expected(folder: Path) -> Expected:
    """The paper's figures and claims in an experiment's folder; errors name the file."""
    try:
        return Expected.from_file(folder / FILE)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{folder / FILE}: {error}") from error


def verdicts(experiment: Path, expected: Expected, rows: Sequence[Row]) -> list[Verdict]:
    """What the rows say of each claim."""
    return [_verdict(experiment, claim, rows) for claim in expected.claims]


def _verdict(experiment: Path, claim: Claim, rows: Sequence[Row]) -> Verdict:
    if claim.kind in (INCOMPARABLE, "waiting"):
        return Verdict(claim, claim.why, INCOMPARABLE if claim.kind == INCOMPARABLE else WAITING)
    if not rows:
        return Verdict(claim, "", NOT_RUN)
    if claim.kind == "function":
        judge = function(experiment, f"claim_{claim.id}")
        if judge is None:
            raise ValueError(f"{experiment}: experiment.py has no function claim_{claim.id}(rows)")
        found = judge(list(rows))
        if found is None:
            return Verdict(claim, "", NOT_RUN)
        verdict, ours = found
        if verdict not in VERDICTS:
            raise ValueError(
                f"claim_{claim.id} of {experiment} must give one of {', '.join(VERDICTS)}, got {verdict!r}"
            )
        return Verdict(claim, ours, verdict)
    chosen = select(rows, claim.where)
    if claim.kind == "equal":
        return _equal(claim, chosen)
    return _compared(claim, chosen)


def _equal(claim: Claim, rows: Sequence[Row]) -> Verdict:
    found = [row[claim.metric] for pair in claim.pairs for row in select(rows, pair[0])]
    if not found:
        return Verdict(claim, "", NOT_RUN)
    shown = ", ".join(sorted({f"{value:,}" if isinstance(value, int) else number(value) for value in found}))
    return Verdict(claim, shown, HOLDS if all(value == claim.value for value in found) else FAILS)


def _compared(claim: Claim, rows: Sequence[Row]) -> Verdict:
    """All pairs: the claim holds where each difference is beyond the noise, and fails where one is the other way."""
    noise = pooled(rows, claim.metric)
    sign = 1.0 if claim.kind == "higher" else -1.0
    shown: list[str] = []
    states: list[float | None] = []
    for left, right in claim.pairs:
        found = difference(select(rows, left), select(rows, right), claim.metric, noise)
        if found is None:
            states.append(None)
            continue
        shown.append(str(found))
        states.append(sign * found.sigmas)
    known = [state for state in states if state is not None]
    if len(known) < len(states) or not known:
        return Verdict(claim, "; ".join(shown), NOT_RUN)
    if min(known) < -SIGMAS:
        verdict = FAILS
    else:
        verdict = HOLDS if min(known) > SIGMAS else NOISE
    return Verdict(claim, "; ".join(shown), verdict)


@dataclass(frozen=True)
class Difference:
    """Means of two sets of rows and how far apart they are."""

    left: float
    right: float
    value: float
    """left - right."""
    error: float
    """Its standard error; NaN where no arm was run twice."""

    @property
    def sigmas(self) -> float:
        """The difference in standard errors; NaN where these are not known."""
        if self.error == 0:
            return math.copysign(math.inf, self.value) if self.value else 0.0
        return self.value / self.error

    def __str__(self) -> str:
        error = f" ± {number(self.error)}" if not math.isnan(self.error) else ", one seed each"
        return f"{number(self.left)} against {number(self.right)} ({self.value:+.3g}{error})"


def difference(left: Sequence[Row], right: Sequence[Row], metric: str, noise: float) -> Difference | None:
    """The difference of the means of two sets of rows; None where one is empty. `noise` is one row's deviation."""
    if not left or not right:
        return None
    a, b = (statistics.mean(row[metric] for row in side) for side in (left, right))
    return Difference(a, b, a - b, noise * math.sqrt(1 / len(left) + 1 / len(right)))


def pooled(rows: Iterable[Row], metric: str) -> float:
    """The standard deviation between seeds, pooled over all arms; NaN where no arm was run twice."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row.get(metric), int | float):
            same = {name: v for name, v in row.items() if name not in (metric, "seed") and isinstance(v, str | int)}
            groups.setdefault(str(sorted(same.items())), []).append(row[metric])
    freedom = sum(len(values) - 1 for values in groups.values())
    if not freedom:
        return math.nan
    return math.sqrt(sum((v - statistics.mean(values)) ** 2 for values in groups.values() for v in values) / freedom)


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
