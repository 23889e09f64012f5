"""Write the tables and pictures of docs/extend.md from the reports of `subquad extend`.

python docs/make_extend.py runs/longer-shifted runs/longer-llp    # copies their reports to benchmarks/results first
python docs/make_extend.py --trials runs/trial-*                  # copies the reports of the trials of settings first
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
"""Fields of a trial's report to keep, besides its learning rate."""


def main() -> None:
    """Copy the reports of the named runs, then write the page."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/extend.md.")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--trials", nargs="*", type=Path, default=[], help="folders of finished trials, in order")
    chosen = parser.parse_args()
    for run in chosen.runs:
        report = pages.read(run / extension_report.REPORT)
        report["original"] = report["model"]  # not the folder on the measuring machine
        if report["attention"] not in KINDS:
            raise ValueError(f"attention must be {' or '.join(KINDS)}, got {report['attention']!r} in {run}")
        if report.get("resumed"):
            raise ValueError(f"{run} was resumed, so its times are only those since then; run it in a new folder")
        pages.keep(result(report["attention"]), report)
    if chosen.trials:
        pages.keep(result("trials"), [trial(run) for run in chosen.trials])
    for kind in KINDS:
        if result(kind).is_file():
            extension_report.draw(pages.read(result(kind))).savefig(pages.IMAGES / f"extend_{kind}.png", format="png")
    pages.rewrite("extend.md", BLOCKS)


def result(kind: str) -> Path:
    """Return the file of one attention's report, or of all trials."""
    return pages.RESULTS / f"extend_{kind}.json"


def trial(run: Path) -> dict[str, Any]:
    """Return the values of a trial that the page shows."""
    report = pages.read(run / extension_report.REPORT)
    return {"name": run.name, "lr": report["optimizer"]["lr"], **{name: report[name] for name in TOLD}}


def trials() -> str:
    """Return a row per trial: its settings, and its losses with the attention kept and with full attention."""
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
    headers = ["positions", "trained with", "steps, learning rate", "257 to 512", "above 512", "difference"]
    headers += ["full attention: above 512", "difference"]
    return pages.table(headers, lines, names=3)


def block(kind: str) -> str:
    """Return the table of a report, followed by what was trained, where and how long it took."""
    if not result(kind).is_file():
        return "*Not measured yet.*"
    if kind == "trials":
        return trials()
    report = pages.read(result(kind))
    table = pages.table(*extension_report.rows(report))
    own, found = report["own_length"], report["summary"]["extended"]
    far, gap = found["beyond"], found["difference"]
    comparison = f"{abs(gap):.4f} nats {'below' if gap <= 0 else 'above'}"
    loss = (
        f"The extended model's loss above {own:,} tokens of context is {comparison} its loss from {own // 2 + 1:,} to "
        f"{own:,} (standard error over the stretches {found['standard_error']:.4f})"
    )
    if "control" in report["summary"]:
        more = report["summary"]["control"]["beyond"] - far
        loss += f", and {abs(more):.4f} nats {'below' if more >= 0 else 'above'} the control's"
    text = (
        f"{loss}.\n\n"
        f"{report['steps']:,} steps of {report['step_tokens']:,} tokens; {report['rope']} positions; rank "
        f"{report['lora']['rank']}: {report['trained_parameters']:,} of {report['parameters']:,} parameters trained. "
        f"The whole command took {report['whole_command_seconds'] / 60:.1f} minutes, {report['seconds'] / 60:.1f} of "
        f"them in training steps, on {described(report['provenance']['machine'])}. Each range predicts the same "
        f"{report['held_out_tokens']:,} tokens, in {report['stretches']} stretches of the text."
    )
    return f"{table}\n\n{text}"


BLOCKS = {kind: partial(block, kind) for kind in (*KINDS, "trials")}

if __name__ == "__main__":
    main()
