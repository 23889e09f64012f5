"""Write the tables of docs/convert.md from the reports of the conversions on that page.

python -m benchmarks.adaptations --convert runs    # after the page's commands: keeps their reports
python docs/make_convert.py
"""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

import pages

from benchmarks.adaptations import titled
from benchmarks.report import described
from subquad.adaptation.conversion_report import STAGES, reach_of
from subquad.cli.tables import context_range, size


def blocks() -> pages.Blocks:
    """Return a function for each block of the page."""
    made = (stages, positions, reach, branches, decoding, machine)
    return {make.__name__: partial(make, pages.result("convert")) for make in made}


def stages(reports: dict[str, Any]) -> str:
    """Return the table of perplexity after each stage, and the gap to the original."""
    lines = []
    for report in reports.values():
        found = [f"{stage['perplexity']:.3f}" for stage in report["stages"]]
        key = report["stages"][-1]["passkey"]
        errors = [f"{mean(stage['errors']):.3f}" for stage in report["stages"] if "errors" in stage]
        shown = "-" if key is None else f"{key['value']:.0%}"
        minutes = f"{sum(stage['seconds'] for stage in report['stages']) / 60:.1f}"
        lines.append([titled(report), *found, f"{report['gap']['loss']:+.4f}", " to ".join(errors), shown, minutes])
    more = ("gap, nats per token", "mean matching error", "passkey", "minutes")
    return pages.table(["perplexity", *STAGES.values(), *more], lines)


def positions(reports: dict[str, Any]) -> str:
    """Return the table of gaps by tokens of context, in nats per token."""
    parts = {report["attention"]: report["gap"]["by_position"] for report in reports.values()}
    lines = [[f"`{name}`", *(f"{part['gap']:+.4f}" for part in found)] for name, found in parts.items()]
    ranges = (context_range(part["start"], part["stop"]) for part in next(iter(parts.values())))
    return pages.table(["gap by tokens of context", *ranges], lines)


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
    cells = [[f"{size(row['state_bytes'])}, {row['tokens_per_second']:,.0f}" for row in found] for _, found in rows]
    lines = [[name, *line] for (name, _), line in zip(rows, cells, strict=True)]
    return pages.table(["state, tokens/s after", *(f"{row['context']:,} tokens" for row in first)], lines)


def machine(reports: dict[str, Any]) -> str:
    """Return where and when it was measured, and the sizes of the training and held-out text."""
    report = next(iter(reports.values()))
    train, held_out = (report["text"][f"{part}_tokens"] for part in ("train", "held_out"))
    made = f"Measured {report['date']} on {described(report['machine'])} ({pages.versions(report['versions'])})"
    return f"{made}, {train:,} tokens of text to train on and {held_out:,} held out."


if __name__ == "__main__":
    pages.rewrite("convert.md", blocks())
