"""A paper's claims and figures (`expected.json` in an experiment's folder), and verdicts on them from our rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from experiments.harness import noise
from experiments.harness.noise import (
    FAILS,
    HOLDS,
    INDICATION,
    SAME,
    SEEDS,
    UNRESOLVED,
    Difference,
    Row,
    compare,
    gain,
    number,
    pooled,
    select,
)
from experiments.harness.recipe import SCALES
from experiments.harness.units import function
from subquad.config import Config

FILE = "expected.json"
OURS = "Ours"
"""`paper` of an experiment without one: all of its claims are ours."""
UNLEARNED, THEOREM = "not learned here", "theorem"
INCOMPARABLE, WAITING, NOT_RUN = "not comparable", "waiting for a GPU", "not run"
VERDICTS = (HOLDS, FAILS, SAME, UNRESOLVED, INDICATION, UNLEARNED, THEOREM, INCOMPARABLE, WAITING, NOT_RUN)
DECIDED, OPEN = (HOLDS, FAILS, SAME), (UNRESOLVED, INDICATION, UNLEARNED, NOT_RUN)
ERRORS = 3.0
"""Standard errors by which a reference must beat its trivial baseline."""
TRAINED = ("models", "fresh")
Evidence = Literal["models", "fresh", "times", "exact"]


@dataclass(frozen=True, kw_only=True)
class Gate(Config):
    """What shows that the models of a claim learned anything: its reference beats a trivial baseline."""

    reference: dict[str, Any]
    """Labels of the reference's rows. That another arm learned nothing is a result."""
    baseline: str
    """Column of the baseline in the units of `metric`: unigram (loss), gzip (bits_per_byte), chance, constant,
    bag_of_tokens (accuracy), or one of `measure`."""
    metric: str = "loss"
    better: Literal["lower", "higher"] = "lower"


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
    `value`; function: `claim_ID(rows)` in `experiment.py` returns differences or a verdict, and our figures as text;
    not comparable: see `why`; waiting: needs a GPU."""
    metric: str = "loss"
    pairs: list[list[dict[str, Any]]] = field(default_factory=list)
    """Pairs of labels, left and right; the claim must hold for each pair (equal: left labels only)."""
    where: dict[str, Any] = field(default_factory=dict)
    """Labels common to all rows of the claim."""
    evidence: Evidence = "models"
    """models: trained models, measured on the same held-out data; fresh: trained models, each seed measured on data of
    its own; times: timings, whose repeats count as seeds; exact: counts, and results that don't depend on chance."""
    seeds: int = SEEDS
    """Seeds that each side needs for a verdict; with fewer, a clear difference is an indication."""
    margin: float = 0.0
    """Difference, fixed before the run, up to which two sides are equal; without it, no verdict says so."""
    gate: Gate | None = None
    """The gate of this claim on trained models (None: the experiment's; without any, a decision is an indication)."""
    theorem: bool = False
    """The claim follows from the definitions (`why`): measurements can only contradict our code."""
    ours: bool = False
    """The claim is ours, not the paper's."""
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
        if (self.kind in ("not comparable", "waiting") or self.theorem) and not self.why:
            what = "that is a theorem" if self.theorem else f"of kind {self.kind!r}"
            raise ValueError(f"claim {self.id!r} {what} needs a reason in why")
        if self.seeds < SEEDS or self.margin < 0:
            raise ValueError(
                f"claim {self.id!r} needs seeds of at least {SEEDS} and a margin of at least 0, got {self.seeds}, "
                f"{self.margin}"
            )

    @property
    def on_models(self) -> bool:
        """Return whether the claim rests on trained models."""
        measured = self.kind in ("lower", "higher", "function") and not self.theorem
        return measured and self.evidence in TRAINED


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
    gate: Gate | None = None
    """The gate of the claims on trained models that have none of their own."""
    caption: str = ""
    """What the plot shows, for readers who cannot see it."""


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict, our figures, and the scale they were measured at."""

    claim: Claim
    ours: str
    verdict: str
    scale: str = ""


def read_expected(folder: Path) -> Expected:
    """Read the paper's figures and claims from an experiment's folder; errors name the file."""
    expected = Expected.from_file(folder / FILE)
    claims = [
        replace(claim, gate=claim.gate or expected.gate, ours=claim.ours or expected.paper == OURS)
        for claim in expected.claims
    ]
    return replace(expected, claims=claims)


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
    chosen = select(rows, claim.where)
    found = None
    if rows:
        found = _by_function(experiment, claim, chosen) if claim.kind == "function" else _figures(claim, chosen)
    if found is None:
        return Verdict(claim, "", NOT_RUN, scale)
    what, ours = found
    if isinstance(what, str):
        verdict = what
    else:
        known = [replace(one, complete=one.complete or claim.evidence != "models") for one in what]
        verdict = noise.judge(known, claim.seeds, claim.margin)
        if verdict == INDICATION:
            ours += f"; {'for' if all(one.value > 0 for one in known) else 'against'} the claim"
    if claim.on_models:
        verdict, ours = _gated(claim, rows, verdict, ours, words=isinstance(what, str))
    if claim.theorem and verdict != FAILS:
        verdict, ours = THEOREM, f"{claim.why}; {ours}"
    return Verdict(claim, ours, verdict, scale)


def _by_function(experiment: Path, claim: Claim, rows: list[Row]) -> tuple[str | list[Difference], str] | None:
    judge_it = function(experiment, f"claim_{claim.id}")
    if judge_it is None:
        raise ValueError(f"{experiment}: experiment.py has no function claim_{claim.id}(rows)")
    found: tuple[str | list[Difference], str] | None = judge_it(rows)
    if found is not None and isinstance(found[0], str) and found[0] not in VERDICTS:
        raise ValueError(f"{experiment}: claim_{claim.id} returned {found[0]!r}; valid: {', '.join(VERDICTS)}")
    return found


def _figures(claim: Claim, rows: Sequence[Row]) -> tuple[str | list[Difference], str] | None:
    """Return the differences of the claim's pairs in the claimed direction, or a verdict, and our figures."""
    if claim.kind == "equal":
        values = [row[claim.metric] for pair in claim.pairs for row in select(rows, pair[0])]
        shown = ", ".join(sorted({f"{value:,}" if isinstance(value, int) else number(value) for value in values}))
        return (HOLDS if all(value == claim.value for value in values) else FAILS, shown) if values else None
    found = [compare(rows, left, right, claim.metric) for left, right in claim.pairs]
    known = [one for one in found if one is not None]
    sign = 1.0 if claim.kind == "higher" else -1.0
    if claim.evidence == "exact":
        shown = "; ".join(f"{number(one.left)} against {number(one.right)}" for one in known)
        verdict = HOLDS if all(sign * one.value > 0 for one in known) else FAILS
        return verdict if len(known) == len(found) else NOT_RUN, shown
    shown = "; ".join(str(one) for one in known)
    if len(known) < len(found):
        return NOT_RUN, shown
    if claim.evidence == "times":
        repeats = [min(len(select(rows, side)) for side in pair) for pair in claim.pairs]
        known = [replace(one, seeds=count) for one, count in zip(known, repeats, strict=True)]
    return [one.toward(sign) for one in known], shown


def _gated(claim: Claim, rows: Sequence[Row], verdict: str, ours: str, *, words: bool) -> tuple[str, str]:
    """Return the verdict and our figures after the claim's gate.

    If the gate cannot be checked, or the verdict has no error (`words`), a decision is an indication.
    """
    if verdict not in (*DECIDED, UNRESOLVED, INDICATION):
        return verdict, ours
    learned, shown = (None, "") if claim.gate is None else _learned(claim.gate, rows, claim.where)
    if learned is False:
        return UNLEARNED, f"{ours}; {shown}"
    if verdict in DECIDED and (words or learned is None):
        if verdict == SAME:
            return UNRESOLVED, ours
        return INDICATION, f"{ours}; {'for' if verdict == HOLDS else 'against'} the claim"
    return verdict, ours


def _learned(gate: Gate, rows: Sequence[Row], where: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Return whether the reference beats the baseline on each text (None: unknown), and its figures if not."""

    def text(row: Row) -> Any:
        return row.get("text", row.get(gate.baseline))

    reference = select(select(rows, where), gate.reference) or select(rows, gate.reference)
    if not reference or any(gate.metric not in row or gate.baseline not in row for row in reference):
        return None, ""
    sign, known = (1.0 if gate.better == "higher" else -1.0), True
    for key in dict.fromkeys(text(row) for row in reference):
        same = [row for row in reference if text(row) == key]
        spread = pooled([row for row in rows if text(row) == key], gate.metric)
        one = gain(same, gate.metric, gate.baseline, sign, spread)
        if not one.value > (0.0 if math.isnan(one.error) else ERRORS * one.error):
            figures = f"{gate.metric} {number(one.left)}, {gate.baseline} {number(one.right)}"
            return False, f"the reference, {same[0]['arm']}, has {figures}"
        known = known and not math.isnan(one.error)
    return (True if known else None), ""
