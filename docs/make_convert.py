"""Write the tables and the picture of docs/convert.md from the reports of the conversions on that page.

python docs/make_convert.py --collect runs    # after the page's commands: writes benchmarks/results/convert.json first
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
from subquad.adaptation.conversion_report import STAGES, reach_of
from subquad.cli.tables import context_range, size
from subquad.evaluation import drawing

RESULT = pages.RESULTS / "convert.json"
COMMON = "subquad convert runs/stories260K --data runs/stories.zip --batch.size 4 --threads 1"
COMMANDS = {
    "llp": "--attention llp --options.llp.segment 32 --keep_every 0 --match.steps 200 --lora.steps 1000",
    "window": "--attention window --options.window.width 16 --keep_every 4 --match.steps 200 --lora.steps 800",
    "latte": "--attention latte_macchiato --options.latte_macchiato.width 16 --keep_every 0 --match.steps 400 "
    "--match.lr 0.01 --lora.steps 500",
    "linear": "--attention linear --keep_every 2 --match.steps 400 --match.lr 0.02 --lora.steps 500 --lora.lr 0.005",
}
"""Options of each run, by its name."""
LEFT_OUT = ("curve",)


def main() -> None:
    """Collect the reports if `--collect` is given, then write the page and its picture."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/convert.md.")
    parser.add_argument("--collect", help="folder of the runs stories-NAME")
    folder = parser.parse_args().collect
    if folder is not None:
        pages.keep(RESULT, collected(Path(folder)))
    pages.rewrite("convert.md", blocks())
    drawing.save(picture(pages.read(RESULT)), pages.IMAGES / "convert.png")


def collected(folder: Path) -> dict[str, Any]:
    """Return the reports of the four runs, without their training curves."""
    reports = {}
    for name in COMMANDS:
        report = pages.read(folder / f"stories-{name}" / "report.json")
        report["stages"] = [{k: v for k, v in stage.items() if k not in LEFT_OUT} for stage in report["stages"]]
        reports[name] = report
    return reports


def blocks() -> dict[str, Callable[[], str]]:
    """Return a function for each block of the page."""
    reports = pages.read(RESULT)
    made = (commands, stages, positions, reach, branches, decoding, machine)
    return {make.__name__: partial(make, reports) for make in made}


def commands(reports: dict[str, Any]) -> str:
    """Return the commands of the runs."""
    lines = [f"{COMMON} {added} --out runs/stories-{name}" for name, added in COMMANDS.items()]
    return "\n".join(["```console", *lines, "```"])


def titled(report: dict[str, Any]) -> str:
    """Return the mechanism and the layers that keep full attention."""
    kept = ", ".join(map(str, report["layers"]["kept"]))
    return f"`{report['attention']}`" + (f", full attention in layer {kept}" if kept else ", all layers")


def stages(reports: dict[str, Any]) -> str:
    """Return the table of perplexity after each stage, and the gap to the original."""
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
    headers = ["perplexity", *STAGES.values(), "gap, nats per token", "mean matching error", "passkey", "minutes"]
    return pages.table(headers, lines)


def positions(reports: dict[str, Any]) -> str:
    """Return the table of gaps by tokens of context, in nats per token."""
    ranges = next(iter(reports.values()))["gap"]["by_position"]
    lines = [
        [f"`{report['attention']}`", *(f"{part['gap']:+.4f}" for part in report["gap"]["by_position"])]
        for report in reports.values()
    ]
    return pages.table(
        ["gap by tokens of context", *(context_range(part["start"], part["stop"]) for part in ranges)], lines
    )


def reach(reports: dict[str, Any]) -> str:
    """Return the table of gaps below and above the reach of the replaced layers' softmax."""
    lines = []
    for report in reports.values():
        seen = reach_of(report["attention"], report["options"])
        if seen is not None:
            parts = report["gap"]["by_position"]
            gaps = (mean_gap([p for p in parts if (p["start"] >= seen) == far]) for far in (False, True))
            lines.append([titled(report), f"{seen}", *(f"{gap:+.4f}" for gap in gaps)])
    return pages.table(["", "reach, tokens", "gap with less context", "gap with more context"], lines)


def mean_gap(parts: list[dict[str, Any]]) -> float:
    """Return the gap per token over these ranges."""
    return sum(part["tokens"] * part["gap"] for part in parts) / sum(part["tokens"] for part in parts)


OFF = ("replaced layers' attention", "kept layers' attention", "window", "latents")
"""Branches that can be switched off."""


def branches(reports: dict[str, Any]) -> str:
    """Return the table of losses with each branch off, and the changes."""
    lines = []
    for report in reports.values():
        found = {part["off"]: part["loss"] for part in report["stages"][-1]["branches"]}
        base = found["nothing"]
        cells = (f"{found[off]:.4f} ({found[off] - base:+.4f})" if off in found else "" for off in OFF)
        lines.append([f"`{report['attention']}`", f"{base:.4f}", *cells])
    return pages.table(["loss", "nothing off", *(f"without the {off}" for off in OFF)], lines)


def decoding(reports: dict[str, Any]) -> str:
    """Return the table of state and speed against context."""
    first = next(iter(reports.values()))["stages"][0]["decoding"]
    rows = [("original", first)]
    rows += [(titled(report), report["stages"][-1]["decoding"]) for report in reports.values()]
    lines = [
        [name, *(f"{size(row['state_bytes'])}, {row['tokens_per_second']:,.0f}" for row in found)]
        for name, found in rows
    ]
    return pages.table(["state, tokens/s after", *(f"{row['context']:,} tokens" for row in first)], lines)


def machine(reports: dict[str, Any]) -> str:
    """Return where and when it was measured."""
    report = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"Measured {report['date']} on {described(report['machine'])} ({versions}), {text_of(report)}."


def text_of(report: dict[str, Any]) -> str:
    """Return the sizes of the training and held-out text."""
    found = report["text"]
    return f"{found['train_tokens']:,} tokens of text to train on and {found['held_out_tokens']:,} held out"


def picture(reports: dict[str, Any]) -> Any:
    """Draw the gap by tokens of context, and the state against context, for each result."""
    figure = drawing.new_figure(8.2, 7.6)
    figure.suptitle("stories260K converted to four mechanisms", fontsize=11)
    above, below = figure.subplots(2, 1)
    original = next(iter(reports.values()))["stages"][0]["decoding"]
    above.axhline(0, color=drawing.COLOURS[0], linewidth=1)
    rows = [("original", None, original)]
    rows += [
        (titled(r).replace("`", ""), r["gap"]["by_position"], r["stages"][-1]["decoding"]) for r in reports.values()
    ]
    for number, (label, gaps, found) in enumerate(rows):
        style = drawing.Style.number(number)._asdict()
        if gaps is not None:
            above.plot([p["stop"] - 1 for p in gaps], [p["gap"] for p in gaps], label=label, **style)
        below.plot([p["context"] for p in found], [p["state_bytes"] / 2**10 for p in found], label=label, **style)
    places = [part["stop"] - 1 for part in next(iter(reports.values()))["gap"]["by_position"]]
    above.set(xscale="log", xlabel="tokens of context (up to)", ylabel="loss above the original's, nats per token")
    above.set_xticks(places, [f"{place:,}" for place in places])
    below.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="state, KiB")
    below.set_xticks([p["context"] for p in original], [f"{p['context']:,}" for p in original])
    for axis in (above, below):
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    below.legend(fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    main()
