"""Write the tables and pictures of docs/extend.md again, from the reports of `subquad extend`.

python docs/make_extend.py runs/longer-shifted runs/longer-llp    # keeps their reports in benchmarks/results
python docs/make_extend.py --trials runs/trial-*                  # those by which their settings were chosen
python docs/make_extend.py
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pages

from benchmarks.report import described
from subquad.adaptation import extension_report

KINDS = ("llp", "shifted")
TOLD = ("rope", "attention", "options", "steps", "held_out_tokens", "summary", "provenance")
"""What is kept of the report of a trial, beside its learning rate."""


def main() -> None:
    """Take over reports where runs are named, and write the page."""
    parser = argparse.ArgumentParser(description="the tables of docs/extend.md")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--trials", nargs="*", type=Path, default=[], help="folders of finished trials, in their order")
    chosen = parser.parse_args()
    for run in chosen.runs:
        report = pages.read(run / extension_report.REPORT)
        report["original"] = report["model"]  # a folder of whoever measured
        if report["attention"] not in KINDS:
            raise ValueError(f"the page shows {' and '.join(KINDS)}, got attention={report['attention']!r} in {run}")
        if report.get("resumed"):
            raise ValueError(f"{run} was gone on with: its times are those of its last start; run it in a new folder")
        pages.keep(result(report["attention"]), report)
    if chosen.trials:
        pages.keep(result("trials"), [trial(run) for run in chosen.trials])
    for kind in KINDS:
        if result(kind).is_file():
            extension_report.draw(pages.read(result(kind))).savefig(pages.IMAGES / f"extend_{kind}.png", format="png")
    pages.rewrite("extend.md", BLOCKS)


def result(kind: str) -> Path:
    """The report of one kind of attention, or what is kept of all trials."""
    return pages.RESULTS / f"extend_{kind}.json"


def trial(run: Path) -> dict[str, Any]:
    """Return what the page shows of a trial."""
    report = pages.read(run / extension_report.REPORT)
    return {"name": run.name, "lr": report["optimizer"]["lr"], **{name: report[name] for name in TOLD}}


def trials() -> str:
    """A line a trial: what it trained with, and its losses in both ways of attending afterwards."""
    lines = []
    for found in pages.read(result("trials")):
        kept, full = found["summary"]["extended"], found["summary"].get("extended, full attention")
        lines.append(
            [
                found["rope"],
                f"`{found['attention']}`" + "".join(f", {name} {value:,}" for name, value in found["options"].items()),
                f"{found['steps']}, {found['lr']:g}",
                *(f"{kept[name]:.4f}" for name in ("within", "beyond")),
                extension_report.difference(kept),
                "as trained" if full is None else f"{full['beyond']:.4f}",
                "" if full is None else extension_report.difference(full),
            ]
        )
    headers = ["positions", "trained with", "steps, learning rate", "257 to 512", "above 512", "less"]
    headers += ["in full: above 512", "less"]
    return pages.table(headers, lines, names=3)


def block(kind: str) -> str:
    """The table of a report, and under it what was trained, where and how long."""
    if not result(kind).is_file():
        return "*Not measured yet.*"
    if kind == "trials":
        return trials()
    report = pages.read(result(kind))
    table = pages.table(*extension_report.rows(report))
    own, found = report["own_length"], report["summary"]["extended"]
    far, gap = found["beyond"], found["difference"]
    comparison = f"{abs(gap):.4f} nats {'below' if gap <= 0 else 'above'}"
    text = (
        f"{report['steps']:,} steps of {report['step_tokens']:,} tokens, {report['rope']} positions, rank "
        f"{report['lora']['rank']}: {report['trained_parameters']:,} of {report['parameters']:,} numbers trained. The "
        f"whole command took {report['whole_command_seconds'] / 60:.1f} minutes ({report['seconds'] / 60:.1f} of them "
        f"in the steps of the extension) on {described(report['provenance']['machine'])}. Each range predicts the same "
        f"{report['held_out_tokens']:,} tokens, in {report['stretches']} stretches of the text. The extended model's "
        f"loss above {own:,} tokens of context is {comparison} its loss from {own // 2 + 1:,} to {own:,}, with a "
        f"standard error over the stretches of {found['standard_error']:.4f}"
    )
    if "control" in report["summary"]:
        more = report["summary"]["control"]["beyond"] - far
        text += f", and {abs(more):.4f} nats {'below' if more >= 0 else 'above'} the control's"
    return f"{table}\n\n{text}.\n\n![Loss by position, {kind}](images/extend_{kind}.png)"


BLOCKS = {kind: partial(block, kind) for kind in (*KINDS, "trials")}

if __name__ == "__main__":
    main()
