"""The pictures of a report, as the papers have them: time and memory against length, against latents, decoding.

matplotlib is loaded when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.report import Report, Row, setting
from subquad.evaluation import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PASSES = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "step": "a training step",
    "prefill": "prefill",
}
MIB = 2**20


def draw(report: Report) -> dict[str, Figure]:
    """The figures of a report, by name; one for which there is no row is left out."""
    figures = {"ops": _ops, "model": _model, "decode": _decode}[report.what](report)
    return {name: figure for name, figure in figures.items() if figure is not None}


def save(report: Report, folder: Path) -> list[Path]:
    """Write the figures of a report as PNG, the same bytes each time; returns the files."""
    figures = {folder / f"{report.stem}_{name}.png": figure for name, figure in draw(report).items()}
    for file, figure in figures.items():
        drawing.save(figure, file)
    return list(figures)


def _milliseconds(row: Row) -> float:
    return 1e3 * float(row["median_s"])


def _peak(row: Row) -> float | None:
    return None if row.get("peak_bytes") is None else row["peak_bytes"] / MIB


def _ops(report: Report) -> dict[str, Figure | None]:
    one, size = report.settings["latents"][0], report.settings["segment"][0]
    rows = [row for row in report.rows if row["latents"] in (None, one) and row["segment"] in (None, size)]
    passes = report.settings["passes"]
    figures = {
        "time": _panels(report, rows, passes, _milliseconds, "milliseconds"),
        "memory": _panels(report, rows, passes, _peak, "peak memory beyond the inputs, MiB"),
    }
    if len(report.settings["latents"]) > 1:
        rows = [row for row in report.rows if row.get("latents") is not None]
        rows = [{**row, "label": f"{_source(row)}, {row['tokens']:,} tokens"} for row in rows]
        figures["latents"] = _panels(report, rows, passes, _milliseconds, "milliseconds", over="latents")
    return figures


def _source(row: Row) -> str:
    return f"{row['name']} [{row['backend']}]" if row.get("backend") else str(row["name"])


def _model(report: Report) -> dict[str, Figure | None]:
    passes = ["step", "prefill"]
    return {
        "time": _panels(report, report.rows, passes, _milliseconds, "milliseconds"),
        "memory": _panels(report, report.rows, passes, _peak, "peak memory, MiB"),
    }


def _decode(report: Report) -> dict[str, Figure | None]:
    rows = [row for row in report.rows if row["status"] == "ok"]
    if not rows:
        return {"time": None}
    figure = drawing.new_figure(8.2, 7.6)
    figure.suptitle(setting(report), fontsize=10)
    above, below = figure.subplots(2, 1, sharex=True)
    labels = _labels(rows)
    _lines(above, rows, labels, lambda row: row["tokens"], _milliseconds, legend=True)
    _lines(below, rows, labels, lambda row: row["tokens"], lambda row: row["state_bytes"] / MIB, legend=False)
    above.set_ylabel("milliseconds for one token", fontsize=9)
    above.set_ylim(bottom=0)
    below.set_ylabel("state, MiB", fontsize=9)
    _logarithmic(below)
    below.set_xlabel("tokens read before", fontsize=9)
    for axis in (above, below):
        _lengths(axis, sorted({row["tokens"] for row in rows}), base=10)
    return {"time": figure}


def _panels(
    report: Report,
    rows: Sequence[Row],
    passes: Sequence[str],
    value: Callable[[Row], float | None],
    unit: str,
    *,
    over: Literal["tokens", "latents"] = "tokens",
) -> Figure | None:
    """Draw a panel for each pass, both axes logarithmic, a line for each label; None where there is no row."""
    rows = [row for row in rows if row["status"] == "ok" and value(row) is not None]
    passes = [which for which in passes if any(row["pass"] == which for row in rows)]
    if not passes:
        return None
    figure = drawing.new_figure(9.2, 4.2 * len(passes))
    figure.suptitle(setting(report), fontsize=10)
    labels = _labels(rows)
    panels = figure.subplots(len(passes), 1, sharex=True, squeeze=False)[:, 0]
    for n, (axis, which) in enumerate(zip(panels, passes, strict=True)):
        shown = [row for row in rows if row["pass"] == which]
        _lines(axis, shown, labels, lambda row: row[over], value, legend=n == 0)
        _logarithmic(axis)
        axis.set_ylabel(f"{PASSES[which]}: {unit}", fontsize=9)
        _lengths(axis, sorted({row[over] for row in rows}), base=2)
    panels[-1].set_xlabel({"tokens": "tokens", "latents": "latents of a head"}[over], fontsize=9)
    return figure


def _labels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _lines(
    axis: Axes,
    rows: Sequence[Row],
    labels: Sequence[str],
    x: Callable[[Row], float],
    y: Callable[[Row], float | None],
    *,
    legend: bool,
) -> None:
    """A line for each label, in the style that its place in `labels` gives; what was not measured is left out."""
    for n, label in enumerate(labels):
        points = sorted((x(row), y(row)) for row in rows if row["label"] == label and y(row) is not None)
        style = drawing.Style.number(n)
        width = 2.4 - 1.4 * n / len(labels)  # of lines that lie on one another the lower shows beside the upper
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axis.plot(xs, ys, **style._asdict(), linewidth=width, markersize=4, label=label)
    axis.grid(alpha=0.3)
    if legend and len(labels) > 1:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, handlelength=4)


def _lengths(axis: Axes, lengths: Sequence[int], *, base: int) -> None:
    axis.set_xscale("log", base=base)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.tick_params(labelsize=9)


def _logarithmic(axis: Axes) -> None:
    """A logarithmic scale whose numbers can be read within one power of ten too."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
