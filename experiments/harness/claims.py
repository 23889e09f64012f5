"""Claims of a paper, the paper's figures, and what our rows say of them: `expected.json` in an experiment's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.harness.noise import FAILS, HOLDS, NOISE, Margin, Row, difference, judge, number, pooled, select
from experiments.harness.recipe import SCALES
from experiments.harness.units import function
from subquad.config import Config

FILE = "expected.json"
INCOMPARABLE, WAITING, NOT_RUN = "not comparable", "waiting for a GPU", "not run"
VERDICTS = (HOLDS, FAILS, NOISE, INCOMPARABLE, WAITING, NOT_RUN)


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
    """The figures and claims of one table or figure of a paper."""

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
    """A claim's verdict, our figures, and the scale that they are of."""

    claim: Claim
    ours: str
    verdict: str
    scale: str = ""


def read_expected(folder: Path) -> Expected:
    """The paper's figures and claims in an experiment's folder; errors name the file."""
    return Expected.from_file(folder / FILE)


def by_size(scales: Mapping[str, Any]) -> list[str]:
    """The scales that there are rows of, smoke left out: whole ones before parts, large ones before small ones."""
    known = [name for name in reversed(SCALES) if name != "smoke" and scales.get(name, {}).get("rows")]
    return sorted(known, key=lambda name: scales[name]["done"] < scales[name]["units"])


def verdicts(experiment: Path, expected: Expected, scales: Mapping[str, Any]) -> list[Verdict]:
    """Judge each claim at the largest scale that says anything of it."""
    found = []
    for claim in expected.claims:
        try:
            tried = [judged(experiment, claim, scales[name]["rows"], name) for name in by_size(scales)]
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"{experiment}: the rows of its result do not fit claim {claim.id!r}: {error!r}"
            ) from error
        tried.append(judged(experiment, claim, [], ""))
        found.append(next((verdict for verdict in tried if verdict.verdict != NOT_RUN), tried[0]))
    return found


def judged(experiment: Path, claim: Claim, rows: Sequence[Row], scale: str) -> Verdict:
    """Judge a claim by the rows of one scale."""
    if claim.kind in (INCOMPARABLE, "waiting"):
        return Verdict(claim, claim.why, INCOMPARABLE if claim.kind == INCOMPARABLE else WAITING)
    if not rows:
        return Verdict(claim, "", NOT_RUN)
    if claim.kind == "function":
        judge_it = function(experiment, f"claim_{claim.id}")
        if judge_it is None:
            raise ValueError(f"{experiment}: experiment.py has no function claim_{claim.id}(rows)")
        found = judge_it(list(rows))
        if found is None:
            return Verdict(claim, "", NOT_RUN, scale)
        verdict, ours = found
        if verdict not in VERDICTS:
            raise ValueError(
                f"claim_{claim.id} of {experiment} must give one of {', '.join(VERDICTS)}, got {verdict!r}"
            )
        return Verdict(claim, ours, verdict, scale)
    chosen = select(rows, claim.where)
    return _equal(claim, chosen, scale) if claim.kind == "equal" else _compared(claim, chosen, scale)


def _equal(claim: Claim, rows: Sequence[Row], scale: str) -> Verdict:
    found = [row[claim.metric] for pair in claim.pairs for row in select(rows, pair[0])]
    if not found:
        return Verdict(claim, "", NOT_RUN, scale)
    shown = ", ".join(sorted({f"{value:,}" if isinstance(value, int) else number(value) for value in found}))
    return Verdict(claim, shown, HOLDS if all(value == claim.value for value in found) else FAILS, scale)


def _compared(claim: Claim, rows: Sequence[Row], scale: str) -> Verdict:
    """All pairs: the claim holds where each difference is beyond the noise, and fails where one is the other way."""
    noise = pooled(rows, claim.metric)
    sign = 1.0 if claim.kind == "higher" else -1.0
    found = [difference(select(rows, a), select(rows, b), claim.metric, noise) for a, b in claim.pairs]
    known = [one for one in found if one is not None]
    shown = "; ".join(str(one) for one in known)
    if len(known) < len(found):
        return Verdict(claim, shown, NOT_RUN, scale)
    return Verdict(claim, shown, judge([Margin(sign * one.value, one.error, one.freedom) for one in known]), scale)
