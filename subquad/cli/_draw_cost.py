"""The picture of costs against length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from subquad.evaluation import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from subquad.cli._costs import Measured


def draw_cost(measured: Sequence[Measured], *, title: str) -> Figure:
    """FLOPs of the mixing, forward, and bytes of the state against the tokens, both axes logarithmic."""
    figure = drawing.new_figure(8.2, 8.2)
    figure.suptitle(title, fontsize=11)
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = sorted({entry.cost.tokens for entry in measured})
    flops: dict[str, list[float]] = {}
    state: dict[str, list[float]] = {}
    for entry in sorted(measured, key=lambda entry: entry.cost.tokens):
        flops.setdefault(_label(entry), []).append(entry.cost.mixing_flops)
        if entry.kind == "causal":
            state.setdefault(entry.name, []).append(entry.cost.state_bytes)
    drawing.lines(above, lengths, flops, list(flops))
    above.set_ylabel("FLOPs of the mixing, forward", fontsize=9)
    drawing.lines(below, lengths, state, list(flops))
    below.set_ylabel("bytes of the state after so many tokens", fontsize=9)
    for axis in (above, below):
        _logarithmic(axis, lengths)
    below.set_xlabel("tokens", fontsize=9)
    return figure


def _label(entry: Measured) -> str:
    return entry.name if entry.kind == "causal" else f"{entry.name} ({entry.kind})"


def _logarithmic(axis: Axes, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axis.tick_params(labelsize=9)
