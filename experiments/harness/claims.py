"""A paper's claims and figures (`expected.json` in an experiment's folder), and verdicts on them from our rows."""

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
    """A statement that a measurement can confirm or refute."""

    id: str
    says: str
    """The claim, in our words."""
    theirs: str
    """The paper's figures."""
    kind: Literal["lower", "higher", "equal", "function", "not comparable", "waiting"]
    """lower, higher: compare `metric` of the left rows with the right ones; equal: `metric` of the left rows is
    `value`; function: `claim_ID(rows)` in `experiment.py` judges; not comparable: see `why`; waiting: needs a GPU."""
    metric: str = "loss"
    pairs: list[list[dict[str, Any]]] = field(default_factory=list)
    """Pairs of labels, left and right; the claim must hold for each pair (equal: left labels only)."""
    where: dict[str, Any] = field(default_factory=dict)
    """Labels common to all rows of the claim."""
    value: float | None = None
    why: str = ""
    on_page: bool = True
    """Show the claim in docs/findings.md; the experiment's README.md always shows it."""

    def __post_init__(self) -> None:
        sides = {"lower": 2, "higher": 2, "equal": 1}.get(self.kind)
        if sides and (not self.pairs or any(len(pair) != sides for pair in self.pairs)):
            raise ValueError(f"claim {self.id!r} of kind {self.kind!r} needs pairs of {sides} sets of labels")
        if self.kind == "equal" and self.value is None:
            raise ValueError(f"claim {self.id!r} of kind 'equal' needs a value")
        if self.kind in ("not comparable", "waiting") and not self.why:
            raise ValueError(f"claim {self.id!r} of kind {self.kind!r} needs a reason in why")


@dataclass(frozen=True, kw_only=True)
class Expected(Config):
    """The figures and claims of one table or figure of a paper."""

    paper: str
    """Name of the paper, a heading of docs/findings.md."""
    title: str
    source: str
    """Paper, table or section."""
    comparable: str
    """Reasons why the paper's figures can or cannot be compared with ours."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """The paper's figures, labelled like our rows."""
    claims: list[Claim] = field(default_factory=list)
    caption: str = ""
    """Caption of the plot in docs/findings.md, which shows only plots with a caption."""


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict, our figures, and the scale they were measured at."""

    claim: Claim
    ours: str
    verdict: str
    scale: str = ""


def read_expected(folder: Path) -> Expected:
    """Read the paper's figures and claims from an experiment's folder; errors name the file."""
    return Expected.from_file(folder / FILE)


def by_size(scales: Mapping[str, Any]) -> list[str]:
    """Return the scales that have rows, without smoke: complete before partial ones, then large before small ones."""
    known = [name for name in reversed(SCALES) if name != "smoke" and scales.get(name, {}).get("rows")]
    return sorted(known, key=lambda name: scales[name]["done"] < scales[name]["units"])


def verdicts(experiment: Path, expected: Expected, scales: Mapping[str, Any]) -> list[Verdict]:
    """Judge each claim at the largest scale that has rows for it."""
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
    """Judge a claim from the rows of one scale."""
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
            raise ValueError(f"{experiment}: claim_{claim.id} returned {verdict!r}; valid: {', '.join(VERDICTS)}")
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
    """Compare each pair: the claim holds if all differences exceed the noise, and fails if one does so reversed."""
    noise = pooled(rows, claim.metric)
    sign = 1.0 if claim.kind == "higher" else -1.0
    found = [difference(select(rows, a), select(rows, b), claim.metric, noise) for a, b in claim.pairs]
    known = [one for one in found if one is not None]
    shown = "; ".join(str(one) for one in known)
    if len(known) < len(found):
        return Verdict(claim, shown, NOT_RUN, scale)
    return Verdict(claim, shown, judge([Margin(sign * one.value, one.error, one.freedom) for one in known]), scale)
