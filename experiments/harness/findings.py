"""Write `docs/findings.md`: the verdict on each claim, from the results in the experiments' folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.harness.choices import advice
from experiments.harness.claims import OURS, VERDICTS, Expected, Verdict, read_expected, verdicts
from experiments.harness.result import core_seconds, ours, read_result, stale, telling, told
from experiments.harness.weight import WEIGHTS, weigh

REVIEW, CHOOSE, WRONG = "review.md", "choose.md", "wrong.md"
"""Parts of the page written by hand: what a review found, which attention to choose, and errors in the papers."""
MORE = "<!-- more -->"
"""What follows it in such a part stays in the part's file, which the page links."""
CHOICES = "<!-- choices -->"
"""Where the table of `choices.yaml` stands in `CHOOSE`."""
LINK = "../experiments/"
MARK = "; stale"
FIGURES = 2
"""Figures that are shown of a claim; its own page has all."""
TITLE = "# Findings"
HEAD = """\
## The claims that were measured

Small models on a CPU, trained for a few hundred to a few thousand steps: they test claims, not the papers' absolute
figures. Each link leads to the folder of an experiment: all of its claims, the paper's figures, ours, a plot, the
recipe and the command. (ours) marks claims that no paper makes.

- A difference is followed by its 95 % interval, from the spread between seeds and the error of the held-out text.
- *Holds*, *does not hold*: the interval excludes zero, with three seeds a side. *Not resolved*: it does not.
  *Indication*: fewer seeds, or an unknown error. *No difference*: inside a margin fixed beforehand. *Not learned here*:
  the reference is no better than a trivial baseline.
- *Strong*, *medium*, *weak*: the share of an experiment's claims that are decided ([the
  rule](../experiments/README.md)). *Stale*: measured with an earlier version of the library, and perhaps of the recipe.
"""


class Found(NamedTuple):
    """An experiment with its verdicts, its weight and the time of its results."""

    folder: Path
    expected: Expected
    verdicts: list[Verdict]
    weight: str
    core_seconds: float
    stale: bool

    @property
    def link(self) -> str:
        """Return a link to the experiment's folder."""
        return f"[{self.folder.name}]({LINK}{self.folder.name})"

    @property
    def told(self) -> str:
        """Return the experiment's link and weight, and its claims on the page with figures, or its title."""
        claims = [f"  - **{one.verdict}:** {told(one)}: {_figures(one)}" for one in self.verdicts if one.claim.on_page]
        title = "" if claims else f": {self.expected.title}"
        return "\n".join([f"- {self.link} ({self.weight}{MARK if self.stale else ''}){title}", *claims])


def findings(root: Path, experiments: Sequence[Path]) -> str:
    """Return the text of the page. Raises `ValueError` for an unreadable expected.json or result.json."""
    found = sorted((_found(folder) for folder in experiments), key=lambda one: WEIGHTS.index(one.weight))
    parts = [TITLE, *_by_hand(root / REVIEW)]
    choose = "\n\n".join(_by_hand(root / CHOOSE))
    if CHOICES in choose:
        known = {f"{part.folder.name}/{one.claim.id}": (one, part.link) for part in found for one in part.verdicts}
        choose = choose.replace(CHOICES, advice(root, known))
    hours = sum(part.core_seconds for part in found) / 3600
    counted = f"{_counted([one for part in found for one in part.verdicts])}. All took {hours:,.1f} core-hours."
    parts += [*([choose] if choose else []), f"{HEAD}\n{counted}"]
    for paper in sorted({part.expected.paper for part in found}, key=lambda name: (name == OURS, name)):
        same = [part for part in found if part.expected.paper == paper]
        parts.append("\n".join([f"### {paper}", "", *(part.told for part in same)]))
    return "\n\n".join([*parts, *_by_hand(root / WRONG)]) + "\n"


def _found(folder: Path) -> Found:
    expected, scales = read_expected(folder), read_result(folder)
    judged, scale = verdicts(folder, expected, scales), telling(scales)
    weight, _ = weigh(judged, scales[scale]["rows"] if scale else [])
    seconds = sum(core_seconds(values) for values in scales.values())
    old = scale is not None and bool(stale(scales[scale]))
    return Found(folder, expected, judged, weight, seconds, old)


def _counted(found: Sequence[Verdict]) -> str:
    """Count the verdicts on the papers' claims and on ours."""
    parts = []
    for whose, mine in (("claims of papers", False), ("claims of our own", True)):
        counts = Counter(one.verdict for one in found if one.claim.ours == mine)
        if counts:
            names = ", ".join(f"{name} {counts[name]}" for name in VERDICTS if counts[name])
            parts.append(f"{counts.total()} {whose}: {names}")
    return "; ".join(parts)


def _by_hand(file: Path) -> list[str]:
    """Return a part from the folder of the experiments, its links changed to hold in docs/, and one to the rest."""
    if not file.is_file():
        return []
    text, _, more = file.read_text(encoding="utf-8").partition(MORE)
    shown = re.sub(r"\]\((?!https?:)", f"]({LINK}", text.strip()).replace(f"]({LINK}../docs/", "](")
    return [shown, *([f"[The details]({LINK}{file.name})."] if more else [])]


def _figures(verdict: Verdict) -> str:
    """Return the first figures of a claim, and how many more there are."""
    figures = ours(verdict, "cpu").split("; ")
    if len(figures) > FIGURES:
        figures[FIGURES:] = [f"{len(figures) - FIGURES} more"]
    return "; ".join(figures)
