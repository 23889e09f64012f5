"""The advice of docs/findings.md: a mechanism for each need, where it was measured, and what would change the advice.

`choices.yaml` names the claims that the advice rests on; the table links to their figures. Advice without a measured
claim is "untested".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness.claims import INCOMPARABLE, NOT_RUN, WAITING, Verdict
from experiments.harness.result import line
from subquad.config import Config, suggest

FILE = "choices.yaml"
UNTESTED = "untested"
SILENT = (NOT_RUN, WAITING, INCOMPARABLE)
"""Verdicts that say nothing about a claim."""


@dataclass(frozen=True, kw_only=True)
class Choice(Config):
    """Advice for one need."""

    need: str
    choose: str
    """The advice; of a withdrawn one, that which would be given again."""
    claims: list[str] = field(default_factory=list)
    """Claims as EXPERIMENT/ID, the most telling first."""
    unless: str
    """What would change the advice, or allow one."""
    withdrawn: str = ""
    """Why there is no advice until it is measured again (empty: there is)."""


@dataclass(frozen=True, kw_only=True)
class Choices(Config):
    """The contents of `choices.yaml`."""

    choices: list[Choice]


def advice(root: Path, known: Mapping[str, tuple[Verdict, str]]) -> str:
    """Return the advice in `root` as a table, and the needs that have none.

    `known` has each claim's verdict, and a link to its figures. Raises `ValueError` for an unknown claim.
    """
    lines = ["| Choose | If you need | Measured in | What would change this |", "|:---|:---|:---|:---|"]
    none = ["No advice yet:", ""]
    for choice in Choices.from_file(root / FILE).choices:
        for name in choice.claims:
            if name not in known:
                where = f"{root / FILE}, {choice.need!r}"
                raise ValueError(f"{where}: unknown claim {name!r}; {suggest(name, list(known))}")
        found = [known[name][1] for name in choice.claims if known[name][0].verdict not in SILENT]
        measured = ", ".join(dict.fromkeys(found))
        if choice.withdrawn:
            why = "; ".join([choice.withdrawn, *([measured] if measured else [])])
            none.append(f"- **{choice.need}**: {why}. Needed: {choice.unless}.")
        else:
            lines.append(line(choice.choose, choice.need, measured or UNTESTED, choice.unless))
    return "\n".join([*lines, "", *none])
