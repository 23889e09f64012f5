"""Pictures of weights, receptive fields, position terms and costs.

They share colours that the colour-blind tell apart, a grid of matrices, and files that are the same each time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from subquad.models.costs import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

Item = TypeVar("Item")
SUFFIXES = (".png", ".svg")
FUTURE, OUT_OF_REACH = "#dcdcdc", "#ffffff"
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#7f7f7f")
"""Okabe and Ito's palette; grey for its yellow, which is pale on white."""
DASHES = ("-", "--", ":")
MARKERS = "os^DvPX*<>"
DPI = 110
FONT = "DejaVu Sans Mono"
"""Comes with matplotlib."""
LABELLED = 40
"""Up to so many tokens a picture of a text has them beside it."""
PANEL = 2.0
"""Inches of a panel; many in a row are smaller."""
LARGEST = 0.5
"""The weight at the top of the scale."""


class Style(NamedTuple):
    """The look of a line; no two of the first 24 are alike, and those of one colour differ in marker and dashes."""

    color: str
    linestyle: str
    marker: str

    @classmethod
    def number(cls, i: int) -> Style:
        """The style of line number i."""
        return cls(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)], MARKERS[i % len(MARKERS)])


def check_file(path: str) -> Path:
    """The path of a picture to write; `ValueError` where its name says no format or its folder is not there."""
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"a picture's name must end with {' or '.join(SUFFIXES)}, got {path!r}")
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} to write {file.name} to")
    return file


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write the figure; the same figure gives the same bytes."""
    import matplotlib

    nothing = {"Software": None} if file.suffix == ".png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context({"svg.hashsalt": "subquad"}):
        figure.savefig(file, metadata=nothing)


def palette(levels: int | None = None) -> Colormap:
    """cividis, continuous or in so many levels; NaN is the future's grey, what lies under the scale is out of reach."""
    import matplotlib

    return matplotlib.colormaps["cividis"].resampled(levels or 256).with_extremes(bad=FUTURE, under=OUT_OF_REACH)


def hide_future(matrix_TS: np.ndarray) -> np.ndarray:
    """A copy in floats whose entries right of the diagonal are NaN."""
    shown_TS = matrix_TS.astype(float)
    shown_TS[np.triu(np.ones(matrix_TS.shape, dtype=bool), 1)] = np.nan
    return shown_TS


class Panel(NamedTuple):
    """A matrix to draw: a row is a token that reads, a column one that is read."""

    matrix: np.ndarray
    title: str = ""
    row: str = ""
    """What the whole row of panels is, at the left of its first panel."""


def panels(
    figure: Figure | SubFigure, grid: Sequence[Sequence[Panel]], norm: Normalize, colours: Colormap
) -> Iterator[AxesImage]:
    """Draw a grid of matrices with one scale. Gives each image."""
    for axis, panel, left, bottom in places(figure, grid):
        axis.set_title(panel.title, fontsize=11)
        axis.set_xticks([])
        axis.set_yticks([])
        if bottom:
            axis.set_xlabel("token that is read", fontsize=9)
        if left:
            axis.set_ylabel(f"{panel.row}\ntoken that reads" if panel.row else "token that reads", fontsize=9)
        yield axis.imshow(panel.matrix, cmap=colours, norm=norm, interpolation="nearest")


def places(figure: Figure | SubFigure, grid: Sequence[Sequence[Item]]) -> Iterator[tuple[Axes, Item, bool, bool]]:
    """Yield axes for each item, and whether it is the first of its row and the last of its column.

    Rows may be shorter than the longest.
    """
    axes = figure.subplots(len(grid), max(len(line) for line in grid), squeeze=False)
    for r, line in enumerate(grid):
        for c, axis in enumerate(axes[r]):
            if c < len(line):
                yield axis, line[c], c == 0, r + 1 == len(grid) or c >= len(grid[r + 1])
            else:
                axis.set_axis_off()


def name_tokens(axis: Axes, tokens: Sequence[str]) -> None:
    """Write a text's tokens beside the matrix, where they are few enough to be read."""
    if len(tokens) > LABELLED:
        return
    shown = [visible(token) for token in tokens]
    font: dict[str, Any] = {"family": FONT, "fontsize": max(7, min(10, 250 / len(shown)))}
    axis.set_xticks(range(len(shown)), shown, rotation=0 if max(map(len, shown)) == 1 else 90, **font)
    axis.set_yticks(range(len(shown)), shown, **font)
    axis.tick_params(length=0)


def visible(token: str) -> str:
    """A token as a picture can show it: blanks as signs, `?` for what the font lacks, no dollar that opens maths."""
    from matplotlib.font_manager import findfont, get_font

    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    known = get_font(findfont(FONT)).get_charmap()
    return "".join(c if c.isprintable() and ord(c) in known else "?" for c in shown).replace("$", r"\$")


def in_rows(items: Sequence[Item], columns: int) -> list[list[Item]]:
    """The items in as few rows of at most so many as hold them, the rows about equally long."""
    rows = -(-len(items) // columns)
    width = -(-len(items) // rows)
    return [list(items[start : start + width]) for start in range(0, len(items), width)]


def lines(axis: Axes, x: Sequence[float], named: Mapping[str, Sequence[float]], styles: Sequence[str]) -> None:
    """Draw a line for each name, in the style that its place in `styles` gives; equal lines are one, named together.

    The legend, at the right, goes from the highest end to the lowest.
    """
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, y in named.items():
        groups.setdefault(tuple(y), []).append(name)
    for i, (y, names) in enumerate(sorted(groups.items(), key=lambda group: -group[0][-1])):
        colour, dashes, marker = Style.number(styles.index(names[0]))
        axis.plot(
            x,
            y,
            color=colour,
            linestyle=dashes,
            marker=marker,
            markersize=5,
            # Of lines that lie on one another the lower shows beside the upper, and their markers alternate.
            linewidth=2.2 - 1.2 * i / len(groups),
            markevery=(i % 3, 3) if len(groups) > len(COLOURS) else None,
            label=textwrap.fill(", ".join(names), 28),
        )
    if len(groups) > 1:
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, handlelength=4)
    axis.grid(alpha=0.3)


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
    columns = max(len(line) for line in grid)
    inches = 6.5 if single else _panel_inches(columns)
    figure = new_figure(inches * columns + 0.9, (inches + 0.35) * len(grid) + 0.3)
    norm, colours = PowerNorm(0.4, 1e-30, LARGEST), palette()
    shown = [[Panel(_shown(w), w.title, w.row) for w in line] for line in grid]
    images = list(panels(figure, shown, norm, colours))
    bar = figure.colorbar(
        images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01, ticks=[0.02, 0.1, 0.25, 0.5], extend="max"
    )
    bar.set_label("weight", fontsize=10)
    if single and tokens:
        name_tokens(figure.axes[0], tokens)
    return figure


def _shown(weights: Weights) -> np.ndarray:
    size_TS = np.abs(weights.matrix)
    if (weights.matrix < 0).any() or size_TS.max(initial=0) > 1 + 1e-3:
        size_TS = size_TS / size_TS.max() * LARGEST
    return hide_future(size_TS) if weights.causal else size_TS


class Reach(NamedTuple):
    """A stack's receptive field: the first layer `[T, S]` after which t may depend on s (0: none)."""

    title: str
    first: np.ndarray
    causal: bool


def draw_reach(stacks: Sequence[Reach], *, layers: int) -> Figure:
    """For each stack the layer that first connects two tokens, and how many tokens the last one depends on."""
    from matplotlib.colors import BoundaryNorm

    reached = [hide_future(stack.first) if stack.causal else stack.first.astype(float) for stack in stacks]
    grid = in_rows([Panel(first, stack.title) for first, stack in zip(reached, stacks, strict=True)], 4)
    columns = len(grid[0])
    width, height = PANEL * columns + 1.1, (PANEL + 0.5) * len(grid)
    if columns <= 2:
        figure = new_figure(width + 4, max(height, 3.4))
        parts: Any = figure.subfigures(1, 2, width_ratios=[width, 4])
    else:
        figure = new_figure(width, height + 3)
        parts = figure.subfigures(2, 1, height_ratios=[height, 3])
    matrices, chart = parts
    norm = BoundaryNorm(np.arange(0.5, layers + 1), layers)
    images = list(panels(matrices, grid, norm, palette(layers)))
    ticks = list(range(1, layers + 1, max(1, layers // 12)))
    bar = matrices.colorbar(images[0], ax=matrices.axes, fraction=0.05, aspect=25, pad=0.02, ticks=ticks)
    bar.set_label("layer that first connects them (white: none)", fontsize=9)
    bar.ax.tick_params(length=0)
    counts = {
        stack.title: [int(((stack.first[-1] > 0) & (stack.first[-1] <= n)).sum()) for n in range(1, layers + 1)]
        for stack in stacks
    }
    axis = chart.subplots()
    lines(axis, range(1, layers + 1), counts, list(counts))
    axis.set_xlabel("layers", fontsize=9)
    axis.set_ylabel("tokens that the last one depends on", fontsize=9)
    axis.set_ylim(0, 1.05 * len(stacks[0].first))
    axis.set_xticks(ticks)
    return figure


def draw_positions(grid: Sequence[Sequence[Panel]]) -> Figure:
    """A grid of matrices of what positions add to the logits, on one scale, the future in grey."""
    from matplotlib.colors import Normalize

    shown = [[panel._replace(matrix=hide_future(panel.matrix)) for panel in line] for line in grid]
    values = np.concatenate([panel.matrix.ravel() for line in shown for panel in line])
    low, high = np.nanmin(values), np.nanmax(values)
    inches = _panel_inches(len(grid[0]))
    figure = new_figure(inches * len(grid[0]) + 1.2, (inches + 0.35) * len(grid) + 0.3)
    images = list(panels(figure, shown, Normalize(low, high if high > low else low + 1), palette()))
    bar = figure.colorbar(images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01)
    bar.set_label("added to the logit", fontsize=10)
    return figure


def draw_cost(measured: Sequence[Measured], *, title: str) -> Figure:
    """FLOPs of the mixing, forward, and bytes of the state against the tokens, both axes logarithmic."""
    figure = new_figure(8.2, 8.2)
    figure.suptitle(title, fontsize=11)
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = sorted({entry.cost.tokens for entry in measured})
    flops: dict[str, list[float]] = {}
    state: dict[str, list[float]] = {}
    for entry in sorted(measured, key=lambda entry: entry.cost.tokens):
        label = entry.name if entry.kind == "causal" else f"{entry.name} ({entry.kind})"
        flops.setdefault(label, []).append(entry.cost.mixing_flops)
        if entry.kind == "causal":
            state.setdefault(entry.name, []).append(entry.cost.state_bytes)
    lines(above, lengths, flops, list(flops))
    above.set_ylabel("FLOPs of the mixing, forward", fontsize=9)
    lines(below, lengths, state, list(flops))
    below.set_ylabel("bytes of the state after so many tokens", fontsize=9)
    for axis in (above, below):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axis.tick_params(labelsize=9)
    below.set_xlabel("tokens", fontsize=9)
    return figure
