"""`docs/findings.md`: what became of each claim, from the results in the experiments' folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.claims import VERDICTS, Verdict, read_expected, verdicts
from experiments.harness.result import PLOT, line, ours, read_result, telling

CHOOSE, WRONG = "choose.md", "wrong.md"
"""Written by hand: what to take for what, and what was found wrong in the papers."""
LINK = "../experiments/"
OURS = "Ours"
"""What no paper claims comes last."""
HEAD = """\
# Findings

What the papers claim, what we measured, and which attention to take for what. Each line of the tables is a folder of
[experiments](../experiments) that `python -m experiments NAME` runs again: the recipe, the paper's figures, ours with
seeds and machine, a plot. This page is generated from them by `python -m experiments --findings docs/findings.md`; it
has the papers' main claims and, of our own, what bears on a choice, folded up. The README of a folder has all of its
claims.

A difference counts where it is beyond the noise (Student's t at 5 %, over the spread between seeds); where it is not,
that is the result. Behind a difference ± is its standard error, behind a figure of a table the standard deviation
between seeds. Ours are small models on a CPU unless a line says otherwise: they test the claim, not the paper's
absolute figures.
"""


def findings(root: Path, experiments: Sequence[Path]) -> str:
    """The page. `ValueError` for a folder whose expected.json or result.json cannot be read."""
    papers: dict[str, list[tuple[Path, Verdict]]] = {}
    plots: dict[str, list[str]] = {}
    others: Counter[str] = Counter()
    for folder in experiments:
        expected, scales = read_expected(folder), read_result(folder)
        found = verdicts(folder, expected, scales)
        shown = [(folder, verdict) for verdict in found if verdict.claim.on_page]
        others.update(verdict.verdict for verdict in found if not verdict.claim.on_page)
        papers.setdefault(expected.paper, []).extend(shown)
        if expected.caption and telling(scales):
            image = f"![{expected.caption}](../experiments/{folder.name}/{PLOT})"
            plots.setdefault(expected.paper, []).append(
                f"{image}\n\n*[{folder.name}]({LINK}{folder.name}): {expected.caption}*"
            )
    counts = Counter(verdict.verdict for lines in papers.values() for _, verdict in lines)
    parts = [HEAD + f"\n{_counted('claims', counts)}."]
    if others:
        parts[0] += f" The folders have {_counted('more', others)}."
    if (root / CHOOSE).is_file():
        parts.append(_by_hand(root / CHOOSE))
    for paper, lines in sorted(papers.items(), key=lambda item: item[0] == OURS):
        table = ["| | claim | theirs | ours | verdict |", "|:---|:---|:---|:---|:---|"]
        table += [_line(folder, verdict) for folder, verdict in lines]
        summary = _counted("claims", Counter(verdict.verdict for _, verdict in lines))
        folded = f"<details><summary>{summary}</summary>\n\n" + "\n".join(table) + "\n\n</details>"
        parts += [f"## {paper}\n\n{folded}", *plots.get(paper, [])]
    if (root / WRONG).is_file():
        parts.append(_by_hand(root / WRONG))
    return "\n\n".join(parts) + "\n"


def _counted(what: str, verdicts: Counter[str]) -> str:
    names = ", ".join(f"{name} {verdicts[name]}" for name in VERDICTS if verdicts[name])
    return f"{sum(verdicts.values())} {what}: {names}"


def _by_hand(file: Path) -> str:
    """A page that links from the folder of the experiments."""
    return re.sub(r"\]\((?!https?:)", f"]({LINK}", file.read_text(encoding="utf-8").strip())


def _line(folder: Path, verdict: Verdict) -> str:
    link = f"[{folder.name}]({LINK}{folder.name})"
    return line(link, verdict.claim.says, verdict.claim.theirs, ours(verdict, "cpu"), f"**{verdict.verdict}**")
