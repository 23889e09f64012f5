"""The advice of docs/findings.md: for each need a mechanism, what was measured, and what would change the advice.

`choices.yaml` names the claims that the advice rests on. Their figures and verdicts come from the results, so that no
new run leaves an old figure behind; advice without a measured claim is "untested".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness.claims import INCOMPARABLE, NOT_RUN, WAITING, Verdict
from experiments.harness.result import line, ours
from subquad.config import Config, suggest

FILE = "choices.yaml"
UNTESTED = "untested"
SILENT = (NOT_RUN, WAITING, INCOMPARABLE)
"""Verdicts that say nothing about a claim."""
FIGURES = 3
"""Figures that are shown of a claim; its own page has all."""


@dataclass(frozen=True, kw_only=True)
class Choice(Config):
    """Advice for one need."""

    need: str
    choose: str
    claims: list[str] = field(default_factory=list)
    """Claims as EXPERIMENT/ID, the most telling first."""
    unless: str
    """What would change the advice."""
    withdrawn: str = ""
    """Why the advice does not stand until it is measured again (empty: it stands)."""

    @property
    def told(self) -> str:
        """Return the choice, or that there is none and why."""
        if not self.withdrawn:
            return self.choose
        why = f"withdrawn until measured again, because {self.withdrawn}"
        return f"**no recommendation**: {why} (before: {self.choose})"


@dataclass(frozen=True, kw_only=True)
class Choices(Config):
    """The contents of `choices.yaml`."""

    choices: list[Choice]


def advice(root: Path, known: Mapping[str, tuple[Verdict, str]]) -> str:
    """Return the advice in `root` as a table; `known` has each claim's verdict, and its experiment as shown.

    Raises `ValueError` for an unknown claim.
    """
    lines = ["| You need | Choose | Measured | What would change this |", "|:---|:---|:---|:---|"]
    for choice in Choices.from_file(root / FILE).choices:
        for name in choice.claims:
            if name not in known:
                where = f"{root / FILE}, {choice.need!r}"
                raise ValueError(f"{where}: unknown claim {name!r}; {suggest(name, list(known))}")
        measured = [_told(*known[name]) for name in choice.claims if known[name][0].verdict not in SILENT]
        lines.append(line(choice.need, choice.told, ". ".join(measured) or UNTESTED, choice.unless))
    return "\n".join(lines)


def _told(verdict: Verdict, shown: str) -> str:
    figures = ours(verdict, "cpu").split("; ")
    if len(figures) > FIGURES:
        figures[FIGURES - 1 :] = [f"{len(figures) - FIGURES + 1} more"]
    return f"{verdict.claim.says}: {'; '.join(figures)}, **{verdict.verdict}** ({shown})"
