"""Draw an experiment's plot: the panels of its recipe, or its own `draw(figure, rows)`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.harness.noise import Row, select
from experiments.harness.recipe import Panel, Recipe
from experiments.harness.units import function

COLORS = ("#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#ee8866", "#332288", "#999933")
MARKERS = "osD^vPX*<>x+1d"  # more markers than colours; reused colours get dashed lines
COLUMNS = 3
LABELS = {
    "bits_per_byte": "held-out bits per byte",
    "bits_per_dim": "bits per pixel",
    "loss": "held-out loss in nats per token",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "ms": "milliseconds",
    "peak_mib": "peak memory in MiB",
    "state_bytes": "bytes of state",
    "flops": "FLOPs",
}
"""Axis labels of columns; other columns have their names without underscores."""


def draw(experiment: Path, recipe: Recipe, rows: Sequence[Row], file: Path) -> None:
    """Draw the rows into a PNG file, without the panels of other scales. Raises `ValueError` if there are none."""
    if not rows:
        raise ValueError(f"{experiment.name} has no rows to draw")
    own = function(experiment, "draw")
    panels = measured(recipe.panels, rows)
    count = max(1, len(panels))
    width, height = min(count, COLUMNS), math.ceil(count / COLUMNS)
    figure = Figure(figsize=(max(6.4, 4.8 * width), 4.2 * height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if own is not None:
        own(figure, list(rows))
    else:
        draw_panels(figure, panels, rows, width, height)
    figure.savefig(file, format="png")


def measured(panels: Sequence[Panel], rows: Sequence[Row]) -> list[Panel]:
    """Return the panels that have rows, or all if none has: those of other scales' arms have none."""
    return [panel for panel in panels if select(rows, panel.where)] or list(panels)


def known_columns(panels: Sequence[Panel]) -> set[str]:
    """Return the names of the columns that the panels use."""
    return {name for panel in panels for name in (panel.x, panel.y, panel.by, *panel.where) if name is not None}


def label(column: str) -> str:
    """Return a column's name in plain words."""
    return LABELS.get(column, column.replace("_", " "))


def draw_panels(figure: Figure, panels: Sequence[Panel], rows: Sequence[Row], width: int, height: int) -> None:
    """Draw all panels of a recipe in a grid."""
    axes = figure.subplots(height, width, squeeze=False).flatten().tolist()
    order: dict[str, list[Any]] = {}  # shared by the panels, so that a series has one colour in all of them
    for panel in panels:
        if panel.by:
            seen = order.setdefault(panel.by, [])
            seen += [n for n in dict.fromkeys(r.get(panel.by) for r in select(rows, panel.where)) if n not in seen]
    for axis, panel in zip(axes, panels, strict=False):
        draw_panel(axis, panel, select(rows, panel.where), order.get(panel.by or "", [None]))
    for axis in axes[len(panels) :]:
        axis.set_visible(False)


def draw_panel(axis: Axes, panel: Panel, rows: Sequence[Row], order: Sequence[Any] = (None,)) -> None:
    """Draw `y` over `x`: means over seeds, standard deviations as bars, categories side by side.

    `order` lists the values of `by`; a value's place gives its colour and marker. Rows of an older recipe may lack the
    panel's columns; a panel without rows says so.
    """
    rows = [row for row in rows if row.get(panel.y) is not None and row.get(panel.x) is not None]
    rows = [row for row in rows if panel.by is None or panel.by in row]
    if not rows:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
    names = list(dict.fromkeys(str(row[panel.x]) for row in rows if isinstance(row[panel.x], str)))
    present = {row.get(panel.by) for row in rows} if panel.by else {None}
    series = [name for name in order if name in present]
    for place_in, name in enumerate(series):
        number = order.index(name)
        same = [row for row in rows if panel.by is None or row.get(panel.by) == name]
        points: dict[Any, list[float]] = {}
        for row in same:
            points.setdefault(names.index(row[panel.x]) if names else row[panel.x], []).append(float(row[panel.y]))
        x = sorted(points)
        mean = [statistics.mean(points[place]) for place in x]
        spread = [statistics.stdev(points[place]) if len(points[place]) > 1 else 0.0 for place in x]
        shift = (place_in - (len(series) - 1) / 2) * 0.12 if names and len(series) > 1 else 0.0
        axis.errorbar(
            [place + shift for place in x],
            mean,
            yerr=spread,
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle="none" if names else "-" if number < len(COLORS) else "--",
            markersize=5,
            linewidth=1.2,
            capsize=2,
            label=None if name is None else str(name),
        )
    if names:
        slanted = max(len(name) for name in names) * len(names) > 40
        axis.set_xticks(range(len(names)), names, rotation=35 if slanted else 0, ha="right" if slanted else "center")
    elif "x" in panel.log:
        axis.set_xscale("log", base=2)
    if "y" in panel.log:
        axis.set_yscale("log")
    xlabel = panel.xlabel or ("" if names else label(panel.x))
    axis.set(title=panel.title, xlabel=xlabel, ylabel=panel.ylabel or label(panel.y))
    axis.grid(alpha=0.3)
    if len(series) > 1:
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(series) > 6 else {}
        axis.legend(frameon=False, fontsize=8, **beside)
