"""The pictures of `subquad probe`: accuracy over length and depth or distance, and lines of accuracy or loss."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from subquad.evaluation import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from subquad.evaluation.probes import Score

CELL = 0.62
"""Inches of a cell of a heatmap."""
COLUMNS = 3
"""Heatmaps in a row."""


class Measured(NamedTuple):
    """The scores of one model at one length."""

    name: str
    length: int
    scores: Sequence[Score]


def draw_heatmaps(
    measured: Sequence[Measured], *, title: str, label: str, names: Mapping[tuple[float, float], str], chance: float
) -> Figure:
    """A panel for each model: a column is a length, a row one of the ranges in `names`; white: nothing was asked."""
    models = list(dict.fromkeys(entry.name for entry in measured))
    lengths = sorted({entry.length for entry in measured})
    grid = drawing.in_rows(models, COLUMNS)
    width = max(1.9, CELL * len(lengths)) * len(grid[0]) + 2.2
    figure = drawing.new_figure(max(width, 5.0), (CELL * 0.6 * len(names) + 0.75) * len(grid) + 0.8)
    _title(figure, title)
    axes = figure.subplots(len(grid), len(grid[0]), squeeze=False)
    images = []
    for r, line in enumerate(grid):
        for c, axis in enumerate(axes[r]):
            if c >= len(line):
                axis.set_axis_off()
                continue
            images.append(_heatmap(axis, [entry for entry in measured if entry.name == line[c]], lengths, list(names)))
            axis.set_title(line[c] if len(models) > 1 else "", fontsize=10)
            axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
            axis.set_yticks(range(len(names)), list(names.values()) if not c else [""] * len(names), fontsize=8)
            axis.tick_params(length=0)
            if r + 1 == len(grid) or c >= len(grid[r + 1]):
                axis.set_xlabel("tokens of the sequence", fontsize=9)
    figure.supylabel(label, fontsize=9)
    bar = figure.colorbar(images[0], ax=axes, fraction=0.04, aspect=25, pad=0.02)
    bar.set_label("accuracy (mark: chance)", fontsize=9)
    bar.ax.axhline(chance, color="#d55e00", linewidth=2)
    return figure


def _heatmap(
    axis: Axes, measured: Sequence[Measured], lengths: Sequence[int], ranges: Sequence[tuple[float, float]]
) -> AxesImage:
    """One model's panel."""
    from matplotlib.colors import Normalize

    values_RL = np.full((len(ranges), len(lengths)), np.nan)
    for entry in measured:
        for score in entry.scores:
            values_RL[ranges.index((score.start, score.stop)), lengths.index(entry.length)] = score.value
    colours = drawing.palette().with_extremes(bad=drawing.OUT_OF_REACH)
    _write(axis, values_RL)
    return axis.imshow(values_RL, cmap=colours, norm=Normalize(0, 1), aspect="auto", interpolation="nearest")


def _title(figure: Figure, title: str) -> None:
    """The title in as many lines as the width asks for."""
    letters = int(14 * figure.get_size_inches()[0])
    figure.suptitle(textwrap.fill(title, letters), fontsize=10)


def _write(axis: Axes, values_RL: np.ndarray) -> None:
    """Each cell's per cent, dark on bright and bright on dark."""
    for (row, column), value in np.ndenumerate(values_RL):
        if not np.isnan(value):
            colour = "black" if value > 0.5 else "white"
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)


def draw_lines(
    measured: Sequence[Measured], *, title: str, x: str, y: str, chance: float | None, doubling: bool
) -> Figure:
    """Value against the middle of each range, with two standard errors; `doubling` ranges have a logarithmic axis.

    One model has a line for each length; several have a panel for each length, and a line for each model.
    """
    models = list(dict.fromkeys(entry.name for entry in measured))
    lengths = sorted({entry.length for entry in measured})
    several = len(models) > 1
    panels = lengths if several else [0]
    figure = drawing.new_figure(8.2, 3.0 * len(panels) + 1.0 if several else 4.4)
    _title(figure, title)
    axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        lines = [entry for entry in measured if not several or entry.length == panel]
        for entry in lines:
            number = models.index(entry.name) if several else lengths.index(entry.length)
            _line(axis, entry, entry.name if several else f"{entry.length:,} tokens", number, doubling=doubling)
        if chance is not None:
            axis.axhline(chance, color="#7f7f7f", linestyle=":", linewidth=1.2, label="chance")
            axis.set_ylim(-0.03, 1.03)
            axis.set_xlim(0, 1)
        if several:
            axis.set_title(f"{panel:,} tokens", fontsize=10)
        axis.set_ylabel(y, fontsize=9)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    if doubling:
        axes[-1].set_xscale("log", base=2)
        axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, handlelength=4)
    axes[-1].set_xlabel(f"{x}; bars: two standard errors", fontsize=9)
    return figure


def _line(axis: Axes, entry: Measured, label: str, number: int, *, doubling: bool) -> None:
    """A range from a to before b of whole numbers stands at sqrt(a (b - 1)); of shares at their mean."""
    style = drawing.Style.number(number)
    x = [
        (score.start * (score.stop - 1)) ** 0.5 if doubling else (score.start + score.stop) / 2
        for score in entry.scores
    ]
    axis.errorbar(
        x,
        [score.value for score in entry.scores],
        [2 * score.error for score in entry.scores],
        color=style.color,
        linestyle=style.linestyle,
        marker=style.marker,
        markersize=4,
        linewidth=1.2,
        capsize=2,
        label=label,
    )
