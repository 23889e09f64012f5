"""Pictures of matrices: weights, receptive fields, position terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from subquad.evaluation import drawing
from subquad.evaluation.drawing import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 2.0
"""Inches of a panel; many in a row are smaller."""
LARGEST = 0.5
"""The weight at the top of the scale."""


def _panel_inches(columns: int) -> float:
    return PANEL if columns <= 6 else max(1.2, PANEL * 6 / columns)


class Weights(NamedTuple):
    """A matrix of weights `[T, S]` to draw."""

    title: str
    matrix: np.ndarray
    causal: bool
    row: str = ""


def draw_weights(grid: Sequence[Sequence[Weights]], *, tokens: Sequence[str] = ()) -> Figure:
    """A grid of weight matrices on one scale; a single one shows the text's `tokens` beside it.

    Weights that are no distribution (some negative, or some above one) are shown by their size relative to the largest,
    which is at the top of the scale.
    """
    from matplotlib.colors import PowerNorm

    single = len(grid) == 1 and len(grid[0]) == 1
    inches = 6.5 if single else _panel_inches(max(len(line) for line in grid))
    columns = max(len(line) for line in grid)
    figure = drawing.new_figure(inches * columns + 0.9, (inches + 0.35) * len(grid) + 0.3)
    norm, colours = PowerNorm(0.4, 1e-30, LARGEST), drawing.palette()
    shown = [[Panel(_shown(w), w.title, w.row) for w in line] for line in grid]
    images = list(drawing.panels(figure, shown, norm, colours))
    bar = figure.colorbar(
        images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01, ticks=[0.02, 0.1, 0.25, 0.5], extend="max"
    )
    bar.set_label("weight", fontsize=10)
    if single and tokens:
        drawing.name_tokens(figure.axes[0], tokens)
    return figure


def _shown(weights: Weights) -> np.ndarray:
    size_TS = np.abs(weights.matrix)
    if (weights.matrix < 0).any() or size_TS.max(initial=0) > 1 + 1e-3:
        size_TS = size_TS / size_TS.max() * LARGEST
    return drawing.hide_future(size_TS) if weights.causal else size_TS


class Reach(NamedTuple):
    """A stack's receptive field: the first layer `[T, S]` after which t may depend on s (0: none)."""

    title: str
    first: np.ndarray
    causal: bool


def draw_reach(stacks: Sequence[Reach], *, layers: int) -> Figure:
    """For each stack the layer that first connects two tokens, and how many tokens the last one depends on."""
    from matplotlib.colors import BoundaryNorm

    grid = drawing.in_rows([Panel(_reached(stack), stack.title) for stack in stacks], 4)
    columns = len(grid[0])
    width, height = PANEL * columns + 1.1, (PANEL + 0.5) * len(grid)
    if columns <= 2:
        figure = drawing.new_figure(width + 4, max(height, 3.4))
        parts: Any = figure.subfigures(1, 2, width_ratios=[width, 4])
    else:
        figure = drawing.new_figure(width, height + 3)
        parts = figure.subfigures(2, 1, height_ratios=[height, 3])
    matrices, chart = parts
    norm = BoundaryNorm(np.arange(0.5, layers + 1), layers)
    images = list(drawing.panels(matrices, grid, norm, drawing.palette(layers)))
    ticks = list(range(1, layers + 1, max(1, layers // 12)))
    bar = matrices.colorbar(images[0], ax=matrices.axes, fraction=0.05, aspect=25, pad=0.02, ticks=ticks)
    bar.set_label("layer that first connects them (white: none)", fontsize=9)
    bar.ax.tick_params(length=0)
    lines = {
        stack.title: [int(((stack.first[-1] > 0) & (stack.first[-1] <= n)).sum()) for n in range(1, layers + 1)]
        for stack in stacks
    }
    axis = chart.subplots()
    drawing.lines(axis, range(1, layers + 1), lines, list(lines))
    axis.set_xlabel("layers", fontsize=9)
    axis.set_ylabel("tokens that the last one depends on", fontsize=9)
    axis.set_ylim(0, 1.05 * len(stacks[0].first))
    axis.set_xticks(ticks)
    return figure


def _reached(stack: Reach) -> np.ndarray:
    return drawing.hide_future(stack.first) if stack.causal else stack.first.astype(float)


def draw_positions(grid: Sequence[Sequence[Panel]]) -> Figure:
    """A grid of matrices of what positions add to the logits, on one scale, the future in grey."""
    from matplotlib.colors import Normalize

    shown = [[panel._replace(matrix=drawing.hide_future(panel.matrix)) for panel in line] for line in grid]
    values = np.concatenate([panel.matrix.ravel() for line in shown for panel in line])
    low, high = np.nanmin(values), np.nanmax(values)
    inches = _panel_inches(len(grid[0]))
    figure = drawing.new_figure(inches * len(grid[0]) + 1.2, (inches + 0.35) * len(grid) + 0.3)
    images = list(drawing.panels(figure, shown, Normalize(low, high if high > low else low + 1), drawing.palette()))
    bar = figure.colorbar(images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01)
    bar.set_label("added to the logit", fontsize=10)
    return figure
