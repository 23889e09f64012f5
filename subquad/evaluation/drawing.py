"""Pictures of weights, receptive fields, position terms and costs.

Colours are safe for colour-blind readers, and the same picture always gives the same file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from subquad.attention import Cost
from subquad.disk import aside
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
"""The palette of Okabe and Ito, with grey instead of yellow, which is pale on white."""
DASHES = ("-", "--", ":")
MARKERS = "os^DvPX*<>"
DPI = 110
FONT = "DejaVu Sans Mono"
"""Shipped with matplotlib."""
LABELLED = 40
"""Most tokens that are written beside a matrix."""
PANEL = 2.0
"""Width of a panel in inches; many in a row are smaller."""
LARGEST = 0.5
"""Weight at the top of the colour scale."""
SMALLEST = 1e-30
"""Weight at the bottom of the colour scale; that of a token that is not read is below it."""
TICKS = (0.0, 0.02, 0.1, 0.25, LARGEST)


class Style(NamedTuple):
    """The look of a line. The first 24 differ; neighbours differ in colour, dashes and marker."""

    color: str
    linestyle: str
    marker: str

    @classmethod
    def number(cls, i: int) -> Style:
        """Return the style of line number i."""
        return cls(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])


def check_file(path: str) -> Path:
    """Return the path of a picture to write; `ValueError` for an unknown format or a missing folder."""
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"a picture's name must end with {' or '.join(SUFFIXES)}, got {path!r}")
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} for {file.name}")
    return file


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches; it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write the figure, without dates and random identifiers, so that equal figures give equal bytes."""
    import matplotlib

    nothing = {"Software": None} if file.suffix == ".png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context({"svg.hashsalt": "subquad"}), aside(file) as draft:
        figure.savefig(draft, format=file.suffix[1:], metadata=nothing)


def palette(levels: int | None = None) -> Colormap:
    """Return cividis, continuous or in `levels` levels; NaN is grey (future), values below the scale are white."""
    import matplotlib

    return matplotlib.colormaps["cividis"].resampled(levels or 256).with_extremes(bad=FUTURE, under=OUT_OF_REACH)


class Panel(NamedTuple):
    """A matrix to draw: rows are reading tokens, columns are tokens read."""

    matrix: np.ndarray
    title: str = ""
    row: str = ""
    """Label of the row of panels, shown at its left."""
    causal: bool = False
    keys: Sequence[str] = ()
    """Names of the columns, of which the last are those of the rows; empty: their numbers."""


def hide_future(panel: Panel) -> Panel:
    """Return the panel in floats, with NaN right of the diagonal if it is causal; the last row reads all columns."""
    shown_TS = panel.matrix.astype(float)
    if panel.causal:
        T, S = shown_TS.shape
        shown_TS[np.triu(np.ones((T, S), dtype=bool), 1 + S - T)] = np.nan
    return panel._replace(matrix=shown_TS)


def panels(
    figure: Figure | SubFigure,
    grid: Sequence[Sequence[Panel]],
    norm: Normalize,
    colours: Colormap,
    *,
    title: str,
    white: str = "",
) -> list[AxesImage]:
    """Draw a grid of matrices with one scale and a title; `white` says what zeros mean. Return the images."""
    values = np.concatenate([panel.matrix.ravel() for line in grid for panel in line])
    notes = ["grey: later token"] if np.isnan(values).any() else []
    notes += [f"white: {white}"] if white and (values == 0).any() else []
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(", ".join(notes), fontsize=8)
    images = []
    for axis, panel, left, bottom in places(figure, grid):
        axis.set_title(panel.title, fontsize=10)
        own = len(panel.keys) > 0
        keys = panel.keys if own else list(map(str, range(panel.matrix.shape[1])))
        for ticks, size in ((axis.set_xticks, len(keys)), (axis.set_yticks, panel.matrix.shape[0])):
            at = sorted({0, size - 1})
            ticks(at, [keys[len(keys) - size + i] for i in at])
        axis.tick_params(labelsize=7, length=2, labelbottom=bottom or own, labelleft=left or own)
        if bottom:
            axis.set_xlabel("token read", fontsize=9)
        if left:
            axis.set_ylabel(f"{panel.row}\nreading token" if panel.row else "reading token", fontsize=9)
        images.append(axis.imshow(panel.matrix, cmap=colours, norm=norm, interpolation="nearest"))
    return images


def places(figure: Figure | SubFigure, grid: Sequence[Sequence[Item]]) -> Iterator[tuple[Axes, Item, bool, bool]]:
    """Yield axes, item, whether it is first in its row, and whether it is last in its column."""
    axes = figure.subplots(len(grid), max(len(line) for line in grid), squeeze=False)
    for r, line in enumerate(grid):
        for c, axis in enumerate(axes[r]):
            if c < len(line):
                yield axis, line[c], c == 0, r + 1 == len(grid) or c >= len(grid[r + 1])
            else:
                axis.set_axis_off()


def name_tokens(axis: Axes, tokens: Sequence[str], rows: int) -> None:
    """Write tokens below the matrix and the last `rows` of them beside it, if there are at most `LABELLED`."""
    if len(tokens) > LABELLED:
        return
    shown = [visible(token) for token in tokens]
    font: dict[str, Any] = {"family": FONT, "fontsize": max(7, min(10, 250 / len(shown)))}
    axis.set_xticks(range(len(shown)), shown, rotation=0 if max(map(len, shown)) == 1 else 90, **font)
    axis.set_yticks(range(rows), shown[-rows:], **font)
    axis.tick_params(length=0)


def visible(token: str) -> str:
    """Return a token for display: blanks as symbols, `?` for characters that the font lacks, dollars escaped."""
    from matplotlib.font_manager import findfont, get_font

    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    known = get_font(findfont(FONT)).get_charmap()
    return "".join(c if c.isprintable() and ord(c) in known else "?" for c in shown).replace("$", r"\$")


def in_rows(items: Sequence[Item], columns: int) -> list[list[Item]]:
    """Arrange items in as few rows of at most `columns` as possible, about equally long."""
    rows = -(-len(items) // columns)
    width = -(-len(items) // rows)
    return [list(items[start : start + width]) for start in range(0, len(items), width)]


def lines(axis: Axes, x: Sequence[float], named: Mapping[str, Sequence[float]], styles: Sequence[str]) -> None:
    """Draw a line for each name, styled by its place in `styles`; equal lines are drawn once, with all names.

    The legend at the right is ordered by the lines' last values, the highest first.
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
            # Lines that overlap stay visible: later ones are thinner, and markers alternate.
            linewidth=2.2 - 1.2 * i / len(groups),
            markevery=(i % 3, 3) if len(groups) > len(COLOURS) else None,
            label=textwrap.fill(", ".join(names), 28),
        )
    if len(groups) > 1:
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, handlelength=4)
    axis.grid(alpha=0.3)


def _panel_inches(columns: int) -> float:
    return PANEL if columns <= 6 else max(1.2, PANEL * 6 / columns)


def draw_weights(grid: Sequence[Sequence[Panel]], *, title: str, tokens: Sequence[str] = ()) -> Figure:
    """Draw a grid of weight matrices on one scale; a single matrix has the `tokens` beside it.

    Weights that aren't a distribution (negative or above one) are marked with a star and shown by their size relative
    to the largest, which is put at the top of the scale.
    """
    from matplotlib.colors import PowerNorm

    single = len(grid) == 1 and len(grid[0]) == 1
    columns = max(len(line) for line in grid)
    inches = 6.5 if single else _panel_inches(columns)
    figure = new_figure(inches * columns + 1.3, (inches + 0.3) * len(grid) + 0.8)
    shown = [[hide_future(_scaled(panel)) for panel in line] for line in grid]
    images = panels(figure, shown, PowerNorm(0.4, SMALLEST, LARGEST), palette(), title=title, white="not read")
    starred = {panel.title.endswith("*") for line in shown for panel in line}
    bar = figure.colorbar(images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01)
    words = []
    for weight in TICKS:
        size = f"{weight:g}" + (" or more" if weight == LARGEST else "")
        share = f"{weight / LARGEST:g}"
        words.append(size if starred == {False} else share if starred == {True} else f"{size} (*: {share})")
    bar.set_ticks([max(weight, SMALLEST) for weight in TICKS], labels=words, fontsize=8)
    share = "|weight| as a share of the panel's largest"
    label = "weight" if starred == {False} else share if starred == {True} else f"weight (*: {share})"
    bar.set_label(label, fontsize=9)
    if single and tokens:
        panel = shown[0][0]
        named = [tokens[int(key)] if key.isdigit() else key for key in panel.keys] or tokens
        name_tokens(figure.axes[0], named, panel.matrix.shape[0])
    return figure


def _scaled(panel: Panel) -> Panel:
    """Return the panel of weights, scaled and marked if they aren't a distribution."""
    size_TS = np.abs(panel.matrix)
    if (panel.matrix < 0).any() or size_TS.max(initial=0) > 1 + 1e-3:
        return panel._replace(matrix=size_TS / size_TS.max() * LARGEST, title=f"{panel.title} *")
    return panel


def draw_reach(stacks: Sequence[Panel], *, layers: int) -> Figure:
    """Draw, for each stack, the layer that first connects two tokens (0: none) and what the last token sees."""
    from matplotlib.colors import BoundaryNorm

    grid = in_rows([hide_future(stack) for stack in stacks], 4)
    columns = len(grid[0])
    width, height = PANEL * columns + 1.3, (PANEL + 0.5) * len(grid) + 0.6
    if columns <= 2:
        figure = new_figure(width + 4.4, max(height, 3.6))
        parts: Any = figure.subfigures(1, 2, width_ratios=[width, 4.4])
    else:
        figure = new_figure(width, height + 3.2)
        parts = figure.subfigures(2, 1, height_ratios=[height, 3.2])
    matrices, chart = parts
    norm = BoundaryNorm(np.arange(0.5, layers + 1), layers)
    title = f"Receptive field over {len(stacks[0].matrix)} tokens"
    images = panels(matrices, grid, norm, palette(layers), title=title, white="never connected")
    ticks = list(range(1, layers + 1, max(1, layers // 12)))
    bar = matrices.colorbar(images[0], ax=matrices.axes, fraction=0.05, aspect=25, pad=0.02, ticks=ticks)
    bar.set_label("first layer that connects them", fontsize=9, labelpad=8)
    bar.ax.tick_params(length=0)
    counts = {
        stack.title: [int(((stack.matrix[-1] > 0) & (stack.matrix[-1] <= n)).sum()) for n in range(1, layers + 1)]
        for stack in stacks
    }
    axis = chart.subplots()
    lines(axis, range(1, layers + 1), counts, list(counts))
    axis.set_title("Reach of the last token", fontsize=11)
    axis.set_xlabel("number of layers", fontsize=9)
    axis.set_ylabel("tokens it can depend on", fontsize=9)
    axis.set_ylim(0, 1.05 * len(stacks[0].matrix))
    axis.set_xticks(ticks)
    return figure


def draw_positions(grid: Sequence[Sequence[Panel]], *, title: str) -> Figure:
    """Draw a grid of matrices of position terms on one scale."""
    from matplotlib.colors import Normalize

    shown = [[hide_future(panel) for panel in line] for line in grid]
    values = np.concatenate([panel.matrix.ravel() for line in shown for panel in line])
    low, high = np.nanmin(values), np.nanmax(values)
    inches = _panel_inches(len(grid[0]))
    figure = new_figure(inches * len(grid[0]) + 1.6, (inches + 0.3) * len(grid) + 0.8)
    norm = Normalize(low, high if high > low else low + 1)
    images = panels(figure, shown, norm, palette(), title=title)
    bar = figure.colorbar(images[0], ax=figure.axes, fraction=0.05, aspect=30, pad=0.01)
    bar.set_label("added to the logit", fontsize=9)
    return figure


def draw_cost(measured: Sequence[Measured], *, title: str) -> Figure:
    """Draw a row for each mechanism: forward FLOPs of mixing per token, without projections, and bytes of state.

    A row joins the values of all lengths, on a logarithmic scale, and is coloured if the last two differ.
    """
    rows: dict[str, list[Cost]] = {}
    for entry in sorted(measured, key=lambda entry: entry.cost.tokens):
        label = entry.name if entry.kind == "causal" else f"{entry.name} ({entry.kind})"
        rows.setdefault(label, []).append(entry.cost)
    named = sorted(rows, key=lambda label: rows[label][-1].mixing_flops)
    figure = new_figure(9.5, 0.24 * len(named) + 2.0)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, sharey=True)
    level, growing, hollow = COLOURS[5], COLOURS[4], "#ffffff"
    for axis, what in ((left, "mixing FLOPs per token, forward pass"), (right, "state in decoding (bytes)")):
        for place, label in enumerate(named):
            x = [cost.mixing_flops / cost.tokens if axis is left else cost.state_bytes for cost in rows[label]]
            if not x[-1]:
                axis.annotate("none", (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
                continue
            colour = growing if x[-1] > 1.05 * x[max(0, len(x) - 2)] else level
            axis.plot(x, [place] * len(x), color=colour, linewidth=1.5, marker="|", markersize=5)
            axis.plot(x[0], place, "o", color=colour, markersize=7, markerfacecolor=hollow)
            axis.plot(x[-1], place, "o", color=colour, markersize=5)
        axis.set_xscale("log")
        axis.set_xlabel(what, fontsize=9)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    left.set_yticks(range(len(named)), named, fontsize=8)
    shortest, longest = (f"{rows[named[0]][i].tokens:,} tokens" for i in (0, -1))
    marks: dict[str, dict[str, Any]] = {
        shortest: {"color": "black", "marker": "o", "markersize": 7, "markerfacecolor": hollow},
        longest: {"color": "black", "marker": "o", "markersize": 5},
        "level at the end": {"color": level},
        "growing with the length": {"color": growing},
    }
    handles = [left.plot([], [], label=label, **mark)[0] for label, mark in marks.items()]
    for handle in handles:  # of the legend alone
        handle.remove()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
