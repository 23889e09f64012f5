"""How much weight an experiment's result has: strong, medium or weak, by a rule over its verdicts and rows."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.claims import DECIDED, INCOMPARABLE, THEOREM, UNLEARNED, WAITING, Verdict
from experiments.harness.noise import SEEDS, Row

STRONG, MEDIUM, WEAK = WEIGHTS = ("strong", "medium", "weak")
MOST, HALF = 0.8, 0.5
"""Shares of decided claims."""
TEXT = 100_000
"""Scored tokens of held-out text."""


def weigh(found: Sequence[Verdict], rows: Sequence[Row]) -> tuple[str, str]:
    """Return the weight of a result and its reason; experiments/README.md states the rule.

    Rows with 20th percentiles hold the median of several repeats.
    """
    measured = [one for one in found if one.verdict not in (INCOMPARABLE, WAITING, THEOREM)]
    if not measured:
        return WEAK, "no claim was measured"
    on_models = [one for one in measured if one.claim.on_models]
    counted = on_models or measured
    decided = sum(one.verdict in DECIDED for one in counted)
    reasons = [f"{decided} of {len(counted)} claims {'on trained models ' if on_models else ''}decided"]
    limits = []
    if on_models:
        if any(one.verdict == UNLEARNED for one in on_models):
            limits.append("a reference learned nothing")
        scored = min((row["scored_tokens"] for row in rows if "scored_tokens" in row), default=TEXT)
        if scored < TEXT:
            limits.append(f"{scored:,} tokens of held-out text")
    elif any(one.claim.evidence == "times" for one in measured):
        seeds = {arm: {row["seed"] for row in rows if row["arm"] == arm} for arm in {row["arm"] for row in rows}}
        fewest = min(map(len, seeds.values()), default=0)
        if fewest < SEEDS and not any("p20" in name for row in rows for name in row):
            limits.append(f"{fewest} repeats of the timings")
    share = decided / len(counted)
    full = share >= MOST if on_models else share == 1
    weight = STRONG if full and not limits else MEDIUM if share >= HALF else WEAK
    return weight, "; ".join(reasons + limits)
