"""What `subquad convert` prints and draws of a report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.cli.tables import print_table, size
from subquad.evaluation import drawing

STAGES = {
    "original": "original",
    "replaced": "after replacing",
    "matched": "after matching",
    "tuned": "after LoRA",
}
STAGE_COLUMNS = ["stage", "loss", "perplexity", "passkey", "matching error", "minutes"]
Report = Mapping[str, Any]


def show(report: Report, *, markdown: bool = False) -> None:
    """Print all tables."""
    for title, headers, lines in tables(report):
        print_table(title, headers, lines, markdown=markdown)
    missing = report["stages"][0].get("passkey_missing")
    if missing is not None:
        sys.stdout.write(f"passkey: {missing}\n")
    if not markdown:
        sys.stdout.write("\n".join([*report["explanation"], ""]))


def tables(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, headers and lines: stages, positions, branches, decoding."""
    name, layers = report["attention"], report["layers"]
    kept = ", ".join(map(str, layers["kept"])) or "none"
    title = f"{name} in layers {', '.join(map(str, layers['replaced']))}; full attention kept: {kept}"
    return [
        (title, STAGE_COLUMNS, [_stage(stage) for stage in report["stages"]]),
        _positions(report),
        _branches(report),
        _decoding(report),
    ]


def _stage(stage: Mapping[str, Any]) -> list[str]:
    key = stage["passkey"]
    errors = stage.get("errors")
    return [
        STAGES[stage["stage"]],
        f"{stage['loss']:.4f}",
        f"{stage['perplexity']:,.3f}",
        "-" if key is None else f"{key['value']:.0%} ± {key['error']:.0%}",
        "-" if errors is None else " ".join(f"{error:.3f}" for error in errors),
        f"{stage['seconds'] / 60:.1f}",
    ]


def _positions(report: Report) -> tuple[str, list[str], list[list[str]]]:
    """The loss of each stage by tokens of context, and what each range has of the gap."""
    stages, gap = report["stages"], report["gap"]
    tokens = sum(part["tokens"] for part in gap["by_position"])
    lines = []
    for place, part in enumerate(gap["by_position"]):
        share = part["tokens"] * part["gap"] / tokens
        losses = [f"{stage['by_position'][place]['loss']:.4f}" for stage in stages]
        lines.append([context_range(part), *losses, f"{part['gap']:+.4f}", f"{share:+.4f}"])
    lines.append(["all", *(f"{stage['loss']:.4f}" for stage in stages), *[f"{gap['loss']:+.4f}"] * 2])
    headers = ["tokens of context", *(STAGES[stage["stage"]] for stage in stages), "gap", "part of it"]
    return "loss by position (nats a token)", headers, lines


def context_range(part: Mapping[str, Any]) -> str:
    """`257 to 512`, or a number alone."""
    start, last = part["start"], part["stop"] - 1
    return f"{start:,}" if start == last else f"{start:,} to {last:,}"


def _branches(report: Report) -> tuple[str, list[str], list[list[str]]]:
    found = report["stages"][-1]["branches"]
    base = found[0]["loss"]
    lines = [[part["off"], f"{part['loss']:.4f}", f"{part['loss'] - base:+.4f}"] for part in found]
    return "loss of the result with a branch switched off", ["off", "loss", "more"], lines


def _decoding(report: Report) -> tuple[str, list[str], list[list[str]]]:
    before, after = (report["stages"][i]["decoding"] for i in (0, -1))
    lines = [
        [
            f"{a['context']:,}",
            size(a["state_bytes"]),
            size(b["state_bytes"]),
            f"{a['tokens_per_second']:,.0f}",
            f"{b['tokens_per_second']:,.0f}",
        ]
        for a, b in zip(before, after, strict=True)
    ]
    headers = ["context", "state before", "state after", "tokens/s before", "tokens/s after"]
    missing = "" if lines else "; nothing was timed: no measure.contexts within the model's positions"
    return f"decoding one sequence: {growth(report)}{missing}", headers, lines


def growth(report: Report) -> str:
    """Whether the state of the result grows."""
    if report["layers"]["kept"]:
        return "the kept layers' keys and values go on growing"
    return "the state stops growing"


def draw(report: Report, file: Path) -> None:
    """Loss by position at each stage, the loss with branches off, bytes and speed against context."""
    figure = drawing.new_figure(11.0, 7.2)
    figure.suptitle(
        f"{report['attention']}: {len(report['layers']['replaced'])} layers replaced, "
        f"{len(report['layers']['kept'])} kept",
        fontsize=11,
    )
    (loss, off), (weight, speed) = figure.subplots(2, 2)
    for i, stage in enumerate(report["stages"]):
        parts = stage["by_position"]
        style = drawing.Style.number(i)._asdict()
        loss.plot([p["stop"] - 1 for p in parts], [p["loss"] for p in parts], label=STAGES[stage["stage"]], **style)
    loss.set(xscale="log", xlabel="tokens of context (up to)", ylabel="loss, nats a token", title="loss by position")
    places = [part["stop"] - 1 for part in report["stages"][0]["by_position"]]
    loss.set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
    loss.minorticks_off()
    loss.legend(fontsize=8)
    found = report["stages"][-1]["branches"]
    off.barh([part["off"] for part in found], [part["loss"] for part in found], color=drawing.COLOURS[2])
    off.axvline(report["stages"][0]["loss"], color=drawing.COLOURS[0], linestyle="--", label="original")
    off.invert_yaxis()
    off.set(xlabel="loss, nats a token", title="with this switched off")
    off.legend(fontsize=8)
    for i, stage in enumerate((report["stages"][0], report["stages"][-1])):
        rows, style = stage["decoding"], drawing.Style.number(i)._asdict()
        contexts, label = [row["context"] for row in rows], ("original", "converted")[i]
        if not rows:
            continue
        weight.plot(contexts, [row["state_bytes"] / 2**10 for row in rows], label=label, **style)
        speed.plot(contexts, [row["tokens_per_second"] for row in rows], label=label, **style)
    weight.set(xlabel="tokens of context", ylabel="KiB", title="state for the next token")
    speed.set(xlabel="tokens of context", ylabel="tokens/s", title="decoding one sequence", ylim=(0, None))
    for axis in (weight, speed):
        if not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
            continue
        axis.set(xscale="log", yscale="log" if axis is weight else "linear")
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
        axis.minorticks_off()
        axis.legend(fontsize=8)
    drawing.save(figure, file)
