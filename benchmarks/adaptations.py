"""Keep the reports behind docs/convert.md and docs/extend.md, and draw their pictures.

python -m benchmarks.adaptations --convert runs                 # the runs stories-NAME of the page's commands
python -m benchmarks.adaptations --extend runs/a runs/b         # one run with each attention
python -m benchmarks.adaptations --trials runs/trial-*          # trials of settings
python -m benchmarks.adaptations                                # draws again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.adaptation import extension_report
from subquad.evaluation import drawing
from subquad.parsing import read_json

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
CONVERTED = ("llp", "window", "latte", "linear")
"""Names of the runs of docs/convert.md."""
KINDS = ("llp", "shifted")
"""Attentions of docs/extend.md."""
LEFT_OUT = ("curve",)
TOLD = ("rope", "attention", "options", "steps", "held_out_tokens", "summary", "provenance")
"""Fields of a trial's report to keep, besides its learning rate."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep the reports of the named runs, then draw all pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptations", description="Keep reports of adaptations."
    )
    parser.add_argument("--convert", type=Path, help="folder of the runs stories-NAME")
    parser.add_argument("--extend", nargs="*", type=Path, default=[], help="folders of finished runs")
    parser.add_argument("--trials", nargs="*", type=Path, default=[], help="folders of finished trials, in order")
    chosen = parser.parse_args(arguments)
    if chosen.convert:
        _keep("convert", collected(chosen.convert))
    for run in chosen.extend:
        report = read_json(run / extension_report.REPORT)
        report["original"] = report["model"]  # not the folder on the measuring machine
        if report["attention"] not in KINDS:
            raise ValueError(f"attention must be {' or '.join(KINDS)}, got {report['attention']!r} in {run}")
        if report.get("resumed"):
            raise ValueError(f"{run} was resumed, so its times are only those since then; run it in a new folder")
        _keep(f"extend_{report['attention']}", report)
    if chosen.trials:
        _keep("extend_trials", [trial(run) for run in chosen.trials])
    drawing.save(picture(read_json(RESULTS / "convert.json")), IMAGES / "convert.png")
    for kind in KINDS:
        report = read_json(RESULTS / f"extend_{kind}.json")
        extension_report.draw(report).savefig(IMAGES / f"extend_{kind}.png", format="png")


def _keep(name: str, values: Any) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def titled(report: dict[str, Any]) -> str:
    """Return a conversion's mechanism and the layers that keep full attention."""
    kept = ", ".join(map(str, report["layers"]["kept"]))
    return f"`{report['attention']}`" + (f", full attention in layer {kept}" if kept else ", all layers")


def collected(folder: Path) -> dict[str, Any]:
    """Return the reports of the four runs, without their training curves."""
    reports = {}
    for name in CONVERTED:
        report = read_json(folder / f"stories-{name}" / "report.json")
        report["stages"] = [{k: v for k, v in stage.items() if k not in LEFT_OUT} for stage in report["stages"]]
        reports[name] = report
    return reports


def trial(run: Path) -> dict[str, Any]:
    """Return the values of a trial that the page shows."""
    report = read_json(run / extension_report.REPORT)
    return {"name": run.name, "lr": report["optimizer"]["lr"], **{name: report[name] for name in TOLD}}


def picture(reports: dict[str, Any]) -> Any:
    """Draw the gap by tokens of context, and the state against context, for each result."""
    figure = drawing.new_figure(8.2, 7.6)
    figure.suptitle("stories260K converted to four mechanisms", fontsize=11)
    above, below = figure.subplots(2, 1)
    original = next(iter(reports.values()))["stages"][0]["decoding"]
    above.axhline(0, color=drawing.COLOURS[0], linewidth=1)
    rows: list[tuple[str, Any, Any]] = [("original", None, original)]
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
