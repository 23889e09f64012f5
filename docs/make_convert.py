"""Write the tables of docs/convert.md again, from the reports of the conversions that it speaks of.

python docs/make_convert.py --collect runs    # after the page's commands; keeps benchmarks/results/convert.json
python docs/make_convert.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pages

from benchmarks.report import described
from subquad.adaptation.conversion_report import STAGES
from subquad.cli.convert import context_range
from subquad.cli.tables import size

RESULT = pages.RESULTS / "convert.json"
COMMON = "subquad convert runs/stories260K --data runs/stories.zip --batch.size 4 --threads 1"
COMMANDS = {
    "llp": "--attention llp --options.llp.segment 32 --keep_every 0 --match.steps 200 --lora.steps 1000",
    "window": "--attention window --options.window.width 16 --keep_every 4 --match.steps 200 --lora.steps 800",
    "latte": "--attention latte_macchiato --options.latte_macchiato.width 16 --keep_every 0 --match.steps 400 "
    "--match.lr 0.01 --lora.steps 500",
    "linear": "--attention linear --keep_every 2 --match.steps 400 --match.lr 0.02 --lora.steps 500 --lora.lr 0.005",
}
"""Name of the run and what its command adds."""
LEFT_OUT = ("curve",)


def main() -> None:
    """Collect where it is asked for, and write the page."""
    parser = argparse.ArgumentParser(description="the tables of docs/convert.md")
    parser.add_argument("--collect", help="the folder in which the runs stories-NAME are")
    folder = parser.parse_args().collect
    if folder is not None:
        pages.keep(RESULT, collected(Path(folder)))
    pages.rewrite("convert.md", blocks())


def collected(folder: Path) -> dict[str, Any]:
    """The reports of the four runs, without the curves of their trainings."""
    reports = {}
    for name in COMMANDS:
        report = pages.read(folder / f"stories-{name}" / "report.json")
        report["stages"] = [{k: v for k, v in stage.items() if k not in LEFT_OUT} for stage in report["stages"]]
        reports[name] = report
    return reports


def blocks() -> dict[str, Callable[[], str]]:
    """Return the maker of each block of the page."""
    reports = pages.read(RESULT)
    made = (commands, stages, positions, explained, branches, decoding, machine)
    return {make.__name__: partial(make, reports) for make in made}


def commands(reports: dict[str, Any]) -> str:
    """The commands of the runs."""
    lines = [f"{COMMON} {added} --out runs/stories-{name}" for name, added in COMMANDS.items()]
    return "\n".join(["```console", *lines, "```"])


def titled(report: dict[str, Any]) -> str:
    """The mechanism and which layers have it."""
    kept = ", ".join(map(str, report["layers"]["kept"]))
    return f"`{report['attention']}`" + (f", full attention kept in {kept}" if kept else ", all layers")


def stages(reports: dict[str, Any]) -> str:
    """Perplexity after each stage, and the gap."""
    lines = []
    for report in reports.values():
        found = [f"{stage['perplexity']:.3f}" for stage in report["stages"]]
        key = report["stages"][-1]["passkey"]
        errors = [
            f"{sum(stage['errors']) / len(stage['errors']):.3f}" for stage in report["stages"] if "errors" in stage
        ]
        shown = "-" if key is None else f"{key['value']:.0%}"
        minutes = f"{sum(stage['seconds'] for stage in report['stages']) / 60:.1f}"
        lines.append([titled(report), *found, f"{report['gap']['loss']:+.4f}", " to ".join(errors), shown, minutes])
    headers = ["perplexity", *STAGES.values(), "gap, nats", "mean matching error", "passkey", "minutes"]
    return pages.table(headers, lines)


def positions(reports: dict[str, Any]) -> str:
    """The gap by tokens of context."""
    ranges = next(iter(reports.values()))["gap"]["by_position"]
    lines = [
        [f"`{report['attention']}`", *(f"{part['gap']:+.4f}" for part in report["gap"]["by_position"])]
        for report in reports.values()
    ]
    return pages.table(["gap by tokens of context", *(context_range(part) for part in ranges)], lines)


def explained(reports: dict[str, Any]) -> str:
    """The sentences of each report."""
    return "\n".join(f"- {titled(report)}: {' '.join(report['explanation'])}" for report in reports.values())


def branches(reports: dict[str, Any]) -> str:
    """The loss with a branch off."""
    lines = [
        [f"`{report['attention']}`" if not number else "", part["off"], f"{part['loss']:.4f}"]
        for report in reports.values()
        for number, part in enumerate(report["stages"][-1]["branches"])
    ]
    return pages.table(["result", "switched off", "loss"], lines)


def decoding(reports: dict[str, Any]) -> str:
    """State and speed against context."""
    first = next(iter(reports.values()))["stages"][0]["decoding"]
    rows = [("original", first)]
    rows += [(titled(report), report["stages"][-1]["decoding"]) for report in reports.values()]
    lines = [
        [name, *(f"{size(row['state_bytes'])}, {row['tokens_per_second']:,.0f}" for row in found)]
        for name, found in rows
    ]
    return pages.table(["state, tokens/s after", *(f"{row['context']:,} tokens" for row in first)], lines)


def machine(reports: dict[str, Any]) -> str:
    """Where it was measured."""
    report = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"Measured {report['date']} on {described(report['machine'])} ({versions}), {text_of(report)}."


def text_of(report: dict[str, Any]) -> str:
    """Return the amounts of text."""
    found = report["text"]
    return f"{found['train_tokens']:,} tokens of text to train on and {found['held_out_tokens']:,} held out"


if __name__ == "__main__":
    main()
