"""Pictures of a report: time and memory against length or latents, and decoding.

matplotlib is imported when a picture is drawn.
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
    "forward": "Forward pass",
    "backward": "Backward pass",
    "forward_backward": "Forward and backward pass",
    "step": "Training step",
    "prefill": "Prefill",
    "token": "Decoding a token",
}
TIME, MEMORY, STATE = ("time", "time (ms)"), ("peak memory", "peak memory (MiB)"), ("state", "state (MiB)")
"""What a picture shows: its name in the title, and the label of the vertical axis."""
LENGTH, LATENTS = ("length", "sequence length (tokens)"), ("number of latents", "latents per head")
"""What it is shown against: its name in the title, and the label of the horizontal axis."""
MIB = 2**20


LINES = 8
"""Most lines of a panel."""
Figures = dict[str, "Figure"]


def draw(report: Report) -> Figures:
    """Return the figures of a report by name; `time_2` goes on where `time` has as many lines as a panel may have.

    Reports on precision have none.
    """
    made = {"ops": _ops, "layers": _layers, "model": _model, "decode": _decode}
    return made[report.what](report) if report.what in made else {}


def save(report: Report, folder: Path) -> list[Path]:
    """Write the figures of a report as PNG, the same bytes each time, and return the files."""
    figures = {folder / f"{report.stem}_{name}.png": figure for name, figure in draw(report).items()}
    for file, figure in figures.items():
        drawing.save(figure, file)
    return list(figures)


def _milliseconds(row: Row) -> float:
    return 1e3 * float(row["median_s"])


def _peak(row: Row) -> float | None:
    return None if row.get("peak_bytes") is None else row["peak_bytes"] / MIB


def _ops(report: Report) -> Figures:
    one, size = report.settings["latents"][0], report.settings["segment"][0]
    rows = [row for row in report.rows if row["latents"] in (None, one) and row["segment"] in (None, size)]
    passes = report.settings["passes"]
    figures = _panels(report, rows, passes, _milliseconds, "time", TIME)
    figures |= _panels(report, rows, passes, _peak, "memory", (MEMORY[0], "peak memory beyond inputs (MiB)"))
    if len(report.settings["latents"]) > 1:
        rows = [row for row in report.rows if row.get("latents") is not None]
        rows = [{**row, "label": f"{_source(row)}, {row['tokens']:,} tokens"} for row in rows]
        figures |= _panels(report, rows, passes, _milliseconds, "latents", TIME, over="latents")
    return figures


def _source(row: Row) -> str:
    return f"{row['name']} [{row['backend']}]" if row.get("backend") else str(row["name"])


def _layers(report: Report, passes: Sequence[str] = ("forward", "forward_backward")) -> Figures:
    times = _panels(report, report.rows, passes, _milliseconds, "time", TIME)
    return times | _panels(report, report.rows, passes, _peak, "memory", MEMORY)


def _model(report: Report) -> Figures:
    return _layers(report, ("step", "prefill"))


def _decode(report: Report) -> Figures:
    """Draw one form of each mechanism, the one that decoding takes: recorded if it was timed."""
    recorded = {row["name"] for row in report.rows if row.get("form") == "recorded"}
    rows = [row for row in report.rows if row.get("form") == "recorded" or row["name"] not in recorded]
    times = _panels(report, rows, ["token"], _milliseconds, "time", TIME)
    return times | _panels(report, rows, ["token"], lambda row: row["state_bytes"] / MIB, "state", STATE)


def _panels(
    report: Report,
    rows: Sequence[Row],
    passes: Sequence[str],
    value: Callable[[Row], float | None],
    name: str,
    shows: tuple[str, str],
    *,
    over: Literal["tokens", "latents"] = "tokens",
) -> Figures:
    """Return figures of at most `LINES` labels each, all with the first label: none without rows."""
    rows = [row for row in rows if row["status"] == "ok" and value(row) is not None]
    base, others = _labels(rows)[:1], _labels(rows)[1:]
    starts = range(0, max(len(base), len(others)), LINES - 1)
    figures = Figures()
    for n, start in enumerate(starts, 1):
        labels = base + others[start : start + LINES - 1]
        shown = [row for row in rows if row["label"] in labels]
        figures[name if n == 1 else f"{name}_{n}"] = _figure(report, shown, passes, value, shows, over)
    return figures


def _figure(
    report: Report,
    rows: Sequence[Row],
    passes: Sequence[str],
    value: Callable[[Row], float | None],
    shows: tuple[str, str],
    over: str,
) -> Figure:
    """Draw a panel per pass with a line per label on logarithmic axes, and the settings below."""
    passes = [which for which in passes if any(row["pass"] == which for row in rows)]
    figure = drawing.new_figure(9.2, 4.2 * len(passes))
    figure.supxlabel(setting(report), fontsize=8)
    labels = _labels(rows)
    length = ("context", "context length (tokens)") if passes == ["token"] else LENGTH
    against = length if over == "tokens" else LATENTS
    panels = figure.subplots(len(passes), 1, sharex=True, squeeze=False)[:, 0]
    for n, (axis, which) in enumerate(zip(panels, passes, strict=True)):
        _lines(axis, [x for x in rows if x["pass"] == which], labels, lambda x: x[over], value, legend=n == 0)
        _logarithmic(axis)
        axis.set_title(f"{PASSES[which]}: {shows[0]} against {against[0]}", fontsize=11)
        axis.set_ylabel(shows[1], fontsize=9)
        _lengths(axis, sorted({row[over] for row in rows}))
    panels[-1].set_xlabel(against[1], fontsize=9)
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
    """Draw a line for each label, styled by its place in `labels`, without points that were not measured."""
    for n, label in enumerate(labels):
        points = sorted((x(row), y(row)) for row in rows if row["label"] == label and y(row) is not None)
        style = drawing.Style.number(n)
        width = 2.4 - 1.4 * n / len(labels)  # later lines are thinner, so that overlapping ones stay visible
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axis.plot(xs, ys, **style._asdict(), linewidth=width, markersize=4, label=label)
    axis.grid(alpha=0.3)
    if legend and len(labels) > 1:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, handlelength=4)


def _lengths(axis: Axes, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.tick_params(labelsize=9)


def _logarithmic(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with ticks at 1, 2 and 5 so that a range within one decade has labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
